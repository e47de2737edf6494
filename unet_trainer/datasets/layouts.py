"""Which files are images and which are masks, by the names of their folders or by image_dir and mask_dir. Opens no
file, and reads each folder once (Listing).

The folders of a path are read one by one: a name for images or masks (K), for a part (P), both in one (PK), or that of
a sequence (*). Files below K, K/P, P/K, PK, */K and P/*/K are images or masks; where none is named so, those below P or
data_dir itself. If more than one folder is possible, none is chosen: the question names them and the lines to set.
Hidden files are not searched, and none that this program writes.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from unet_trainer.datasets.name_matching import File, classes_by_ending, mask_marks, name_files, split_by_endings
from unet_trainer.datasets.pairs import Part, Question, first_few, path_in
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, VOLUME_EXTENSIONS
from unet_trainer.system.console import counted

CHECKPOINT_DIR_HOLDS = (".scan", ".converted", ".given", ".shards")  # one of them
RUN_FOLDER_HOLDS = ("config.yaml", "split.csv")  # both
PICTURES = ("check", "mlruns")  # folders of pictures in a checkpoint_dir, beside the above or runs

Kind = Literal["image", "mask"]
KEYS: dict[Kind, str] = {"image": "image_dir", "mask": "mask_dir"}

# Folder names, in lower case and without separators: img_dir is imgdir.
IMAGE_FOLDERS = (
    "image images img imgs imgdir imagedir imagefolder jpegimages pngimages input inputs frame frames photo photos "
    "picture pictures rgb leftimg8bit"
)
MASK_FOLDERS = (
    "mask masks maskdir label labels labeldir annotation annotations annot annots ann anns anndir annotationdir gt gts "
    "groundtruth groundtruths gtfine seg segs segmentation segmentations segmentationclass segmentationmask "
    "segmentationmasks target targets truth manual 1stmanual 2ndmanual trimap trimaps matte mattes"
)
KINDS: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_FOLDERS.split(), "image"),
    **dict.fromkeys(MASK_FOLDERS.split(), "mask"),
}
PARTS: dict[str, Part] = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test", "stage1train": "train", "stage1test": "test",
}  # fmt: skip
PART_NAME = re.compile(rf"^({'|'.join(PARTS)})(?:set|data|dataset|split|v\d|(?:19|20)\d\d)$")  # train_set, train2017
MAX_DEPTH = 3  # of folders whose names say what they hold: P/*/K
MAX_PROPOSED = 8


# What lies in folders


class Entries(NamedTuple):
    """The names in a folder, sorted: folders, each with whether it is a link, and files that are not hidden."""

    folders: dict[str, bool]
    files: list[str]


class Listing:
    """The folders that were listed: each is read once, when it is first asked for. One that cannot be read is empty."""

    def __init__(self) -> None:
        self._entries: dict[Path, Entries] = {}

    def entries(self, folder: Path) -> Entries:
        if folder not in self._entries:
            found: list[os.DirEntry[str]] = []
            with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            folders = {entry.name: entry.is_symlink() for entry in found if _is_folder(entry)}
            files = [entry.name for entry in found if entry.name not in folders and not entry.name.startswith(".")]
            self._entries[folder] = Entries(folders, files)
        return self._entries[folder]

    def subfolders(self, folder: Path) -> list[Path]:
        """The folders in a folder that may hold data. A checkpoint_dir and a run's folder do not: their pictures are no
        data."""
        names = self.entries(folder).folders
        ours = {name for name in names if not name.startswith(".") and self._is_ours(folder / name)}
        if ours or not names.keys().isdisjoint(CHECKPOINT_DIR_HOLDS):
            ours |= {*PICTURES}
        return [folder / name for name in names if not name.startswith(".") and name not in ours]

    def _is_ours(self, folder: Path) -> bool:
        """Whether it is a run's folder, or a checkpoint_dir and not the folder of the data too."""
        entries = self.entries(folder)
        if all(name in entries.files for name in RUN_FOLDER_HOLDS):
            return True
        if entries.folders.keys().isdisjoint(CHECKPOINT_DIR_HOLDS) or _meaning(folder.name) != ("", None):
            return False
        return not any(_meaning(path.name)[1] for path in self.subfolders(folder))

    def walk_folders(self, folder: Path, follows: Callable[[Path], bool] | None = None) -> Iterator[Path]:
        """A folder and those below it, without links to folders unless `follows` says so: they may lead in a circle."""
        waiting = [folder]
        while waiting:
            yield (here := waiting.pop())
            inner, are_links = self.subfolders(here), self.entries(here).folders
            waiting += reversed([each for each in inner if not are_links[each.name] or (follows and follows(each))])


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


def walk(
    folder: Path,
    follows: Callable[[Path], bool] | None = None,
    listing: Listing | None = None,
    endings: tuple[str, ...] = ("",),
) -> Iterator[Path]:
    """The files with these endings (in lower case) in a folder and those below it, sorted in each, without hidden ones
    and those of this program."""
    listing = listing or Listing()
    for place in listing.walk_folders(folder, follows):
        yield from (place / name for name in listing.entries(place).files if name.lower().endswith(endings))


def list_files(
    folder: Path,
    without: Set[Path] = frozenset(),
    follows: Callable[[Path], bool] | None = None,
    with_volumes: bool = False,
    listing: Listing | None = None,
) -> list[Path]:
    """The image files of a folder and its subfolders, sorted, without the files `without`. With volumes: those too that
    lie in folders without an image file. Broken links count as files, so that they are reported as missing."""
    found: list[Path] = []
    endings = (*IMAGE_EXTENSIONS, *(VOLUME_EXTENSIONS if with_volumes else ()))
    for _, in_folder in groupby(walk(folder, follows, listing, endings), lambda path: path.parent):
        paths = [path for path in in_folder if path not in without]
        images = [path for path in paths if not path.name.lower().endswith(VOLUME_EXTENSIONS)]
        found += images or paths
    return sorted(found)


def refuse_unreadable(data_dir: Path, others: Sequence[str | None] = (), listing: Listing | None = None) -> None:
    """Raises DataError for the first folder that this user may not list or search: it would look empty, and its images
    be missed. That is data_dir, one above it, one below it, or one of `others`, relative to it."""
    for folder in (data_dir, *(data_dir / other for other in others if other is not None)):
        for place in (*reversed(folder.absolute().parents), folder):
            _refuse_closed(place, os.R_OK | os.X_OK if place == folder else os.X_OK)
    listing = listing or Listing()
    for inner in (inner for folder in listing.walk_folders(data_dir) for inner in listing.subfolders(folder)):
        _refuse_closed(inner, os.R_OK | os.X_OK)  # links too


def _refuse_closed(folder: Path, mode: int) -> None:
    if folder.is_dir() and not os.access(folder, mode):
        fix = "need the permissions r and x on it (chmod u+rx), or another user"
        raise DataError(f"data_dir: {folder} cannot be read (Permission denied); {fix}")


def is_run_folder(folder: Path) -> bool:
    return all((folder / inner).is_file() for inner in RUN_FOLDER_HOLDS)


def resolved(path: Path) -> Path:
    """As Path.resolve, which raises for links that lead in a circle, and for a NUL in the name."""
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def describe_results(results: Sequence[Path]) -> str:
    return f"{counted(len(results), 'result')} of predict left out, such as {results[0]}"


# What names mean


def part_in(names: Iterable[str]) -> Part | None:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg."""
    words = [word for name in names for word in re.findall("[a-z]+", name.lower())]
    # "tr" and "ts" mean little in a file's name.
    found = {PARTS[word] for word in words if word in PARTS and len(word) > 2}
    return found.pop() if len(found) == 1 else None


def _meaning(name: str) -> tuple[str, Kind | None]:
    """Part and kind of a folder by its name: train_masks → train, mask; imgs → "", image; val2017 → val, None; foo →
    "", None."""
    word = PART_NAME.sub(r"\1", re.sub(r"[-_. ]", "", name.lower()))
    if word in KINDS or word in PARTS:
        return PARTS.get(word, ""), KINDS.get(word)
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return "", None


def images_of_dataset(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files that training would take for images, where folders or names say which are masks; else all files."""
    stems = {(file.parent, file.stem) for file in files}
    images_of: dict[Path, Set[tuple[Path, str]]] = {}  # a for a_mask and gt_a beside it
    for file in files:
        rests = [rest for mark in mask_marks(file.stem) for rest in (file.stem[: -len(mark)], file.stem[len(mark) :])]
        images_of[file] = {(file.parent, rest) for rest in rests} & stems
    masked = {image for images in images_of.values() for image in images}
    by_kind: dict[Kind | None, list[Path]] = {"image": [], "mask": [], None: []}
    for file in files:
        meanings = [_meaning(name) for name in reversed(file.relative_to(root).parts[:-1])]
        kind: Kind | None = next((kind for _, kind in meanings if kind), "mask" if images_of[file] else None)
        is_image = not meanings or any(part for part, _ in meanings) or (file.parent, file.stem) in masked
        by_kind[kind or ("image" if is_image else None)].append(file)
    return by_kind["image"] if by_kind["image"] and by_kind["mask"] else [*files]


def holds_masks_too(files: Sequence[File], mask_suffix: str) -> bool:
    """Whether some of the files are masks: some but not all of a folder are named like one, two files share a name
    (a.jpg, a.png), or have its name and that of a class (a.png, a_cat.png, a_dog.png)."""
    marked = {
        (file.folder, bool(mask_marks(file.stem) or (mask_suffix and file.stem.endswith(mask_suffix))))
        for file in files
    }
    has_both = len(marked) > len({folder for folder, _ in marked})
    share_names = len({(file.folder, file.stem) for file in files}) < len(files)
    return has_both or share_names or bool(classes_by_ending(*split_by_endings(files)))


# Images and masks of each part


@dataclass
class Group:
    """The images, or the masks, of a part."""

    place: Path  # their folder; of sequences, with * instead of their names
    part: str
    part_name: str
    value: str
    folders: dict[str, Path] = field(default_factory=dict)  # by the sequence, with a slash; "" if there are none
    files: list[File] = field(default_factory=list)

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
# The names in image_dir and mask_dir, and whether that is a folder of the root:
Words = Mapping[Kind, tuple[tuple[str, ...], bool]]


class Role(NamedTuple):
    """What the files of a folder are, by the names on the way to it."""

    kind: Kind | None
    part: str = ""  # "": data that is not divided
    part_name: str = ""  # of the folder that makes it train or val
    value: str = "."  # selects it in the config
    sequence: str = ""  # with a slash
    depth: int = 0  # number of names that say this; those behind them belong to the names of the files


def find_layout(
    data_dir: Path,
    image_dir: str | None,
    mask_dir: str | None,
    mask_suffix: str = "",
    without: Set[Path] = frozenset(),
    listing: Listing | None = None,
) -> Layout:
    """The images and masks in data_dir; what image_dir or mask_dir names is not searched for. Raises DataError."""
    listing = listing or Listing()
    keys = zip(KEYS, (image_dir, mask_dir), strict=True)
    explicit: dict[Kind, str] = {kind: value for kind, value in keys if value is not None}
    files = list_files(data_dir, without, _follow_data(data_dir, explicit, listing), True, listing)
    if not explicit and not any(_meaning(folder.name)[1] == "mask" for folder in listing.subfolders(data_dir)):
        # PASCAL VOC somewhere in a repository, beside pictures of other folders.
        years = {file.parent.parent for file in files if file.parent.name == "JPEGImages"}
        years = {year for year in years if "SegmentationClass" in listing.entries(year).folders}
        files = [file for file in files if not years.isdisjoint(file.parents)] if years else files
    root = data_dir if explicit else _inner_root(data_dir, files)
    groups = _without_stray_sequences(_group_files(root, files, explicit, without, listing), root)
    for kind, value in explicit.items():
        if not groups[kind]:
            place = root / value
            inner = listing.subfolders(place.parent)
            choices = [{KEYS[kind]: path_in(root, each)} for each in inner if _holds_images(each, listing)]
            is_there = "no image file in" if place.is_dir() else "no folder"
            text = f"{KEYS[kind]}: {is_there} {place}; {_contents(place.parent, listing)}"
            raise Question(text, *choices[:MAX_PROPOSED])
    if image_dir is None:
        _add_bare_folders(groups, root, mask_suffix, listing)
    image, mask = (_only(data_dir, kind, groups, ("", "train")) for kind in KEYS)
    if image and not mask and holds_masks_too(image.files, mask_suffix):
        mask = image
    if not image or not mask:
        raise _missing(data_dir, root, groups, image, mask, listing)
    parts: dict[Part, tuple[Group, Group | None]] = {"train": (image, mask)}
    images, masks = path_in(data_dir, image.place), path_in(data_dir, mask.place)
    phrase = f"{images}/ + {masks}/" + (f" in {len(image.folders)} folders" if image.is_in_sequences else "")
    if image is mask:
        phrase = "image and mask side by side" + ("" if images == "." else f" in {images}/")
    val_image, val_mask = (_only(data_dir, kind, groups, ("val",)) for kind in KEYS)
    if val_image and image is mask:
        val_mask = val_image if holds_masks_too(val_image.files, mask_suffix) else None
    if val_image and not val_mask:
        fix = f"{_contents(data_dir, listing)}; add them, or to train and validate on one folder"
        raise Question(f"no masks of {val_image.place}; {fix}", {"image_dir": images, "mask_dir": masks})
    if val_image:
        parts["val"] = val_image, val_mask
    tests = [[group for group in groups[kind] if group.part == "test"] for kind in KEYS]
    if len(tests[0]) == 1 and len(tests[1]) < 2:  # several are ambiguous, which stops no training
        (test,) = tests[0]
        is_side_by_side = image is mask and holds_masks_too(test.files, mask_suffix)
        parts["test"] = test, tests[1][0] if tests[1] else test if is_side_by_side else None
    return Layout(parts, phrase, f"folders {image.part_name or images} and {val_image.part_name}" if val_image else "")


def _follow_data(data_dir: Path, explicit: Mapping[Kind, str], listing: Listing) -> Callable[[Path], bool]:
    """Links that are, or hold, folders of images or masks; of those below such a folder, the ones of parts. And the
    only one. Others may lead to a whole disk. None that leads to a folder in which it lies."""

    def follows(link: Path) -> bool:
        *above, name = link.relative_to(data_dir).parts
        part, kind = _meaning(name)
        if len(above) >= MAX_DEPTH or resolved(link.parent).is_relative_to(resolved(link)):
            return False
        if any(_meaning(each)[1] for each in above):
            return bool(part)
        is_explicit = any(name in Path(value).parts for value in explicit.values())
        is_only = not above and len(listing.subfolders(data_dir)) == 1
        holds_kinds = any(_meaning(inner.name)[1] for inner in listing.subfolders(link))
        return bool(part or kind) or is_explicit or is_only or holds_kinds

    return follows


def _inner_root(data_dir: Path, files: Sequence[Path]) -> Path:
    """data_dir, or the folder in it that an archive put around its content."""
    common = Path(os.path.commonpath([files[0].parent, files[-1].parent])) if files else data_dir  # they are sorted
    return data_dir.joinpath(*takewhile(lambda name: _meaning(name) == ("", None), common.relative_to(data_dir).parts))


def _role(names: tuple[str, ...], explicit: Words) -> Role:
    """By at most three names: K, KP, PK, *K, P*K (see above). `explicit`: the longer one first; it decides, and no
    other name means its kind."""
    found: list[tuple[str, Kind | None, str, int]] = []  # part, kind, name, and the number of names up to it
    code, index = "", 0
    while len(found) < MAX_DEPTH:
        matching = [
            (kind, words)
            for kind, (words, is_there) in explicit.items()
            if names[index:][: len(words)] == words and is_there == (index == 0) and not (found and not words)
        ]
        if not matching and index == len(names):
            break
        part, kind = _meaning(names[index]) if not matching else ("", matching[0][0])
        words = matching[0][1] if matching else names[index : index + 1]
        is_other = not matching and kind in explicit
        code += "X" if is_other else "B" if part and kind else "K" if kind else "P" if part else "*"
        index += len(words)
        found.append((part, kind, "/".join(words) or ".", index))
    used = found[: shape.end()] if (shape := re.match(r"KP|P?\*?[KB]", code)) else []
    parts = {part: name for part, _, name, _ in reversed(used) if part}
    if not used or len(parts) > 1:
        return Role(None, found[0][0], found[0][2], found[0][2], "", 1) if code[:1] == "P" else Role(None)
    kind, value = next((kind, name) for _, kind, name, _ in used if kind)
    sequence = next((f"{name}/" for part, kind, name, _ in used if not part and not kind), "")
    return Role(kind, "".join(parts), "".join(parts.values()), value, sequence, used[-1][3])


def _group_files(
    root: Path, files: Sequence[Path], explicit: Mapping[Kind, str], without: Set[Path], listing: Listing
) -> Groups:
    inside = {kind: Path(os.path.relpath(root / value, root)).parts for kind, value in explicit.items()}
    # Of images/ and images/masks/, the latter decides.
    by_length = sorted(inside.items(), key=lambda item: -len(item[1]))
    words: Words = {kind: (names, root.joinpath(*names).is_dir()) for kind, names in by_length}
    searched: list[tuple[Path, Sequence[Path], Words, str]] = [(root, files, words, "")]
    for kind, value in explicit.items():
        if inside[kind][:1] == ("..",):
            there = list_files(root / value, without, None, True, listing)
            searched.append((root / value, there, {kind: ((), True)}, value))
    groups: dict[tuple[Kind | None, str, Path], Group] = {}
    for top, paths, its_words, value in searched:
        for folder, in_folder in groupby(paths, lambda path: path.parent):
            names = folder.relative_to(top).parts
            role = _role(names, its_words)
            base = top.joinpath(*names[: role.depth])
            place = base.parent.parent / "*" / base.name if role.sequence else base
            new = Group(place, role.part, role.part_name, value or role.value)
            group = groups.setdefault((role.kind, role.part, place), new)
            group.folders[role.sequence] = base
            group.files += name_files(in_folder, role.sequence + "".join(f"{name}/" for name in names[role.depth :]))
    found: Groups = {"image": [], "mask": [], None: []}
    for key, group in groups.items():
        found[key[0]].append(group)
    if explicit and explicit.get("image") == explicit.get("mask"):
        found["image"] = found["mask"] = found["image"] or found["mask"]
    return found


def _without_stray_sequences(groups: Groups, root: Path) -> Groups:
    """Sequences only where no other folder holds the data, and those with images and masks; one of test may lack
    masks."""
    kinds = [(kind, group) for kind in KEYS for group in groups[kind]]
    has_others = any(group.part in ("", "train") and not group.is_in_sequences for _, group in kinds)
    has_files = any(file.path.parent == root for group in groups[None] for file in group.files)
    names = [(kind, group.part, name) for kind, group in kinds for name in group.folders]
    for kind, group in kinds:
        if group.is_in_sequences:
            with_masks = {name for other, part, name in names if other != kind and part == group.part}
            kept = group.folders if group.part == "test" and kind == "image" else with_masks & group.folders.keys()
            kept = {} if has_others or (has_files and not group.part) else kept
            group.folders = {name: folder for name, folder in group.folders.items() if name in kept}
            group.files = [file for file in group.files if f"{file.folder.partition('/')[0]}/" in kept]
    return {kind: [group for group in found if group.folders] for kind, found in groups.items()}


def _add_bare_folders(groups: Groups, root: Path, mask_suffix: str, listing: Listing) -> None:
    """Folders that hold images without being named so: train/ beside trainannot/, or images and masks in one folder."""
    has_masks = any(group.part != "test" for group in groups["mask"])
    kinds: tuple[Kind, ...] = ("image",) if has_masks else ("image", "mask")
    meanings = [_meaning(folder.name) for folder in listing.subfolders(root)]
    part_folders = {part for part, kind in meanings if not kind} - {""}
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
    candidates = [group for group in groups[kind] if group.part in parts]
    candidates.sort(key=lambda group: (group.part, group.place))
    # Files beside images/train/ belong to no part.
    above = {group.place.parent for group in candidates if group.part}
    candidates = [group for group in candidates if group.place not in above]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    paths, values = [path_in(data_dir, group.place) for group in candidates], [group.value for group in candidates]
    folders = ", ".join(f"{path}/" for path in paths)
    text = f"{KEYS[kind]}: {len(paths)} folders in {data_dir} could hold the {kind}s: {folders}"
    raise Question(text, *({KEYS[kind]: value} for value in (values if len({*values}) == len(values) else paths)))


def _missing(
    data_dir: Path, root: Path, groups: Groups, image: Group | None, mask: Group | None, listing: Listing
) -> DataError:
    """What was not found, with the keys to set; the folders of val or test, if there are such alone."""
    for part in ("val", "test"):
        there = [[group for group in groups[kind] if group.part == part and not group.is_in_sequences] for kind in KEYS]
        if there[0] and there[1]:
            images, masks = (path_in(data_dir, found[0].place) for found in there)
            settings = {"image_dir": images, "mask_dir": masks}
            return Question(f"data_dir: {data_dir} holds {images}/ but no train/", settings)
    missing = {} if image else {"image_dir": "no folder of images (images, imgs, ...)"}
    missing |= {} if mask else {"mask_dir": "no folder of masks (masks, labels, ...)"}
    fix = f"set {' and '.join(missing)} to the {'folder' if len(missing) == 1 else 'folders'} to use"
    text = f"{' and '.join(missing.values())} in {root}; {_contents(root, listing)}; {fix}, or split_file to a CSV"
    return DataError(f"data_dir: {text}")


def _holds_images(folder: Path, listing: Listing) -> bool:
    return bool(list_files(folder, with_volumes=True, listing=listing))


def _contents(folder: Path, listing: Listing) -> str:
    inner = listing.subfolders(folder)
    empty = [path for path in inner if not _holds_images(path, listing)]
    names = first_few((f"{path.name}/{' (no image file)' if path in empty else ''}" for path in inner), 10)
    known = f"; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}" if empty else ""
    return f"{folder} holds {names or 'no folder'}{known}"
