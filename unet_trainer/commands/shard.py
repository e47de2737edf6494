"""python train_unet.py shard: writes a dataset as tar shards, which train from a disk or from object storage as the files would."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.commands.command_line import CommandParser, Script, add_config_words, read_config_words
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import check_url
from unet_trainer.config.schema import Config, is_demo_dir
from unet_trainer.system.console import EXIT_DONE, Console, counted
from unet_trainer.system.input_files import read_text

MEGABYTE = 10**6


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py shard",
        description="Writes images and masks as tar shards with an index, in WebDataset's naming; data_dir=OUT trains from them.",
    )
    add_config_words(parser)
    parser.add_argument("--out", metavar="FOLDER | URL", required=True, help="where the shards go: a folder, s3://..., gs://...")
    parser.add_argument("--shard-mb", metavar="MB", type=_megabytes, default=256.0, help="largest size of a shard (default 256)")
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script.config, "shard")
    check_url("--out", given.out)
    shard_data(config, given.out, int(given.shard_mb * MEGABYTE), Console())
    return EXIT_DONE


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}; need a number of megabytes, e.g. 256")
    return value


def shard_data(config: Config, out: str, shard_bytes: int, console: Console) -> None:
    """Reads and checks every pair, writes the shards and says how to train from them. Raises UserError."""
    # numpy and OpenCV: a typo is answered before they are loaded
    from unet_trainer.datasets.dataset_report import find_dataset, read_every_pair
    from unet_trainer.datasets.demo import ensure_demo
    from unet_trainer.datasets.mask_evidence import find_class_file
    from unet_trainer.datasets.scan import open_scan_cache
    from unet_trainer.datasets.shard_store import Files, is_url
    from unet_trainer.datasets.shards import FOLDER, ScannedPair, describe_size, refuse_other_files, write_shards

    checkpoint_dir, data_dir = Path(config.checkpoint_dir), Path(config.data_dir)
    if not is_url(out) and Path(out).resolve() == data_dir.resolve():
        raise UserError(f"--out: {out} is data_dir; need another folder")
    if is_demo_dir(data_dir) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    place = Files(out, workspace=checkpoint_dir / FOLDER)
    refuse_other_files(place)
    found = find_dataset(config, console)
    report = read_every_pair(found, config.resize_masks, open_scan_cache(data_dir, checkpoint_dir), console, config.worker_timeout)
    if report.blocking_message:
        command = f"python train_unet.py check data_dir={shlex.quote(config.data_dir)}"
        raise UserError(f"{report.blocking_message}\nTo see all of it: {command}")
    for notice in report.notices:
        console.note(notice)
    folders = {file.parent.resolve() for pair in report.pairs for file in (pair.image, pair.mask)}
    if not is_url(out) and Path(out).resolve() in folders:
        raise UserError(f"--out: {out} holds images or masks of the data; need another folder")
    if found.class_file is None and (class_file := find_class_file(data_dir, report.pairs)) is not None:
        found = dataclasses.replace(found, class_file=(class_file.path.name, read_text(class_file.path, encoding="utf-8-sig")))
    scanned = [ScannedPair(*each) for each in zip(report.pairs, report.images, report.masks, strict=True)]
    scanned += [ScannedPair(pair) for pair in found.test]
    with console.bar("Writing shards:", len(scanned), keep=False) as bar:
        index = write_shards(found, scanned, data_dir.resolve().name, place, shard_bytes, bar.tick)
    pairs, shards = counted(index.num_samples, "pair"), counted(len(index.shards), "shard")
    console.fact("Shards", f"{pairs} in {shards} in {out}, {describe_size(index.num_bytes)}")
    console.say(f"Train from them: python train_unet.py data_dir={shlex.quote(out)}")
