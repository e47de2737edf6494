"""The demo dataset: always the same, complete or absent, and neither trivial nor impossible to learn."""

import hashlib
import tempfile

import numpy as np
import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.data.formats import demo
from unet_trainer.data.formats.demo import ensure_demo, write_demo


@pytest.fixture
def three_images(monkeypatch):
    monkeypatch.setattr(demo, "NUM_IMAGES", 3)


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_files_are_the_same_every_time(tmp_path):
    write_demo(tmp_path / "first", 2, side=64)
    np.random.seed(99)  # global random state plays no part
    write_demo(tmp_path / "second", 2, side=64)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_a_demo_that_cannot_be_made_is_told_with_the_reason(tmp_path, three_images, monkeypatch):
    (tmp_path / "data").touch()
    with pytest.raises(UserError, match=r"data_dir: .*data/demo cannot be made; .*data is not a folder"):
        ensure_demo(tmp_path / "data" / "demo")

    def refuse(**options):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".demo-x"))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(UserError, match=r"data_dir: .*new/demo, the demo, cannot be made \(Permission denied\)$"):
        ensure_demo(tmp_path / "new" / "demo")


def test_two_starts_at_the_same_time_write_one_dataset(tmp_path, three_images, monkeypatch):
    folder = tmp_path / "demo"

    def write_while_another_finishes(draft, num_images):
        write_demo(draft, num_images, side=64)
        write_demo(folder, num_images, side=32)
        theirs.update(digests(folder))

    theirs = {}
    monkeypatch.setattr(demo, "write_demo", write_while_another_finishes)
    ensure_demo(folder)
    assert len(theirs) == 6
    assert digests(folder) == theirs
    assert list(tmp_path.iterdir()) == [folder]
