"""What may change between two starts of a run, what must not, and what is told."""

from __future__ import annotations

import pytest

from helpers.runs import SPLIT
from helpers.steps import make_settings
from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.runs.resume_checks import (
    MAY_CHANGE_SILENTLY,
    MUST_STAY,
    MUST_STAY_FOR_VAL_LOSS,
    compare_configs,
    compare_splits,
    split_names,
)


def compare(before, now):
    """Two starts with settings that leave nothing open."""
    before, now = as_dict(load_config(before)), as_dict(load_config(now))
    return compare_configs(before, now, now)


def test_another_monitor_is_refused():
    with pytest.raises(CheckpointError, match="monitor: val_iou in the checkpoint, val_loss now; it decides which epoch was best"):
        compare({}, {"monitor": "val_loss"})


@pytest.mark.parametrize("change", [{"loss": "dice"}, {"class_weights": [2.0]}])
def test_another_loss_is_refused_only_where_the_loss_is_monitored(change):
    (name,) = change
    assert [line.partition(":")[0] for line in compare({}, change)] == [name]
    with pytest.raises(CheckpointError, match=rf"{name}: .* it decides which epoch was best"):
        compare({"monitor": "val_loss"}, {"monitor": "val_loss", **change})


def test_changes_that_make_the_result_meaningless_are_refused_all_at_once():
    with pytest.raises(CheckpointError) as caught:
        compare({}, {"encoder": "resnet18", "num_classes": 3, "learning_rate": 0.5})
    assert str(caught.value) == (
        "cannot go on with other settings than the run began with:\n"
        "  num_classes: 1 in the checkpoint, 3 now; it decides the classes\n"
        "  encoder: resnet34 in the checkpoint, resnet18 now; it decides the model\n"
        "  Keep them, or start a new run"
    )


@pytest.mark.parametrize("change", [{"image_size": 64}, {"fit": "crop"}])
def test_another_size_of_what_the_model_sees_is_refused(change):
    (name,) = change
    with pytest.raises(CheckpointError, match=rf"{name}: .* now; it decides what the model sees\n"):
        compare({}, change)


def test_harmless_changes_are_told_and_those_that_do_not_affect_the_result_are_not():
    changes = {"learning_rate": 0.5, "num_workers": 3, "checkpoint_dir": "elsewhere", "on_oom": "shrink"}
    assert compare({}, changes) == ["learning_rate: 0.001 → 0.5"]


def test_a_value_that_was_decided_then_and_is_decided_again_has_not_changed():
    before, now = make_settings(), make_settings()
    assert before.asked.in_channels == "auto"
    assert compare_configs(before.repeatable_dict(), now.repeatable_dict(), as_dict(now.asked)) == []


def test_a_value_that_is_auto_in_both_has_not_changed():
    """Earlier versions kept auto where this one keeps what was decided."""
    now = make_settings()
    before = {**now.repeatable_dict(), "in_channels": "auto", "image_mean": "auto"}
    assert compare_configs(before, now.repeatable_dict(), as_dict(now.asked)) == []
    with pytest.raises(CheckpointError, match="in_channels: 1 in the checkpoint, 3 now; it decides the model"):
        compare_configs({**before, "in_channels": 1}, now.repeatable_dict(), as_dict(now.asked))


def test_a_key_that_an_earlier_version_did_not_have_has_not_changed():
    now = make_settings(batch_parts=2)
    before = now.repeatable_dict()
    del before["batch_parts"]
    assert compare_configs(before, now.repeatable_dict(), as_dict(now.asked)) == []


def test_every_key_that_is_named_exists_and_in_one_list_only():
    lists = [set(MUST_STAY), set(MUST_STAY_FOR_VAL_LOSS), set(MAY_CHANGE_SILENTLY)]
    assert set.union(*lists) <= set(FIELDS)
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_the_names_of_a_split_are_those_of_its_pairs():
    assert split_names(SPLIT) == {"train": ["a", "b"], "val": ["c"]}


def test_the_same_split_in_another_order_is_the_same():
    compare_splits({"train": ["a", "b"], "val": ["c"]}, {"train": ["b", "a"], "val": ["c"]})
    same_names = {"train": ["0", "1"], "val": ["0", "1"]}  # train/images/0.png and val/images/0.png
    compare_splits(same_names, same_names)


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"train": ["a", "c"], "val": ["b"]}, "1 images trained on would now validate, e.g. b"),
        ({"train": ["a", "b"], "val": ["c", "d"]}, "1 validation images differ, e.g. d"),
        ({"train": ["a", "b", "e"], "val": ["c"]}, "1 training images differ, e.g. e"),
    ],
)
def test_another_split_is_refused_by_example(now, problem):
    with pytest.raises(CheckpointError, match=rf"cannot go on with another data split: {problem} \(data_dir, val_fraction"):
        compare_splits({"train": ["a", "b"], "val": ["c"]}, now)
