"""The verdict on a model: baselines by hand, each way in which a run can be useless, and that a good run is not warned about."""

from __future__ import annotations

import math
import shlex

import pytest

from helpers.small_runs import ROW
from helpers.steps import make_settings
from unet_trainer.config.load import load_config
from unet_trainer.training.verdict import Finding, judge_model

TWO = ("background", "foreground")
# 30% foreground. Rows truth, columns prediction.
GOOD = [[68, 2], [2, 28]]  # IoU 28 / 32
ALL_FOREGROUND = [[0, 70], [0, 30]]  # IoU 0.3
ALL_BACKGROUND = [[70, 0], [30, 0]]
ENOUGH = 1000  # steps in an epoch


def rows(train_iou, val_iou=None, train_loss=None, val_loss=None):
    """A row for each value of train_iou; what is not given is that of ROW."""
    columns = {"train_iou": train_iou, "val_iou": val_iou, "train_loss": train_loss, "val_loss": val_loss}
    given = {name: values for name, values in columns.items() if values is not None}
    return [{**ROW, "epoch": index + 1, **{name: given[name][index] for name in given}} for index in range(len(train_iou))]


def judge(confusion, history, best_epoch=1, steps_per_epoch=ENOUGH, native_size=(4000, 6000), **settings):
    resolved = make_settings(**{"image_size": 512, "augmentation": "default", **settings})
    return judge_model(resolved, confusion, history, best_epoch, len(history) * steps_per_epoch, native_size)


def advice_of(findings):
    return "\n".join(line for finding in findings for line in finding.advice)


@pytest.mark.parametrize("confusion", [[], [[0, 0], [0, 0]]])
def test_without_pixels_that_count_there_is_no_verdict(confusion):
    assert judge(confusion, rows([0.5])) == []


def test_a_good_run_is_not_warned_about():
    assert judge(GOOD, rows([0.5, 0.8, 0.9]), best_epoch=3) == []
    three = [[68, 2, 0], [2, 18, 0], [1, 0, 9]]
    assert judge(three, rows([0.5, 0.8, 0.9]), best_epoch=3, num_classes=3) == []


def test_a_finding_is_a_problem_with_a_line_for_each_cause():
    assert Finding("bad", ["one", "two"]).text == "bad\n  - one\n  - two"


@pytest.mark.parametrize(
    ("confusion", "warned"),
    [
        ([[0, 700], [0, 300]], True),
        ([[20, 680], [0, 300]], True),  # 300 / 980 = 0.3061: less than 0.3 + 0.01 × 0.7
        ([[27, 673], [0, 300]], False),  # 300 / 973 = 0.3083
    ],
)
def test_a_model_needs_a_hundredth_of_what_is_left_above_the_baseline(confusion, warned):
    assert bool(judge(confusion, rows([0.3]))) is warned


def test_training_that_did_not_learn_points_to_steps_masks_and_rate():
    (finding,) = judge(ALL_FOREGROUND, rows([0.2, 0.32]), best_epoch=2, steps_per_epoch=10, num_epochs=2, data_dir="my data")
    assert finding.problem == (
        "this model is of no use: its val IoU is 0.3000, and all foreground everywhere gives 0.3000. "
        "Training did not learn either (train IoU 0.3200 at best)"
    )
    assert finding.advice == [
        "20 optimizer steps may be too few: num_epochs=100",
        "masks may not match their images, or be read with the wrong mask_values: python train_unet.py check 'data_dir=my data'",
        "the learning rate may be too high for these data: learning_rate=0.0001",
    ]


def test_with_a_time_budget_more_time_is_advised_and_not_more_epochs():
    advice = advice_of(judge(ALL_FOREGROUND, rows([0.3]), steps_per_epoch=10, time_budget="1h30m", num_epochs="auto"))
    assert "10 optimizer steps may be too few: time_budget=180m\n" in advice
    assert "num_epochs" not in advice
    advice = advice_of(judge(ALL_FOREGROUND, rows([0.3]), steps_per_epoch=10, time_budget="20s", num_epochs="auto"))
    assert "too few: time_budget=1m\n" in advice


def test_enough_steps_are_not_called_few():
    assert "steps" not in advice_of(judge(ALL_FOREGROUND, rows([0.3]), steps_per_epoch=1000))
    assert "999 optimizer steps" in advice_of(judge(ALL_FOREGROUND, rows([0.3]), steps_per_epoch=999))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"learning_rate": 1e-9}, "learning_rate: 1e-09 is low for adamw: learning_rate=0.001"),
        ({"learning_rate": 1.0}, "learning_rate: 1 is high for adamw: learning_rate=0.001"),
        ({"learning_rate": 1e-5, "optimizer": "sgd"}, "learning_rate: 1e-05 is low for sgd: learning_rate=0.01"),
        ({"learning_rate": 3e-4}, "too high for these data: learning_rate=3.0e-05"),
    ],
)
def test_the_rate_to_try_depends_on_the_one_that_was_tried(settings, expected):
    assert expected in advice_of(judge(ALL_FOREGROUND, rows([0.3]), **settings))


def test_training_that_learned_points_to_overfitting_and_the_split():
    (finding,) = judge(ALL_FOREGROUND, rows([0.5, 0.9]), best_epoch=2)
    assert finding.problem.endswith("Training did learn (train IoU 0.9000): the model knows its training images only")
    assert finding.advice[0] == "overfitting: augmentation=strong, encoder_weights=imagenet, more training images"
    assert "another kind" in finding.advice[1]
    assert "learning_rate" not in advice_of([finding])


def test_settings_that_are_taken_already_are_not_advised():
    advice = advice_of(judge(ALL_FOREGROUND, rows([0.9]), augmentation="strong", encoder_weights="imagenet"))
    assert "overfitting: more training images\n" in advice


def test_weights_that_auto_has_looked_for_in_vain_are_not_advised():
    assert "encoder_weights" not in advice_of(judge(ALL_FOREGROUND, rows([0.9]), encoder_weights="auto"))


def test_a_train_iou_that_is_no_number_is_not_learned():
    (finding,) = judge(ALL_FOREGROUND, rows([math.nan, 0.31, math.nan]), best_epoch=2)
    assert "Training did not learn either (train IoU 0.3100 at best)" in finding.problem
    assert "(train IoU 0.0000 at best)" in judge(ALL_FOREGROUND, rows([math.nan]))[0].problem


def test_a_foreground_that_is_never_predicted_is_told_and_if_it_is_rare_how_to_find_it():
    (common,) = judge(ALL_BACKGROUND, rows([0.0]))
    assert "No validation pixel is predicted as foreground" in common.problem
    assert "class_weights" not in advice_of([common])  # 30% is not rare
    (rare,) = judge([[990, 0], [10, 0]], rows([0.0]))
    assert rare.advice[-3:] == [
        "small objects vanish when images are made smaller: image_size=1024, or fit=crop rare_class_crops=0.5",
        "a rare class weighs little in the loss: 'class_weights=[5.0]'",
        "a loss for rare classes: 'loss={dice: 1, focal: 1}'",
    ]


def test_what_helps_a_rare_class_and_is_taken_already_is_not_advised():
    settings = {"fit": "crop", "rare_class_crops": 0.5, "class_weights": [5.0], "loss": {"focal": 1}}
    advice = advice_of(judge([[990, 0], [10, 0]], rows([0.0]), **settings))
    assert [word for word in ("image_size", "crop", "class_weights", "loss") if word in advice] == []
    assert "more crops around rare classes: rare_class_crops=0.5" in advice_of(
        judge([[990, 0], [10, 0]], rows([0.0]), fit="crop", rare_class_crops=0.25)
    )


@pytest.mark.parametrize(
    ("size", "native_size", "expected"),
    [
        ([512, 768], (4000, 6000), "'image_size=[1024, 1536]'"),
        ([512, 768], (600, 6000), "'image_size=[608, 1536]'"),  # no larger than the images
        ([512, 768], (300, 800), "'image_size=[512, 800]'"),
        (512, (480, 700), "image_size=704"),
        (6000, (20000, 20000), "image_size=8192"),  # the largest that the config takes
    ],
)
def test_a_larger_image_size_is_at_most_that_of_the_images(size, native_size, expected):
    advice = advice_of(judge([[990, 0], [10, 0]], rows([0.0]), image_size=size, native_size=native_size))
    assert f"smaller: {expected}, or fit=crop" in advice


@pytest.mark.parametrize(
    ("size", "native_size"), [(128, (128, 128)), (128, (100, 90)), ([64, 128], (64, 128)), (8192, (9000, 9000))]
)
def test_images_that_are_not_made_smaller_need_no_larger_image_size_and_no_crops(size, native_size):
    advice = advice_of(judge([[990, 0], [10, 0]], rows([0.0]), image_size=size, native_size=native_size))
    assert "image_size" not in advice
    assert "crop" not in advice


def test_every_setting_that_is_advised_can_be_given_on_the_command_line():
    confusion, history = [[980, 0, 0], [10, 0, 0], [10, 0, 0]], rows([0.9] * 6, [0.3] * 6, [1.0, *[0.1] * 5])
    lines = advice_of(judge(confusion, history, num_classes=3, steps_per_epoch=1, ema_decay=0.9, image_size=[64, 32]))
    lines += "\n" + advice_of(judge(confusion, rows([0.3]), num_classes=3, data_dir="some where"))
    settings = [word.rstrip(",") for line in lines.splitlines() for word in shlex.split(line.replace(", or ", " ")) if "=" in word]
    names = [word.partition("=")[0] for word in settings]
    assert set(names) == {
        *("num_epochs", "image_size", "fit", "rare_class_crops", "class_weights", "loss", "ema_decay", "learning_rate"),
        *("augmentation", "encoder_weights", "data_dir"),
    }
    for setting in settings:
        load_config({"num_classes": 3}, [setting])


def test_classes_that_are_not_found_are_named_with_what_they_are_taken_for():
    confusion = [
        [5000, 0, 0, 0, 0],
        [0, 3000, 0, 0, 0],
        [180, 20, 0, 0, 0],  # 200 of 10000 pixels, never predicted
        [0, 1779, 0, 21, 0],  # 21 / 1800 = 0.0117
        [0, 0, 0, 0, 0],  # does not occur
    ]
    (finding,) = judge(confusion, rows([0.5]), num_classes=5, class_names=["sky", "road", "cow", "sea", "sand"])
    assert finding.problem == (
        "classes that the model hardly finds: "
        "cow (2.00% of the validation pixels, 90% of them taken for sky; never predicted), "
        "sea (18.00% of the validation pixels, 99% of them taken for road; IoU 0.0117, 1.2% of them found)"
    )
    assert "'class_weights=[1.0, 1.0, 2.5, 2.5, 1.0]'" in advice_of([finding])  # auto has decided on none


def test_a_class_of_a_few_pixels_is_told_by_their_number():
    (finding,) = judge([[60000, 0, 0], [0, 40000, 0], [3, 0, 0]], rows([0.6]), num_classes=3)
    assert "class 2 (3 of 100003 validation pixels, 100% of them taken for class 0; never predicted)" in finding.problem


@pytest.mark.parametrize(
    ("lost", "warned"),
    [
        ([0, 181, 19], True),  # 19 of 200 found
        ([0, 179, 21], False),
        ([0, 0, 200], False),
    ],
)
def test_a_class_is_hardly_found_where_nine_of_ten_pixels_are_wrong(lost, warned):
    assert bool(judge([[500, 0, 0], [0, 300, 0], lost], rows([0.5]), num_classes=3)) is warned


def test_a_class_that_is_predicted_far_too_often_is_hardly_found_either():
    (finding,) = judge([[9000, 0, 900], [0, 300, 0], [0, 0, 90]], rows([0.5]), num_classes=3)
    assert "class 2 (0.87% of the validation pixels; IoU 0.0909, 100.0% of them found)" in finding.problem


def test_a_foreground_that_is_hardly_found_is_told_where_the_model_is_better_than_the_baseline():
    (finding,) = judge([[9900, 0], [97, 3]], rows([0.03]))  # IoU 0.03; foreground everywhere gives 0.01
    assert finding.problem == (
        "classes that the model hardly finds: foreground (1.00% of the validation pixels, "
        "97% of them taken for background; IoU 0.0300, 3.0% of them found)"
    )
    assert "'class_weights=[5.0]'" in advice_of([finding])


def test_of_many_lost_classes_five_are_named():
    confusion = [[100] + [0] * 7] + [[10] + [0] * 7 for _ in range(7)]
    findings = judge(confusion, rows([0.1]), num_classes=8)
    assert [finding.problem.split(":")[0] for finding in findings] == [
        "this model is of no use",
        "classes that the model hardly finds",
    ]
    assert findings[1].problem.endswith(
        "class 5 (5.88% of the validation pixels, 100% of them taken for class 0; never predicted) and 2 more"
    )


def test_advice_is_given_once():
    confusion = [[100, 0, 0], [10, 0, 0], [10, 0, 0]]
    findings = judge(confusion, rows([0.3]), num_classes=3, steps_per_epoch=1)
    assert len(findings) == 2
    assert advice_of(findings).count("optimizer step") == 1


@pytest.mark.parametrize(
    ("confusion", "num_classes", "name"),
    [([[70, 0], [0, 0]], 1, "background"), ([[0, 0], [3, 9]], 1, "foreground"), ([[0, 0], [0, 9]], 2, "class 1")],
)
def test_validation_with_one_class_only_says_nothing_about_the_model(confusion, num_classes, name):
    (finding,) = judge(confusion, rows([0.9]), num_classes=num_classes)
    assert finding.problem == f"every validation pixel is {name}: val IoU says nothing about the model"
    assert "val_fraction" in advice_of([finding])


@pytest.mark.parametrize(
    ("confusion", "train_iou", "warned"),
    [
        ([[400, 300], [0, 300]], 0.69, False),  # 0.5, a gain of 0.286; training gains 0.557
        ([[400, 300], [0, 300]], 0.71, True),  # and here 0.586
        ([[100, 600], [0, 300]], 0.64, False),  # 0.3333, a gain of 0.048; training gains 0.486, which is little itself
        ([[100, 600], [0, 300]], 0.66, True),  # and here 0.514
    ],
)
def test_validation_with_less_than_half_of_what_training_gained_is_told(confusion, train_iou, warned):
    problems = [finding.problem for finding in judge(confusion, rows([train_iou]))]
    iou = 300 / (300 + confusion[0][1])
    expected = f"val IoU {iou:.4f} is far below the train IoU of {train_iou:.4f}: the model knows its training images only"
    assert problems == ([expected] if warned else [])


# The best epoch was an early one


def test_an_early_best_epoch_is_told_if_training_went_on_to_learn():
    history = rows([0.5, 0.6, 0.7, 0.9, 0.95], [0.6, 0.5, 0.5, 0.5, 0.5], [1.0, 0.8, 0.6, 0.4, 0.2])
    (finding,) = judge(GOOD, history, best_epoch=1)
    assert finding.problem == (
        "epoch 1 of 5 was the best by val_iou, while the training loss went on falling (1.0000 → 0.2000): "
        "what was learned later did not help on validation images"
    )
    assert finding.advice[:2] == [
        "a lower rate: learning_rate=0.0001",
        "overfitting: augmentation=strong, encoder_weights=imagenet, more training images",
    ]
    assert judge(GOOD, history, best_epoch=1, ema_decay=0.999)[0].advice[0] == (
        "the average of the weights may lag behind them: ema_decay=null"
    )


@pytest.mark.parametrize(
    ("num_epochs", "best_epoch", "warned"),
    [(4, 1, False), (5, 1, True), (5, 2, False), (19, 2, False), (20, 2, True), (20, 3, False)],
)
def test_early_is_the_first_epoch_or_the_first_tenth(num_epochs, best_epoch, warned):
    history = rows([0.9] * num_epochs, [0.6] * num_epochs, [1 / (1 + index) for index in range(num_epochs)])
    assert bool(judge(GOOD, history, best_epoch)) is warned


@pytest.mark.parametrize(
    ("train_iou", "train_loss"),
    [
        (0.9, 0.95),  # the loss hardly fell
        (0.61, 0.1),  # training is no better than validation: an easy dataset
    ],
)
def test_an_early_best_epoch_alone_is_no_problem(train_iou, train_loss):
    assert judge(GOOD, rows([train_iou] * 6, [0.6] * 6, [1.0] + [train_loss] * 5)) == []


def test_a_val_loss_that_was_lowest_early_while_val_iou_rose_points_to_the_monitor():
    history = rows([0.9] * 6, [0.5, 0.6, 0.7, 0.7, 0.7, 0.7], [1.0] + [0.1] * 5)
    assert "val IoU rose after that epoch: monitor=val_iou" in advice_of(judge(GOOD, history, monitor="val_loss"))
    assert "monitor" not in advice_of(judge(GOOD, history, monitor="val_iou"))
