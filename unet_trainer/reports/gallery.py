"""Pictures of validation images for a report: what the model of best.pt makes of the worst, the middle and the best.

The image is one compressed picture; truth, prediction and errors are lossless layers above it. All is bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np

from unet_trainer.data.pairs import Pair
from unet_trainer.images.drawing import ERROR_COLOURS, IGNORED_COLOUR, error_kinds, to_display
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import LARGE_PIXELS, read_small
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, read_mask
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.runs.folder import BEST
from unet_trainer.runs.record import RunSummary
from unet_trainer.runs.tables import ImageScore
from unet_trainer.system.console import Console, counted, first_line, silent_console

if TYPE_CHECKING:
    from unet_trainer.inference.predictor import Predictor
    from unet_trainer.model.custom import CustomModel

Group = Literal["worst", "median", "best"]
Colour = tuple[int, int, int]

NUM_OF_GROUP: dict[Group, int] = {"worst": 9, "median": 6, "best": 6}
NUM_PICTURES = sum(NUM_OF_GROUP.values())
MAX_SECONDS = 60.0
MAX_BYTES = 2_600_000  # of all pictures together; in base64 a third more
# Longest side and quality, tried in this order until a picture is small enough.
SIZES = ((768, 82), (768, 65), (512, 70), (384, 60), (256, 50))
LOSSLESS = 101  # a quality above 100
FILL, LINE, CONTRAST = 72, 255, 180  # opacities: of a class, of its outline and hatch, of the line within the outline
BLACK, WHITE = (0, 0, 0), (255, 255, 255)
# By ErrorKind: what is right is darkened, errors have their colours.
ERROR_LAYER = np.array([(*BLACK, 150), *((*ERROR_COLOURS[kind], 235) for kind in sorted(ERROR_COLOURS))], np.uint8)


@dataclass(frozen=True)
class Picture:
    """An image with its truth, prediction and errors, as WebP files of one size."""

    score: ImageScore
    group: Group
    size: tuple[int, int]  # of the file: height, width
    shown: tuple[int, int]  # of the pictures
    image: bytes
    layers: Mapping[str, bytes]  # above the image: truth, prediction, errors


@dataclass(frozen=True)
class Gallery:
    """`note`: why there are no pictures, or fewer; empty if all is as it should be."""

    pictures: Sequence[Picture] = ()
    colours: Sequence[Colour] = ()  # of each class id
    note: str = ""


def choose_images(scores: Sequence[ImageScore]) -> list[tuple[ImageScore, Group]]:
    """Of scores from the worst on; the groups take turns, so that a part has something of each."""
    scored = [score for score in scores if score.iou is not None]
    third = -(-len(scored) // 3)
    num_worst, num_best = min(third, NUM_OF_GROUP["worst"]), min(third, NUM_OF_GROUP["best"], len(scored) - third)
    rest = scored[num_worst : len(scored) - num_best]
    num_median = min(len(rest), NUM_PICTURES - num_worst - num_best)
    first = (len(scored) - num_median) // 2 - num_worst
    groups: dict[Group, list[ImageScore]] = {
        "worst": scored[:num_worst],
        "median": rest[max(0, min(first, len(rest) - num_median)) :][:num_median],
        "best": scored[len(scored) - num_best :][::-1],
    }
    turns = max(map(len, groups.values()))
    return [(group[turn], name) for turn in range(turns) for name, group in groups.items() if turn < len(group)]


def make_gallery(
    summary: RunSummary,
    device: str = "auto",
    data_dir: Path | None = None,
    max_seconds: float = MAX_SECONDS,
    console: Console | None = None,
    model: CustomModel | None = None,
) -> Gallery:
    """Predicts and draws. What is missing, and any error of predicting, is a note."""
    file = summary.folder / BEST
    if not (file.is_file() and summary.image_scores):
        return Gallery(note=f"There are no pictures: the run has no {BEST}, or no scores of its images.")
    try:
        from unet_trainer.inference.engine import load_engine
        from unet_trainer.inference.evaluation_data import find_validation_pairs
        from unet_trainer.inference.predictor import Predictor

        pairs, predictor = find_validation_pairs(file, data_dir), Predictor(load_engine(file, device, model=model))
        base = Path(str(summary.value("data_dir", ""))) if data_dir is None else data_dir
        return draw_gallery(summary.image_scores, pairs, base, predictor, max_seconds, console)
    except Exception as error:  # the data, memory, a driver, a damaged file: more than can be listed
        return Gallery(note=f"There are no pictures: {first_line(error)}.")


def draw_gallery(
    scores: Sequence[ImageScore],
    pairs: Sequence[Pair],
    data_dir: Path,
    predictor: Predictor,
    max_seconds: float = MAX_SECONDS,
    console: Console | None = None,
) -> Gallery:
    """Pictures of the worst, middle and best of `scores`."""
    by_name = {pair.files_in(data_dir)[0]: pair for pair in pairs}
    chosen, deadline = choose_images(scores), time.monotonic() + max_seconds
    pictures: list[Picture] = []
    reasons: list[str] = []
    with (console or silent_console()).bar("Predicting images for the report:", len(chosen), keep=False) as bar:
        for score, group in chosen:
            try:
                if score.image not in by_name:
                    raise DataError(f"it is not in {data_dir} any more")
                max_bytes = MAX_BYTES // len(chosen)
                pictures.append(draw_picture(predictor, by_name[score.image], score, group, max_bytes, deadline))
            except DataError as error:
                reasons.append(f"{score.image}: {first_line(error)}")
            bar.tick()
    note = f"{counted(len(reasons), 'image')} could not be shown ({reasons[0]})." if reasons else ""
    return Gallery(pictures, predictor.spec.id_colours, note)


def draw_picture(
    predictor: Predictor, pair: Pair, score: ImageScore, group: Group, max_bytes: int, deadline: float = math.inf
) -> Picture:
    """Raises DataError for a file that cannot be read, is too large or of another kind, and where time has run out."""
    from unet_trainer.inference.predictor import TiledLogits, all_ids

    def stop_in_time(num_tiles: int = 0) -> None:
        if time.monotonic() > deadline:
            raise DataError("there was no time left for it")

    stop_in_time()
    spec = predictor.spec
    image = read_small(pair.image, spec.image)
    if image is None:
        raise DataError(f"a report shows images of up to {LARGE_PIXELS // 10**6} megapixels")
    height, width = image.size
    truth = resize_mask(spec.coding.encode(read_mask(pair.mask)), image.size)
    truth[truth == UNKNOWN] = IGNORED
    logits = predictor.predict_image(image.pixels)
    if isinstance(logits, TiledLogits):
        logits.grid.on_tiles = stop_in_time
    ids = all_ids(logits)
    display = to_display(image.pixels)
    for side, quality in SIZES:
        factor = min(1.0, side / max(height, width))
        shown = max(1, round(height * factor)), max(1, round(width * factor))
        layers = {
            "truth": class_layer(resize_mask(truth, shown), spec.id_colours),
            "prediction": class_layer(resize_mask(ids, shown), spec.id_colours),
            "errors": ERROR_LAYER[error_kinds(truth, ids, shown, is_binary=spec.num_classes == 1)],
        }
        stored = {name: encode_webp(layer, LOSSLESS) for name, layer in layers.items()}
        photo = encode_webp(fit_image(display, shown), quality)
        if len(photo) + sum(map(len, stored.values())) <= max_bytes:
            break
    return Picture(score, group, (height, width), shown, photo, stored)


def encode_webp(pixels: Pixels, quality: int) -> bytes:
    """H,W,3 RGB or H,W,4 with opacities."""
    order = cv2.COLOR_RGB2BGR if pixels.shape[2] == 3 else cv2.COLOR_RGBA2BGRA
    _, buffer = cv2.imencode(".webp", cv2.cvtColor(pixels, order), [cv2.IMWRITE_WEBP_QUALITY, quality])
    return buffer.tobytes()


def class_layer(ids: Pixels, colours: Sequence[Colour]) -> Pixels:
    """H,W,4: every class but 0 in its colour, hatched, outlined with a line in its colour and one of black or white."""
    of_ids = np.zeros((256, 4), np.uint8)
    of_ids[: len(colours), :3], of_ids[1:, 3] = colours, FILL
    of_ids[IGNORED, :3] = IGNORED_COLOUR
    line, distance = max(1, max(ids.shape) // 256), max(8, max(ids.shape) // 24)
    is_class = (ids != 0) & (ids != IGNORED)
    is_hatch = np.add.outer(*map(np.arange, ids.shape)) % distance < line
    kernels = (np.ones((2 * pixels + 1, 2 * pixels + 1), np.uint8) for pixels in (line, 2 * line))
    is_outline, is_near = (cv2.dilate(ids, kernel) != cv2.erode(ids, kernel) for kernel in kernels)
    layer = of_ids[ids]
    layer[(is_hatch | is_near) & is_class, 3] = LINE
    is_within = is_near & ~is_outline & is_class
    is_dark = of_ids[:, :3] @ (0.3, 0.6, 0.1) < 128
    layer[is_within] = np.where(is_dark[ids[is_within], None], (*WHITE, CONTRAST), (*BLACK, CONTRAST))
    return layer
