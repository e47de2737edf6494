"""python train_unet.py predict: what a trained model sees in images, as files."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.config.errors import UserError
from unet_trainer.config.parsers import tile_side
from unet_trainer.system.console import EXIT_DONE, EXIT_USER_ERROR, Bar, Console, counted
from unet_trainer.system.os_errors import cannot, sentence
from unet_trainer.system.signals import Signals
from unet_trainer.training.errors import TrainingFailed

if TYPE_CHECKING:  # a typo is answered before torch and OpenCV are loaded
    from unet_trainer.inference.engine import Engine
    from unet_trainer.inference.inputs import Input
    from unet_trainer.inference.prediction_files import PredictionFolder
    from unet_trainer.inference.prediction_stream import Outcome, PredictionStream, WriterProcesses
    from unet_trainer.inference.prediction_timing import Rates
    from unet_trainer.inference.predictor import Predictor
    from unet_trainer.model.segmenter import SegmenterSpec

NUM_NAMED = 100  # files that could not be read
MAX_CLASSES = 12  # that are listed


def main(arguments: Sequence[str], script: Script) -> int:
    given = _parser().parse_intermixed_args(arguments)
    _check(given)
    console = Console()
    with Signals():
        return predict(given, console)


def _parser() -> CommandParser:
    parser = CommandParser("train_unet.py predict", description="Writes what a trained model sees in images, as files.")
    parser.add_argument("model", metavar="RUN|FILE", help="a run's name or folder (its best.pt is taken), a .pt or an .onnx file")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IMAGE|FOLDER|GLOB|CSV",
        help="images, folders with their subfolders, a CSV with a column image",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results are written")
    parser.add_argument("--among-images", action="store_true", help="write into the folder of the images if --out is that")
    parser.add_argument("--values", action="store_true", help="masks with the values of the dataset's own masks too")
    parser.add_argument("--overlay", action="store_true", help="the images with the classes drawn over them too")
    parser.add_argument(
        "--probabilities", nargs="?", const="png", choices=("png", "npy"), help="probabilities too: 16-bit PNG, or float32 .npy"
    )
    parser.add_argument("--polygons", action="store_true", help="the outlines of objects too: COCO JSON, or GeoJSON of GeoTIFFs")
    parser.add_argument("--tta", action="store_true", help="mean over the mirrored and turned images that training had")
    parser.add_argument("--threshold", metavar="T", type=float, help="least probability of the foreground (0.5), with one class")
    parser.add_argument(
        "--tile",
        metavar="N",
        help="fit: crop: side of the tiles, a multiple of 32; without it the one that training chose",
    )
    parser.add_argument("--skip-existing", action="store_true", help="leave images alone whose results are there")
    parser.add_argument("--raw", action="store_true", help="the weights as trained, not their average")
    parser.add_argument("--device", metavar="D", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--batch-size", metavar="N", type=int, help="images at a time; by default as the device can use")
    parser.add_argument("--time", action="store_true", help="say also how fast reading, the network and a plain loop are alone")
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.threshold is not None and not 0 < given.threshold < 1:
        raise UserError(f"--threshold: got {given.threshold:g}; need a number between 0 and 1")
    if given.batch_size is not None and given.batch_size < 1:
        raise UserError(f"--batch-size: got {given.batch_size}; need 1 or more")
    if given.tile is not None:
        tile_side(given.tile, "--tile")
    if given.raw and Path(given.model).suffix == ".onnx":
        raise UserError("--raw: an exported file has one set of weights; name the run, or its last.pt")


def predict(given: argparse.Namespace, console: Console) -> int:
    from unet_trainer.inference.inputs import find_inputs, refuse_among_images, refuse_same_names

    inputs = find_inputs(given.inputs, given.out, console.note)  # before torch is loaded: a wrong path is told at once
    refuse_same_names(inputs)
    if not given.among_images:
        refuse_among_images(inputs, given.out)

    from unet_trainer.inference.model_files import find_model

    path = find_model(given.model, raw=given.raw)
    with contextlib.ExitStack() as stack:
        processes = _start_writers(given, inputs, console)  # before the engine starts up the GPU
        if processes is not None:
            stack.enter_context(processes)
        return _predict(given, path, inputs, processes, console)


def _start_writers(given: argparse.Namespace, inputs: Sequence[Input], console: Console) -> WriterProcesses | None:
    from unet_trainer.inference import prediction_stream

    try:
        return None if given.polygons else prediction_stream.start_writers(len(inputs), given.device)
    except OSError as error:
        console.note(f"results are written by threads, which is slower: {sentence(error)}")
        return None


def _predict(
    given: argparse.Namespace, path: Path, inputs: Sequence[Input], processes: WriterProcesses | None, console: Console
) -> int:
    from unet_trainer.inference.engine import load_engine
    from unet_trainer.inference.prediction_files import Kinds, PredictionFolder
    from unet_trainer.inference.prediction_stream import PredictionStream
    from unet_trainer.inference.predictor import Predictor, chosen_tile

    kinds = Kinds(given.values, given.overlay, given.probabilities, given.polygons)
    engine = load_engine(path, given.device, raw=given.raw)
    spec = engine.card.spec
    if given.threshold is not None and spec.num_ids != 2:
        raise UserError(f"--threshold: for a model of one class and background; {path} has {spec.num_ids} classes")
    tile = chosen_tile(given.tile, spec)
    folder = PredictionFolder(given.out, spec, kinds)
    folder.refuse_overwriting(inputs)
    is_done = [given.skip_existing and folder.is_done(name) for _, name in inputs]
    _make_folder(given.out)
    predictor = Predictor(_with_symmetries(engine, console) if given.tta else engine, tile)
    _say_start(path, predictor, inputs, sum(is_done), console)
    num_todo = len(inputs) - sum(is_done)
    with console.bar("Predicting:", num_todo) as bar:
        stream = PredictionStream(predictor, folder, _Bars(console, bar), given.threshold, given.batch_size, processes)
        stream.warm_up(num_todo)
        rates = _measure(stream, inputs) if given.time else None
        started = time.perf_counter()
        outcome = _run(stream, inputs, is_done, given.out, console)
    seconds = time.perf_counter() - started
    _say_result(folder, inputs, outcome, seconds, console)
    if (warning := predictor.take_scale_warning()) is not None:
        console.warn(warning)
    if rates is not None and outcome.num_written:
        _say_rates(rates, outcome.num_written / seconds, console)
    return EXIT_USER_ERROR if outcome.failed else EXIT_DONE


class _Bars:
    """Progress on the terminal: the images, and below them the tiles of a large one."""

    def __init__(self, console: Console, bar: Bar) -> None:
        self.console, self.bar = console, bar

    def images_done(self, number: int) -> None:
        self.bar.tick(number)

    @contextlib.contextmanager
    def large_image(self, path: Path, num_tiles: int) -> Iterator[Callable[[int], object]]:
        with self.console.bar(f"  {path.name}, tiles:", num_tiles, keep=False) as bar:
            yield bar.tick


def _measure(stream: PredictionStream, inputs: Sequence[Input]) -> Rates:
    from unet_trainer.inference.prediction_timing import measure_rates

    with tempfile.TemporaryDirectory() as folder:
        return measure_rates(stream, inputs, Path(folder))


def _run(stream: PredictionStream, inputs: Sequence[Input], is_done: Sequence[bool], out: Path, console: Console) -> Outcome:
    from unet_trainer.loading.worker_pool import WorkerError

    try:
        return stream.run(inputs, is_done)
    except WorkerError as error:
        raise TrainingFailed(
            f"{error}; {counted(stream.outcome.num_written, 'image')} done, --skip-existing goes on from there"
        ) from None
    except OSError as error:
        raise UserError(
            f"--out: {out} cannot be written to ({sentence(error, out)}); "
            f"{counted(stream.outcome.num_written, 'image')} done, --skip-existing goes on from there"
        ) from None
    except KeyboardInterrupt:
        num_todo = len(inputs) - sum(is_done)
        console.say(f"{stream.outcome.num_written} of {counted(num_todo, 'image')} done; --skip-existing goes on from there")
        raise


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(f"--out: {out}", "be made", error, out) from None


def _with_symmetries(engine: Engine, console: Console) -> Engine:
    from unet_trainer.inference.engine import SymmetricEngine

    symmetries = engine.card.symmetries
    if not symmetries:
        console.note("--tta changes nothing: the model was trained without mirrored or turned images")
        return engine
    console.note(f"--tta: mean over the images that {', '.join(symmetries)} of training make")
    return SymmetricEngine(engine, symmetries)


def _say_start(path: Path, predictor: Predictor, inputs: Sequence[Input], num_done: int, console: Console) -> None:
    engine, card, spec = predictor.engine, predictor.engine.card, predictor.spec
    score = "" if card.val_iou is None else f", val IoU {card.val_iou:.4f}"
    epoch = "" if card.epoch is None else f", epoch {card.epoch}"
    console.fact("Model", f"{path}: {spec.architecture} with {spec.encoder}{epoch}{score}; on {engine.description}")
    skipped = f", {num_done} of them done before" if num_done else ""
    tiles = f", in blended tiles of {predictor.describe_tile()}" if spec.fit == "crop" else ""
    console.fact("Images", f"{len(inputs)}{skipped}{tiles}")


def _say_result(folder: PredictionFolder, inputs: Sequence[Input], outcome: Outcome, seconds: float, console: Console) -> None:
    from unet_trainer.datasets.problems import Problem, describe_problems

    rate = f" in {seconds:.1f} s" + (f" ({outcome.num_written / seconds:.1f} images/s)" if outcome.num_written > 1 else "")
    console.say(f"Predicted {counted(outcome.num_written, 'image')}{rate if outcome.num_written else ''}.")
    if len(inputs) > len(outcome.failed):  # some may have been there before
        for line in result_lines(folder, inputs, {path for path, _ in outcome.failed}):
            console.say(line)
    if outcome.num_with_missing:
        images = counted(outcome.num_with_missing, "image")
        console.note(f"values without data in {images} were filled with the mean of the training images")
    if outcome.failed:
        lines = tuple(f"{path}: {reason}" for path, reason in outcome.failed)
        titles = "file that could not be predicted", "files that could not be predicted"
        console.say(describe_problems([Problem("unreadable", *titles, lines)], NUM_NAMED))


def result_lines(folder: PredictionFolder, inputs: Sequence[Input], failed: set[Path]) -> list[str]:
    """What was written where, and how to read it."""
    from unet_trainer.images.row_writers import PROBABILITIES
    from unet_trainer.inference.prediction_files import COCO_NAME, OVERLAYS, VALUES, class_folder

    out, spec, kinds = folder.out, folder.spec, folder.kinds
    example = next((name for path, name in inputs if path not in failed), inputs[0].name)
    lines = [
        f"  {'masks:':<15}{out}: class ids in PNGs with a palette ({_classes(spec)}); in Python "
        f"numpy.array(PIL.Image.open({str(folder.mask(example))!r}))",
    ]
    if kinds.values:
        lines.append(f"  {'values:':<15}{out / VALUES}: {_values(folder)}")
    if kinds.overlay:
        lines.append(f"  {'overlays:':<15}{out / OVERLAYS}")
    if kinds.probabilities == "npy":
        what = "of the foreground, height × width" if len(folder.probable_ids) == 1 else "height × width × classes"
        lines.append(f"  {'probabilities:':<15}{out / PROBABILITIES}: float32 arrays, {what}")
    elif kinds.probabilities == "png":
        first = class_folder(0, spec.id_names[0])
        which = "of the foreground" if len(folder.probable_ids) == 1 else f"a folder for each class, such as {first}"
        lines.append(f"  {'probabilities:':<15}{out / PROBABILITIES}: 16-bit PNGs, 65535 is 1; {which}")
    if kinds.polygons and (out / COCO_NAME).is_file():
        lines.append(f"  {'polygons:':<15}{out / COCO_NAME}: COCO, one annotation for each connected object")
    if any(path.suffix.lower() in (".tif", ".tiff") and (out / f"{name}.tif").is_file() for path, name in inputs):
        geojson = " and polygons as .geojson" if kinds.polygons else ""
        lines.append(f"  {'GeoTIFF:':<15}masks of GeoTIFFs also as .tif{geojson}, with their coordinates")
    return lines


def _classes(spec: SegmenterSpec) -> str:
    named = [f"{class_id} {name}" for class_id, name in enumerate(spec.id_names[:MAX_CLASSES])]
    return ", ".join([*named, *([f"… {spec.num_ids - 1} {spec.id_names[-1]}"] if spec.num_ids > MAX_CLASSES else [])])


def _values(folder: PredictionFolder) -> str:
    spec = folder.spec
    shown = [
        f"{name} {value.tolist() if value.ndim else int(value)}"
        for name, value in list(zip(spec.id_names, folder.values, strict=True))[:MAX_CLASSES]
    ]
    return "the values of the dataset's masks: " + ", ".join([*shown, *(["…"] if spec.num_ids > MAX_CLASSES else [])])


def _say_rates(rates: Rates, end_to_end: float, console: Console) -> None:
    lines = [
        ("reading alone", rates.reading, ""),
        ("forward pass alone", rates.forward, ""),
        ("predict, all in all", end_to_end, f"  {end_to_end / rates.bound:.0%} of the lower of the two"),
    ]
    if rates.plain is not None:
        lines.append(("plain loop", rates.plain, "  read, forward in float32 and write, one after the other"))
    console.say("Images per second:")
    for name, rate, note in lines:
        console.say(f"  {name:<20}{rate:>9.1f}{note}")
