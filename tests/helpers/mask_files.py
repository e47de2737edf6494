"""Masks of every kind that users have, written by real encoders beside images of discs."""

import cv2
import numpy as np
from PIL import Image

SIDE = 48
NUM_PAIRS = 8


def distance(index):
    """H,W: of each pixel from a centre, at another place for each index."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return np.hypot(rows - 20 - index, columns - 24)


def blob(index):
    """H,W of 0 and 1: a disc."""
    return (distance(index) < 14).astype(np.uint8)


def rings(index):
    """H,W of ids 0, 1, 2."""
    return (distance(index) < 18).astype(np.uint8) + (distance(index) < 9)


def trimap(index):
    """H,W of 1 in a disc, 2 around it and 3 in the border between them, as the Oxford-IIIT pets have them."""
    return np.where(distance(index) < 13, 1, np.where(distance(index) < 16, 3, 2)).astype(np.uint8)


def carla(index):
    """H,W,3 RGB with ids in the red channel, in squares."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    red = np.array([0, 1, 7, 8, 10, 12], np.uint8)[(rows // 12 * 4 + columns // 12 + index) % 6]
    return Image.fromarray(np.dstack([red, np.zeros_like(red), np.zeros_like(red)]))


def bands(index):
    """H,W of ids 0 to 11, four rows each."""
    return np.repeat((np.arange(12, dtype=np.uint8) + index) % 12, 4)[:, None].repeat(SIDE, 1)


def write_dataset(folder, make_mask, extension="png"):
    """`make_mask(index)` gives an array or a PIL image."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    rng = np.random.default_rng(0)
    for index in range(NUM_PAIRS):
        image = rng.integers(0, 60, (SIDE, SIDE, 3)) + 150 * blob(index)[:, :, None]
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{index}.png")
        mask = make_mask(index)
        path = folder / "masks" / f"{index}.{extension}"
        if isinstance(mask, np.ndarray):
            assert cv2.imwrite(str(path), mask)
        else:
            mask.save(path)
    return folder


def palette(ids, colours):
    image = Image.frombytes("P", ids.shape[::-1], ids.tobytes())
    image.putpalette([channel for colour in colours for channel in colour])
    return image


def colour(ids, colours):
    return Image.fromarray(np.array(colours, np.uint8)[ids])


def soft(index):
    """A disc whose edge has all greys."""
    large = cv2.resize(blob(index) * 255, (SIDE * 4, SIDE * 4), interpolation=cv2.INTER_NEAREST)
    return cv2.resize(cv2.GaussianBlur(large, (0, 0), 3), (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def transparent(ids, value):
    """A picture of one colour, of which only the pixels with an id can be seen."""
    return Image.fromarray(np.dstack([np.full((SIDE, SIDE, 3), value, np.uint8), ids * 255]))


def objects(index, number):
    """H,W uint16: ids of discs that do not touch, 1 to `number`."""
    mask = np.zeros((SIDE, SIDE), np.uint16)
    for one in range(number):
        cv2.circle(mask, (6 + 12 * ((one + index) % 4), 6 + 12 * (one // 4)), 4, one + 1, -1)
    return mask


def voc(index):
    """H,W of ids 0 to 20 in squares, with lines of 255 between them."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    ids = (rows // 8 * 6 + columns // 8 + index) % 21
    return np.where((rows % 8 == 0) | (columns % 8 == 0), 255, ids).astype(np.uint8)


def voc_colours():
    """The palette of PASCAL VOC, which LabelMe's converter writes too: 256 colours, of which the last is that of void."""
    bits = (np.arange(256)[:, None, None] >> (3 * np.arange(8)[:, None] + np.arange(3))) & 1
    return (bits << (7 - np.arange(8)[:, None])).sum(1).tolist()


def with_gaps(index, ids, is_lined=True):
    """H,W of these ids in squares, with lines of 255 between them or a block of it."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    mask = np.array(ids, np.uint8)[(rows // 12 * 4 + columns // 12 + index) % len(ids)]
    is_void = (rows % 12 == 0) | (columns % 12 == 0) if is_lined else (rows < 8) & (columns < 20)
    return np.where(is_void, 255, mask).astype(np.uint8)


def with_void(ids):
    ids = ids.copy()
    ids[:4] = 255
    return ids
