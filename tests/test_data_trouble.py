"""Data that change, hang or attack while a run trains on them: it goes on and says so, or stops with one sentence."""

import csv
import io
import json
import os
import shutil
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from helpers.image_bytes import empty_png
from helpers.runs import words
from train_unet import TrainingFailed, main, train
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.load import load_config
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.pixel_cache import fill_cache
from unet_trainer.training import build
from unet_trainer.training.checkpoint import read_checkpoint

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture
def data(tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def config(tiny_config, data):
    return {**tiny_config, "data_dir": str(data), "run_name": "run"}


def files_of(run_dir, part):
    """Images and masks of a part, by split.csv."""
    rows = [line.split(",") for line in (run_dir / "split.csv").read_text().splitlines()]
    return [(row[0], row[1]) for row in rows if row[2] == part]


def repaint(path):
    """Other pixels of the same size and format."""
    pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    cv2.imwrite(str(path), np.ascontiguousarray(pixels[::-1]))


def test_files_that_changed_between_two_starts_are_named(config, data, capsys):
    run = train(config, num_epochs=1)
    (image, _), (_, mask) = files_of(run.run_dir, "train")[:2]
    repaint(data / image)
    repaint(data / mask)
    (data / files_of(run.run_dir, "val")[0][0]).touch()
    capsys.readouterr()
    main(["check", *words(config)])  # knows the new content: the run remembers what it began with
    capsys.readouterr()
    train(config, num_epochs=2, resume="auto")
    said = capsys.readouterr().out
    assert f"2 files changed since the run began: {data / image}, {data / mask}; scores from before" in said
    assert said.count("changed since the run began") == 1


def test_a_resume_with_a_damaged_file_says_that_removing_it_does_not_help(config, data):
    run = train(config, num_epochs=1)
    (data / files_of(run.run_dir, "train")[0][0]).write_bytes(b"")
    message = r"the file is empty\n(.*\n)?A resumed run needs every file and every class that it began with"
    with pytest.raises(UserError, match=message):
        train(config, num_epochs=2, resume="auto")


def test_images_of_another_depth_at_a_resume_are_refused(config, data):
    train(config, num_epochs=1)
    for path in (data / "images").iterdir():
        path.write_bytes(cv2.imencode(".png", cv2.imread(str(path)).astype(np.uint16) * 257)[1].tobytes())
    message = "they hold 16-bit values, those that the run began with 8-bit ones; put them back"
    with pytest.raises(CheckpointError, match=message):
        train(config, num_epochs=2, resume="auto")


def to_bomb(path):
    path.write_bytes(empty_png(20_000, 20_000))


def to_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    ("swap", "num_workers", "reason"),
    [
        (to_bomb, 0, ".*20000×20000 pixels: a decompression bomb"),
        (to_pipe, 1, "a pipe, a socket or a device; need a file"),
    ],
)
def test_what_is_swapped_in_for_an_image_is_named_and_neither_decoded_nor_waited_for(
    config, data, swap, num_workers, reason
):
    def spoil(row):
        swap(data / files_of(Path(config["checkpoint_dir"]) / "run", "train")[0][0])

    message = rf"\.jpg: {reason}.*to go on where the state was saved: python train_unet\.py --resume"
    with pytest.raises(UserError, match=message):
        train(config, on_epoch=spoil, num_epochs=3, num_workers=num_workers)


@pytest.fixture
def dead_disk(monkeypatch):
    """Calls make every further reading of a pair wait until the test is over; loaders wait for one second from then on. Not from the
    start: on a busy machine the first reading may take longer."""
    is_over, is_dead, loaders = threading.Event(), threading.Event(), []
    real = SegmentationDataset._read

    def read(self, index):
        if is_dead.is_set():
            is_over.wait()
        return real(self, index)

    def make_loader(*arguments, **options):
        loaders.append(Loader(*arguments, **options))
        return loaders[-1]

    def die(row=None):
        is_dead.set()
        for loader in loaders:
            loader.timeout = 1

    monkeypatch.setattr(SegmentationDataset, "_read", read)
    monkeypatch.setattr(build, "Loader", make_loader)
    die.loaders = loaders
    yield die
    is_over.set()


def test_a_disk_that_dies_ends_a_run_without_workers_by_the_timeout_too(config, dead_disk):
    message = (
        r"no batch in 1 s \(worker_timeout\): reading .*\.jpg hangs\. See whether the disk is there; to go on where "
    )
    with pytest.raises(TrainingFailed, match=message):
        train(config, on_epoch=dead_disk, num_epochs=3, accumulation_steps=2)


def test_a_disk_that_never_answers_while_the_cache_is_filled_is_told(config, dead_disk, monkeypatch):
    monkeypatch.setattr(build, "fill_cache", lambda *parts, **more: fill_cache(*parts, **{**more, "timeout": 0.2}))
    dead_disk()
    message = r"^cache: no pair of .* was read in 600 s \(worker_timeout\); is the disk there\?$"
    for place in ("ram", "disk"):
        with pytest.raises(UserError, match=message):
            train(config, cache=place)
    assert not list(Path(config["checkpoint_dir"]).glob(".cache/*"))


NASTY = [b" lead", b"trail ", b"cr\rname", b"nl\nname", b'qu"ote', b"com,ma", b"'semi;colon", b"tab\t"]
NASTY += [b"esc\x1b[31mred", b"bad\xe4name"]


@pytest.fixture
def nasty(data):
    """The names of the first pairs are hard to write down."""
    for index, name in enumerate(NASTY):
        for old in (data / f"images/cells_{index:03d}.jpg", data / f"masks/cells_{index:03d}.png"):
            old.rename(Path(os.fsdecode(os.fsencode(old.parent) + b"/" + name + os.fsencode(old.suffix))))
    return data


@pytest.mark.real_network
def test_names_with_anything_in_them_train_resume_and_predict_as_others_do(nasty, config, tmp_path, capsys):
    stop = {"val_fraction": 0.5}
    run = train(config, num_epochs=1, **stop)
    train(config, num_epochs=2, resume="auto", **stop)
    assert main(["check", *words(config), "--json", str(tmp_path / "report.json")]) == 0
    assert main(["evaluate", str(run.run_dir)]) == 0
    out = str(tmp_path / "out")
    assert main(["predict", str(run.run_dir), str(run.run_dir / "split.csv"), "--out", out, "--polygons"]) == 0
    written = {os.fsencode(path.stem) for path in (tmp_path / "out").rglob("*.png")}
    assert set(NASTY) <= written
    assert len(written) == 12
    images = {image["file_name"] for image in json.loads((tmp_path / "out/polygons.json").read_bytes())["images"]}
    assert {os.fsencode(Path(image).stem) for image in images} == written
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\r" not in said
    for table in (run.run_dir / "split.csv", run.run_dir / "evaluation/evaluation.csv"):
        rows = list(csv.DictReader(io.StringIO(table.read_bytes().decode("utf-8", "surrogateescape"), newline="")))
        assert {os.fsencode(Path(row["image"]).stem) for row in rows} <= written
        assert len(rows) == (12 if table.name == "split.csv" else 6)


def test_a_name_that_attacks_the_terminal_is_shown_escaped(nasty, config, capsys):
    (nasty / os.fsdecode(b"images/esc\x1b[31mred.jpg")).write_bytes(b"no image")
    (nasty / "images/nl\nname.jpg").write_bytes(b"no image")
    assert main(["check", *words(config)]) == 2
    said = capsys.readouterr().out
    assert "not an image that can be decoded" in said
    assert "esc\\x1b[31mred.jpg" in said
    assert "nl\\nname.jpg" in said
    assert main(words(config)) == 2
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "esc\\x1b[31mred.jpg" in err


@pytest.fixture
def no_foreground(config, data):
    """Settings of a run whose validation masks are empty."""
    for part, numbers in (("train", range(10)), ("val", (10, 11))):
        for kind in ("images", "masks"):
            (data / part / kind).mkdir(parents=True)
            for number in numbers:
                (file,) = (data / kind).glob(f"*{number:03d}.*")
                file.rename(data / part / kind / file.name)
    for file in (data / "val/masks").iterdir():
        cv2.imwrite(str(file), np.zeros((64, 64), np.uint8))
    return config


@pytest.mark.real_network
def test_without_foreground_in_validation_a_run_follows_the_loss_and_has_a_best_model(no_foreground, capsys):
    result = train(no_foreground, num_epochs=3)
    said, run_dir = capsys.readouterr().out, result.run_dir
    note = "Note: monitor: val_loss: no validation mask has a class to score, so there is no val_iou\n"
    assert said.count(note) == 1
    losses = [row["val_loss"] for row in result.history]
    best = losses.index(min(losses)) + 1
    assert (result.best_epoch, read_checkpoint(run_dir / "best.pt")["epoch"]) == (best, best)
    assert f"Best epoch: {best} of {len(losses)}, val loss {min(losses):.4f}\n" in said
    assert "nan" not in said
    assert "every validation pixel is background: val IoU says nothing about the model" in said
    assert json.loads((run_dir / "run.json").read_text())["result"]["best_val_iou"] is None
    assert load_config(run_dir / "config.yaml").monitor == "val_loss"

    # What shows runs, and the start that goes on with it: its config still says val_iou.
    page = (run_dir / "report.html").read_text()
    assert "No epoch has an IoU: no validation mask has a class to score." in page
    assert "by val_loss" in page
    other = shutil.copytree(run_dir, run_dir.with_name("other"))
    assert main(["runs", str(run_dir.parent)]) == 0
    assert main(["compare", str(run_dir), str(other)]) == 0
    assert main(["evaluate", str(run_dir), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "nan" not in shown
    assert "px predicted" in shown
    assert train(no_foreground, num_epochs=4, resume=str(run_dir)).epochs == 4
    assert f"best val_loss so far {min(losses):.4f} (epoch {best})" in capsys.readouterr().out
