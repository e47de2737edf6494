"""Writes the demo dataset: cells on textured tissue with debris and noise. The same pixels every time."""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config, is_demo_dir
from unet_trainer.data.place import Place
from unet_trainer.images.image_decoding import Pixels, write_image
from unet_trainer.system.locks import draft_folder
from unet_trainer.system.os_errors import cannot

DRAFT = ".demo-"  # begins the names of folders that are being filled
NUM_IMAGES = 240
SIDE = 192
SEED = 2018

Floats = NDArray[np.float32]


def find(place: Place, config: Config) -> None:
    """Writes the demo where data_dir names it and it is missing; its pairs are found as those of any folder."""
    if is_demo_dir(place.data_dir) and ensure_demo(place.data_dir) and place.console is not None:
        place.console.say(f"Made the demo dataset in {place.data_dir}")


def ensure_demo(folder: Path) -> bool:
    """Writes the demo dataset unless the folder exists; returns whether it was written. Never leaves an incomplete
    folder, and removes what a process that was killed left of one. Raises UserError."""
    try:
        if folder.exists():
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder.parent, DRAFT) as drafts:
            write_demo(drafts / folder.name, NUM_IMAGES)
            try:
                (drafts / folder.name).rename(folder)  # fails if another process has just filled that folder
            except OSError:
                if not folder.exists():
                    raise
    except FileExistsError:
        raise UserError(f"data_dir: {folder} cannot be made; {folder.parent} is not a folder") from None
    except OSError as error:
        raise cannot(f"data_dir: {folder}, the demo,", "be made", error, folder.parent) from None
    return True


def write_demo(folder: Path, num_images: int, side: int = SIDE) -> None:
    """images/cells_000.jpg and masks/cells_000.png, masks in {0, 255}."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for index in range(num_images):
        image, mask = draw_sample(index, side)
        write_image(folder / "images" / f"cells_{index:03d}.jpg", image)
        write_image(folder / "masks" / f"cells_{index:03d}.png", mask)


def draw_sample(index: int, side: int = SIDE) -> tuple[Pixels, Pixels]:
    """Image and mask number `index`; they depend on nothing else but `side`."""
    rng = np.random.default_rng([SEED, index])
    image = _tissue(rng, side)
    _draw_shadows(rng, image)
    _draw_fibres(rng, image)
    mask = np.zeros((side, side), np.uint8)
    for _ in range(rng.integers(4, 10)):
        _draw_cell(rng, image, mask)
    return _photograph(rng, image), mask


def _texture(rng: np.random.Generator, side: int, coarsest: int, octaves: int) -> Floats:
    """Smooth noise of several scales, about -1 to 1."""
    total = np.zeros((side, side), np.float32)
    for octave in range(octaves):
        cells = coarsest * 2**octave
        grid = rng.standard_normal((cells, cells)).astype(np.float32)
        total += cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC) * 0.6**octave
    return (total / 2).astype(np.float32)


def _tissue(rng: np.random.Generator, side: int) -> Floats:
    """H,W,3 in 0 to 1: pale, mottled, tinted differently in each image."""
    base = np.array([0.80, 0.68, 0.76], np.float32) + rng.uniform(-0.05, 0.05, 3).astype(np.float32)
    mottle = _texture(rng, side, coarsest=3, octaves=5)[:, :, None]
    return base + mottle * np.array([0.06, 0.09, 0.06], np.float32)


def _draw_shadows(rng: np.random.Generator, image: Floats) -> None:
    """Stains as dark as cells, but soft and without grain or rim, so that brightness does not identify the cells."""
    side = image.shape[0]
    rows, columns = np.mgrid[:side, :side].astype(np.float32)
    for _ in range(rng.integers(1, 4)):
        y, x = rng.uniform(0, side, 2)
        distance = np.hypot(rows - y, (columns - x) * rng.uniform(0.6, 1.6)) / (rng.uniform(0.12, 0.25) * side)
        image *= 1 - rng.uniform(0.25, 0.45) * np.exp(-(distance**2)).astype(np.float32)[:, :, None]


def _draw_fibres(rng: np.random.Generator, image: Floats) -> None:
    """Strands and specks in the colours of the cells."""
    side = image.shape[0]
    for _ in range(rng.integers(3, 8)):
        start, stop = rng.uniform(0, side, (2, 2))
        bend = (start + stop) / 2 + rng.normal(0, side / 8, 2)
        t = np.linspace(0, 1, 24)[:, None]
        curve = (1 - t) ** 2 * start + 2 * t * (1 - t) * bend + t**2 * stop
        colour = [float(c) for c in rng.uniform((0.55, 0.35, 0.50), (0.75, 0.55, 0.70))]
        cv2.polylines(image, [curve.astype(np.int32)], False, colour, int(rng.integers(1, 3)), cv2.LINE_AA)
    for x, y in rng.integers(0, side, (rng.integers(10, 30), 2)):
        radius, colour = int(rng.integers(1, 3)), [float(c) for c in rng.uniform(0.3, 0.6, 3)]
        cv2.circle(image, (int(x), int(y)), radius, colour, -1, cv2.LINE_AA)


def _draw_cell(rng: np.random.Generator, image: Floats, mask: Pixels) -> None:
    """An irregular blob with a darker rim and its own grain; cells may overlap."""
    side = image.shape[0]
    angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    radius = rng.uniform(0.08, 0.17) * side * np.ones_like(angles)
    for wave in range(2, 6):
        radius *= 1 + rng.normal(0, 0.12 / wave) * np.cos(wave * angles + rng.uniform(0, 2 * np.pi))
    outline = np.stack([np.cos(angles) * radius, np.sin(angles) * radius * rng.uniform(0.65, 1.0)], 1)
    tilt = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(tilt), -np.sin(tilt)], [np.sin(tilt), np.cos(tilt)]])
    outline = (outline @ turn + rng.uniform(0.05, 0.95, 2) * side).astype(np.int32)
    shape = np.zeros_like(mask)
    cv2.fillPoly(shape, [outline], 255)
    depth = cv2.distanceTransform(shape, cv2.DIST_L2, 3)
    rim = np.exp(-depth / (0.02 * side))[:, :, None]
    body = rng.uniform((0.36, 0.22, 0.48), (0.62, 0.44, 0.70)).astype(np.float32)
    grain = _texture(rng, side, coarsest=16, octaves=3)[:, :, None] * 0.07
    cell = body * (1 - 0.35 * rim) + grain
    inside = shape > 0
    image[inside] = (0.12 * image + 0.88 * cell)[inside]
    mask[inside] = 255


def _photograph(rng: np.random.Generator, image: Floats) -> Pixels:
    """Uneven light, a little blur and sensor noise."""
    side = image.shape[0]
    light = 1 + 0.15 * _texture(rng, side, coarsest=2, octaves=1)[:, :, None]
    blurred = cv2.GaussianBlur(image * light, (0, 0), rng.uniform(0.5, 1.0))
    noisy = blurred + rng.normal(0, rng.uniform(0.02, 0.05), image.shape)
    return (np.clip(noisy, 0, 1) * 255).astype(np.uint8)
