"""What the values of masks are decided to mean, and the question where only the user knows: every choice trains as it is."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.datasets.mask_evidence import (
    ClassFile,
    MaskEvidence,
    NamedClass,
    class_ids,
    find_class_file,
    has_background,
)
from unet_trainer.datasets.mask_reading import ask_for_classes, choose_classes
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, UNKNOWN, decode_mask, given_coding
from unet_trainer.images.mask_shapes import measure_structure

SIDE = 96


def facts_of(mask, **others):
    """The facts of an array, as a scan would find them."""
    values, pixels = np.unique(mask, return_counts=True)
    counts = dict(zip(values.tolist(), pixels.tolist(), strict=True))
    structure = measure_structure(mask, max(counts, key=counts.__getitem__)) if len(counts) > 2 else None
    return MaskFacts(*mask.shape, counts, "", structure=structure, **others)


def place(index, number):
    """A place for an object that no other of the mask has."""
    return 8 + 16 * ((number + index) % 6), 8 + 16 * ((number // 6 + index) % 6)


def objects(index, number, radius=6):
    """H,W uint16 with ids 1 to `number` of discs that do not touch."""
    mask = np.zeros((SIDE, SIDE), np.uint16)
    for one in range(number):
        cv2.circle(mask, place(index, one), radius, one + 1, -1)
    return mask


def stripes(num_ids, index=0, width=8):
    """H,W uint8 with ids 0 to `num_ids` - 1 in stripes, several of each."""
    ids = (np.arange(SIDE) // width + index) % num_ids
    return np.repeat(ids.astype(np.uint8)[:, None], SIDE, axis=1)


def with_border(mask, value, width=2):
    """The mask with lines of this value where others meet."""
    square = np.ones((width + 1, width + 1), np.uint8)
    is_edge = cv2.dilate(mask, square) != cv2.erode(mask, square)
    return np.where(is_edge, value, mask).astype(mask.dtype)


RED, GREEN, BLUE = COLOUR + 0xFF0000, COLOUR + 0x00FF00, COLOUR + 0x0000FF


def evidence_of(seen, ignore_value=None, num_masks=4, **others):
    """Masks that all hold these values, 100 pixels of each."""
    counts = dict.fromkeys(seen, 100)
    masks = [MaskFacts(10, 10 * len(counts), counts, "", **others) for _ in range(num_masks)]
    return MaskEvidence(masks, given_coding("nonzero", ignore_value).ignored)


def decide(seen, num_classes="auto", ignore_value=None, class_file=None, **settings):
    config = load_config({"num_classes": num_classes, "ignore_value": ignore_value, **settings})
    return choose_classes(config, evidence_of(seen, config.ignore_value), class_file)


def decide_masks(make, number=8, class_file=None, is_lossy=False, palette=None, **settings):
    config = load_config(settings)
    evidence = MaskEvidence(
        [facts_of(make(index), is_lossy=is_lossy, palette=palette) for index in range(number)],
        given_coding("nonzero", config.ignore_value).ignored,
    )
    return choose_classes(config, evidence, class_file)


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
        (1, None, [0, RED], (0, (255, 0, 0))),  # one colour on black
        (3, None, [0, BLUE, RED], (0, (0, 0, 255), (255, 0, 0))),
    ],
)
def test_values_become_the_classes_that_there_are(num_classes, ignore_value, seen, expected):
    chosen = decide(seen, num_classes, ignore_value)
    assert chosen.coding.mask_values == expected
    assert chosen.num_classes == num_classes
    assert set(chosen.coding.ignored) == set(
        given_coding("nonzero", load_config({"ignore_value": ignore_value}).ignore_value).ignored
    )


@pytest.mark.parametrize(
    ("num_classes", "seen"),
    [
        (1, list(range(30))),
        (1, [0, 700, 1400]),  # three classes, or two objects
        (3, [0, 255]),  # with 255 as void there would be nothing to learn
        (1, [*range(21), 255]),  # ids and void are no soft edges
    ],
)
def test_what_could_mean_several_things_is_left_to_the_user(num_classes, seen):
    assert decide(seen, num_classes) is None


PALETTE = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [64, 0, 128]], np.uint8)


def jpeg(colours, ids, quality=90):
    """The mask that is read from a JPEG of these colours (RGB)."""
    done, data = cv2.imencode(".jpg", np.array(colours, np.uint8)[ids][:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return decode_mask(data.tobytes())


def large_discs(index):
    """Ids 0 to 3 in regions of 20 pixels and more."""
    ids = np.zeros((96, 96), np.uint8)
    for number in range(3):
        cv2.circle(ids, (20 + 28 * number, 30 + 30 * ((number + index) % 2)), 14, number + 1, -1)
    return ids


def test_colours_saved_as_jpeg_go_to_the_nearest_one_that_is_given():
    chosen = decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True, mask_values=PALETTE.tolist())
    assert (chosen.num_classes, chosen.coding.tolerance) == (4, 48)
    assert chosen.coding.reason.startswith("masks saved as JPEG: the nearest value, if it is within 48;")
    ids = chosen.coding.encode(jpeg(PALETTE, large_discs(1)))
    counts = ids != IGNORED
    assert counts.mean() > 0.97
    assert (ids == large_discs(1))[counts].mean() > 0.99


@pytest.mark.parametrize(
    ("make", "is_decided"),
    [
        (lambda index: np.array([1, 2, 3], np.uint8)[stripes(3, index)], True),  # each touches both others
        (lambda index: with_block(index, 40), True),
        (lambda index: with_border(1 + (objects(index, 1, 30) > 0).astype(np.uint8), 3), False),
        (
            lambda index: with_border(1 + (objects(index, 1, 30) > 0).astype(np.uint8), 3, 20),
            True,
        ),  # between them, but wide
    ],
)
def test_1_2_and_3_are_classes_unless_3_is_a_thin_border_between_the_others(make, is_decided):
    chosen = decide_masks(make)
    assert (chosen is not None) == is_decided
    assert chosen is None or (chosen.num_classes, chosen.coding.mask_values) == (3, (1, 2, 3))


def with_block(index, side):
    """1 and 2 in two halves, and a solid block of 3 over both."""
    mask = np.repeat(np.where(np.arange(SIDE) < SIDE // 2, 1, 2)[:, None], SIDE, axis=1).astype(np.uint8)
    mask[20 : 20 + side, index : index + side] = 3
    return mask


def class_file(*classes, name="label_colors.txt"):
    """Classes as (name, value)."""
    found = [NamedClass(title, value, value is not None and name != "_classes.csv") for title, value in classes]
    return ClassFile(Path(name), tuple(found))


def test_a_class_file_gives_values_names_and_void_in_its_order():
    file = class_file(("Sky", BLUE), ("Road", RED), ("Void", 0), ("Tree", GREEN), ("Tunnel", COLOUR + 9))
    chosen = decide([0, RED, GREEN, BLUE], class_file=file)
    assert chosen.coding.mask_values == ((0, 0, 255), (255, 0, 0), (0, 255, 0))
    assert (chosen.num_classes, chosen.class_names) == (3, ("Sky", "Road", "Tree"))
    assert chosen.coding.ignored == (0,)
    assert chosen.num_classes_reason == "3 classes in label_colors.txt, 1 more occur in no mask"
    assert (chosen.coding.reason, chosen.class_names_reason) == ("by label_colors.txt", "by label_colors.txt")


def test_a_file_of_two_classes_names_the_foreground():
    for file in (
        class_file(("background", 0), ("road", 255)),
        class_file(("road", 255), ("background", 0)),
        class_file(("road", 255), ("rest", 0)),
    ):
        chosen = decide([0, 255], class_file=file)
        assert (chosen.num_classes, chosen.class_names, chosen.coding.mask_values) == (1, ("road",), (0, 255))
    both = decide([0, 255], 2, class_file=class_file(("background", 0), ("road", 255)))
    assert (both.num_classes, both.class_names) == (2, ("background", "road"))


def test_a_palette_links_the_indices_of_masks_to_the_colours_of_a_class_file():
    file = class_file(("Road", RED), ("Sky", BLUE), ("Void", COLOUR + 0xE0E0C0), ("rest", 0))
    palette = {0: 0, 1: 0x0000FF, 2: 0xFF0000, 5: 0xE0E0C0}
    masks = [MaskFacts(10, 40, {0: 100, 1: 100, 2: 100, 5: 100}, "", palette=palette)] * 4
    chosen = choose_classes(load_config({}), MaskEvidence(masks), file)
    assert chosen.coding.mask_values == (2, 1, 0)
    assert (chosen.class_names, chosen.coding.ignored) == (("Road", "Sky", "rest"), (5,))


def test_names_alone_are_those_of_the_ids_also_where_the_last_of_them_occur_in_no_mask():
    names = class_file(
        ("background", None), *((f"thing {index}", None) for index in range(1, 9)), name="class_names.txt"
    )
    chosen = decide([0, 2, 5, 255], class_file=names)
    assert (chosen.num_classes, chosen.coding.mask_values, chosen.coding.ignored) == (9, tuple(range(9)), (255,))
    assert chosen.class_names[5] == "thing 5"
    one = decide([0, 5, 255], class_file=names)  # an id beside the background is the foreground
    assert (one.num_classes, one.coding.mask_values, one.class_names) == (1, (0, 5), ("thing 5",))
    assert decide([0, 2, 5, 9], class_file=names) is None  # more ids than names
    without = class_file(("tree", None), ("house", None), ("void", None), ("road", None), name="codes.txt")
    assert decide([0, 2, 5, 255], class_file=without) is None


def ask(masks):
    """The question about masks that are not decided; each of its choices trains."""
    evidence = MaskEvidence(masks)
    assert choose_classes(load_config({}), evidence) is None
    question = ask_for_classes(load_config({}), evidence, [f"masks/{index}.png" for index in range(len(masks))])
    for choice in question.choices:
        check_that_it_trains(choice, masks)
    return question


def test_ids_that_are_numbered_through_all_masks_are_those_of_objects():
    masks = [facts_of(np.where((mask := objects(index, 2)) > 0, mask + 2 * index, 0)) for index in range(12)]
    assert ask(masks).choices[0].settings["mask_values"] == "nonzero"
    classes = [facts_of(np.where((mask := objects(index, 2)) > 0, mask + index % 24, 0)) for index in range(48)]
    assert not MaskEvidence(classes).are_objects  # each id is in several masks


def check_that_it_trains(choice, masks):
    """The lines, pasted into a config, decide every value of the masks."""
    pasted = parse_yaml("\n".join(choice.lines()))
    assert yaml.safe_load("\n".join(choice.lines())).keys() == pasted.keys()
    config = load_config(pasted)
    evidence = MaskEvidence(masks, given_coding("nonzero", config.ignore_value).ignored)
    chosen = choose_classes(config, evidence)
    present = class_ids(evidence.counts, chosen.coding)
    assert UNKNOWN not in present
    assert len(present.keys() - {IGNORED}) >= 2


def test_the_question_shows_the_values_and_ends_with_the_lines():
    assert str(ask([MaskFacts(1, 1000, {0: 700, 40: 200, 200: 100}, "")] * 4)) == (
        "mask_values: auto cannot tell what the values in the masks mean\n"
        "  value | share of pixels | in masks\n"
        "      0 |          70.00% |   4 of 4\n"
        "     40 |          20.00% |   4 of 4\n"
        "    200 |          10.00% |   4 of 4\n"
        "Set one of these:\n"
        "  # three classes\n  num_classes: 3\n  mask_values: [0, 40, 200]\n\n"
        "  # 200 is foreground, 40 is ignored\n  num_classes: 1\n  mask_values: [0, 200]\n  ignore_value: 40\n\n"
        "  # 40 is foreground, 200 is ignored\n  num_classes: 1\n  mask_values: [0, 40]\n  ignore_value: 200"
    )


@pytest.mark.parametrize("num_colours", [2, 4])
def test_soft_edges_of_colours_are_no_classes(num_colours):
    """Nor what JPEG left in files that were saved as PNG afterwards. A palette with rare classes has no soft edges."""
    colours, ids = PALETTE[:num_colours], [large_discs(index) for index in range(4)]
    soft = [
        cv2.imencode(".png", cv2.GaussianBlur(colours[each % num_colours], (3, 3), 0)[:, :, ::-1])[1] for each in ids
    ]
    for masks in ([decode_mask(data.tobytes()) for data in soft], [jpeg(colours, each % num_colours) for each in ids]):
        settings = ask([facts_of(mask) for mask in masks]).choices[0].settings
        assert (settings["num_classes"], len(settings["mask_values"])) == (1 if num_colours == 2 else 4, num_colours)
        assert settings["mask_tolerance"] >= 48
    rare = dict.fromkeys((COLOUR + 0x400000 + 0x1000 * number for number in range(1, 16)), 40)
    palette = MaskFacts(1, 99600, {0: 90000, COLOUR + 0x800000: 9000, **rare}, "")
    chosen = choose_classes(load_config({}), MaskEvidence([palette] * 4))
    assert (chosen.num_classes, chosen.coding.tolerance) == (17, 0)


VOC = {0: 0, 5: 0x800080, 9: 0xC00000, 15: 0xC08080, 255: 0xE0E0C0}  # of its palette


def test_indices_of_a_palette_are_classes_whatever_their_gaps_unless_they_number_objects():
    def squares(index):
        ids = np.array([0, 5, 9, 15], np.uint8)[stripes(4, index, 24)]
        return with_border(ids, 255)

    chosen = decide_masks(squares, palette=VOC)
    assert (chosen.num_classes, chosen.coding.mask_values, chosen.coding.ignored) == (4, (0, 5, 9, 15), (255,))
    assert chosen.num_classes_reason == "the masks hold 4 indices of a palette; 255 beside them is taken as void"
    assert decide_masks(squares) is None  # greys may be anything
    numbered = dict(enumerate(range(0, 30 * 0x081000, 0x081000)))
    assert decide_masks(lambda index: 3 * objects(index, 2 + index), palette=numbered) is None


def test_few_exact_colours_are_classes_and_a_thin_light_border_between_them_is_asked_about():
    colours = np.array([0, RED, GREEN, COLOUR + 0x804000], np.int32)
    chosen = decide_masks(lambda index: colours[stripes(4, index, 24)])
    assert (chosen.num_classes, chosen.num_classes_reason) == (4, "the masks hold 4 colours")
    assert chosen.coding.mask_values == (0, (0, 255, 0), (128, 64, 0), (255, 0, 0))
    light = COLOUR + 0xFFFFC0
    question = ask([facts_of(with_border_of(colours[stripes(4, index, 24)], light)) for index in range(8)])
    assert "[255, 255, 192] may be void (pixels to ignore), or a class: which is it?" in question.text
    assert question.choices[0].settings["ignore_value"] == (255, 255, 192)


def test_the_few_mixed_colours_of_edges_that_were_made_smaller_are_no_classes():
    """Red discs on black at half the size: each edge has three colours between, far from each other."""

    def small(index):
        red = np.zeros((2 * SIDE, 2 * SIDE, 3), np.uint8)
        for number in range(4):
            cv2.circle(red, (40 + 90 * (number % 2) + index, 40 + 90 * (number // 2)), 25, (0, 0, 255), -1)
        shrunk = cv2.resize(red, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        return decode_mask(cv2.imencode(".png", shrunk)[1].tobytes())

    settings = ask([facts_of(small(index)) for index in range(8)]).choices[0].settings
    assert (settings["mask_values"], settings["num_classes"]) == ((0, (255, 0, 0)), 1)


def with_border_of(mask, value):
    """Rows of this colour where others meet."""
    return np.where((mask != np.roll(mask, 1, 0)) | (mask != np.roll(mask, -1, 0)), value, mask).astype(np.int32)


CAMVID = "64 128 64\tAnimal\n192 0 128\t\tArchway\n0 0 0\tVoid\n"
CLASS_DICT = "name,r,g,b\nAnimal,64,128,64\nArchway,192,0,128\nVoid,0,0,0\n"
ROBOFLOW = "Pixel Value, Class\n0, background\n1, Head Light\n"
LABELMAP = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:128,0,0::\n"


@pytest.fixture
def read(tmp_path):
    """Writes a file and reads it."""

    def read(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return find_class_file(tmp_path, [Pair("a", tmp_path / "images/a.png", tmp_path / "masks/a.png")])

    return read


GREEN_OF_FILE, PINK = COLOUR + 0x408040, COLOUR + 0xC00080
COLOURS = [("Animal", GREEN_OF_FILE), ("Archway", PINK), ("Void", 0)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("label_colors.txt", CAMVID, COLOURS),
        ("class_dict.csv", CLASS_DICT, COLOURS),
        (
            "class_dict.csv",
            '"name","r","g","b"\n"Animal, wild","64","128","64"\nVoid, 0, 0, 0\n',
            [("Animal, wild", GREEN_OF_FILE), COLOURS[2]],
        ),
        ("_classes.csv", ROBOFLOW, [("background", 0), ("Head Light", 1)]),
        ("labelmap.txt", LABELMAP, [("background", 0), ("car", COLOUR + 0x800000)]),
        ("codes.txt", "Sky\nRoad\nVoid\n", [("Sky", None), ("Road", None), ("Void", None)]),
        ("class_names.txt", "__ignore__\n_background_\ncat\n", [("_background_", None), ("cat", None)]),
    ],
)
def test_names_and_values_are_read_in_their_order(read, name, text, expected):
    found = read(name, text)
    assert (found.path.name, [(one.name, one.value) for one in found.classes]) == (name, expected)
    assert found.has_colours == (name in ("label_colors.txt", "class_dict.csv", "labelmap.txt"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("label_colors.txt", "64 128 300 Animal\n0 0 0 Void\n"),
        ("label_colors.txt", "64 128 64 Animal\n64 128 64 Archway\n"),  # one colour twice
        ("class_dict.csv", "name,r,g,b\na,1,2\nb,1,2,3\n"),
        ("class_dict.csv", "name,r,g,b\nb,1,2,3\n" + 200_000 * "a"),  # longer than a cell may be
        ("_classes.csv", "filename, cat, dog\na.jpg, 0, 1\nb.jpg, 1, 0\n"),  # of images, not of pixels
        ("classes.txt", "person\ncar\n"),  # of boxes: no background
        ("codes.txt", "Void\nVoid\n"),
    ],
)
def test_a_file_in_another_form_is_left_alone(read, name, text):
    assert read(name, text) is None


# What the values of many masks look like together


def evidence_from(make, number=8, **others):
    return MaskEvidence([facts_of(make(index), **others) for index in range(number)])


def test_a_grey_ring_between_the_ends_of_masks_saved_as_jpeg_is_a_class():
    def with_ring(index):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        for number in range(5):
            place = 16 + 30 * (number % 3), 16 + 30 * (number // 3) + 2 * index
            cv2.circle(mask, place, 14, 128, -1)  # a ring of 3 pixels, 12 % of all pixels
            cv2.circle(mask, place, 11, 255, -1)
        return cv2.imdecode(cv2.imencode(".jpg", mask)[1], cv2.IMREAD_GRAYSCALE)

    assert evidence_from(with_ring, is_lossy=True).edge_threshold() is None


def test_a_question_about_masks_saved_as_jpeg_says_so():
    evidence = evidence_from(
        lambda index: jpeg(np.stack([np.arange(3)] * 3, axis=1), large_discs(index) % 3), is_lossy=True
    )
    question = ask_for_classes(load_config({}), evidence, [f"{index}.jpg" for index in range(len(evidence.masks))])
    assert (
        "They are saved as JPEG or lossy WebP, which changes values beside edges: export PNG if you can"
        in question.text
    )


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
