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
# Distinct on most images and with common colour blindness; more classes than colours start from the first again.
COLOURS = np.array(
    [[0, 200, 120], [255, 130, 0], [60, 130, 255], [230, 60, 160], [240, 220, 0], [150, 90, 220], [0, 200, 230], [170, 110, 60]],
    np.uint8,
)
BACKGROUND_COLOUR = (0, 0, 0)
IGNORED_COLOUR = (128, 128, 128)


def class_colours(num_ids: int) -> tuple[tuple[int, int, int], ...]:
    """RGB of each class id, background first."""
    others = [COLOURS[index % len(COLOURS)] for index in range(num_ids - 1)]
    return (BACKGROUND_COLOUR, *((int(red), int(green), int(blue)) for red, green, blue in others))


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


def overlay(image: Pixels, ids: Pixels) -> Pixels:
    """H,W,3 image with every class but 0 tinted and outlined in its colour; ignored pixels are grey."""
    result = image.copy()
    for class_id in np.unique(ids):
        if class_id == 0:
            continue
        is_class = ids == class_id
        colour = np.array(IGNORED_COLOUR) if class_id == IGNORED else COLOURS[(int(class_id) - 1) % len(COLOURS)]
        result[is_class] = (0.6 * image[is_class] + 0.4 * colour).astype(np.uint8)
        outlines, _ = cv2.findContours(is_class.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(result, outlines, -1, [int(c) for c in colour], 1)
    return result


def overlay_rows(image: Pixels, ids: Pixels, above: Pixels | None, below: Pixels | None, colours: Pixels) -> Pixels:
    """As `overlay`, of some rows of an image. `above` and `below`: ids of the row before and after, None at the image's edge.

    Outlines lie on the border between two classes, not along the edge of the image. `colours`: 256,3, by id.
    """
    around = np.vstack([ids[:1] if above is None else above, ids, ids[-1:] if below is None else below])
    around = cv2.copyMakeBorder(around, 0, 0, 1, 1, cv2.BORDER_REPLICATE)
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    is_border = (cv2.dilate(around, cross) != cv2.erode(around, cross))[1:-1, 1:-1]
    colour = colours[ids]
    tinted = cv2.addWeighted(image, 0.6, colour, 0.4, 0)
    return np.where((ids == 0)[:, :, None], image, np.where(is_border[:, :, None], colour, tinted))


def contact_sheet(pictures: Sequence[tuple[Pixels, Pixels]], labels: Sequence[str], columns: int = 4) -> Pixels:
    """Each image with its overlay beside it and its label above; a row is as high as its highest image."""
    rows = []
    num_places = min(columns, len(pictures))
    for start in range(0, len(pictures), columns):
        shown = pictures[start : start + columns]
        height = max(_shape_in_box(image, CELL)[0] for image, _ in shown)
        cells = [_beside([_into_box(image, CELL, height), _into_box(overlay(image, ids), CELL, height)]) for image, ids in shown]
        captions = [_caption(label, cells[0].shape[1]) for label in labels[start : start + columns]]
        cells = [np.vstack(parts) for parts in zip(captions, cells, strict=True)]
        rows.append(_beside([*cells, *[np.full_like(cells[0], 255)] * (num_places - len(cells))], gap=3 * GAP))
    return np.vstack([part for row in rows for part in (row, np.full((2 * GAP, row.shape[1], 3), 255, np.uint8))][:-1])


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
