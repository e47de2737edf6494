"""A run in its folder: what is saved when, in which order, and what is restored."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.runs import SPLIT
from helpers.small_runs import ROW
from helpers.steps import everything, make_batch, make_settings, same, small_components, take_step
from unet_trainer import __version__
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import HardwareFacts
from unet_trainer.datasets.pairs import Pair
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.runs import checkpoint_file
from unet_trainer.runs import checkpointer as module
from unet_trainer.runs.checkpoint_file import read_checkpoint, read_last, read_run
from unet_trainer.runs.checkpointer import RETRY_SECONDS, Checkpointer
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.runs.history import read_metrics
from unet_trainer.system.background_writer import Job
from unet_trainer.system.console import Console

FULL = OSError(28, "No space left on device")


@pytest.fixture
def settings():
    return make_settings(ema_decay=0.9)


@pytest.fixture
def components(settings):
    return small_components(settings=settings)


@pytest.fixture
def checkpointer(components, settings, tmp_path):
    return Checkpointer(tmp_path, settings, components.state, SPLIT, Console(io.StringIO()))


def said(checkpointer):
    return checkpointer.console.stream.getvalue()


def draw():
    return np.zeros((4, 4, 3), np.uint8)


def scores():
    return "image,iou\n"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step(components, seed=0):
    take_step(components.train_step, make_batch(2, seed, side=32))


def end_epoch(components, epoch):
    components.state.epoch = epoch
    components.state.history = [{**ROW, "epoch": number + 1} for number in range(epoch)]


def saved_weights(folder, name="last.pt"):
    return list(read_checkpoint(folder / name)["model"].values())


def weights(components):
    return [value.clone() for value in components.state.segmenter.network.state_dict().values()]


def saved_epoch(folder):
    return read_run(folder, pytest.fail)["epoch"]


def test_an_epoch_writes_state_metrics_and_settings_and_the_best_weights_if_it_was_best(checkpointer, components, tmp_path):
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, None, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert names(tmp_path) == ["config.yaml", "last.pt", "metrics.csv", "settings.json"]
    step(components)
    end_epoch(components, 2)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert names(tmp_path) == [
        "best.pt",
        "config.yaml",
        "last.pt",
        "metrics.csv",
        "previous.pt",
        "samples",
        "settings.json",
        "val_scores.csv",
    ]
    assert names(tmp_path / "samples") == ["epoch_0002.png"]
    assert [row["epoch"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2]
    assert (saved_epoch(tmp_path), read_last(tmp_path / "previous.pt")["epoch"]) == (2, 1)


def test_best_weights_are_those_that_were_evaluated_and_say_what_they_are_for(checkpointer, components, tmp_path):
    step(components)
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.ema.segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    content = read_checkpoint(tmp_path / "best.pt")
    average = components.state.ema.segmenter.network.state_dict()
    assert same(content["model"].values(), average.values())
    assert list(content["model"]) == list(average)
    assert (content["epoch"], content["metrics"]) == (1, ROW)
    assert SegmenterSpec.from_dict(content["spec"]) == components.state.segmenter.spec
    assert "optimizer" not in content


def test_every_checkpoint_says_how_the_run_was_set_up(checkpointer, components, settings, tmp_path):
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    for name in ("best.pt", "last.pt"):
        content = read_checkpoint(tmp_path / name)
        assert content["version"] == __version__
        assert content["config"] == settings.repeatable_dict()
        assert content["decisions"]["in_channels"] == ["decided", "as the images have"]
        assert SegmenterSpec.from_dict(content["spec"]) == components.state.segmenter.spec
    assert read_last(tmp_path / "last.pt")["split"] == {"train": ["a", "b"], "val": ["c"]}


def test_the_initial_state_is_restored_any_number_of_times_while_nothing_is_saved(checkpointer, components):
    before = everything(components)
    for _ in range(2):
        step(components)
        assert len(everything(components)) > len(before)  # the optimizer has moments now
        checkpointer.restore_last()
        assert same(before, everything(components))
    assert checkpointer.describe_saved() == "nothing is saved"


def test_the_last_saved_state_is_restored_once_there_is_one(checkpointer, components, tmp_path):
    step(components)
    saved = weights(components)
    checkpointer.save_state()
    step(components, seed=1)
    checkpointer.restore_last()
    assert same(saved, weights(components))
    assert checkpointer.describe_saved() == f"{tmp_path / 'last.pt'} is whole; to go on: python train_unet.py --resume {tmp_path}"


def test_a_state_that_is_not_whole_is_not_saved_but_the_initial_one_is(checkpointer, components, tmp_path):
    before = weights(components)
    step(components)
    checkpointer.save_on_failure(state_is_whole=False)
    assert same(before, saved_weights(tmp_path))
    checkpointer.save_on_failure(state_is_whole=True)
    assert same(weights(components), saved_weights(tmp_path))


def test_weights_that_are_not_finite_are_reported_and_the_earlier_state_stays(checkpointer, components, tmp_path):
    checkpointer.save_state()
    checkpointer.finish()
    before = (tmp_path / "last.pt").read_bytes()
    with torch.no_grad():
        next(components.state.segmenter.parameters()).fill_(float("inf"))
    checkpointer.save_on_failure(state_is_whole=True)
    assert "are not finite and were not saved" in said(checkpointer)
    assert (tmp_path / "last.pt").read_bytes() == before


@pytest.mark.parametrize(("minutes", "is_saved"), [(None, False), (10.0, False), (1e-9, True)])
def test_the_state_is_saved_within_an_epoch_every_checkpoint_minutes(minutes, is_saved, checkpointer, settings, tmp_path):
    settings.change("a test", checkpoint_minutes=minutes)
    checkpointer.save_if_due()
    checkpointer.finish()
    assert (tmp_path / "last.pt").exists() is is_saved


@pytest.fixture
def full_disk(monkeypatch):
    """No checkpoint can be written until the test calls this."""

    def refuse(path, write, **options):
        raise FULL

    write_atomically = checkpoint_file.write_atomically
    monkeypatch.setattr(checkpoint_file, "write_atomically", refuse)
    return lambda: monkeypatch.setattr(checkpoint_file, "write_atomically", write_atomically)


def test_a_file_that_cannot_be_written_ends_the_run_or_is_reported(checkpointer, settings, full_disk):
    checkpointer.save_state()
    with pytest.raises(
        TrainingFailed, match=r"last\.pt could not be written \(No space left on device\): .* MB are needed, .*; nothing is saved"
    ):
        checkpointer.finish()
    settings.change("a test", on_save_error="continue")
    checkpointer.save_state()
    checkpointer.finish()
    assert "training goes on (on_save_error: continue)" in said(checkpointer)
    assert checkpointer.unwritten() == ["last.pt"]


@pytest.mark.parametrize(
    ("number", "advice"), [(28, "Make room, or set"), (30, "Choose a folder on a disk that can be written to, or set"), (13, "Set")]
)
def test_only_a_full_disk_is_answered_with_the_advice_to_make_room(number, advice, checkpointer, monkeypatch):
    def refuse(path, write, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_file, "write_atomically", refuse)
    checkpointer.save_state()
    with pytest.raises(TrainingFailed, match=rf"; nothing is saved\. {advice} on_save_error: continue to train on$"):
        checkpointer.finish()


def test_the_state_to_go_on_from_is_named_as_it_is(checkpointer, tmp_path):
    (tmp_path / "previous.pt").touch()
    assert checkpointer.describe_saved().startswith(f"{tmp_path / 'previous.pt'} is whole; ")
    checkpointer.folder = tmp_path / "gone"
    assert checkpointer.describe_saved() == f"{tmp_path / 'gone'} is no longer there"


@pytest.fixture
def slow_disk(monkeypatch):
    """Checkpoints are written only once the test allows it."""
    may_write = threading.Event()
    write = module.write_checkpoint

    def slow(*arguments, **options):
        assert may_write.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    return may_write


def fall_behind(checkpointer, components):
    """The second epoch, the best so far, ends while the state of the first is still being written."""
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, None, lambda: draw, lambda: scores)
    step(components)
    end_epoch(components, 2)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)


def test_an_epoch_shorter_than_a_save_is_saved_as_soon_as_the_disk_is_free(
    checkpointer, components, slow_disk, tmp_path, monkeypatch
):
    fall_behind(checkpointer, components)
    copies = []
    copy_state = Checkpointer._copy_state
    monkeypatch.setattr(Checkpointer, "_copy_state", lambda self, *more: (copies.append(1), copy_state(self, *more))[1])
    checkpointer.save_if_due()
    assert copies == []  # the disk is busy: a copy would only wait, to be replaced by a newer one
    slow_disk.set()
    checkpointer.writer.wait()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()  # it is written together with the state that refers to it
    components.state.batch = 3
    checkpointer.save_if_due()
    checkpointer.writer.wait()
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert copies == [1]
    assert (saved_epoch(tmp_path), read_run(tmp_path, pytest.fail)["batch"]) == (2, 3)
    checkpointer.save_if_due()
    assert copies == [1]


def test_finishing_leaves_the_last_epoch_on_the_disk(checkpointer, components, slow_disk, tmp_path):
    fall_behind(checkpointer, components)
    slow_disk.set()
    checkpointer.finish()
    assert saved_epoch(tmp_path) == 2
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2


def test_a_rollback_saves_nothing_of_the_epoch_that_is_rolled_back(checkpointer, components, slow_disk, tmp_path):
    before = weights(components)
    fall_behind(checkpointer, components)
    assert not same(before, weights(components))
    slow_disk.set()
    checkpointer.restore_last()
    assert same(before, weights(components))
    assert components.state.epoch == 1
    checkpointer.finish()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()


def test_a_state_that_is_not_whole_is_not_saved_even_if_the_last_epoch_was_not(checkpointer, components, slow_disk, tmp_path):
    fall_behind(checkpointer, components)
    slow_disk.set()
    checkpointer.save_on_failure(state_is_whole=False)
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), UserError("a file became unreadable"), MemoryError()])
def test_best_weights_are_saved_without_a_picture_that_cannot_be_drawn(error, checkpointer, components, tmp_path):
    def fail():
        raise error

    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, fail, lambda: scores)
    checkpointer.finish()
    assert names(tmp_path) == ["best.pt", "config.yaml", "last.pt", "metrics.csv", "settings.json", "val_scores.csv"]
    assert "Warning: no picture of epoch 1: " in said(checkpointer)


def test_everything_else_is_written_when_pictures_cannot_be(checkpointer, components, settings, tmp_path):
    settings.change("a test", on_save_error="continue")
    (tmp_path / "samples").write_text("no folder")
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert names(tmp_path) == ["best.pt", "config.yaml", "last.pt", "metrics.csv", "samples", "settings.json", "val_scores.csv"]
    assert "samples" in said(checkpointer)


def test_finishing_waits_for_the_second_try_and_says_nothing_if_it_succeeds(checkpointer, components, tmp_path, monkeypatch):
    write, attempts = module.write_checkpoint, []

    def full_once(*arguments, **options):
        attempts.append(1)
        if len(attempts) == 1:
            raise FULL
        write(*arguments, **options)

    monkeypatch.setattr(module, "write_checkpoint", full_once)
    end_epoch(components, 4)
    checkpointer.save_state()
    checkpointer.finish()
    assert not checkpointer.writer.is_busy()
    assert saved_epoch(tmp_path) == 4
    assert said(checkpointer) == ""


def test_weights_that_are_not_finite_are_an_error_beside_a_disk_that_fails(checkpointer, components, monkeypatch):
    def refuse(path, *arguments, **options):
        raise NonFinite("bad weights") if path.name == "best.pt" else FULL

    monkeypatch.setattr(module, "write_checkpoint", refuse)
    monkeypatch.setattr(module, "write_metrics", lambda *arguments: refuse(Path("metrics.csv")))
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    with pytest.raises(NonFinite, match="bad weights"):
        checkpointer.finish()


def test_a_disk_that_stays_full_is_reported_once_a_minute_and_not_at_every_step(checkpointer, settings, monkeypatch):
    attempts, clock = [], [1000.0]

    def full(*arguments, **options):
        attempts.append(1)
        raise FULL

    monkeypatch.setattr(module, "write_checkpoint", full)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    settings.change("a test", on_save_error="continue")
    checkpointer.save_state()
    for _ in range(50):
        checkpointer.writer.wait()
        checkpointer.save_if_due()
    assert len(attempts) == 1
    assert said(checkpointer).count("Warning: ") == 1
    clock[0] += RETRY_SECONDS + 1
    checkpointer.save_if_due()
    checkpointer.writer.wait()
    assert len(attempts) == 2
    checkpointer.save_if_due()
    assert checkpointer.unwritten() == ["last.pt"]


def test_best_weights_are_written_before_the_state_also_after_a_save_that_failed(
    checkpointer, components, settings, tmp_path, monkeypatch, full_disk
):
    """A crash in between must not leave a last.pt that refers to a best.pt which is not there."""
    settings.change("a test", on_save_error="continue")
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, None, lambda: draw, lambda: scores)
    checkpointer.writer.wait()
    full_disk()
    written = []
    write = module.write_checkpoint
    monkeypatch.setattr(
        module, "write_checkpoint", lambda path, *more, **others: (written.append(path.name), write(path, *more, **others))
    )
    step(components)
    end_epoch(components, 2)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert written == ["best.pt", "last.pt"]
    assert saved_epoch(tmp_path) == 2


def test_a_state_is_not_written_without_the_best_weights_that_it_refers_to(
    checkpointer, components, settings, tmp_path, monkeypatch
):
    settings.change("a test", on_save_error="continue")
    write = module.write_checkpoint

    def refuse_best(path, *more, **others):
        if path.name == "best.pt":
            raise FULL
        write(path, *more, **others)

    checkpointer.save_state()
    checkpointer.finish()
    monkeypatch.setattr(module, "write_checkpoint", refuse_best)
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert saved_epoch(tmp_path) == 0
    assert checkpointer.unwritten() == ["best.pt", "last.pt"]
    monkeypatch.undo()
    checkpointer.finish()
    assert (saved_epoch(tmp_path), checkpointer.unwritten()) == (1, [])
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 1


def test_files_that_a_full_disk_did_not_take_are_written_with_the_next_state(
    checkpointer, components, settings, tmp_path, full_disk
):
    settings.change("a test", on_save_error="continue")
    end_epoch(components, 1)
    checkpointer.save_epoch(ROW, components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert checkpointer.unwritten() == ["best.pt", "last.pt"]
    full_disk()
    step(components)
    end_epoch(components, 2)
    checkpointer.save_epoch(ROW, None, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 1
    assert saved_epoch(tmp_path) == 2
    assert checkpointer.unwritten() == []


TESLA_T4 = HardwareFacts("cuda:0", "Tesla T4", has_bfloat16=False, has_float16=True, num_cores=4)
TESLA_K80 = HardwareFacts("cuda:0", "Tesla K80", has_bfloat16=False, has_float16=False, num_cores=4)


@pytest.mark.parametrize(
    ("hardware", "key", "comment"),
    [
        (
            TESLA_T4,
            "amp_dtype: bfloat16",
            "here float16: Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; "
            "float16 with loss scaling instead",
        ),
        (TESLA_K80, "use_amp: true", "here false: Tesla K80 has no bfloat16 arithmetic; float32 instead"),
    ],
    ids=["no bfloat16", "neither"],
)
def test_config_yaml_keeps_the_precision_that_was_asked_for_and_says_which_was_taken(hardware, key, comment, components, tmp_path):
    """So that the run can be repeated or resumed on other hardware."""
    settings = make_settings(hardware=hardware, device="auto", use_amp=True, amp_dtype="bfloat16")
    assert settings.taken.number_format == ("float16" if hardware is TESLA_T4 else "float32")
    checkpointer = Checkpointer(tmp_path, settings, components.state, SPLIT, Console(io.StringIO()))
    checkpointer.write_config()
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert f"{key}  # {comment}" in lines
    assert f"device: auto  # here cuda:0: {hardware.name}" in lines
    config = load_config(tmp_path / "config.yaml")
    assert (config.use_amp, config.amp_dtype, config.device) == (True, "bfloat16", "auto")
    checkpointer.save_state()
    checkpointer.finish()
    content = read_last(tmp_path / "last.pt")
    assert (content["config"]["use_amp"], content["config"]["amp_dtype"]) == (True, "bfloat16")
    assert content["decisions"][key.partition(":")[0]] == ["decided", comment.partition(": ")[2]]


def test_config_yaml_runs_again_under_a_name_of_its_own(checkpointer, tmp_path):
    checkpointer.write_config()
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith(f"# Settings of this run. To run them again: python train_unet.py {tmp_path / 'config.yaml'}\n")
    config = load_config(tmp_path / "config.yaml")
    assert (config.resume, config.run_name) == (None, tmp_path.name)


def test_a_setting_that_changed_during_the_run_is_in_config_yaml_with_its_reason(checkpointer, settings, tmp_path):
    settings.change("memory ran out (on_oom: shrink)", batch_parts=2)
    checkpointer.save_state()
    checkpointer.finish()
    assert "batch_parts: 2  # decided: memory ran out (on_oom: shrink)" in (tmp_path / "config.yaml").read_text().splitlines()
    assert read_last(tmp_path / "last.pt")["config"]["batch_parts"] == 2


def test_a_rolled_back_state_is_saved_without_the_settings(checkpointer, tmp_path):
    checkpointer.save_state(with_config=False)
    checkpointer.finish()
    assert names(tmp_path) == ["last.pt"]


def test_split_csv_names_pairs_for_test_and_unused_ones_too(checkpointer, tmp_path):
    pairs = [Pair(name, Path(f"{name}.png"), Path(f"{name}.png")) for name in ("d", "K\udce4fer")]
    checkpointer.split = dataclasses.replace(checkpointer.split, test=pairs[:1], unused=pairs[1:])
    checkpointer.write_split()
    assert (tmp_path / "split.csv").read_bytes().splitlines()[-2:] == [
        b"d.png,d.png,test,,d,",
        b"K\xe4fer.png,K\xe4fer.png,unused,,K\xe4fer,",
    ]


def test_split_csv_names_the_pairs_of_each_part(checkpointer, tmp_path):
    checkpointer.write_split()
    with (tmp_path / "split.csv").open(newline="") as file:
        assert [(row["image"], row["split"]) for row in csv.DictReader(file)] == [
            ("a.png", "train"),
            ("b.png", "train"),
            ("c.png", "val"),
        ]


def lose_folder(components, settings, tmp_path, gone):
    """A checkpointer whose folder has become another one, or is gone."""
    folder = tmp_path / "run"
    folder.mkdir()
    ours = [True]
    made = Checkpointer(folder, settings, components.state, SPLIT, Console(io.StringIO()), lambda: ours[0])
    ours[0] = False
    if gone:
        folder.rmdir()
    else:
        (folder / "last.pt").write_text("another's")
    return made


@pytest.mark.parametrize("gone", [False, True], ids=["another folder", "gone"])
def test_a_folder_that_is_lost_gets_nothing_and_the_state_is_saved_beside_it(gone, components, settings, tmp_path):
    made = lose_folder(components, settings, tmp_path, gone)
    elsewhere = tmp_path / "run-2"  # never the same name: another process may begin there
    what = "is gone" if gone else "is another folder now"
    with pytest.raises(TrainingFailed) as caught:
        made.save_epoch(dict(ROW), components.state.eval_segmenter, lambda: draw, lambda: scores)
    assert str(caught.value) == (
        f"{tmp_path / 'run'} {what}, deleted, moved or taken by another process; the state is saved as {elsewhere / 'last.pt'}; "
        f"to go on: python train_unet.py --resume {elsewhere}"
    )
    assert names(elsewhere) == [
        "best.pt", "config.yaml", "events.jsonl", "last.pt", "metrics.csv", "settings.json", "split.csv", "train.log",
    ]  # fmt: skip
    read_last(elsewhere / "last.pt")
    if not gone:
        assert names(tmp_path / "run") == ["last.pt"]
        assert (tmp_path / "run" / "last.pt").read_text() == "another's"


def test_a_state_that_cannot_be_saved_elsewhere_either_is_said_to_be_lost(components, settings, tmp_path, monkeypatch):
    made = lose_folder(components, settings, tmp_path, gone=False)

    def full(*arguments):
        raise FULL

    monkeypatch.setattr(module, "new_run_folder", full)
    with pytest.raises(
        TrainingFailed, match=r"the state is lost, it could not be saved elsewhere \(No space left on device; make room\)"
    ):
        made.save_state()


def test_a_folder_that_is_gone_with_its_disk_is_tried_again_by_a_run_that_lasts(components, tmp_path):
    settings = make_settings(ema_decay=0.9, on_save_error="continue")
    made = lose_folder(components, settings, tmp_path, gone=True)
    made.save_state()
    made.writer.wait()
    made.save_if_due()
    assert "training goes on (on_save_error: continue)" in said(made)
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_written_whole_and_not_through_links(checkpointer, components, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "precious"
    target.write_text("content")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "epoch_0000.png").symlink_to(target)
    checkpointer.save_epoch(dict(ROW), components.state.eval_segmenter, lambda: draw, lambda: scores)
    checkpointer.finish()
    assert target.read_text() == "content"
    assert (tmp_path / "samples" / "epoch_0000.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_goes_away_during_a_save_costs_nothing_either(components, settings, tmp_path):
    """The save that failed is made again beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    made = Checkpointer(folder, settings, components.state, SPLIT, Console(io.StringIO()), folder.exists)
    made.waiting["metrics.csv"] = Job(lambda: shutil.rmtree(folder))  # written before last.pt
    made.save_state()
    made.writer.wait()
    with pytest.raises(TrainingFailed, match=rf"{folder} is gone, .*; the state is saved as {folder}-2/last\.pt; to go on: "):
        made.save_if_due()
    assert read_last(tmp_path / "run-2" / "last.pt")["epoch"] == components.state.epoch
