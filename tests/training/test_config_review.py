"""What in a config is wasteful or risky: one finding for each such value, none for what the user left open."""

from __future__ import annotations

import dataclasses
import io

import pytest

from unet_trainer.config.data_choices import choose_augmentation
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import resolve
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset
from unet_trainer.training.config_review import CHECKS, review
from unet_trainer.training.settings import build_hardware, build_settings

GIB = 2**30
A100 = HardwareFacts(
    "cuda", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8, free_memory=40 * GIB, host_memory=64 * GIB
)
CPU = HardwareFacts("cpu", "a CPU", has_bfloat16=True, has_float16=False, num_cores=2, free_memory=8 * GIB, host_memory=8 * GIB)
SYMMETRIC = Measurements(
    num_pairs=100,
    structure=40,
    relative_structure=0.1,
    thickness=8.0,
    size_spread=2.0,
    brightness_spread=0.1,
    has_colour=True,
    told={"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5},
    told_in_views={"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5},
    has_sides=False,
    chance=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
    chance_in_views=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
)
UPRIGHT = dataclasses.replace(
    SYMMETRIC,
    told={"horizontal_flip": 0.5, "vertical_flip": 0.95, "quarter_turn": 0.97},
    told_in_views={"horizontal_flip": 0.5, "vertical_flip": 0.95, "quarter_turn": 0.97},
)
DATA = DatasetFacts(
    channels=3,
    mean=(1.0, 2.0, 3.0),
    std=(4.0, 5.0, 6.0),
    statistics_reason="of the training images",
    mask_values=(0, 255),
    ignore_value=None,
    mask_reason="all masks hold 0 and 255",
    class_shares=[0.8, 0.2],
    train_sizes=[(512, 512)] * 800,
    val_sizes=[(512, 512)] * 200,
    measurements=SYMMETRIC,
)
COST = StepCost(seconds=0.1, eval_seconds=0.001, memory=4 * GIB)
LONG = {"num_epochs": 100, "batch_size": 16, "image_size": 512, "fit": "resize"}  # 5,000 steps


def found(hardware=A100, facts=DATA, cost=COST, failure="", compile_failure="", **values):
    settings = resolve(load_config({"data_dir": "data/mine", **values}), hardware, facts, lambda config: cost)
    return review(settings, hardware, facts, cost, failure, compile_failure)


def fixes(*arguments, **values):
    return [(finding.title, finding.fix) for finding in found(*arguments, **values)]


@pytest.mark.parametrize("hardware", [A100, CPU], ids=["GPU", "CPU"])
@pytest.mark.parametrize("facts", [DATA, dataclasses.replace(DATA, measurements=UPRIGHT)], ids=["symmetric", "upright"])
def test_a_config_that_leaves_things_open_has_no_findings(hardware, facts):
    assert found(hardware, facts) == []
    assert found(hardware, facts, time_budget="10m", seed=7, learning_rate=1e-3, encoder="resnet18") == []


def test_sensible_values_have_no_findings():
    assert found(**LONG, use_amp=True, amp_dtype="bfloat16", compile_model=True, num_workers=4, cache="ram", ema_decay=0.999) == []


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"use_amp": False}, ("use_amp", "use_amp: true")),
        ({"use_amp": True, "amp_dtype": "float16"}, ("amp_dtype", "amp_dtype: bfloat16")),
        ({"compile_model": False}, ("compile_model", "compile_model: true")),  # saves 0.5 × 0.1 s × 5,000 steps
        ({"compile_model": True, "cost": StepCost(0.01, 0.001, GIB)}, ("compile_model", "compile_model: false")),
        ({"num_workers": 9}, ("num_workers", "num_workers: 7")),
        ({"image_size": 1024}, ("image_size", "image_size: [512, 512]")),
        ({"image_size": 128}, ("image_size", "fit: crop with image_size: auto")),  # 8 pixels thin become 2
        ({"ema_decay": 0.9999}, ("ema_decay", "ema_decay: 0.998")),  # 10,000 steps of 5,000
        ({"cache": "none"}, ("cache", "cache: ram")),
        ({"num_epochs": 19}, ("num_epochs", "num_epochs: auto")),  # 950 steps
        ({"cost": StepCost(0.1, 0.001, 39 * GIB)}, ("batch_size", "batch_size: 8 with accumulation_steps: 2, or batch_parts: 2")),
        ({"deterministic": True}, ("deterministic", "deterministic: false, unless the bits must be the same")),
    ],
    ids=lambda case: str(case) if isinstance(case, dict) else "",
)
def test_a_bad_value_has_one_finding_with_the_line_to_change(values, fix):
    assert fixes(**{**LONG, **values}) == [fix]


@pytest.mark.parametrize(
    "values",
    [
        {"use_amp": False},
        {"amp_dtype": "float16"},
        {"deterministic": True},
        {"compile_model": False},
        {"num_workers": 2},
    ],
    ids=str,
)
def test_what_is_for_gpus_is_no_finding_on_a_cpu(values):
    assert fixes(CPU, cost=None, **{**LONG, **values}) == []


def test_values_at_the_edge_are_no_findings():
    assert fixes(**{**LONG, "num_epochs": 20}) == []  # 1,000 steps
    assert fixes(**{**LONG, "num_workers": 8}) == []
    assert fixes(**{**LONG, "image_size": 256}) == []  # 4 pixels thin
    assert fixes(**{**LONG, "ema_decay": 0.9994}) == []  # 1,667 of 5,000 steps
    assert fixes(**{**LONG, "cache": "none"}, hardware=dataclasses.replace(A100, host_memory=GIB)) == []


def test_an_average_that_auto_takes_is_no_finding_in_a_run_of_four_steps():
    few = dataclasses.replace(DATA, train_sizes=[(512, 512)] * 32)
    settings = {**LONG, "num_epochs": 2}
    assert [name for name, _ in fixes(facts=few, **settings, ema_decay=0.5)] == ["num_epochs"]
    assert ("ema_decay", "ema_decay: 0.5") in fixes(facts=few, **settings, ema_decay=0.6)


def test_thin_structures_in_large_objects_ask_for_a_larger_size():
    facts = dataclasses.replace(DATA, measurements=dataclasses.replace(SYMMETRIC, relative_structure=0.5))
    assert fixes(facts=facts, **{**LONG, "image_size": 128}) == [("image_size", "image_size: [256, 256]")]
    (finding,) = found(facts=facts, **{**LONG, "image_size": 128})
    assert finding.detail == (
        "[128, 128]: structures 8.0 pixels thin in images of 512×512 shrink to 2.0 pixels, and below 4 the model loses them"
    )


def test_fit_resize_is_named_where_the_size_was_left_open():
    thin = dataclasses.replace(DATA, train_sizes=[(4096, 4096)] * 800, measurements=SYMMETRIC)
    assert fixes(facts=thin, **{**LONG, "image_size": "auto"}) == [("fit", "fit: crop with image_size: auto")]


@pytest.mark.parametrize(
    ("transforms", "named"),
    [
        (["HorizontalFlip"], None),
        (["VerticalFlip"], "VerticalFlip"),
        ([{"HorizontalFlip": {"p": 0.5}}, {"OneOf": {"transforms": [{"RandomRotate90": {}}, "D4"]}}], "RandomRotate90, D4"),
        ([{"Affine": {"rotate": [-10, 10]}}], None),
        ([{"Affine": {"rotate": [-180, 180]}}], "Affine"),
        ([{"Rotate": {"limit": 15}}], None),
        (["Rotate"], "Rotate"),  # turns by up to 90 degrees unless told otherwise
    ],
    ids=str,
)
def test_turns_that_the_data_do_not_have_are_named(transforms, named):
    upright = dataclasses.replace(DATA, measurements=UPRIGHT)
    findings = found(facts=upright, **LONG, augmentation=transforms)
    start = f"{named} makes images unlike this data: images have an up (95% are told from their vertical mirror image)"
    assert [(finding.title, finding.fix) for finding in findings] == ([("augmentation", "augmentation: auto")] if named else [])
    assert all(finding.detail.startswith(start) for finding in findings)
    assert found(**LONG, augmentation=transforms) == []  # of data that look alike upside down


def test_mirroring_is_named_where_left_and_right_are_classes():
    sided = dataclasses.replace(DATA, measurements=dataclasses.replace(SYMMETRIC, has_sides=True))
    assert fixes(facts=sided, **LONG, augmentation=["HorizontalFlip"]) == [("augmentation", "augmentation: auto")]


def test_what_is_chosen_for_the_data_is_no_finding_when_it_is_written_down():
    for measured in (SYMMETRIC, UPRIGHT):
        chosen, _ = choose_augmentation(measured, "resize", 3)
        assert found(facts=dataclasses.replace(DATA, measurements=measured), **LONG, augmentation=list(chosen)) == []


def test_a_step_that_could_not_be_taken_is_a_problem():
    (finding,) = found(cost=None, failure="OutOfMemoryError: CUDA out of memory", **LONG)
    assert finding.level == "problem"
    assert finding.detail == "a step of 16 could not be taken (OutOfMemoryError: CUDA out of memory)"


def test_a_step_that_could_not_be_compiled_is_a_warning_and_says_what_training_would_do():
    (finding,) = found(compile_failure="RuntimeError: no compiler", **LONG)
    assert (finding.level, finding.title, finding.fix) == ("warning", "compile_model", "compile_model: false")
    assert finding.detail == "the step cannot be compiled here (RuntimeError: no compiler): training would go on uncompiled"


def test_a_few_steps_are_no_finding_where_time_allows_no_more():
    slow = StepCost(seconds=10.0, eval_seconds=0.1, memory=0)  # an hour has 360 of them
    assert fixes(CPU, cost=slow, **{**LONG, "num_epochs": 6}) == []
    assert fixes(CPU, cost=dataclasses.replace(slow, seconds=0.5), **{**LONG, "num_epochs": 6}) == [
        ("num_epochs", "num_epochs: auto")
    ]


def test_the_built_in_demo_is_not_reviewed_but_what_is_added_to_it_is():
    config = load_config({"data_dir": "data/demo", **LONG, "use_amp": False, "num_epochs": 2}, ["deterministic=true"])
    findings = review(resolve(config, A100, DATA), A100, DATA)
    assert [finding.title for finding in findings] == ["deterministic"]


def test_findings_worth_most_come_first():
    values = {**LONG, "use_amp": False, "cache": "none", "num_epochs": 15, "ema_decay": 0.9999, "deterministic": True}
    titles = ["use_amp", "num_epochs", "ema_decay", "cache", "deterministic"]
    assert [finding.title for finding in found(**values)] == titles
    assert len(CHECKS) == len(set(CHECKS)) == 13


@pytest.mark.parametrize(
    ("weights", "fix"),
    [
        ("auto", []),
        ([1.0, 2.0, 2.5], []),
        ([0.1, 1.0, 10.0], [("class_weights", "class_weights: auto")]),
    ],
    ids=str,
)
def test_class_weights_that_balance_fully_are_a_finding(weights, fix):
    facts = dataclasses.replace(DATA, mask_values=(0, 1, 2), class_shares=[0.9, 0.091, 0.009])
    assert fixes(facts=facts, **LONG, num_classes=3, class_weights=weights) == fix


def test_float16_is_right_where_there_is_no_bfloat16():
    turing = dataclasses.replace(A100, name="Tesla T4", has_bfloat16=False)
    assert fixes(turing, **LONG, use_amp=True, amp_dtype="float16") == []


# In training


def notes_of(config, resumes=False):
    console = Console(io.StringIO())
    hardware = build_hardware(config, console)
    build_settings(config, hardware, build_dataset(config, console, None), console, resumes)
    return [line for line in console.stream.getvalue().splitlines() if line.startswith("Note: ")]


def test_training_says_the_three_hints_that_are_worth_most(tiny_config):
    bad = {**tiny_config, "image_size": 256, "num_workers": 50, "cache": "none", "num_epochs": 20}
    notes = notes_of(load_config({**bad, "ema_decay": 0.9999}))
    assert [note.split()[1] for note in notes] == ["num_epochs:", "ema_decay:", "image_size:"]
    assert notes[0] == ("Note: num_epochs: 20 epochs are 40 optimizer steps, too few to learn much → num_epochs: auto")


def test_training_says_nothing_of_a_config_without_bad_values_or_of_a_run_that_goes_on(tiny_config):
    assert notes_of(load_config({**tiny_config, "num_epochs": 5000, "cache": "ram"})) == []
    assert notes_of(load_config(tiny_config), resumes=True) == []
