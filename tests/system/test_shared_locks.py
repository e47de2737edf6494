"""Locks that say that a file is in use."""

from __future__ import annotations

import os

import pytest

from unet_trainer.system import shared_locks
from unet_trainer.system.shared_locks import is_in_use, lock_shared


@pytest.mark.skipif(shared_locks.fcntl is None, reason="there are no such locks here")
def test_a_file_is_in_use_until_the_last_who_locked_it_closes_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert is_in_use(path) is False
    handles = [os.open(path, os.O_RDONLY) for _ in range(2)]
    for handle in handles:
        lock_shared(handle)
    os.close(handles[0])
    assert is_in_use(path) is True
    os.close(handles[1])
    assert is_in_use(path) is False


def test_where_files_cannot_be_locked_it_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_locks, "fcntl", None)
    (tmp_path / "file").write_bytes(b"")
    with (tmp_path / "file").open("rb") as file:
        lock_shared(file.fileno())
        assert is_in_use(tmp_path / "file") is None


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(OSError):
        is_in_use(tmp_path / "file")
