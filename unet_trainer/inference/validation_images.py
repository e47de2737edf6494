"""The images that a run validated on: named by the split.csv beside its checkpoint, in the data_dir of its config."""

from __future__ import annotations

from pathlib import Path

from unet_trainer.config.load import load_config
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.split_csv import read_split_csv
from unet_trainer.images.image_files import DataError
from unet_trainer.runs.run_folder import SPLIT_CSV


def find_validation_pairs(model: Path, data_dir: Path | None = None) -> tuple[Pair, ...]:
    """Of the run that the model's file lies in. `data_dir`: where the data are now, if not where the run had them.

    Raises DataError with the reason if the split or the data are not there.
    """
    run = model.parent
    if not (run / SPLIT_CSV).is_file():
        raise DataError(f"{run} has no {SPLIT_CSV}, which names them")
    if data_dir is None:
        config = run / "config.yaml"
        if not config.is_file():
            raise DataError(f"{run} has no config.yaml, which says where the data are; data_dir=FOLDER says it too")
        data_dir = Path(load_config(config).data_dir)
    if not data_dir.is_dir():
        raise DataError(f"data_dir: {data_dir} does not exist here; data_dir=FOLDER names another place")
    return tuple(pair for pair in read_split_csv(run / SPLIT_CSV, data_dir).pairs if pair.part == "val")
