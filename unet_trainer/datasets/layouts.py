"""Which folders hold the images and which the masks, by their names or by image_dir and mask_dir. Opens no file.

If more than one folder is possible, none is chosen: the question names them and the lines to set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unet_trainer.datasets.file_tree import holds_images, list_files, subfolders
from unet_trainer.datasets.name_matching import best_match, mask_marks, name_files
from unet_trainer.datasets.problems import Question, first_few
from unet_trainer.images.file_bytes import DataError

Kind = Literal["image", "mask"]
Part = Literal["train", "val", "test"]
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
    without: tuple[Path, ...] = ()  # folders inside these that belong to another part


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
    """A possible folder. `part_name` is the folder name that makes it train or val; `value` is what selects it in the config."""

    path: Path
    part_name: str
    value: str
    without: tuple[Path, ...] = ()  # folders inside it that belong to another part


_Slots = dict[tuple[str, Kind], list[_Found]]  # (part, kind) → possible folders; part "" is data that is not divided
_Sequences = dict[str, tuple[str, list[Folders]]]  # part → name of its folder, and the folders of each sequence


def find_layout(data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str = "") -> Layout:
    """The folders of images and masks in data_dir; where image_dir or mask_dir is set, it is not searched. Raises DataError."""
    return _find_layout(data_dir, data_dir, image_dir, mask_dir, mask_suffix)


def _find_layout(root: Path, data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str) -> Layout:
    """`root` is data_dir, or the one folder in it that everything is in."""
    slots: _Slots = defaultdict(list)
    sequences = _find_sequences(root, image_dir, mask_dir)
    keys: dict[Kind, str | None] = {"image": image_dir, "mask": mask_dir}
    for kind, given in keys.items():
        if given is None:
            _search(root, kind, slots)
        else:
            _use_given(root, kind, given, slots, is_optional=bool(sequences))
    train_part = next((part for part in ("", "train") if sequences.get(part)), None)
    if train_part is not None and not any(slots[part, kind] for part in ("", "train") for kind in KEYS):
        return _layout_of_sequences(data_dir, sequences, train_part, slots)
    if image_dir is None:
        _add_bare_folders(root, mask_dir is not None, mask_suffix, slots)
    train_image = _only(data_dir, "image", [*slots["", "image"], *slots["train", "image"]])
    train_mask = _only(data_dir, "mask", [*slots["", "mask"], *slots["train", "mask"]])
    if train_image and not train_mask and holds_masks_too(list_files(train_image.path, train_image.without), mask_suffix):
        train_mask = train_image
    if not train_image or not train_mask:
        if image_dir is None and mask_dir is None and not any(slots.values()) and (inner := _only_folder_with_files(root)):
            return _find_layout(inner, data_dir, None, None, mask_suffix)
        _ask_for_part(data_dir, slots)
        raise _missing(
            data_dir, root, [KEYS["image"]] * (not train_image) + [KEYS["mask"]] * (not train_mask), train_image, train_mask
        )
    train = Folders(train_image.path, train_mask.path, without=(*train_image.without, *train_mask.without))
    test = _find_test(slots, is_side_by_side=train_image == train_mask, mask_suffix=mask_suffix)
    val_image = _only(data_dir, "image", slots["val", "image"])
    val_mask = _only(data_dir, "mask", slots["val", "mask"])
    if not val_image:
        return Layout((train,), (), test, _phrase(data_dir, train), "")
    if not val_mask:
        if train_image != train_mask:
            wanted = data_dir / re.sub(r"(?i)train(ing)?", val_image.part_name, str(_relative(data_dir, train.masks)))
            raise Question(
                f"no folder {wanted}; {_contents(val_image.path.parent)}; add it, or to train and validate on one folder",
                {"image_dir": _value(data_dir, train.images), "mask_dir": _value(data_dir, train.masks)},
            )
        val_mask = val_image
    names = f"folders {train_image.part_name or _relative(data_dir, train.images)} and {val_image.part_name}"
    return Layout((train,), (Folders(val_image.path, val_mask.path),), test, _phrase(data_dir, train), names)


def holds_masks_too(files: Sequence[Path], mask_suffix: str) -> bool:
    """Whether some of the files are masks: some but not all are named like one, or two files share a name (a.jpg, a.png)."""
    marked = [path for path in files if mask_marks(path.stem) or (mask_suffix and path.stem.endswith(mask_suffix))]
    return 0 < len(marked) < len(files) or len({path.with_suffix("") for path in files}) < len(files)


def _meaning(name: str) -> tuple[str, Kind | None]:
    """Part and kind of a folder by its name: train_masks → train, mask; imgs → "", image; foo → "", None."""
    word = re.sub(r"[-_. ]", "", name.lower())
    if word in KINDS:
        return "", KINDS[word]
    if word in PARTS:
        return PARTS[word], None
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return "", None


def _search(root: Path, kind: Kind, slots: _Slots) -> None:
    """Finds images/, images/train/, train/images/ and train_images/."""
    for folder in subfolders(root):
        part, its_kind = _meaning(folder.name)
        if its_kind == kind and part:
            slots[part, kind].append(_Found(folder, folder.name, folder.name))
        elif its_kind == kind:
            _add_parts_below(folder, kind, folder.name, slots)
        elif part and its_kind is None:
            for inner in subfolders(folder):
                inner_part, inner_kind = _meaning(inner.name)
                if inner_kind == kind and inner_part in ("", part):
                    slots[part, kind].append(_Found(inner, folder.name, inner.name))


def _use_given(root: Path, kind: Kind, given: str, slots: _Slots, is_optional: bool) -> None:
    """root/given, undivided or with train and val inside; else train/given and val/given."""
    if (root / given).is_dir():
        _add_parts_below(root / given, kind, given, slots)
        return
    for folder in [] if Path(given).is_absolute() else subfolders(root):
        part, its_kind = _meaning(folder.name)
        if part and its_kind is None and (folder / given).is_dir():
            slots[part, kind].append(_Found(folder / given, folder.name, given))
    if not is_optional and not any(found for (_, its_kind), found in slots.items() if its_kind == kind):
        parent, wrong = (root / given).parent, f"{KEYS[kind]}: no folder {root / given}"
        choices = [{KEYS[kind]: _value(root, folder)} for folder in subfolders(parent) if list_files(folder)]
        raise Question(f"{wrong}; {_contents(parent)}", *choices[:MAX_PROPOSED])


def _add_parts_below(folder: Path, kind: Kind, value: str, slots: _Slots) -> None:
    parts = [(part, inner) for inner in subfolders(folder) for part, its_kind in [_meaning(inner.name)] if part and not its_kind]
    others = tuple(inner for _, inner in parts)
    has_direct = all(part != "train" for part, _ in parts) and any(path.parent == folder for path in list_files(folder, others))
    if not parts or has_direct:
        slots["", kind].append(_Found(folder, "", value, others))
    for part, inner in parts:
        slots[part, kind].append(_Found(inner, inner.name, f"{value}/{inner.name}"))


def _find_sequences(root: Path, image_dir: str | None, mask_dir: str | None) -> _Sequences:
    """Finds seq1/images/ + seq1/masks/, seq2/images/ + ..., in root and in train/, val/ and test/."""
    places = [
        *([] if holds_images(root) else [("", root)]),
        *((part, folder) for folder in subfolders(root) for part, kind in [_meaning(folder.name)] if part and not kind),
    ]
    found: _Sequences = {}
    for part, place in places:
        folders = []
        for folder in subfolders(place):
            if _meaning(folder.name) != ("", None):
                continue
            images = _kind_in(folder, "image", image_dir)
            masks = _kind_in(folder, "mask", mask_dir)
            if images and (masks or part == "test"):
                folders.append(Folders(images, masks or folder / "masks", f"{folder.name}/"))
        if folders:
            found[part] = (place.name if part else "", folders)
    return found


def _kind_in(folder: Path, kind: Kind, given: str | None) -> Path | None:
    """The folder of images or of masks in that of a sequence; None if there is none, or several."""
    if given is not None:
        return folder / given if not Path(given).is_absolute() and (folder / given).is_dir() else None
    candidates = [inner for inner in subfolders(folder) if _meaning(inner.name) == ("", kind)]
    if len(candidates) > 1:
        candidates = [inner for inner in candidates if list_files(inner)]
    return candidates[0] if len(candidates) == 1 else None


def _layout_of_sequences(data_dir: Path, sequences: _Sequences, train_part: str, slots: _Slots) -> Layout:
    (train_name, train), (val_name, val), (_, test) = (sequences.get(part, ("", [])) for part in (train_part, "val", "test"))
    first = train[0]
    if train_part == "" and len(train) == 1 and not val and not test:  # a folder around everything
        return Layout((Folders(first.images, first.masks),), (), (), _phrase(data_dir, first), "")
    images, masks = (_relative(data_dir, first.images.parent.parent) / "*" / path.name for path in (first.images, first.masks))
    phrase = f"{images.as_posix()}/ + {masks.as_posix()}/ in {len(train)} folders"
    tests = tuple(test) or _find_test(slots, is_side_by_side=False, mask_suffix="")
    return Layout(tuple(train), tuple(val), tests, phrase, f"folders {train_name or '.'} and {val_name}" if val else "")


def _add_bare_folders(root: Path, mask_dir_is_set: bool, mask_suffix: str, slots: _Slots) -> None:
    """Adds folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    parts = [(part, folder) for folder in subfolders(root) for part, kind in [_meaning(folder.name)] if part and not kind]
    has_masks = mask_dir_is_set or any(slots[part, "mask"] for part in ("", "train", "val"))
    for part, folder in parts:
        if slots[part, "image"] or not list_files(folder):
            continue
        found = _Found(folder, folder.name, folder.name)
        slots[part, "image"].append(found)
        if not has_masks and part != "test":
            slots[part, "mask"].append(found)
    if any(part != "test" for part, _ in parts) or slots["", "image"] or slots["train", "image"]:
        return
    tests = tuple(folder for _, folder in parts)
    files = list_files(root, tests)
    has_direct = any(path.parent == root for path in files)
    if tests and not (has_masks or holds_masks_too(files, mask_suffix)):
        return  # files beside test/ may be anything
    if has_direct or (not has_masks and holds_masks_too(files, mask_suffix)):
        found = _Found(root, "", ".", tests)
        slots["", "image"].append(found)
        if not has_masks:
            slots["", "mask"].append(found)


def _find_test(slots: _Slots, is_side_by_side: bool, mask_suffix: str) -> tuple[Folders, ...]:
    """The folders of the images that neither train nor validate; none if they are ambiguous, which stops no training."""
    images, masks = ([found for found in slots["test", kind] if list_files(found.path)] for kind in KEYS)
    if len(images) != 1 or len(masks) > 1:
        return ()
    folder = images[0].path
    is_side_by_side = not masks and is_side_by_side and holds_masks_too(list_files(folder), mask_suffix)
    return (Folders(folder, masks[0].path if masks else folder if is_side_by_side else folder / "masks"),)


def _only(data_dir: Path, kind: Kind, candidates: list[_Found]) -> _Found | None:
    """The one candidate, or None; raises Question if several are left."""
    if len(candidates) > 1:  # labels/ with text files beside masks/ is not a candidate
        candidates = [found for found in candidates if list_files(found.path)] or candidates
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    key, paths = KEYS[kind], [_value(data_dir, found.path) for found in candidates]
    values = [found.value for found in candidates]
    values = values if len(set(values)) == len(values) else paths
    raise Question(
        f"{key}: {len(paths)} folders in {data_dir} could hold the {kind}s: {', '.join(f'{path}/' for path in paths)}",
        *({key: value} for value in values),
    )


def _ask_for_part(data_dir: Path, slots: _Slots) -> None:
    """Raises Question where there are images and masks to validate or test on, but none to train on."""
    there = [
        {"image_dir": _value(data_dir, slots[part, "image"][0].path), "mask_dir": _value(data_dir, slots[part, "mask"][0].path)}
        for part in ("val", "test")
        if slots[part, "image"] and slots[part, "mask"]
    ]
    if there:
        names = " and ".join(f"{choice['image_dir']}/" for choice in there)
        raise Question(f"data_dir: {data_dir} holds {names} but no train/", *there)


def _missing(data_dir: Path, root: Path, keys: list[str], image: _Found | None, mask: _Found | None) -> DataError:
    """What was not found, with the folders that may be meant: two whose names pair up, larger files being the images."""
    wanted = {"image_dir": "no folder of images (images, imgs, ...)", "mask_dir": "no folder of masks (masks, labels, ...)"}
    text = f"data_dir: {' and '.join(wanted[key] for key in keys)} in {root}; {_contents(root)}"
    there = [folder for folder in subfolders(root) if list_files(folder)][:MAX_PROPOSED]
    images, masks = ([found.path] if found else there for found in (image, mask))
    files = {folder: name_files(list_files(folder), folder) for folder in {*images, *masks}}
    pairs = [
        (first, second)
        for first, second in permutations({*images, *masks}, 2)
        if first in images and second in masks and best_match(files[first], files[second], first).is_complete
    ]
    sizes = {folder: sum(file.path.stat().st_size for file in files[folder] if file.path.exists()) for folder in files}
    pairs.sort(key=lambda pair: (sizes[pair[1]] - sizes[pair[0]], pair))
    proposed: list[dict[str, Any]] = [
        {key: _value(data_dir, folder) for key, folder in zip(KEYS.values(), pair, strict=True) if key in keys}
        for pair in pairs[:1]
    ]
    if proposed:
        return Question(text, *proposed)
    return DataError(
        f"{text}; set {' and '.join(keys)} to the {'folder' if len(keys) == 1 else 'folders'} to use, or split_file to a CSV"
    )


def _only_folder_with_files(root: Path) -> Path | None:
    """The folder that an archive puts around its content."""
    folders = [folder for folder in subfolders(root) if list_files(folder)]
    return folders[0] if len(folders) == 1 and _meaning(folders[0].name) == ("", None) else None


def _contents(folder: Path) -> str:
    names = [f"{path.name}/" for path in subfolders(folder)]
    return f"{folder} holds {first_few(names, 10) if names else 'no folder'}"


def _phrase(data_dir: Path, folders: Folders) -> str:
    images, masks = _relative(data_dir, folders.images), _relative(data_dir, folders.masks)
    if images == masks:
        return "image and mask side by side" + ("" if images == Path() else f" in {images}/")
    return f"{images}/ + {masks}/"


def _relative(data_dir: Path, folder: Path) -> Path:
    return folder.relative_to(data_dir) if folder.is_relative_to(data_dir) else folder


def _value(data_dir: Path, folder: Path) -> str:
    """What names a folder in image_dir or mask_dir."""
    return _relative(data_dir, folder).as_posix()
