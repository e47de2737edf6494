"""Every setting of a run: one frozen, flat `Config`. Each key has a type with its bounds, a default and a sentence.

Defaults live here and nowhere else.
"""

import ast
import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from unet_trainer.config import parsers as p
from unet_trainer.config.parsers import LOSSES, Kind, MaskClass, MaskValues, Range
from unet_trainer.config.safe_yaml import map_leaves, value_text

Auto = Literal["auto"]
MonitorName = Literal["val_iou", "val_dice", "val_loss"]
Architecture = Literal[
    "unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet", "segformer", "dpt",
    "own",
]  # fmt: skip
WITH_DECODER_CHANNELS = ("unet", "unetplusplus", "manet")
WITH_ATTENTION = ("unet", "unetplusplus")
MIN_ATTENTION_CHANNELS = 16  # scse squeezes the channels of a decoder stage by this factor
OWN = "own"  # a loss or a network that a Python caller brings: docs/extending.md
DEMO_DIR = "data/demo"

AtLeastOne = Annotated[int, Range(1)]
UpTo65536 = Annotated[int, Range(1, 65536)]
Side = Annotated[int, Range(32, 8192)]
Channels = Annotated[int, Range(1, 4096)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
InsideShare = Annotated[float, Range(above=0, below=1)]
Suffix = Annotated[str, Kind(p.word_or_empty, "text")]
Pattern = Annotated[str, Kind(p.pattern, "a regular expression")]
Duration = Annotated[str, Kind(p.duration, "a time with its unit")]
Repeats = Annotated[float, Kind(p.repeats, "a whole number up to 100000, or a share below 1")]
FolderName = Annotated[
    str, Kind(p.folder_name, "a plain name of at most 200 bytes, without slashes (checkpoint_dir says where)")
]
Device = Annotated[str, Kind(p.device_name, "auto, cpu, cuda, cuda:N or mps")]
Encoder = Annotated[str, Kind(p.encoder_name, "the name of an encoder")]
Losses = Annotated[dict[str, float], Kind(p.weighted_losses, f"one of {', '.join(LOSSES)}, or a weighted sum", LOSSES)]
Transforms = Annotated[
    tuple[Any, ...], Kind(p.transform_list, "a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}]")
]
Values = Annotated[
    MaskValues,
    Kind(p.parse_mask_values, "auto, nonzero, above 127, or a list with the values or colours of each class"),
]
OneClass = Annotated[MaskClass, Kind(p.parse_mask_class, "a value from 0 to 65535, a colour, or a list of several")]


THEMES = {
    "data_dir": "Data", "architecture": "Model", "loss": "Loss", "batch_size": "Training", "device": "Speed and precision",
    "seed": "Run", "tensorboard": "Trackers",
}  # fmt: skip
REMOVED_VALUES = {
    "unpaired: offset": "offset is no longer read; rename the masks, or set split_file to a CSV of the pairs"
}
# In messages, for keys whose default is not an example.
EXAMPLES = {
    "data_dir": "data/mine", "image_dir": "images", "mask_dir": "masks", "mask_suffix": "_mask", "num_classes": "1",
    "class_names": "[background, road]", "mask_values": "[0, 255] or [[0, 0, 0], [255, 0, 0]]", "ignore_value": "255",
    "mask_tolerance": "0", "split_file": "split.csv", "group_pattern": r"'(patient\d+)_'", "num_folds": "5",
    "image_size": "512 or [512, 768]", "crops_per_image": "4", "repeats": "4 or 0.25", "in_channels": "3", "nodata": "-9999",
    "image_mean": "[123.7, 116.3, 103.5]", "image_std": "[58.4, 57.1, 57.4]", "cutmix": "0.5", "num_workers": "4",
    "encoder": "resnet34", "encoder_weights": "imagenet", "init_from": "checkpoints/demo", "decoder_channels": "[256, 128, 64, 32, 16]",
    "freeze_encoder_epochs": "5", "loss": "{dice: 1, bce: 1}", "class_weights": "[0.5, 2.0]",
    "batch_size": "8", "num_epochs": "50", "time_budget": "10m, 2h or 1h30m", "accumulation_steps": "4",
    "learning_rate": "1e-3", "encoder_lr_factor": "0.2", "weight_decay": "1e-4", "warmup_epochs": "2", "grad_clip": "1.0",
    "ema_decay": "0.999", "early_stopping_patience": "20", "early_stopping_min_delta": "0.001", "resume": "auto",
    "batch_parts": "2",
}  # fmt: skip

OVERRIDES_START = """\
\"\"\"The keywords of `train` and `follow` that are settings, for editors and type checkers. Written by to_typed_dict of
schema.py; tests/config/test_schema.py prints the command.\"\"\"

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class Overrides(TypedDict, total=False):
    # fmt: off""".splitlines()


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. The text under a key is its comment in configs/default.yaml."""

    data_dir: str = DEMO_DIR
    """folder with images/ and masks/, or train/ and val/ that hold them; or folder or URL (s3://, gs://, https://) of shards;
    data/demo is made when missing"""
    image_dir: str | None = None
    """folder of the images, inside data_dir or an absolute path; null: found by its name (images, imgs, train, ...)"""
    mask_dir: str | None = None
    """folder of the masks, or folder or file of annotations, inside data_dir or an absolute path; null: found by its name
    (masks, labels, gt, trainannot, ...)"""
    mask_suffix: Suffix = ""
    """what a mask's name has after the image's name, if it is not found by itself: _mask pairs a.jpg with a_mask.png; or the
    masks' extension: .png"""
    unpaired: Literal["error", "skip"] = "error"
    """images without a mask and masks without an image: error; skip: left out and counted"""
    num_classes: Annotated[int, Range(1, 254)] | Auto = "auto"
    """1: foreground against background; K: class ids 0 to K-1, background included; auto: 1 for masks of two values, else as
    many as there are ids"""
    class_names: tuple[str, ...] | None = None
    """names for the per-class table, one for each class; null: from a class file beside the masks, if there is one"""
    mask_values: Values = "auto"
    """auto: decided from all masks, and reported; the value or [red, green, blue] of each class, in class order, or a list of
    several that are one class: [0, [1, 2]]; nonzero; or above N"""
    ignore_value: OneClass | None = None
    """mask value of pixels that are ignored in loss and scores; or a colour, or a list of several: [10, 11]"""
    unknown_values: Literal["error", "ignore"] = "error"
    """mask values that belong to no class: error stops, ignore leaves such pixels out of loss and scores"""
    mask_tolerance: Annotated[int, Range(0, 127)] | Auto = "auto"
    """a pixel this close to a value or colour of mask_values (in each channel) is of its class, others are ignored; auto: 0, more
    for masks saved as JPEG"""
    val_fraction: InsideShare = 0.2
    """share of the pairs held out for validation when there is no val/ folder"""
    split: Literal["random", "blocks"] = "random"
    """random: by seed, with the classes in proportion; blocks: for videos and slices, runs of neighbours in the order of their
    names, with a gap; one image alone is always split into blocks of pixels"""
    split_file: str | None = None
    """CSV with the columns image, mask and, optionally, split (train, val, test), group and box; paths as seen from data_dir"""
    group_pattern: Pattern | None = None
    """regular expression on an image's path: what its first bracket matches (a patient, a video) stays on one side of the
    split"""
    num_folds: Annotated[int, Range(2, 1000)] | None = None
    """split into this many folds in place of val_fraction"""
    fold: Annotated[int, Range(0)] = 0
    """the fold that validates, counted from 0"""
    image_size: Side | tuple[Side, Side] | Auto = "auto"
    """size of what the model sees: one side, or [height, width]; auto: from the sizes of images and structures; val_iou is at
    the images' own size in any case"""
    fit: Literal["resize", "crop"] | Auto = "auto"
    """auto: by the size of structures; resize: each image to image_size; crop: random crops of it in training, tiles in
    validation"""
    crops_per_image: Annotated[int, Range(1, 10_000)] | Auto = "auto"
    """fit: crop takes this many crops of an image in an epoch; auto: as many as fit into an image of median size, at most 16"""
    repeats: Repeats | Auto = "auto"
    """times that each image (or each of its crops) comes in an epoch, or the share of them that does: 0.25; auto: 1, or with
    num_epochs: auto what gives epochs of a good length"""
    rare_class_crops: Share = 0.33
    """fit: crop centres this share of the crops on a pixel of a rare class"""
    resize_masks: bool = False
    """bring a mask of another size, but the same shape, to the size of its image"""
    in_channels: Annotated[int, Range(1, 64)] | Auto = "auto"
    """channels of the images; auto: as many as they have"""
    image_mean: tuple[float, ...] | Auto = "auto"
    """subtracted from each channel, in the files' own units; auto: ImageNet's for 8-bit RGB, else that of the training images"""
    image_std: tuple[Positive, ...] | Auto = "auto"
    """each channel is divided by this; auto: likewise"""
    normalize: Literal["dataset", "image"] | Auto = "auto"
    """image: each image or crop that the model sees is then brought to mean 0 and standard deviation 1, all channels as one;
    dataset: it is not; auto: image, where a third of the variance of pixels lies between images"""
    nodata: Literal["fill", "ignore", "keep"] | float = "fill"
    """values without data (NaN, GDAL's tag) are left out of the statistics and get the mean: fill; ignore: such pixels are left
    out of loss and scores; keep: only NaN and the tags of float images; a number, such as -9999: fill, and this value has no
    data either"""
    augmentation: Literal["none", "default", "strong"] | Transforms | Auto = "auto"
    """auto: by the symmetry of the data; none, default, strong, or a list of albumentations transforms"""
    cutmix: Share | Auto = "auto"
    """share of the training images that get a rectangle of another image of the batch; auto: 0.5 where augmentation is auto
    and images come often; 0: none"""
    num_workers: Annotated[int, Range(0, 512)] | Auto = "auto"
    """processes that read and augment, of a machine: those of torchrun divide them; auto: by the number of cores; 0: none
    beside the main process"""
    cache: Literal["none", "ram", "disk"] | Auto = "auto"
    """decoded pairs: auto: ram if they fit into a quarter of the free memory; ram keeps them in memory, one copy for all
    workers; disk in a file that is deleted at the end of the run"""
    cache_gb: Annotated[float, Range(0, 1e6)] = 20.0
    """gigabytes of remote shards that are kept under checkpoint_dir as they are fetched; 0: none. Files on a local disk need
    none"""

    architecture: Architecture = "unet"
    """one of unet, unetplusplus, manet, linknet, fpn, pspnet, deeplabv3, deeplabv3plus, pan, upernet, segformer, dpt; own: the network
    that train(model=...) was given"""
    encoder: Encoder = "auto"
    """any encoder of segmentation-models-pytorch; tu-NAME takes one from timm; auto: resnet34, or on a CPU the largest of four that sees 12,000 images in an hour, or in time_budget"""
    encoder_weights: str | None = "auto"
    """auto: imagenet if they are on this machine or can be fetched within a minute, else random; null: random; imagenet; or a
    local .pt, .pth or .safetensors file, of which the encoder alone is taken"""
    init_from: str | None = None
    """a model that a new run begins with: a run, a .pt, .pth or .safetensors file, or an export for
    segmentation-models-pytorch; what does not fit, such as other classes, is initialised"""
    decoder_channels: tuple[Channels, Channels, Channels, Channels, Channels] | None = None
    """width of the five decoder stages of unet, unetplusplus and manet; null: [256, 128, 64, 32, 16], less with a small
    encoder: auto"""
    decoder_attention: Literal["none", "scse"] = "none"
    """scse: squeeze and excitation of channels and places in the decoder of unet and unetplusplus"""
    freeze_encoder_epochs: Annotated[int, Range(0)] = 0
    """epochs at the start in which the encoder is not trained"""

    loss: Losses | Auto = "auto"
    """a weighted sum of dice, iou, cross_entropy, bce, focal, tversky, lovasz; cross_entropy with one class is bce; auto: dice
    + cross_entropy"""
    class_weights: tuple[Positive, ...] | Auto | None = "auto"
    """weight of each class in the loss (with one class, of foreground pixels); auto: null, or where a class is very rare, rare
    ones weigh somewhat more; null: all alike"""

    batch_size: UpTo65536 | Auto = "auto"
    """images in one forward pass, of each process under torchrun; auto: 16 on a GPU, 8 on a CPU, fewer where a trial of the
    step shows that memory is short"""
    num_epochs: Annotated[int, Range(1, 1_000_000)] | Auto = "auto"
    """passes over the training images (times repeats); auto: enough steps for the data, within time_budget"""
    time_budget: Duration | None = None
    """time that the run may take, from the command to the report, e.g. 10m or 2h, when num_epochs is auto: steps and encoder
    are chosen to fit, the schedule ends on time"""
    accumulation_steps: UpTo65536 = 1
    """batches in one optimizer step: effective batch = batch_size × this × number of processes"""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw, adam or sgd (Nesterov momentum 0.9)"""
    learning_rate: Positive | Auto = "auto"
    """peak learning rate; auto: by optimizer and effective batch; runs of 2,000 steps or more try lower ones before the first epoch"""
    scale_lr: bool = False
    """under torchrun: multiply learning_rate by the number of processes (the linear rule); else it is taken as it is"""
    encoder_lr_factor: Positive = 1.0
    """the encoder's learning rate relative to learning_rate, e.g. 0.2 for pretrained weights that shall change little"""
    weight_decay: NotNegative | Auto = "auto"
    """on weights; biases and normalisation layers have none; auto: 0.05 with adamw, else 1e-4"""
    scheduler: Literal["cosine", "poly", "plateau", "constant"] = "cosine"
    """how the learning rate falls: cosine or poly to 0 at the end, plateau when monitor stalls, constant never"""
    warmup_epochs: NotNegative | Auto = "auto"
    """epochs over which the learning rate rises from 0; auto: 3 % of them"""
    plateau_patience: AtLeastOne = 5
    """scheduler: plateau waits this many epochs without improvement"""
    plateau_factor: InsideShare = 0.3
    """and then multiplies the learning rate by this"""
    grad_clip: Positive | None = None
    """largest norm of the gradients; null: no limit"""
    ema_decay: InsideShare | Auto | None = "auto"
    """average the weights over steps and evaluate the average; auto: over about a tenth of the run; null: off"""
    monitor: MonitorName = "val_iou"
    """the metric that decides best.pt, early stopping and plateau: val_iou, val_dice or val_loss (always
    val_loss where no validation mask has a class to score)"""
    early_stopping_patience: AtLeastOne | Auto | None = "auto"
    """stop after this many epochs without improvement, not counting those in which the learning rate warms up, or is high and
    the training loss still falls; auto: 30 % of the epochs; null: never"""
    early_stopping_min_delta: NotNegative = 0.0
    """an improvement smaller than this does not count as one"""

    device: Device = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    use_amp: bool | Auto = "auto"
    """mixed precision: faster and about half the memory on a GPU, at the same IoU; auto: on a GPU"""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """bfloat16 (Ampere or newer), or float16 with loss scaling (older GPUs)"""
    scaler_init_scale: Positive = 65536.0
    """float16: first loss scale"""
    allow_tf32: bool = True
    """let float32 matrix products use TF32 on NVIDIA GPUs from Ampere on"""
    compile_model: bool | Auto = "auto"
    """compile the step: faster, after a minute or so of compiling; auto: on a GPU, when that saves time within the run"""
    channels_last: bool = True
    """NHWC in memory, which suits tensor cores"""
    gradient_compression: Literal["none", "bf16"] = "none"
    """under torchrun: bf16 sends gradients in bfloat16, half the bytes for slow links between GPUs, and rounds them"""
    sync_batchnorm: bool = False
    """under torchrun on GPUs: batch norm statistics over the batches of all processes; for very small batches; slower, and not
    compiled"""
    deterministic: bool = False
    """the same bits on every run of one machine, at some cost in speed"""

    seed: Annotated[int, Range(0, 2**31)] = 42
    """split, weights, order and augmentation follow from it"""
    checkpoint_dir: str = "checkpoints"
    """where runs are written"""
    run_name: FolderName = "run"
    """name of the run's folder; a number is added when it exists"""
    resume: str | None = None
    """auto: go on with run_name if it exists; or a run folder or a .pt file to go on from"""
    checkpoint_minutes: Positive | None = 10.0
    """the state is saved this often within an epoch too; null: at the end of each epoch only"""
    on_oom: Literal["stop", "shrink"] = "stop"
    """when memory runs out: stop, or shrink: double batch_parts and go on"""
    batch_parts: UpTo65536 = 1
    """parts in which a batch goes through the model: less memory, more time; batch norm and overlap losses see a part at a
    time"""
    worker_timeout: Positive | None = 600.0
    """seconds without a batch after which the worker processes count as hanging; null: wait for ever"""
    process_timeout: Annotated[float, Range(5, 86400)] = 900.0
    """under torchrun: seconds that processes wait for one that does not answer before the job ends; more than worker_timeout"""

    tensorboard: bool = False
    """log to TensorBoard, in the run's folder: scalars, pictures, settings (pip install tensorboard)"""
    wandb: bool = False
    """log to Weights & Biases (pip install wandb); without an API key into the run's folder only"""
    trackio: bool = False
    """log to Trackio (pip install trackio)"""
    mlflow: bool = False
    """log to MLflow (pip install mlflow): MLFLOW_TRACKING_URI, or checkpoint_dir/mlruns"""

    # Where each value came from ("file", "command line", ...); a key that is missing here has its default. Not a setting.
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config) if field.name != "sources"}


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Config, include_extras=True)


@cache
def explanations() -> dict[str, str]:
    """The text under each key, on one line."""
    (definition,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, text in pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            found[statement.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def parse_value(name: str, raw: Any) -> Any:
    """The value of a key. Raises ValueError with what is needed."""
    try:
        return p.parse(raw, _hints()[name])
    except ValueError as error:
        default = FIELDS[name].default
        example = EXAMPLES.get(name) or (str(default) if default not in ("auto", None) else "")
        detail = f" ({error})" if str(error) else ""
        detail = f" ({gone})" if (gone := REMOVED_VALUES.get(f"{name}: {raw}")) else detail
        raise ValueError(p.needed(raw, _hints()[name], example) + detail) from None


def is_demo_dir(data_dir: str | os.PathLike[str]) -> bool:
    """Whether the path is that of the built-in dataset, however it is spelled: data/demo/, ./data/demo."""
    return os.path.abspath(data_dir) == os.path.abspath(DEMO_DIR)  # noqa: PTH100 (resolve() would follow links)


def as_shape(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return image_size if isinstance(image_size, tuple) else (image_size, image_size)


def class_names(config: Config) -> list[str]:
    """A name for each class that is reported, once their number is decided. Equal ones get their id: tables are kept by name."""
    assert config.num_classes != "auto"
    if (names := config.class_names) is not None:
        return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names)]
    return ["foreground"] if config.num_classes == 1 else [f"class {index}" for index in range(config.num_classes)]


def implied_num_classes(config: Config) -> int | None:
    """The number of classes that other settings leave no choice about; None where the masks decide it."""
    for given in (config.class_names, config.class_weights):
        if isinstance(given, tuple):
            return len(given)
    if isinstance(config.mask_values, str):
        return None if config.mask_values == "auto" else 1
    return 1 if len(config.mask_values) == 2 else len(config.mask_values)


def id_names(config: Config) -> list[str]:
    """A name for each class id, background included."""
    return ["background", *class_names(config)] if config.num_classes == 1 else class_names(config)


def as_dict(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists and primitives."""
    return {name: to_plain(getattr(config, name)) for name in FIELDS}


def to_plain(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf, value)


def to_yaml(config: Config, header: str, reasons: Mapping[str, str] | None = None) -> str:
    """The config as YAML that runs again as it is. Each key has a comment: its reason if there is one, else its meaning."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for name, value in as_dict(config).items():
        if name in THEMES:
            lines += ["", f"# {THEMES[name]}"]
        comment = (reasons or {}).get(name) or explanations()[name]
        lines.append(f"{name}: {value_text(value)}  # {' '.join(comment.split())}")
    return "\n".join(lines) + "\n"


def to_markdown() -> str:
    """The keys of the config as tables for docs/configuration.md, one a theme."""
    lines = []
    defaults = as_dict(Config())
    for name in FIELDS:
        if name in THEMES:
            lines += ["", f"## {THEMES[name]}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        meaning = explanations()[name].replace("|", r"\|")
        lines.append(f"| `{name}` | `{value_text(defaults[name])}` | {meaning} |")
    return "\n".join(lines) + "\n"


def to_typed_dict() -> str:
    """The keys of the config as keywords of `train` and `follow`, for unet_trainer/config/overrides.py. Lists and paths
    may be written where a Config has tuples and text."""
    keys = [f"    {name}: {_typed(_hints()[name])}" for name in FIELDS if name != "loss"]  # which may be a function too
    return "\n".join([*OVERRIDES_START, *keys]) + "\n"


def _typed(hint: Any) -> str:
    """The type of what may be passed for a value of a type hint, as Python code."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return "str" if arguments[0] is str else _typed(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_typed, arguments)))
    if origin is Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if origin is tuple:
        return f"Sequence[{_typed(arguments[0])}]"
    plain: dict[Any, str] = {str: "str | PathLike[str]", NoneType: "None", Any: "Any"}
    return plain.get(hint) or str(hint.__name__)
