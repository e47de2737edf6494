"""The parts of a run that learn, and the data that they learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from unet_trainer.checkpoint import TrainState
from unet_trainer.config import Config
from unet_trainer.console import Console
from unet_trainer.crew import Crew
from unet_trainer.dataset import SegmentationDataset
from unet_trainer.forms import ImageForm
from unet_trainer.host_copy import HostCopy
from unet_trainer.images import Pixels
from unet_trainer.loader import Loader
from unet_trainer.losses import WeightedLoss
from unet_trainer.memory import is_out_of_memory, one_line, shrink
from unet_trainer.model import set_training
from unet_trainer.pictures import sample_sheet, to_display
from unet_trainer.splits import Split
from unet_trainer.step import EvalStep, Numerics, TrainStep, predict

NUM_SAMPLES = 4  # validation images shown in samples/


@dataclass(frozen=True)
class Data:
    """The pairs of a run and the loaders over them."""

    split: Split
    form: ImageForm
    train: Loader
    val: Loader
    val_dataset: SegmentationDataset
    crew: Crew | None

    def close(self) -> None:
        """Ends the worker processes."""
        if self.crew is not None:
            self.crew.close()

    @cached_property
    def samples(self) -> tuple[list[Pixels], list[Pixels]]:
        """A few validation pairs, spread over the set; the same in every epoch."""
        indices = np.unique(np.linspace(0, len(self.val_dataset) - 1, NUM_SAMPLES).round().astype(int))
        pairs = [self.val_dataset[0, int(index)] for index in indices]
        return [image for image, _ in pairs], [mask for _, mask in pairs]


@dataclass(frozen=True)
class Machine:
    """The parts that learn."""

    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep
    loss: WeightedLoss
    numerics: Numerics
    num_classes: int
    accumulation_steps: int
    freeze_encoder_epochs: int
    form: ImageForm

    def set_training(self, epoch: int) -> None:
        """Training mode for the epoch (counted from 0)."""
        set_training(self.state.model, encoder_frozen=epoch < self.freeze_encoder_epochs)

    def phases(self) -> list[Callable[[], None]]:
        """What puts the model into each mode that it will train in from here on: the encoder frozen, and not."""
        epochs = [self.state.epoch] + ([self.freeze_encoder_epochs] if self.state.epoch < self.freeze_encoder_epochs else [])
        return [partial(self.set_training, epoch) for epoch in epochs]

    def split_batches(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many pieces."""
        self.train_step.num_parts = self.eval_step.num_parts = num_parts
        if self.train_step.recorder is not None:
            self.train_step.recorder.clear()

    def shrink(self, config: Config, reason: str, console: Console, kept: str) -> Config:
        """After memory ran out: smaller parts, or the end."""
        return shrink(config, reason, self.numerics.device, self.split_batches, console, kept)

    def fit_into_memory(self, config: Config, attempt: Callable[[Config], Config], console: Console, kept: str) -> Config:
        """Tries what the run will do, in smaller parts where memory runs out and on_oom allows it."""
        while True:
            try:
                return attempt(config)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = one_line(error)
            config = self.shrink(config, reason, console, kept)  # not in the handler, where the error still holds memory

    def draw_samples(self, data: Data) -> Callable[[], Pixels]:
        """Predicts a few samples now; what comes back draws them, once the device is done."""
        images, truths = data.samples
        size = max(1, data.val.batches.batch_size // self.eval_step.num_parts)  # what validation had the memory for
        pieces = torch.from_numpy(np.stack(images)).split(size)
        ids = torch.cat([predict(self.eval_step.model, piece, self.numerics, self.form).to(torch.uint8) for piece in pieces])
        copy = HostCopy(ids)
        return lambda: sample_sheet([to_display(image) for image in images], truths, list(copy.content().numpy()))
