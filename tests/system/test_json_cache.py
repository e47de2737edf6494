"""JSON files that may be lost at any time: damaged ones are as good as none, links are not followed, drafts do not stay."""

import contextlib
import math
import os
import time

import pytest

from unet_trainer.system.json_cache import check_plain, read_cache, write_cache


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"a": 1', b"[" * 200_000, b'{"a":' * 200_000])
def test_what_is_damaged_is_as_good_as_none(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    assert read_cache(tmp_path / "a.json") == {}


def test_drafts_of_killed_processes_are_deleted_and_those_of_others_are_not(tmp_path):
    for name, age in ((".a.json.k2j3h4_a.tmp", 7200), (".b.json.k2j3h4_a.tmp", 10)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, 2 * (time.time() - age,))
    write_cache(tmp_path / "a.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.json.k2j3h4_a.tmp", "a.json"]


@pytest.mark.parametrize(("value", "is_plain"), [(1e30, True), (2**62, True), (2**63, False), (math.inf, False)])
def test_settings_may_be_any_finite_number(value, is_plain):
    """learning_rate=1e30 is a mistake that training explains; it was a traceback of the record."""
    with contextlib.nullcontext() if is_plain else pytest.raises(ValueError, match="plain value"):
        assert check_plain({"value": [value]}) == {"value": [value]}
