"""Parts of the caller's own that `train` takes from Python: docs/extending.md. Imported before torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import OWN, Config

if TYPE_CHECKING:
    from unet_trainer.config.resolved_config import ResolvedConfig
    from unet_trainer.datasets.converted import Pairs
    from unet_trainer.model.given import OwnLoss, OwnModel
    from unet_trainer.training.history import Row
    from unet_trainer.training.result import TrainResult
    from unet_trainer.training.run import Run


class Callback:
    """Override what you need. In a job of several processes rank 0 calls them. What they raise ends the run; its state
    is saved."""

    def on_start(self, run_dir: Path, config: ResolvedConfig) -> None:
        """Before the first epoch, or the first after a resume. `config` has every setting as it was decided."""

    def on_epoch(self, row: Row) -> bool | None:
        """After an epoch, when it is saved. `row`: the columns of metrics.csv. True ends the run here, as if it were
        the last."""

    def on_checkpoint(self, path: Path) -> None:
        """When an epoch was the best so far and its weights are in `path`."""

    def on_end(self, result: TrainResult) -> None:
        """After the last epoch; the report is written."""


class Own(NamedTuple):
    """What `train` was given besides settings."""

    loss: OwnLoss | None = None
    model: OwnModel | None = None
    train_data: Pairs | None = None
    val_data: Pairs | None = None
    callbacks: Sequence[Callback] = ()

    def complete(self, config: Config) -> Config:
        """The config that says so. Raises UserError for what is missing."""
        changes: dict[str, Any] = {}
        if self.loss is not None and OWN not in (config.loss if isinstance(config.loss, Mapping) else ()):
            changes["loss"] = {OWN: 1.0}
        if self.model is not None:
            changes |= {"architecture": OWN, "encoder_weights": None}
        if self.train_data is not None:
            from unet_trainer.datasets.converted import write_given

            folder = Path(config.checkpoint_dir) / ".given"
            changes["data_dir"] = str(write_given({"train": self.train_data, "val": self.val_data}, folder))
        elif self.val_data is not None:
            raise UserError("val_data: needs train_data too")
        config = load_config(config, changes) if changes else config
        for name, is_needed in (("loss", OWN in (config.loss or ())), ("model", config.architecture == OWN)):
            if is_needed and getattr(self, name) is None:
                raise UserError(
                    f"{name}: the run has its own, which no file holds: give it again, train(..., {name}=...)"
                )
        return config

    def call(self, run: Run, moment: str, *arguments: Any) -> bool:
        """Calls all, on rank 0; whether any asks to stop, on every rank."""
        if not self.callbacks:
            return False
        answers = [getattr(one, moment)(*arguments) for one in self.callbacks] if run.processes.is_main else []
        stops = any(type(answer).__name__ in ("bool", "bool_") and bool(answer) for answer in answers)  # numpy's too
        return run.processes.broadcast(stops) if moment == "on_epoch" else False
