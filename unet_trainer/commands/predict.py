"""python train_unet.py predict: what a trained model sees in images, as files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import CommandParser, ScriptConfig
from unet_trainer.commands.evaluate import check_options, load
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import check_onnx
from unet_trainer.system.atomic_files import delete_drafts
from unet_trainer.system.console import EXIT_DONE, EXIT_USER_ERROR, Console, counted, cut
from unet_trainer.system.os_errors import cannot, sentence

if TYPE_CHECKING:  # a typo is answered before torch and OpenCV are loaded
    from unet_trainer.inference.inputs import Input
    from unet_trainer.inference.prediction_files import PredictionFolder
    from unet_trainer.inference.prediction_stream import PredictionStream

NUM_NAMED = 100  # files that could not be read
MODEL_SUFFIXES = (".pt", ".pt2", ".onnx")
MAX_WIDTH = 200  # of a list of classes
GO_ON = "--skip-existing continues from there"
MIN_AGE = 300.0  # seconds since a draft was written to, after which the prediction that wrote it was killed


def main(arguments: Sequence[str], script_config: ScriptConfig) -> int:
    given, console = _parser().parse_intermixed_args(arguments), Console()
    check_options(given)
    check_onnx(given.model)
    if given.batch_size is not None and given.batch_size < 1:
        raise UserError(f"--batch-size: got {given.batch_size}; need 1 or more")

    from unet_trainer.inference.inputs import find_inputs, refuse_among_images

    checkpoint_dir = Path(script_config(()).checkpoint_dir)
    refuse_models(given.inputs, given.model, checkpoint_dir)
    inputs = find_inputs(given.inputs, given.out, console.note)  # before torch is loaded: a wrong path fails early
    if not given.among_images:
        refuse_among_images(inputs, given.out)

    from unet_trainer.inference.engine import find_model
    from unet_trainer.inference.prediction_files import Kinds, PredictionFolder
    from unet_trainer.inference.prediction_stream import PredictionStream

    file = find_model(given.model, checkpoint_dir, given.raw)
    predictor = load(given, file, console)
    kinds = Kinds(given.values, given.overlay, given.probabilities, given.polygons)
    folder = PredictionFolder(given.out, predictor.spec, kinds)
    folder.refuse_overwriting(inputs)
    is_done = [given.skip_existing and folder.is_done(name) for _, name in inputs]
    num_done, num_todo = sum(is_done), len(inputs) - sum(is_done)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        for place in {path.parent for _, name in inputs for path in folder.files(name)}:
            if place.is_dir():
                delete_drafts(place, ["*.png", "*.tif", "*.npy"], MIN_AGE)
    except OSError as error:
        raise cannot(f"--out: {given.out}", "be made", error, given.out) from None
    spec, card = predictor.spec, predictor.engine.card
    about = f"{file}: {spec.architecture} with {spec.encoder}{card.describe()}"
    console.fact("Model", f"{about}; on {predictor.engine.description}")
    skipped = f", {num_done} of them done before" if num_done else ""
    console.fact("Images", f"{len(inputs)}{skipped}{predictor.describe_input()}")
    stream = PredictionStream(predictor, folder, console, given.threshold, given.batch_size)
    stream.num_images = num_todo
    stream.warm_up()
    started = time.perf_counter()
    try:
        stream.run(inputs, is_done)
    except OSError as error:
        so_far = f"{counted(stream.num_written, 'image')} done, {GO_ON}"
        raise UserError(f"--out: {given.out} cannot be written to ({sentence(error, given.out)}); {so_far}") from None
    except KeyboardInterrupt:
        console.say(f"{stream.num_written} of {counted(num_todo, 'image')} done; {GO_ON}")
        raise
    _say_result(stream, inputs, time.perf_counter() - started, console)
    if (warning := predictor.take_scale_warning()) is not None:
        console.warn(warning)
    return EXIT_USER_ERROR if stream.failed else EXIT_DONE


def refuse_models(words: Sequence[str], model: str, checkpoint_dir: Path) -> None:
    """Raises UserError for a run or a model's file among the images."""
    from unet_trainer.data.listing import is_run_folder

    for path in map(Path, words):
        place = path if path.exists() else checkpoint_dir / path
        if is_run_folder(place) or (place.is_file() and place.suffix in MODEL_SUFFIXES):
            what = f"{path} is a model, not images; predict takes one model, its first word (here {model})"
            raise UserError(f"{what}: give each model a command of its own")


def _parser() -> CommandParser:
    shared = "tta threshold raw device"
    parser = CommandParser("predict", "Writes what a trained model sees in images, as files.", None, shared)
    parser.add_argument("model", metavar="RUN|FILE", help="a run's name or folder (its best.pt), a .pt or .onnx file")
    what = "images, folders with their subfolders, a CSV with a column image"
    parser.add_argument("inputs", nargs="+", metavar="IMAGE|FOLDER|GLOB|CSV", help=what)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results are written")
    what = "fit: crop: side of the tiles, a multiple of 32; without it the one that training chose"
    parser.add_argument("--tile", metavar="N", help=what)
    parser.add_argument("--batch-size", metavar="N", type=int, help="images at a time; by default what fits the device")
    what = "probabilities too: 16-bit PNG, or float32 .npy"
    parser.add_argument("--probabilities", nargs="?", const="png", choices=("png", "npy"), help=what)
    for option, what in {
        "--values": "masks with the values of the dataset's own masks too",
        "--overlay": "the images with the classes drawn over them too",
        "--polygons": "the outlines of objects too: COCO JSON, or GeoJSON of GeoTIFFs",
        "--skip-existing": "leave images alone whose results are there",
        "--among-images": "write into the folder of the images if --out is that",
    }.items():
        parser.add_argument(option, action="store_true", help=what)
    return parser


def _say_result(stream: PredictionStream, inputs: Sequence[Input], seconds: float, console: Console) -> None:
    from unet_trainer.data.pairs import Problem, describe_problems

    speed = f" ({stream.num_written / seconds:.1f} images/s)" if stream.num_written > 1 else ""
    rate = f" in {seconds:.1f} s{speed}" if stream.num_written else ""
    console.say(f"Predicted {counted(stream.num_written, 'image')}{rate}.")
    failed = {path for path, _ in stream.failed}
    if written := [image for image in inputs if image.path not in failed]:  # some may have been there before
        for title, what in result_lines(stream.folder, written).items():
            console.say(f"  {title + ':':<15}{what}")
    if stream.num_with_missing:
        images = counted(stream.num_with_missing, "image")
        console.note(f"values without data in {images} were filled with the mean of the training images")
    if stream.failed:
        lines = tuple(f"{path}: {reason}" for path, reason in stream.failed)
        console.say(describe_problems([Problem("unreadable", "file", "that could not be predicted", lines)], NUM_NAMED))


def result_lines(folder: PredictionFolder, inputs: Sequence[Input]) -> dict[str, str]:
    """What was written where, and how to read it."""
    from unet_trainer.images.row_writers import PROBABILITIES
    from unet_trainer.inference.prediction_files import COCO_NAME, OVERLAYS, TIFF_SUFFIXES, VALUES

    out, kinds = folder.out, folder.kinds
    example = f"numpy.array(PIL.Image.open({str(folder.mask(inputs[0].name))!r}))"
    ids = cut(", ".join(f"{class_id} {name}" for class_id, name in enumerate(folder.spec.id_names)), MAX_WIDTH)
    lines = {"masks": f"{out}: class ids in PNGs with a palette ({ids}); in Python {example}"}
    if kinds.values:
        lines["values"] = f"{out / VALUES}: the values of the dataset's masks"
    if kinds.overlay:
        lines["overlays"] = f"{out / OVERLAYS}"
    if kinds.probabilities is not None:
        form = "16-bit PNGs, 65535 is 1" if kinds.probabilities == "png" else "float32 arrays"
        lines["probabilities"] = f"{out / PROBABILITIES}: {form}"
    if kinds.polygons and (out / COCO_NAME).is_file():
        lines["polygons"] = f"{out / COCO_NAME}: COCO, one annotation for each connected object"
    if any(path.suffix.lower() in TIFF_SUFFIXES and (out / f"{name}.tif").is_file() for path, name in inputs):
        geojson = " and polygons as .geojson" if kinds.polygons else ""
        lines["GeoTIFF"] = f"masks of GeoTIFFs also as .tif{geojson}, with their coordinates"
    return lines
