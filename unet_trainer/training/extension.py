"""A custom loss and model, data and callbacks, as `train` takes them: docs/extending.md. Imported before torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unet_trainer.config.errors import UserError, missing_part
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import OWN, Config

if TYPE_CHECKING:
    from unet_trainer.config.resolved_config import ResolvedConfig
    from unet_trainer.data.formats.given import Pairs
    from unet_trainer.model.custom import CustomLoss, CustomModel
    from unet_trainer.runs.tables import Row


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. `history` has a dict for each epoch, with the columns of metrics.csv."""

    run_dir: Path
    best_epoch: int
    best_val_iou: float
    per_class_iou: dict[str, float | None]
    epochs: int
    stopped_early: bool
    seconds: float
    images_per_second: float
    history: list[Row]
    number_format: str = "float32"  # that the forward pass was computed in
    is_compiled: bool = False
    baseline_iou: float | None = None  # best IoU of predicting one class everywhere; None: not known
    missing: list[str] = field(default_factory=list)  # best.pt: was deleted or damaged after it was written
    warnings: list[str] = field(default_factory=list)  # what is wrong with the model, and what to try
    init_from: str | None = None  # what the network had of the model that it began with


class Callback:
    """Override what you need. In a job rank 0 calls them. What they raise ends the run; its state is saved."""

    def on_start(self, run_dir: Path, config: ResolvedConfig) -> None:
        """Before the first epoch, or the first after a resume. `config` has every setting as it was decided."""

    def on_epoch(self, row: Row) -> object:
        """After an epoch, when it is saved. `row`: the columns of metrics.csv. What is true ends the run here, as if it
        were the last; None goes on."""

    def on_checkpoint(self, path: Path) -> None:
        """When an epoch was the best so far and its weights are in `path`."""

    def on_end(self, result: TrainResult) -> None:
        """After the last epoch; the report is written."""


def collect_callbacks(callbacks: Iterable[Callback], on_epoch: Callable[[Row], object] | None = None) -> list[Callback]:
    """With `on_epoch` as the last one. Raises UserError for what is no callback."""
    collected = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for index, callback in enumerate(collected):
        if not isinstance(callback, Callback):
            need = "an instance of a subclass of unet_trainer.Callback; a function goes to on_epoch"
            raise UserError(f"callbacks[{index}]: got {callback!r:.80}; need {need}")
    if on_epoch is not None:
        if not callable(on_epoch):
            raise UserError(f"on_epoch: got {on_epoch!r:.80}; need a function of an epoch's row")
        collected.append(Callback())
        collected[-1].on_epoch = on_epoch  # type: ignore[assignment, method-assign]
    return collected


class CustomParts(NamedTuple):
    """What `train` takes besides settings."""

    loss: CustomLoss | Mapping[str, float] | str | None = None
    model: CustomModel | None = None
    train_data: Pairs | None = None
    val_data: Pairs | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def loss_function(self) -> CustomLoss | None:
        return self.loss if callable(self.loss) else None

    @property
    def loss_setting(self) -> dict[str, Any]:
        """For the config, if the loss is one of its own: a name, or names and weights."""
        return {} if self.loss is None or callable(self.loss) else {"loss": self.loss}

    def complete(self, config: Config) -> Config:
        """The config that says so. Raises UserError for what is missing."""
        changes: dict[str, Any] = {}
        if self.loss_function is not None and OWN not in (config.loss if isinstance(config.loss, Mapping) else ()):
            changes["loss"] = {OWN: 1.0}
        if self.model is not None:
            changes |= {"architecture": OWN, "encoder_weights": None}
        if self.train_data is not None:
            from unet_trainer.data.formats.given import write_given

            folder = Path(config.checkpoint_dir) / ".given"
            changes["data_dir"] = str(write_given({"train": self.train_data, "val": self.val_data}, folder))
        elif self.val_data is not None:
            raise UserError("val_data: needs train_data too")
        config = load_config(config, changes) if changes else config
        if OWN in config.loss and self.loss_function is None:
            raise missing_part("loss")
        if config.architecture == OWN and self.model is None:
            raise missing_part("model")
        return config


NO_PARTS = CustomParts()


def split_keywords(keywords: Mapping[str, Any]) -> tuple[CustomParts, dict[str, Any]]:
    """What `train` was given: parts of the caller's own, and settings."""
    settings = dict(keywords)
    loss = settings.pop("loss", None)
    callbacks = collect_callbacks(settings.pop("callbacks", ()), settings.pop("on_epoch", None))
    model, train_data, val_data = (settings.pop(name, None) for name in ("model", "train_data", "val_data"))
    custom = CustomParts(loss, model, train_data, val_data, callbacks)
    return custom, settings | custom.loss_setting


def finish(rows: Generator[Row, None, TrainResult]) -> TrainResult:
    """Trains to the end, and returns the result."""
    while True:
        try:
            next(rows)
        except StopIteration as end:
            return end.value
