"""Pictures of validation images for a report: what the model of best.pt makes of the worst, the middle and the best of them.

The image is one compressed picture; truth, prediction and errors are transparent layers of few colours above it, small and
sharp. All of it is bounded: images, seconds, pixels of an image, bytes.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.config.errors import UserError
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.drawing import ERROR_COLOURS, IGNORED_COLOUR, error_kinds, to_display
from unet_trainer.images.file_bytes import DataError, read_bytes
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.system.console import Console, counted, first_line, silent_console
from unet_trainer.training.run_folder import BEST
from unet_trainer.training.run_summary import RunSummary
from unet_trainer.training.val_scores import ImageScore

if TYPE_CHECKING:
    from unet_trainer.inference.predictor import Predictor

Group = Literal["worst", "median", "best"]
Colour = tuple[int, int, int]

NUM_OF_GROUP: dict[Group, int] = {"worst": 9, "median": 6, "best": 6}
NUM_PICTURES = sum(NUM_OF_GROUP.values())
MAX_SECONDS = 60.0
MAX_PIXELS = 25_000_000  # of an image: larger ones take long and are shown at a fraction in any case
MAX_BYTES = 2_600_000  # of all pictures together; in base64 a third more
# Longest side and quality, tried in this order until a picture is small enough.
SIZES = ((768, 82), (768, 65), (512, 70), (384, 60), (256, 50))
FILL, LINE, DIM = 72, 255, 150  # opacities: of a class, of its outline and hatch, of what is right in an error map
CONTRAST = 180  # the same of the line within an outline
MAX_OUTLINED = 120  # ids that a palette has two colours for
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


@dataclass(frozen=True)
class Picture:
    """An image with its truth and prediction. Layers are PNG files, as large as the image."""

    score: ImageScore
    group: Group
    size: tuple[int, int]  # of the file: height, width
    shown: tuple[int, int]  # of the pictures
    image: bytes
    image_type: str
    truth: bytes
    prediction: bytes
    errors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.image) + len(self.truth) + len(self.prediction) + len(self.errors)


@dataclass(frozen=True)
class Gallery:
    """`note`: why there are no pictures, or fewer; empty if all is as it should be."""

    pictures: Sequence[Picture] = ()
    colours: Sequence[Colour] = ()  # of each class id
    note: str = ""


def choose_images(scores: Sequence[ImageScore]) -> list[tuple[ImageScore, Group]]:
    """Of scores from the worst on; each image once. In the order in which they are made: the groups take turns, so that a part
    has something of each. Images without an IoU, in which no class occurs, are not chosen."""
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
) -> Gallery:
    """Predicts and draws. What is missing (data, best.pt, a file), and any error of predicting, is a note: the report is written
    all the same."""
    model = summary.folder / BEST
    if not (model.is_file() and summary.image_scores):
        return Gallery(note=f"There are no pictures: the run has no {BEST}, or no scores of its images.")
    try:
        pairs, predictor = load_predictor(model, device, data_dir)
        base = Path(str(summary.value("data_dir", ""))) if data_dir is None else data_dir
        return draw_gallery(summary.image_scores, pairs, base, predictor, max_seconds, console)
    except UserError as error:
        return Gallery(note=f"There are no pictures: {first_line(error)}.")
    except Exception as error:  # memory, a driver, a damaged file: more than can be listed
        return Gallery(note=f"There are no pictures: predicting them failed ({type(error).__name__}: {str(error)[:300]}).")


def load_predictor(model: Path, device: str, data_dir: Path | None) -> tuple[Sequence[Pair], Predictor]:
    """With the validation pairs. Raises UserError."""
    from unet_trainer.inference.engine import load_engine
    from unet_trainer.inference.inputs import find_validation_pairs
    from unet_trainer.inference.predictor import Predictor

    return find_validation_pairs(model, data_dir), Predictor(load_engine(model, device))


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
    chosen = [(score, group, by_name.get(score.image)) for score, group in choose_images(scores)]
    deadline = time.monotonic() + max_seconds
    pictures: list[Picture] = []
    reasons: list[str] = []
    num_late = 0
    with (console or silent_console()).bar("Predicting images for the report:", len(chosen), keep=False) as bar:
        for score, group, pair in chosen:
            if time.monotonic() > deadline:
                num_late += 1
                continue
            if pair is None:
                reasons.append(f"{score.image} is not in {data_dir} any more")
                continue
            try:
                pictures.append(draw_picture(predictor, pair, score, group, MAX_BYTES // len(chosen), deadline))
            except _LateError:
                num_late += 1
            except DataError as error:
                reasons.append(f"{pair.shown_image}: {first_line(error)}")
            bar.tick()
    notes = [f"{counted(len(reasons), 'image')} could not be shown ({reasons[0]})."] if reasons else []
    if num_late:
        notes.append(f"{counted(num_late, 'image')} more would have taken longer than {max_seconds:.0f} s.")
    return Gallery(pictures, predictor.spec.id_colours, " ".join(notes))


class _LateError(Exception):
    """A large image would take longer than there is time for."""


def draw_picture(
    predictor: Predictor, pair: Pair, score: ImageScore, group: Group, max_bytes: int, deadline: float = math.inf
) -> Picture:
    """Raises DataError for a file that cannot be read or is too large, and for one that the model does not take."""
    from unet_trainer.inference.predictor import TiledLogits, all_ids, check_image
    from unet_trainer.inference.try_server import decode_for_page, read_truth

    spec = predictor.spec
    image = decode_for_page(read_bytes(pair.image), spec.image)
    height, width = image.shape[:2]
    if height * width > MAX_PIXELS:
        raise DataError(f"{width}×{height} pixels; a report shows images of up to {MAX_PIXELS // 10**6} megapixels")
    truth = read_truth(pair.mask, spec.coding, (height, width))
    logits = predictor.predict_image(image)
    if isinstance(logits, TiledLogits):

        def stop_in_time(num_tiles: int) -> None:
            if time.monotonic() > deadline:
                raise _LateError

        logits.on_tiles = stop_in_time
    ids = all_ids(logits)
    display = to_display(check_image(image, spec.image))

    def drawn(side: int, quality: int) -> Picture:
        factor = min(1.0, side / max(height, width))
        shown = max(1, round(height * factor)), max(1, round(width * factor))
        in_truth, in_prediction = (class_layer(resize_mask(mask, shown), spec.id_colours) for mask in (truth, ids))
        errors = error_layer(error_kinds(truth, ids, shown, is_binary=spec.num_classes == 1))
        photo, kind = encode_photo(fit_image(display, shown), quality)
        return Picture(score, group, (height, width), shown, photo, kind, in_truth, in_prediction, errors)

    for size in SIZES:
        picture = drawn(*size)
        if picture.num_bytes <= max_bytes:
            break
    return picture


def encode_photo(pixels: Pixels, quality: int) -> tuple[bytes, str]:
    """RGB → a compressed file and its type."""
    kind, option = ("webp", cv2.IMWRITE_WEBP_QUALITY) if cv2.haveImageWriter(".webp") else ("jpeg", cv2.IMWRITE_JPEG_QUALITY)
    done, buffer = cv2.imencode(f".{kind}", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [option, quality])
    assert done
    return buffer.tobytes(), f"image/{kind}"


def class_layer(ids: Pixels, colours: Sequence[Colour]) -> bytes:
    """Every class but 0 in its colour; a PNG. Tinted, hatched, and outlined with a line in its colour and one of black or white
    within it, so that it is seen on an image of the same colour."""
    num_ids, side = len(colours), max(ids.shape)
    palette = [(*colour, FILL if index else 0) for index, colour in enumerate(colours)]
    shown = np.where(ids == IGNORED, np.uint8(num_ids), ids) if num_ids < IGNORED else ids
    palette.append((*IGNORED_COLOUR, FILL))
    if num_ids <= MAX_OUTLINED:
        palette += [*((*colour, LINE) for colour in colours), (*BLACK, CONTRAST), (*WHITE, CONTRAST)]
        line = max(1, side // 256)
        is_hatch = np.add.outer(*map(np.arange, ids.shape)) % max(8, side // 24) < line
        is_outline, is_near = (_is_near_border(ids, distance) for distance in (line, 2 * line))
        is_dark = np.array([np.dot(colour, (0.3, 0.6, 0.1)) < 128 for colour in colours])
        lines = np.where(is_near & ~is_outline, 2 * num_ids + 1 + is_dark[np.minimum(ids, num_ids - 1)], ids + num_ids + 1)
        shown = np.where((is_hatch | is_near) & (ids != 0) & (ids != IGNORED), lines, shown).astype(np.uint8)
    return _palette_png(shown, palette[:256])


def _is_near_border(ids: Pixels, distance: int) -> NDArray[np.bool_]:
    kernel = np.ones((2 * distance + 1, 2 * distance + 1), np.uint8)
    return np.asarray(cv2.dilate(ids, kernel) != cv2.erode(ids, kernel))


def error_layer(kinds: Pixels) -> bytes:
    """Darkens what is right; errors in their colours."""
    palette = [(0, 0, 0, DIM), *((*ERROR_COLOURS[kind], 235) for kind in sorted(ERROR_COLOURS))]
    return _palette_png(kinds, palette)


def _palette_png(indices: Pixels, palette: Sequence[tuple[int, int, int, int]]) -> bytes:
    picture = Image.fromarray(np.ascontiguousarray(indices))
    picture.putpalette([value for colour in palette for value in colour[:3]])
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=bytes(colour[3] for colour in palette))
    return file.getvalue()
