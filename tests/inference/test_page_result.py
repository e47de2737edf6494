"""What the page shows of an image: numbers worked out by hand, sizes that a browser can hold, refusals before decoding."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import bright_predictor
from helpers.image_bytes import grey_png, tiff_bytes
from helpers.try_page import parse_result
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.inference import try_server
from unet_trainer.inference.try_server import (
    decode_for_page,
    predict_for_page,
)


def grey(levels):
    """Rows of levels → H,W,3 uint8."""
    return np.repeat(np.array(levels, np.uint8)[:, :, None], 3, axis=2)


def shown(parts, name, header):
    """An array of the message."""
    shape = header["probability_grid"] if name == "probabilities" else header["display"]
    return np.frombuffer(parts[name], np.uint8).reshape(shape)


def test_ids_shares_and_probabilities_are_those_of_the_model():
    image = grey([[0, 255, 130, 120], [10, 20, 250, 129]])
    header, parts = parse_result(predict_for_page(bright_predictor(), image))
    assert shown(parts, "ids", header).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert (header["height"], header["width"], header["shares"]) == (2, 4, [0.5, 0.5])
    # Level 130: logits 0 and 2, so the foreground has the probability 1 / (1 + exp(-2)) = 0.88080, which is 224.6 / 255.
    assert shown(parts, "probabilities", header)[:, 0, [2, 0]].tolist() == [[30, 255], [225, 0]]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(parts["image"]))), image)
    assert (header["iou"], header["device"], "truth" in parts) == (None, "cpu, float32", False)


def test_a_large_image_is_shown_small_and_its_mask_is_whole(monkeypatch):
    monkeypatch.setattr(try_server, "DISPLAY_PIXELS", 16)
    monkeypatch.setattr(try_server, "PROBABILITY_BYTES", 8)
    levels = np.zeros((8, 8), np.uint8)
    levels[:, 4:] = 255
    truth = (levels > 0).astype(np.uint8)
    truth[0] = 1  # four pixels of the first row are missed
    header, parts = parse_result(predict_for_page(bright_predictor(), grey(levels), truth))
    assert shown(parts, "ids", header).tolist() == [[0, 0, 1, 1]] * 4  # every second pixel
    assert shown(parts, "truth", header).tolist() == [[0, 0, 1, 1]] * 4  # rows 1, 3, 5, 7
    assert shown(parts, "probabilities", header).tolist() == [[[255, 0]] * 2, [[0, 255]] * 2]
    assert np.asarray(Image.open(io.BytesIO(parts["image"]))).shape == (4, 4, 3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(parts["mask"]))), levels > 0)
    assert header["iou"] == pytest.approx(32 / 36)


# Files


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(try_server, "MAX_PIXELS", 50_000_000)
    monkeypatch.setattr(try_server, "decode_image", lambda data, min_side: pytest.fail("decoded"))
    data = grey_png(8000, 8000, 1, b"")
    with pytest.raises(
        ReadError, match=r"^8000×8000 pixels; the page takes up to 50 megapixels, and python train_unet.py predict takes"
    ):
        decode_for_page(data)


def test_the_pages_of_a_tiff_count(monkeypatch):
    """Pillow tells the size of the first page only, and nothing of a kind that it does not know."""
    data = tiff_bytes(np.zeros((20, 50, 60), np.float64), compression="zlib", photometric="minisblack")
    assert len(data) < 20_000
    monkeypatch.setattr(try_server, "MAX_DECODED_BYTES", 20 * 50 * 60 * 8 - 1)
    with pytest.raises(ReadError, match=r"^a TIFF of 0\.0 GB; the page takes up to 0\.0 GB"):
        decode_for_page(data)
    monkeypatch.setattr(try_server, "MAX_DECODED_BYTES", 20 * 50 * 60 * 8)
    assert decode_for_page(data).shape == (50, 60, 20)
