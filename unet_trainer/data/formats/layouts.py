"""Which files are images and which are masks, by the names of their folders or by image_dir and mask_dir.

The names on the way to a file are read: one for images or masks (K), for a part (P), for both (train_masks), or that of
a sequence (*). Files below K, K/P, P/K, */K and P/*/K are images or masks; where none is named so, those below P or
data_dir itself. If more than one folder is possible, the question names them and the lines to set.
"""

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from unet_trainer.config.schema import Config
from unet_trainer.data import names as file_names
from unet_trainer.data.listing import Listing, resolved
from unet_trainer.data.names import File, Kind, folder_meaning
from unet_trainer.data.pairs import Part, Question, first_few, path_in
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS

KEYS: dict[Kind, str] = {"image": "image_dir", "mask": "mask_dir"}
MAX_DEPTH = 3  # of folders whose names say what they hold: P/*/K
MAX_PROPOSED = 8


@dataclass
class Group:
    """The images, or the masks, of a part."""

    place: Path  # their folder; of sequences, with * instead of their names
    part: Part | None  # None: data that is not divided
    part_name: str  # of the folder that makes it train or val
    value: str  # selects it in the config
    folders: dict[str, Path] = field(default_factory=dict)  # by the sequence, with a slash; "" if there are none
    files: list[File] = field(default_factory=list)

    @property
    def is_in_sequences(self) -> bool:
        return "" not in self.folders


@dataclass(frozen=True)
class Layout:
    """The images and masks of each part: one group for both if they lie side by side, None where test has no masks."""

    parts: dict[Part, tuple[Group, Group | None]]
    phrase: str
    divided: str


class Role(NamedTuple):
    """What the files of a folder are, by the names on the way to it."""

    kind: Kind | None = None
    part: Part | None = None
    part_name: str = ""
    value: str = "."
    sequence: str = ""  # with a slash
    depth: int = 0  # number of names that say this; those behind them belong to the names of the files


Groups = dict[Kind | None, list[Group]]


def find_layout(data_dir: Path, config: Config, listing: Listing, without: Set[Path] = frozenset()) -> Layout:
    """The images and masks in data_dir; what image_dir or mask_dir names is not searched for. Raises DataError."""
    explicit = {kind: value for kind, key in KEYS.items() if (value := getattr(config, key)) is not None}
    search, mask_suffix = _Search(data_dir, explicit, listing), config.mask_suffix
    groups = _without_stray_sequences(search.group_files(without), search.root)
    for kind in explicit:
        if not groups[kind]:
            raise search.refuse(kind)
    if config.image_dir is None:
        _add_bare_folders(groups, mask_suffix)
    image, mask = (_only(data_dir, kind, groups, (None, "train")) for kind in KEYS)
    if image and not mask and holds_masks_too(image.files, mask_suffix):
        mask = image
    if not image or not mask:
        raise search.describe_missing(image, mask)
    parts: dict[Part, tuple[Group, Group | None]] = {"train": (image, mask)}
    images, masks = path_in(data_dir, image.place), path_in(data_dir, mask.place)
    phrase = f"{images}/ + {masks}/" + (f" in {len(image.folders)} folders" if image.is_in_sequences else "")
    if image is mask:
        phrase = "image and mask side by side" + ("" if images == "." else f" in {images}/")
    val_image, val_mask = (_only(data_dir, kind, groups, ("val",)) for kind in KEYS)
    if val_image and image is mask:
        val_mask = val_image if holds_masks_too(val_image.files, mask_suffix) else None
    if val_image and not val_mask:
        fix = f"{search.contents(data_dir)}; add them, or to train and validate on one folder"
        raise Question(f"no masks of {val_image.place}; {fix}", {"image_dir": images, "mask_dir": masks})
    if val_image:
        parts["val"] = val_image, val_mask
    tests = [[group for group in groups[kind] if group.part == "test"] for kind in KEYS]
    if len(tests[0]) == 1 and len(tests[1]) < 2:  # several are ambiguous, which stops no training
        (test,) = tests[0]
        is_side_by_side = image is mask and holds_masks_too(test.files, mask_suffix)
        parts["test"] = test, tests[1][0] if tests[1] else test if is_side_by_side else None
    return Layout(parts, phrase, f"folders {image.part_name or images} and {val_image.part_name}" if val_image else "")


def holds_masks_too(files: Sequence[File], mask_suffix: str) -> bool:
    """Whether some of the files are masks: some but not all of a folder are named like one, two files share a name
    (a.jpg, a.png), or have its name and that of a class (a.png, a_cat.png, a_dog.png)."""
    marked = {
        (file.folder, bool(file_names.mask_marks(file.stem) or (mask_suffix and file.stem.endswith(mask_suffix))))
        for file in files
    }
    has_both = len(marked) > len({folder for folder, _ in marked})
    share_names = len({(file.folder, file.stem) for file in files}) < len(files)
    return has_both or share_names or bool(file_names.classes_by_ending(*file_names.split_by_endings(files)))


def images_of_dataset(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files that training would take for images, where folders or names say which are masks; else all files."""
    stems, kinds = {(file.parent, file.stem) for file in files}, dict[Path, Kind | None]()
    images_of = {file: stems & {(file.parent, rest) for rest in file_names.without_marks(file.stem)} for file in files}
    masked = {name for names in images_of.values() for name in names}  # a for a_mask and gt_a beside it
    for file, names in images_of.items():
        meanings = [folder_meaning(name) for name in file.relative_to(root).parts[:-1]]
        is_image = not meanings or any(part for part, _ in meanings) or (file.parent, file.stem) in masked
        other: Kind | None = "mask" if names else "image" if is_image else None
        kinds[file] = next((kind for _, kind in reversed(meanings) if kind), other)
    images = [file for file, kind in kinds.items() if kind == "image"]
    return images if images and "mask" in kinds.values() else [*files]


class _Search:
    """The folders of a dataset that hold image files, and what image_dir and mask_dir say of them."""

    def __init__(self, data_dir: Path, explicit: Mapping[Kind, str], listing: Listing) -> None:
        self.data_dir, self.root, self.explicit, self.listing = data_dir, data_dir, explicit, listing
        values = (
            (kind, os.path.normpath(os.path.relpath(data_dir / value, data_dir))) for kind, value in explicit.items()
        )
        # Of images/ and images/masks/, the latter decides. A name that is no folder here is looked for in parts.
        by_depth = sorted(values, key=lambda item: -len(Path(item[1]).parts))
        self.places = {kind: data_dir / place for kind, place in by_depth if (data_dir / place).is_dir()}
        self.named = {value: kind for kind, value in explicit.items() if kind not in self.places}
        self.folders = [*listing.images(data_dir, self._follows)]
        for outside in {place for place in self.places.values() if ".." in place.relative_to(data_dir).parts}:
            self.folders += listing.images(outside)
        if not explicit:
            self._keep_voc()
            # An archive may have put a folder around its content.
            common = Path(os.path.commonpath([self.folders[0][0], self.folders[-1][0]])) if self.folders else data_dir
            names = common.relative_to(data_dir).parts
            self.root = data_dir.joinpath(*takewhile(lambda name: not any(folder_meaning(name)), names))

    def _keep_voc(self) -> None:
        """PASCAL VOC may lie in a repository, beside pictures of other folders."""
        years = {folder.parent for folder, _ in self.folders if folder.name == "JPEGImages"}
        years = {year for year in years if "SegmentationClass" in self.listing.entries(year).folders}
        if years and not any(
            folder_meaning(folder.name)[1] == "mask" for folder in self.listing.subfolders(self.data_dir)
        ):
            self.folders = [each for each in self.folders if not years.isdisjoint(each[0].parents)]

    def _follows(self, link: Path) -> bool:
        """Links named as images, masks or parts, or in the config: others may lead to a whole disk. None that leads to
        a folder in which it lies, and below images or masks those of parts alone."""
        *above, name = link.relative_to(self.data_dir).parts
        part, kind = folder_meaning(name)
        if any(folder_meaning(each)[1] for each in above):
            kind = None
        is_meant = bool(part or kind) or any(name in Path(value).parts for value in self.explicit.values())
        return is_meant and len(above) < MAX_DEPTH and not resolved(link.parent).is_relative_to(resolved(link))

    def group_files(self, without: Set[Path]) -> Groups:
        groups: dict[tuple[Kind | None, Part | None, Path], Group] = {}
        for folder, names in self.folders:
            kind = next((kind for kind, place in self.places.items() if folder.is_relative_to(place)), None)
            top = self.root if kind is None else self.places[kind]
            inner = folder.relative_to(top).parts
            role = self._role(inner) if kind is None else _role_below(kind, self.explicit[kind], inner)
            base = top.joinpath(*inner[: role.depth])
            place = base.parent.parent / "*" / base.name if role.sequence else base
            new = Group(place, role.part, role.part_name, role.value)
            group = groups.setdefault((role.kind, role.part, place), new)
            group.folders[role.sequence] = base
            below = role.sequence + "".join(f"{name}/" for name in inner[role.depth :])
            files = file_names.name_files(folder, names, below)
            group.files += [file for file in files if file.path not in without]
        found: Groups = {"image": [], "mask": [], None: []}
        for (kind, _, _), group in groups.items():
            found[kind] += [group] if group.files else []
        if self.explicit and self.explicit.get("image") == self.explicit.get("mask"):
            found["image"] = found["mask"] = found["image"] or found["mask"]
        return found

    def _role(self, names: Sequence[str]) -> Role:
        match [*self._meanings(names[:MAX_DEPTH])]:
            case [(None, str(kind)), (str(part), None), *_]:  # images/train
                return Role(kind, part, names[1], names[0], depth=2)
            case [(part, str(kind)), *_]:  # images, train_images
                return Role(kind, part, names[0] if part else "", names[0], depth=1)
            case [(str(part), None), (inner, str(kind)), *_] if inner in (None, part):  # train/images
                return Role(kind, part, names[0], names[1], depth=2)
            case [(None, None), (part, str(kind)), *_]:  # sequence/images
                return Role(kind, part, names[1] if part else "", names[1], f"{names[0]}/", 2)
            case [(str(part), None), (None, None), (inner, str(kind)), *_] if inner in (None, part):
                return Role(kind, part, names[0], names[2], f"{names[1]}/", 3)  # train/sequence/images
            case [(str(part), None), *_]:  # train
                return Role(None, part, names[0], names[0], depth=1)
        return Role()

    def _meanings(self, names: Sequence[str]) -> Iterator[tuple[Part | None, Kind | None]]:
        for name in names:
            part, kind = (None, self.named[name]) if name in self.named else folder_meaning(name)
            if kind in self.explicit and name not in self.named:
                return  # where image_dir or mask_dir names a kind, no other name means it
            yield part, kind

    def refuse(self, kind: Kind) -> Question:
        """What image_dir or mask_dir says holds no image."""
        place = self.data_dir / self.explicit[kind]
        above = next(folder for folder in place.parents if folder.is_dir())
        inner = self.listing.subfolders(place.parent)
        choices = [{KEYS[kind]: path_in(self.data_dir, each)} for each in inner if self._holds_images(each)]
        is_there = "no image file in" if place.is_dir() else "no folder"
        return Question(f"{KEYS[kind]}: {is_there} {place}; {self.contents(above)}", *choices[:MAX_PROPOSED])

    def describe_missing(self, image: Group | None, mask: Group | None) -> DataError:
        """What was not found, with the keys to set."""
        missing = {} if image else {"image_dir": "no folder of images (images, imgs, ...)"}
        missing |= {} if mask else {"mask_dir": "no folder of masks (masks, labels, ...)"}
        what, keys = " and ".join(missing.values()), " and ".join(missing)
        fix = f"set {keys} to the {'folder' if len(missing) == 1 else 'folders'} to use, or split_file to a CSV"
        return DataError(f"data_dir: {what} in {self.root}; {self.contents(self.root)}; {fix}")

    def _holds_images(self, folder: Path) -> bool:
        return any(self.listing.images(folder))

    def contents(self, folder: Path) -> str:
        inner = self.listing.subfolders(folder)
        empty = [path for path in inner if not self._holds_images(path)]
        names = first_few((f"{path.name}/{' (no image file)' if path in empty else ''}" for path in inner), 10)
        known = f"; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}" if empty else ""
        return f"{folder} holds {names or 'no folder'}{known}"


def _role_below(kind: Kind, value: str, names: Sequence[str]) -> Role:
    """Of a folder in that which image_dir or mask_dir names."""
    part, other = folder_meaning(names[0]) if names else (None, None)
    return Role(kind, part, names[0], value, depth=1) if part and not other else Role(kind, value=value)


def _without_stray_sequences(groups: Groups, root: Path) -> Groups:
    """Sequences only where no other folder holds the data."""
    named = (group for kind in KEYS for group in groups[kind])
    has_others = any(group.part in (None, "train") and not group.is_in_sequences for group in named)
    if has_others or any(file.path.parent == root for group in groups[None] for file in group.files):
        return {kind: [group for group in found if not group.is_in_sequences] for kind, found in groups.items()}
    return groups


def _add_bare_folders(groups: Groups, mask_suffix: str) -> None:
    """Folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    has_masks = any(group.part != "test" for group in groups["mask"])
    with_images, bare_parts = ({group.part for group in groups[kind]} for kind in ("image", None))
    is_divided = not {None, "train"}.isdisjoint(with_images) or not {"train", "val"}.isdisjoint(bare_parts)
    for group in groups[None]:
        if group.part is None:
            is_at_root = any(not file.folder for file in group.files)
            # Beside test/ alone, files may be anything.
            may_be_both = holds_masks_too(group.files, mask_suffix) or (
                is_at_root and "test" not in bare_parts | with_images
            )
            is_data = not is_divided and (is_at_root if has_masks else may_be_both)
        else:
            is_data = group.part not in with_images
        groups["image"] += [group] if is_data else []
        groups["mask"] += [group] if is_data and not has_masks and group.part != "test" else []


def _only(data_dir: Path, kind: Kind, groups: Groups, parts: Sequence[Part | None]) -> Group | None:
    """The one group of these parts, or None; raises Question if several are left."""
    candidates = sorted(
        (group for group in groups[kind] if group.part in parts), key=lambda group: (group.part or "", group.place)
    )
    # Files beside images/train/ belong to no part.
    above = {group.place.parent for group in candidates if group.part}
    candidates = [group for group in candidates if group.place not in above]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    paths, values = [path_in(data_dir, group.place) for group in candidates], [group.value for group in candidates]
    folders = ", ".join(f"{path}/" for path in paths)
    text = f"{KEYS[kind]}: {len(paths)} folders in {data_dir} could hold the {kind}s: {folders}"
    raise Question(text, *({KEYS[kind]: value} for value in (values if len({*values}) == len(values) else paths)))
