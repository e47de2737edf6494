"""Which folders hold the images and which the masks, by their names or by image_dir and mask_dir. Opens no file.

If more than one folder is possible, none is chosen: the error names them and the key to set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from unet_trainer.datasets.problems import first_few
from unet_trainer.images.image_files import IMAGE_EXTENSIONS, DataError

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
PARTS = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test",
}  # fmt: skip

# Words at the start or end of a name that mark a mask when images and masks are in one folder.
MASK_WORDS = (
    "masks?|labels?|labelids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot|ann|targets?"
    "|manual[12]?|1stho|2ndho|trimap|matte"
)
MASK_MARK = re.compile(rf"(?:^|[-_. ])(?:{MASK_WORDS})$|^(?:{MASK_WORDS})[-_. ]", re.IGNORECASE)


@dataclass(frozen=True)
class Folders:
    """The folders of one part of the data; images and masks may share a folder."""

    images: Path
    masks: Path


@dataclass(frozen=True)
class Layout:
    """The folders to train on, those to validate on if there are any, and a phrase that describes them."""

    train: Folders
    val: Folders | None
    phrase: str
    parts: str  # "folders train and val", or "" without a val folder


class _Found(NamedTuple):
    """A possible folder. `part_name` is the folder name that makes it train or val; `value` is what selects it in the config."""

    path: Path
    part_name: str
    value: str


_Slots = dict[tuple[str, Kind], list[_Found]]  # (part, kind) → possible folders; part "" is data that is not divided


def find_layout(data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str = "") -> Layout:
    """The folders of images and masks in data_dir; where image_dir or mask_dir is set, it is not searched. Raises DataError."""
    slots = _find_slots(data_dir, image_dir, mask_dir, mask_suffix)
    train_image = _only(data_dir, "image", [*slots["", "image"], *slots["train", "image"]])
    train_mask = _only(data_dir, "mask", [*slots["", "mask"], *slots["train", "mask"]])
    if train_image and not train_mask and has_marks(list_files(train_image.path), mask_suffix):
        train_mask = train_image
    if not train_image or not train_mask:
        raise DataError(_describe_missing(data_dir, [KEYS["image"]] * (not train_image) + [KEYS["mask"]] * (not train_mask)))
    train = Folders(train_image.path, train_mask.path)
    val_image = _only(data_dir, "image", slots["val", "image"])
    val_mask = _only(data_dir, "mask", slots["val", "mask"])
    if not val_image:
        return Layout(train, None, _phrase(data_dir, train), "")
    if not val_mask:
        if train_image != train_mask:
            wanted = data_dir / re.sub(r"(?i)train(ing)?", val_image.part_name, str(_relative(data_dir, train.masks)))
            raise DataError(
                f"no folder {wanted}; {_contents(val_image.path.parent)}; "
                "add it, or set image_dir and mask_dir to the folders to train on"
            )
        val_mask = val_image
    names = f"folders {train_image.part_name or _relative(data_dir, train.images)} and {val_image.part_name}"
    return Layout(train, Folders(val_image.path, val_mask.path), _phrase(data_dir, train), names)


def find_test_folders(data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str = "") -> Folders | None:
    """The folders of images that neither train nor validate (test/images, ...), if there are some with masks. Raises DataError."""
    slots = _find_slots(data_dir, image_dir, mask_dir, mask_suffix)
    image = _only(data_dir, "image", slots["test", "image"])
    mask = _only(data_dir, "mask", slots["test", "mask"])
    if image and not mask and has_marks(list_files(image.path), mask_suffix):
        mask = image
    return Folders(image.path, mask.path) if image and mask else None


def _find_slots(data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str) -> _Slots:
    slots: _Slots = defaultdict(list)
    keys: dict[Kind, str | None] = {"image": image_dir, "mask": mask_dir}
    for kind, given in keys.items():
        if given is None:
            _search(data_dir, kind, slots)
        else:
            _use_given(data_dir, kind, given, slots)
    if image_dir is None:
        _add_bare_folders(data_dir, mask_dir is not None, mask_suffix, slots)
    return slots


def list_files(folder: Path, without: Path | None = None) -> list[Path]:
    """The image files of a folder and its subfolders, sorted, without hidden files and without the folder `without`."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in IMAGE_EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not (without and path.is_relative_to(without))
        and (path.is_file() or _is_broken_link(path))
    ]


def _is_broken_link(path: Path) -> bool:
    """Broken links count as files, so that they are reported as missing."""
    return path.is_symlink() and not path.exists()


def mask_marks(stem: str) -> list[str]:
    """The marks of a mask in a name, such as _mask in a_mask or gt_ in gt_a; in lower case."""
    return [found.group().lower() for found in MASK_MARK.finditer(stem)]


def has_marks(files: Sequence[Path], mask_suffix: str) -> bool:
    """Whether some but not all of the files are named like masks."""
    marked = [path for path in files if mask_marks(path.stem) or (mask_suffix and path.stem.endswith(mask_suffix))]
    return 0 < len(marked) < len(files)


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


def _search(data_dir: Path, kind: Kind, slots: _Slots) -> None:
    """Finds images/, images/train/, train/images/ and train_images/."""
    for folder in _subfolders(data_dir):
        part, its_kind = _meaning(folder.name)
        if its_kind == kind and part:
            slots[part, kind].append(_Found(folder, folder.name, folder.name))
        elif its_kind == kind:
            _add_parts_below(folder, kind, folder.name, slots)
        elif part and its_kind is None:
            for inner in _subfolders(folder):
                inner_part, inner_kind = _meaning(inner.name)
                if inner_kind == kind and inner_part in ("", part):
                    slots[part, kind].append(_Found(inner, folder.name, inner.name))


def _use_given(data_dir: Path, kind: Kind, given: str, slots: _Slots) -> None:
    """data_dir/given, undivided or with train and val inside; else train/given and val/given."""
    if (data_dir / given).is_dir():
        _add_parts_below(data_dir / given, kind, given, slots)
        return
    for folder in [] if Path(given).is_absolute() else _subfolders(data_dir):
        part, its_kind = _meaning(folder.name)
        if part and its_kind is None and (folder / given).is_dir():
            slots[part, kind].append(_Found(folder / given, folder.name, given))
    if not any(found for (_, its_kind), found in slots.items() if its_kind == kind):
        parent = (data_dir / given).parent
        raise DataError(f"{KEYS[kind]}: no folder {data_dir / given}; {_contents(parent)}; set {KEYS[kind]} to the folder's name")


def _add_parts_below(folder: Path, kind: Kind, value: str, slots: _Slots) -> None:
    parts = [(part, inner) for inner in _subfolders(folder) for part, its_kind in [_meaning(inner.name)] if part and not its_kind]
    if not parts:
        slots["", kind].append(_Found(folder, "", value))
    elif all(part != "train" for part, _ in parts):
        names = " and ".join(f"{inner.name}/" for _, inner in parts)
        raise DataError(f"{KEYS[kind]}: {folder} holds {names} but no train/; set {KEYS[kind]} to the folder to train on")
    for part, inner in parts:
        slots[part, kind].append(_Found(inner, inner.name, f"{value}/{inner.name}"))


def _add_bare_folders(data_dir: Path, mask_dir_is_set: bool, mask_suffix: str, slots: _Slots) -> None:
    """Adds folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    parts = [(part, folder) for folder in _subfolders(data_dir) for part, kind in [_meaning(folder.name)] if part and not kind]
    has_masks = mask_dir_is_set or any(slots[part, "mask"] for part in ("", "train", "val"))
    for part, folder in parts:
        if slots[part, "image"] or not list_files(folder):
            continue
        found = _Found(folder, folder.name, folder.name)
        slots[part, "image"].append(found)
        if not has_masks:
            slots[part, "mask"].append(found)
    if parts or slots["", "image"] or slots["train", "image"]:
        return
    has_direct = any(path.parent == data_dir for path in list_files(data_dir))
    if has_direct or (not has_masks and has_marks(list_files(data_dir), mask_suffix)):
        found = _Found(data_dir, "", ".")
        slots["", "image"].append(found)
        if not has_masks:
            slots["", "mask"].append(found)


def _only(data_dir: Path, kind: Kind, candidates: list[_Found]) -> _Found | None:
    """The one candidate, or None; raises DataError if several are left."""
    if len(candidates) > 1:  # labels/ with text files beside masks/ is not a candidate
        candidates = [found for found in candidates if list_files(found.path)] or candidates
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    key, paths = KEYS[kind], [str(_relative(data_dir, found.path)) for found in candidates]
    values = [found.value for found in candidates]
    fixes = " or ".join(f"{key}: {value}" for value in (values if len(set(values)) == len(values) else paths))
    raise DataError(
        f"{key}: {len(paths)} folders in {data_dir} could hold the {kind}s: {', '.join(f'{path}/' for path in paths)}; set {fixes}"
    )


def _describe_missing(data_dir: Path, keys: list[str]) -> str:
    wanted = {"image_dir": "no folder of images (images, imgs, ...)", "mask_dir": "no folder of masks (masks, labels, ...)"}
    return (
        f"data_dir: {' and '.join(wanted[key] for key in keys)} in {data_dir}; {_contents(data_dir)}; "
        f"set {' and '.join(keys)} to the {'folder' if len(keys) == 1 else 'folders'} to use"
    )


def _contents(folder: Path) -> str:
    names = [f"{path.name}/" for path in _subfolders(folder)]
    return f"{folder} holds {first_few(names, 10) if names else 'no folder'}"


def _phrase(data_dir: Path, folders: Folders) -> str:
    images, masks = _relative(data_dir, folders.images), _relative(data_dir, folders.masks)
    if images == masks:
        return "image and mask side by side" + ("" if images == Path() else f" in {images}/")
    return f"{images}/ + {masks}/"


def _relative(data_dir: Path, folder: Path) -> Path:
    return folder.relative_to(data_dir) if folder.is_relative_to(data_dir) else folder


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))
