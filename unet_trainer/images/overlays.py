"""Images to look at: masks drawn over images, contact sheets, sample sheets and bar charts."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED

GAP = 6
CHART_WIDTH, NAME_WIDTH, NUMBER_WIDTH, BAR_HEIGHT = 720, 210, 80, 32
CELL = 200  # side of an image in a contact sheet
HEADER = 26
SWATCH, MAX_LEGEND = 12, 40  # side of a square of the legend, and its classes
MIN_SIDE, MAX_SIDE = 160, 320  # small images are shown larger, large ones smaller
# Distinct on most images, the first with common colour blindness too; more classes than colours start from the first again.
COLOURS = np.array(
    [
        [0, 200, 120], [255, 130, 0], [60, 130, 255], [230, 60, 160], [240, 220, 0], [150, 90, 220], [0, 200, 230], [170, 110, 60],
        [0, 0, 250], [0, 250, 0], [10, 80, 0], [0, 120, 150], [220, 240, 150], [250, 0, 250], [110, 40, 100], [250, 180, 250],
        [0, 80, 140], [110, 170, 0], [150, 250, 220], [180, 70, 90], [250, 190, 90], [0, 40, 200], [0, 130, 110], [150, 30, 0],
        [130, 170, 240], [120, 120, 10], [180, 250, 0], [240, 160, 170], [0, 60, 160], [130, 250, 110], [250, 120, 90],
        [190, 10, 180], [150, 0, 230], [110, 160, 90], [220, 190, 140], [140, 110, 160], [250, 60, 0], [80, 70, 20],
        [250, 130, 250], [250, 30, 70],
    ],
    np.uint8,
)  # fmt: skip
BACKGROUND_COLOUR = (0, 0, 0)
IGNORED_COLOUR = (128, 128, 128)


def class_colours(num_ids: int, has_background: bool = True) -> tuple[tuple[int, int, int], ...]:
    """RGB of each class id. A class 0 that is no background has the last colour, so that the others keep theirs."""
    return (BACKGROUND_COLOUR if has_background else _colour_of(0), *(_colour_of(index) for index in range(1, num_ids)))


def _colour_of(class_id: int) -> tuple[int, int, int]:
    red, green, blue = COLOURS[(class_id - 1) % len(COLOURS)] if class_id != IGNORED else IGNORED_COLOUR
    return int(red), int(green), int(blue)


def display_range(image: Pixels) -> tuple[float, float]:
    """The values of an image of any depth that are shown as black and white."""
    low, high = np.percentile(image, (1, 99))
    return low, high  # float64 of numpy, so that what is computed with them is too


def to_display(image: Pixels, shown: tuple[float, float] | None = None) -> Pixels:
    """H,W,C of any depth → H,W,3 uint8: the first three channels; depths other than 8 bit are scaled to the values that occur.

    `shown`: the display_range of the whole, where the image is a part.
    """
    if image.dtype != np.uint8:
        low, high = display_range(image) if shown is None else shown
        image = ((image - low) / max(high - low, 1e-12) * 255).clip(0, 255).astype(np.uint8)
    if image.shape[2] == 2:
        return np.dstack([image, np.zeros_like(image[:, :, 0])])
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else np.ascontiguousarray(image[:, :, :3])


def overlay(image: Pixels, ids: Pixels, has_background: bool = True) -> Pixels:
    """H,W,3 image with every class tinted and outlined in its colour, but 0 if it is the background; ignored pixels are grey."""
    result = image.copy()
    for class_id in np.unique(ids):
        if class_id == 0 and has_background:
            continue
        is_class, colour = ids == class_id, _colour_of(int(class_id))
        result[is_class] = (0.6 * image[is_class] + 0.4 * np.array(colour, np.uint8)).astype(np.uint8)
        outlines, _ = cv2.findContours(is_class.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(result, outlines, -1, colour, 1)
    return result


def overlay_rows(image: Pixels, ids: Pixels, above: Pixels | None, below: Pixels | None, colours: Pixels) -> Pixels:
    """As `overlay`, of some rows of an image. `above` and `below`: ids of the row before and after, None at the image's edge.

    Outlines lie on the border between two classes, not along the edge of the image. `colours`: 256,3, by id; a class 0 that is
    black is the background.
    """
    around = np.vstack([ids[:1] if above is None else above, ids, ids[-1:] if below is None else below])
    around = cv2.copyMakeBorder(around, 0, 0, 1, 1, cv2.BORDER_REPLICATE)
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    is_border = (cv2.dilate(around, cross) != cv2.erode(around, cross))[1:-1, 1:-1]
    colour = colours[ids]
    tinted = cv2.addWeighted(image, 0.6, colour, 0.4, 0)
    drawn = np.where(is_border[:, :, None], colour, tinted)
    return drawn if colours[0].any() else np.where((ids == 0)[:, :, None], image, drawn)


def contact_sheet(
    pictures: Sequence[tuple[Pixels, Pixels]],
    labels: Sequence[str],
    columns: int = 4,
    names: Sequence[str] = (),
    has_background: bool = True,
) -> Pixels:
    """Each image with its overlay beside it and its label above; a row is as high as its highest image. `names`: of the classes,
    for a legend below."""
    rows = []
    num_places = min(columns, len(pictures))
    for start in range(0, len(pictures), columns):
        shown = pictures[start : start + columns]
        height = max(_shape_in_box(image, CELL)[0] for image, _ in shown)
        drawn = [(image, overlay(image, ids, has_background)) for image, ids in shown]
        cells = [_beside([_into_box(picture, CELL, height) for picture in both]) for both in drawn]
        captions = [_caption(label, cells[0].shape[1]) for label in labels[start : start + columns]]
        cells = [np.vstack(parts) for parts in zip(captions, cells, strict=True)]
        rows.append(_beside([*cells, *[np.full_like(cells[0], 255)] * (num_places - len(cells))], gap=3 * GAP))
    sheet = np.vstack([part for row in rows for part in (row, np.full((2 * GAP, row.shape[1], 3), 255, np.uint8))][:-1])
    return np.vstack([sheet, legend([ids for _, ids in pictures], names, has_background, sheet.shape[1])])


def legend(masks: Sequence[Pixels], names: Sequence[str], has_background: bool, width: int) -> Pixels:
    """A square and a name for each class that is drawn, and for ignored pixels if a mask has any; in as many rows as it takes."""
    entries = [(name, _colour_of(index)) for index, name in enumerate(names) if index or not has_background][:MAX_LEGEND]
    if any((ids == IGNORED).any() for ids in masks):
        entries.append(("ignored", IGNORED_COLOUR))
    texts = [(name.encode("ascii", "replace").decode(), colour) for name, colour in entries if names]
    rows: list[Pixels] = []
    place = width
    for text, colour in texts:
        length = 3 * GAP + SWATCH + cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)[0][0]
        if place + length > width:
            rows.append(np.full((HEADER, width, 3), 255, np.uint8))
            place = 0
        cv2.rectangle(rows[-1], (place, 7), (place + SWATCH, 7 + SWATCH), colour, -1)
        cv2.putText(rows[-1], text, (place + SWATCH + GAP, 18), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (40, 40, 40), 1, cv2.LINE_AA)
        place += length
    return np.vstack([np.full((0, width, 3), 255, np.uint8), *rows])


def _shape_in_box(picture: Pixels, side: int) -> tuple[int, int]:
    scale = side / max(picture.shape[:2])
    height, width = (max(1, round(length * scale)) for length in picture.shape[:2])
    return height, width


def _into_box(picture: Pixels, side: int, box_height: int) -> Pixels:
    """Scaled to fit into `side` × `side`, on white of `box_height` × `side`."""
    height, width = _shape_in_box(picture, side)
    method = cv2.INTER_AREA if max(picture.shape[:2]) > side else cv2.INTER_NEAREST
    box = np.full((box_height, side, 3), 255, np.uint8)
    box[:height, :width] = cv2.resize(picture, (width, height), interpolation=method)
    return box


def _caption(label: str, width: int) -> Pixels:
    """The label on white. OpenCV draws ASCII only; of a long label the end is kept."""
    text = label.encode("ascii", "replace").decode()
    most = width // 7
    text = text if len(text) <= most else f"...{text[-(most - 3) :]}"
    line = np.full((HEADER - 6, width, 3), 255, np.uint8)
    cv2.putText(line, text, (0, HEADER - 12), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (40, 40, 40), 1, cv2.LINE_AA)
    return line


def _beside(pictures: Sequence[Pixels], gap: int = GAP) -> Pixels:
    white = np.full((pictures[0].shape[0], gap, 3), 255, np.uint8)
    return np.hstack([part for picture in pictures for part in (picture, white)][:-1])


def bar_chart(names: Sequence[str], charts: Sequence[tuple[str, Sequence[float]]]) -> Pixels:
    """Charts below each other, each with its title and a bar for every name."""
    rows = []
    for title, values in charts:
        rows.append(_text_line(title, 0.6))
        longest = max(*values, 1e-12)
        for index, (name, value) in enumerate(zip(names, values, strict=True)):
            row = np.full((BAR_HEIGHT, CHART_WIDTH, 3), 255, np.uint8)
            end = NAME_WIDTH + max(1, round((CHART_WIDTH - NAME_WIDTH - NUMBER_WIDTH) * value / longest))
            cv2.rectangle(row, (NAME_WIDTH, 5), (end, BAR_HEIGHT - 5), [int(c) for c in COLOURS[index % len(COLOURS)]], -1)
            cv2.putText(row, name, (8, 22), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (40, 40, 40), 1, cv2.LINE_AA)
            number = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            cv2.putText(row, number, (end + 8, 22), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (40, 40, 40), 1, cv2.LINE_AA)
            rows.append(row)
    return np.vstack([*rows, np.full((GAP, CHART_WIDTH, 3), 255, np.uint8)])


def _text_line(text: str, scale: float) -> Pixels:
    line = np.full((BAR_HEIGHT + GAP, CHART_WIDTH, 3), 255, np.uint8)
    cv2.putText(line, text, (8, BAR_HEIGHT - 6), cv2.FONT_HERSHEY_SIMPLEX, scale, (40, 40, 40), 1, cv2.LINE_AA)
    return line
