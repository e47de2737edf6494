"""Which files and folders are searched: no hidden ones, and none of our own."""

from __future__ import annotations

from unet_trainer.datasets.layouts import resolved, walk


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_all_searches_of_a_dataset_leave_out_what_this_program_writes(tmp_path):
    """Images, annotations and files of unknown kinds are found by the same walk."""
    ours = (
        "checkpoints/.scan/0.json",
        "checkpoints/run/evaluation/evaluation.json",
        "old/config.yaml",
        "old/split.csv",
        "old/x.json",
    )
    touch(tmp_path, "a.png", "notes.json", ".hidden/b.json", "sub/c.dcm", "sub/.d.png", *ours)
    assert [(here.relative_to(tmp_path).as_posix(), names) for here, names in walk(tmp_path)] == [
        (".", ["a.png", "notes.json"]),
        ("sub", ["c.dcm"]),
    ]


def test_a_path_is_resolved_whatever_it_is(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("file")
    names = {"loop": "loop", "link": "file", "none": "none", "a\0b": "a\0b"}
    assert {name: resolved(tmp_path / name).name for name in names} == names
