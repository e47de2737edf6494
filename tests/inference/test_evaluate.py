"""The pass over the data: counts by hand, equal to training's own validation, with bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.brightness_engine import BrightnessEngine
from helpers.evaluated_models import bright, write_pairs
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image, write_image
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.inference.evaluate import Options, PairReader, Sample, evaluate, tiled_ids_as_trained
from unet_trainer.inference.predictor import Predictor
from unet_trainer.inference.scores import Count

CODING = MaskCoding((0, 255))


def reader_of(pairs, engine, coding=CODING, resize_masks=False, **options):
    sizes = [read_image(pair.image).shape[:2] for pair in pairs]
    return PairReader(pairs, sizes, coding, resize_masks, Predictor(engine, **options))


def evaluate_pairs(pairs, engine, options=None, **others):
    return evaluate(reader_of(pairs, engine, **others), options or Options())


def square(height, width, rows, columns):
    ids = np.zeros((height, width), np.uint8)
    ids[rows, columns] = 1
    return ids


def test_counts_of_every_image_by_hand(tmp_path):
    truth, found = square(20, 30, slice(0, 10), slice(0, 10)), square(20, 30, slice(0, 10), slice(5, 15))
    empty = np.zeros((8, 8), np.uint8)
    pairs = write_pairs(tmp_path, [(bright(found), truth * 255), (bright(empty), empty), (bright(truth), truth * 255)])
    evaluated = evaluate_pairs(pairs, BrightnessEngine())
    assert evaluated.counts[:, 0, :3].tolist() == [[50, 100, 100], [0, 0, 0], [100, 100, 100]]
    assert evaluated.confusion.tolist() == [[450 + 64 + 500, 50], [50, 150]]
    assert evaluated.num_wrong.tolist() == [100, 0, 0]
    assert evaluated.num_counted.tolist() == [600, 64, 600]
    assert [index for index, _ in evaluated.worst] == [0, 2, 1]  # without an IoU the empty one comes last
    assert (evaluated.worst[0][1] == found).all()


def test_images_of_one_size_go_through_the_network_together_and_results_keep_their_places(tmp_path):
    random = np.random.default_rng(0)
    masks = [random.integers(0, 2, size).astype(np.uint8) for size in ((16, 16), (24, 16), (16, 16), (24, 16), (16, 16))]
    pairs = write_pairs(tmp_path, [(bright(mask), mask * 255) for mask in masks])
    engine = BrightnessEngine(image_size=(16, 16), tile=(32, 32))
    evaluated = evaluate_pairs(pairs, engine)
    assert engine.shapes == [(3, 16, 16, 3), (2, 24, 16, 3)]
    assert evaluated.counts[:, 0, Count.TRUTH].tolist() == [mask.sum() for mask in masks]
    assert evaluated.num_wrong.tolist() == [0] * 5


def test_tiles_as_trained_are_those_of_training_at_every_size():
    """Also beyond the edge of an image that is smaller than a tile."""
    for height, width in ((20, 90), (32, 32), (33, 31), (100, 64)):
        ids = np.random.default_rng(height).integers(0, 2, (height, width)).astype(np.uint8)
        predictor = Predictor(BrightnessEngine())
        sample = Sample(0, predictor.prepare(bright(ids)), ids)
        assert (tiled_ids_as_trained(predictor, sample, None) == ids).all()


def test_a_file_that_changed_since_it_was_looked_at_is_named(tmp_path):
    empty = np.zeros((16, 16), np.uint8)
    pairs = write_pairs(tmp_path, [(bright(empty), empty)] * 2)
    reader = reader_of(pairs, BrightnessEngine())
    write_image(pairs[1].mask, np.full((16, 16), 7, np.uint8))
    with pytest.raises(DataError, match=r"1\.png or its mask .*1\.png has changed"):
        evaluate(reader, Options())
    pairs[1].image.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"images/1\.png: "):
        evaluate(reader, Options())
    write_image(pairs[1].image, np.zeros((16, 16, 3), np.uint16))
    with pytest.raises(DataError, match=r"images/1\.png: 16-bit values; .* has changed"):
        evaluate(reader, Options())
