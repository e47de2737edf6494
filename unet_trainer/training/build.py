"""Model, optimizer and steps of a run, and the loaders of its batches."""

import contextlib
import dataclasses
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import OWN, Config
from unet_trainer.data.converted import Converter
from unet_trainer.data.dataset_report import CheckedDataset, build_dataset_report
from unet_trainer.data.find import find_dataset
from unet_trainer.data.formats.table import read_split_csv
from unet_trainer.data.mask_evidence import class_ids, class_shares
from unet_trainer.data.pairs import FoundPairs, Pair
from unet_trainer.images.drawing import error_sheet
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.tiling import RandomCrops, Size, Tiling, WholeImages, tile_images
from unet_trainer.loading.augmentation import Augmentation, build_augmentation
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.pixel_cache import SUFFIX, delete_files, fill_cache
from unet_trainer.loading.sample_reader import PairSize
from unet_trainer.loading.worker_pool import WorkerPool
from unet_trainer.model.custom import build_custom_network
from unet_trainer.model.fast_layers import use_arm_convolutions
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.network import build_network, sees_far, set_training_mode
from unet_trainer.model.optimizer_and_schedule import Ema, build_learning_rate, build_optimizer
from unet_trainer.model.precision import Numerics, build_scaler
from unet_trainer.model.pretrained import is_here
from unet_trainer.model.random_state import seeded
from unet_trainer.model.segmenter import MAX_SIDE, STRIDE, Segmenter, SegmenterSpec
from unet_trainer.runs.folder import SPLIT_CSV, shown_model
from unet_trainer.system.concurrency import ReadTimeout
from unet_trainer.system.console import Console, counted
from unet_trainer.system.resources import count_cores
from unet_trainer.training.async_device import HostCopy
from unet_trainer.training.evaluation import EvalStep, Sample, build_eval_forward, choose_samples, predict
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.initial_model import InitialModel
from unet_trainer.training.parallel import ALONE, Job
from unet_trainer.training.state import EarlyStopping, EpochMetrics, TrainState
from unet_trainer.training.step import TrainStep

MAX_TILE_COST = 1.5  # of a validation in larger tiles, which small images are padded to
MAX_MASK_BYTES = 2**28  # of an evaluation batch, whose masks have native resolution


@dataclass(frozen=True)
class Loaders:
    """Batches of training and validation, and the worker pool that fills them."""

    train: Loader
    val: Loader
    pool: WorkerPool | None

    def take_notices(self) -> list[str]:
        """What reading has noticed since the last call: pieces that workers failed to fill."""
        notices = []
        if self.pool is not None and self.pool.num_failed:
            what = f"{counted(self.pool.num_failed, 'part')} of a batch in this epoch ({self.pool.failure_reason})"
            notices.append(f"workers could not fill {what}; the training process read them instead, which is slower")
            self.pool.num_failed = 0
        return notices

    def close(self) -> None:
        """Ends the worker processes."""
        if self.pool is not None:
            self.pool.close()

    @cached_property
    def samples(self) -> list[Sample]:
        """A few validation images to show; the same in every epoch."""
        return choose_samples(self.val.dataset, self.val.sample)


@dataclass(frozen=True)
class Components:
    """Model, loss, optimizer and steps of a run."""

    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep
    loss: WeightedLoss
    numerics: Numerics
    freeze_encoder_epochs: int
    initial_weights: str = ""  # what the network has of the model that init_from names

    def set_training_mode(self, epoch: int) -> None:
        """Puts the network into the mode of an epoch, counted from 0."""
        if self.freeze_encoder_epochs:
            set_training_mode(self.state.segmenter.network, encoder_frozen=epoch < self.freeze_encoder_epochs)
        else:  # a network of the user's own may have no encoder, or parameters that are never trained
            self.state.segmenter.network.train()

    def set_num_parts(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many parts."""
        self.train_step.set_num_parts(num_parts)
        self.eval_step.num_parts = num_parts

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Steps taken inside change nothing of the state."""
        optimizer = self.state.optimizer
        options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        saved = HostCopy(self.state.state_dict()).content()
        try:
            yield
        finally:
            self.state.load_state_dict(saved)
            self.train_step.abandon()
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values)  # the learning rate
            self.set_training_mode(self.state.epoch)

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Layers of SyncBatchNorm are plain ones inside: what a process tries alone must not wait for the others."""
        modules = self.state.segmenter.network.modules()
        layers = {module: type(module) for module in modules if isinstance(module, torch.nn.SyncBatchNorm)}
        for layer in layers:
            layer.__class__ = torch.nn.BatchNorm2d  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer, kind in layers.items():
                layer.__class__ = kind

    def draw_samples(self, loaders: Loaders) -> Callable[[], Pixels]:
        """Predicts a few samples now; the function that is returned draws them, once the device is done."""
        samples, spec = loaders.samples, self.state.eval_segmenter.spec
        # as many as validation had the memory for
        size = max(1, loaders.val.batches.batch_size // self.eval_step.num_parts)
        parts = torch.from_numpy(np.stack([image for image, *_ in samples])).split(size)
        ids = torch.cat([predict(self.state.eval_segmenter, part, self.numerics).to(torch.uint8) for part in parts])
        copy = HostCopy(ids)

        def draw() -> Pixels:
            predicted = zip(samples, copy.content().numpy(), strict=True)
            drawn = [(picture, truth, one[area]) for (_, area, picture, truth), one in predicted]
            return error_sheet(drawn, spec.id_names, spec.has_background)

        return draw


def build_dataset(config: Config, console: Console, run_folder: Path | None) -> CheckedDataset:
    """Finds, reads and checks every pair; raises DataError. A resumed run keeps its split."""
    earlier = None if run_folder is None else _earlier_split(config, run_folder, console)
    try:
        return build_dataset_report(config, console, earlier, is_resumed=earlier is not None).checked()
    except DataError as error:
        more = f"To see all of it: python train_unet.py check data_dir={shlex.quote(config.data_dir)}"
        if earlier is not None:
            more += "\nA resumed run needs every file and every class that it began with: "
            more += "put these back, or start a new run"
        raise DataError(f"{error}\n{more}") from None


def _earlier_split(config: Config, run_folder: Path, console: Console) -> FoundPairs | None:
    """The split that the run began with, from its split.csv; files that were added since are left out."""
    table = run_folder / SPLIT_CSV
    if not table.is_file():
        return None
    now = None
    with contextlib.suppress(DataError):  # what was added may not pair up yet
        now = find_dataset(config, console)
    try:
        converter = Converter(Path(config.data_dir), Path(config.checkpoint_dir), console)
        earlier = read_split_csv(table, Path(config.data_dir), now, converter)
    except DataError as error:
        todo = "put them back, say where they are now (data_dir=FOLDER), or start a new run"
        raise DataError(f"the run cannot go on with the images it began with; {todo}\n{error}") from None
    known = {pair.user_files[0] for pair in (*earlier.pairs, *earlier.unused)}
    added = [pair for pair in now.pairs if pair.image not in known] if now else []
    if added:
        what = f"{counted(len(added), 'pair')}, e.g. {added[0].image}"
        console.note(f"not in {table}, which the run began with, and left out: {what}")
    return dataclasses.replace(earlier, rule=f"as the run began, {table}", class_names=now.class_names if now else None)


def build_datasets(
    config: ResolvedConfig, dataset: CheckedDataset, num_processes: int = 1, tile: Size | None = None
) -> tuple[SegmentationDataset, SegmentationDataset]:
    """The samples for training and for validation, which is in tiles of this size (None: that of training's crops)."""
    train_tiling, val_tiling = _build_tilings(config, dataset, tile)
    most = len(train_tiling) // config.epoch_parts // num_processes
    if most < config.batch_size:
        images = f"{len(train_tiling) // config.epoch_parts} training images"
        images += f" of an epoch (repeats: {config.repeats:g})" if config.epoch_parts > 1 else ""
        images += f" of {num_processes} processes" if num_processes > 1 else ""
        fixes = [*([f"at most {most}"] if most else []), *(["larger repeats"] if config.epoch_parts > 1 else [])]
        need = ", or ".join(fixes) or "more images"
        raise UserError(f"batch_size: {config.batch_size} is more than the {images}; need {need}")
    augmentation = build_augmentation(config.augmentation, config.shape, dataset.image_spec)

    def build(pairs: Sequence[Pair], tiling: Tiling, augmentation: Augmentation | None) -> SegmentationDataset:
        facts, coding, spec = zip(*dataset.facts_of(pairs), strict=True), dataset.coding, dataset.image_spec
        sizes = [PairSize(image.size, mask.size) for image, mask in facts]
        return SegmentationDataset(pairs, sizes, coding, spec, tiling, augmentation, config.seed, config.resize_masks)

    return build(dataset.split.train, train_tiling, augmentation), build(dataset.split.val, val_tiling, None)


def choose_tile(spec: SegmenterSpec, sizes: Sequence[Size], batch_size: int) -> Size | None:
    """What images of these sizes are cut into in validation, by `predict` and by `evaluate`: twice training's crops, of
    which fewer pixels lie at a border, as far as images are so large. None: as trained, where a batch has fewer pixels,
    most images are small or the network sees far; or whole images."""
    if spec.fit == "resize" or spec.architecture == OWN:
        return None
    rows, columns = (
        max(side, min(2 * side, MAX_SIDE, -(-max(lengths) // STRIDE) * STRIDE))
        for side, lengths in zip(spec.image_size, zip(*sizes, strict=True), strict=True)
    )
    factor = rows * columns / math.prod(spec.image_size)
    cost = factor * len(tile_images(sizes, (rows, columns))) / len(tile_images(sizes, spec.image_size))
    return (rows, columns) if 1 < factor <= batch_size and cost <= MAX_TILE_COST and not sees_far(spec) else None


def build_loaders(
    config: ResolvedConfig,
    dataset: CheckedDataset,
    device: torch.device,
    console: Console,
    processes: Job = ALONE,
    tile: Size | None = None,
) -> Loaders:
    """The processes of a machine divide its workers and share one cache, a file that the first of them writes: the
    system keeps what is read of it in memory, once."""
    launch = processes.launch
    train_dataset, val_dataset = build_datasets(config, dataset, launch.world_size, tile)
    if config.cache != "none":
        folder = Path(config.checkpoint_dir) / ".cache"
        stem = f"{processes.broadcast(f'{os.getpid()}-{time.time_ns()}')}-{socket.gethostname()}"
        is_in_memory = config.cache == "ram" and launch.local_world_size == 1
        with processes.main_process_first():
            _fill_caches(config, (train_dataset, val_dataset), console, None if is_in_memory else folder / stem)
        processes.any_rank()  # all have mapped the files, which need no names from here on
        delete_files(folder, f"{stem}-*")
    num_workers = max(1, config.num_workers // launch.local_world_size) if config.num_workers else 0
    pool = WorkerPool(num_workers, device) if num_workers else None
    build_loader = partial(Loader, pool=pool, timeout=config.worker_timeout, launch=launch)
    return Loaders(
        build_loader(
            train_dataset, config.batch_size, shuffle=True, epochs_per_pass=config.epoch_parts, cutmix=config.cutmix
        ),
        build_loader(val_dataset, eval_batch_size(config, device, val_dataset), shuffle=False),
        pool,
    )


def eval_batch_size(config: ResolvedConfig, device: torch.device, dataset: SegmentationDataset | None = None) -> int:
    """Without gradients, twice the images take less memory than a training batch. Masks at native resolution may be
    large."""
    size = config.batch_size * (2 if device.type == "cuda" else 1)
    if dataset is None:
        return size
    if dataset.mask_sizes is None:
        return max(1, size * math.prod(config.shape) // math.prod(dataset.tiling.size))
    return min(size, max(1, MAX_MASK_BYTES // math.prod(dataset.batch_mask_size)))


def _build_tilings(config: ResolvedConfig, dataset: CheckedDataset, tile: Size | None) -> tuple[Tiling, Tiling]:
    """How samples are taken for training and for validation."""
    size, split = config.shape, dataset.split
    if config.fit == "resize":
        return WholeImages(size, len(split.train), config.whole_repeats), WholeImages(
            size, len(split.val), native_masks=True
        )
    _, masks = dataset.facts_of(split.train)
    common = int(np.argmax(class_shares(masks, dataset.coding, max(2, config.num_classes))))
    rare_ids = [
        [class_id for class_id in class_ids(mask.counts, dataset.coding) if class_id not in (common, IGNORED)]
        for mask in masks
    ]
    crops = RandomCrops(
        size, len(masks), config.crops_per_image * config.whole_repeats, rare_ids, config.rare_class_crops, config.seed
    )
    return crops, tile_images(dataset.sizes_of(split.val), tile or size)


def _fill_caches(
    config: ResolvedConfig, datasets: Sequence[SegmentationDataset], console: Console, stem: Path | None
) -> None:
    """Decodes every pair into memory or into files that begin with `stem`; pairs that do not fit are read from their
    files in every epoch."""
    num_cached = num_bytes = 0
    for name, dataset in zip(("train", "val"), datasets, strict=True):
        spec, tiling = dataset.image_spec, dataset.tiling
        sizes = [tiling.size if isinstance(tiling, WholeImages) else size.image for size in dataset.sizes]
        with console.bar("Decoding every pair once:", len(sizes), keep=False) as bar:
            try:
                dataset.cache = fill_cache(
                    [(*size, spec.channels) for size in sizes],
                    1 if spec.is_8bit else 4,
                    dataset.decode,
                    None if stem is None else stem.with_name(f"{stem.name}-{name}{SUFFIX}"),
                    count_cores(),
                    bar.tick,
                    mask_sizes=dataset.mask_sizes,
                    timeout=config.worker_timeout,
                )
            except OSError as error:
                why = f"cache: {config.cache} cannot be filled ({error.strerror})"
                console.warn(f"{why}; files are read in every epoch")
                return
            except ReadTimeout:
                took = f"{config.worker_timeout:g} s (worker_timeout)"
                raise UserError(f"cache: no pair of {config.data_dir} was read in {took}; is the disk there?") from None
        num_cached += len(dataset.cache)
        num_bytes += dataset.cache.num_bytes
    num_pairs = sum(len(dataset.pairs) for dataset in datasets)
    where = "memory" if config.cache == "ram" else str(Path(config.checkpoint_dir) / ".cache")
    console.fact("Cache", f"{num_cached} of {num_pairs} pairs in {where}, {num_bytes / 2**30:.2f} GiB")
    if num_cached < num_pairs:
        left = counted(num_pairs - num_cached, "pair")
        console.warn(f"there is no room for {left}; these are read from files in every epoch")


def synchronize_batch_norm(network: torch.nn.Module, device: torch.device, group: Any) -> torch.nn.Module:
    if device.type != "cuda":
        raise UserError(f"sync_batchnorm: torch has it for GPUs only, and the device is {device}; leave it out")
    synchronized: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(network, group)
    return synchronized


def build_components(
    config: ResolvedConfig,
    spec: SegmenterSpec,
    device: torch.device,
    num_batches: int,
    console: Console,
    resumes: bool = False,
    processes: Job = ALONE,
    custom: CustomParts = NO_PARTS,
    initial: InitialModel | None = None,
) -> Components:
    """Model, loss, optimizer and steps, all from the seed. A resumed run has its weights and downloads none. `initial`:
    a model whose weights the network begins with, as far as they fit."""
    if config.encoder_weights == "imagenet" and not resumes and not is_here(config.encoder, "imagenet"):
        console.say(f"Fetching imagenet weights for {config.encoder} (once; kept in the download cache)")
    launch = processes.launch
    with seeded(config.seed, device):
        if config.architecture == OWN:
            network = build_custom_network(custom.model, spec)
        else:
            network = build_network(spec, None if resumes else config.encoder_weights)
        loss = WeightedLoss(config.loss, config.num_classes, config.class_weights, custom.loss_function).to(device)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError("model: it has no parameters to train; need at least one with requires_grad")
    numerics = Numerics(device, config.number_format)
    loaded = None if initial is None else initial.load_into(network, spec)
    if (config.freeze_encoder_epochs or config.encoder_lr_factor != 1) and not hasattr(network, "encoder"):
        names = "freeze_encoder_epochs, encoder_lr_factor"
        raise UserError(f"{names}: the model has no part that is called encoder; leave them out")
    if config.sync_batchnorm and launch.world_size > 1:
        network = synchronize_batch_norm(network, device, processes.gradient_group)
    segmenter = Segmenter(spec, network, config.channels_last)
    segmenter = segmenter.to(device).to(memory_format=segmenter.memory_format)
    if device.type == "cpu" and config.channels_last and config.number_format == "float32":
        use_arm_convolutions(network)
    is_trained = loaded is not None and loaded.is_complete
    ema = None if config.ema_decay is None else Ema(segmenter, config.ema_decay, is_trained)
    state = TrainState(
        segmenter=segmenter,
        optimizer=build_optimizer(config, segmenter.network),
        scaler=build_scaler(config, device),
        learning_rate=build_learning_rate(config, -(-num_batches // config.accumulation_steps)),
        early_stopping=EarlyStopping(config.monitor != "val_loss", config.early_stopping_min_delta),
        ema=ema,
        metrics=EpochMetrics(config.num_classes, device),
        launch=launch,
    )
    if config.scale_lr:
        state.learning_rate.peak *= launch.world_size
    num_parameters = sum(parameter.numel() for parameter in segmenter.parameters())
    weights = "weights of the checkpoint" if resumes else _describe_encoder(config.encoder_weights)
    weights = weights if loaded is None else loaded.summary
    name = f"{config.architecture}, {config.encoder}"
    name = f"{type(network).__name__}, yours" if config.architecture == OWN else name
    console.fact("Model", f"{name}, {num_parameters / 1e6:.1f} M parameters, {weights}")
    if loaded is not None and loaded.remarks:
        console.note(f"init_from: {loaded.remarks}")
    factors = [config.batch_size, config.accumulation_steps, *([launch.world_size] if launch.world_size > 1 else [])]
    effective = f"{' × '.join(map(str, factors))} = {math.prod(factors)} effective"
    effective += f" ({launch.world_size} processes)" if launch.world_size > 1 else ""
    scaled = f"; learning rate {config.learning_rate:g} × {launch.world_size} (scale_lr)" if config.scale_lr else ""
    console.fact("Batch", f"{effective}, {counted(num_batches, 'batch', 'batches')} an epoch{scaled}")
    return Components(
        state=state,
        train_step=TrainStep(
            segmenter, loss, numerics, state.optimizer, state.scaler, config.grad_clip, ema, config.batch_parts
        ),
        eval_step=EvalStep(
            build_eval_forward(state.eval_segmenter, loss, numerics),
            state.eval_segmenter,
            loss,
            device,
            config.batch_parts,
        ),
        loss=loss,
        numerics=numerics,
        freeze_encoder_epochs=config.freeze_encoder_epochs,
        initial_weights="" if loaded is None else loaded.summary,
    )


def _describe_encoder(weights: str | None) -> str:
    if weights is None:
        return "random weights"
    return f"encoder of {shown_model(Path(weights))}" if Path(weights).is_file() else weights
