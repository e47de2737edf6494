"""Which folders hold the images and which the masks, by their names or by image_dir and mask_dir. Opens no file.

A folder is found by what its path consists of: a name for images or masks (K), for a part (P), both in one (PK), or that of a
sequence (*): K, K/P, P/K, PK, */K and P/*/K. Where none is named so, P or data_dir itself. If more than one folder is possible,
none is chosen: the question names them and the lines to set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unet_trainer.datasets.file_tree import holds_images, list_files, subfolders
from unet_trainer.datasets.name_matching import best_match, mask_marks, name_files
from unet_trainer.datasets.pairs import Part, path_in
from unet_trainer.datasets.problems import Question, first_few
from unet_trainer.images.file_bytes import DataError

Kind = Literal["image", "mask"]
KEYS: dict[Kind, str] = {"image": "image_dir", "mask": "mask_dir"}

# Folder names, in lower case and without separators: img_dir is imgdir.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("image", "images", "img", "imgs", "imgdir", "imagedir", "imagefolder", "jpegimages", "pngimages", "input", "inputs",
         "frame", "frames", "photo", "photos", "picture", "pictures", "rgb", "leftimg8bit"),
        "image",
    ),
    **dict.fromkeys(
        ("mask", "masks", "maskdir", "label", "labels", "labeldir", "annotation", "annotations", "annot", "annots", "ann", "anns",
         "anndir", "annotationdir", "gt", "gts", "groundtruth", "groundtruths", "gtfine", "seg", "segs", "segmentation",
         "segmentations", "segmentationclass", "segmentationmask", "segmentationmasks", "target", "targets", "truth", "manual",
         "1stmanual", "2ndmanual", "trimap", "trimaps", "matte", "mattes"),
        "mask",
    ),
}  # fmt: skip
PARTS: dict[str, Part] = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test", "stage1train": "train", "stage1test": "test",
}  # fmt: skip

MAX_PROPOSED = 8  # folders among which two are looked for whose names pair up


@dataclass(frozen=True)
class Folders:
    """A folder of images and that of their masks, which may be the same one."""

    images: Path
    masks: Path
    name: str = ""  # of a sequence, with a slash: put before the names of its images
    without: tuple[Path, ...] = ()  # folders inside these that belong to another part, and results of predict


@dataclass(frozen=True)
class Layout:
    """The folders of each part, several where each sequence has its own; and phrases that describe them.

    Without a val folder, `val` is empty and `train` is to be divided.
    """

    train: tuple[Folders, ...]
    val: tuple[Folders, ...]
    test: tuple[Folders, ...]
    phrase: str
    parts: str  # "folders train and val", or "" without a val folder


class _Found(NamedTuple):
    """A possible folder of images or masks."""

    path: Path
    kind: Kind
    part: str  # "": data that is not divided
    part_name: str  # of the folder that makes it train or val
    value: str  # what selects it in the config
    sequence: str = ""
    without: tuple[Path, ...] = ()


def find_layout(
    data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str = "", root: Path | None = None
) -> Layout:
    """The folders of images and masks in data_dir; where image_dir or mask_dir is set, it is not searched. Raises DataError.

    `root` is data_dir, or the one folder in it that everything is in."""
    root = root or data_dir
    found = [*_candidates(root, "image", image_dir), *_candidates(root, "mask", mask_dir)]
    sequences = _join_sequences(found)
    found = [each for each in found if not each.sequence]
    if not any(each.part in ("", "train") for each in found) and any(part in ("", "train") for part, _ in sequences):
        return _layout_of_sequences(data_dir, sequences, found)
    for kind, given in (("image", image_dir), ("mask", mask_dir)):
        if given is not None and not any(each.kind == kind for each in found):
            parent = (root / given).parent
            values = [path_in(root, folder) for folder in subfolders(parent) if list_files(folder)]
            choices = [{f"{kind}_dir": value} for value in values[:MAX_PROPOSED]]
            raise Question(f"{kind}_dir: no folder {root / given}; {_contents(parent)}", *choices)
    if image_dir is None:
        found += _bare_folders(root, found, mask_suffix)
    image, mask = (_only(data_dir, kind, found, ("", "train")) for kind in KEYS)
    if image and not mask and holds_masks_too(list_files(image.path, image.without), mask_suffix):
        mask = image
    if not image or not mask:
        inner = [folder for folder in subfolders(root) if list_files(folder)]
        if image_dir is None and mask_dir is None and not found and len(inner) == 1 and _meaning(inner[0].name) == ("", None):
            return find_layout(data_dir, None, None, mask_suffix, inner[0])  # what an archive puts around its content
        raise _missing(data_dir, root, found, image, mask)
    train = Folders(image.path, mask.path, without=(*image.without, *mask.without))
    test = _find_test(found, image == mask, mask_suffix)
    phrase = _phrase(data_dir, train)
    val_image, val_mask = (_only(data_dir, kind, found, ("val",)) for kind in KEYS)
    if not val_image:
        return Layout((train,), (), test, phrase, "")
    if not val_mask and image != mask:
        wanted = data_dir / re.sub(r"(?i)train(ing)?", val_image.part_name, path_in(data_dir, train.masks))
        raise Question(
            f"no folder {wanted}; {_contents(val_image.path.parent)}; add it, or to train and validate on one folder",
            {"image_dir": path_in(data_dir, train.images), "mask_dir": path_in(data_dir, train.masks)},
        )
    names = f"folders {image.part_name or path_in(data_dir, train.images)} and {val_image.part_name}"
    return Layout((train,), (Folders(val_image.path, (val_mask or val_image).path),), test, phrase, names)


def holds_masks_too(files: Sequence[Path], mask_suffix: str) -> bool:
    """Whether some of the files are masks: some but not all are named like one, or two files share a name (a.jpg, a.png)."""
    marked = [path for path in files if mask_marks(path.stem) or (mask_suffix and path.stem.endswith(mask_suffix))]
    return 0 < len(marked) < len(files) or len({path.with_suffix("") for path in files}) < len(files)


def _meaning(name: str) -> tuple[str, Kind | None]:
    """Part and kind of a folder by its name: train_masks → train, mask; imgs → "", image; foo → "", None."""
    word = re.sub(r"[-_. ]", "", name.lower())
    if word in KINDS or word in PARTS:
        return PARTS.get(word, ""), KINDS.get(word)
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return "", None


def _part_folders(folder: Path) -> list[tuple[str, Path]]:
    return [(part, inner) for inner in subfolders(folder) for part, kind in [_meaning(inner.name)] if part and not kind]


def _candidates(root: Path, kind: Kind, given: str | None) -> list[_Found]:
    """The folders of images, or of masks: those with a name for them, or `given`, at the places that the module describes."""
    parts = [("", root), *_part_folders(root)]
    places = [(part, place, "") for part, place in parts]
    places += [
        (part, inner, inner.name) for part, place in parts for inner in subfolders(place) if _meaning(inner.name) == ("", None)
    ]
    found: list[_Found] = []
    for part, place, sequence in places:
        if given is not None:
            is_elsewhere = Path(given).is_absolute() and place != root
            named = [place / given] if (place / given).is_dir() and not is_elsewhere else []
        else:
            named = [
                inner
                for inner in subfolders(place)
                for its_part, its_kind in [_meaning(inner.name)]
                if its_kind == kind and (its_part in ("", part) or place == root)
            ]
        if sequence and len(named) > 1:
            named = [folder for folder in named if list_files(folder)]
        if sequence:
            part_name = place.parent.name if part else ""
            found += [_Found(folder, kind, part, part_name, folder.name, sequence) for folder in named if len(named) == 1]
            continue
        for folder in named:
            value, (own_part, _) = given or folder.name, _meaning(folder.name) if given is None else ("", None)
            if part or own_part:
                found.append(_Found(folder, kind, part or own_part, place.name if part else folder.name, value))
                continue
            below = _part_folders(folder)
            others = tuple(inner for _, inner in below)
            is_divided = any(its_part == "train" for its_part, _ in below)
            if not below or (not is_divided and any(path.parent == folder for path in list_files(folder, others))):
                found.append(_Found(folder, kind, "", "", value, without=others))
            found += [_Found(inner, kind, its_part, inner.name, f"{value}/{inner.name}") for its_part, inner in below]
    if holds_images(root):
        found = [each for each in found if each.part or not each.sequence]
    if given is not None and (root / given).is_dir():
        found = [each for each in found if each.path.is_relative_to(root / given)]
    return found


def _join_sequences(found: Sequence[_Found]) -> list[tuple[str, Folders]]:
    """Part and folders of each sequence with images and masks; one of test may lack masks."""
    by_place: dict[Path, dict[Kind, _Found]] = {}
    for each in found:
        if each.sequence:
            by_place.setdefault(each.path.parent, {})[each.kind] = each
    joined = []
    for place, kinds in by_place.items():
        image, mask = kinds.get("image"), kinds.get("mask")
        if image and (mask or image.part == "test"):
            joined.append((image.part, Folders(image.path, mask.path if mask else place / "masks", f"{image.sequence}/")))
    return joined


def _layout_of_sequences(data_dir: Path, sequences: Sequence[tuple[str, Folders]], found: Sequence[_Found]) -> Layout:
    train_part = "" if any(part == "" for part, _ in sequences) else "train"
    train, val, test = (tuple(each for its, each in sequences if its == part) for part in (train_part, "val", "test"))
    first = train[0]
    if train_part == "" and len(train) == 1 and not val and not test:  # a folder around everything
        return Layout((Folders(first.images, first.masks),), (), (), _phrase(data_dir, first), "")
    around = first.images.parent.parent
    images, masks = (path_in(data_dir, around / "*" / path.name) for path in (first.images, first.masks))
    parts = f"folders {around.name if train_part else '.'} and {val[0].images.parent.parent.name}" if val else ""
    return Layout(train, val, test or _find_test(found, False, ""), f"{images}/ + {masks}/ in {len(train)} folders", parts)


def _bare_folders(root: Path, found: Sequence[_Found], mask_suffix: str) -> list[_Found]:
    """Folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    parts = _part_folders(root)
    has_masks = any(each.kind == "mask" and each.part != "test" for each in found)
    kinds: tuple[Kind, ...] = ("image",) if has_masks else ("image", "mask")
    bare: list[_Found] = []
    for part, folder in parts:
        if not any((each.part, each.kind) == (part, "image") for each in found) and list_files(folder):
            bare += [_Found(folder, kind, part, folder.name, folder.name) for kind in kinds[: 1 if part == "test" else 2]]
    if any(part != "test" for part, _ in parts) or any(each.kind == "image" and each.part in ("", "train") for each in found):
        return bare
    tests = tuple(folder for _, folder in parts)
    files = list_files(root, tests)
    holds_both = has_masks or holds_masks_too(files, mask_suffix)
    if (holds_both or not tests) and (any(path.parent == root for path in files) or (holds_both and not has_masks)):
        bare += [_Found(root, kind, "", "", ".", without=tests) for kind in kinds]  # files beside test/ alone may be anything
    return bare


def _find_test(found: Sequence[_Found], is_side_by_side: bool, mask_suffix: str) -> tuple[Folders, ...]:
    """The folders of the images that neither train nor validate; none if they are ambiguous, which stops no training."""
    there = [each for each in found if each.part == "test" and list_files(each.path)]
    images, masks = ([each.path for each in there if each.kind == kind] for kind in KEYS)
    if len(images) != 1 or len(masks) > 1:
        return ()
    is_side_by_side = not masks and is_side_by_side and holds_masks_too(list_files(images[0]), mask_suffix)
    return (Folders(images[0], masks[0] if masks else images[0] if is_side_by_side else images[0] / "masks"),)


def _only(data_dir: Path, kind: Kind, found: Sequence[_Found], parts: Sequence[str]) -> _Found | None:
    """The one folder of these parts, or None; raises Question if several are left."""
    candidates = sorted((each for each in found if each.kind == kind and each.part in parts), key=lambda each: each.part)
    if len(candidates) > 1:  # labels/ with text files beside masks/ is not a candidate
        candidates = [each for each in candidates if list_files(each.path)] or candidates
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    paths = [path_in(data_dir, each.path) for each in candidates]
    values = [each.value for each in candidates]
    values = values if len(set(values)) == len(values) else paths
    folders = ", ".join(f"{path}/" for path in paths)
    raise Question(
        f"{KEYS[kind]}: {len(paths)} folders in {data_dir} could hold the {kind}s: {folders}",
        *({KEYS[kind]: value} for value in values),
    )


def _missing(data_dir: Path, root: Path, found: Sequence[_Found], image: _Found | None, mask: _Found | None) -> DataError:
    """What was not found, with the folders that may be meant: those of val or test, or two whose names pair up, larger files being
    the images."""
    for part in ("val", "test"):
        by_kind = [next((each for each in found if (each.part, each.kind) == (part, kind)), None) for kind in KEYS]
        if by_kind[0] and by_kind[1]:
            images, masks = (path_in(data_dir, each.path) for each in by_kind if each)
            return Question(f"data_dir: {data_dir} holds {images}/ but no train/", {"image_dir": images, "mask_dir": masks})
    keys = [key for key, there in (("image_dir", image), ("mask_dir", mask)) if not there]
    wanted = {"image_dir": "no folder of images (images, imgs, ...)", "mask_dir": "no folder of masks (masks, labels, ...)"}
    text = f"data_dir: {' and '.join(wanted[key] for key in keys)} in {root}; {_contents(root)}"
    there = [folder for folder in subfolders(root) if list_files(folder)][:MAX_PROPOSED]
    of_images, of_masks = ([each.path] if each else there for each in (image, mask))
    files = {folder: name_files(list_files(folder), folder) for folder in {*of_images, *of_masks}}
    sizes = {folder: sum(file.path.stat().st_size for file in its if file.path.exists()) for folder, its in files.items()}
    pairs = [
        (first, second)
        for first, second in permutations(files, 2)
        if first in of_images and second in of_masks and best_match(files[first], files[second], first).is_complete
    ]
    if not pairs:
        folders = "folder" if len(keys) == 1 else "folders"
        return DataError(f"{text}; set {' and '.join(keys)} to the {folders} to use, or split_file to a CSV")
    best = min(pairs, key=lambda pair: (sizes[pair[1]] - sizes[pair[0]], pair))
    proposed: dict[str, Any] = dict(zip(KEYS.values(), (path_in(data_dir, folder) for folder in best), strict=True))
    return Question(text, {key: value for key, value in proposed.items() if key in keys})


def _contents(folder: Path) -> str:
    names = [f"{path.name}/" for path in subfolders(folder)]
    return f"{folder} holds {first_few(names, 10) if names else 'no folder'}"


def _phrase(data_dir: Path, folders: Folders) -> str:
    images, masks = path_in(data_dir, folders.images), path_in(data_dir, folders.masks)
    if images == masks:
        return "image and mask side by side" + ("" if images == "." else f" in {images}/")
    return f"{images}/ + {masks}/"
