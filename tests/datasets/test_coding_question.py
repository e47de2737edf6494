"""The question about mask values: what is shown, and choices of which every one trains as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers.mask_facts import SIDE, facts_of, objects, stripes, with_border
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.datasets.class_files import ClassFile, NamedClass
from unet_trainer.datasets.coding_choice import choose_classes, present_classes
from unet_trainer.datasets.coding_question import ask_for_classes
from unet_trainer.datasets.mask_evidence import MaskEvidence
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.image_files import COLOUR
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, given_coding

RED, GREEN, BLUE = COLOUR + 0xFF0000, COLOUR + 0x00FF00, COLOUR + 0x0000FF


def masks_of(*counts, **others):
    return [MaskFacts(1, sum(count.values()), count, "", **others) for count in counts]


def ask(masks, class_file=None, **settings):
    config = load_config(settings)
    evidence = MaskEvidence(masks, given_coding("nonzero", config.ignore_value).ignored)
    assert choose_classes(config, evidence, class_file) is None
    names = [f"masks/{index}.png" for index in range(len(masks))]
    question = ask_for_classes(config, evidence, names, class_file)
    for choice in question.choices:
        check_that_it_trains(choice, masks, settings)
    return question


def check_that_it_trains(choice, masks, settings):
    """The lines, pasted into a config in place of those that were there, decide every value of the masks."""
    pasted = parse_yaml("\n".join(choice.lines()))
    assert yaml.safe_load("\n".join(choice.lines())).keys() == pasted.keys()
    config = load_config({**settings, **pasted})
    evidence = MaskEvidence(masks, given_coding("nonzero", config.ignore_value).ignored)
    chosen = choose_classes(config, evidence)
    present = present_classes(chosen.coding, evidence)
    assert UNKNOWN not in present
    assert len(present - {IGNORED}) >= 2


def settings_of(question):
    return [dict(choice.settings) for choice in question.choices]


def test_the_question_shows_the_values_and_ends_with_the_lines():
    question = ask(masks_of(*[{0: 700, 40: 200, 200: 100}] * 4))
    assert str(question) == (
        "mask_values: auto cannot tell what the values in the masks mean\n"
        "  0: 70.00% of pixels, in 4 of 4 masks\n"
        "  40: 20.00% of pixels, in 4 of 4 masks\n"
        "  200: 10.00% of pixels, in 4 of 4 masks\n"
        "  One of these goes into the config:\n"
        "    # three classes\n"
        "    num_classes: 3\n"
        "    mask_values: [0, 40, 200]\n"
        "\n"
        "    # 200 is foreground, 40 counts nowhere\n"
        "    num_classes: 1\n"
        "    mask_values: [0, 200]\n"
        "    ignore_value: 40\n"
        "\n"
        "    # 40 is foreground, 200 counts nowhere\n"
        "    num_classes: 1\n"
        "    mask_values: [0, 40]\n"
        "    ignore_value: 200\n"
        "\n"
        "    # any value but 0 is foreground\n"
        "    num_classes: 1\n"
        "    mask_values: nonzero"
    )


def test_two_values_are_asked_for_in_both_orders_with_the_more_frequent_one_as_background_first():
    question = ask(masks_of(*[{1: 300, 2: 700}] * 4))
    assert settings_of(question) == [{"num_classes": 1, "mask_values": (2, 1)}, {"num_classes": 1, "mask_values": (1, 2)}]
    assert "Which of the two is the background?" in str(question)


def test_a_trimap_is_asked_for_with_its_border_ignored():
    """As in the pets: 1 is the pet, 2 the background, 3 the border."""
    pets = [facts_of(np.array([2, 1, 3], np.uint8)[with_border((objects(i, 1, 30) > 0).astype(np.uint8), 2)]) for i in range(6)]
    question = ask(pets)
    assert settings_of(question) == [
        {"num_classes": 1, "mask_values": (2, 1), "ignore_value": 3},
        {"num_classes": 1, "mask_values": (1, 2), "ignore_value": 3},
        {"num_classes": 3, "mask_values": (1, 2, 3)},
    ]
    assert question.choices[0].meaning == "2 is background, 1 is foreground, 3 counts nowhere"


@pytest.mark.parametrize("settings", [{}, {"num_classes": 1}, {"num_classes": 7}])
def test_of_ids_of_objects_one_foreground_is_offered_first(settings):
    question = ask([facts_of(objects(index, 2 + 3 * index).astype(np.uint8)) for index in range(8)], **settings)
    assert settings_of(question) == [{"num_classes": 1, "mask_values": "nonzero"}, {"num_classes": 24}]
    assert "They look like ids of objects" in str(question)


def test_void_is_offered_together_with_the_number_of_classes():
    question = ask([facts_of(with_border(stripes(3, index, width=24), 3)) for index in range(8)])
    assert settings_of(question)[:2] == [{"num_classes": 3, "ignore_value": 3}, {"num_classes": 4}]
    assert "3 is rare, thin and beside other values: is it void" in str(question)


def test_choices_with_the_number_of_classes_that_was_asked_for_come_first():
    masks = masks_of(*[dict.fromkeys(range(12), 100)] * 4)
    assert [choice["num_classes"] for choice in settings_of(ask(masks, num_classes=1))] == [1, 12]
    assert "num_classes: 1 accepts {0, 1}, {0, 255} or 0 and any other value" in str(ask(masks, num_classes=1))
    assert "num_classes: 5 accepts the ids 0 to 4 or any 5 greys" in str(ask(masks, num_classes=5))


def test_ids_that_no_mask_has_are_named():
    question = ask(masks_of(*[dict.fromkeys([0, 1, 2, 4, 5], 100)] * 4))
    assert settings_of(question)[:2] == [{"num_classes": 6}, {"num_classes": 5, "mask_values": (0, 1, 2, 4, 5)}]
    assert question.choices[0].meaning == "ids of 6 classes; no mask has 3"


def test_void_is_offered_beside_ids_of_another_number_than_asked_for():
    question = ask(masks_of(*[dict.fromkeys([0, 1, 2, 255], 100)] * 4), num_classes=1)
    assert {"num_classes": 3, "ignore_value": 255} in settings_of(question)


def test_two_codings_of_one_foreground_can_be_merged():
    question = ask(masks_of({0: 9, 1: 1}, {0: 9, 255: 1}, {0: 9, 1: 1}, {0: 9, 255: 1}))
    assert settings_of(question)[:2] == [
        {"num_classes": 1, "mask_values": (0, (1, 255))},
        {"num_classes": 1, "mask_values": (0, 1), "ignore_value": 255},
    ]
    assert "255 occurs only in masks that hold no class but 0" in str(question)


def test_what_the_user_ignores_stays_ignored():
    question = ask(masks_of(*[{0: 700, 40: 200, 200: 100, 9: 50}] * 4), ignore_value=9)
    assert {"num_classes": 1, "mask_values": (0, 200), "ignore_value": (9, 40)} in settings_of(question)
    assert "9: " not in str(question)


def test_choices_that_contradict_other_settings_are_not_offered():
    masks = masks_of(*[{0: 700, 40: 200, 200: 100}] * 4)
    assert {choice["num_classes"] for choice in settings_of(ask(masks, class_names=["road"]))} == {1}


# Noise and colours


def test_values_of_one_mask_are_named_as_noise_with_their_file_and_may_count_nowhere():
    masks = masks_of(*[{0: 9000, 255: 1000}] * 5, {0: 9000, 255: 990, 7: 6, 9: 4})
    question = ask(masks)
    assert "\n  In one mask only, perhaps noise: 7, 9 in masks/5.png\n" in str(question)
    assert question.choices[0].meaning == "2 values in one mask only count nowhere"
    assert settings_of(question)[0] == {"num_classes": 1, "mask_values": (0, 255), "unknown_values": "ignore"}


def test_noise_beside_ids_and_void_leaves_them_as_they_are():
    masks = masks_of(*[dict.fromkeys([0, 1, 2, 255], 5000)] * 5, {0: 9000, 1: 50, 100: 1})
    expected = {"num_classes": 3, "mask_values": (0, 1, 2), "ignore_value": 255, "unknown_values": "ignore"}
    assert settings_of(ask(masks))[0] == expected


def test_noise_among_colours_is_told_from_the_classes():
    counts = {0: 5000, RED: 3000, GREEN: 2000}
    question = ask(masks_of(*[counts] * 5, {**counts, RED - 0x010000: 3, BLUE: 2}))
    assert settings_of(question)[0] == {
        "num_classes": 3,
        "mask_values": (0, (0, 255, 0), (255, 0, 0)),
        "unknown_values": "ignore",
    }
    assert "#ff0000: 30.00% of pixels, in 6 of 6 masks" in str(question)
    assert "In one mask only, perhaps noise: #0000ff, #fe0000 in masks/5.png" in str(question)


def test_colours_close_to_each_other_are_shown_together():
    counts = {0: 5000, RED: 3000, RED - 0x010000: 40, RED - 0x020000: 60, GREEN: 2000}
    question = ask(masks_of(*[counts] * 4))
    assert "  #ff0000: 30.69% of pixels, with 2 values close to it, in 4 of 4 masks\n" in str(question)
    assert "… 5 values in all" not in str(question)


def test_the_order_of_colours_is_never_guessed():
    question = ask(masks_of(*[{0: 1, RED: 1, GREEN: 1}] * 4), num_classes=3)
    assert {"num_classes": 3, "mask_values": (0, (0, 255, 0), (255, 0, 0))} in settings_of(question)


def test_of_many_values_twelve_are_shown_and_all_are_counted():
    question = ask(masks_of(*[dict.fromkeys(range(0, 200, 2), 10)] * 4), num_classes=2)
    assert "  … 100 values in all (check --json FILE lists them)\n" in str(question)
    assert str(question).count("of pixels") == 12


def test_masks_saved_as_jpeg_are_shown_by_their_main_colours():
    counts = {0: 8000, 1: 500, 2: 100, RED: 600, RED - 0x020000: 50, BLUE: 500, COLOUR + 0x800000: 9}
    question = ask(masks_of(*[counts] * 4, is_lossy=True))
    assert "  #ff0000: 6.66% of pixels, with 1 value close to it, in 4 of 4 masks\n" in str(question)
    assert "  #800000: " not in str(question)
    assert settings_of(question)[0] == {"num_classes": 3, "mask_values": (0, (0, 0, 255), (255, 0, 0))}
    assert question.choices[0].meaning.startswith("a class for each of the 3 most frequent, ")


def test_of_masks_saved_as_jpeg_without_soft_edges_every_colour_is_a_class():
    """The last of them was taken for an edge, since no rarer one follows."""
    question = ask(masks_of(*[{0: 8600, 1: 90, BLUE: 530, GREEN: 440, RED: 390}] * 4, is_lossy=True))
    colours = (0, (0, 0, 255), (0, 255, 0), (255, 0, 0))
    assert settings_of(question)[0] == {"num_classes": 4, "mask_values": colours}


def test_photographs_are_named_for_what_they_are():
    masks = [facts_of(np.random.default_rng(index).integers(0, 256, (SIDE, SIDE), np.uint8)) for index in range(4)]
    question = ask(masks)
    assert "They look like those of photographs; is mask_dir the folder of the masks?" in str(question)
    assert {"num_classes": 1, "mask_values": "above 127"} in settings_of(question)


# Class files


def test_the_classes_of_a_file_are_offered_where_values_are_beside_them():
    file = ClassFile(Path("x/label_colors.txt"), tuple(NamedClass(*one, True) for one in (("a", RED), ("b", GREEN), ("c", BLUE))))
    question = ask(masks_of(*[{RED: 50, GREEN: 30, BLUE: 15, COLOUR + 0x808080 + 1: 5}] * 4), file)
    assert settings_of(question)[0] == {
        "num_classes": 3,
        "class_names": ("a", "b", "c"),
        "mask_values": ((255, 0, 0), (0, 255, 0), (0, 0, 255)),
        "unknown_values": "ignore",
    }
    assert question.choices[0].meaning == "the classes of label_colors.txt; what counts nowhere: other values"


def test_void_of_a_class_file_in_most_pixels_is_asked_for():
    named = (("unlabeled", 0), ("a", RED), ("b", GREEN), ("c", BLUE))
    file = ClassFile(Path("class_dict.csv"), tuple(NamedClass(*one, True) for one in named))
    question = ask(masks_of(*[{0: 900, RED: 50, GREEN: 30, BLUE: 20}] * 4), file)
    first, second = settings_of(question)[:2]
    assert first["class_names"] == ("unlabeled", "a", "b", "c")
    assert (second["class_names"], second["ignore_value"]) == (("a", "b", "c"), 0)
