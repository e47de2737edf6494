"""Every setting of a run: one frozen, flat `Config`. Each key has a type with its bounds, a default and a sentence.

pydantic checks a value by its key's type (`parse_value`). Defaults live here and nowhere else. A Config may hold `auto`;
a ResolvedConfig holds none; `Settings` adds where each value came from and why.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from unet_trainer.config import parsers as p
from unet_trainer.config.parsers import LOSSES, MaskClass, MaskValues, near_miss
from unet_trainer.config.safe_yaml import BOOLEANS, NULLS, Plain, map_leaves, value_text

if TYPE_CHECKING:
    Auto = Any  # for type checkers, who then let a ResolvedConfig's values be used as decided
else:
    Auto = Literal["auto"]
Architecture = Literal[
    "unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet", "segformer", "dpt",
    "own",
]  # fmt: skip
WITH_DECODER_CHANNELS = ("unet", "unetplusplus", "manet")
WITH_ATTENTION = ("unet", "unetplusplus")
MIN_ATTENTION_CHANNELS = 16  # scse squeezes the channels of a decoder stage by this factor
OWN = "own"  # a loss or a network that a Python caller brings: docs/extending.md
DEMO_DIR = "data/demo"


def whole(least: int, most: int | None = None) -> Any:
    """Bounds of a whole number, which messages say in these words."""
    words = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return Field(ge=least, le=most, description=words)


# Types of values: how text becomes one (BeforeValidator), its bounds, and what messages say (description).
# fmt: off
WHOLE, NUMBER, TEXT = BeforeValidator(p.whole_number), BeforeValidator(p.number), BeforeValidator(p.text)
LENGTH = Field(min_length=1, max_length=256)
Flag = Annotated[bool, BeforeValidator(
    lambda raw: BOOLEANS.get(raw.strip().lower()) if isinstance(raw, str) else raw), Field(
    strict=True, description="true or false")]
Number = Annotated[float, NUMBER, Field(description="a number")]
AtLeastZero = Annotated[int, whole(0), WHOLE]
AtLeastOne = Annotated[int, whole(1), WHOLE]
UpTo65536 = Annotated[int, whole(1, 65536), WHOLE]
Side = Annotated[int, whole(32, 8192), WHOLE]
TwoSides = Annotated[tuple[Side, Side], Field(description="a list of 2, each a whole number from 32 to 8192")]
Channels = Annotated[int, whole(1, 4096), WHOLE]
FiveChannels = Annotated[tuple[Channels, Channels, Channels, Channels, Channels], Field(
    description="a list of 5, each a whole number from 1 to 4096")]
Positive = Annotated[float, Field(gt=0, description="a positive number"), NUMBER]
NotNegative = Annotated[float, Field(ge=0, description="a number at least 0"), NUMBER]
Gigabytes = Annotated[float, Field(ge=0, le=1e6, description="a number at least 0 and at most 1e+06"), NUMBER]
Share = Annotated[float, Field(ge=0, le=1, description="a number at least 0 and at most 1"), NUMBER]
InsideShare = Annotated[float, Field(gt=0, lt=1, description="a number above 0 and below 1"), NUMBER]
Text = Annotated[str, TEXT]
Names = Annotated[tuple[Text, ...], LENGTH, Field(description="a list, each text")]
Numbers = Annotated[tuple[Number, ...], LENGTH, Field(description="a list, each a number")]
Positives = Annotated[tuple[Positive, ...], LENGTH, Field(description="a list, each a positive number")]
Suffix = Annotated[str, BeforeValidator(partial(p.text, may_be_empty=True)), Field(description="text")]
Pattern = Annotated[str, TEXT, AfterValidator(p.pattern), Field(description="a regular expression")]
Duration = Annotated[str, TEXT, AfterValidator(p.duration), Field(description="a time with its unit")]
Encoder = Annotated[str, TEXT, AfterValidator(p.encoder_name), Field(description="the name of an encoder")]
Device = Annotated[str, Field(pattern="^(auto|cpu|mps|cuda(:[0-9]{1,3})?)$",
    description="auto, cpu, cuda, cuda:N or mps"), TEXT]
FolderName = Annotated[str, TEXT, AfterValidator(p.folder_name), Field(
    description="a plain name of at most 200 bytes, without slashes (checkpoint_dir says where)")]
Repeats = Annotated[float, Field(ge=1e-5, le=100_000, description="a whole number up to 100000, or a share below 1"),
    NUMBER, AfterValidator(lambda value: 1 / round(1 / value) if value < 1 else p.whole_number(value))]
Losses = Annotated[dict[str, Positive], BeforeValidator(p.weighted_losses), Field(
    description=f"one of {', '.join(LOSSES)}, or a weighted sum", examples=list(LOSSES))]
Transforms = Annotated[tuple[Any, ...], BeforeValidator(p.transform_list), Field(
    description="a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}]")]
Values = Annotated[MaskValues, BeforeValidator(p.mask_values), Field(
    description="auto, nonzero, above 127, or a list with the values or colours of each class")]
OneClass = Annotated[MaskClass, BeforeValidator(p.mask_class), Field(
    description="a value from 0 to 65535, a colour, or a list of several")]
# fmt: on

THEMES = {
    "data_dir": "Data", "architecture": "Model", "loss": "Loss", "batch_size": "Training", "seed": "Run",
    "device": "Speed and precision", "tensorboard": "Trackers",
}  # fmt: skip
SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "16": "float16"}
REMOVED_VALUES = {
    "unpaired: offset": "offset is no longer read; rename the masks, or set split_file to a CSV of the pairs",
    "decoder_attention: auto": "auto always was none: leave it out",
    "encoder_lr_factor: auto": "auto always was 1: leave it out",
}


def key(default: Any, sentence: str, example: str = "") -> Any:
    """One setting. The example is for messages, where the default is none; the sentence is its comment in YAML."""
    return dataclasses.field(default=default, metadata={"sentence": sentence, "example": example})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    # fmt: off
    data_dir: Text = key(DEMO_DIR, "folder with images/ and masks/, or train/ and val/ that hold them; or folder or "
        "URL (s3://, gs://, https://) of shards; data/demo is made when missing", "data/mine")
    image_dir: Text | None = key(None, "folder of the images, in data_dir or absolute; null: by its name", "images")
    mask_dir: Text | None = key(None, "folder of the masks, or folder or file of annotations; null: by name", "masks")
    mask_suffix: Suffix = key("", "what a mask's name has after the image's, if it is not found by itself: _mask pairs "
        "a.jpg with a_mask.png; or the masks' extension: .png", "_mask")
    unpaired: Literal["error", "skip"] = key("error", "images without a mask and the reverse: error; skip: not used")
    num_classes: Annotated[int, whole(1, 254), WHOLE] | Auto = key("auto", "1: foreground against background; K: class "
        "ids 0 to K-1, background included; auto: 1 for masks of two values, else as many as there are ids", "1")
    class_names: Names | None = key(None, "a name for each class; null: from a class file beside the masks, if any",
        "[background, road]")
    mask_values: Values = key("auto", "auto: decided from all masks, and reported; the value or [red, green, blue] of "
        "each class, in class order, or a list of several that are one class: [0, [1, 2]]; nonzero; or above N",
        "[0, 255] or [[0, 0, 0], [255, 0, 0]]")
    ignore_value: OneClass | None = key(None, "mask value (or colour, or several) left out of loss and scores", "255")
    unknown_values: Literal["error", "ignore"] = key("error", "mask values of no class: error; ignore: as ignore_value")
    mask_tolerance: Annotated[int, whole(0, 127), WHOLE] | Auto = key("auto", "pixels this close to a value or colour "
        "of mask_values are of its class, others are ignored; auto: 0, or for JPEG more", "0")
    val_fraction: InsideShare = key(0.2, "share of the pairs held out for validation when there is no val/ folder")
    split: Literal["random", "blocks"] = key("random", "random: by seed, with the classes in proportion; blocks: runs "
        "of neighbours by name, for videos and slices; one image alone is always split into blocks")
    split_file: Text | None = key(None, "CSV with the columns image, mask and, optionally, split (train, val, test), "
        "group and box; paths as seen from data_dir", "split.csv")
    group_pattern: Pattern | None = key(None, "regular expression on an image's path: what its first bracket matches "
        "(a patient, a video) stays on one side of the split", "'(patient\\d+)_'")
    num_folds: Annotated[int, whole(2, 1000), WHOLE] | None = key(None, "number of folds, instead of val_fraction", "5")
    fold: AtLeastZero = key(0, "the fold that validates, counted from 0")
    image_size: Side | TwoSides | Auto = key("auto", "what the model sees: one side, or [height, width]; auto: by the "
        "sizes of images and structures; scores are at the images' own size", "512 or [512, 768]")
    fit: Literal["resize", "crop"] | Auto = key("auto", "auto: by the size of structures; resize: each image to "
        "image_size; crop: random crops of it in training, tiles in validation")
    crops_per_image: Annotated[int, whole(1, 10_000), WHOLE] | Auto = key("auto", "fit: crop takes this many crops of "
        "an image in an epoch; auto: as many as fit into an image of median size, at most 16", "4")
    repeats: Repeats | Auto = key("auto", "times that each image (or crop) comes in an epoch, or the share of them "
        "that does: 0.25; auto: 1, or with num_epochs: auto what gives epochs of a good length", "4 or 0.25")
    rare_class_crops: Share = key(0.33, "fit: crop centres this share of the crops on a pixel of a rare class")
    resize_masks: Flag = key(False, "bring a mask of another size, but the same shape, to the size of its image")
    in_channels: Annotated[int, whole(1, 64), WHOLE] | Auto = key("auto", "channels; auto: as many as images have", "3")
    image_mean: Numbers | Auto = key("auto", "subtracted from each channel, in the files' own units; auto: ImageNet's "
        "for 8-bit RGB, else that of the training images", "[123.7, 116.3, 103.5]")
    image_std: Positives | Auto = key("auto", "each channel is divided by this; auto: likewise", "[58.4, 57.1, 57.4]")
    normalize: Literal["dataset", "image"] | Auto = key("auto", "image: each image or crop is then brought to mean 0 "
        "and standard deviation 1; auto: image, where a third of the variance of pixels lies between images")
    nodata: Literal["fill", "ignore", "keep"] | Number = key("fill", "values without data (NaN, GDAL's tag): fill with "
        "the mean; ignore in loss and scores; keep; or a number, such as -9999, that has no data either: fill", "-9999")
    augmentation: Literal["none", "default", "strong"] | Transforms | Auto = key("auto", "auto: by the symmetry of the "
        "data; none, default, strong, or a list of albumentations transforms")
    cutmix: Share | Auto = key("auto", "share of the training images that get a rectangle of another image; auto: 0.5 "
        "where augmentation is auto and images come often; 0: none", "0.5")
    num_workers: Annotated[int, whole(0, 512), WHOLE] | Auto = key("auto", "processes of a machine that read and "
        "augment; auto: by the number of cores; 0: none beside the main process", "4")
    cache: Literal["none", "ram", "disk"] | Auto = key("auto", "decoded pairs, in memory or in a file that is deleted "
        "at the end; auto: ram if a quarter of the free memory holds them, else disk if an image gives several crops")
    cache_gb: Gigabytes = key(20.0, "gigabytes of remote shards kept in checkpoint_dir; 0: none. Local files need none")

    architecture: Architecture = key("unet", "one of unet, unetplusplus, manet, linknet, fpn, pspnet, deeplabv3, "
        "deeplabv3plus, pan, upernet, segformer, dpt; own: the network that train(model=...) was given")
    encoder: Encoder = key("auto", "any encoder of segmentation-models-pytorch; tu-NAME takes one from timm; auto: "
        "resnet34, or on a CPU the largest of four that sees 12,000 images in an hour, or in time_budget", "resnet34")
    encoder_weights: Text | None = key("auto", "auto: imagenet if here or fetched within a minute, else random; "
        " null: random; imagenet; or the encoder of a .pt, .pth or .safetensors file", "imagenet")
    init_from: Text | None = key(None, "a model that a new run begins with: a run, a .pt, .pth or .safetensors file, "
        "or an export for segmentation-models-pytorch; what does not fit is initialised", "checkpoints/demo")
    decoder_channels: FiveChannels | None = key(None, "width of the five decoder stages of unet, unetplusplus, manet; "
        "null: [256, 128, 64, 32, 16], less with a small encoder: auto", "[256, 128, 64, 32, 16]")
    decoder_attention: Literal["none", "scse"] = key("none", "scse: squeeze and excitation; of unet and unetplusplus")
    freeze_encoder_epochs: AtLeastZero = key(0, "epochs before the encoder is trained", "5")

    loss: Losses | Auto = key("auto", "a weighted sum of dice, iou, cross_entropy, bce, focal, tversky, lovasz; "
        "cross_entropy with one class is bce; auto: dice + cross_entropy", "{dice: 1, bce: 1}")
    class_weights: Positives | Auto | None = key("auto", "weight of each class in the loss (with one class, of "
        "foreground); auto: more for very rare ones; null: all alike", "[0.5, 2.0]")

    batch_size: UpTo65536 | Auto = key("auto", "images in one forward pass of each process; auto: 16 on a GPU, 8 on a "
        "CPU, fewer where a trial of the step shows that memory is short", "8")
    num_epochs: Annotated[int, whole(1, 1_000_000), WHOLE] | Auto = key("auto", "passes over the training images "
        "(times repeats); auto: enough steps for the data, within time_budget", "50")
    time_budget: Duration | None = key(None, "time from the command to the report, e.g. 10m, when num_epochs is auto: "
        "steps and encoder are chosen to fit, the schedule ends on time", "10m, 2h or 1h30m")
    accumulation_steps: UpTo65536 = key(1, "batches a step: effective batch = batch_size × this × processes", "4")
    optimizer: Literal["adamw", "adam", "sgd"] = key("adamw", "adamw, adam or sgd (Nesterov momentum 0.9)")
    learning_rate: Positive | Auto = key("auto", "peak learning rate; auto: by optimizer and effective batch; runs of "
        "2,000 steps or more try lower ones before the first epoch", "1e-3")
    scale_lr: Flag = key(False, "under torchrun: learning_rate times the number of processes (the linear rule)")
    encoder_lr_factor: Positive = key(1.0, "of the encoder, times learning_rate, e.g. 0.2 if pretrained", "0.2")
    weight_decay: NotNegative | Auto = key("auto", "not on biases and norms; auto: 0.05 with adamw, else 1e-4", "1e-4")
    scheduler: Literal["cosine", "poly", "plateau", "constant"] = key("cosine", "how the learning rate falls: cosine "
        "or poly to 0 at the end, plateau when monitor stalls, constant never")
    warmup_epochs: NotNegative | Auto = key("auto", "epochs over which the learning rate rises from 0; auto: 3 %", "2")
    plateau_patience: AtLeastOne = key(5, "scheduler: plateau waits this many epochs without improvement")
    plateau_factor: InsideShare = key(0.3, "and then multiplies the learning rate by this")
    grad_clip: Positive | None = key(None, "largest norm of the gradients; null: no limit", "1.0")
    ema_decay: InsideShare | Auto | None = key("auto", "average the weights over steps and evaluate the average; auto: "
        "over about a tenth of the run; null: off", "0.999")
    monitor: Literal["val_iou", "val_dice", "val_loss"] = key("val_iou", "decides best.pt, early stopping and plateau; "
        "always val_loss where no validation mask has a class to score")
    early_stopping_patience: AtLeastOne | Auto | None = key("auto", "stop after this many epochs without improvement, "
        "once the learning rate is low or the training loss no longer falls; auto: 30 % of them; null: never", "20")
    early_stopping_min_delta: NotNegative = key(0.0, "an improvement smaller than this does not count as one", "0.001")

    device: Device = key("auto", "auto, cpu, cuda, cuda:1 or mps")
    use_amp: Flag | Auto = key("auto", "mixed precision: faster, half the memory on a GPU, same IoU; auto: on a GPU")
    amp_dtype: Literal["bfloat16", "float16"] = key("bfloat16", "bfloat16 (from Ampere on); float16: older GPUs")
    scaler_init_scale: Positive = key(65536.0, "float16: first loss scale")
    allow_tf32: Flag = key(True, "let float32 matrix products use TF32 on NVIDIA GPUs from Ampere on")
    compile_model: Flag | Auto = key("auto", "compile the step: a minute, then faster; auto: where that saves time")
    channels_last: Flag = key(True, "NHWC in memory, which suits tensor cores")
    gradient_compression: Literal["none", "bf16"] = key("none", "under torchrun: bf16 halves what slow links send")
    sync_batchnorm: Flag = key(False, "under torchrun: batch norm over the batches of all processes; not compiled")
    deterministic: Flag = key(False, "the same bits on every run of one machine, at some cost in speed")

    seed: Annotated[int, whole(0, 2**31), WHOLE] = key(42, "split, weights, order, augmentation follow from it")
    checkpoint_dir: Text = key("checkpoints", "where runs are written")
    run_name: FolderName = key("run", "name of the run's folder; a number is added when it exists")
    resume: Text | None = key(None, "auto: go on with run_name if it exists; or a run folder or .pt file", "auto")
    checkpoint_minutes: Positive | None = key(10.0, "the state is saved this often in an epoch; null: at its end")
    on_oom: Literal["stop", "shrink"] = key("stop", "when memory runs out: stop, or shrink: double batch_parts")
    batch_parts: UpTo65536 = key(1, "parts of a batch in turn: less memory, more time; norms see a part", "2")
    worker_timeout: Positive | None = key(600.0, "seconds without a batch until workers count as hanging; null: never")

    tensorboard: Flag = key(False, "log scalars, pictures, settings to the run's folder (pip install tensorboard)")
    wandb: Flag = key(False, "log to Weights & Biases (pip install wandb); without a key into the run's folder")
    trackio: Flag = key(False, "log to Trackio (pip install trackio)")
    mlflow: Flag = key(False, "log to MLflow (pip install mlflow): MLFLOW_TRACKING_URI, or checkpoint_dir/mlruns")

    # fmt: on
    # Where each value came from ("file", "command line", ...); a key that is missing here has its default.
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config) if field.name != "sources"}


@cache
def adapter(name: str) -> TypeAdapter[Any]:
    hint: Any = FIELDS[name].type
    return TypeAdapter(hint)


def parse_value(name: str, raw: Any) -> Any:
    """The value of a key. Raises ValueError with what is needed."""
    value = map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, raw)  # what numpy has
    if isinstance(raw, str):
        hint: Any = FIELDS[name].type
        is_null = isinstance(raw, Plain) and raw.lower() in NULLS and hint == hint | None
        is_auto = raw.strip().lower() == "auto" and hint == hint | Auto
        value = None if is_null else "auto" if is_auto else str(raw)
    try:
        return adapter(name).validate_python(value)
    except ValidationError as error:
        reasons = [str(problem.get("ctx", {}).get("error", "")) for problem in error.errors(include_url=False)]
    word = raw if isinstance(raw, str) else ""
    detail = REMOVED_VALUES.get(f"{name}: {word}") or next(filter(None, reasons), "")
    raise ValueError(_needed(name, word) + (f" ({detail})" if detail else ""))


def _needed(name: str, word: str) -> str:
    """What a key takes, by the JSON schema of its type, and what `word` may mean."""
    default, example, schema = FIELDS[name].default, FIELDS[name].metadata["example"], adapter(name).json_schema()
    options = [schema] if "description" in schema else schema.get("anyOf", [schema])
    types = [option for option in options if option.get("const") != "auto" and option.get("type") != "null"]
    choices = [choice for option in types for choice in option.get("enum") or option.get("examples", ())]
    words = (
        f"one of {', '.join(each['enum'])}" if "enum" in each else each.get("description", "text") for each in types
    )
    text = f"need {' or '.join(words)}"
    if not example and type(default) in (int, float, str) and default != "auto":
        example = str(default)
    text += f", e.g. {example}" if example and not all("enum" in option for option in types) else ""
    text += ", or auto" if any(option.get("const") == "auto" for option in options) else ""
    text += ", or null" if {"type": "null"} in options else ""
    spelled = SPELLINGS.get(word.lower())
    meant = spelled if spelled in choices else near_miss(word, choices)
    return text + (f"; did you mean {meant}?" if meant else "")


def is_demo_dir(data_dir: str | os.PathLike[str]) -> bool:
    """However it is spelled: data/demo/, ./data/demo."""
    return os.path.abspath(data_dir) == os.path.abspath(DEMO_DIR)  # noqa: PTH100 (resolve() would follow links)


def as_shape(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return image_size if isinstance(image_size, tuple) else (image_size, image_size)


def class_names(config: Config) -> list[str]:
    """A name for each class that is reported. Equal ones get their id: tables are kept by name."""
    assert config.num_classes != "auto"
    if (names := config.class_names) is not None:
        return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names)]
    return ["foreground"] if config.num_classes == 1 else [f"class {index}" for index in range(config.num_classes)]


def id_names(config: Config) -> list[str]:
    """A name for each class id, background included."""
    return ["background", *class_names(config)] if config.num_classes == 1 else class_names(config)


def implied_num_classes(config: Config) -> int | None:
    """The number of classes that other settings leave no choice about; None where the masks decide it."""
    for setting in (config.class_names, config.class_weights):
        if isinstance(setting, tuple):
            return len(setting)
    if isinstance(config.mask_values, str):
        return None if config.mask_values == "auto" else 1
    return 1 if len(config.mask_values) == 2 else len(config.mask_values)


def to_plain(value: Any) -> Any:
    """Lists in place of tuples, also in lists and dicts."""
    return map_leaves(lambda leaf: leaf, value)


def as_dict(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists and primitives."""
    return {name: to_plain(getattr(config, name)) for name in FIELDS}


def to_yaml(config: Config, header: str, reasons: Mapping[str, str] | None = None) -> str:
    """The config as YAML that runs again as it is. A key's comment is its reason if there is one, else its sentence."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for name, value in as_dict(config).items():
        comment = (reasons or {}).get(name) or FIELDS[name].metadata["sentence"]
        lines += ["", f"# {THEMES[name]}"] if name in THEMES else []
        lines.append(f"{name}: {value_text(value)}  # {' '.join(comment.split())}")
    return "\n".join(lines) + "\n"
