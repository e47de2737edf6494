"""Which files are images and which are masks, by the names of their folders or by image_dir and mask_dir. Opens no
file.

The folders of a path are read one by one: a name for images or masks (K), for a part (P), both in one (PK), or that of
a sequence (*). Files below K, K/P, P/K, PK, */K and P/*/K are images or masks; where none is named so, those below P or
data_dir itself. If more than one folder is possible, none is chosen: the question names them and the lines to set.
Hidden files are not searched, and none that this program writes.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby, product, takewhile
from pathlib import Path
from typing import Literal

from unet_trainer.datasets.name_matching import (
    File,
    best_match,
    mask_marks,
    masks_by_ending,
    name_files,
    split_by_endings,
)
from unet_trainer.datasets.pairs import Part, Question, first_few, path_in
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, VOLUME_EXTENSIONS
from unet_trainer.system.console import counted

CHECKPOINT_DIR_HOLDS = (".scan", ".converted", ".given", ".shards")  # one of them
RUN_FOLDER_HOLDS = ("config.yaml", "split.csv")  # both
PICTURES = ("check", "mlruns")  # folders of pictures in a checkpoint_dir, beside the above or runs


def walk(folder: Path, follows: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """The files of a folder and of those below it, sorted in each; without hidden ones, those of this program, and
    links to folders
    unless `follows` says so: they may lead in a circle."""
    for place, folders, names in os.walk(folder, followlinks=follows is not None):
        inner = [Path(place, name) for name in _searched(Path(place), folders)]
        folders[:] = [path.name for path in inner if not path.is_symlink() or (follows is not None and follows(path))]
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def list_files(
    folder: Path,
    without: Set[Path] = frozenset(),
    follows: Callable[[Path], bool] | None = None,
    with_volumes: bool = False,
) -> list[Path]:
    """The image files of a folder and its subfolders, sorted, without hidden files and the files `without`. With
    volumes: those too that lie in folders without an image file. Broken links count as files, so that they are reported
    as missing."""
    paths = [*walk(folder, follows)]
    images = [path for path in paths if path.name.lower().endswith((*IMAGE_EXTENSIONS,)) and path not in without]
    if with_volumes:
        places = {path.parent for path in images}
        images += [
            path for path in paths if path.name.lower().endswith(VOLUME_EXTENSIONS) and path.parent not in places
        ]
    return sorted(path for path in images if path.is_file() or (path.is_symlink() and not path.exists()))


def is_run_folder(folder: Path) -> bool:
    return all((folder / inner).is_file() for inner in RUN_FOLDER_HOLDS)


def images_of_dataset(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files that training would take for images, where folders or names say which are masks; else all files."""
    stems = {(file.parent, file.stem) for file in files}
    image_of = {file: image for file in files for image in _masked_by(file) if image in stems}  # a for a_mask beside it
    masked, by_kind = set(image_of.values()), dict[Kind | None, list[Path]]({"image": [], "mask": [], None: []})
    for file in files:
        names = file.relative_to(root).parts[:-1]
        meanings = [_meaning(name) for name in reversed(names)]
        kind: Kind | None = next((kind for _, kind in meanings if kind), None)
        if kind is None and file in image_of:
            kind = "mask"
        elif kind is None and (not names or any(part for part, _ in meanings) or (file.parent, file.stem) in masked):
            kind = "image"
        by_kind[kind].append(file)
    return by_kind["image"] if by_kind["image"] and by_kind["mask"] else [*files]


def _masked_by(mask: Path) -> list[tuple[Path, str]]:
    """Folder and name of each image that a file is the mask of, by its own name: a of a_mask and of gt_a."""
    stem = mask.stem
    return [(mask.parent, image) for mark in mask_marks(stem) for image in (stem[: -len(mark)], stem[len(mark) :])]


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones and those that this program writes."""
    _, folders, _ = next(os.walk(folder), (folder, [], []))
    return [folder / name for name in _searched(folder, folders)]


def _searched(folder: Path, names: Sequence[str]) -> list[str]:
    """The folders in a folder that may hold data. A checkpoint_dir and a run's folder do not: their pictures are no
    data."""
    ours = {name for name in names if _is_checkpoint_dir(folder / name) or is_run_folder(folder / name)}
    if ours or not set(names).isdisjoint(CHECKPOINT_DIR_HOLDS):
        ours |= {*PICTURES}
    return sorted(name for name in names if not name.startswith(".") and name not in ours)


def _is_checkpoint_dir(folder: Path) -> bool:
    """Whether it is one, and not the folder of the data too."""
    if not any((folder / inner).is_dir() for inner in CHECKPOINT_DIR_HOLDS):
        return False
    return _meaning(folder.name) == ("", None) and not any(_meaning(inner.name)[1] for inner in subfolders(folder))


def resolved(path: Path) -> Path:
    """As Path.resolve, which raises for links that lead in a circle, and for a NUL in the name."""
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def describe_results(results: Sequence[Path]) -> str:
    return f"{counted(len(results), 'result')} of predict left out, such as {results[0]}"


def part_in(names: Iterable[str]) -> Part | None:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg."""
    words = [word for name in names for word in re.findall("[a-z]+", name.lower())]
    found = {
        PARTS[word] for word in words if word in PARTS and len(word) > 2
    }  # "tr" and "ts" mean little in a file's name
    return found.pop() if len(found) == 1 else None


def refuse_unreadable(data_dir: Path, others: Sequence[str | None] = ()) -> None:
    """Raises DataError for the first folder that this user may not list or search: it would look empty, and its images
    be missed.

    That is data_dir, one above it, one below it, or one of `others`, relative to it. Hidden folders are not searched.
    """
    for folder in (data_dir, *(data_dir / other for other in others if other is not None)):
        for place in (*reversed(folder.absolute().parents), folder):
            if place.is_dir():
                _refuse_closed(place, os.R_OK | os.X_OK if place == folder else os.X_OK)
    for here, folders, _ in os.walk(data_dir):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            _refuse_closed(Path(here, name), os.R_OK | os.X_OK)


def _refuse_closed(folder: Path, mode: int) -> None:
    if not os.access(folder, mode):
        fix = "need the permissions r and x on it (chmod u+rx), or another user"
        raise DataError(f"data_dir: {folder} cannot be read (Permission denied); {fix}")


Kind = Literal["image", "mask"]
KEYS: dict[Kind, str] = {"image": "image_dir", "mask": "mask_dir"}

# Folder names, in lower case and without separators: img_dir is imgdir.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("image", "images", "img", "imgs", "imgdir", "imagedir", "imagefolder", "jpegimages", "pngimages", "input",
        "inputs",
         "frame", "frames", "photo", "photos", "picture", "pictures", "rgb", "leftimg8bit"),
        "image",
    ),
    **dict.fromkeys(
        ("mask", "masks", "maskdir", "label", "labels", "labeldir", "annotation", "annotations", "annot", "annots",
        "ann", "anns",
         "anndir", "annotationdir", "gt", "gts", "groundtruth", "groundtruths", "gtfine", "seg", "segs", "segmentation",
         "segmentations", "segmentationclass", "segmentationmask", "segmentationmasks", "target", "targets", "truth",
         "manual",
         "1stmanual", "2ndmanual", "trimap", "trimaps", "matte", "mattes"),
        "mask",
    ),
}  # fmt: skip
PARTS: dict[str, Part] = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test", "stage1train": "train", "stage1test": "test",
}  # fmt: skip

PART_NAME = re.compile(
    rf"^({'|'.join(PARTS)})(?:set|data|dataset|split|v\d|(?:19|20)\d\d)$"
)  # train_set, COCO's train2017

MAX_DEPTH = 3  # of folders whose names say what they hold: P/*/K
MAX_PROPOSED = 8  # folders among which two are looked for whose names pair up


@dataclass
class Group:
    """The images, or the masks, of a part."""

    place: Path  # their folder; of sequences, with * in the place of their names
    part: str
    part_name: str
    value: str
    folders: dict[str, Path] = field(
        default_factory=dict
    )  # by the name of the sequence, with a slash; "" if there are none
    by_sequence: dict[str, list[File]] = field(default_factory=dict)

    @property
    def files(self) -> list[File]:
        return [file for files in self.by_sequence.values() for file in files]

    @property
    def is_in_sequences(self) -> bool:
        return "" not in self.folders


@dataclass(frozen=True)
class Layout:
    """The images and masks of each part: one group for both if they lie side by side, None where test has no masks.

    Without val, train is to be divided. The phrases describe it; `divided` is "folders train and val", or "".
    """

    parts: dict[Part, tuple[Group, Group | None]]
    phrase: str
    divided: str


Groups = dict[Kind | None, list[Group]]
Words = Mapping[
    Kind, tuple[tuple[str, ...], bool]
]  # names in image_dir and mask_dir; whether that is a folder of the root


def find_layout(
    data_dir: Path, image_dir: str | None, mask_dir: str | None, mask_suffix: str = "", without: Set[Path] = frozenset()
) -> Layout:
    """The images and masks in data_dir; what image_dir or mask_dir names is not searched for. Raises DataError."""
    given: dict[Kind, str] = {
        kind: value for kind, value in zip(KEYS, (image_dir, mask_dir), strict=True) if value is not None
    }

    def follows(link: Path) -> bool:
        """Links that are, or hold, folders of images or masks; of those below such a folder, the ones of parts. And the
        only one. Others may lead to a whole disk. None that leads to a folder in which it lies."""
        *above, name = link.relative_to(data_dir).parts
        part, kind = _meaning(name)
        if len(above) >= MAX_DEPTH or resolved(link.parent).is_relative_to(resolved(link)):
            return False
        if any(_meaning(each)[1] for each in above):
            return bool(part)
        is_given = any(name in Path(value).parts for value in given.values())
        is_only = not above and len(subfolders(data_dir)) == 1
        return bool(part or kind) or is_given or is_only or any(_meaning(inner.name)[1] for inner in subfolders(link))

    files = list_files(data_dir, without, follows, with_volumes=True)
    if not given and not any(_meaning(folder.name)[1] == "mask" for folder in subfolders(data_dir)):
        # PASCAL VOC somewhere in a repository, beside pictures of other folders.
        years = {file.parent.parent for file in files if file.parent.name == "JPEGImages"}
        years = {year for year in years if (year / "SegmentationClass").is_dir()}
        files = [file for file in files if not years.isdisjoint(file.parents)] if years else files
    root = data_dir if given else _inner_root(data_dir, files)
    groups = _without_stray_sequences(_group_files(root, files, given, without), root)
    for kind, value in given.items():
        if not groups[kind]:
            parent = (root / value).parent
            values = [path_in(root, folder) for folder in subfolders(parent) if list_files(folder, with_volumes=True)]
            is_there = "no image file in" if (root / value).is_dir() else "no folder"
            choices = [{KEYS[kind]: value} for value in values[:MAX_PROPOSED]]
            raise Question(f"{KEYS[kind]}: {is_there} {root / value}; {_contents(parent)}", *choices)
    if image_dir is None:
        _add_bare_folders(groups, root, mask_suffix)
    image, mask = (_only(data_dir, kind, groups, ("", "train")) for kind in KEYS)
    if image and not mask and holds_masks_too(image.files, mask_suffix):
        mask = image
    if not image or not mask:
        raise _missing(data_dir, root, groups, image, mask)
    parts: dict[Part, tuple[Group, Group | None]] = {"train": (image, mask)}
    images, masks = path_in(data_dir, image.place), path_in(data_dir, mask.place)
    phrase = f"{images}/ + {masks}/" + (f" in {len(image.folders)} folders" if image.is_in_sequences else "")
    phrase = (
        phrase if image is not mask else "image and mask side by side" + ("" if images == "." else f" in {images}/")
    )
    val_image, val_mask = (_only(data_dir, kind, groups, ("val",)) for kind in KEYS)
    if val_image and (not val_mask if image is not mask else not holds_masks_too(val_image.files, mask_suffix)):
        text = f"no masks of {val_image.place}; {_contents(data_dir)}; add them, or to train and validate on one folder"
        raise Question(text, {"image_dir": images, "mask_dir": masks})
    if val_image:
        parts["val"] = val_image, val_mask or val_image
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
        (file.folder, bool(mask_marks(file.stem) or (mask_suffix and file.stem.endswith(mask_suffix))))
        for file in files
    }
    has_both = len(marked) > len({folder for folder, _ in marked})
    has_marked = has_both or len({(file.folder, file.stem) for file in files}) < len(files)
    return has_marked or bool(masks_by_ending(*split_by_endings(files)))


def _inner_root(data_dir: Path, files: Sequence[Path]) -> Path:
    """data_dir, or the folder in it that an archive put around its content."""
    common = os.path.commonpath([path.parent for path in files]) if files else data_dir
    return data_dir.joinpath(
        *takewhile(lambda name: _meaning(name) == ("", None), Path(common).relative_to(data_dir).parts)
    )


def _meaning(name: str) -> tuple[str, Kind | None]:
    """Part and kind of a folder by its name: train_masks → train, mask; imgs → "", image; val2017 → val, None; foo →
    "", None."""
    word = re.sub(r"[-_. ]", "", name.lower())
    word = PART_NAME.sub(r"\1", word)
    if word in KINDS or word in PARTS:
        return PARTS.get(word, ""), KINDS.get(word)
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return "", None


def _role(names: tuple[str, ...], given: Words) -> tuple[Kind | None, str, str, str, str, int]:
    """What the files of a folder are, by the names on the way to it: kind, part ("": data that is not divided), name of
    the folder that makes it train or val, what selects it in the config, the sequence with a slash, and the number of
    names that say this; those behind them belong to the names of the files. `given`: the longer one first."""
    part = part_name = sequence = ""
    for index in range(min(len(names) + 1, MAX_DEPTH)):
        name = names[index] if index < len(names) else ""
        named = [
            kind
            for kind, (words, is_there) in given.items()
            if names[index:][: len(words)] == words and is_there == (index == 0)
        ]
        own_part, kind = ("", named[0]) if named else _meaning(name)
        if named or (kind and kind not in given and (own_part in ("", part) or not part)):
            assert kind is not None
            depth = index + (len(given[kind][0]) if named else 1)
            value = "/".join(names[index:depth]) or "."
            part, part_name = (part or own_part), (part_name or (name if own_part else ""))
            below = names[depth] if depth < len(names) and not part and not sequence else ""
            if below and _meaning(below)[0] and not _meaning(below)[1]:
                return kind, _meaning(below)[0], below, value, "", depth + 1
            return kind, part, part_name, value, sequence, depth
        if own_part and not kind and index == 0:
            part, part_name = own_part, name
        elif own_part or kind or sequence:
            break
        else:
            sequence = f"{name}/"
    return None, part, part_name, part_name or ".", "", 1 if part else 0


def _group_files(root: Path, files: Sequence[Path], given: Mapping[Kind, str], without: Set[Path]) -> Groups:
    inside = {kind: Path(os.path.relpath(root / value, root)).parts for kind, value in given.items()}
    outside = {kind: root / given[kind] for kind, names in inside.items() if names[:1] == ("..",)}
    by_length = sorted(
        inside.items(), key=lambda item: -len(item[1])
    )  # of images/ and images/masks/, the latter decides
    words = {kind: (names, root.joinpath(*names).is_dir()) for kind, names in by_length}
    groups: dict[tuple[Kind | None, str, Path], Group] = {}

    def add(folder: Path, paths: Iterable[Path], root: Path, words: Words, value: str | None = None) -> None:
        names = folder.relative_to(root).parts
        kind, part, part_name, selected, sequence, depth = _role(names, words)
        base = root.joinpath(*names[:depth])
        place = base.parent.parent / "*" / base.name if sequence else base
        group = groups.setdefault((kind, part, place), Group(place, part, part_name, value or selected))
        group.folders[sequence] = base
        group.by_sequence.setdefault(sequence, []).extend(name_files(paths, base, sequence))

    for folder, paths in groupby(files, lambda path: path.parent):
        add(folder, paths, root, words)
    for kind, place in outside.items():
        for folder, paths in groupby(list_files(place, without, with_volumes=True), lambda path: path.parent):
            add(folder, paths, place, {kind: ((), True)}, given[kind])
    found: Groups = {"image": [], "mask": [], None: []}
    for key, group in groups.items():
        found[key[0]].append(group)
    if given and given.get("image") == given.get("mask"):
        found["image"] = found["mask"] = found["image"] or found["mask"]
    return found


def _without_stray_sequences(groups: Groups, root: Path) -> Groups:
    """Sequences only where no other folder holds the data, and those with images and masks; one of test may lack
    masks."""
    kinds = [group for kind in KEYS for group in groups[kind]]
    has_others = any(group.part in ("", "train") and not group.is_in_sequences for group in kinds)
    has_files = any(file.path.parent == root for group in groups[None] for file in group.files)
    for group in kinds:
        if not group.is_in_sequences:
            continue
        others = [
            other for kind in KEYS if group not in groups[kind] for other in groups[kind] if other.part == group.part
        ]
        for name in [*group.folders]:
            has_partner = any(name in other.folders for other in others) or (
                group.part == "test" and group in groups["image"]
            )
            if has_others or not has_partner or (has_files and not group.part):
                del group.folders[name], group.by_sequence[name]
    return {kind: [group for group in found if group.folders] for kind, found in groups.items()}


def _add_bare_folders(groups: Groups, root: Path, mask_suffix: str) -> None:
    """Folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    has_masks = any(group.part != "test" for group in groups["mask"])
    kinds: tuple[Kind, ...] = ("image",) if has_masks else ("image", "mask")
    part_folders = {_meaning(folder.name)[0] for folder in subfolders(root) if not _meaning(folder.name)[1]} - {""}
    with_images = {group.part for group in groups["image"]}
    for group in groups[None]:
        if group.part and group.part not in with_images:
            for kind in kinds[: 1 if group.part == "test" else 2]:
                groups[kind].append(group)
    if part_folders - {"test"} or with_images & {"", "train"}:
        return
    for group in (group for group in groups[None] if not group.part):
        holds_both = has_masks or holds_masks_too(group.files, mask_suffix)
        is_at_root = any(file.path.parent == root for file in group.files)
        if (holds_both or not part_folders) and (is_at_root or (holds_both and not has_masks)):
            for kind in kinds:
                groups[kind].append(group)  # files beside test/ alone may be anything


def _only(data_dir: Path, kind: Kind, groups: Groups, parts: Sequence[str]) -> Group | None:
    """The one group of these parts, or None; raises Question if several are left."""
    candidates = sorted(
        (group for group in groups[kind] if group.part in parts), key=lambda group: (group.part, group.place)
    )
    # Files beside images/train/ belong to no part.
    candidates = [
        one for one in candidates if not any(one.place == other.place.parent for other in candidates if other.part)
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    paths = [path_in(data_dir, group.place) for group in candidates]
    values = [group.value for group in candidates]
    values = values if len(set(values)) == len(values) else paths
    folders = ", ".join(f"{path}/" for path in paths)
    text = f"{KEYS[kind]}: {len(paths)} folders in {data_dir} could hold the {kind}s: {folders}"
    raise Question(text, *({KEYS[kind]: value} for value in values))


def _missing(data_dir: Path, root: Path, groups: Groups, image: Group | None, mask: Group | None) -> DataError:
    """What was not found, with the folders that may be meant: those of val or test, or two whose names pair up, larger
    files being the images."""
    for part in ("val", "test"):
        there = [[group for group in groups[kind] if group.part == part and not group.is_in_sequences] for kind in KEYS]
        if there[0] and there[1]:
            images, masks = (path_in(data_dir, found[0].place) for found in there)
            return Question(
                f"data_dir: {data_dir} holds {images}/ but no train/", {"image_dir": images, "mask_dir": masks}
            )
    keys = [key for key, there in zip(KEYS.values(), (image, mask), strict=True) if not there]
    wanted = {
        "image_dir": "no folder of images (images, imgs, ...)",
        "mask_dir": "no folder of masks (masks, labels, ...)",
    }
    text = f"data_dir: {' and '.join(wanted[key] for key in keys)} in {root}; {_contents(root)}"
    named = ((folder, name_files(list_files(folder, with_volumes=True), folder)) for folder in subfolders(root))
    filled = dict([(folder, files) for folder, files in named if files][:MAX_PROPOSED])
    of_images, of_masks = ({group.place: group.files} if group else filled for group in (image, mask))
    sizes = {
        folder: sum(file.path.stat().st_size for file in files if file.path.exists())
        for folder, files in (*of_images.items(), *of_masks.items())
    }
    both = ((one, other) for one, other in product(of_images, of_masks) if one != other)
    pairs = [(one, other) for one, other in both if best_match(of_images[one], of_masks[other], one).is_complete]
    if not pairs:
        folders = "folder" if len(keys) == 1 else "folders"
        return DataError(f"{text}; set {' and '.join(keys)} to the {folders} to use, or split_file to a CSV")
    best = min(pairs, key=lambda pair: (sizes[pair[1]] - sizes[pair[0]], pair))
    proposed = dict(zip(KEYS.values(), (path_in(data_dir, folder) for folder in best), strict=True))
    return Question(text, {key: value for key, value in proposed.items() if key in keys})


def _contents(folder: Path) -> str:
    names = [
        f"{path.name}/{'' if list_files(path, with_volumes=True) else ' (no image file)'}"
        for path in subfolders(folder)
    ]
    extensions = (
        f"; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}" if "(no image" in "".join(names) else ""
    )
    return f"{folder} holds {first_few(names, 10) if names else 'no folder'}{extensions}"
