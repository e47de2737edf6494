"""Run folders: found by name, path or file, newest first; a new run never gets the folder of an old one."""

import os
from pathlib import Path

import pytest

from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.runs.folder import (
    find_resume_source,
    find_run,
    find_runs,
    folder_of,
    new_run_folder,
    newest_run,
    start_folder,
)


@pytest.fixture
def checkpoint_dir(tmp_path, monkeypatch):
    """./checkpoints with three runs: b the newest, c without a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for name, age in (("a", 100), ("b", 200)):
        last = Path("checkpoints") / name / "last.pt"
        last.parent.mkdir(parents=True)
        last.touch()
        os.utime(last, (age, age))
    Path("checkpoints/c").mkdir()
    return Path("checkpoints")


def test_a_run_with_the_earlier_checkpoint_alone_is_a_run(checkpoint_dir):
    """After a crash between two renames."""
    (checkpoint_dir / "a" / "last.pt").rename(checkpoint_dir / "a" / "previous.pt")
    assert find_run("a", checkpoint_dir) == checkpoint_dir / "a"
    assert find_resume_source("auto", "a", checkpoint_dir) == checkpoint_dir / "a"
    os.utime(checkpoint_dir / "a" / "previous.pt", (300, 300))
    assert newest_run(checkpoint_dir) == checkpoint_dir / "a"


def test_a_run_resumes_only_if_asked_to(checkpoint_dir):
    assert find_resume_source(None, "a", checkpoint_dir) is None
    assert find_resume_source("auto", "new", checkpoint_dir) is None
    assert find_resume_source("auto", "c", checkpoint_dir) is None
    assert find_resume_source("b", "a", checkpoint_dir) == checkpoint_dir / "b"


def test_runs_are_the_folders_that_hold_something_of_one_newest_first(checkpoint_dir):
    (checkpoint_dir / ".cache").mkdir()
    (checkpoint_dir / ".cache/last.pt").touch()
    assert [folder.name for folder in find_runs(checkpoint_dir)] == ["b", "a"]
    (checkpoint_dir / "a/run.json").touch()
    assert [folder.name for folder in find_runs(checkpoint_dir)] == ["a", "b"]
    assert newest_run(checkpoint_dir).name == "b"  # a report written later is no save
    assert find_runs(checkpoint_dir / "missing") == []


def test_an_unknown_run_is_answered_with_the_names_of_runs_newest_first(checkpoint_dir):
    with pytest.raises(CheckpointError, match=r"^no run z; checkpoints holds b, a$"):
        find_run("z", checkpoint_dir)


def test_a_new_run_is_numbered_when_its_name_is_taken(tmp_path):
    folders = [new_run_folder(tmp_path / "deep" / "checkpoints", "run") for _ in range(3)]
    assert [folder.name for folder in folders] == ["run", "run-2", "run-3"]
    assert all(folder.is_dir() and folder.parent == tmp_path / "deep" / "checkpoints" for folder in folders)


def test_a_broken_link_is_an_error_and_no_endless_search(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted" / "disk")
    with pytest.raises(FileExistsError):
        new_run_folder(tmp_path / "checkpoints", "run")


def test_a_start_with_resume_auto_keeps_its_name_or_the_next_start_would_not_find_it(tmp_path):
    assert start_folder("auto", "run", tmp_path / "checkpoints").name == "run"
    assert start_folder("auto", "run", tmp_path / "checkpoints").name == "run"
    assert start_folder(None, "run", tmp_path / "checkpoints").name == "run-2"


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_checkpoint_dir_that_cannot_be_written_to_is_the_users_to_mend(resume, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"checkpoint_dir: {tmp_path / 'file'} cannot be written to \(.*\); .*(no|not a) folder"
    ):
        start_folder(resume, "run", tmp_path / "file")


def test_a_file_belongs_to_a_run_only_if_its_folder_looks_like_one(tmp_path):
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    run.mkdir()
    foreign.mkdir()
    for name in ("run.json", "split.csv", "last.pt"):
        (run / name).touch()
    assert folder_of(run) == folder_of(run / "last.pt") == folder_of(run / "copy.pt") == run
    (foreign / "split.csv").touch()
    assert folder_of(foreign / "last.pt") is None
