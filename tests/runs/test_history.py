"""metrics.csv and result.json: what other programs read of a run."""

from __future__ import annotations

import csv
import json
import math

import pytest

from unet_trainer.runs.history import COLUMNS, column, read_metrics, upgrade_row, write_metrics, write_result


def row(epoch, **changes):
    return {
        "epoch": epoch,
        "train_loss": 0.5,
        "val_loss": 1 / 3,
        "train_iou": 0.25,
        "val_iou": 0.75,
        "val_dice": 0.857142857,
        "learning_rate": 1e-5,
        "seconds": 12.3456789,
        "images_per_second": 1234567.0,
        "data_wait": 0.0,
        "skipped_steps": 0,
        "nan_steps": 0,
        "peak_memory_gib": 2.0,
        "peak_reserved_gib": 3.0,
        **changes,
    }


def test_columns_are_those_of_the_documentation_in_their_order():
    assert ", ".join(COLUMNS) == (
        "epoch, train_loss, val_loss, train_iou, val_iou, val_dice, learning_rate, seconds, images_per_second, data_wait, "
        "skipped_steps, nan_steps, peak_memory_gib, peak_reserved_gib"
    )


def test_table_has_a_header_and_a_row_an_epoch(tmp_path):
    write_metrics(tmp_path / "metrics.csv", [row(1), row(2, skipped_steps=3, nan_steps=1)])
    assert (tmp_path / "metrics.csv").read_bytes().decode() == (
        ",".join(COLUMNS) + "\n"
        "1,0.5,0.333333,0.25,0.75,0.857143,1e-05,12.3457,1.23457e+06,0,0,0,2,3\n"
        "2,0.5,0.333333,0.25,0.75,0.857143,1e-05,12.3457,1.23457e+06,0,3,1,2,3\n"
    )


def test_table_does_not_depend_on_the_order_inside_a_row(tmp_path):
    write_metrics(tmp_path / "a.csv", [row(1)])
    write_metrics(tmp_path / "b.csv", [dict(reversed(row(1).items()))])
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


def test_table_is_written_anew_so_that_no_epoch_is_in_it_twice(tmp_path):
    rows = []
    for epoch in (1, 2, 3):
        rows.append(row(epoch))
        write_metrics(tmp_path / "metrics.csv", rows)
    with (tmp_path / "metrics.csv").open() as file:
        assert [line["epoch"] for line in csv.DictReader(file)] == ["1", "2", "3"]


def test_number_that_is_not_finite_reads_back_from_the_table(tmp_path):
    write_metrics(tmp_path / "metrics.csv", [row(1, val_iou=math.nan, val_loss=math.inf)])
    with (tmp_path / "metrics.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert math.isnan(float(line["val_iou"]))
    assert math.isinf(float(line["val_loss"]))


def test_a_row_without_a_column_has_an_empty_cell_there(tmp_path):
    """A run that an earlier version began, with fewer columns, is resumed."""
    old = {name: value for name, value in row(1).items() if name not in ("nan_steps", "peak_reserved_gib")}
    write_metrics(tmp_path / "metrics.csv", [old, row(2)])
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[1] == "1,0.5,0.333333,0.25,0.75,0.857143,1e-05,12.3457,1.23457e+06,0,0,,2,"
    assert lines[2] == "2,0.5,0.333333,0.25,0.75,0.857143,1e-05,12.3457,1.23457e+06,0,0,0,2,3"
    first, second = read_metrics(tmp_path / "metrics.csv")
    assert (set(first), set(second)) == (set(old), set(COLUMNS))


def test_what_was_written_is_read_back(tmp_path):
    write_metrics(tmp_path / "metrics.csv", [row(1, val_loss=0.5, val_dice=0.25, seconds=2.5, images_per_second=100.0)])
    assert read_metrics(tmp_path / "metrics.csv") == [row(1, val_loss=0.5, val_dice=0.25, seconds=2.5, images_per_second=100.0)]


def test_a_table_of_an_earlier_version_is_read_under_the_names_of_today(tmp_path):
    """peak_memory_gb was in GiB all along."""
    (tmp_path / "metrics.csv").write_text("epoch,val_iou,peak_memory_gb,peak_reserved_gb\n1,0.5,2.5,3.5\n")
    assert read_metrics(tmp_path / "metrics.csv") == [
        {"epoch": 1.0, "val_iou": 0.5, "peak_memory_gib": 2.5, "peak_reserved_gib": 3.5}
    ]


def test_a_row_of_an_earlier_version_gets_the_names_of_today():
    assert upgrade_row({"epoch": 1, "peak_memory_gb": 2.5}) == {"epoch": 1, "peak_memory_gib": 2.5}
    assert upgrade_row(row(3)) == row(3)


def test_result_is_json_in_which_what_is_not_finite_is_null(tmp_path):
    result = {
        "best_val_iou": math.nan,
        "epochs": 3,
        "stopped_early": False,
        "per_class_iou": {"background": 0.5, "road": None, "café": math.inf},
        "list": [1.5, -math.inf],
    }
    write_result(tmp_path / "result.json", result)
    text = (tmp_path / "result.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) == {
        "best_val_iou": None,
        "epochs": 3,
        "stopped_early": False,
        "per_class_iou": {"background": 0.5, "road": None, "café": None},
        "list": [1.5, None],
    }
    assert text.startswith('{\n  "best_val_iou": null,\n')
    assert text.endswith("}\n")


def test_a_column_leaves_out_the_rows_that_lack_it():
    assert column([row(1), {"epoch": 2}, row(3, train_loss=2)], "train_loss") == [0.5, 2.0]
