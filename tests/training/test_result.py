"""The result of a run: as an object, as result.json, and as the last lines that the user reads."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch

from helpers.small_runs import ROW, make_run, said
from unet_trainer.model.metrics import compute_scores
from unet_trainer.system.console import Console
from unet_trainer.training.early_stopping import EarlyStopping
from unet_trainer.training.result import TrainResult, build_result, report, result_dict, say_result

SCORES = compute_scores(torch.tensor([[5, 1], [1, 2]]), 1)


def finish_epochs(run, values, rates=None):
    for index, value in enumerate(values):
        rate = rates[index] if rates else 10.0
        row = {**ROW, "epoch": index + 1, "val_iou": value, "seconds": 2.0, "images_per_second": rate}
        if run.judge(row, SCORES):
            run.checkpointer.write_best(row, run.state.eval_segmenter)


@pytest.fixture
def run(tiny_data, tmp_path):
    """Three epochs of three; the second was the best."""
    made = make_run(tiny_data, tmp_path / "run", num_epochs=3)
    finish_epochs(made, [0.25, 0.75, 0.5], rates=[10.0, 20.0, 20.0])
    return made


def test_the_result_is_that_of_the_best_epoch(run):
    result = build_result(run)
    assert (result.best_epoch, result.best_val_iou, result.epochs, result.stopped_early) == (2, 0.75, 3, False)
    assert (result.run_dir, result.seconds) == (run.checkpointer.folder, 6.0)
    assert result.per_class_iou == {"foreground": 0.5}
    assert result.images_per_second == pytest.approx(15.0)  # as many images in each epoch: 3 / (1/10 + 1/20 + 1/20)
    assert (result.number_format, result.is_compiled, result.unwritten) == ("float32", False, [])
    assert [row["epoch"] for row in result.history] == [1, 2, 3]


def test_without_a_best_epoch_the_result_is_that_of_the_last(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=2)
    finish_epochs(run, [math.nan, math.nan])
    result = build_result(run)
    assert (result.best_epoch, result.per_class_iou) == (2, {"foreground": None})
    assert math.isnan(result.best_val_iou)
    report(run)
    assert "Warning: val_iou was no number in any epoch" in said(run)
    assert f"Weights: {run.checkpointer.folder / 'last.pt'} | " in said(run)
    assert f"Next: python train_unet.py evaluate {run.checkpointer.folder / 'last.pt'} " in said(
        run
    )  # the folder would mean best.pt
    written = json.loads((run.checkpointer.folder / "result.json").read_text())
    assert (written["best_val_iou"], written["baseline_iou"]) == (None, None)
    assert written["warnings"][0].startswith("val_iou was no number in any epoch")


def test_a_run_that_stopped_early_says_so(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=9, early_stopping_patience=2)
    finish_epochs(run, [0.5, 0.4, 0.4])
    assert run.is_finished()
    result = report(run)
    assert (result.stopped_early, result.epochs) == (True, 3)
    assert "Stopped early: no better val_iou in 2 epochs\n" in said(run)


def test_epochs_that_did_not_count_are_told_apart(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=9, early_stopping_patience=2, scheduler="constant", warmup_epochs=3)
    finish_epochs(run, [0.5, 0.4, 0.4, 0.4, 0.4])
    assert run.is_finished()
    report(run)
    assert "Stopped early: no better val_iou in 4 epochs, 2 of which counted against early_stopping_patience\n" in said(run)


def test_a_useless_model_is_told_after_the_table_and_in_result_json(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=2)
    nothing_found = compute_scores(torch.tensor([[6, 0], [3, 0]]), 1)
    for epoch in (1, 2):
        row = {**ROW, "epoch": epoch, "val_iou": 0.0, "train_iou": 0.1}
        if run.judge(row, nothing_found):
            run.checkpointer.write_best(row, run.state.eval_segmenter)
    result = report(run)
    assert result.baseline_iou == pytest.approx(1 / 3)
    (warning,) = result.warnings
    assert warning.startswith("this model is of no use: its val IoU is 0.0000, and all foreground everywhere gives 0.3333. ")
    assert "\n  - 10 optimizer steps may be too few: num_epochs=200\n" in warning  # 5 in an epoch
    assert f"  foreground  0.0000\nWarning: {warning}\nTime: " in said(run)
    written = json.loads((run.checkpointer.folder / "result.json").read_text())
    assert (written["baseline_iou"], written["warnings"]) == (pytest.approx(1 / 3), [warning])


def test_a_run_whose_best_epoch_an_earlier_version_trained_has_no_baseline(run):
    run.state.confusion = []
    result = report(run)
    assert (result.baseline_iou, result.warnings) == (None, [])
    assert "Best epoch: 2 of 3, val IoU 0.7500\n" in said(run)


def test_result_json_has_everything_but_the_rows_and_the_folder(run):
    result = report(run)
    content = json.loads((run.checkpointer.folder / "result.json").read_text())
    assert content == result_dict(result)
    assert set(content) == {
        *("best_epoch", "best_val_iou", "per_class_iou", "epochs", "stopped_early", "seconds", "images_per_second"),
        *("unwritten", "number_format", "is_compiled", "baseline_iou", "missing", "warnings"),
    }


def test_the_last_lines_name_what_is_there_and_the_next_command(run):
    report(run)
    folder = run.checkpointer.folder
    assert said(run).endswith(
        "\n"
        "Best epoch: 2 of 3, val IoU 0.7500 (all foreground everywhere would give 0.3333)\n"
        "  class       IoU\n"
        "  foreground  0.5000\n"
        "Time: 6 s in epochs, 15 images/s in training\n"
        f"Weights: {folder / 'best.pt'} | report: {folder / 'report.html'} | curves: {folder / 'curves.png'} | pictures: {folder / 'samples'}\n"
        f"Next: python train_unet.py evaluate {folder}   (scores of each class and image)\n"
        f"      python train_unet.py predict {folder} IMAGES --out predictions\n"
        f"      python train_unet.py try {folder}   (a page in the browser)\n"
        f"      python train_unet.py --resume {folder} num_epochs=6   (trains on)\n"
    )


def test_a_result_that_cannot_be_written_does_not_end_a_run_that_goes_on_without_it(run):
    run.settings.change("a test", on_save_error="continue")
    (run.checkpointer.folder / "result.json").mkdir()
    assert report(run).best_epoch == 2
    assert "result.json could not be written" in said(run)


def test_weights_that_could_not_be_written_are_not_promised(tmp_path):
    result = TrainResult(tmp_path, 1, 0.5, {"a": 0.5}, 1, False, 1.0, 1.0, [ROW], unwritten=["best.pt", "last.pt"])
    stream = io.StringIO()
    say_result(result, "val_iou", EarlyStopping(True, best_epoch=1), None, "num_epochs=2", Console(stream))
    assert stream.getvalue().splitlines()[-1] == (
        f"Warning: {tmp_path / 'best.pt'} and {tmp_path / 'last.pt'} could not be written: "
        "what was trained since is lost, unless an older file there is of use"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"use_amp": True}, ("bfloat16", False)), ({"use_amp": False, "compile_model": True}, ("float32", True))],
)
def test_the_result_says_what_was_computed_in(changes, expected, run):
    run.settings.change("a test", **changes)
    result = build_result(run)
    assert (result.number_format, result.is_compiled) == expected
