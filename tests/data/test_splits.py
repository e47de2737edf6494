"""Which pairs train and which validate: shares, seeds, classes, groups, folds, identical images; and the split as CSV."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from unet_trainer.config.load import load_config
from unet_trainer.data.converted import Converter
from unet_trainer.data.formats.table import listed_files, read_split_csv, split_csv_text
from unet_trainer.data.pairs import Box, FoundPairs, Pair
from unet_trainer.data.splits import Split, add_groups, build_split, choose_image_blocks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import decode_image, write_image
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system.atomic_files import write_text_atomically


def made_up(count, groups=None, parts=None):
    """Pairs without files: splitting reads none."""
    columns = zip((f"{index:03d}" for index in range(count)), parts or [None] * count, groups or [""] * count, strict=True)  # fmt: skip
    pairs = (Pair(name, Path(f"images/{name}.png"), Path(f"masks/{name}.png"), *others) for name, *others in columns)
    return FoundPairs(tuple(pairs), "images/ + masks/")


def split_of(found, labels=None, digests=None, near_duplicates=(), **settings):
    nothing = [""] * len(found.pairs)
    return build_split(load_config(settings), found, labels or nothing, digests or nothing, near_duplicates)


def names(pairs):
    return [pair.name for pair in pairs]


def refuses(message, *arguments, **options):
    with pytest.raises(DataError, match=message):
        split_of(*arguments, **options)


# At random


def test_a_seed_always_gives_the_same_split():
    """If these lists change, users get other splits than before from the same seed."""
    plain = split_of(made_up(10), val_fraction=0.3)
    assert names(plain.val) == ["001", "005", "009"]
    assert names(plain.train) == ["000", "002", "003", "004", "006", "007", "008"]
    by_class = split_of(made_up(10), labels=[{0, 1} if index > 6 else {0} for index in range(10)], val_fraction=0.3)
    assert names(by_class.val) == ["002", "005", "009"]  # one of the three that hold class 1


def test_a_rare_class_is_on_both_sides_in_proportion():
    """10 of 100 images hold class 1; a fifth validates."""
    labels = [{0, 1} if index % 10 == 3 else {0} for index in range(100)]
    for seed in range(50):
        assert sum(1 in labels[int(pair.name)] for pair in split_of(made_up(100), labels, seed=seed).val) == 2


@pytest.mark.parametrize("trial", range(4))
def test_groups_and_identical_images_are_never_on_both_sides(trial):
    chooser = np.random.default_rng(trial)
    count = int(chooser.integers(6, 80))
    groups = [f"p{number}" if number else "" for number in chooser.integers(0, max(3, count // 3), count)]
    digests = [f"d{number}" for number in chooser.integers(0, 3 * count, count)]
    labels = [set(chooser.integers(0, 4, 2).tolist()) for _ in range(count)]
    found = made_up(count, groups)
    digest_of = dict(zip(names(found.pairs), digests, strict=True))
    split = split_of(found, labels, digests, val_fraction=float(chooser.uniform(0.1, 0.6)), seed=trial)
    assert sorted(names(split.train) + names(split.val)) == names(found.pairs)
    assert split.train
    assert split.val
    assert not ({pair.group for pair in split.train} & {pair.group for pair in split.val}) - {""}
    assert not {digest_of[name] for name in names(split.train)} & {digest_of[name] for name in names(split.val)}


@pytest.mark.parametrize("settings", [{}, {"num_folds": 4, "fold": 2}], ids=["fraction", "folds"])
def test_near_duplicates_are_never_on_both_sides(settings):
    """A chain of three, a pair, and a pair of which one is in a group with another."""
    found = made_up(24, groups=["p1" if index in (20, 23) else "" for index in range(24)])
    split = split_of(found, near_duplicates=[(0, 9), (9, 18), (4, 5), (20, 21)], **settings)
    for together in ({"000", "009", "018"}, {"004", "005"}, {"020", "021", "023"}):
        assert together <= {*names(split.train)} or together <= {*names(split.val)}


def test_near_duplicates_that_leave_no_choice_are_divided():
    chain = [(index, index + 1) for index in range(9)]
    plain = split_of(made_up(10))
    assert split_of(made_up(10), near_duplicates=chain) == plain  # all are one
    assert split_of(made_up(10), near_duplicates=chain[:6]) == plain  # 7 of 10 are
    assert split_of(made_up(10), near_duplicates=chain[:3], num_folds=9).train  # 7 groups for 9 folds


@pytest.mark.parametrize(("count", "num_folds"), [(10, 10), (23, 3), (60, 5)])
def test_every_pair_validates_in_exactly_one_fold_and_sizes_differ_by_one_at_most(count, num_folds):
    labels, found = [{index % 3, index % 7} for index in range(count)], made_up(count)
    splits = [split_of(found, labels, num_folds=num_folds, fold=fold) for fold in range(num_folds)]
    assert sorted(name for split in splits for name in names(split.val)) == names(found.pairs)
    assert max(len(split.val) for split in splits) - min(len(split.val) for split in splits) <= 1
    assert all(sorted(names(split.train) + names(split.val)) == names(found.pairs) for split in splits)


def test_a_training_image_that_also_validates_is_left_out_with_a_notice():
    found = made_up(5, parts=["train", "train", "train", "val", "val"])
    for digests, train, said in (
        ("xbyxe", ["001", "002"], "1 training image left out, identical to a validation image: images/000.png"),
        ("xbyxy", ["001"], "2 training images left out, identical to a validation image: images/000.png, images/002.png"),
    ):  # fmt: skip
        split = split_of(found, digests=[*digests])
        assert (names(split.train), names(split.val), [*map(str, split.notices)]) == (train, ["003", "004"], [said])


def test_what_cannot_be_split_is_refused():
    by_hand = r"; split_file=FILE\.csv divides them as you say$"
    both = made_up(6, groups=["p1", "p2", "p3", "p2", "p1", "p4"], parts=["train"] * 3 + ["val"] * 3)
    refuses(f"^2 groups in train and in val: p1, p2; put each on one side{by_hand}", both)
    groups = made_up(4, groups=["a", "a", "b", "b"])
    what = "divides a sequence, and the pairs have groups that stay together; leave one of them out"
    refuses(f"^split: blocks {what}$", groups, split="blocks")
    few = "are too few to train on, to validate on and to leave a gap between; set:\n  split: random"
    refuses(f"^split: blocks: 2 pairs {few}$", made_up(2), split="blocks")
    refuses(few, made_up(6), split="blocks", num_folds=7)
    refuses(rf"need at least 3 pairs; got 4 pairs in 2 groups .*{by_hand}", groups, num_folds=3)


# Blocks of a sequence


def runs(numbers):
    """Lengths of the runs of consecutive numbers."""
    cuts = [index for index in range(1, len(numbers)) if numbers[index] != numbers[index - 1] + 1]
    return [end - start for start, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]


@pytest.mark.parametrize(("count", "num_blocks", "seed"), [(5, 1, 0), (20, 1, 0), (100, 2, 1), (400, 5, 42)])
def test_blocks_are_contiguous_with_a_gap_on_both_sides(count, num_blocks, seed):
    split = split_of(made_up(count), split="blocks", seed=seed)
    train, val, unused = ([int(pair.name) for pair in pairs] for pairs in (split.train, split.val, split.unused))
    assert sorted(train + val + unused) == list(range(count))
    assert len(val) == count // 5
    assert len(runs(sorted(val))) <= num_blocks
    assert min(runs(sorted(val))) >= min(10, count // 5)
    assert min(abs(one - other) for one in train for other in val) > max(1, round(0.2 * len(val) / num_blocks))
    assert len(unused) <= max(2, 0.1 * count)
    assert re.match(
        rf"{len(unused)} pairs? between the blocks of train and val left out, as a gap", *map(str, split.notices)
    )


# Groups


def grouped(pattern, *names):
    pairs = [Pair(name, Path(f"data/images/{name}.png"), Path(f"data/masks/{name}.png")) for name in names]
    return [pair.group for pair in add_groups(pairs, pattern, Path("data"))]


def test_a_group_is_the_first_bracket_or_the_whole_match_in_the_path():
    assert grouped(r"images/(p\d+)_(.)", "p1_a", "p2_a", "p1_b") == ["p1", "p2", "p1"]
    assert grouped(r"p\d+", "p1_a", "p2_a") == ["p1", "p2"]
    page = Pair("s1/03", Path("/checkpoints/.converted/x/3.png"), Path("m.png"), image_origin="s1.tif, page 3")
    assert add_groups([page], r"(s\d)/", Path("/data"))[0].group == "s1"
    with pytest.raises(
        DataError, match=r"^group_pattern: 'q' matches nothing in 2 of 2 paths, such as images/a\.png, im"
    ):
        grouped("q", "a", "b")
    with pytest.raises(
        DataError, match=r"^group_pattern: the first bracket of '\(x\)\|\(y\)' matches nothing in 1 of 2"
    ):
        grouped("(x)|(y)", "x", "y")  # y.png would be in no group


# Blocks of one image


def painted(boxes, shape):
    canvas = np.zeros(shape, np.uint8)
    for top, left, bottom, right in boxes:
        assert 0 <= top < bottom <= shape[0]
        assert 0 <= left < right <= shape[1]
        canvas[top:bottom, left:right] += 1
    return canvas


@pytest.mark.parametrize("shape", [(384, 390), (260, 3001), (1999, 777)])
def test_no_training_block_comes_nearer_to_val_than_the_gap(shape):
    for seed, val_fraction in enumerate((0.05, 0.2, 0.35, 0.5, 0.9)):
        blocks, _, gap = choose_image_blocks(np.zeros(shape, np.uint8), val_fraction, seed)
        train, val = painted(blocks["train"], shape), painted(blocks["val"], shape)
        assert max(train.max(), val.max()) == 1  # no pixel is in two blocks
        assert gap >= 20
        for (top, left, bottom, right), other in itertools.product(blocks["train"], blocks["val"]):
            assert max(other[0] - bottom, top - other[2], other[1] - right, left - other[3]) >= gap
        assert blocks["train"]
        assert val.mean() == pytest.approx(val_fraction, abs=0.21)
        assert train.sum() + val.sum() >= 0.6 * val.size  # the rest is gap


def classes_in(ids, boxes):
    return {value for top, left, bottom, right in boxes for value in np.unique(ids[top:bottom, left:right])}


def test_both_sides_get_each_class_where_it_is_in_two_places_and_void_gets_no_block():
    ids = np.zeros((1200, 1500), np.uint8)
    ids[:300, :600] = IGNORED
    for class_id in (1, 2, 3):
        for row, column in ((400 + 250 * class_id, 100), (450, 300 * class_id + 150)):
            ids[row : row + 20, column : column + 20] = class_id
    blocks, _, gap = first = choose_image_blocks(ids, 0.2, 42)
    assert (len(blocks["train"]), len(blocks["val"]), gap) == (14, 4, 37)
    assert all({0, 1, 2, 3} <= classes_in(ids, boxes) for boxes in blocks.values())
    assert choose_image_blocks(ids, 0.2, 42) == first
    assert choose_image_blocks(ids, 0.2, 43)[0]["val"] != blocks["val"]


def test_a_class_that_only_the_gap_would_hold_is_left_to_train():
    ids = np.zeros((1200, 1500), np.uint8)
    ids[145:155, 145:155] = ids[605:625, 605:625] = 1  # in the middle of a block, and in the corner of one
    for seed in range(20):
        blocks, *_ = choose_image_blocks(ids, 0.3, seed)
        assert all(1 in classes_in(ids, boxes) for boxes in blocks.values()), seed


FILES = Path("images/a.png"), Path("m.png")
VAL_BOX = Box(*FILES, 10, 10, 20, 20).pair("v", "val")


def test_boxes_that_share_pixels_stay_on_one_side():
    boxes = [Box(Path(f"{number}.png"), Path("m.png"), 0, left, 9, left + 9) for number in range(6) for left in (0, 5)]
    split = split_of(FoundPairs(tuple(box.pair(box.name_in(box.image.stem), None) for box in boxes), "boxes.csv"))
    assert not {pair.user_files[0] for pair in split.train} & {pair.user_files[0] for pair in split.val}


@pytest.mark.parametrize(("train", "val", "message"), [
    (Box(*FILES, 0, 0, 9, 9).pair("t", "train"), VAL_BOX, ""),
    (Box(*FILES, 0, 10, 11, 30).pair("t", "train"), VAL_BOX, "rows 0 to 10"),
    (Pair("whole", *FILES, "train"), VAL_BOX, "a.png is in train"),
    (Box(Path("masks/../images/a.png"), FILES[1], 0, 0, 9, 9).pair("t", "train"), Pair("v", *FILES, "val"), "rows 0 to 8"),
])  # fmt: skip
def test_boxes_of_a_table_may_not_share_pixels_between_train_and_val(train, val, message):
    found = FoundPairs((train, val), "boxes.csv")
    if message:
        refuses(f"{message}.*some of its pixels are in val", found)
    else:
        assert names(split_of(found).val) == ["v"]


# Split files as users write them, and as a run writes its own


NEEDED = "need image and mask, and optionally split and group, in UTF-8"


@pytest.fixture
def data(tmp_path):
    """Reading a split file opens no image, so empty files are enough."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b", "c", "d", "e f", "g,h"):
            (tmp_path / folder / f"{name}.png").touch()
    return tmp_path


def read(data, text, data_dir=None):
    (data / "split.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_split_csv(data / "split.csv", data_dir or data)


def csv_error(data, text, data_dir=None):
    with pytest.raises(DataError) as raised:
        read(data, text, data_dir)
    return str(raised.value).replace(str(data), "DATA")


def pair(data, name, part=None, group=""):
    return Pair(f"images/{name}", data / f"images/{name}.png", data / f"masks/{name}.png", part, group)


WAYS = {
    "comma": "image,mask,split,group\nimages/a.png,masks/a.png,train,p1\nimages/b.png,masks/b.png,val,p2\n",
    "semicolon": "image;mask;split;group\nimages/a.png;masks/a.png;train;p1\nimages/b.png;masks/b.png;val;p2\n",
    "tab": "image\tmask\tsplit\tgroup\nimages/a.png\tmasks/a.png\ttrain\tp1\nimages/b.png\tmasks/b.png\tval\tp2\n",
    "BOM and Windows": "\ufeffimage,mask,split,group\r\nimages/a.png,masks/a.png,train,p1\r\nimages/b.png,masks/b.png,val,p2\r\n",
    "quoted": '"image","mask","split","group"\n"images/a.png","masks/a.png","train","p1"\n"images/b.png","masks/b.png","val","p2"',
    "spaces and empty lines": " Image , MASK ,Split,group\n images/a.png , masks/a.png , Train , p1 \nimages/b.png,masks/b.png, VAL ,p2\n\n , ,,\n",
    "another order": "group,split,mask,image\np1,training,masks/a.png,images/a.png\np2,validation,masks/b.png,images/b.png\n",
    "other paths": "image,mask,split,group\n./images/a.png,masks/a.png,tr,p1\nimages/b.png,masks//b.png,valid,p2\n",
    "as on Windows": "image,mask,split,group\nimages\\a.png,masks\\a.png,train,p1\nimages/b.png,masks/b.png,val,p2\n",
}


@pytest.mark.parametrize("text", WAYS.values(), ids=WAYS)
def test_a_split_file_may_be_written_in_many_ways(data, text):
    found = read(data, text)
    assert found.pairs == (pair(data, "a", "train", "p1"), pair(data, "b", "val", "p2"))
    assert (found.rule, found.blocking_message, found.problems, found.is_divided) == ("split.csv", "", (), True)


@pytest.mark.parametrize(("text", "columns"), [
    ("image,split\nimages/a.png,train\n", "image, split"),
    ("mask\nmasks/a.png\n", "mask"),
    ("image,mask,patient\nimages/a.png,masks/a.png,p1\n", "image, mask, patient"),
    ("image,mask,image\nimages/a.png,masks/a.png,images/b.png\n", "image, mask, image"),
    ("images/a.png,masks/a.png\n", "images/a.png, masks/a.png"),
    ("", "none"),
    ("x" * 3000, "x" * 60),
], ids=["no mask", "no image", "unknown", "twice", "no header", "empty", "no table"])  # fmt: skip
def test_missing_and_unknown_columns_are_refused_with_the_columns_found(data, text, columns):
    assert csv_error(data, text) == f"split_file: DATA/split.csv has the columns {columns}; {NEEDED}"


GONE = ["images/a.png,masks/a.png,train", "images/b.png,gone/more/b.png,train", "other/c.png,gone/c.png,val", "images/x.png,gone/x.png,val"]  # fmt: skip


def test_every_problem_is_named_with_its_line(data):
    rows = ["images/a.png,masks/a.png,train", "images/x.png,masks/y.png,train", "images/b.png,masks/b.png,holdout", "",
            "images/a.png,masks/c.png,val", "images/d.png,,train", "images/c.png,masks/c.png,"]  # fmt: skip
    assert csv_error(data, "\n".join(["image,mask,split", *rows])).splitlines() == [
        "split_file: DATA/split.csv:",
        "  line 3: no file DATA/images/x.png and no file DATA/masks/y.png",
        "  line 4: split 'holdout'; need train, val or test",
        "  line 6: DATA/images/a.png is in line 2 too",
        "  line 7: need an image and a mask",
        "  some rows have a split and some have none; fill in all or leave the column out",
    ]
    # A folder that is gone is named once, and not each of its files.
    text = "\n".join(["image,mask,split", *GONE])
    assert csv_error(data, text).splitlines()[1:] == [
        "  no folder DATA/gone (2 rows)",
        "  no folder DATA/other (1 row)",
        "  line 5: no file DATA/images/x.png and no file DATA/gone/x.png",
    ]
    assert csv_error(data, text, data / "moved").splitlines()[1:] == ["  no folder DATA/moved (4 rows)"]
    # Paths of another machine.
    assert csv_error(data, "image;mask\nC:\\bob\\a.png;/home/bob/b.png\n").splitlines()[1:] == [
        "  line 2: no file DATA/C:\\bob\\a.png and no file /home/bob/b.png",
        "  Paths are as seen from data_dir, such as images/a.png, in UTF-8",
    ]


@pytest.mark.parametrize("name", [
    " a", "a ", "a\rb", "\ra", "a\r\nb", "a\nb", '"a"', "a,b", "a;b", "\ta", "K\udce4fer", "ä", "a\u0308", "#a", "'a'",
])  # fmt: skip
def test_any_name_survives_being_written_and_read(data, name):
    """Also those with spaces, line breaks and bytes that are not UTF-8: else the run could never go on."""
    for folder in ("images", "masks"):
        (data / folder / f"{name}.png").touch()
    pairs = (pair(data, name, "train", group=name), pair(data, "b", "val"))
    write_text_atomically(data / "mine.csv", split_csv_text(Split(pairs[:1], pairs[1:], ""), data))
    assert read_split_csv(data / "mine.csv", data).pairs == pairs


@pytest.mark.parametrize(
    "box", ["1 2 3", "0 0 9 0", "5 0 5 9", "0 0 -1 9", "0 0 1e3 9", "0 0 9 9999999999", "a b c d", "1 2 3 4 5"]
)
def test_a_box_that_is_none_is_told_with_its_line(data, box):
    message = csv_error(data, f"image,mask,split,box\nimages/a.png,masks/a.png,train,{box}\n")
    assert f"line 2: box {box!r}; need top, left, bottom and right in pixels, such as 0 0 512 512" in message


def test_a_nul_and_a_link_that_leads_to_itself_are_no_reason_for_a_traceback(data):
    (data / "loop.png").symlink_to("loop.png")
    (data / "split.csv").write_text("image,mask,split\nloop.png,loop.png,train\na\0b,a,train\n")
    assert listed_files(data / "split.csv", data, "train")[0] == [data.resolve() / "loop.png", data / "a\0b"]


def test_boxes_of_a_split_file_are_cut_once_when_a_run_reads_its_table_again(data):
    for folder in ("images", "masks"):
        write_image(data / folder / "a.png", np.arange(40 * 30, dtype=np.uint8).reshape(40, 30))
    rows = [f"images/a.png,masks/a.png,{part},{top} 0 {top + 20} 30" for part, top in (("train", 0), ("val", 20))]
    (data / "mine.csv").write_text("\n".join(["image,mask,split,box", *rows]))
    converter = Converter(data, data / "checkpoints")
    found = read_split_csv(data / "mine.csv", data, converter=converter)
    assert [decode_image(pair.image.read_bytes()).shape[:2] for pair in found.pairs] == [(20, 30)] * 2
    (data / "run.csv").write_text(split_csv_text(Split(found.pairs[:1], found.pairs[1:], ""), data))
    assert read_split_csv(data / "run.csv", data, found, converter).pairs == found.pairs
