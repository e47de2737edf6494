"""The validation images that a run shows in samples/: whole images, stitched from their tiles where validation takes tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.overlays import to_display
from unet_trainer.images.tiling import Size, Tile, Tiles, resize_mask
from unet_trainer.loading.dataset import Key, SegmentationDataset

NUM_SAMPLES = 4  # validation images that are shown
MAX_SIDE = 768  # of what is shown of an image that is tiled, in its own pixels: each tile costs a forward pass


@dataclass(frozen=True)
class Placed:
    """Where the counted part of a sample stands in a picture: its rows and columns in both."""

    picture: int
    source: tuple[slice, slice]
    target: tuple[slice, slice]


@dataclass(frozen=True)
class SampleImages:
    """`inputs` go through the model; `pictures` and `truths` are shown beside what `stitch` makes of the result."""

    inputs: Pixels  # N,H,W,C
    pictures: Sequence[Pixels]  # H,W,3 uint8
    truths: Sequence[Pixels]  # H,W class ids
    places: Sequence[Placed]  # of each input

    def stitch(self, ids: Pixels) -> list[Pixels]:
        """N,H,W predicted ids of the inputs → those of each picture."""
        return _stitch(ids, self.places, [truth.shape for truth in self.truths])


def choose_samples(dataset: SegmentationDataset, read: Callable[[Key], tuple[Pixels, Pixels]]) -> SampleImages:
    """A few images, spread over the set; the same in every epoch. `read` gives a sample of the dataset."""
    if isinstance(dataset.tiling, Tiles):
        return _choose_tiles(dataset.tiling, read)
    pairs = [read((0, index)) for index in _spread(len(dataset))]
    height, width = dataset.tiling.size
    whole = slice(0, height), slice(0, width)
    return SampleImages(
        np.stack([image for image, _ in pairs]),
        [to_display(image) for image, _ in pairs],
        [resize_mask(mask, dataset.tiling.size) for _, mask in pairs],
        [Placed(index, whole, whole) for index in range(len(pairs))],
    )


def _spread(number: int) -> list[int]:
    return np.unique(np.linspace(0, number - 1, NUM_SAMPLES).round().astype(int)).tolist()


def _choose_tiles(tiling: Tiles, read: Callable[[Key], tuple[Pixels, Pixels]]) -> SampleImages:
    by_pair = [list(indices) for _, indices in groupby(range(len(tiling)), key=tiling.pair_index)]
    inputs: list[Pixels] = []
    truths: list[Pixels] = []
    places: list[Placed] = []
    shapes: list[Size] = []
    for picture, chosen in enumerate(_spread(len(by_pair))):
        indices = by_pair[chosen]
        tiles = {index: tiling.tiles[index] for index in indices}
        held = {index: _num_marked(read((0, index))[1]) for index in indices}
        rows = _best_range({tiles[index].rows for index in indices}, [(tiles[index].rows, held[index]) for index in indices])
        inside = [index for index in indices if rows[0] <= tiles[index].rows[0] < rows[1]]
        columns = _best_range({tiles[index].columns for index in inside}, [(tiles[index].columns, held[index]) for index in inside])
        for index in (index for index in inside if columns[0] <= tiles[index].columns[0] < columns[1]):
            places.append(_place(tiles[index], picture, rows[0], columns[0]))
            image, truth = read((0, index))  # of the pair that was read last
            inputs.append(image)
            truths.append(truth)
        shapes.append((rows[1] - rows[0], columns[1] - columns[0]))
    return SampleImages(
        np.stack(inputs),
        [to_display(image) for image in _stitch(np.stack(inputs), places, shapes)],
        _stitch(np.stack(truths), places, shapes),
        places,
    )


def _num_marked(ids: Pixels) -> int:
    """Pixels of any class but 0: what is shown of a large image should hold some."""
    return int(((ids != 0) & (ids != IGNORED)).sum())


def _best_range(ranges: set[tuple[int, int]], held: Sequence[tuple[tuple[int, int], int]]) -> tuple[int, int]:
    """Of adjoining ranges along an axis, as many as MAX_SIDE allows, and one at least: those that hold most."""
    ordered = sorted(ranges)
    best = ordered[0]
    most = -1
    for first in range(len(ordered)):
        last = max([first, *(place for place in range(first, len(ordered)) if ordered[place][1] - ordered[first][0] <= MAX_SIDE)])
        start, stop = ordered[first][0], ordered[last][1]
        number = sum(count for (low, high), count in held if start <= low and high <= stop)
        if number > most:
            best, most = (start, stop), number
    return best


def _place(tile: Tile, picture: int, top: int, left: int) -> Placed:
    (first_row, last_row), (first_column, last_column) = tile.rows, tile.columns
    return Placed(
        picture,
        (slice(first_row - tile.top, last_row - tile.top), slice(first_column - tile.left, last_column - tile.left)),
        (slice(first_row - top, last_row - top), slice(first_column - left, last_column - left)),
    )


def _stitch(samples: Pixels, places: Sequence[Placed], shapes: Sequence[Size]) -> list[Pixels]:
    pictures = [np.zeros((*shape, *samples.shape[3:]), samples.dtype) for shape in shapes]
    for sample, place in zip(samples, places, strict=True):
        pictures[place.picture][place.target] = sample[place.source]
    return pictures
