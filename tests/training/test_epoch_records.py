"""What is kept of an epoch: by hand from counts, tiles of one image together, and the same after a kill."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.killed_runs import start, train_once, wait_until
from helpers.runs import stop_after
from helpers.small_runs import ROW
from helpers.steps import make_settings
from train_unet import train
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.tiling import WholeImages, tile_images
from unet_trainer.loading.wait_advice import EpochTimes
from unet_trainer.model.metrics import compute_scores
from unet_trainer.runs.event_log import read_events
from unet_trainer.runs.run_summary import read_run_summary
from unet_trainer.training.epoch_records import epoch_facts, val_scores_csv
from unet_trainer.training.evaluation import Evaluation

PAIRS = [Pair(name, Path(f"data/images/{name}.png"), Path(f"data/masks/{name}.png")) for name in ("a", "b")]
TIMES = EpochTimes(images_per_second=10.0, data_wait=0.0, read_seconds=0.25, augment_seconds=0.5, num_workers=1)


@pytest.fixture
def config():
    return make_settings().taken


def evaluation(matrix, num_classes=1):
    scores = compute_scores(torch.tensor(matrix), num_classes)
    return Evaluation(0.5, scores, None, torch.zeros(1, 2, 3, dtype=torch.int64), seconds=1.5)


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


def test_an_epoch_has_its_row_its_classes_its_matrix_and_its_stages(config):
    facts = epoch_facts({**ROW, "seconds": 4.0}, evaluation([[5, 1], [3, 2]]), True, TIMES, config)
    assert facts["classes"] == {"foreground": {"iou": 2 / 6, "dice": 4 / 8, "precision": 2 / 3, "recall": 2 / 5}}
    assert facts["confusion"] == [[5, 1], [3, 2]]
    assert (facts["epoch"], facts["val_iou"], facts["best"]) == (1, 0.5, True)
    assert facts["stages"] == {
        "train_seconds": 2.5,
        "val_seconds": 1.5,
        "read_seconds_per_image": 0.25,
        "augment_seconds_per_image": 0.5,
    }


def test_a_class_that_does_not_occur_has_no_scores(config):
    facts = epoch_facts(ROW, evaluation([[8, 0], [0, 0]]), False, None, config)
    assert facts["classes"] == {"foreground": dict.fromkeys(("iou", "dice", "precision", "recall"))}


def test_every_image_has_its_row(config):
    dataset = SimpleNamespace(pairs=PAIRS, tiling=WholeImages((4, 4), 2))
    counts = np.array([[[10, 12, 11], [3, 4, 5]], [[14, 16, 14], [0, 0, 2]]])
    rows = rows_of(val_scores_csv(dataset, counts, Path("data"), config))
    assert [(row["image"], row["mask"]) for row in rows] == [("images/b.png", "masks/b.png"), ("images/a.png", "masks/a.png")]
    assert [row["iou"] for row in rows] == ["0.000000", "0.500000"]
    assert [row["wrong_pixels"] for row in rows] == ["2", "3"]


def test_tiles_of_one_image_count_together(config):
    tiling = tile_images([(4, 8), (4, 4)], (4, 4))
    num_tiles = [tile.pair for tile in tiling.tiles].count(0)
    assert num_tiles > 1
    counts = np.array([[[1, 1, 1], [2, 3, 4]]] * num_tiles + [[[9, 9, 9], [1, 1, 1]]])
    rows = rows_of(val_scores_csv(SimpleNamespace(pairs=PAIRS, tiling=tiling), counts, Path("data"), config))
    assert [(row["image"], row["hit_pixels"], row["truth_pixels"]) for row in rows] == [
        ("images/a.png", str(2 * num_tiles), str(3 * num_tiles)),
        ("images/b.png", "1", "1"),
    ]


def kept(folder):
    """What a run keeps, without what depends on the clock."""
    summary = read_run_summary(folder)
    epochs = [(epoch.number, epoch.get("val_iou"), epoch.classes, epoch.confusion) for epoch in summary.epochs]
    return epochs, (folder / "val_scores.csv").read_text()


@pytest.mark.usefixtures("small_network")
def test_images_add_up_to_the_confusion_matrix_of_the_best_epoch(tiny_config):
    result = train(tiny_config)
    summary = read_run_summary(result.run_dir)
    counts = [score.classes["foreground"] for score in summary.image_scores]
    (_, false), (missed, hits) = summary.best.confusion
    assert sum(one.hits for one in counts) == hits
    assert sum(one.truth for one in counts) == missed + hits
    assert sum(one.predicted for one in counts) == false + hits
    assert sum(score.wrong_pixels for score in summary.image_scores) == false + missed
    assert summary.best.number == result.best_epoch
    assert summary.best.classes["foreground"].iou == result.best_val_iou


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupted_run_keeps_what_an_uninterrupted_one_does(after, tiny_config):
    straight = train(tiny_config, num_epochs=3, run_name="straight").run_dir
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, num_epochs=3, run_name="broken", on_epoch=stop_after(after))
    broken = train(tiny_config, num_epochs=3, run_name="broken", resume="auto").run_dir
    assert kept(broken) == kept(straight)
    events = read_run_summary(broken).events
    assert [event.kind for event in events if event.kind not in ("note", "warning")] == [
        "start",
        "interrupted",
        "resumed",
        "finished",
    ]


def test_a_killed_run_keeps_what_an_uninterrupted_one_does(tiny_config, tmp_path):
    settings = {**tiny_config, "num_epochs": 4, "run_name": "killed", "resume": "auto"}
    folder = Path(tiny_config["checkpoint_dir"]) / "killed"
    process = start(train_once, settings, str(tmp_path / "log"))
    wait_until(lambda: (folder / "previous.pt").exists())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    again = start(train_once, settings, str(tmp_path / "log"))
    again.join()
    straight = start(train_once, {**settings, "run_name": "straight"}, str(tmp_path / "log"))
    straight.join()
    assert (again.exitcode, straight.exitcode) == (0, 0), (tmp_path / "log").read_text()
    assert kept(folder) == kept(folder.parent / "straight")
    assert [event["kind"] for event in read_events(folder)].count("start") == 2
