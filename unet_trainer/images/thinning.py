"""Centre lines of a mask: thinning by Guo and Hall (1989), in the form of Lam, Lee and Suen (1992).

Pixels are removed from the edge inwards, in two alternating passes, while the 8-connected parts of the mask stay what they are:
none falls apart, none vanishes. The result is a line of one pixel's width.
"""

from __future__ import annotations

import cv2
import numpy as np

from unet_trainer.images.image_files import Pixels

# Neighbours of a pixel, anticlockwise from the right, as the bits of a number: right 1, upper right 2, above 4, ...
NEIGHBOURS = np.array([[8, 4, 2], [16, 0, 1], [32, 64, 128]], np.float32)


def thin(mask: Pixels) -> Pixels:
    """H,W mask (0: outside) → H,W uint8 of 0 and 1. Beyond the border of the image nothing belongs to the mask."""
    lines = cv2.copyMakeBorder((mask != 0).astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    has_changed = True
    while has_changed:
        has_changed = False
        for is_removable in REMOVABLE:
            removed = cv2.LUT(cv2.filter2D(lines, -1, NEIGHBOURS, borderType=cv2.BORDER_CONSTANT), is_removable) & lines
            if cv2.countNonZero(removed):
                lines ^= removed
                has_changed = True
    return np.ascontiguousarray(lines[1:-1, 1:-1])


def _removable_pixels() -> tuple[Pixels, Pixels]:
    """For the first and the second pass: whether a pixel with these neighbours is removed. Names as in the paper."""
    tables = np.zeros((2, 256), np.uint8)
    for code in range(256):
        x = [0, *(code >> bit & 1 for bit in range(8))]  # x[1] to x[8]
        x.append(x[1])
        crossings = sum(not x[2 * k - 1] and bool(x[2 * k] or x[2 * k + 1]) for k in range(1, 5))
        n1 = sum(x[2 * k - 1] | x[2 * k] for k in range(1, 5))
        n2 = sum(x[2 * k] | x[2 * k + 1] for k in range(1, 5))
        if crossings == 1 and 2 <= min(n1, n2) <= 3:
            tables[0, code] = not ((x[2] or x[3] or not x[8]) and x[1])
            tables[1, code] = not ((x[6] or x[7] or not x[4]) and x[5])
    return tables[0], tables[1]


REMOVABLE = _removable_pixels()
