"""The images that a run validated on: named by the split.csv beside its checkpoint, in the data_dir of its config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.shard_pairs import find_in_shards
from unet_trainer.datasets.split_csv import read_split_csv
from unet_trainer.images.file_bytes import DataError
from unet_trainer.runs.run_folder import SPLIT_CSV


def find_validation_pairs(model: Path, data_dir: Path | None = None) -> tuple[Pair, ...]:
    """Of the run that the model's file lies in. `data_dir`: where the data are now, if not where the run had them.

    Raises DataError with the reason if the split or the data are not there.
    """
    run = model.parent
    if not (run / SPLIT_CSV).is_file():
        raise DataError(f"{run} has no {SPLIT_CSV}, which names them")
    config_file = run / "config.yaml"
    if data_dir is None and not config_file.is_file():
        raise DataError(f"{run} has no config.yaml, which says where the data are; data_dir=FOLDER says it too")
    config = load_config(config_file) if config_file.is_file() else Config(checkpoint_dir=str(run.parent))
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=str(data_dir))
    data_dir = Path(config.data_dir)
    stored = find_in_shards(config)
    if stored is None and not data_dir.is_dir():
        raise DataError(f"data_dir: {data_dir} does not exist here; data_dir=FOLDER names another place")
    found = read_split_csv(run / SPLIT_CSV, data_dir, [*stored.pairs, *stored.test] if stored else ())
    return tuple(pair for pair in found.pairs if pair.part == "val")
