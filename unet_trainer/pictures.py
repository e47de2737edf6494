"""Pictures for people: image, truth and prediction side by side."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from unet_trainer.images import Pixels
from unet_trainer.masks import IGNORED

GAP = 6
HEADER = 26
MIN_SIDE, MAX_SIDE = 160, 320  # small images are shown larger, large ones smaller
# Distinct on most images and for most eyes; class ids beyond the list begin again.
COLOURS = np.array(
    [[0, 200, 120], [255, 130, 0], [60, 130, 255], [230, 60, 160], [240, 220, 0], [150, 90, 220], [0, 200, 230], [170, 110, 60]],
    np.uint8,
)


def overlay(image: Pixels, ids: Pixels, first_shown: int = 1) -> Pixels:
    """H,W,3 image with each class from `first_shown` on tinted and outlined; ignored pixels grey."""
    result = image.copy()
    for class_id in np.unique(ids):
        if class_id < first_shown:
            continue
        inside = ids == class_id
        colour = np.array([128, 128, 128]) if class_id == IGNORED else COLOURS[(int(class_id) - first_shown) % len(COLOURS)]
        result[inside] = (0.6 * image[inside] + 0.4 * colour).astype(np.uint8)
        outlines, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(result, outlines, -1, [int(c) for c in colour], 1)
    return result


def sample_sheet(images: Sequence[Pixels], truths: Sequence[Pixels], predictions: Sequence[Pixels], columns: int = 2) -> Pixels:
    """A sheet of triples image | truth | prediction, `columns` triples in a row, under a header."""
    triples = [
        _beside([_fit(image), _fit(overlay(image, truth)), _fit(overlay(image, predicted))])
        for image, truth, predicted in zip(images, truths, predictions, strict=True)
    ]
    triples += [np.full_like(triples[0], 255)] * (-len(triples) % columns)
    rows = [_beside(triples[start : start + columns], gap=3 * GAP) for start in range(0, len(triples), columns)]
    sheet = np.vstack([part for row in rows for part in (row, np.full((GAP, row.shape[1], 3), 255, np.uint8))][:-1])
    return np.vstack([_header(triples[0].shape[1], sheet.shape[1]), sheet])


def _header(triple_width: int, width: int) -> Pixels:
    header = np.full((HEADER, width, 3), 255, np.uint8)
    for start in range(0, width, triple_width + 3 * GAP):
        for index, word in enumerate(("image", "truth", "prediction")):
            x = start + index * (triple_width + GAP) // 3 + 2
            cv2.putText(header, word, (x, HEADER - 8), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (40, 40, 40), 1, cv2.LINE_AA)
    return header


def _beside(pictures: Sequence[Pixels], gap: int = GAP) -> Pixels:
    white = np.full((pictures[0].shape[0], gap, 3), 255, np.uint8)
    return np.hstack([part for picture in pictures for part in (picture, white)][:-1])


def _fit(picture: Pixels) -> Pixels:
    """Small ones by a whole factor, so that pixels stay visible as such."""
    longest, shortest = max(picture.shape[:2]), min(picture.shape[:2])
    if longest > MAX_SIDE:
        return cv2.resize(picture, None, fx=MAX_SIDE / longest, fy=MAX_SIDE / longest, interpolation=cv2.INTER_AREA)
    factor = max(1, min(-(-MIN_SIDE // shortest), MAX_SIDE // longest))
    return cv2.resize(picture, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
