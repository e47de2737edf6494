"""The pass over the data: counts by hand, equal to training's own validation, with bounded memory."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from helpers.brightness_engine import BrightnessEngine
from helpers.evaluated_models import bright, write_pairs
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image, write_image
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.inference import evaluate as evaluate_module
from unet_trainer.inference import tile_blending as logits_module
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


@pytest.mark.parametrize(("as_trained", "whole"), [(False, 1000), (False, 10**6), (True, 1000)])
def test_images_are_tiled_large_or_small(tmp_path, as_trained, whole):
    """A model that looks at single pixels sees the same in tiles as in the whole image."""
    ids = np.random.default_rng(0).integers(0, 2, (70, 90)).astype(np.uint8)
    pairs = write_pairs(tmp_path, [(bright(ids), ids * 255)])
    engine = BrightnessEngine(image_size=(32, 32))
    evaluated = evaluate_pairs(pairs, engine, Options(as_trained=as_trained), tile=(48, 48), whole=whole)
    assert evaluated.num_wrong.tolist() == [0]
    assert {shape[1:3] for shape in engine.shapes} == {(32, 32) if as_trained else (48, 48)}


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


def test_memory_does_not_grow_with_the_number_of_images(tmp_path, monkeypatch):
    """Of 60 images few are alive at a time: those read ahead, a batch, those being scored, and the ten worst predictions."""
    monkeypatch.setitem(logits_module.BATCH_PIXELS, "cpu", 2 * 16 * 16)
    empty = np.zeros((16, 16), np.uint8)
    pairs = write_pairs(tmp_path, [(bright(empty), empty)]) * 60
    alive = weakref.WeakSet()
    most = 0

    class Counted(Sample):
        __hash__ = object.__hash__

        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(evaluate_module, "Sample", Counted)

    def tick():
        nonlocal most
        most = max(most, len(alive))

    evaluated = evaluate(reader_of(pairs, BrightnessEngine()), Options(), tick)
    assert len(evaluated.counts) == 60
    assert 1 <= most <= 2 * evaluate_module.MAX_THREADS + 4
    assert len(evaluated.worst) == 10


def test_the_pass_ends_its_threads_when_it_is_interrupted(tmp_path):
    import threading

    empty = np.zeros((16, 16), np.uint8)
    pairs = write_pairs(tmp_path, [(bright(empty), empty)]) * 30
    before = threading.active_count()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(reader_of(pairs, BrightnessEngine()), Options(), interrupt)
    assert threading.active_count() == before
