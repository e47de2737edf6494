"""The files that a run writes of itself: metrics.csv, val_scores.csv, run.json, and what is in them."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.runs import stop_after
from helpers.steps import make_settings
from train_unet import train
from unet_trainer.data.pairs import Pair
from unet_trainer.images.tiling import WholeImages, tile_images
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import (
    COLUMNS,
    ClassCounts,
    image_score,
    read_metrics,
    read_val_scores,
    val_scores_text,
    worst_first,
    write_metrics,
)
from unet_trainer.training.evaluation import val_scores_csv


def metrics_row(epoch, **changes):
    values = (epoch, 0.5, 1 / 3, 0.25, 0.75, 0.857142857, 1e-5, 12.3456789, 1234567.0, 0.0, 0, 0, 2.0, 3.0)
    return {**dict(zip(COLUMNS, values, strict=True)), **changes}


def test_the_table_has_a_row_an_epoch_with_empty_cells_for_what_an_earlier_version_did_not_have(tmp_path):
    assert ", ".join(COLUMNS) == (  # those of the documentation
        "epoch, train_loss, val_loss, train_iou, val_iou, val_dice, learning_rate, seconds, images_per_second, data_wait, "
        "skipped_steps, nan_steps, peak_memory_gib, peak_reserved_gib"
    )
    old = {name: value for name, value in metrics_row(1).items() if name not in ("nan_steps", "peak_reserved_gib")}
    path = tmp_path / "metrics.csv"
    write_metrics(path, [old, dict(reversed(metrics_row(2, skipped_steps=3, nan_steps=1, val_iou=math.nan).items()))])
    assert path.read_bytes().decode() == (
        ",".join(COLUMNS) + "\n"
        "1,0.5,0.333333,0.25,0.75,0.857143,1e-05,12.3457,1.23457e+06,0,0,,2,\n"
        "2,0.5,0.333333,0.25,nan,0.857143,1e-05,12.3457,1.23457e+06,0,3,1,2,3\n"
    )
    first, second = read_metrics(path)
    assert (set(first), set(second)) == (set(old), set(COLUMNS))


# Of background and foreground: pixels in both, in truth, in prediction; 100 in all.
GOOD = [[80, 85, 85], [10, 15, 15]]  # 10 of 20 foreground pixels: IoU 0.5, wrong 10
BAD = [[88, 98, 90], [0, 2, 10]]  # IoU 0, wrong 12
EMPTY = [[100, 100, 100], [0, 0, 0]]
HEADER = "image,mask,hit_pixels a,truth_pixels a,predicted_pixels a,wrong_pixels,counted_pixels\n"


def score_of(name, counts, classes=("cell",)):
    return image_score(f"images/{name}.png", f"masks/{name}.png", counts, classes)


def test_scores_are_those_computed_by_hand():
    counts, nothing = ClassCounts(hits=10, truth=15, predicted=20), ClassCounts(0, 0, 0)
    assert (counts.iou, counts.score("dice")) == (10 / 25, 20 / 35)
    assert (nothing.iou, nothing.score("dice")) == (None, None)
    score = score_of("a", GOOD)  # the background counts among right pixels, but is not reported
    assert (list(score.classes), score.iou, score.wrong_pixels, score.counted_pixels) == (["cell"], 0.5, 10, 100)
    several = score_of("a", [[5, 10, 5], [0, 0, 5], [0, 0, 0]], ("sky", "road", "car"))
    assert (several.classes["road"].iou, several.classes["car"].iou) == (0.0, None)
    assert (several.iou, several.score("dice")) == (0.5, 10 / 15)  # of the sky: the truth has no road
    assert score_of("a", [[95, 100, 95], [0, 0, 5]]).iou == 0.0  # one class alone: its own score


def test_the_table_has_the_worst_first_and_is_read_back(tmp_path):
    counts = {"empty": EMPTY, "good": GOOD, "bad\udce4": BAD, "worse": [[70, 98, 70], [0, 2, 30]]}
    scores = [score_of(*item) for item in counts.items()]
    assert val_scores_text(scores[:2]) == (
        "image,mask,iou,dice,iou cell,hit_pixels cell,truth_pixels cell,predicted_pixels cell,wrong_pixels,counted_pixels\n"
        "images/good.png,masks/good.png,0.500000,0.666667,0.500000,10,15,15,10,100\n"
        "images/empty.png,masks/empty.png,,,,0,0,0,0,100\n"
    )
    file = tmp_path / "val_scores.csv"
    for classes in (("cell",), ("back ground", "road, wet")):
        scores = [score_of(*item, classes) for item in counts.items()]
        file.write_bytes(val_scores_text(scores).encode("utf-8", "surrogateescape"))
        assert read_val_scores(file) == worst_first(scores)
    header = file.read_bytes().splitlines()[0].decode()
    assert header.startswith("image,mask,iou,dice,iou back ground,hit_pixels back ground")
    assert '"iou road, wet"' in header
    assert val_scores_text([]) == "image,mask,iou,dice,wrong_pixels,counted_pixels\n"


def test_every_image_has_its_row_and_its_tiles_count_together():
    config = make_settings().taken
    pairs = [Pair(name, Path(f"data/images/{name}.png"), Path(f"data/masks/{name}.png")) for name in ("a", "b")]
    dataset = SimpleNamespace(pairs=pairs, tiling=WholeImages((4, 4), 2))
    counts = np.array([[[10, 12, 11], [3, 4, 5]], [[14, 16, 14], [0, 0, 2]]])
    rows = list(csv.DictReader(val_scores_csv(dataset, counts, Path("data"), config).splitlines()))
    assert [(row["image"], row["mask"], row["iou"]) for row in rows] == [
        ("images/b.png", "masks/b.png", "0.000000"),
        ("images/a.png", "masks/a.png", "0.500000"),
    ]
    tiling = tile_images([(4, 8), (4, 4)], (4, 4))
    num_tiles = [tile.pair for tile in tiling.tiles].count(0)
    counts = np.array([[[1, 1, 1], [2, 3, 4]]] * num_tiles + [[[9, 9, 9], [1, 1, 1]]])
    dataset = SimpleNamespace(pairs=pairs, tiling=tiling)
    rows = csv.DictReader(val_scores_csv(dataset, counts, Path("data"), config).splitlines())
    found = [(int(row["hit_pixels foreground"]), int(row["truth_pixels foreground"])) for row in rows]
    assert found == [(2 * num_tiles, 3 * num_tiles), (1, 1)]
    assert num_tiles > 1


@pytest.mark.parametrize(
    "content",
    [
        "image,iou\na.png,0.5\n",
        "image,mask,wrong_pixels,counted_pixels\na,b,0,4\n",
        f"{HEADER}a,b,1,2,2,0\n",
        f"{HEADER}a,b,3,2,2,0,4\n",
        f"{HEADER}a,b,-1,2,2,0,4\n",
        f"{HEADER}a,b,1,{10**30},2,0,4\n",
        f"{HEADER}{'x' * 200_000},b,1,2,2,0,4\n",
    ],
)
def test_a_table_that_is_not_ours_is_refused(content, tmp_path):
    (tmp_path / "val_scores.csv").write_text(content)
    with pytest.raises(ValueError):
        read_val_scores(tmp_path / "val_scores.csv")


@pytest.mark.usefixtures("small_network")
def test_an_interrupted_run_keeps_what_an_uninterrupted_one_does_and_images_add_up_to_the_matrix(tiny_config):
    straight = train(tiny_config, num_epochs=3, run_name="straight").run_dir
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, num_epochs=3, run_name="broken", on_epoch=stop_after(1))
    broken = train(tiny_config, num_epochs=3, run_name="broken", resume="auto").run_dir
    summary, uninterrupted = read_run_summary(broken), read_run_summary(straight)
    for one, other in zip(summary.epochs, uninterrupted.epochs, strict=True):
        assert (one.number, one.get("val_iou"), one.classes) == (other.number, other.get("val_iou"), other.classes)
        assert one.confusion == other.confusion
    assert (broken / "val_scores.csv").read_text() == (straight / "val_scores.csv").read_text()
    happened = [event.kind for event in summary.events if event.kind not in ("note", "warning")]
    assert happened == ["start", "interrupted", "resumed", "finished"]
    counts = [score.classes["foreground"] for score in summary.image_scores]
    (_, false), (missed, hits) = summary.best.confusion
    sums = [sum(getattr(one, name) for one in counts) for name in ("hits", "truth", "predicted")]
    assert sums == [hits, missed + hits, false + hits]
    assert sum(score.wrong_pixels for score in summary.image_scores) == false + missed
