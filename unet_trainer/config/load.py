"""Reads settings from a dict, a YAML file and key=value overrides into a checked Config.

Input is checked here, once: all problems are reported together, each with its key, its value and the fix. Imports no
torch, so that a typo is answered at once.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unet_trainer.config import schema
from unet_trainer.config.errors import ConfigError, UserError
from unet_trainer.config.parsers import MaskValue, as_grey, near_miss, split_values, unknown_transforms
from unet_trainer.config.safe_yaml import MAX_BYTES, NULLS, TOO_LONG, Plain, YamlError, parse_yaml, shorten
from unet_trainer.config.schema import FIELDS, Config, as_dict, is_demo_dir, parse_value, to_plain
from unet_trainer.system.input_files import open_file

# Our key, and what other tools call it.
NAMES_ELSEWHERE = {
    "learning_rate": "lr lr0 base_lr", "encoder_lr_factor": "encoder_lr backbone_lr", "weight_decay": "wd",
    "num_epochs": "epochs max_epochs n_epochs num_steps max_steps iterations", "time_budget": "time max_time budget",
    "image_size": "imgsz img_size crop_size size scale patch_size tile_size", "batch_size": "batch bs",
    "repeats": "repeat", "early_stopping_patience": "patience early_stopping", "num_workers": "workers",
    "early_stopping_min_delta": "min_delta", "use_amp": "amp mixed_precision fp32", "allow_tf32": "tf32",
    "use_amp and amp_dtype": "bf16 fp16 half", "amp_dtype": "precision dtype", "compile_model": "compile torch_compile",
    "num_classes": "classes n_classes nc", "class_names": "names", "ignore_value": "ignore_index",
    "val_fraction": "val_percent val_split validation", "num_folds": "k_folds n_splits", "image_mean": "mean",
    "in_channels": "n_channels channels", "image_std": "std", "data_dir": "data dataset data_root",
    "image_dir": "images", "mask_dir": "masks labels", "augmentation": "augment augmentations transforms",
    "architecture": "arch model", "encoder": "backbone encoder_name", "loss": "criterion loss_fn",
    "init_from": "initial_checkpoint pretrained_weights load_from finetune finetune_from", "optimizer": "optim",
    "freeze_encoder_epochs": "freeze freeze_encoder", "scheduler": "lr_scheduler schedule cos_lr",
    "accumulation_steps": "accumulate gradient_accumulation_steps accumulate_grad_batches", "warmup_epochs": "warmup",
    "grad_clip": "clip_grad gradient_clip_val gradient_clipping max_norm", "ema_decay": "ema", "monitor": "metric",
    "device": "gpu gpus cuda accelerator", "seed": "random_seed", "run_name": "name experiment",
    "checkpoint_dir": "project save_dir output_dir work_dir", "resume": "resume_from",
    "encoder_weights (the encoder), init_from (a model) or resume (a run)":
        "weights pretrained checkpoint ckpt load",
}  # fmt: skip
OTHER_TOOLS_NAMES = {other: ours for ours, others in NAMES_ELSEWHERE.items() for other in others.split()}
# Settings of earlier versions, and what a user has now.
REMOVED_KEYS = {
    "process_timeout": "a process that hangs ends the job after 15 minutes",
    "scaler_growth_factor": "torch's own factor is used",
    "scaler_backoff_factor": "torch's own factor is used",
    "scaler_growth_interval": "torch's own interval is used",
    "deep_supervision": "the loss of the output alone is trained",
    "on_nan": "steps that are not finite are skipped, and eight in a row end the run with its state saved",
    "on_save_error": "a save that fails ends the run with exit code 3",
}
# Files about datasets that are taken for configs, and their keys.
DATASET_KEYS = {
    "nnU-Net's dataset.json": "labels numTraining",
    "Ultralytics' file about a dataset": "train val names",
    "a file of COCO annotations": "images annotations categories",
}
# Protocol → what fsspec needs for it. No others: a name in a config must not choose which code is loaded.
PROTOCOLS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp", "memory": "fsspec"}
DEMO_YAML = "configs/demo.yaml"


def load_config(
    source: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """One source plus overrides (key=value texts, or a dict), checked; raises ConfigError with every problem."""
    problems: list[str] = []
    raw, sources, origin = _read_source(source)
    how = "argument" if isinstance(overrides, Mapping) else "command line"
    over = overrides if isinstance(overrides, Mapping) else _read_overrides(overrides, problems)
    sources |= dict.fromkeys(over, how)
    config, wrong = _parse_values({**raw, **over}, problems)
    if "num_epochs" in over and "warmup_epochs" not in over and _warms_up_too_long(config):
        # A preset is tried for a few epochs: its warm-up gives way.
        config = replace(config, warmup_epochs=config.num_epochs / 2)
        sources["warmup_epochs"] = how
    problems += [text for text in _contradictions(config) if not any(re.search(rf"\b{key}\b", text) for key in wrong)]
    if problem := url_problem(config.data_dir) or (problems and missing_data_dir(config.data_dir)):
        problems.append(f"data_dir: {problem}")
    if problems:
        raise _error(origin, problems)
    return replace(config, sources={name: origin for name, origin in sources.items() if name in FIELDS})


def _error(origin: object, problems: Sequence[str]) -> ConfigError:
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    return ConfigError("\n  ".join([f"{count} in {origin}:", *problems]))


def load_with_demo(own: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> Config:
    """A script's own settings plus overrides; while data_dir is the demo's, configs/demo.yaml fills in what is open."""
    beside, inside = (Path(__file__).parents[up] / DEMO_YAML for up in (2, 1))  # of a clone, and where pip installs it
    demo_file = beside if beside.is_file() else inside
    pairs = overrides if isinstance(overrides, Mapping) else [override.partition("=")[::2] for override in overrides]
    given = {**own, **dict(pairs)}
    demo = _read_file(demo_file) if is_demo_dir(str(given.get("data_dir", schema.DEMO_DIR))) else {}
    demo = {name: value for name, value in demo.items() if own.get(name, "auto") == "auto"}
    # The time decides the epochs. A trained model needs a warm-up, and an average that begins with it.
    for name, less in (("time_budget", "num_epochs"), ("init_from", "learning_rate warmup_epochs ema_decay")):
        if str(given.get(name) or "null").lower() not in NULLS:
            demo = {key: value for key, value in demo.items() if key not in less.split()}
    config, defaults = load_config({**own, **demo}, overrides), Config()
    sources = {  # a setting of the script's own that equals the default was not set by the user
        name: "demo" if source == "config" and name in demo else source
        for name, source in config.sources.items()
        if source != "config" or name in demo or getattr(config, name) != getattr(defaults, name)
    }
    return replace(config, sources=sources)


def _read_source(source: Config | Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """Raw values, where each came from, and the name of the source in messages."""
    if isinstance(source, Config):
        return as_dict(source), dict(source.sources), "the config"
    if isinstance(source, Mapping):
        raw = {str(name): value for name, value in source.items()}
        return raw, dict.fromkeys(raw, "config"), "the config"
    if not isinstance(source, str | Path):
        raise TypeError(f"a config is a Config, a dict or a path to a YAML file, not {type(source).__name__}")
    try:
        raw = _read_file(Path(source))
    except YamlError as error:
        raise _error(source, [str(error)]) from None
    return raw, dict.fromkeys(raw, "file"), str(source)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with open_file(path) as file:
            content = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        uses = f"to train on it: data_dir={path}; to go on with a run: --resume {path}"
        raise YamlError(f"{path} is a folder; need a YAML file ({uses})") from None
    except FileNotFoundError:
        preset = Path(__file__).parents[1] / "configs" / path.name  # there where pip has installed it
        if path.parent == Path("configs") and preset.is_file():
            return _read_file(preset)
        siblings = sorted(path.parent.glob("*.y*ml")) or sorted(Path("configs").glob("*.yaml"))
        by_stem = {sibling.stem: str(sibling) for sibling in siblings}
        meant = near_miss(path.stem, by_stem)
        there = f"; there are {', '.join(by_stem.values())}" if siblings else ""
        raise YamlError("no such file" + (f"; did you mean {by_stem[meant]}?" if meant else there)) from None
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror}") from None
    _refuse_dataset_files(path, content)
    if len(content) > MAX_BYTES:
        raise YamlError(TOO_LONG)
    try:
        values = parse_yaml(content.decode("utf-8-sig")) or {}
    except UnicodeDecodeError:
        raise YamlError("not UTF-8 text; need a YAML file, saved as UTF-8") from None
    if not isinstance(values, dict):
        raise YamlError(f"got {shorten(values)}; need lines of the form key: value")
    return values


def _refuse_dataset_files(path: Path, content: bytes) -> None:
    keys = set(re.findall(rb"(?:^|[{,])\s*[\"']?(\w+)[\"']?\s*:", content, re.MULTILINE))
    for kind, wanted in DATASET_KEYS.items():
        if keys.issuperset(wanted.encode().split()):
            inner = re.search(rb"^path: *([^#\r\n]+)", content, re.MULTILINE)  # Ultralytics', relative to the file
            folder = path.parent / (inner[1].decode(errors="replace").strip(" '\"") if inner else "")
            use = f"data_dir={shlex.quote(str(folder if folder.is_dir() else path.parent))}"
            raise YamlError(f"it is {kind}, not a config; to use the data that it describes: {use}")


def _read_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append(f"{shorten(override)}: need key=value, e.g. batch_size=16")
        elif name in raw:
            twice = f"given twice, {shorten(raw[name])} and {shorten(text)}"
            problems.append(f"{_one_line(name)}: {twice}; leave one of them out")
        else:
            # Quotes and brackets are YAML here too; but [a-z]+ is text where the key takes no list.
            is_text = name in FIELDS and FIELDS[name].type in (schema.Text, schema.Text | None, schema.Pattern | None)
            starts = ('"', "'") if is_text else ('"', "'", "[", "{")
            try:
                raw[name] = parse_yaml(text) if text.lstrip().startswith(starts) else Plain(text)
            except YamlError as error:
                problems.append(f"{name}: got {shorten(text)}; {error}")
    return raw


def _parse_values(raw: Mapping[str, Any], problems: list[str]) -> tuple[Config, list[str]]:
    """The values of valid keys, with the defaults of all others; and the keys that have a problem."""
    values, wrong = {}, []
    for name, value in raw.items():
        if name in REMOVED_KEYS:
            problems.append(f"{name}: no longer a setting; {REMOVED_KEYS[name]}: leave it out")
        elif name not in FIELDS:
            problems.append(f"{_one_line(name)}: unknown key; {_nearest(name)}")
        else:
            try:
                values[name] = parse_value(name, value)
            except ValueError as error:
                problems.append(f"{name}: got {'null' if value is None else shorten(value)}; {error}")
                wrong.append(name)
    return Config(**values), wrong


def _nearest(name: str) -> str:
    lowered = name.lower().replace("-", "_").strip()
    if lowered in OTHER_TOOLS_NAMES:
        return f"the name here is {OTHER_TOOLS_NAMES[lowered]}"
    meant = lowered if lowered in FIELDS else near_miss(lowered, [*FIELDS, *OTHER_TOOLS_NAMES])
    return f"did you mean {OTHER_TOOLS_NAMES.get(meant, meant)}?" if meant else "configs/default.yaml lists every key"


def _one_line(name: str) -> str:
    return name if name.isprintable() and len(name) <= 60 else shorten(name)


def _warms_up_too_long(c: Config) -> bool:
    return "auto" not in (c.warmup_epochs, c.num_epochs) and c.warmup_epochs >= c.num_epochs


def _contradictions(c: Config) -> Iterator[str]:
    """Messages about settings that are valid alone and contradict each other; each names their keys."""
    one_of = "leave one of them out"
    if c.time_budget is not None and c.num_epochs != "auto":
        both = f"time_budget: {c.time_budget} decides the epochs, and num_epochs: {c.num_epochs} is set"
        yield f"{both}; {one_of} (time_budget: null or num_epochs: auto)"
    if _warms_up_too_long(c):
        yield f"warmup_epochs: {c.warmup_epochs:g} leaves nothing of num_epochs: {c.num_epochs}; need fewer"
    if c.fold >= (c.num_folds or 1):
        yield f"fold: got {c.fold}; need {f'0 to {c.num_folds - 1}' if c.num_folds else 'num_folds to be set'}"
    if c.split == "blocks" and c.group_pattern:
        yield f"split: blocks divides a sequence, group_pattern keeps it together; {one_of}"
    if c.batch_size != "auto" and c.batch_parts > c.batch_size:
        yield f"batch_parts: {c.batch_parts} is more than batch_size: {c.batch_size}; need at most that"
    yield from class_contradictions(c)
    yield from (f"augmentation: {problem}" for problem in unknown_transforms(c.augmentation))
    if c.init_from is not None and c.encoder_weights not in ("auto", None):
        both = f"encoder_weights: {c.encoder_weights} is set, and init_from: {c.init_from} has an encoder"
        yield f"{both}; {one_of} (encoder_weights: auto or init_from: null)"
    if c.decoder_channels and c.architecture not in schema.WITH_DECODER_CHANNELS:
        have = ", ".join(schema.WITH_DECODER_CHANNELS)
        yield f"decoder_channels: not for architecture: {c.architecture}; only for {have}"
    least = schema.MIN_ATTENTION_CHANNELS
    if c.decoder_attention == "scse" and c.architecture not in schema.WITH_ATTENTION:
        fit = " and ".join(schema.WITH_ATTENTION)
        yield f"decoder_attention: scse is for {fit}, not for architecture: {c.architecture}; use none"
    elif c.decoder_attention == "scse" and min(c.decoder_channels or [least]) < least:
        yield f"decoder_attention: scse needs decoder_channels of at least {least}; got {to_plain(c.decoder_channels)}"


def class_contradictions(c: Config) -> Iterator[str]:
    """Contradictions about the classes; also of a config whose number of classes the masks have decided."""
    number, source = c.num_classes, "num_classes"
    if number == "auto":
        number, weighted = schema.implied_num_classes(c), isinstance(c.class_weights, tuple)
        source = "class_names" if c.class_names else "class_weights" if weighted else "mask_values"
    is_known = number is not None
    if is_known and number > 1 and "bce" in c.loss:
        yield f"loss: bce is for num_classes: 1; with {number} classes use cross_entropy"
    for key, values, what in (("class_weights", c.class_weights, "values"), ("class_names", c.class_names, "names")):
        if is_known and isinstance(values, tuple) and len(values) != number:
            yield f"{key}: got {len(values)} {what}; need {number}, one for each of {source}"
    taken: list[MaskValue] = [*range(max(2, number))] if is_known and c.mask_values == "auto" else []
    where, fix = f"the id of a class (num_classes: {number})", "set mask_values to the values of the classes"
    if not isinstance(c.mask_values, str):
        taken = [as_grey(value) for one_class in c.mask_values for value in split_values(one_class)]
        where, fix = "also in mask_values", "need another, or null"
        wanted = max(2, number) if is_known else len(c.mask_values)
        if len(c.mask_values) != wanted or len(set(taken)) != len(taken):
            order = "background first" if number == 1 else "one a class"
            yield f"mask_values: got {to_plain(c.mask_values)}; need {wanted} different values, {order}"
    elif is_known and number > 2 and c.mask_values != "auto":
        yield f"mask_values: {c.mask_values} tells two classes apart, {source}: {number} needs a value for each"
    ignored = () if c.ignore_value is None else map(as_grey, split_values(c.ignore_value))
    if clashing := [value for value in ignored if value in taken]:
        yield f"ignore_value: {to_plain(clashing[0])} is {where}; {fix}"


def check_trackers(config: Config) -> None:
    """Raises UserError where the package of a tracker that is switched on is missing, before torch is imported."""
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):  # keys; the packages have the same names
        if getattr(config, name) and find_spec(name) is None:
            raise UserError(f"{name}: the package is not installed; pip install {name}, or set {name}: false")


def check_onnx(model: str | None, exports: bool = False) -> None:
    """Raises UserError where a package is missing that an .onnx file needs, to be run or made."""
    if exports or str(model).endswith(".onnx"):
        for name in ("onnx", "onnxruntime", *["onnxscript"] * exports):
            if find_spec(name) is None:
                raise missing_onnx(name)


def missing_onnx(name: str) -> UserError:
    return UserError(f"{name} is not installed; exported models need: python -m pip install -r requirements-export.txt")


def missing_data_dir(data_dir: str) -> str:
    """That it does not exist; empty for what does, for URLs, patterns of shards, and the demo, which is made."""
    is_there = os.path.exists(data_dir) or is_demo_dir(data_dir)  # noqa: PTH110 (no OSError)
    if is_there or ":/" in data_dir or "{" in data_dir:
        return ""
    return f"{data_dir} does not exist; need a folder with images/ and masks/"


def url_problem(place: str) -> str:
    """Why a place cannot be a URL of shards, without what may be secret in it; empty if it can, or is no URL."""
    protocol, is_url, rest = place.partition("://")
    is_web = protocol.lower() in ("http", "https") and is_url
    user, has_user, _ = rest.partition("/")[0].rpartition("@")
    if has_user and (is_web or ":" in user):
        fix = "put it into ~/.netrc" if is_web else "give it by the environment variables or files of its tools"
        return f"a user or password in a URL would be printed, and written to every file of the run; {fix}"
    if is_web and ("?" in place or "#" in place):
        return "a URL with ? or # (pre-signed?) names one file, and shards are several; use s3:// or gs://"
    return ""


def check_url(key: str, place: str) -> None:
    """Raises UserError where a place is a URL that cannot be used, or the package of its protocol is missing."""
    if problem := url_problem(place):
        raise UserError(f"{key}: {problem}")
    protocol, is_url, _ = place.partition("://")
    if is_url and (package := PROTOCOLS.get(protocol)) and find_spec(package) is None:
        raise UserError(f"{key}: {protocol}:// needs the package {package}: pip install {package}")
