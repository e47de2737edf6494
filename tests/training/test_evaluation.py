"""Evaluation of a dataset: by hand, whatever the batches, and without a run."""

import math

import cv2
import numpy as np
import pytest
import torch

from helpers.samples import make_dataset
from helpers.steps import CPU, FLOAT32, make_spec, plain_segmenter
from unet_trainer.data.pairs import Pair
from unet_trainer.images.image_decoding import write_image
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding, read_mask
from unet_trainer.images.tiling import WholeImages
from unet_trainer.loading.loader import Loader
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import compute_scores
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.training.evaluation import EvalStep, build_eval_forward, evaluate


def make_eval_step(segmenter, loss="bce", **options):
    weighted = WeightedLoss({loss: 1.0}, segmenter.spec.num_classes, None)
    return EvalStep(build_eval_forward(segmenter, weighted, FLOAT32), segmenter, weighted, CPU, **options)


def loader_of(dataset, batch_size):
    return Loader(dataset, batch_size, shuffle=False)


MIXED_SIZES = [(50, 70), (32, 32), (20, 90), (50, 70), (16, 8), (33, 31)]


def mixed_dataset(folder, num_classes, image_spec, dtype):
    """Blobs brighter than their surroundings, in images larger and smaller than 32×32 and of other shapes; 9 is ignored."""
    random, pairs = np.random.default_rng(0), []
    for number, (height, width) in enumerate(MIXED_SIZES):
        coarse = random.random((4, 4)).astype(np.float32)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        mask = np.clip(smooth * max(2, num_classes), 0, max(2, num_classes) - 1).astype(np.uint8)
        if number == 3:
            mask[:20] = 9
        image = np.repeat((smooth * 255).clip(0, 255)[:, :, None], image_spec.channels, 2).astype(dtype)
        pair = Pair(str(number), folder / f"image{number}.npy", folder / f"mask{number}.png")
        np.save(pair.image, image)
        write_image(pair.mask, mask)
        pairs.append(pair)
    coding = MaskCoding(tuple(range(max(2, num_classes))), ignore_value=9)
    return make_dataset(pairs, coding, WholeImages((32, 32), len(pairs), native_masks=True), image_spec)


def random_segmenter(num_classes, image_spec):
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Conv2d(image_spec.channels, 4, 3, padding=1), torch.nn.ReLU())
    network.append(torch.nn.Conv2d(4, num_classes, 1, bias=False))
    return Segmenter(make_spec(image_spec, num_classes), network, channels_last=True)


def matrix_by_hand(segmenter, dataset):
    """Each image alone: all of its logits upsampled, and every pixel of its mask counted."""
    num_ids = segmenter.spec.num_ids
    matrix = np.zeros((num_ids, num_ids), np.int64)
    for index, pair in enumerate(dataset.pairs):
        mask = read_mask(pair.mask)
        with torch.no_grad():
            logits = segmenter(torch.from_numpy(dataset[0, index][0]).unsqueeze(0))
        upsampled = torch.nn.functional.interpolate(logits, mask.shape, mode="bilinear", align_corners=False)
        ids = upsampled[0].argmax(0).numpy()
        np.add.at(matrix, (mask[mask != 9], ids[mask != 9]), 1)
    return matrix


FLOAT_SPEC = ImageSpec(1, "float", (100.0,), (60.0,), 0.0, 255.0)


@pytest.mark.parametrize(
    ("num_classes", "image_spec", "dtype", "batch_size", "num_parts"),
    [(1, RGB_8BIT, np.uint8, 5, 3), (4, FLOAT_SPEC, np.float32, 4, 1)],
    ids=["binary, in parts", "four classes, float"],
)
def test_scores_are_counted_at_the_masks_own_size(num_classes, image_spec, dtype, batch_size, num_parts, tmp_path):
    dataset = mixed_dataset(tmp_path, num_classes, image_spec, dtype)
    segmenter = random_segmenter(num_classes, image_spec)
    step = make_eval_step(segmenter, num_parts=num_parts, loss="cross_entropy")
    metrics = step.new_metrics()
    for batch in loader_of(dataset, batch_size).epoch(0):
        step(batch, metrics)
    expected = matrix_by_hand(segmenter, dataset)
    assert np.array_equal(metrics.matrix.numpy(), expected)
    assert expected.sum() == sum(height * width for height, width in MIXED_SIZES) - 20 * 70
    assert metrics.num_images == len(MIXED_SIZES)
    found = evaluate(step, loader_of(dataset, batch_size))
    assert found.scores == compute_scores(torch.from_numpy(expected), num_classes)
    assert 0 < found.scores.iou < 1


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 3), (3, 1)])
def test_a_loss_that_is_not_finite_is_nan_and_names_the_first_bad_batch(batch_size, expected, tmp_path):
    """From image 3 of six on."""
    segmenter, dataset = plain_segmenter(), mixed_dataset(tmp_path, 1, RGB_8BIT, np.uint8)
    step = make_eval_step(segmenter, num_parts=2)
    forward, num_seen = step.forward, 0

    def spoiled(*arguments):
        nonlocal num_seen
        sums, counts = forward(*arguments)
        num_seen += len(arguments[0])
        return sums * (math.nan if num_seen > 3 else 1.0), counts

    step.forward = spoiled
    found = evaluate(step, loader_of(dataset, batch_size))
    assert math.isnan(found.loss)
    assert found.first_bad_batch == expected
