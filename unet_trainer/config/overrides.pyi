"""The keywords of `train` and `follow`, for editors and type checkers. Written by
tests/helpers/generated_files.py."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from unet_trainer.data.formats.given import Pairs
from unet_trainer.model.custom import CustomLoss, CustomModel
from unet_trainer.training.extension import Callback

class Keywords(TypedDict, total=False):
    loss: CustomLoss | Mapping[str, float] | str | None
    model: CustomModel | None
    train_data: Pairs | None
    val_data: Pairs | None
    callbacks: Sequence[Callback]
    # fmt: off
    data_dir: str | PathLike[str]
    image_dir: str | PathLike[str] | None
    mask_dir: str | PathLike[str] | None
    mask_suffix: str
    unpaired: Literal["error", "skip"]
    num_classes: int | Literal["auto"]
    class_names: Sequence[str | PathLike[str]] | None
    mask_values: str | PathLike[str] | Sequence[int | Sequence[Any]]
    ignore_value: int | Sequence[Any] | None
    unknown_values: Literal["error", "ignore"]
    mask_tolerance: int | Literal["auto"]
    val_fraction: float
    split: Literal["random", "blocks"]
    split_file: str | PathLike[str] | None
    group_pattern: str | None
    num_folds: int | None
    fold: int
    image_size: int | Sequence[int] | Literal["auto"]
    fit: Literal["resize", "crop"] | Literal["auto"]
    crops_per_image: int | Literal["auto"]
    repeats: float | Literal["auto"]
    rare_class_crops: float
    resize_masks: bool
    in_channels: int | Literal["auto"]
    image_mean: Sequence[float] | Literal["auto"]
    image_std: Sequence[float] | Literal["auto"]
    normalize: Literal["dataset", "image"] | Literal["auto"]
    nodata: Literal["fill", "ignore", "keep"] | float
    augmentation: Literal["none", "default", "strong"] | Sequence[Any] | Literal["auto"]
    cutmix: float | Literal["auto"]
    num_workers: int | Literal["auto"]
    cache: Literal["none", "ram", "disk"] | Literal["auto"]
    cache_gb: float
    architecture: Literal["unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet", "segformer", "dpt", "own"]
    encoder: str
    encoder_weights: str | PathLike[str] | None
    init_from: str | PathLike[str] | None
    decoder_channels: Sequence[int] | None
    decoder_attention: Literal["none", "scse"]
    freeze_encoder_epochs: int
    class_weights: Sequence[float] | Literal["auto"] | None
    batch_size: int | Literal["auto"]
    num_epochs: int | Literal["auto"]
    time_budget: str | None
    accumulation_steps: int
    optimizer: Literal["adamw", "adam", "sgd"]
    learning_rate: float | Literal["auto"]
    scale_lr: bool
    encoder_lr_factor: float
    weight_decay: float | Literal["auto"]
    scheduler: Literal["cosine", "poly", "plateau", "constant"]
    warmup_epochs: float | Literal["auto"]
    plateau_patience: int
    plateau_factor: float
    grad_clip: float | None
    ema_decay: float | Literal["auto"] | None
    monitor: Literal["val_iou", "val_dice", "val_loss"]
    early_stopping_patience: int | Literal["auto"] | None
    early_stopping_min_delta: float
    device: str
    use_amp: bool | Literal["auto"]
    amp_dtype: Literal["bfloat16", "float16"]
    scaler_init_scale: float
    allow_tf32: bool
    compile_model: bool | Literal["auto"]
    channels_last: bool
    gradient_compression: Literal["none", "bf16"]
    sync_batchnorm: bool
    deterministic: bool
    seed: int
    checkpoint_dir: str | PathLike[str]
    run_name: str
    resume: str | PathLike[str] | None
    checkpoint_minutes: float | None
    on_oom: Literal["stop", "shrink"]
    batch_parts: int
    worker_timeout: float | None
    tensorboard: bool
    wandb: bool
    trackio: bool
    mlflow: bool
