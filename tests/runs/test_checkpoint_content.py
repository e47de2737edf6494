"""A file whose digest is right may still hold something else: whatever is missing, of another kind or of another shape is named.

The variants are made from the description of the format itself, so that a field that is added is tried as well.
"""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.small_runs import ROW
from helpers.steps import make_batch, make_settings, small_components, take_step
from unet_trainer.runs.checkpoint_content import STATE, check_fits, check_state
from unet_trainer.runs.checkpoint_file import read_last, write_checkpoint
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.training.rank_state import rank_state

SETTINGS = {"ema_decay": 0.9}


@pytest.fixture(scope="module")
def content():
    """A state as a run saves it, after an epoch."""
    components = small_components(**SETTINGS)
    take_step(components.train_step, make_batch(2, 0, side=32), metrics=components.state.metrics)
    state = components.state
    state.epoch, state.history, state.per_class_iou, state.confusion = 1, [dict(ROW)], [0.5], [[1, 2], [3, 4]]
    state.early_stopping.update(0.5, 1)
    state.ranks = [rank_state(state), rank_state(state)]  # as of a torchrun job
    split = {"train": ["a", "b"], "val": ["c"]}
    return copy.deepcopy({"config": make_settings().repeatable_dict(), "split": split, **state.state_dict()})


def places(value, path=()):
    """The path of every value in nested dicts and lists; of lists and dicts with many alike, the first two."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[: None if path in ((), ("progress",), ("learning_rate",), ("totals",), ("history", 0)) else 2]:
        yield from places(item, (*path, key))


def changed(content, path, change):
    """With `change` applied to the container of the last key; containers on the way there are copies."""
    made = place = copy.copy(content)
    for key in path[:-1]:
        place[key] = copy.copy(place[key])
        place = place[key]
    change(place, path[-1])
    return made


def delete(place, key):
    del place[key]


def other_values(value):
    """Of other types, and numbers that no run comes to."""
    others = [None, "text", [], {}, -1, 2**60, 0.5, True, torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), [None], {"a": None}]
    return [other for other in others if type(other) is not type(value) or (isinstance(value, dict | list) and value and not other)]


def load(content):
    """As a resumed run does it."""
    check_state(content)
    small_components(**SETTINGS).state.load_state_dict(content)


def test_a_state_as_a_run_saves_it_passes(content):
    load(copy.deepcopy(content))


def test_the_description_names_all_that_a_run_saves(content):
    assert set(STATE) == set(content)


def test_every_field_that_is_missing_or_of_another_kind_is_named_or_does_no_harm(content):
    """Nothing but a ValueError is raised. What is accepted are numbers that could be, and settings that are not loaded."""
    components = small_components(**SETTINGS)
    num_refused = num_tried = 0
    accepted = []
    for path in places(content):
        if not path or path[0] == "config":
            continue
        value = content
        for key in path:
            value = value[key]
        changes = [delete, *(lambda place, key, other=other: place.__setitem__(key, other) for other in other_values(value))]
        for change in changes:
            variant = changed(content, path, change)
            num_tried += 1
            try:
                check_state(variant)
                components.state.load_state_dict(variant)
            except ValueError:
                num_refused += 1
            else:
                accepted.append(path)
    assert num_tried > 500
    assert num_refused > 0.85 * num_tried, (num_refused, num_tried)
    assert not {path[0] for path in accepted} & {"model", "scaler", "epoch", "batch", "num_rollbacks", "random_state"}


@pytest.mark.parametrize("name", [name for name in STATE if name not in ("confusion", "ranks")])
def test_a_missing_field_is_named(name, content):
    with pytest.raises(ValueError, match=rf"^{name} is missing$"):
        check_state(changed(content, (name,), delete))


NAMED = [
    (("epoch",), "1", r"epoch is '1'; need a whole number of at least 0"),
    (("epoch",), -1, r"epoch is -1; need a whole number of at least 0"),
    (("epoch",), True, r"epoch is True; need"),
    (("epoch",), 2, r"history has 1 rows for 2 epochs"),
    (("batch",), 2.0, r"batch is 2\.0; need a whole number"),
    (("history", 0), [], r"history\[0\] is list; need values by name"),
    (("history", 0, "val_iou"), None, r"history\[0\]\.val_iou is empty; need a number"),
    (("progress", "best_epoch"), 3, r"progress\.best_epoch is 3, of 1 epochs"),
    (("seconds",), float("inf"), r"seconds is inf; need a number of at least 0"),
    (("model",), [], r"model is list; need values by name"),
    (("model",), {"w": 1}, r"model\.w is int; need a tensor"),
    (("model",), {3: torch.zeros(1)}, r"a name in model is int; need text"),
    (("optimizer", "param_groups", 0, "params"), [0, "1"], r"optimizer\.param_groups\[0\]\.params\[1\] is '1'; need"),
    (("random_state",), torch.zeros(4), r"random_state is a tensor of 4; need the bytes of a random state"),
    (("split",), {"train": ["a"]}, r"split\.val is missing"),
    (("split", "val"), [3], r"split\.val\[0\] is int; need text"),
    (("config", "batch_size"), "many", r"config\.batch_size is 'many'; need a whole number"),
    (("config", "loss"), torch.zeros(2), r"config\.loss is tensor"),
    (("ema", "model"), None, r"ema\.model is empty; need values by name"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), NAMED, ids=[f"{'.'.join(map(str, path))} {value!r:.12}" for path, value, _ in NAMED]
)
def test_a_field_of_another_kind_is_named_with_what_it_should_be(path, value, message, content):
    with pytest.raises(ValueError, match=message):
        check_state(changed(content, path, lambda place, key: place.__setitem__(key, value)))


def test_the_file_is_named_before_the_field(content, tmp_path):
    write_checkpoint(tmp_path / "last.pt", changed(content, ("history",), delete))
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path / 'last.pt'} is no state that can be gone on from: history is missing$"
    ):
        read_last(tmp_path / "last.pt")


def test_tensors_of_another_model_are_named_with_both_shapes():
    wanted = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}
    check_fits("its model", {"w": torch.ones(2, 3, dtype=torch.float16), "n": torch.tensor(5)}, wanted)
    with pytest.raises(ValueError, match=r"its model: w is 3×2 of float32 in the file, 2×3 of float32 in this model"):
        check_fits("its model", {"w": torch.zeros(3, 2), "n": torch.tensor(1)}, wanted)
    with pytest.raises(ValueError, match=r"its model: n is one value of float32 in the file, one value of int64 in this model"):
        check_fits("its model", {"w": torch.zeros(2, 3), "n": torch.tensor(1.0)}, wanted)
    with pytest.raises(ValueError, match=r"its model lacks n and holds m, which this model has not \(2 of 2 tensors\)"):
        check_fits("its model", {"w": torch.zeros(2, 3), "m": torch.tensor(1)}, wanted)
