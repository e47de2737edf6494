"""python train_unet.py export and shard, for use elsewhere: a trained model as a file or folder for other programs,
compared with torch before it is kept; a dataset as tar shards, which train from a disk or from object storage as the
files would."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, read_config_words
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import check_onnx, check_url
from unet_trainer.data.pairs import first_few
from unet_trainer.system.atomic_files import ABANDONED_SECONDS, Kind, check_replaceable, delete_drafts, final_path
from unet_trainer.system.console import Console, counted
from unet_trainer.system.input_files import read_text
from unet_trainer.system.os_errors import cannot

FORMATS = {
    "onnx": "ONNX, one file with weights, normalisation and classes; runs with onnxruntime",
    "pt2": "a program of torch.export; runs with torch alone",
    "smp": "a folder for smp.from_pretrained",
}
KINDS = {  # smp is a folder, and known by its files
    "onnx": Kind(".onnx model", rb"\x08"),  # its first field is the version of the format
    "pt2": Kind(".pt2 program", rb"PK\x03\x04"),
}


def main(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    about = "Exports a trained model for other programs. The result is run and compared with torch before it is kept."
    formats = "\n".join(f"  {name:<12} {title}" for name, title in FORMATS.items())
    layout = argparse.RawDescriptionHelpFormatter
    parser = CommandParser("export", about, words=None, shared="raw", epilog=formats, formatter_class=layout)
    parser.add_argument("model", metavar="RUN | FILE", help="a run's name or folder (its best.pt), or a .pt file")
    parser.add_argument("--format", choices=list(FORMATS), default="onnx", help="onnx unless given")
    parser.add_argument("--out", type=Path, metavar="PATH", help="file, or folder of smp; else beside the checkpoint")
    given = parser.parse_args(arguments)
    name, raw, console = given.format, given.raw, Console()
    if name == "onnx":
        check_onnx(None, exports=True)

    from unet_trainer.inference.engine import ONNX_SUFFIX, build_segmenter, find_model
    from unet_trainer.inference.export import ExportError, export_onnx, export_pt2, export_smp

    path = find_model(given.model, Path(script_config(()).checkpoint_dir), raw)
    if path.suffix == ONNX_SUFFIX:
        raise UserError(f"{path} is an export already; name the run or the .pt file that it comes from")
    target = choose_target(given.out, name, path)
    exporter = {"onnx": export_onnx, "pt2": export_pt2, "smp": export_smp}[name]
    card, segmenter = build_segmenter(path, raw)
    spec = card.spec
    console.say(f"Exporting {path} as {FORMATS[name]} ...")
    console.fact("Model", f"{spec.architecture}, {spec.encoder}{', raw weights' if raw else ''}{card.describe()}")
    console.fact("Classes", ", ".join(spec.id_names))
    try:
        delete_drafts(target.parent, [target.name], ABANDONED_SECONDS)
        compared = exporter(segmenter, card, target)
    except ExportError as error:
        what = f"{spec.architecture} with {spec.encoder} cannot be exported as {name}: {error}; nothing was written"
        raise ExportError(what if name == "smp" else f"{what}; --format smp keeps the network as it is") from None
    except OSError as error:
        raise cannot(f"--out: {target}", "be written", error, target) from None
    console.fact("Compared", compared)
    num_bytes = sum(file.stat().st_size for file in (target.iterdir() if target.is_dir() else [target]))
    console.fact("Written", f"{target} ({num_bytes / 1e6:.1f} MB)")
    if name == "onnx":
        console.say(f"Next: python train_unet.py predict {shlex.quote(str(target))} IMAGES --out predictions")


def choose_target(out: Path | None, name: str, checkpoint: Path) -> Path:
    """Where the export goes. Raises UserError where something else would be lost."""
    from unet_trainer.inference.export import SMP_FILES
    from unet_trainer.runs.folder import SMP_CARD

    # that of smp is a folder
    suffix, default_name = ("", "model_smp") if name == "smp" else (f".{name}", f"model.{name}")
    try:
        # A link that the user names is followed; one in a run's folder could lead anywhere.
        target = checkpoint.parent / default_name if out is None else final_path(out) if out.is_symlink() else out
    except OSError as error:
        raise cannot(f"--out: {out}", "be written", error) from None
    target = target / default_name if suffix and target.is_dir() else target
    if suffix and target.suffix != suffix:
        raise UserError(f"--out: {out} does not end in {suffix}; need the name of a {suffix} file, or a folder for it")
    if not target.parent.is_dir():
        raise UserError(f"--out: there is no folder {target.parent}")
    if suffix or target.is_symlink():
        check_replaceable("--out", target, KINDS.get(name))
    elif target.exists():
        if not (target / SMP_CARD).is_file():
            raise UserError(f"--out: {target} exists and is no earlier export; name a folder that does not exist")
        # A folder is replaced as a whole, and what somebody put into it would be lost.
        if others := sorted(file.name for file in target.iterdir() if file.name not in SMP_FILES):
            what = f"holds {first_few(others, 3)} beside an earlier export, which would be deleted with it"
            raise UserError(f"--out: {target} {what}; move it away, or name a folder that does not exist")
    return target


def shard(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    what = "Writes images and masks as tar shards with an index, in WebDataset's naming; data_dir=OUT trains from them."
    parser = CommandParser("shard", what)
    parser.add_argument("--out", metavar="FOLDER | URL", required=True, help="for the shards: a folder, s3://, gs://")
    parser.add_argument("--shard-mb", metavar="MB", type=float, default=256.0, help="largest size of a shard (256)")
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script_config, "shard")
    if not given.out.strip():
        raise UserError("--out: got an empty name; need a folder or a URL (is a variable of the shell not set?)")
    if not 0.01 <= given.shard_mb <= 1e6:
        raise UserError(f"--shard-mb: got {given.shard_mb:g}; need megabytes from 0.01 to 1000000, e.g. 256")
    check_url("--out", given.out)
    # numpy and OpenCV: a typo is answered before they are loaded
    from unet_trainer.data.class_files import find_class_file
    from unet_trainer.data.dataset_report import read_every_pair
    from unet_trainer.data.find import find_dataset
    from unet_trainer.data.scan import open_scan_cache
    from unet_trainer.data.shard_store import Files, is_url
    from unet_trainer.data.shards import describe_size, refuse_other_files, write_shards

    out, shard_bytes, console = given.out, int(given.shard_mb * 10**6), Console()
    checkpoint_dir, data_dir = Path(config.checkpoint_dir), Path(config.data_dir)
    if not is_url(out) and Path(out).resolve() == data_dir.resolve():
        raise UserError(f"--out: {out} is data_dir; need another folder")
    if not is_url(out) and Path(out).is_file():
        raise UserError(f"--out: {out} is a file; need a folder or a URL")
    place = Files(out)
    refuse_other_files(place)
    found = find_dataset(config, console)
    report = read_every_pair(config, found, open_scan_cache(data_dir, checkpoint_dir, config.nodata), console)
    if report.blocking_message:
        command = f"python train_unet.py check data_dir={shlex.quote(config.data_dir)}"
        raise UserError(f"{report.blocking_message}\nTo see all of it: {command}")
    for notice in report.notices:
        console.note(notice)
    folders = {file.parent.resolve() for pair in report.pairs for file in (pair.image, pair.mask)}
    if not is_url(out) and Path(out).resolve() in folders:
        raise UserError(f"--out: {out} holds images or masks of the data; need another folder")
    if found.class_file is None and (class_file := find_class_file(data_dir, report.pairs)) is not None:
        text = read_text(class_file.path, encoding="utf-8-sig")
        found = dataclasses.replace(found, class_file=(class_file.path.name, text))
    read = zip(report.pairs, report.images, report.masks, strict=True)
    scanned = [*read, *((pair, None, None) for pair in found.test)]
    with console.bar("Writing shards:", len(scanned), keep=False) as bar:
        index = write_shards(found, scanned, data_dir.resolve().name, place, shard_bytes, bar.tick)
    pairs, shards = counted(index.num_samples, "pair"), counted(len(index.shards), "shard")
    console.fact("Shards", f"{pairs} in {shards} in {out}, {describe_size(index.num_bytes)}")
    console.say(f"Train from them: python train_unet.py data_dir={shlex.quote(out)}")
