"""What a checkpoint holds, field by field: the description of the format, and the check of a file against it.

A file whose digest is right can still hold something else than this version reads: written by a changed program, or edited.
`check_state` names the first field that is missing or of another kind; whether the tensors fit the model is checked where they
are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unet_trainer.config.schema import FIELDS

MAX_COUNT = 2**53  # more is no count of anything
Rule = Callable[[Any, str], None]  # raises ValueError with the place that is wrong


def _refuse(place: str, value: Any, need: str) -> ValueError:
    got = f"a tensor of {'×'.join(map(str, value.shape)) or 'one value'}" if torch.is_tensor(value) else type(value).__name__
    return ValueError(f"{place} is {got if value is not None else 'empty'}; need {need}")


def text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        raise _refuse(place, value, "text")


def count(value: Any, place: str) -> None:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{place} is {value!r:.60}; need a whole number of at least 0")


def number(value: Any, place: str) -> None:
    """NaN and infinity too: a score may be undefined."""
    if type(value) not in (int, float):
        raise _refuse(place, value, "a number")


def seconds(value: Any, place: str) -> None:
    number(value, place)
    if not 0 <= value < math.inf:
        raise ValueError(f"{place} is {value!r:.60}; need a number of at least 0")


def positive(value: Any, place: str) -> None:
    number(value, place)
    if not 0 < value < math.inf:
        raise ValueError(f"{place} is {value!r:.60}; need a number above 0")


def tensor(value: Any, place: str) -> None:
    if not torch.is_tensor(value):
        raise _refuse(place, value, "a tensor")


def scalar(value: Any, place: str) -> None:
    tensor(value, place)
    if value.ndim:
        raise _refuse(place, value, "one value")


def random_state(value: Any, place: str) -> None:
    tensor(value, place)
    if value.dtype != torch.uint8 or value.ndim != 1:
        raise _refuse(place, value, "the bytes of a random state")


def mapping(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise _refuse(place, value, "values by name")


def optional(rule: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        if value is not None:
            rule(value, place)

    return check


def both(first: Rule, second: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        first(value, place)
        second(value, place)

    return check


def either(first: Rule, second: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        try:
            first(value, place)
        except ValueError:
            second(value, place)

    return check


def list_of(rule: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, list | tuple):
            raise _refuse(place, value, "a list")
        for index, item in enumerate(value):
            rule(item, f"{place}[{index}]")

    return check


def values_of(rule: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        mapping(value, place)
        for key, item in value.items():
            rule(item, f"{place}[{key}]")

    return check


def by_name(rule: Rule) -> Rule:
    def check(value: Any, place: str) -> None:
        mapping(value, place)
        for name, item in value.items():
            text(name, f"a name in {place}")
            rule(item, f"{place}.{name}")

    return check


def fields(**rules: Rule) -> Rule:
    """Those whose rule is `maybe(...)` may be missing; others than these may be there."""

    def check(value: Any, place: str) -> None:
        mapping(value, place)
        for name, rule in rules.items():
            where = f"{place}.{name}" if place else name
            if name in value:
                rule(value[name], where)
            elif rule not in _may_be_missing:
                raise ValueError(f"{where} is missing")

    return check


_may_be_missing: set[Rule] = set()


def maybe(rule: Rule) -> Rule:
    """A field that earlier versions did not write."""

    def check(value: Any, place: str) -> None:
        rule(value, place)

    _may_be_missing.add(check)
    return check


def settings(value: Any, place: str) -> None:
    """The config: every key that this version knows has a value that it takes."""
    mapping(value, place)
    for name in FIELDS.keys() & value.keys():
        try:
            FIELDS[name].metadata["parse"](value[name])
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError(f"{place}.{name} is {value[name]!r:.60}; {error}") from None


# Columns that a later version added are missing in the rows of an earlier one.
ROW = both(by_name(number), fields(epoch=number, images_per_second=maybe(positive)))
WEIGHTS = by_name(tensor)
TOTALS = fields(**dict.fromkeys(("loss_sum", "matrix", "num_skipped", "num_nan", "num_bad", "first_bad"), tensor), num_images=count)

# last.pt and previous.pt, as TrainState.state_dict and the Checkpointer fill them.
STATE: dict[str, Rule] = {
    "config": settings,
    "split": fields(train=list_of(text), val=list_of(text)),
    "model": WEIGHTS,
    "optimizer": fields(state=values_of(mapping), param_groups=list_of(fields(params=list_of(count)))),
    "scaler": fields(scale=maybe(number), _growth_tracker=maybe(count)),
    "learning_rate": fields(num_drops=count, epochs_since_drop=count, factor=positive, num_epochs=maybe(count)),
    "progress": fields(best_value=number, best_epoch=count, reference=number, epochs_since_best=count, patience_used=maybe(count)),
    "ema": optional(fields(model=WEIGHTS, num_updates=either(scalar, count))),
    "totals": TOTALS,
    "epoch": count,
    "batch": count,
    "history": list_of(ROW),
    "per_class_iou": list_of(optional(number)),
    "confusion": maybe(list_of(list_of(count))),
    "seconds": seconds,
    "train_seconds": seconds,
    "wait_seconds": seconds,
    "num_rollbacks": count,
    "random_state": random_state,
    "cuda_random_state": optional(random_state),
    "ranks": maybe(  # of a torchrun job
        list_of(
            fields(statistics=list_of(tensor), totals=TOTALS, random_state=random_state, cuda_random_state=optional(random_state))
        )
    ),
}


def check_state(content: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the field that is missing, of another kind, or at odds with the others."""
    fields(**STATE)(content, "")
    epoch, best_epoch = content["epoch"], content["progress"]["best_epoch"]
    if len(content["history"]) != epoch:
        raise ValueError(f"history has {len(content['history'])} rows for {epoch} epochs")
    if content.get("ranks") == []:
        raise ValueError("ranks is empty; need one for each process")
    if best_epoch > epoch:
        raise ValueError(f"progress.best_epoch is {best_epoch}, of {epoch} epochs")


def check_fits(name: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless both hold tensors of the same names, shapes and kinds of number."""
    missing, unknown = [key for key in wanted if key not in found], [key for key in found if key not in wanted]
    if missing or unknown:
        lacks = [f"lacks {missing[0]}"] if missing else []
        has = [f"holds {unknown[0]}, which this model has not"] if unknown else []
        raise ValueError(f"{name} {' and '.join(lacks + has)} ({len(missing) + len(unknown)} of {len(wanted)} tensors)")
    for key, tensor_here in wanted.items():
        there = found[key]
        if there.shape != tensor_here.shape or there.is_floating_point() != tensor_here.is_floating_point():
            raise ValueError(f"{name}: {key} is {_shape(there)} in the file, {_shape(tensor_here)} in this model")


def _shape(value: torch.Tensor) -> str:
    return f"{'×'.join(map(str, value.shape)) or 'one value'} of {str(value.dtype).removeprefix('torch.')}"
