"""Every setting of a run: one frozen, flat `Config`, with the default, the parser and an explanation for each key.

Defaults live here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unet_trainer.config import parsers as p
from unet_trainer.config.mask_classes import MaskClass, MaskValues, parse_mask_class, parse_mask_values

Auto = Literal["auto"]
MonitorName = Literal["val_iou", "val_dice", "val_loss"]
ARCHITECTURES = ("unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet", "segformer", "dpt")  # fmt: skip
WITH_DECODER_CHANNELS = ("unet", "unetplusplus", "manet")
WITH_ATTENTION = ("unet", "unetplusplus")
MIN_ATTENTION_CHANNELS = 16  # scse squeezes the channels of a decoder stage by this factor
LOSSES = ("dice", "iou", "cross_entropy", "bce", "focal", "tversky", "lovasz")
DEMO_DIR = "data/demo"
MAX_NAME_BYTES = 200  # file systems take 255, and a run's name may get a number


def key(default: Any, parser: p.Parser, doc: str, theme: str = "") -> Any:
    """One config key: its default, its parser and a line that explains it. A theme begins a new group of keys."""
    metadata = {"parse": parser, "doc": doc, "theme": theme}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. The explanation of each key is its comment in configs/default.yaml."""

    data_dir: str = key(
        DEMO_DIR,
        p.text("data/mine"),
        "folder with images/ and masks/, or train/ and val/ that hold them; or folder or URL (s3://, gs://, https://) of shards; "
        "data/demo is made when missing",
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
        "folder of the masks, or folder or file of annotations, inside data_dir or an absolute path; null: found by its name (masks, "
        "labels, gt, trainannot, ...)",
    )
    mask_suffix: str = key(
        "",
        p.word_or_empty,
        "what a mask's name has after the image's name, if it is not found by itself: _mask pairs a.jpg with a_mask.png; or the masks' extension: .png",
    )
    unpaired: Literal["error", "skip"] = key(
        "error", p.choice("error", "skip"), "images without a mask and masks without an image: error, or skip: left out and counted"
    )
    num_classes: int | Auto = key(
        "auto",
        p.auto_or(p.integer(minimum=1, maximum=254, example="1")),
        "1: foreground against background; K: class ids 0 to K-1, background included; auto: 1 for masks of two values, else as many "
        "as there are ids",
    )
    class_names: tuple[str, ...] | None = key(
        None,
        p.optional(p.listing(p.text(), example="[background, road]")),
        "names for the per-class table, one for each class; null: from a class file beside the masks, if there is one",
    )
    mask_values: MaskValues = key(
        "auto",
        parse_mask_values,
        "auto: decided from all masks, and reported; the value or [red, green, blue] of each class, in class order, or a list of "
        "several that are one class: [0, [1, 2]]; nonzero; or above N",
    )
    ignore_value: MaskClass | None = key(
        None,
        p.optional(parse_mask_class),
        "mask value of pixels that count nowhere; or a colour, or a list of several: [10, 11]",
    )
    unknown_values: Literal["error", "ignore"] = key(
        "error", p.choice("error", "ignore"), "mask values that belong to no class: error stops, ignore lets them count nowhere"
    )
    mask_tolerance: int | Auto = key(
        "auto",
        p.auto_or(p.integer(minimum=0, maximum=127, example="0")),
        "a pixel this close to a value or colour of mask_values (in each channel) is of its class, others count nowhere; auto: 0, more "
        "for masks saved as JPEG",
    )
    val_fraction: float = key(
        0.2, p.number(above=0, below=1, example="0.2"), "share of the pairs held out for validation when there is no val/ folder"
    )
    split: Literal["random", "blocks"] = key(
        "random",
        p.choice("random", "blocks"),
        "random: by seed, with the classes in proportion; blocks: for videos and slices, runs of neighbours in the order of their names, with a gap",
    )
    split_file: str | None = key(
        None,
        p.optional(p.text("split.csv")),
        "CSV with the columns image, mask and, optionally, split (train, val, test) and group; paths as seen from data_dir",
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
    image_size: int | tuple[int, int] | Auto = key(
        "auto",
        p.auto_or(
            p.either(
                p.integer(minimum=32, maximum=8192, example="512"),
                p.listing(p.integer(minimum=32, maximum=8192, example="512"), example="[512, 768]", minimum=2, maximum=2),
            )
        ),
        "size of what the model sees: one side, or [height, width]; auto: from the sizes of images and structures; val_iou is at the "
        "images' own size in any case",
    )
    fit: Literal["resize", "crop"] | Auto = key(
        "auto",
        p.choice("auto", "resize", "crop"),
        "auto: by the size of structures; resize: each image to image_size; crop: random crops of it in training, tiles in validation",
    )
    crops_per_image: int | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.integer(minimum=1, maximum=10_000, example="4")),
        "fit: crop takes this many crops of an image in an epoch; auto: as many as fit into an image of median size, at most 16",
    )
    repeats: float | Auto = key(
        "auto",
        p.auto_or(p.repeats),
        "times that each image (or each of its crops) comes in an epoch, or the share of them that does: 0.25; auto: 1, or with "
        "num_epochs: auto what gives epochs of a good length",
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
        "auto",
        p.either(p.choice("auto", "none", "default", "strong"), p.transform_list),
        "auto: by the symmetry of the data; none, default, strong, or a list of albumentations transforms",
    )
    cutmix: float | Auto = key(
        "auto",
        p.auto_or(p.number(minimum=0, maximum=1, example="0.5")),
        "share of the training images that get a rectangle of another image of the batch; auto: 0.5 where augmentation is auto and "
        "images come often; 0: none",
    )
    num_workers: int | Literal["auto"] = key(
        "auto",
        p.either(p.choice("auto"), p.integer(minimum=0, maximum=512, example="4")),
        "processes that read and augment, of a machine: those of torchrun divide them; auto: by the number of cores; 0: none beside the main process",
    )

    cache: Literal["none", "ram", "disk"] | Auto = key(
        "auto",
        p.choice("auto", "none", "ram", "disk"),
        "decoded pairs: auto: ram if they fit into a quarter of the free memory; ram keeps them in memory, one copy for all workers; disk in a file that later runs find again",
    )
    cache_gb: float = key(
        20.0,
        p.number(minimum=0, maximum=1e6, example="20"),
        "gigabytes of remote shards that are kept under checkpoint_dir as they are fetched; 0: none. Files on a local disk need none",
    )

    architecture: str = key("unet", p.choice(*ARCHITECTURES), f"one of {', '.join(ARCHITECTURES)}", theme="Model")
    encoder: str = key(
        "auto",
        p.text("resnet34"),
        "any encoder of segmentation-models-pytorch; tu-NAME takes one from timm; auto: resnet34, or a smaller one on a CPU",
    )
    encoder_weights: str | None = key(
        "auto",
        p.optional(p.text("imagenet")),
        "auto: imagenet if they are on this machine or can be fetched within a minute, else random; null: random; imagenet; or a local "
        ".pt, .pth or .safetensors file",
    )
    decoder_channels: tuple[int, ...] | None = key(
        None,
        p.optional(
            p.listing(p.integer(minimum=1, maximum=4096, example="64"), example="[256, 128, 64, 32, 16]", minimum=5, maximum=5)
        ),
        "width of the five decoder stages of unet, unetplusplus and manet; null: [256, 128, 64, 32, 16], less with a small encoder: auto",
    )
    decoder_attention: Literal["none", "scse"] | Auto = key(
        "auto",
        p.choice("auto", "none", "scse"),
        "scse: squeeze and excitation of channels and places in the decoder of unet and unetplusplus; auto: none",
    )
    freeze_encoder_epochs: int = key(
        0, p.integer(minimum=0, example="5"), "epochs at the start in which the encoder is not trained"
    )

    loss: dict[str, float] | Auto = key(
        "auto",
        p.auto_or(p.weighted_terms(LOSSES)),
        f"a weighted sum of {', '.join(LOSSES)}; cross_entropy with one class is bce; auto: dice + cross_entropy",
        theme="Loss",
    )
    deep_supervision: float | Auto = key(
        "auto",
        p.auto_or(p.number(minimum=0, maximum=10, example="0.5")),
        "weight of the losses of three inner decoder stages of unet, in training only, e.g. 0.5; auto: 0, none",
    )
    class_weights: tuple[float, ...] | Auto | None = key(
        "auto",
        p.optional(p.auto_or(p.listing(p.number(above=0, example="1"), example="[0.5, 2.0]"))),
        "weight of each class in the loss (with one class, of foreground pixels); auto: null, or where a class is very rare, rare ones weigh somewhat more; null: all alike",
    )

    batch_size: int | Auto = key(
        "auto",
        p.auto_or(p.integer(minimum=1, maximum=65536, example="8")),
        "images in one forward pass, of each process under torchrun; auto: 16 on a GPU, 8 on a CPU, fewer where a trial of the step shows that memory is short",
        theme="Training",
    )
    num_epochs: int | Auto = key(
        "auto",
        p.auto_or(p.integer(minimum=1, maximum=1_000_000, example="50")),
        "passes over the training images (times repeats); auto: enough steps for the data, within time_budget",
    )
    time_budget: str | None = key(
        None,
        p.optional(p.duration),
        "time that the run may take, from the command to the report, e.g. 10m or 2h, when num_epochs is auto: "
        "steps and encoder are chosen to fit, the schedule ends on time",
    )
    accumulation_steps: int = key(
        1,
        p.integer(minimum=1, maximum=65536, example="4"),
        "batches in one optimizer step: effective batch = batch_size × this × number of processes",
    )
    optimizer: Literal["adamw", "adam", "sgd"] = key(
        "adamw", p.choice("adamw", "adam", "sgd"), "adamw, adam or sgd (Nesterov momentum 0.9)"
    )
    learning_rate: float | Auto = key(
        "auto", p.auto_or(p.number(above=0, example="1e-3")), "peak learning rate; auto: by optimizer and effective batch"
    )
    scale_lr: bool = key(
        False,
        p.flag,
        "under torchrun: multiply learning_rate by the number of processes (the linear rule); else it is taken as it is",
    )
    encoder_lr_factor: float | Auto = key(
        "auto",
        p.auto_or(p.number(above=0, example="0.2")),
        "the encoder's learning rate relative to learning_rate; auto: 0.2 if the encoder has pretrained weights, else 1",
    )
    weight_decay: float | Auto = key(
        "auto",
        p.auto_or(p.number(minimum=0, example="1e-4")),
        "on weights; biases and normalisation layers have none; auto: 0.05 with adamw, else 1e-4",
    )
    scheduler: Literal["cosine", "poly", "plateau", "constant"] = key(
        "cosine",
        p.choice("cosine", "poly", "plateau", "constant"),
        "how the learning rate falls: cosine or poly to 0 at the end, plateau when monitor stalls, constant never",
    )
    warmup_epochs: float | Auto = key(
        "auto", p.auto_or(p.number(minimum=0, example="2")), "epochs over which the learning rate rises from 0; auto: 3 % of them"
    )
    plateau_patience: int = key(
        5, p.integer(minimum=1, example="5"), "scheduler: plateau waits this many epochs without improvement"
    )
    plateau_factor: float = key(0.3, p.number(above=0, below=1, example="0.3"), "and then multiplies the learning rate by this")
    grad_clip: float | None = key(
        None, p.optional(p.number(above=0, example="1.0")), "largest norm of the gradients; null: no limit"
    )
    ema_decay: float | Auto | None = key(
        "auto",
        p.optional(p.auto_or(p.number(above=0, below=1, example="0.999"))),
        "average the weights over steps and evaluate the average; auto: over about a tenth of the run; null: off",
    )
    monitor: MonitorName = key(
        "val_iou",
        p.choice("val_iou", "val_dice", "val_loss"),
        "the metric that decides best.pt, early stopping and plateau: val_iou, val_dice or val_loss",
    )
    early_stopping_patience: int | Auto | None = key(
        "auto",
        p.optional(p.auto_or(p.integer(minimum=1, example="20"))),
        "stop after this many epochs without improvement, not counting those in which the learning rate warms up, or is high and the "
        "training loss still falls; auto: 30 % of the epochs; null: never",
    )
    early_stopping_min_delta: float = key(
        0.0, p.number(minimum=0, example="0.001"), "an improvement smaller than this does not count as one"
    )

    device: str = key("auto", p.text("cuda"), "auto, cpu, cuda, cuda:1 or mps", theme="Speed and precision")
    use_amp: bool | Auto = key(
        "auto", p.auto_or(p.flag), "mixed precision: faster and about half the memory on a GPU, at the same IoU; auto: on a GPU"
    )
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
    compile_model: bool | Auto = key(
        "auto",
        p.auto_or(p.flag),
        "compile the step: faster, after a minute or so of compiling; auto: on a GPU, when that saves time within the run",
    )
    channels_last: bool = key(True, p.flag, "NHWC in memory, which suits tensor cores")
    sync_batchnorm: bool = key(
        False,
        p.flag,
        "under torchrun on GPUs: batch norm statistics over the batches of all processes; for very small batches; slower, and not compiled",
    )
    deterministic: bool = key(False, p.flag, "the same bits on every run of one machine, at some cost in speed")

    seed: int = key(
        42,
        p.integer(minimum=0, example="42", says_maximum=True),
        "split, weights, order and augmentation follow from it",
        theme="Run",
    )
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
        "stop", p.choice("stop", "continue"), "when a checkpoint cannot be written (full disk): stop, or continue with a warning"
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
        "parts in which a batch goes through the model: less memory, more time; batch norm and overlap losses see a part at a time",
    )
    worker_timeout: float | None = key(
        600.0,
        p.optional(p.number(above=0, example="600")),
        "seconds without a batch after which the worker processes count as hanging; null: wait for ever",
    )
    process_timeout: float = key(
        900.0,
        p.number(minimum=5, maximum=86400, example="900"),
        "under torchrun: seconds that processes wait for one that does not answer before the job ends; more than worker_timeout",
    )
    tensorboard: bool = key(
        False,
        p.flag,
        "log to TensorBoard, in the run's folder: scalars, pictures, settings (pip install tensorboard)",
        theme="Trackers",
    )
    wandb: bool = key(False, p.flag, "log to Weights & Biases (pip install wandb); without an API key into the run's folder only")
    trackio: bool = key(False, p.flag, "log to Trackio (pip install trackio)")
    mlflow: bool = key(False, p.flag, "log to MLflow (pip install mlflow): MLFLOW_TRACKING_URI, or checkpoint_dir/mlruns")
    # Where each value came from ("file", "command line", ...); a key that is missing here has its default. Not a setting.
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config) if "parse" in field.metadata}


def is_demo_dir(data_dir: str | os.PathLike[str]) -> bool:
    """Whether the path is that of the built-in dataset, however it is spelled: data/demo/, ./data/demo."""
    return os.path.abspath(data_dir) == os.path.abspath(DEMO_DIR)  # noqa: PTH100 (resolve() would follow links)


def as_shape(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return image_size if isinstance(image_size, tuple) else (image_size, image_size)


def class_names(config: Config) -> list[str]:
    """A name for each class that is reported."""
    num_classes = _decided_num_classes(config)
    if config.class_names is not None:
        return list(config.class_names)
    return ["foreground"] if num_classes == 1 else [f"class {index}" for index in range(num_classes)]


def id_names(config: Config) -> list[str]:
    """A name for each class id, background included."""
    return ["background", *class_names(config)] if _decided_num_classes(config) == 1 else class_names(config)


def _decided_num_classes(config: Config) -> int:
    """The number of classes of a config in which the dataset report has decided it."""
    assert config.num_classes != "auto"
    return config.num_classes
