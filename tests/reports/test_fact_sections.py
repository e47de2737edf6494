"""Data, settings, machine, events and commands of a run."""

from __future__ import annotations

import re

from helpers.report_runs import write_run
from unet_trainer.reports.fact_sections import (
    MAX_EVENTS,
    command_section,
    data_section,
    event_section,
    machine_section,
    settings_section,
)
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.run_summary import read_run_summary


def words(markup):
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


def test_the_data_have_sizes_split_classes_and_notices(tmp_path):
    said = words(data_section(read_run_summary(write_run(tmp_path / "run"))))
    assert "data/mine Images 8-bit RGB; 64×48 Split 10 train, 4 val. val_fraction 0.2, seed 42" in said
    assert "32×32 (images are resized to it)" in said
    assert "background 0 50.0 % foreground 1 50.0 %" in said
    assert "What the check of the data found two images are the same" in said


def test_a_run_of_an_earlier_version_keeps_no_facts_and_says_so(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,val_iou\n1,0.5\n")
    summary = read_run_summary(tmp_path)
    assert "The run kept no facts of its data." in words(data_section(summary))
    assert settings_section(summary) is None
    assert machine_section(summary) is None
    assert event_section(summary) is None


def test_settings_are_grouped_by_their_source_and_have_their_reason(tmp_path):
    made = settings_section(read_run_summary(write_run(tmp_path / "run", image_size=[32, 32])))
    assert "unet with resnet18, 1.0 M parameters." in words(made)
    assert "image_size [32, 32] command line" in words(made)
    assert "batch_size 8 decided fits into memory" in words(made)
    assert made.index("Set by you (4)") < made.index("Decided from the data and the machine (1)")


def test_the_machine_has_versions_memory_and_the_time_of_each_stage(tmp_path):
    said = words(machine_section(read_run_summary(write_run(tmp_path / "run"))))
    assert "cpu – test machine" in said
    assert "2 cores, 8.0 GiB" in said
    assert "Python 3.11, torch 2.10" in said
    assert "1.50 GiB (reserved 0.00 GiB)" in said
    assert "training 24 s 76 % validation 6.0 s 19 %" in said  # of 31.5 s
    assert "waiting for data, of training – 2.0 %" in said
    assert "reading an image 4 ms" in said
    assert "101 – 103" in said


def test_what_happened_is_told_in_order(tmp_path):
    folder = write_run(tmp_path / "run", end="interrupted")
    log = EventLog()
    log.open(folder, resumed_after={"epoch": 3, "batch": 1})
    log.add("warning", text="the disk is slow")
    log.add("end", how="finished")
    said = words(event_section(read_run_summary(folder)))
    assert "Interrupted 1 time." in said
    kinds = re.findall(r"UTC (Started|Interrupted|Resumed|Warning|Finished)", said)
    assert kinds == ["Started", "Interrupted", "Resumed", "Warning", "Finished"]
    assert "Warning after epoch 3: the disk is slow" in said


def test_of_very_many_events_the_last_are_shown(tmp_path):
    folder = write_run(tmp_path / "run", end=None)
    log = EventLog()
    log.open(folder, resumed_after=None)
    for number in range(MAX_EVENTS + 20):
        log.add("note", text=f"note {number}")
    made = event_section(read_run_summary(folder))
    assert made.count("<li") == MAX_EVENTS
    assert "events.jsonl has the 23 before them" in made  # 20 notes, and two starts with the kill between them


def test_commands_fit_the_state_of_the_run(tmp_path):
    folder = write_run(tmp_path / "my run")
    assert "--resume" not in command_section(read_run_summary(folder))
    assert "evaluate" not in command_section(read_run_summary(folder))
    for name in ("best.pt", "last.pt"):
        (folder / name).write_bytes(b"x")
    said = words(command_section(read_run_summary(folder))).replace("&#x27;", "'")
    for line in (
        f"--resume '{folder}' num_epochs=4",
        f"evaluate '{folder}'",
        f"predict '{folder}' IMAGES --out predictions",
        "try ",
        "export ",
    ):
        assert line in said
