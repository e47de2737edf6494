# Types of train_unet.py for type checkers, where pip has installed it: they read a single file without types.
# tests/test_environment.py compares it with the script.
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from unet_trainer.config.errors import TrainingFailed as TrainingFailed
from unet_trainer.config.errors import UserError as UserError
from unet_trainer.config.overrides import Keywords
from unet_trainer.config.schema import Config
from unet_trainer.runs.tables import Row
from unet_trainer.system.signals import Interrupted as Interrupted
from unet_trainer.training.extension import TrainResult

CONFIG: dict[str, Any]

def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    **keywords: Unpack[Keywords],
) -> TrainResult: ...
def follow(
    config: Config | Mapping[str, Any] | str | Path | None = None, **keywords: Unpack[Keywords]
) -> Generator[Row, None, TrainResult]: ...
def main(arguments: Sequence[str] | None = None) -> int: ...
