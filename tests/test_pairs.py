"""Folders as people have them: which files are pairs, which are left over, and how the pairs are split."""

from __future__ import annotations

import hashlib

import pytest

from unet_trainer.config import load_config
from unet_trainer.images import DataError
from unet_trainer.pairs import Pair, build_split, find_pairs, split_pairs


def touch(folder, *names):
    """Pairing opens no file, so empty ones do."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(pairs):
    return [pair.name for pair in pairs]


def split_of(data_dir, **settings):
    return build_split(load_config({"data_dir": str(data_dir), **settings}))


def refusal(call, *arguments, **options):
    with pytest.raises(DataError) as raised:
        call(*arguments, **options)
    return str(raised.value)


def numbered(count):
    return [f"{i:03d}.png" for i in range(count)]


# Pairing


def test_files_pair_by_name_whatever_their_extension(tmp_path):
    touch(tmp_path / "images", "b.jpg", "a.PNG", "c.tiff")
    touch(tmp_path / "masks", "a.png", "b.png", "c.bmp")
    assert find_pairs(tmp_path / "images", tmp_path / "masks") == [
        Pair("a", tmp_path / "images/a.PNG", tmp_path / "masks/a.png"),
        Pair("b", tmp_path / "images/b.jpg", tmp_path / "masks/b.png"),
        Pair("c", tmp_path / "images/c.tiff", tmp_path / "masks/c.bmp"),
    ]


def test_a_suffix_of_the_masks_is_taken_off(tmp_path):
    touch(tmp_path / "images", "a.jpg", "b_mask.jpg")
    touch(tmp_path / "masks", "a_mask.png", "b_mask_mask.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks", "_mask")) == ["a", "b_mask"]


def test_dots_in_names_are_kept(tmp_path):
    touch(tmp_path / "images", "cell.v1.png", "cell.v2.png")
    touch(tmp_path / "masks", "cell.v1.png", "cell.v2.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["cell.v1", "cell.v2"]


def test_subfolders_are_searched_and_belong_to_the_name(tmp_path):
    touch(tmp_path / "images", "p1/001.png", "p2/001.png", "p2/deep/3.png")
    touch(tmp_path / "masks", "p1/001_m.png", "p2/001_m.png", "p2/deep/3_m.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks", "_m")) == ["p1/001", "p2/001", "p2/deep/3"]


def test_hidden_files_and_other_extensions_are_no_images(tmp_path):
    touch(tmp_path / "images", "a.png", ".DS_Store", "._a.png", ".cache/b.png", "Thumbs.db", "notes.txt")
    touch(tmp_path / "masks", "a.png", "._a.png", "classes.json")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["a"]


def test_a_folder_named_like_an_image_is_no_image(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png/c.png")
    touch(tmp_path / "masks", "a.png", "b.png/c.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["a", "b.png/c"]


def test_images_without_masks_and_masks_without_images_are_named_together(tmp_path):
    touch(tmp_path / "images", "a.png", "b.jpg", "c.png")
    touch(tmp_path / "masks", "a_m.png", "d_m.png")
    images, masks = tmp_path / "images", tmp_path / "masks"
    assert refusal(find_pairs, images, masks, "_m").splitlines() == [
        "images and masks do not pair up:",
        f"  2 images without a mask in {masks} (such as b_m.png): {images / 'b.jpg'}, {images / 'c.png'}",
        f"  1 mask without an image in {images}: {masks / 'd_m.png'}",
    ]


def test_many_leftovers_are_counted_and_five_are_named(tmp_path):
    touch(tmp_path / "images", *numbered(9))
    touch(tmp_path / "masks", "000.png")
    message = refusal(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert "8 images without a mask" in message
    assert message.endswith(f"{tmp_path / 'images/005.png'} and 3 more")


def test_when_no_name_matches_the_suffix_is_suspected(tmp_path):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a_mask.png")
    assert refusal(find_pairs, tmp_path / "images", tmp_path / "masks").endswith("\n  No name matches: is mask_suffix right?")


def test_a_mask_without_the_suffix_is_named(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png")
    touch(tmp_path / "masks", "a_mask.png", "b.png")
    message = refusal(find_pairs, tmp_path / "images", tmp_path / "masks", "_mask")
    assert f"{tmp_path / 'masks/b.png'} does not end in mask_suffix '_mask'" in message
    assert "1 image without a mask" in message


@pytest.mark.parametrize("folder", ["images", "masks"])
def test_two_files_of_one_name_are_refused(tmp_path, folder):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a.png")
    touch(tmp_path / folder, "a.bmp")
    first, second = tmp_path / folder / "a.bmp", tmp_path / folder / "a.png"
    message = refusal(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert message == f"images and masks do not pair up:\n  {first} and {second} have the same name; keep one"


def test_missing_folders_are_named_beside_those_that_are_there(tmp_path):
    touch(tmp_path / "img", "a.png")
    touch(tmp_path / "gt", "a.png")
    touch(tmp_path, "readme.txt")
    assert refusal(split_of, tmp_path) == (
        f"no folder {tmp_path / 'images'} and no folder {tmp_path / 'masks'}; {tmp_path} holds gt/, img/; "
        "set image_dir and mask_dir to the folders' names"
    )


def test_a_missing_mask_folder_alone_is_named(tmp_path):
    touch(tmp_path / "images", "a.png")
    assert refusal(split_of, tmp_path).startswith(f"no folder {tmp_path / 'masks'}; {tmp_path} holds images/; set image_dir")


def test_a_folder_without_images_says_which_extensions_count(tmp_path):
    touch(tmp_path / "images", "a.gif")
    touch(tmp_path / "masks")
    assert refusal(split_of, tmp_path) == (
        f"no images in {tmp_path / 'images'}; need files with one of .bmp, .jpeg, .jpg, .png, .tif, .tiff, .webp"
    )


def test_a_data_dir_that_is_not_there_or_no_folder_is_refused(tmp_path):
    missing = tmp_path / "nothing"
    assert refusal(split_of, missing) == f"data_dir: {missing} does not exist; need a folder with images/ and masks/"
    touch(tmp_path, "file")
    file = tmp_path / "file"
    assert refusal(split_of, file) == f"data_dir: {file} is not a folder; need a folder with images/ and masks/"


def test_folders_of_other_names_are_set_in_the_config(tmp_path):
    touch(tmp_path / "img", *numbered(4))
    touch(tmp_path / "gt", *numbered(4))
    split = split_of(tmp_path, image_dir="img", mask_dir="gt")
    assert len(split.train) + len(split.val) == 4


# train and val folders


def test_train_and_val_folders_above_images_and_masks_are_the_split(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"])):
        touch(tmp_path / part / "images", *files)
        touch(tmp_path / part / "masks", *files)
    split = split_of(tmp_path)
    assert (names(split.train), names(split.val), split.rule) == (["a", "b"], ["c"], "folders train and val")


def test_train_and_val_folders_below_images_and_masks_are_the_split(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"]), ("test", ["d.png"])):
        touch(tmp_path / "images" / part, *files)
        touch(tmp_path / "masks" / part, *files)
    split = split_of(tmp_path)
    assert (names(split.train), names(split.val), split.rule) == (["a", "b"], ["c"], "folders train and val")


def test_a_train_folder_alone_is_split_by_fraction(tmp_path):
    touch(tmp_path / "train/images", *numbered(10))
    touch(tmp_path / "train/masks", *numbered(10))
    split = split_of(tmp_path, val_fraction=0.3)
    assert (len(split.train), len(split.val), split.rule) == (7, 3, "val_fraction 0.3, seed 42")


def test_a_val_folder_without_its_masks_is_refused(tmp_path):
    touch(tmp_path / "train/images", "a.png")
    touch(tmp_path / "train/masks", "a.png")
    touch(tmp_path / "val/images", "b.png")
    assert refusal(split_of, tmp_path).startswith(f"no folder {tmp_path / 'val/masks'}; {tmp_path / 'val'} holds images/")


def test_absolute_folders_are_split_like_others_and_not_validated_on_themselves(tmp_path):
    touch(tmp_path / "here/img", *numbered(10))
    touch(tmp_path / "there/gt", *numbered(10))
    settings = {"image_dir": str(tmp_path / "here/img"), "mask_dir": str(tmp_path / "there/gt")}
    split = split_of(tmp_path, **settings)
    assert (len(split.train), len(split.val), split.rule) == (8, 2, "val_fraction 0.2, seed 42")
    assert not set(split.train) & set(split.val)


def test_absolute_folders_may_hold_train_and_val(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"])):
        touch(tmp_path / "here" / part, *files)
        touch(tmp_path / "there" / part, *files)
    split = split_of(tmp_path, image_dir=str(tmp_path / "here"), mask_dir=str(tmp_path / "there"))
    assert (names(split.train), names(split.val)) == (["a", "b"], ["c"])


# Splitting


def made_up(count):
    return [Pair(f"{i:03d}", None, None) for i in range(count)]


@pytest.mark.parametrize("count", [2, 3, 10, 57])
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_every_pair_lands_on_exactly_one_side_and_neither_is_empty(count, fraction):
    train, val = split_pairs(made_up(count), fraction, seed=1)
    assert sorted(names(train) + names(val)) == names(made_up(count))
    assert train
    assert val


@pytest.mark.parametrize(
    ("count", "fraction", "num_val"), [(10, 0.2, 2), (240, 0.2, 48), (10, 0.01, 1), (10, 0.99, 9), (2, 0.9, 1)]
)
def test_the_fraction_is_rounded_and_leaves_one_on_each_side(count, fraction, num_val):
    assert len(split_pairs(made_up(count), fraction, seed=0)[1]) == num_val


def test_the_split_is_the_same_on_every_machine():
    train, val = split_pairs(made_up(10), 0.3, seed=42)
    assert names(val) == ["000", "007", "008"]  # a change of this line moves images between train and val in resumed runs
    assert names(train) == ["001", "002", "003", "004", "005", "006", "009"]


def test_another_seed_gives_another_split():
    splits = {tuple(names(split_pairs(made_up(30), 0.2, seed)[1])) for seed in range(10)}
    assert len(splits) == 10


def test_the_split_is_shuffled_and_not_the_head_or_the_tail():
    """Files in order of time or patient: the last fifth is not like the rest."""
    val = names(split_pairs(made_up(100), 0.2, seed=0)[1])
    assert val not in (names(made_up(100))[:20], names(made_up(100))[-20:])
    assert min(val) < "030"
    assert max(val) > "070"


def test_one_pair_is_refused(tmp_path):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a.png")
    assert refusal(split_of, tmp_path) == "only 1 pair; need at least 2, one to train on and one to validate on"


def test_finding_and_splitting_leave_the_folder_as_it_is(tmp_path):
    for folder in ("images", "masks"):
        touch(tmp_path / folder, *numbered(4))
        for path in (tmp_path / folder).iterdir():
            path.write_bytes(path.name.encode())

    def state():
        return {
            path: (path.stat().st_mtime_ns, path.is_file() and hashlib.sha256(path.read_bytes()).digest())
            for path in tmp_path.rglob("*")
        }

    before = state()
    split_of(tmp_path)
    assert state() == before
