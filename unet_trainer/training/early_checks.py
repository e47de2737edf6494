"""What can be wrong with a run and be seen before torch is imported: packages, folders."""

import os
import tempfile
from pathlib import Path

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import check_trackers, missing_data_dir
from unet_trainer.config.schema import Config
from unet_trainer.system.os_errors import NO_ROOM, cannot


def check_before_imports(config: Config) -> None:
    """Raises UserError. The same is found later too, with all the rest, where this cannot tell."""
    check_trackers(config)
    if problem := missing_data_dir(config.data_dir):
        raise UserError(f"data_dir: {problem}")
    check_checkpoint_dir(config)


def check_checkpoint_dir(config: Config) -> None:
    """Raises UserError where no folder of a run can be made. A run that is resumed writes into its own."""
    if config.resume not in (None, "auto"):
        return
    folder = Path(config.checkpoint_dir)
    wanted = folder / config.run_name if config.resume == "auto" else folder
    there = next(place for place in (wanted, *wanted.absolute().parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        if error.errno not in NO_ROOM:  # the start looks for room
            raise cannot(f"checkpoint_dir: {folder}", "be written to", error, folder) from None
