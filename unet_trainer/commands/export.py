"""python train_unet.py export: a trained model as a file or folder for other programs, compared with torch before it is kept."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.config.errors import UserError
from unet_trainer.datasets.pairs import first_few
from unet_trainer.system.atomic_files import ABANDONED_SECONDS, delete_drafts, final_path
from unet_trainer.system.console import EXIT_DONE, Console
from unet_trainer.system.os_errors import cannot

# Of each format: the suffix of its file (a folder has none), its name unless given, what it is, and what to try where it fails.
FORMATS = {
    "onnx": (
        ".onnx",
        "model.onnx",
        "ONNX, one file with weights, normalisation and classes; runs with onnxruntime",
        "; try --format pt2, or smp, which keeps the network as it is",
    ),
    "pt2": (
        ".pt2",
        "model.pt2",
        "a program of torch.export; runs with torch alone",
        "; --format smp keeps the network as it is",
    ),
    "smp": ("", "model_smp", "a folder for smp.from_pretrained", ""),
}


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py export",
        description="Exports a trained model for other programs. The result is run and compared with torch before it is kept.",
        epilog="\n".join(f"  {name:<12} {title}" for name, (_, _, title, _) in FORMATS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="RUN | FILE", help="a run's name or folder (its best.pt), or a .pt file")
    parser.add_argument("--format", choices=list(FORMATS), default="onnx", help="onnx unless given")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="the file, or the folder of smp; beside the checkpoint unless given"
    )
    parser.add_argument("--raw", action="store_true", help="the weights as trained (of last.pt), not their average")
    given = parser.parse_args(arguments)
    return export(given.model, given.format, given.out, given.raw, Path(script.config(()).checkpoint_dir), Console())


def export(model: str, name: str, out: Path | None, raw: bool, checkpoint_dir: Path, console: Console) -> int:
    """Raises UserError."""
    from unet_trainer.inference.engine import ONNX_SUFFIX, build_segmenter, find_model
    from unet_trainer.inference.export import ExportError, export_onnx, export_pt2, export_smp

    path = find_model(model, checkpoint_dir, raw)
    if path.suffix == ONNX_SUFFIX:
        raise UserError(f"{path} is an export already; name the run or the .pt file that it comes from")
    target = choose_target(out, name, path)
    exporter = {"onnx": export_onnx, "pt2": export_pt2, "smp": export_smp}[name]
    card, segmenter = build_segmenter(path, raw)
    spec = card.spec
    _, _, title, advice = FORMATS[name]
    console.say(f"Exporting {path} as {title} ...")
    console.fact("Model", f"{spec.architecture}, {spec.encoder}{', raw weights' if raw else ''}{card.describe()}")
    console.fact("Classes", ", ".join(spec.id_names))
    try:
        delete_drafts(target.parent, [target.name], ABANDONED_SECONDS)
        compared = exporter(segmenter, card, target)
    except ExportError as error:
        what = f"{spec.architecture} with {spec.encoder} cannot be exported as {name}"
        raise ExportError(f"{what}: {error}; nothing was written{advice}") from None
    except OSError as error:
        raise cannot(f"--out: {target}", "be written", error, target) from None
    console.fact("Compared", compared)
    num_bytes = sum(file.stat().st_size for file in (target.iterdir() if target.is_dir() else [target]))
    console.fact("Written", f"{target} ({num_bytes / 1e6:.1f} MB)")
    if name == "onnx":
        console.say(f"Next: python train_unet.py predict {shlex.quote(str(target))} IMAGES --out predictions")
    return EXIT_DONE


def choose_target(out: Path | None, name: str, checkpoint: Path) -> Path:
    """Where the export goes. Raises UserError where something else would be lost."""
    from unet_trainer.inference.engine import SMP_CARD
    from unet_trainer.inference.export import SMP_FILES

    suffix, default_name, _, _ = FORMATS[name]
    try:
        # A link that the user names is written through, not replaced; one in a run's folder could lead anywhere.
        target = checkpoint.parent / default_name if out is None else final_path(out) if out.is_symlink() else out
    except OSError as error:
        raise cannot(f"--out: {out}", "be written", error) from None
    if suffix and target.is_dir():
        target = target / default_name
    if suffix and target.suffix != suffix:
        raise UserError(f"--out: {out} does not end in {suffix}; need the name of a {suffix} file, or a folder for it")
    if not target.parent.is_dir():
        raise UserError(f"--out: there is no folder {target.parent}")
    if suffix and target.exists() and not target.is_file():
        raise UserError(f"--out: {target} is no file that can be replaced")
    if not suffix and target.exists():
        if not (target / SMP_CARD).is_file():
            raise UserError(f"--out: {target} exists and is no earlier export; name a folder that does not exist")
        # A folder is replaced as a whole, and what somebody put into it would be lost.
        if others := sorted(file.name for file in target.iterdir() if file.name not in SMP_FILES):
            raise UserError(
                f"--out: {target} holds {first_few(others, 3)} beside an earlier export, which would be deleted with it; move it "
                "away, or name a folder that does not exist"
            )
    return target
