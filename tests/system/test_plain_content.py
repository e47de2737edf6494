"""What a JSON file remembers becomes a dataclass again if every value has its type, and a ValueError otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest

from unet_trainer.system.plain_content import from_plain


@dataclass(frozen=True)
class Inner:
    count: int = 0


@dataclass(frozen=True)
class Outer:
    name: str
    size: float
    is_alpha: bool
    means: tuple[float, ...]
    range: tuple[float, float]
    counts: dict[int, int]
    shares: Mapping[str, float]
    inner: Inner | None = None


WHOLE = Outer("a", 2.0, True, (1.0, 2.0, 3.0), (0.0, 1.0), {255: 3}, {"flip": 0.5}, Inner(4))


@pytest.mark.parametrize("inner", [Inner(4), None])
def test_a_dataclass_comes_back_as_it_was(inner):
    whole = Outer(**{**vars(WHOLE), "inner": inner})
    assert from_plain(Outer, json.loads(json.dumps(asdict(whole)))) == whole


def test_a_whole_number_is_a_number():
    assert from_plain(Inner, {"count": 3}) == Inner(3)
    assert from_plain(Outer, {**json.loads(json.dumps(asdict(WHOLE))), "size": 2}).size == 2


WRONG = {
    "name": [1, None, ["a"]],
    "size": ["2.0", None, True, [2.0]],
    "is_alpha": [1, "true", None],
    "means": [1.0, ["1.0"], None, {"0": 1.0}, [None]],
    "range": [[0.0], [0.0, 1.0, 2.0], "01"],
    "counts": [{"a": 3}, {"255": "3"}, [255], None, {"255": 1.5}],
    "shares": [{"flip": "0.5"}, [0.5], 3],
    "inner": [{}, {"count": "4"}, {"count": 4, "more": 1}, [4], 4],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ValueError, match=r"is no |are not the fields|invalid literal"):
        from_plain(Outer, {**json.loads(json.dumps(asdict(WHOLE))), name: value})


@pytest.mark.parametrize("name", list(WRONG))
def test_a_missing_field_is_refused(name):
    content = asdict(WHOLE)
    del content[name]
    with pytest.raises(ValueError, match="are not the fields of Outer"):
        from_plain(Outer, content)


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_content_that_is_no_mapping_is_refused(content):
    with pytest.raises(ValueError, match="are not the fields of Inner"):
        from_plain(Inner, content)
