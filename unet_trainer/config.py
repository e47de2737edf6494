"""Every setting of a run: one frozen, flat `Config`, read from a dict, a YAML file and key=value overrides.

Defaults live here and nowhere else. Input is checked here, once: all problems come out together, each with its key, its
value and the fix. Imports no torch, so that a typo is answered in a blink.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from unet_trainer import parsers as p
from unet_trainer.safe_yaml import MAX_BYTES, Plain, YamlError, parse_yaml, resolve, shorten

MonitorName = Literal["val_iou", "val_dice", "val_loss"]
ARCHITECTURES = ("unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet", "segformer", "dpt")  # fmt: skip
WITH_DECODER_CHANNELS = ("unet", "unetplusplus", "manet")
LOSSES = ("dice", "iou", "cross_entropy", "bce", "focal", "tversky", "lovasz")
DEMO_DIR = "data/demo"
MAX_NAME_BYTES = 200  # file systems take 255, and a run's name may get a number


class UserError(ValueError):
    """Something the user can mend: shown as one message, without a traceback, exit code 2."""


class ConfigError(UserError):
    """The config cannot be used; the message lists every problem."""


def key(default: Any, parser: p.Parser, doc: str, theme: str = "") -> Any:
    """One config key: its default, what it accepts and a line that explains it. A theme opens a new group of keys."""
    metadata = {"parse": parser, "doc": doc, "theme": theme}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. The text beside each key is the comment it carries in configs/default.yaml."""

    data_dir: str = key(
        DEMO_DIR,
        p.text("data/mine"),
        "folder with images/ and masks/, or train/ and val/ that hold them; data/demo is made when missing",
        theme="Data",
    )
    image_dir: str | None = key(
        None,
        p.optional(p.text("images")),
        "folder of the images, inside data_dir or an absolute path; null: found by its name (images, imgs, train, ...)",
    )
    mask_dir: str | None = key(
        None,
        p.optional(p.text("masks")),
        "folder of the masks, inside data_dir or an absolute path; null: found by its name (masks, labels, gt, trainannot, ...)",
    )
    mask_suffix: str = key(
        "", p.word_or_empty, "what a mask's name has after the image's, where it cannot be told: _mask pairs a.jpg with a_mask.png"
    )
    num_classes: int = key(
        1,
        p.integer(minimum=1, maximum=254, example="1"),
        "1: foreground against background; K: class ids 0 to K-1, background included",
    )
    class_names: tuple[str, ...] | None = key(
        None, p.optional(p.listing(p.text(), example="[background, road]")), "names for the per-class table, one a class"
    )
    mask_values: str | tuple[int | tuple[int, int, int], ...] = key(
        "auto",
        p.mask_values,
        "auto: decided from all masks, and said; the value or [red, green, blue] of each class, in class order; nonzero; or above N",
    )
    ignore_value: int | None = key(
        None, p.optional(p.integer(minimum=0, maximum=65535, example="255")), "mask value of pixels that count nowhere"
    )
    val_fraction: float = key(
        0.2, p.number(above=0, below=1, example="0.2"), "share of the pairs held out for validation when there is no val/ folder"
    )
    split_file: str | None = key(
        None,
        p.optional(p.text("split.csv")),
        "CSV with the columns image, mask and, if you like, split (train, val, test) and group; paths as seen from data_dir",
    )
    group_pattern: str | None = key(
        None,
        p.optional(p.pattern),
        "regular expression on an image's path: what its first bracket matches (a patient, a video) stays on one side of the split",
    )
    num_folds: int | None = key(
        None, p.optional(p.integer(minimum=2, maximum=1000, example="5")), "split into this many folds in place of val_fraction"
    )
    fold: int = key(0, p.integer(minimum=0, example="0"), "the fold that validates, counted from 0")
    image_size: int | tuple[int, int] = key(
        512,
        p.either(
            p.integer(minimum=32, maximum=8192, example="512"),
            p.listing(p.integer(minimum=32, maximum=8192, example="512"), example="[512, 768]", minimum=2, maximum=2),
        ),
        "size of what the model sees: one side, or [height, width]",
    )
    fit: Literal["resize", "crop"] = key(
        "resize",
        p.choice("resize", "crop"),
        "resize: each pair to image_size; crop: random crops of it in training, windows at native resolution in validation",
    )
    crops_per_image: int | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.integer(minimum=1, maximum=10_000, example="4")),
        "fit: crop takes this many crops of an image in an epoch; auto: as many as fit into the middle image, at most 16",
    )
    rare_class_crops: float = key(
        0.33, p.number(minimum=0, maximum=1, example="0.33"), "fit: crop centres this share of the crops on a pixel of a rare class"
    )
    resize_masks: bool = key(False, p.flag, "bring a mask of another size, but the same shape, to the size of its image")
    in_channels: int | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.integer(minimum=1, maximum=64, example="3")),
        "channels of the images; auto: as many as they have",
    )
    image_mean: tuple[float, ...] | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.listing(p.number(example="123.7"), example="[123.7, 116.3, 103.5]")),
        "subtracted from each channel, in the files' own units; auto: ImageNet's for 8-bit RGB, else that of the training images",
    )
    image_std: tuple[float, ...] | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.listing(p.number(above=0, example="58.4"), example="[58.4, 57.1, 57.4]")),
        "each channel is divided by this; auto: likewise",
    )
    augmentation: str | tuple[Any, ...] = key(
        "default",
        p.either(p.choice("none", "default", "strong"), p.transform_list),
        "none, default, strong, or a list of albumentations transforms",
    )
    num_workers: int | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.integer(minimum=0, maximum=512, example="4")),
        "processes that read and augment; auto: by the machine's cores; 0: none beside the main one",
    )

    cache: Literal["none", "ram", "disk"] = key(
        "none",
        p.choice("none", "ram", "disk"),
        "decoded pairs: ram keeps them in memory, one copy for all workers; disk in a file that later runs find again",
    )

    architecture: str = key("unet", p.choice(*ARCHITECTURES), f"one of {', '.join(ARCHITECTURES)}", theme="Model")
    encoder: str = key("resnet34", p.text("resnet34"), "any encoder of segmentation-models-pytorch; tu-NAME takes one from timm")
    encoder_weights: str | None = key(
        None, p.optional(p.text("imagenet")), "null: random; imagenet: downloaded once; or a local .pt, .pth or .safetensors file"
    )
    decoder_channels: tuple[int, ...] | None = key(
        None,
        p.optional(
            p.listing(p.integer(minimum=1, maximum=4096, example="64"), example="[256, 128, 64, 32, 16]", minimum=5, maximum=5)
        ),
        "width of the five decoder stages of unet, unetplusplus and manet; null: [256, 128, 64, 32, 16]",
    )
    freeze_encoder_epochs: int = key(
        0, p.integer(minimum=0, example="5"), "epochs at the start in which the encoder stays as it is"
    )

    loss: dict[str, float] = key(
        {"dice": 1.0, "cross_entropy": 1.0},
        p.weighted_terms(LOSSES),
        f"a weighted sum of {', '.join(LOSSES)}; cross_entropy with one class is bce",
        theme="Loss",
    )
    class_weights: tuple[float, ...] | Literal["auto"] | None = key(
        None,
        p.optional(p.either(p.choice("auto"), p.listing(p.number(above=0, example="1"), example="[0.5, 2.0]"))),
        "weight of each class in the loss (with one class, of foreground pixels); auto: rare classes weigh more, from the masks",
    )

    batch_size: int = key(8, p.integer(minimum=1, maximum=65536, example="8"), "images in one forward pass", theme="Training")
    num_epochs: int = key(50, p.integer(minimum=1, maximum=1_000_000, example="50"), "passes over the training images")
    accumulation_steps: int = key(
        1,
        p.integer(minimum=1, maximum=65536, example="4"),
        "batches added up before the weights move: effective batch = batch_size × this",
    )
    optimizer: Literal["adamw", "adam", "sgd"] = key(
        "adamw", p.choice("adamw", "adam", "sgd"), "adamw, adam or sgd (Nesterov momentum 0.9)"
    )
    learning_rate: float = key(1e-3, p.number(above=0, example="1e-3"), "peak learning rate")
    weight_decay: float = key(1e-4, p.number(minimum=0, example="1e-4"), "on weights; biases and normalisation layers have none")
    scheduler: Literal["cosine", "poly", "plateau", "constant"] = key(
        "cosine",
        p.choice("cosine", "poly", "plateau", "constant"),
        "how the learning rate falls: cosine or poly to 0 at the end, plateau when monitor stalls, constant never",
    )
    warmup_epochs: float = key(0.0, p.number(minimum=0, example="2"), "epochs over which the learning rate rises from 0")
    plateau_patience: int = key(
        5, p.integer(minimum=1, example="5"), "scheduler: plateau waits this many epochs without improvement"
    )
    plateau_factor: float = key(0.3, p.number(above=0, below=1, example="0.3"), "and then multiplies the learning rate by this")
    grad_clip: float | None = key(
        None, p.optional(p.number(above=0, example="1.0")), "largest norm of the gradients; null: no limit"
    )
    ema_decay: float | None = key(
        None,
        p.optional(p.number(above=0, below=1, example="0.999")),
        "average the weights over steps and evaluate the average; null: off",
    )
    monitor: MonitorName = key(
        "val_iou",
        p.choice("val_iou", "val_dice", "val_loss"),
        "what decides best.pt, early stopping and plateau: val_iou, val_dice or val_loss",
    )
    early_stopping_patience: int | None = key(
        None, p.optional(p.integer(minimum=1, example="20")), "stop after this many epochs without improvement; null: never"
    )
    early_stopping_min_delta: float = key(
        0.0, p.number(minimum=0, example="0.001"), "an improvement smaller than this does not count as one"
    )

    device: str = key("auto", p.text("cuda"), "auto, cpu, cuda, cuda:1 or mps", theme="Speed and precision")
    use_amp: bool = key(False, p.flag, "mixed precision: faster and about half the memory on a GPU, at the same IoU")
    amp_dtype: Literal["bfloat16", "float16"] = key(
        "bfloat16",
        p.choice(
            "bfloat16", "float16", other_spellings={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "16": "float16"}
        ),
        "bfloat16 (Ampere or newer), or float16 with loss scaling (older GPUs)",
    )
    scaler_init_scale: float = key(65536.0, p.number(above=0, example="65536"), "float16: first loss scale")
    scaler_growth_factor: float = key(2.0, p.number(above=1, example="2"), "float16: the scale grows by this")
    scaler_backoff_factor: float = key(
        0.5, p.number(above=0, below=1, example="0.5"), "float16: and shrinks by this after an overflow"
    )
    scaler_growth_interval: int = key(
        2000, p.integer(minimum=1, example="2000"), "float16: steps without overflow before the scale grows"
    )
    allow_tf32: bool = key(True, p.flag, "let float32 matrix products use TF32 on NVIDIA GPUs from Ampere on")
    compile_model: bool = key(False, p.flag, "compile the step: faster still after a minute or so of compiling")
    channels_last: bool = key(True, p.flag, "memory layout that tensor cores prefer")
    deterministic: bool = key(False, p.flag, "the same bits on every run of one machine, at some cost in speed")

    seed: int = key(42, p.integer(minimum=0, example="42"), "split, weights, order and augmentation follow from it", theme="Run")
    checkpoint_dir: str = key("checkpoints", p.text("checkpoints"), "where runs are written")
    run_name: str = key("run", p.text("run"), "name of the run's folder; a number is added when it exists")
    resume: str | None = key(
        None, p.optional(p.text("auto")), "auto: go on with run_name if it exists; or a run folder or a .pt file to go on from"
    )
    checkpoint_minutes: float | None = key(
        10.0,
        p.optional(p.number(above=0, example="10")),
        "the state is saved this often within an epoch too; null: at the end of each epoch only",
    )
    on_save_error: Literal["stop", "continue"] = key(
        "stop", p.choice("stop", "continue"), "when a checkpoint cannot be written (full disk): stop, or continue and say so"
    )
    on_nan: Literal["recover", "stop"] = key(
        "recover",
        p.choice("recover", "stop"),
        "when numbers are not finite: recover skips such steps and, if they repeat, goes back once with a lower learning rate",
    )
    on_oom: Literal["stop", "shrink"] = key(
        "stop", p.choice("stop", "shrink"), "when memory runs out: stop, or shrink: double batch_parts and go on"
    )
    batch_parts: int = key(
        1,
        p.integer(minimum=1, maximum=65536, example="2"),
        "pieces in which a batch goes through the model: less memory, more time, the same effective batch",
    )
    worker_timeout: float | None = key(
        600.0,
        p.optional(p.number(above=0, example="600")),
        "seconds without a batch after which the worker processes are taken to hang; null: wait for ever",
    )


FIELDS = {field.name: field for field in dataclasses.fields(Config)}

OTHER_TOOLS_NAMES = {
    "lr": "learning_rate", "lr0": "learning_rate", "base_lr": "learning_rate", "epochs": "num_epochs", "max_epochs": "num_epochs",
    "n_epochs": "num_epochs", "batch": "batch_size", "bs": "batch_size", "imgsz": "image_size", "img_size": "image_size",
    "crop_size": "image_size", "size": "image_size", "scale": "image_size", "patch_size": "image_size", "tile_size": "image_size", "patience": "early_stopping_patience",
    "early_stopping": "early_stopping_patience", "min_delta": "early_stopping_min_delta", "workers": "num_workers", "amp": "use_amp",
    "mixed_precision": "use_amp", "fp32": "use_amp", "bf16": "use_amp and amp_dtype", "fp16": "use_amp and amp_dtype",
    "half": "use_amp and amp_dtype", "precision": "amp_dtype", "dtype": "amp_dtype", "compile": "compile_model",
    "torch_compile": "compile_model", "tf32": "allow_tf32", "classes": "num_classes", "n_classes": "num_classes", "nc": "num_classes",
    "names": "class_names", "ignore_index": "ignore_value", "val_percent": "val_fraction", "val_split": "val_fraction",
    "validation": "val_fraction", "k_folds": "num_folds", "n_splits": "num_folds", "n_channels": "in_channels", "channels": "in_channels", "mean": "image_mean", "std": "image_std", "data": "data_dir", "dataset": "data_dir", "data_root": "data_dir", "images": "image_dir",
    "masks": "mask_dir", "labels": "mask_dir", "augment": "augmentation", "augmentations": "augmentation", "transforms": "augmentation",
    "arch": "architecture", "model": "architecture", "backbone": "encoder", "encoder_name": "encoder", "pretrained": "encoder_weights",
    "weights": "encoder_weights", "freeze": "freeze_encoder_epochs", "freeze_encoder": "freeze_encoder_epochs", "criterion": "loss",
    "loss_fn": "loss", "optim": "optimizer", "wd": "weight_decay", "lr_scheduler": "scheduler", "schedule": "scheduler", "warmup": "warmup_epochs",
    "cos_lr": "scheduler", "accumulate": "accumulation_steps", "gradient_accumulation_steps": "accumulation_steps",
    "accumulate_grad_batches": "accumulation_steps", "clip_grad": "grad_clip", "gradient_clip_val": "grad_clip",
    "gradient_clipping": "grad_clip", "max_norm": "grad_clip", "ema": "ema_decay", "metric": "monitor", "gpu": "device", "gpus": "device",
    "cuda": "device", "accelerator": "device", "random_seed": "seed", "name": "run_name", "experiment": "run_name", "project": "checkpoint_dir",
    "save_dir": "checkpoint_dir", "output_dir": "checkpoint_dir", "work_dir": "checkpoint_dir", "resume_from": "resume", "load": "resume",
    "checkpoint": "resume",
}  # fmt: skip


def load_config(source: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """One source plus overrides (key=value texts, or a dict) as a checked Config; raises ConfigError with every problem."""
    problems: list[str] = []
    origin = "the config"
    raw: dict[str, Any] = {}
    is_read = True
    if isinstance(source, Config):
        raw = as_dict(source)
    elif isinstance(source, str | Path):
        origin = str(source)
        try:
            raw = _read_file(Path(source), problems)
        except YamlError as error:
            problems.append(str(error))
            is_read = False
    elif isinstance(source, Mapping):
        raw = {str(name): value for name, value in source.items()}
    else:
        raise TypeError(f"a config is a Config, a dict or a path to a YAML file, not {type(source).__name__}")
    own = _read_overrides(overrides, problems) if not isinstance(overrides, Mapping) else {str(k): v for k, v in overrides.items()}
    raw.update(own)
    values = _parse_values(raw, problems)
    if "num_epochs" in own and "early_stopping_patience" not in own and _outlasts(values):
        values["early_stopping_patience"] = None  # a preset, tried for a few epochs: there is nothing to stop early
    if "num_epochs" in own and "warmup_epochs" not in own and values.get("warmup_epochs", 0) >= values.get("num_epochs", math.inf):
        values["warmup_epochs"] = values["num_epochs"] / 2
    if is_read:  # else the overrides would be held against defaults that the file may change
        problems += _contradictions(values)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in {origin}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Config(**values)


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        if path.is_dir():
            raise IsADirectoryError
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise YamlError(
            f"{path} is a folder; need a YAML file (to train on it: data_dir={path}; to go on with a run: --resume {path})"
        ) from None
    except FileNotFoundError:
        siblings = [str(sibling) for sibling in sorted(path.parent.glob("*.y*ml"))] or [
            str(found) for found in sorted(Path("configs").glob("*.yaml"))
        ]
        by_stem = {Path(sibling).stem: sibling for sibling in siblings}
        meant = p.near_miss(str(path), siblings) or by_stem.get(p.near_miss(path.stem, by_stem) or "")
        hint = f"; did you mean {meant}?" if meant else f"; there are {', '.join(siblings)}" if siblings else ""
        raise YamlError(f"no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise YamlError(f"cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_BYTES:
        raise YamlError(f"more than {MAX_BYTES // 1024} KiB; a config is far smaller")
    try:
        values = parse_yaml(content.decode("utf-8-sig"), problems)
    except UnicodeDecodeError:
        raise YamlError("not UTF-8 text; need a YAML file") from None
    if values is None or (isinstance(values, Plain) and not values):
        return {}
    if not isinstance(values, dict):
        raise YamlError(f"got {shorten(values)}; need lines of the form key: value")
    return values


def _read_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append(f"{shorten(override)}: need key=value, e.g. batch_size=16")
            continue
        raw[name] = Plain(value)
        is_text = name in FIELDS and FIELDS[name].type in ("str", "str | None")  # [a-z]+ is a text there, and no list
        if value.lstrip()[:1] in (('"', "'") if is_text else ("[", "{", '"', "'")):
            try:
                raw[name] = parse_yaml(value)
            except YamlError as error:
                problems.append(f"{name}: got {shorten(value)}; {error}")
                del raw[name]
    return raw


def _parse_values(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The typed value of every key that is right; defaults for keys not given; a problem for each of the others."""
    values = {name: value for name, value in vars(Config()).items() if name not in raw}
    for name, value in raw.items():
        if name not in FIELDS:
            problems.append(f"{_one_line(name)}: unknown key{_suggestion(name)}")
            continue
        try:
            values[name] = FIELDS[name].metadata["parse"](value)
        except ValueError as error:
            shown = "null" if value is None else shorten(value)
            problems.append(f"{name}: got {shown}; {error}")
    return values


def _suggestion(name: str) -> str:
    lowered = name.lower().replace("-", "_").strip()
    if lowered in FIELDS:
        return f"; did you mean {lowered}?"
    if lowered in OTHER_TOOLS_NAMES:
        return f"; the name here is {OTHER_TOOLS_NAMES[lowered]}"
    meant = p.near_miss(lowered, [*FIELDS, *OTHER_TOOLS_NAMES])
    return f"; did you mean {OTHER_TOOLS_NAMES.get(meant, meant)}?" if meant else "; configs/default.yaml lists every key"


def _one_line(name: str) -> str:
    return name if name.isprintable() and len(name) <= 60 else shorten(name)


def _outlasts(values: Mapping[str, Any]) -> bool:
    """Whether early stopping could never come to pass."""
    patience, num_epochs = values.get("early_stopping_patience"), values.get("num_epochs")
    return bool(patience and num_epochs and patience >= num_epochs)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Settings that are right alone and cannot hold together. Keys with problems of their own are missing here."""
    found: list[str] = []

    def given(*names: str) -> bool:
        return all(name in values for name in names)

    if given("device") and not _is_device(values["device"]):
        found.append(f"device: got {shorten(values['device'])}; need auto, cpu, cuda, cuda:N or mps")
    if (
        given("use_amp", "amp_dtype", "device")
        and values["use_amp"]
        and values["amp_dtype"] == "float16"
        and values["device"] == "cpu"
    ):
        found.append("amp_dtype: float16 does not go with device: cpu; use bfloat16, or use_amp: false, which is faster there")
    if given("warmup_epochs", "num_epochs") and values["warmup_epochs"] >= values["num_epochs"]:
        found.append(f"warmup_epochs: {values['warmup_epochs']:g} leaves nothing of num_epochs: {values['num_epochs']}; need fewer")
    if _outlasts(values):
        found.append(
            f"early_stopping_patience: {values['early_stopping_patience']} can never be reached in num_epochs: {values['num_epochs']}; need fewer, or null"
        )
    if given("num_folds", "fold") and values["fold"] >= (values["num_folds"] or 1):
        folds = f"0 to {values['num_folds'] - 1}" if values["num_folds"] else "num_folds to be set"
        found.append(f"fold: got {values['fold']}; need {folds}")
    if given("batch_parts", "batch_size") and values["batch_parts"] > values["batch_size"]:
        found.append(f"batch_parts: {values['batch_parts']} is more than batch_size: {values['batch_size']}; need at most that")
    if given("num_classes"):
        found += _class_contradictions(values, given)
    if (
        given("decoder_channels", "architecture")
        and values["decoder_channels"]
        and values["architecture"] not in WITH_DECODER_CHANNELS
    ):
        found.append(
            f"decoder_channels: not for architecture: {values['architecture']}; only for {', '.join(WITH_DECODER_CHANNELS)}"
        )
    if given("run_name") and not _is_folder_name(values["run_name"]):
        found.append(
            f"run_name: got {shorten(values['run_name'])}; need a plain name without slashes (checkpoint_dir says where), not longer than {MAX_NAME_BYTES} bytes"
        )
    return found


def _class_contradictions(values: Mapping[str, Any], given: Any) -> list[str]:
    found = []
    num_classes = values["num_classes"]
    if given("loss") and "bce" in values["loss"] and num_classes > 1:
        found.append(f"loss: bce is for num_classes: 1; with {num_classes} classes use cross_entropy")
    if given("class_weights") and isinstance(values["class_weights"], tuple) and len(values["class_weights"]) != num_classes:
        found.append(f"class_weights: got {len(values['class_weights'])} values; need {num_classes}, one for each of num_classes")
    if given("class_names") and values["class_names"] and len(values["class_names"]) != num_classes:
        found.append(f"class_names: got {len(values['class_names'])} names; need {num_classes}, one for each of num_classes")
    if given("mask_values") and isinstance(values["mask_values"], str) and values["mask_values"] != "auto" and num_classes > 2:
        found.append(
            f"mask_values: {values['mask_values']} tells two classes apart, num_classes: {num_classes} needs a value for each"
        )
    if given("mask_values") and not isinstance(values["mask_values"], str):
        needed = max(2, num_classes)
        if len(values["mask_values"]) != needed or len(set(values["mask_values"])) != needed:
            found.append(
                f"mask_values: got {_plain(values['mask_values'])}; need {needed} different values, {'background first' if num_classes == 1 else 'one a class'}"
            )
        if given("ignore_value") and values["ignore_value"] in values["mask_values"]:
            found.append(f"ignore_value: {values['ignore_value']} is also in mask_values; need another, or null")
    elif (
        given("ignore_value", "mask_values")
        and values["mask_values"] == "auto"
        and values["ignore_value"] in range(max(2, num_classes))
    ):
        found.append(
            f"ignore_value: {values['ignore_value']} is the id of a class (num_classes: {num_classes}); set mask_values to the values of the classes"
        )
    return found


def _is_folder_name(name: str) -> bool:
    return not any(mark in name for mark in "/\\\n\r") and name.strip() not in (".", "..") and len(name.encode()) <= MAX_NAME_BYTES


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return (
        name == "auto"
        or (kind in ("cpu", "mps") and not colon)
        or (kind == "cuda" and (not colon or (index.isascii() and index.isdigit() and len(index) < 4)))
    )


def as_dict(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists and primitives."""
    return {name: _plain(getattr(config, name)) for name in FIELDS}


def image_shape(config: Config) -> tuple[int, int]:
    """Height and width of a batch."""
    return config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)


def class_names(config: Config) -> list[str]:
    """A name for each class that is reported."""
    if config.class_names is not None:
        return list(config.class_names)
    return ["foreground"] if config.num_classes == 1 else [f"class {index}" for index in range(config.num_classes)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes each text that would come back as something else: we read numbers otherwise than PyYAML, and it loses a \\x85."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if not text.isprintable() else "'" if resolve(Plain(text)) != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(config: Config, header: str) -> str:
    """The config as YAML that runs again as it is, every key with its comment."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for name, value in as_dict(config).items():
        metadata = FIELDS[name].metadata
        if metadata["theme"]:
            lines += ["", f"# {metadata['theme']}"]
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
        lines.append(f"{name}: {text.removesuffix('...' + chr(10)).strip()}  # {metadata['doc']}")
    return "\n".join(lines) + "\n"
