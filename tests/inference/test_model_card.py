"""The card: all of it survives JSON, and what is no card is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from helpers.checkpoints import FOUR_FLOATS, make_card
from helpers.steps import make_spec
from unet_trainer.images.mask_coding import MaskCoding
from unet_trainer.inference.model_card import ModelCard, symmetries_of

CARD = make_card(
    make_spec(FOUR_FLOATS, num_classes=3, decoder_channels=(8, 8, 8, 8, 8), decoder_attention="scse"), run_name="Zürich"
)


@pytest.mark.parametrize(
    "card",
    [CARD, make_card(dataclasses.replace(make_spec(), coding=MaskCoding(None, 127, 255)), epoch=None, val_iou=None, symmetries=())],
)
def test_a_card_is_the_same_after_json(card):
    assert ModelCard.from_json(card.to_json()) == card


def test_names_are_readable_in_the_json():
    assert '"run_name": "Zürich"' in CARD.to_json()


def changed(**values):
    content = json.loads(CARD.to_json())
    for name, value in values.items():
        *path, last = name.split("__")
        place = content
        for part in path:
            place = place[part]
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(format=2), r"written by a newer version \(format 2\); this one reads up to 1"),
        (changed(format="1"), "no format number"),
        (changed(symmetries=["diagonal"]), "symmetries cannot be right"),
        (changed(epoch="three", version=9), "epoch, version cannot be right"),
        (changed(val_iou="0.5"), "val_iou cannot be right"),
        (changed(spec__num_classes=0), "channels or num_classes"),
        (changed(spec__image__std=[0.2, 0.2, 0.2, 0.0]), "std of its spec cannot be right"),
    ],
)
def test_what_no_run_can_have_written_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ModelCard.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"format": 1}', "{" * 50, '{"format": 1, "spec": null}'])
def test_text_that_is_no_card_raises_what_the_reader_of_a_file_expects(text):
    with pytest.raises((KeyError, TypeError, ValueError)):
        ModelCard.from_json(text)


@pytest.mark.parametrize(
    ("augmentation", "expected"),
    [
        ("none", ()),
        ("default", ("horizontal_flip", "vertical_flip")),
        ([{"VerticalFlip": {"p": 0.5}}, "HorizontalFlip"], ("horizontal_flip", "vertical_flip")),
        ([{"RandomRotate90": {}}, {"GaussNoise": {}}], ("quarter_turn",)),
        (["D4"], ("horizontal_flip", "vertical_flip", "quarter_turn")),
        (None, ()),
        ([7, {}], ()),
    ],
)
def test_symmetries_are_those_that_the_augmentation_taught(augmentation, expected):
    assert symmetries_of(augmentation) == expected
