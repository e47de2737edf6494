"""The proof that an export computes the same: it finds every difference that matters, and says what was compared."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from helpers.checkpoints import FOUR_FLOATS, GREY_16BIT, make_card, random_batch, small_segmenter, small_spec
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.inference.export_check import (
    Comparison,
    ExportError,
    ExportNetwork,
    compare,
    comparison_images,
    example_batch,
    exporting,
    quiet,
)

SPEC = small_spec()
CARD = make_card(SPEC)


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


@pytest.mark.parametrize("spec", [SPEC, small_spec(FOUR_FLOATS, num_classes=3)], ids=["one class", "three classes"])
def test_the_exported_network_takes_channels_first_and_gives_what_the_model_gives(spec):
    segmenter = small_segmenter(spec)
    images = random_batch(spec, 2, 64, 96)
    found = ExportNetwork(segmenter)(images.permute(0, 3, 1, 2).float())
    assert found.shape == (2, spec.num_ids, 64, 96)
    assert torch.allclose(found, segmenter(images), atol=1e-5)


@pytest.mark.parametrize("image", [RGB_8BIT, GREY_16BIT, FOUR_FLOATS], ids=lambda image: image.depth)
def test_images_to_compare_are_like_those_of_training(image):
    card = make_card(small_spec(image))
    images = comparison_images(card, 3, 64, 96)
    assert images.shape == (3, 64, 96, image.channels)
    assert images.dtype == (torch.uint8 if image.depth == "uint8" else torch.float32)
    spread = images.float().std((0, 1, 2)) / torch.tensor(image.std)
    offset = (images.float().mean((0, 1, 2)) - torch.tensor(image.mean)).abs() / torch.tensor(image.std)
    assert (spread > 0.4).all()
    assert (spread < 1.5).all()
    assert (offset < 0.5).all()
    assert not torch.equal(images[0], images[1])


def test_an_example_has_two_images_with_sides_that_differ():
    """One image, or equal sides, would be taken for constants."""
    example = example_batch(make_card(small_spec(image_size=(100, 4000))))
    assert (example.shape, example.dtype) == ((2, 3, 128, 288), torch.float32)


@pytest.mark.parametrize("pads", [False, True])
def test_several_batches_of_several_sizes_are_compared(pads, segmenter):
    shapes = []

    def run(images):
        shapes.append(tuple(images.shape))
        return segmenter(images) + 1e-5

    found = compare(segmenter, CARD, run, pads=pads)
    assert found.batches == [shape[:3] for shape in shapes]
    assert len({shape[0] for shape in shapes}) == 3
    assert len({shape[1:3] for shape in shapes}) >= 5
    assert any(height % 32 or width % 32 for _, height, width, _ in shapes) == pads
    assert found.difference == pytest.approx(1e-5, rel=0.1)
    assert found.num_pixels == sum(count * height * width for count, height, width, _ in shapes)


def spoiled(segmenter, spoil):
    def run(images):
        logits = segmenter(images).clone()
        spoil(logits)
        return logits

    return run


@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits[-1, -1, -1, -1].add_(0.1),
        lambda logits: logits.mul_(1.01),
        lambda logits: logits[0, 0, 0, 0].fill_(float("nan")),
        lambda logits: logits.copy_(logits.roll(1, 3)),
    ],
    ids=["one pixel", "a scale", "NaN", "a shift"],
)
def test_a_difference_is_an_error(spoil, segmenter):
    with pytest.raises(ExportError, match=r"the exported file computes other logits for \d images? of \d+×\d+: they differ by"):
        compare(segmenter, CARD, spoiled(segmenter, spoil))


def test_another_shape_and_a_file_that_fails_are_errors(segmenter):
    with pytest.raises(ExportError, match=r"gives \(1, 1, 64, 64\) for 1 image of 64×64; need \(1, 2, 64, 64\)"):
        compare(segmenter, CARD, lambda images: segmenter(images)[:, 1:])

    def fail(images):
        raise RuntimeError("no kernel\nfor this")

    with pytest.raises(ExportError, match=r"^the exported file fails for 1 image of 64×64: no kernel$"):
        compare(segmenter, CARD, fail)


def test_sizes_that_the_network_itself_cannot_take_are_left_out(segmenter, monkeypatch):
    forward = type(segmenter).forward

    def forward_of_64(self, images):
        if min(images.shape[1:3]) < 64:
            raise RuntimeError("too small")
        return forward(self, images)

    monkeypatch.setattr(type(segmenter), "forward", forward_of_64)
    found = compare(segmenter, CARD, lambda images: forward(segmenter, images))
    assert (1, 32, 32) not in found.batches
    assert len(found.batches) == 4
    monkeypatch.setattr(type(segmenter), "forward", lambda self, images: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(segmenter, CARD, segmenter)

    def refuse(self, images):
        raise RuntimeError

    monkeypatch.setattr(type(segmenter), "forward", refuse)
    with pytest.raises(ExportError, match="too few of the sizes"):
        compare(segmenter, CARD, segmenter)


def test_what_was_compared_is_said_in_a_line():
    found = Comparison([(1, 64, 64), (3, 32, 160)], 1.5e-5, 16.47, 19_456, 0)
    assert str(found) == (
        "2 batches of 1 to 3 images, 64×64 to 160×32: logits reach 16.5 and differ by 1.5e-05 at most; no pixel changes class"
    )
    assert str(Comparison([(1, 64, 64)], 0.0, 1.0, 4096, 2)).endswith("2 of 4096 pixels change class")


def test_exporters_are_quiet_and_what_they_raise_is_one_line(caplog):
    with quiet():
        warnings.warn("of an exporter", DeprecationWarning, stacklevel=1)
        logging.getLogger("torch.export").error("a traceback")
    assert caplog.records == []
    logging.getLogger("torch.export").error("afterwards")
    assert len(caplog.records) == 1
    error = ValueError("a page of advice")
    error.__cause__ = RuntimeError("the reason\nand a page more")
    with pytest.raises(ExportError, match=r"^the network cannot be traced \(the reason\)$"), exporting():
        raise error
