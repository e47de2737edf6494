"""What the values of masks are decided to mean, and the question where only the user knows: every choice trains."""

import cv2
import numpy as np
import pytest
import yaml

from helpers.mask_files import blob, objects, rings, soft, trimap, voc, voc_colours, with_gaps, with_void
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.config.schema import to_plain
from unet_trainer.data.class_files import find_class_file, parse_class_file
from unet_trainer.data.dataset_notices import ask_for_classes
from unet_trainer.data.mask_evidence import MaskEvidence, class_ids, has_background
from unet_trainer.data.mask_reading import choose_classes, possible_readings
from unet_trainer.data.pairs import Pair
from unet_trainer.data.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, UNKNOWN, decode_mask, given_coding
from unet_trainer.images.mask_shapes import measure_structure

SIDE = 96
RED, GREEN, BLUE = COLOUR + 0xFF0000, COLOUR + 0x00FF00, COLOUR + 0x0000FF
VOC = {value: (red << 16) + (green << 8) + blue for value, (red, green, blue) in enumerate(voc_colours())}
COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [64, 0, 128]], np.uint8)


def facts_of(mask, palette=None, is_lossy=False):
    """The facts of an array, as a scan finds them."""
    values, pixels = np.unique(mask, return_counts=True)
    counts = dict(zip(values.tolist(), pixels.tolist(), strict=True))
    structure = measure_structure(mask) if len(counts) > 2 else None
    return MaskFacts(*mask.shape, counts, "", structure=structure, palette=palette, is_lossy=is_lossy)


def evidence_of(masks, config, class_file=None):
    return MaskEvidence(masks, given_coding("nonzero", config.ignore_value).ignored, class_file)


def decide(seen, class_file=None, **settings):
    """From four masks with 100 pixels of each of these values."""
    config, counts = load_config(settings), dict.fromkeys(seen, 100)
    masks = [MaskFacts(10, 10 * len(counts), counts, "")] * 4
    return choose_classes(config, evidence_of(masks, config, class_file))


def ask(masks, hint=""):
    """The settings that the question about these masks offers; each decides every value of them."""
    evidence = MaskEvidence(masks)
    readings = possible_readings(load_config({}), evidence)
    question = ask_for_classes(evidence, [f"masks/{index}.png" for index in range(len(masks))], readings)
    assert hint in str(question)
    for choice in question.choices:
        answered = load_config(parse_yaml("\n".join(choice.lines())))
        evidence = evidence_of(masks, answered)
        present = class_ids(evidence.counts, choose_classes(answered, evidence).coding)
        assert UNKNOWN not in present
        assert len(present.keys() - {IGNORED}) >= 2
    return [to_plain(dict(choice.settings)) for choice in question.choices]


def stripes(values, index, width=8):
    """Rows of these values in turns."""
    return np.asarray(values)[(np.arange(SIDE) // width + index) % len(values)][:, None].repeat(SIDE, 1)


def discs(index):
    """Ids 0 to 3."""
    ids = np.zeros((SIDE, SIDE), np.uint8)
    for number in range(3):
        cv2.circle(ids, (20 + 28 * number, 30 + 30 * ((number + index) % 2)), 14, number + 1, -1)
    return ids


def lined(mask, value):
    """Rows of this value where others meet."""
    return np.where((mask != np.roll(mask, 1, 0)) | (mask != np.roll(mask, -1, 0)), value, mask).astype(mask.dtype)


def encoded(pixels, extension=".png", blur=0.0):
    """The mask that is read from a file of these pixels (RGB or grey)."""
    pixels = cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    pixels = cv2.GaussianBlur(pixels, (0, 0), blur) if blur else pixels
    return decode_mask(cv2.imencode(extension, pixels[..., ::-1] if pixels.ndim == 3 else pixels)[1].tobytes())


def ring(index, width=2):
    """Discs of 255 with a ring of 128, 9 % of the pixels, as JPEG has them."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for number in range(5):
        place = 16 + 30 * (number % 3), 16 + 30 * (number // 3) + 2 * index
        cv2.circle(mask, place, 14, 128, -1)
        cv2.circle(mask, place, 14 - width, 255, -1)
    return encoded(mask, ".jpg")


PALETTE, JPEG = {"palette": VOC}, {"is_lossy": True}
# What makes the masks, and further facts of them → mask_values and ignore_value.
DECIDED = {
    "ids": (rings, {}, (0, 1, 2), None),
    "ids from 1": (lambda i: rings(i) + 1, {}, (1, 2, 3), None),
    "each touches both others": (lambda i: stripes(np.uint8([1, 2, 3]), i), {}, (1, 2, 3), None),
    "a wide border": (lambda i: np.uint8([1, 2, 2, 3])[discs(i)], {}, (1, 2, 3), None),
    "thin lines of 255": (voc, {}, tuple(range(21)), 255),
    "a block of 255": (lambda i: with_void(rings(i)), {}, (0, 1, 2), 255),
    "255 beside an id": (lambda i: with_void(blob(i)), {}, (0, 1), 255),
    "two values": (lambda i: blob(i) * 7, {}, (0, 7), None),
    "black 1, white 0": (blob, {"palette": {0: 0xFFFFFF, 1: 0}}, (1, 0), None),
    "soft edges": (soft, {}, "above 127", None),
    "JPEG": (lambda i: encoded(blob(i) * 255, ".jpg"), JPEG, "above 127", None),
    "VOC": (lambda i: with_gaps(i, (0, 5, 9, 15)), PALETTE, (0, 5, 9, 15), 255),
    "colours": (lambda i: np.int32([0, BLUE, RED])[rings(i)], {}, (0, (0, 0, 255), (255, 0, 0)), None),
    "objects in 16 bit": (lambda i: np.where(objects(i, 3) > 0, objects(i, 3) + 50 * i, 0), {}, "nonzero", None),
}


@pytest.mark.parametrize(("make", "facts", "values", "ignored"), DECIDED.values(), ids=DECIDED)
def test_masks_with_one_meaning_are_decided(make, facts, values, ignored):
    masks = [facts_of(make(index), **facts) for index in range(8)]
    chosen = choose_classes(load_config({}), MaskEvidence(masks))
    assert (chosen.coding.mask_values, chosen.coding.written_ignore_value) == (values, ignored)
    assert chosen.num_classes == (len(values) if isinstance(values, tuple) and len(values) > 2 else 1)


def numbered(index):
    return (objects(index, 3) + 3 * index * (objects(index, 3) > 0)).astype(np.uint8)


def with_light_border(index):
    return lined(stripes(np.int32([0, RED, GREEN, BLUE]), index, 24), COLOUR + 0xFFFFC0)


def with_many_colours(index):
    mask = with_light_border(index)
    mask[5, :] = COLOUR + 256 * np.arange(SIDE) + 9
    mask[8:12, ::2] = COLOUR + 16 * np.arange(4 * SIDE // 2).reshape(4, -1) + 1
    return mask


def with_rare_colour(index):
    return stripes(np.int32([0, RED, GREEN if index == 3 else BLUE, BLUE]), index, 24)


def with_255_apart(index):
    """A disc of 255 on the background, beside one of 1."""
    return cv2.circle(discs(index) // 3, (48, 75), 8, 255, -1)


NONZERO = "num_classes: 1, mask_values: nonzero"
# What makes the masks, and further facts of them → the first settings that are offered, and what the question says.
ASKED = {
    "objects": (lambda i: objects(i, 2 + i).astype(np.uint8), {}, NONZERO, "ids of objects"),
    "visible objects": (lambda i: np.uint8(objects(i, 2 + i % 6) * 30), PALETTE, NONZERO, "ids of objects"),
    "objects numbered through": (numbered, {}, NONZERO, "ids of objects"),
    "0 and 1, or 0 and 255": (lambda i: blob(i) * (255 if i % 2 else 1), {}, NONZERO, ""),
    "trimap": (trimap, {}, "num_classes: 1, mask_values: [2, 1], ignore_value: 3", "3 may be void (pixels to ignore)"),
    "light border": (
        with_light_border,
        {},
        "num_classes: 4, mask_values: [0, [0, 0, 255], [0, 255, 0], [255, 0, 0]], ignore_value: [255, 255, 192]",
        "[255, 255, 192] may be void (pixels to ignore), or a class: which is it?",
    ),
    "255 apart": (with_255_apart, {}, "num_classes: 1, ignore_value: 255", "255 may be void"),
    "light border, and more colours than there may be classes": (
        with_many_colours,
        {},
        "num_classes: 5, mask_values: [0, [0, 0, 255], [0, 255, 0], [255, 0, 0], [255, 255, 192]], mask_tolerance: 48",
        "[255, 255, 192] may be void",
    ),
    "gaps": (
        lambda i: with_gaps(i, (0, 2, 5)),
        {},
        "num_classes: 3, mask_values: [0, 2, 5], ignore_value: 255",
        "255 may",
    ),
    "two without 0": (lambda i: 9 + blob(i), {}, "num_classes: 1, mask_values: [9, 10]", "is the background?"),
    "a colour in one mask": (
        with_rare_colour,
        {},
        "num_classes: 3, mask_values: [0, [0, 0, 255], [255, 0, 0]], unknown_values: ignore",
        "masks/3.png",
    ),
    "soft colours": (
        lambda i: encoded(COLOURS[discs(i)], blur=1),
        {},
        "num_classes: 4, mask_values: [0, [0, 128, 0], [64, 0, 128], [128, 0, 0]], mask_tolerance: 48",
        "",
    ),
    "a ring as JPEG": (
        ring,
        JPEG,
        "num_classes: 3, mask_values: [0, 128, 255], mask_tolerance: 48",
        "saved as JPEG or lossy WebP",
    ),
    "photographs": (
        lambda i: np.random.default_rng(i).integers(0, 256, (SIDE, SIDE), np.uint8),
        {},
        None,
        "They look like those of photographs; is mask_dir the folder of the masks?",
    ),
}


@pytest.mark.parametrize(("make", "facts", "settings", "hint"), ASKED.values(), ids=ASKED)
def test_masks_with_several_meanings_are_asked_about_with_the_likely_one_first(make, facts, settings, hint):
    masks = [facts_of(make(index), **facts) for index in range(8)]
    assert choose_classes(load_config({}), MaskEvidence(masks)) is None
    assert ask(masks, hint)[:1] == ([] if settings is None else [yaml.safe_load(f"{{{settings}}}")])


def test_the_question_shows_the_values_and_ends_with_the_lines():
    masks = [MaskFacts(1, 1000, {0: 700, 40: 200, 200: 100}, "")] * 4
    evidence = MaskEvidence(masks)
    question = ask_for_classes(evidence, ["masks/0.png"] * 4, possible_readings(load_config({}), evidence))
    assert str(question) == (
        "mask_values: auto cannot tell what the values in the masks mean\n"
        "  value | share of pixels | in masks\n"
        "      0 |          70.00% |   4 of 4\n"
        "     40 |          20.00% |   4 of 4\n"
        "    200 |          10.00% |   4 of 4\n"
        "Set one of these:\n"
        "  # a class for each, in an order that you may change\n  num_classes: 3\n  mask_values: [0, 40, 200]\n\n"
        "  # any value but 0 is foreground\n  num_classes: 1\n  mask_values: nonzero"
    )


@pytest.mark.parametrize(
    ("num_classes", "ignore_value", "seen", "expected"),
    [
        (1, None, [0, 255], (0, 255)),
        (3, None, [0, 2], (0, 1, 2)),  # a class may be absent
        (1, 255, [0, 1, 255], (0, 1)),
        (9, [9, 10], list(range(11)), tuple(range(9))),
        (1, 128, [0, 128, 255], (0, 255)),
        (2, None, [38, 75], (38, 75)),
        (3, None, [0, 128, 255], (0, 128, 255)),  # as many greys as classes
        (3, None, [0, BLUE, RED], (0, (0, 0, 255), (255, 0, 0))),
        (1, None, list(range(30)), None),
        (1, None, [0, 700, 1400], None),  # three classes, or two objects
        (3, None, [0, 255], None),  # with 255 as void there would be nothing to learn
        (1, None, [*range(21), 255], None),  # ids and void are no soft edges
    ],
)
def test_num_classes_and_ignore_value_decide_what_values_mean(num_classes, ignore_value, seen, expected):
    chosen = decide(seen, num_classes=num_classes, ignore_value=ignore_value)
    assert expected == (None if chosen is None else chosen.coding.mask_values)
    assert chosen is None or chosen.num_classes == num_classes


def test_colours_saved_as_jpeg_go_to_the_nearest_one_that_is_given():
    config = load_config({"mask_values": COLOURS.tolist()})
    masks = [encoded(COLOURS[discs(index)], ".jpg") for index in range(4)]
    chosen = choose_classes(config, evidence_of([facts_of(mask, is_lossy=True) for mask in masks], config))
    assert (chosen.num_classes, chosen.coding.tolerance) == (4, 48)
    assert "masks saved as JPEG: the nearest value, if it is within 48;" in chosen.coding.reason
    ids = chosen.coding.encode(masks[1])
    assert (ids != IGNORED).mean() > 0.97
    assert (ids == discs(1))[ids != IGNORED].mean() > 0.99


# Class files

NAMES = "\n".join(["background", *(f"thing {index}" for index in range(1, 9))])
COLOURED = "name,r,g,b\nSky,0,0,255\nRoad,255,0,0\nVoid,0,0,0\nTree,0,255,0\nTunnel,0,0,9\n"
TWO = "name,r,g,b\nroad,255,255,255\n{},0,0,0\n"


@pytest.mark.parametrize(
    ("name", "text", "seen", "asked", "expected"),  # number, mask_values, ignored, names
    [
        ("class_dict.csv", COLOURED, [0, RED, GREEN, BLUE], "auto",
         (3, ((0, 0, 255), (255, 0, 0), (0, 255, 0)), (0,), ("Sky", "Road", "Tree"))),
        ("class_dict.csv", TWO.format("background"), [0, 255], "auto", (1, (0, 255), (), ("road",))),
        ("class_dict.csv", TWO.format("rest"), [0, 255], "auto", (1, (0, 255), (), ("road",))),
        ("class_dict.csv", TWO.format("rest"), [0, 255], 2, (2, (255, 0), (), ("road", "rest"))),
        ("class_names.txt", NAMES, [0, 2, 5, 255], "auto", (9, tuple(range(9)), (255,), tuple(NAMES.split("\n")))),
        ("class_names.txt", NAMES, [0, 5, 255], "auto", (1, (0, 5), (255,), ("thing 5",))),
        ("class_names.txt", NAMES, [0, 2, 5, 9], "auto", None),  # more ids than names
        ("classes.txt", "tree\nhouse\nvoid\nroad", [0, 2, 5, 255], "auto", None),
    ],
)  # fmt: skip
def test_a_class_file_gives_values_names_and_void_in_its_order(name, text, seen, asked, expected):
    chosen = decide(seen, parse_class_file(name, text), num_classes=asked)
    if expected is None:
        assert chosen is None
        return
    assert (chosen.num_classes, chosen.coding.mask_values, chosen.coding.ignored, chosen.class_names) == expected
    assert (f" classes in {name}" if asked == "auto" else "by mask_values") in chosen.num_classes_reason


def test_a_palette_links_the_indices_of_masks_to_the_colours_of_a_class_file():
    file = parse_class_file("labelmap.txt", "Road:255,0,0::\nSky:0,0,255::\nVoid:224,224,192::\nrest:0,0,0::\n")
    palette = {0: 0, 1: 0x0000FF, 2: 0xFF0000, 5: 0xE0E0C0}
    masks = [MaskFacts(10, 40, {0: 100, 1: 100, 2: 100, 5: 100}, "", palette=palette)] * 4
    chosen = choose_classes(load_config({}), MaskEvidence(masks, (), file))
    assert chosen.coding.mask_values == (2, 1, 0)
    assert (chosen.class_names, chosen.coding.ignored) == (("Road", "Sky", "rest"), (5,))


FOUND = ("Animal", "Archway", "Void"), (COLOUR + 0x408040, COLOUR + 0xC00080, 0)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("label_colors.txt", "64 128 64\tAnimal\n192 0 128\t\tArchway\n0 0 0\tVoid\n", FOUND),
        ("class_dict.csv", "name,r,g,b\nAnimal,64,128,64\nArchway,192,0,128\nVoid,0,0,0\n", FOUND),
        ("class_dict.csv", '"name","r","g","b"\n"a, wild","9","9","9"\nVoid, 0, 0, 0\n', (("a, wild", "Void"), (9, 0))),
        ("_classes.csv", "Pixel Value, Class\n0, background\n1, Head Light\n", (("background", "Head Light"), (0, 1))),
        ("labelmap.txt", "# label:color\nroad:0,0,0::\ncar:128,0,0::\n", (("road", "car"), (0, COLOUR + 0x800000))),
        ("dataset.json", '{"labels": {"background": 0, "head": 1}}', (("background", "head"), (0, 1))),
        ("classes.txt", "Sky\nRoad\nVoid\n", (("Sky", "Road", "Void"), ())),
        ("class_names.txt", "__ignore__\n_background_\ncat\n", (("_background_", "cat"), ())),
        ("label_colors.txt", "64 128 300 Animal\n0 0 0 Void\n", None),
        ("label_colors.txt", "64 128 64 Animal\n64 128 64 Archway\n", None),  # one colour twice
        ("class_dict.csv", "name,r,g,b\na,1,2\nb,1,2,3\n", None),
        ("class_dict.csv", "", None),
        ("class_dict.csv", "name,r,g,b\nb,1,2,3\n" + 200_000 * "a", None),  # longer than a cell may be
        ("_classes.csv", "filename, cat, dog\na.jpg, 0, 1\nb.jpg, 1, 0\n", None),  # of images, not of pixels
        ("dataset.json", '{"labels": ["a", "b"]}', None),
        ("classes.txt", "person\ncar\n", None),  # of boxes: no background
        ("classes.txt", "Void\nVoid\n", None),
    ],
)
def test_names_and_values_of_a_class_file_are_read_and_another_form_is_left_alone(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = find_class_file(tmp_path, [Pair("a", tmp_path / "images/a.png", tmp_path / "masks/a.png")])
    assert (None if found is None else (found.names, found.values)) == expected


@pytest.mark.parametrize(
    ("names", "shares", "is_background"),
    [
        (["background", "cell"], [0.1, 0.9], True),
        (["_background_", "cell", "wall"], [0.1, 0.5, 0.4], True),
        (["sky", "road", "car"], [0.8, 0.1, 0.1], False),
        (["class 0", "class 1", "class 2"], [0.2, 0.5, 0.3], False),
        (["class 0", "class 1", "class 2"], [0.6, 0.1, 0.3], True),
    ],
)
def test_class_0_is_the_background_by_its_name_or_where_it_has_none_by_its_share(names, shares, is_background):
    assert has_background(names, shares) is is_background
