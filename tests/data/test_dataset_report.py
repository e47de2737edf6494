"""The report of a dataset: problems and fixes, classes, split, notices, questions and their answers."""

import io
import re
import shutil
import textwrap
from dataclasses import replace

import cv2
import numpy as np
import pytest
import yaml
from PIL import Image

from helpers import layouts
from helpers.report_data import HEIGHT, WIDTH, Dataset, noise, square
from unet_trainer.config.load import load_config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.data.find import find_dataset
from unet_trainer.data.mask_evidence import class_ids
from unet_trainer.data.pairs import FoundPairs, Pair
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system.console import Console


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def test_values_of_no_class_are_a_problem_with_file_and_share(data):
    odd = square()
    odd[0, :6], odd[1, :3] = 7, 9
    data.mask(1, odd)
    (problem,) = data.report(mask_values=[0, 255]).problems
    title = "1 mask with values that belong to no class (the classes are 0, 255)"
    assert (problem.kind, problem.title) == ("values", title)
    assert problem.lines == (f"{data.folder / 'masks/1.png'}: 7 (1.0% of pixels), 9 (0.5% of pixels)",)
    add = "correct the masks, or add the values to mask_values or ignore_value"
    assert problem.fix == f"{add}; unknown_values: ignore ignores them"
    ignored = data.report(mask_values=[0, 255], unknown_values="ignore")
    assert class_ids(ignored.masks[1].counts, ignored.coding) == {0: 600 - 25 - 9, 1: 25, IGNORED: 9}
    others = {"mask_values": [0, 255], "ignore_value": [7, 9]}, {"mask_values": [[0, 9], [7, 255]]}
    assert [data.report(**settings).blocking_message for settings in others] == ["", ""]


def test_masks_of_a_single_value_are_refused_with_the_reason(data):
    for index in range(6):
        data.mask(index, np.full((HEIGHT, WIDTH), 7, np.uint8))
    (question,) = map(str, data.report().questions)
    where = "are these the masks (mask_dir), and were they written right?"
    assert question == f"there is nothing to learn: every pixel of all 6 masks is 7; {where}"
    assert list(map(str, data.report(num_classes=1).questions)) == [question]


def test_a_single_image_that_validates_gets_a_warning_with_what_to_do(data):
    for index in (3, 4, 5):
        for folder in ("images", "masks"):
            (data.folder / folder / f"{index}.png").unlink()
    report = data.report()
    only = f"only {report.split.val[0].image} validates: val_iou, by which best.pt is chosen, is the score of one image"
    folds = "train with num_folds: 3 and fold: 0 to 2, to validate on each image once"
    assert report.notices == [f"{only}; add images, some dozens are a start; or {folds}"]
    assert data.report(num_folds=3, fold=1).notices == []
    assert data.report(group_pattern=r"(\d)").notices[0].endswith("; add images, some dozens are a start")
    for kind in ("images", "masks"):
        for part, numbers in (("train", (0, 1)), ("val", (2,))):
            (data.folder / part / kind).mkdir(parents=True)
            for number in numbers:
                (data.folder / f"{kind}/{number}.png").rename(data.folder / f"{part}/{kind}/{number}.png")
        (data.folder / kind).rmdir()
    (note,) = data.report().notices
    assert note.endswith("is the score of one image; put more images into val")


def write_table(path, separator, encoding, *more):
    """As spreadsheets write it."""
    rows = [(f"images\\{number}.png", f"masks\\{number}.png", "val" if number < 2 else "train") for number in range(6)]
    rows = [("image", "mask", "split", *more), *((*row, *more) for row in rows)]
    path.write_bytes("".join(f"{separator.join(row)}\r\n" for row in rows).encode(encoding))


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8-sig")])
def test_a_table_in_the_data_that_is_not_read_is_named_with_the_setting_that_reads_it(data, separator, encoding):
    path = data.folder / "mine.csv"
    write_table(path, separator, encoding)
    note = f"{path} is not read; to use the pairs and the split there, set split_file: mine.csv"
    assert data.report(val_fraction=0.34).notices == [note]
    report = data.report(split_file="mine.csv")
    assert (len(report.split.train), len(report.split.val), report.notices) == (4, 2, [])
    write_table(path, separator, encoding, "", "")  # cells beside the table were once filled
    assert len(data.report(split_file="mine.csv").split.val) == 2


def test_tables_of_something_else_are_not_named_and_several_or_further_columns_are(data):
    (data.folder / "scores.csv").write_text("image,mask,iou\nimages/0.png,masks/0.png,0.7\n")
    (data.folder / "patients.csv").write_text("image,age\n0.png,70\n")
    assert data.report(val_fraction=0.34).notices == []
    write_table(data.folder / "a.csv", ";", "utf-8", "patient")
    (note,) = data.report(val_fraction=0.34).notices
    assert note.endswith("set split_file: a.csv, without its columns patient")
    (data.folder / "lists").mkdir()
    write_table(data.folder / "lists/b.tsv", "\t", "utf-8")
    (note,) = data.report(val_fraction=0.34).notices
    assert note.startswith(f"{data.folder / 'a.csv'}, {data.folder / 'lists/b.tsv'} are not read; ")


def test_a_table_is_named_where_nothing_else_says_which_files_are_images(data):
    (data.folder / "images").rename(data.folder / "x")
    (data.folder / "masks").rename(data.folder / "y")
    (data.folder / "y/5.png").unlink()
    (data.folder / "mine.csv").write_text("image;mask\nx/0.png;y/0.png\n")
    unread = r"no folder of masks.*\n  .*mine\.csv is not read; .* set split_file: mine\.csv"
    with pytest.raises(DataError, match=unread):
        data.report()


# Swapped folders

GREYS = np.linspace(20, 250, 17).astype(np.uint8)


def picture(seed, values=GREYS):
    """Rectangles of these greys, one over the other."""
    random = np.random.default_rng(seed)
    pixels = np.full((48, 64), values[0], np.uint8)
    for _ in range(60):
        top, left = random.integers(0, (40, 56))
        pixels[top : top + random.integers(3, 12), left : left + random.integers(3, 12)] = random.choice(values)
    return pixels


def sixteen(seed):
    return picture(seed, np.arange(16))


def region(seed, value=255):
    mask = np.zeros((48, 64), np.uint8)
    mask[10:30, 20:40] = value
    return np.roll(mask, seed, axis=0)


def classes(seed):
    return np.maximum(region(seed, 2), region(seed + 9, 1))


def cells(seed):
    """Touching objects with ids from 1 on."""
    ids = np.zeros((48, 64), np.uint8)
    ids[8:40, 8:56] = 1 + np.arange(32)[:, None] // 8 * 6 + np.arange(48) // 8
    return ids


def photo(seed):
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)


def outlines(seed):
    """Where a pixel differs from that above or on the left, and hatching."""
    ids = sixteen(seed)
    lines = (ids != np.roll(ids, 1, 0)) | (ids != np.roll(ids, 1, 1))
    lines[::3] = True
    return lines.astype(np.uint8) * 255


# What lies in images/ and in masks/, and what is said.
FOLDERS = {
    "photographs": (region, photo, "asked"),
    "few colours": (region, picture, "asked"),
    "photographs, and masks of classes": (classes, photo, "asked"),
    "photographs, and ids of objects": (cells, photo, "asked"),
    "as many ids as a picture has colours": (region, sixteen, "noted"),
    "in place, few colours": (picture, region, ""),
    "in place, ids of objects": (lambda seed: (cells(seed) > 0) * np.uint8(255), cells, ""),
    "in place, colours of objects": (
        lambda seed: (cells(seed) > 0) * np.uint8(255),
        lambda seed: np.random.default_rng(seed).integers(1, 256, (60, 3), np.uint8)[cells(seed)],
        "",
    ),
    "in place, line drawings": (outlines, sixteen, ""),
    "in place, a class for each colour": (picture, lambda seed: np.searchsorted(GREYS, picture(seed)), ""),
}
SWAPPED = {"image_dir": "masks", "mask_dir": "images"}


@pytest.mark.parametrize(("image", "mask", "said"), FOLDERS.values(), ids=FOLDERS)
def test_folders_that_look_swapped_are_asked_about_or_noted_where_the_masks_are_clear(data, image, mask, said):
    for index in range(6):
        data.image(index, image(index))
        data.mask(index, mask(index).astype(np.uint8))
    report = data.report()
    notes = [note for note in report.notices if "look swapped" in note]
    asked = [question for question in report.questions if "look swapped" in question.text]
    assert (len(asked), len(notes)) == (said == "asked", said == "noted")
    for text in [*notes, *(question.text for question in asked)]:
        looks = "image_dir and mask_dir look swapped: the files of images hold"
        assert re.match(rf"{looks} \d+ values each, as masks do, and those of masks \d+, as pictures do", text)
    for question in asked:
        assert question.choices[0].settings == SWAPPED
        assert question.choices[1].settings == {"image_dir": "images", "mask_dir": "masks"}
        assert "look swapped" not in str(data.report(image_dir="images", mask_dir="masks").questions)
        exchanged = data.report(**SWAPPED)
        assert exchanged.pairs[0].image == data.folder / "masks/0.png"
        assert "look swapped" not in str([*exchanged.questions, *exchanged.notices])


def test_check_goes_on_with_swapped_folders_exchanged(data):
    for index in range(6):
        data.image(index, region(index))
        data.mask(index, picture(index))
    answered = data.answered()
    assert answered.is_settled
    assert (answered.config.image_dir, answered.config.mask_dir) == ("masks", "images")
    assert (answered.report.classes.num_classes, answered.report.coding.mask_values) == (1, (0, 255))


# Masks


def test_palettes_in_another_order_are_a_problem(data):
    """The same picture, once with black first and once with red first."""
    for index in range(6):
        ids = (square() > 0).astype(np.uint8)
        image = Image.frombytes("P", (WIDTH, HEIGHT), (1 - ids if index == 0 else ids).tobytes())
        image.putpalette([255, 0, 0, 0, 0, 0] if index == 0 else [0, 0, 0, 255, 0, 0])
        image.save(data.folder / f"masks/{index}.png")
    (problem,) = data.report().problems
    masks = data.folder / "masks"
    line = f"{masks / '0.png'}: [255, 0, 0] is 0, in most it is 1"
    assert (problem.kind, problem.lines) == ("palettes", (line,))


def test_classes_that_the_files_of_masks_name_are_taken_with_them(data):
    """Of three classes one is in few masks, and 255 in masks without a class: read as plain masks, a question."""
    for index in range(6):
        data.mask(index, square(1 if index else 255))
    files = [(data.folder / f"images/{index}.png", data.folder / f"masks/{index}.png") for index in range(6)]
    pairs = tuple(Pair(image.stem, image, mask) for image, mask in files)
    found = FoundPairs(pairs, "drawn", class_names=("background", "sea", "whale"))

    def report(**settings):
        return build_dataset_report(data.config(**settings), Console(io.StringIO()), found)

    drawn = report()
    assert drawn.blocking_message == ""
    assert (drawn.classes.num_classes, drawn.classes.class_names) == (3, ("background", "sea", "whale"))
    assert (drawn.coding.mask_values, drawn.coding.ignore_value) == ((0, 1, 2), 255)
    assert drawn.classes.num_classes_reason == "as in the files that the masks are made from"
    assert report(class_names=["a", "b", "c"]).classes.class_names is None
    assert report(mask_values="nonzero").classes.num_classes == 1
    assert len(report(num_classes=1).questions) == 1


def inverted(kind, index):
    """A mask of which the foreground is most pixels, as files have it."""
    ids = square(1)
    ids[4, 3 + index % 3] = 0
    if kind == "0, 1 and void":
        return np.where(np.arange(WIDTH) > 27, 255, 1 - ids).astype(np.uint8)
    large = cv2.resize((1 - ids) * 255, (8 * WIDTH, 8 * HEIGHT), interpolation=cv2.INTER_NEAREST)
    return cv2.GaussianBlur(large, (0, 0), 1) if kind == "greys" else (1 - ids) * 255


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("0 and 255", "  mask_values: [255, 0]"),
        ("0, 1 and void", "  mask_values: [1, 0]\n  ignore_value: 255"),
        ("greys", "  mask_values: [255, 0]\n  mask_tolerance: 127"),
    ],
)
def test_a_foreground_of_most_pixels_gives_a_note_with_the_settings_for_the_other_way_round(data, kind, lines):
    for index in range(6):
        data.mask(index, inverted(kind, index))
        data.image(index, np.repeat(np.repeat(noise(index), 8, 0), 8, 1) if kind == "greys" else noise(index))
    report = data.report(val_fraction=0.34)
    (note,) = [text for text in report.notices if "foreground" in text]
    fix = r" is 9\d% of the pixels; if it is the background, set:\n" + re.escape(lines)
    assert re.fullmatch(r"the foreground \(\S+( \d+)?\)" + fix, note)
    turned = data.report(val_fraction=0.34, **yaml.safe_load(textwrap.dedent(lines)))
    assert (turned.blocking_message, turned.notices) == ("", [])
    for before, after in zip(report.masks, turned.masks, strict=True):
        held = class_ids(before.counts, report.coding)
        exchanged = {{0: 1, 1: 0}.get(class_id, class_id): pixels for class_id, pixels in held.items()}
        assert class_ids(after.counts, turned.coding) == exchanged


def test_a_class_file_that_does_not_fit_the_masks_is_named(data):
    mask = np.dstack([square(0), square(0), square()])  # red, in OpenCV's order
    mask[12:15] = 255
    for index in range(6):
        data.mask(index, mask)
    file, colours = data.folder / "class_dict.csv", "name,r,g,b\nred,255,0,0\nwhite,255,255,255\n{},0,0,0\n"
    file.write_text("name;r;g;b\nback;0;0;0\nred;255;0;0\n")
    unused = "class_dict.csv is not used: it names 2 classes, and the masks hold 3 values that do not fit them"
    assert f"{unused}, or its void is most of the pixels; correct it" in str(data.report().questions[0])
    file.write_text(colours.format("Void"))
    assert "class_dict.csv is not used" in str(data.report().questions[0])
    file.write_text(colours.format("background"))
    assert data.report().classes.class_names == ("red", "white", "background")


@pytest.mark.parametrize(
    ("side", "where"),
    [("train", "validation mask (val_iou says nothing of them)"), ("val", "training mask (nothing teaches them)")],
)
def test_a_class_that_only_train_or_only_val_has_gives_a_notice(data, side, where):
    for index in range(6):
        part = "train" if index < 4 else "val"
        data.mask(index, square(1) + np.eye(HEIGHT, WIDTH, -8, np.uint8) * 2 * (part == side))
        for kind in ("images", "masks"):
            (data.folder / part / kind).mkdir(parents=True, exist_ok=True)
            (data.folder / f"{kind}/{index}.png").rename(data.folder / part / f"{kind}/{index}.png")
    expected = f"classes in no {where}: class 2; add images with them, or choose with split_file=FILE.csv"
    assert data.report(num_classes=3).notices == [expected]


# Images


def test_identical_images_give_a_notice_and_another_if_their_masks_differ(data):
    data.image(1, noise(0))
    data.image(3, noise(2))
    data.mask(3, square()[::-1].copy())
    images = data.folder / "images"
    assert data.report(val_fraction=0.34).notices == [
        "4 images are identical to another one; identical images stay on one side: "
        f"{images / '0.png'} = {images / '1.png'}, {images / '2.png'} = {images / '3.png'}",
        f"1 set of identical images with masks that differ: {images / '2.png'} = {images / '3.png'}",
    ]


def test_images_with_the_same_pixels_are_identical_however_they_are_compressed(data):
    for index in range(0, 6, 2):
        data.image(index + 1, noise(index))
        path = data.folder / f"images/{index}.png"
        pixels = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2BGRA) if index == 2 else cv2.imread(str(path))
        cv2.imwrite(str(path), pixels, [cv2.IMWRITE_PNG_COMPRESSION, 0])
    data.image(4, cv2.cvtColor(noise(4), cv2.COLOR_RGB2GRAY))
    data.image(5, cv2.merge([cv2.cvtColor(noise(4), cv2.COLOR_RGB2GRAY)] * 3))
    report = data.report()
    assert "6 images are identical to another one" in "\n".join(report.notices)
    assert len({int(pair.name) // 2 for pair in report.split.val}) * 2 == len(report.split.val)
    divided = [replace(pair, part="val" if pair.name == "0" else "train") for pair in report.pairs]
    found, console = FoundPairs(tuple(divided), "split.csv"), Console(io.StringIO())
    assert len(build_dataset_report(data.config(), console, found).split.train) == 4


def test_a_group_in_train_and_in_test_gives_a_notice(data):
    parts = ["train", "train", "val", "val", "test", "test"]
    rows = [f"images/{index}.png,masks/{index}.png,{part},{'aabcad'[index]}\n" for index, part in enumerate(parts)]
    (data.folder / "split.csv").write_text("image,mask,split,group\n" + "".join(rows))
    too_good = "1 group in train and in test: a; the scores of evaluate --split test are too good for them"
    report = data.report(split_file="split.csv")
    (finding,) = report.findings
    assert (finding.kind, finding.values) == ("groups in test", (["a"],))
    assert report.notices == [too_good]


def test_several_things_are_answered_one_after_the_other(data):
    (data.folder / "masks/5.png").unlink()
    for index in range(5):
        data.mask(index, np.repeat(np.array([3, 9], np.uint8), 5)[:, None].repeat(15, 1))
    answered = data.answered()
    classes = {"num_classes": 1, "mask_values": (3, 9)}
    settings = [{"unpaired": "skip"}, {"resize_masks": True}, classes]
    assert [dict(answer.settings) for answer in answered.answers] == settings
    assert [choice.settings["mask_values"] for choice in answered.answers[2].others] == [(9, 3)]
    assert answered.is_settled
    assert (answered.config.unpaired, answered.config.mask_values) == ("skip", (3, 9))


def find(data_dir, tmp_path, **settings):
    return find_dataset(load_config({"data_dir": str(data_dir), "checkpoint_dir": str(tmp_path / "runs"), **settings}))


def test_a_data_dir_that_is_missing_or_a_file_is_said(tmp_path):
    with pytest.raises(DataError, match=r"^data_dir: .*nowhere does not exist; need a folder with images/ and masks/$"):
        find(tmp_path / "nowhere", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^data_dir: .*file is not a folder"):
        find(tmp_path / "file", tmp_path)


def test_masks_win_over_annotations_and_annotations_over_nothing(tmp_path):
    data = tmp_path / "data"
    layouts.coco(data)
    for index in range(layouts.COUNT):
        layouts.write(data / f"masks/{index}.png", layouts.disc(index))
    found = find(data, tmp_path)
    assert found.num_classes is None
    assert found.pairs[0].mask.is_relative_to(data / "masks")
    shutil.rmtree(data / "masks")
    drawn = find(data, tmp_path)
    assert (drawn.num_classes, drawn.class_names) == (3, ("background", "cat", "dog"))
    assert [pair.image for pair in drawn.pairs] == [pair.image for pair in found.pairs]
    assert drawn.pairs[0].mask.is_relative_to(tmp_path / "runs")
