"""Model, optimizer and steps of a run, and the loaders of its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from unet_trainer.datasets.problems import first_few
from unet_trainer.images.error_maps import sample_sheet
from unet_trainer.images.image_files import Pixels
from unet_trainer.loading.dataset import CACHE_DAMAGED, IMAGE_CHANGED, MASK_CHANGED
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.worker_pool import WorkerPool
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.network import set_training_mode
from unet_trainer.model.precision import Numerics
from unet_trainer.runs.host_copy import HostCopy
from unet_trainer.system.console import counted
from unet_trainer.training.evaluation import EvalStep, predict
from unet_trainer.training.sample_images import SampleImages, choose_samples
from unet_trainer.training.state import TrainState
from unet_trainer.training.step import TrainStep


@dataclass(frozen=True)
class Loaders:
    """Batches of training and validation, and the worker pool that fills them."""

    train: Loader
    val: Loader
    pool: WorkerPool | None

    def prepare(self, epoch: int, first_batch: int, is_last: bool) -> None:
        """Plans this epoch, its validation and the next epoch, so that the workers never idle in between."""
        self.train.prepare(epoch, first_batch)
        self.val.prepare(0)
        if not is_last:
            self.train.prepare(epoch + 1)

    def take_failures(self) -> tuple[int, str]:
        """The number of pieces of batches that workers failed to fill since the last call, and the reason of the last one."""
        if self.pool is None:
            return 0, ""
        failures = self.pool.failures
        found = failures.num_pieces, failures.reason
        failures.num_pieces = 0
        return found

    def take_notices(self) -> list[str]:
        """What reading has noticed since the last call: files that changed, a cache that is damaged."""
        datasets = (self.train.dataset, self.val.dataset)
        changed = [
            str(getattr(dataset.pairs[index], kind))
            for dataset in datasets
            for kind, flag in (("image", IMAGE_CHANGED), ("mask", MASK_CHANGED))
            for index in dataset.take_noticed(flag)
        ]
        notices = []
        if changed:
            files = counted(len(changed), "file")
            how = "has changed since the run began, and is trained on as it is now"
            if len(changed) > 1:
                how = "have changed since the run began, and are trained on as they are now"
            notices.append(f"{files} {how}: {first_few(changed)}")
        for dataset in datasets:
            if dataset.cache is not None and dataset.take_first(CACHE_DAMAGED):
                dataset.cache.discard()
                notices.append(
                    "cache: the file of decoded pairs was changed by something else; what is damaged in it is read from the "
                    "images, which is slower. The next start makes it anew"
                )
        return notices

    def close(self) -> None:
        """Ends the worker processes."""
        if self.pool is not None:
            self.pool.close()

    @cached_property
    def samples(self) -> SampleImages:
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
    accumulation_steps: int
    freeze_encoder_epochs: int

    def set_training_mode(self, epoch: int) -> None:
        """Puts the network into the mode of an epoch, counted from 0."""
        set_training_mode(self.state.segmenter.network, encoder_frozen=epoch < self.freeze_encoder_epochs)

    def begin_phases(self) -> Sequence[Callable[[], None]]:
        """Calls that put the network into each mode that it will train in from here on: encoder frozen, and not."""
        epochs = [self.state.epoch] + ([self.freeze_encoder_epochs] if self.state.epoch < self.freeze_encoder_epochs else [])
        return [partial(self.set_training_mode, epoch) for epoch in epochs]

    def set_num_parts(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many parts."""
        self.train_step.set_num_parts(num_parts)
        self.eval_step.num_parts = num_parts

    def draw_samples(self, loaders: Loaders) -> Callable[[], Pixels]:
        """Predicts a few samples now; the function that is returned draws them, once the device is done."""
        samples, spec = loaders.samples, self.state.eval_segmenter.spec
        size = max(1, loaders.val.batches.batch_size // self.eval_step.num_parts)  # as many as validation had the memory for
        parts = torch.from_numpy(samples.inputs).split(size)
        ids = torch.cat([predict(self.state.eval_segmenter, part, self.numerics).to(torch.uint8) for part in parts])
        copy = HostCopy(ids)

        def draw() -> Pixels:
            predicted = samples.stitch(copy.content().numpy())
            return sample_sheet(samples.pictures, samples.truths, predicted, spec.id_names, spec.has_background)

        return draw
