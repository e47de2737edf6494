"""What may change between two starts of a run, what must not, and what is told."""

from __future__ import annotations

import pytest

from helpers.project import FIXED_RECIPE
from helpers.runs import SPLIT
from helpers.steps import make_settings
from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.config.resolved_config import Decision
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.runs.resume_checks import (
    BEFORE_THEY_EXISTED,
    MAY_BE_CHOSEN_AGAIN,
    MAY_CHANGE_SILENTLY,
    MUST_STAY,
    MUST_STAY_FOR_VAL_LOSS,
    compare_configs,
    compare_splits,
    keep_decided,
    keep_reasons,
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
        compare({"num_classes": 1, "encoder": "resnet34"}, {"encoder": "resnet18", "num_classes": 3, "learning_rate": 0.5})
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
    assert compare({"learning_rate": 0.001}, changes) == ["learning_rate: 0.001 → 0.5"]


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


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"mask_values": [[0, 0, 0], [255, 0, 0]]}, {"mask_values": [0, [255, 0, 0]]}),  # black is the value 0
        ({"mask_values": [0, [1, 2]]}, {"mask_values": [[0], [[2], [1]]]}),
        ({"ignore_value": [10, 11]}, {"ignore_value": [[11], [10]]}),
        ({"ignore_value": 255}, {"ignore_value": [255, 255, 255]}),
    ],
)
def test_classes_that_are_written_in_another_way_have_not_changed(before, now):
    assert compare(before, now) == []


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        ({"mask_values": [0, 1]}, {"mask_values": [0, [1, 2]]}, "mask_values"),
        ({"mask_values": [0, 1]}, {"mask_values": [1, 0]}, "mask_values"),
        ({"mask_values": [0, 1]}, {"mask_values": "nonzero"}, "mask_values"),
        ({"ignore_value": 255}, {"ignore_value": [254, 255]}, "ignore_value"),
        ({"ignore_value": 255}, {"ignore_value": None}, "ignore_value"),
        ({}, {"unknown_values": "ignore"}, "unknown_values"),
        ({"mask_tolerance": 0}, {"mask_tolerance": 40}, "mask_tolerance"),
    ],
)
def test_other_classes_are_refused(before, now, name):
    with pytest.raises(CheckpointError, match=rf"\n  {name}: .* now; it decides the classes\n"):
        compare(before, now)


# What is open at the resume as well


def test_what_is_open_is_as_the_run_began():
    settings = make_settings(
        image_size=64,
        **dict.fromkeys(["learning_rate", "loss", "ema_decay", "use_amp", "augmentation"], "auto"),
        class_weights=[1.0, 2.0],
        num_classes=2,
    )
    before = settings.repeatable_dict()
    kept = keep_decided(Config(num_classes=2), before)
    open_keys = [name for name in FIELDS if getattr(Config(), name) == "auto" and name not in MAY_BE_CHOSEN_AGAIN]
    assert len(open_keys) > 20
    for name in [*open_keys, "num_epochs"]:
        assert getattr(kept, name) == getattr(settings.taken, name), name
    assert isinstance(kept.class_weights, tuple)
    assert (kept.device, kept.num_workers, kept.cache) == ("auto", "auto", "auto")


def test_what_is_set_is_not_replaced_by_what_the_run_began_with():
    before = make_settings(learning_rate=0.5, batch_size=4).repeatable_dict()
    config = load_config({**FIXED_RECIPE, "learning_rate": 0.25, "batch_size": 2})
    kept = keep_decided(config, before)
    assert (kept.learning_rate, kept.batch_size) == (0.25, 2)
    assert kept.sources == config.sources


def test_a_checkpoint_of_before_a_setting_existed_has_what_was_done_then():
    """Repeats, rates of the encoder, attention and deep supervision are decided otherwise for a new run."""
    new = tuple(BEFORE_THEY_EXISTED)
    before = {name: value for name, value in make_settings().repeatable_dict().items() if name not in new}
    kept = keep_decided(Config(), before)
    assert (kept.repeats, kept.encoder_lr_factor, kept.decoder_attention, kept.deep_supervision) == (1, 1.0, "none", 0.0)
    assert (kept.mask_tolerance, kept.cutmix) == (0, 0)
    assert set(BEFORE_THEY_EXISTED) <= set(FIELDS)
    set_now = keep_decided(load_config({"encoder_lr_factor": 0.5, "repeats": 2}), before)
    assert (set_now.encoder_lr_factor, set_now.repeats) == (0.5, 2)


def test_settings_of_a_checkpoint_that_were_off_stay_off():
    """Where null is a value, it is one that the run began with."""
    kept = keep_decided(Config(), make_settings().repeatable_dict())
    assert (kept.class_weights, kept.ema_decay, kept.early_stopping_patience, kept.encoder_weights) == (None,) * 4


def test_what_earlier_versions_left_open_stays_open():
    before = {**make_settings().repeatable_dict(), "image_mean": "auto"}
    assert keep_decided(Config(), before).image_mean == "auto"


def test_widths_that_were_chosen_along_with_the_encoder_are_kept_with_it():
    before = make_settings(encoder="resnet18", decoder_channels=[128, 64, 48, 32, 16]).repeatable_dict()
    kept = keep_decided(Config(), before)
    assert (kept.encoder, kept.decoder_channels) == ("resnet18", (128, 64, 48, 32, 16))
    own = keep_decided(Config(decoder_channels=(8, 8, 8, 8, 8)), before)
    assert own.decoder_channels == (8, 8, 8, 8, 8)  # which compare_configs refuses
    assert keep_decided(Config(encoder="resnet18"), before).decoder_channels is None


def test_what_was_found_along_with_the_values_of_the_masks_is_kept_with_them():
    """The number of classes, void and the names of a class file."""
    before = {
        **make_settings().repeatable_dict(),
        "num_classes": 3,
        "mask_values": [0, [1, 2], [64, 0, 128]],
        "ignore_value": 255,
        "class_names": ["sky", "road", "pole"],
        "mask_tolerance": 31,
    }
    kept = keep_decided(Config(), before)
    assert (kept.num_classes, kept.mask_values, kept.ignore_value) == (3, (0, (1, 2), (64, 0, 128)), 255)
    assert (kept.class_names, kept.mask_tolerance) == (("sky", "road", "pole"), 31)
    given = keep_decided(load_config({"mask_values": [0, 1, 2], "ignore_value": None, "class_names": ["a", "b", "c"]}), before)
    assert (given.mask_values, given.ignore_value, given.class_names) == ((0, 1, 2), None, ("a", "b", "c"))


def test_the_number_of_epochs_is_planned_again_with_a_time_budget_alone():
    before = make_settings(num_epochs=30).repeatable_dict()
    assert keep_decided(Config(), before).num_epochs == 30
    assert keep_decided(Config(time_budget="10m"), before).num_epochs == "auto"


def test_every_key_that_is_named_exists_and_in_one_list_only():
    lists = [set(MUST_STAY), set(MUST_STAY_FOR_VAL_LOSS), set(MAY_CHANGE_SILENTLY)]
    assert set.union(*lists, MAY_BE_CHOSEN_AGAIN) <= set(FIELDS)
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


def test_a_setting_that_is_as_the_run_began_keeps_its_source_and_reason():
    """A run is resumed with its own config.yaml: all of it would else come from a file."""
    began = make_settings(num_epochs=50, seed=7)
    began.change("what memory has room for", batch_size=4)
    resumed = make_settings(batch_size=4, num_epochs=60, seed=7)
    decisions = began.decisions_dict() | {"of_another_version": ["file", ""]}
    keep_reasons(resumed, began.repeatable_dict(), decisions)
    assert resumed.decisions["batch_size"] == Decision("decided", "what memory has room for")
    assert resumed.decisions["num_epochs"].source == "config"  # another value: the source of this start
    assert "of_another_version" not in resumed.decisions
    assert "# decided: what memory has room for" in resumed.to_yaml("")


def test_what_is_decided_for_this_machine_is_not_replaced_by_what_was_for_another():
    resumed = make_settings()
    device = resumed.decisions["device"]
    keep_reasons(resumed, resumed.repeatable_dict(), {"device": ["decided", "another machine"]})
    assert resumed.decisions["device"] == device


def test_a_checkpoint_without_reasons_leaves_those_of_this_start():
    resumed = make_settings()
    before = dict(resumed.decisions)
    keep_reasons(resumed, resumed.repeatable_dict(), {})
    assert resumed.decisions == before


def test_a_split_csv_that_was_swapped_is_named(tmp_path):
    table = tmp_path / "split.csv"
    with pytest.raises(
        CheckpointError, match=rf"would now validate, e\.g\. b \({table} decides it, and is not the run's own\); put it back"
    ):
        compare_splits({"train": ["a", "b"], "val": ["c"]}, {"train": ["a", "c"], "val": ["b"]}, table)
