"""Which run a word means."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.report_runs import write_run
from unet_trainer.commands.named_runs import find_named_run, read_run_words
from unet_trainer.config.errors import UserError

SCRIPT = SimpleNamespace(config=lambda overrides: SimpleNamespace(checkpoint_dir="checkpoints"))


def test_words_are_runs_and_folders():
    found = read_run_words(["a", "checkpoint_dir=x", "data-dir=y=z", "b"], SCRIPT, "report", takes_data=True)
    assert (found.names, found.checkpoint_dir, found.data_dir) == (["a", "b"], Path("x"), Path("y=z"))
    assert read_run_words([], SCRIPT, "watch").checkpoint_dir == Path("checkpoints")


def test_other_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match="batch_size=4: watch takes checkpoint_dir=FOLDER and no other setting"):
        read_run_words(["batch_size=4"], SCRIPT, "watch")
    with pytest.raises(UserError, match="data_dir=x: watch takes"):
        read_run_words(["data_dir=x"], SCRIPT, "watch")


def test_a_run_is_found_by_name_folder_and_file_and_the_newest_without_one(tmp_path):
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new")
    os.utime(old / "events.jsonl", (1, 1))
    assert find_named_run("old", tmp_path) == old
    assert find_named_run(str(old), Path("nowhere")) == old
    assert find_named_run(str(old / "events.jsonl"), tmp_path) == old
    assert find_named_run(None, tmp_path) == new


def test_what_is_no_run_is_one_message(tmp_path):
    with pytest.raises(UserError, match=r"holds no runs; python train_unet\.py starts one"):
        find_named_run(None, tmp_path)
    write_run(tmp_path / "mine")
    with pytest.raises(UserError, match=r"no run his; .* holds mine"):
        find_named_run("his", tmp_path)
