"""The pairs in shards, as the index has them: their names, parts and groups are those of the files that they were written from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.file_tree import list_files
from unet_trainer.datasets.layouts import Part
from unet_trainer.datasets.pairing import SKIP
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import Problem, first_few, with_choices
from unet_trainer.datasets.shard_places import open_shards
from unet_trainer.images.file_bytes import DataError
from unet_trainer.shards.shard_index import iterate_samples
from unet_trainer.shards.shard_store import ShardStore
from unet_trainer.system.console import Console, counted

KNOWN_BY_SHARDS = ("image_dir", "mask_dir", "mask_suffix")


def find_in_shards(config: Config, console: Console | None = None) -> FoundPairs | None:
    """The pairs of the shards that data_dir names, which are open from now on; None if it names none. Raises DataError."""
    store = open_shards(config, console)
    if store is None:
        return None
    for name in KNOWN_BY_SHARDS:
        if getattr(config, name):
            raise DataError(f"{name}: {config.data_dir} holds shards, which say what is an image and what a mask; leave it out")
    pairs = _pairs(store)
    if not pairs:
        raise DataError(
            f"data_dir: no sample with an image and a mask in the {counted(len(store.index.shards), 'shard')} of {store.root}; "
            "need WebDataset's names, a.jpg with a.png, a.seg.png or a.mask.png"
            + (f"; there is {first_few(store.index.unpaired, 3)}" if store.index.unpaired else "")
            + ". An archive of folders images/ and masks/ has to be unpacked"
        )
    found = FoundPairs(
        tuple(pair for pair in pairs if pair.part != "test"),
        f"{counted(len(store.index.shards), 'shard')}, {describe_size(store.index.num_bytes)}",
        test=tuple(pair for pair in pairs if pair.part == "test"),
        class_names=store.index.class_names,
        num_classes=store.index.num_classes,
        class_file=store.index.class_file,
    )
    if not store.is_remote and (others := list_files(Path(store.root))):
        notice = f"{counted(len(others), 'image file')} beside the shards in {store.root} left out, such as {others[0]}"
        found = dataclasses.replace(found, notices=(notice,))
    if not found.pairs:
        only_test = f"data_dir: all {len(found.test)} samples are of the test part, which evaluate takes, and training does not"
        found = dataclasses.replace(found, blocking_message=only_test)
    return _with_unpaired(found, store.index.unpaired, config.unpaired == "skip")


def describe_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _pairs(store: ShardStore) -> list[Pair]:
    repeated = Counter(sample.name for _, sample in iterate_samples(store.index))
    parts = {sample.part for _, sample in iterate_samples(store.index)}
    pairs = []
    for shard in store.index.shards:
        path, place = f"{store.path_prefix}{shard.name}", store.place(shard.name)
        for sample in shard.samples:
            name = sample.name if repeated[sample.name] == 1 else f"{shard.name.removesuffix('.tar')}/{sample.name}"
            image, mask = sample.image.name, sample.mask.name
            files, origins = (Path(f"{path}/{image}"), Path(f"{path}/{mask}")), (f"{place}/{image}", f"{place}/{mask}")
            pairs.append(Pair(name, *files, _part(sample.part, "val" in parts), sample.group, *origins))
    return pairs


def _part(part: str, is_divided: bool) -> Part | None:
    if part in ("val", "test"):
        return "val" if part == "val" else "test"
    return "train" if is_divided else None


def _with_unpaired(found: FoundPairs, unpaired: Sequence[str], skips: bool) -> FoundPairs:
    if not unpaired:
        return found
    what = f"{counted(len(unpaired), 'sample')} without one image and one mask"
    if skips:
        return dataclasses.replace(found, notices=(*found.notices, f"{what} left out (unpaired: skip)"))
    text = with_choices(f"{what}, e.g. {first_few(unpaired, 3)}", [SKIP])
    titles = "sample without one image and one mask", "samples without one image and one mask"
    problem = Problem("no_mask", *titles, tuple(unpaired), "unpaired: skip leaves them out", SKIP.settings)
    return dataclasses.replace(found, blocking_message=text, problems=(problem,))
