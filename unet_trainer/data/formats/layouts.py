"""Which files are images and which are masks, by the names of their folders or by image_dir and mask_dir.

The names of the first three folders on the way to a file are read: one for images or masks, one for a part (train, val,
test), one for both (train_masks); any other above them is a sequence (*). Where no folder is named for the images of a
part, they lie in that of the part, or in data_dir; where none is named for masks, these lie beside the images. If more
than one folder is possible, the question names them and the lines to set.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, permutations, takewhile
from pathlib import Path
from typing import get_args

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.listing import Listing, resolved
from unet_trainer.data.names import MASK_MARK, File, Kind, folder_meaning, match_names, name_files
from unet_trainer.data.pairs import Choice, Part, Question, first_few, path_in
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, read_image

KEYS: dict[Kind, str] = {"image": "image_dir", "mask": "mask_dir"}
EXAMPLES: dict[Kind, str] = {"image": "images, imgs, ...", "mask": "masks, labels, ..."}
MAX_DEPTH = 3  # of folders whose names say what they hold
MAX_PROPOSED = 8

ImageFolder = tuple[Path, list[str]]  # with the names of its image files
# Kind → part and place, with * for sequences → its folders, the names of their files, and the folder in them
Found = dict[Kind | None, dict[tuple[Part | None, Path], list[tuple[Path, list[str], str]]]]


@dataclass(frozen=True)
class Layout:
    """The images and the masks of a dataset: one list for both if they lie side by side."""

    images: list[File]
    masks: list[File]
    places: dict[Part, Path]  # of the images of each part; of sequences, with * instead of their names
    mask_dir: Path
    values: tuple[str, str]  # image_dir and mask_dir that select them
    rule: str
    division: str  # how they are divided into train and val, if they are
    search: "FolderSearch"  # that found them

    @property
    def image_dir(self) -> Path:
        return self.places["train"]

    @property
    def is_one_folder(self) -> bool:
        return self.images is self.masks

    def without(self, files: Set[File]) -> "Layout":
        images = [file for file in self.images if file not in files]
        masks = images if self.is_one_folder else [file for file in self.masks if file not in files]
        return replace(self, images=images, masks=masks)


def find_layout(data_dir: Path, config: Config, listing: Listing) -> Layout:
    """The images and masks in data_dir. Raises Question."""
    search = FolderSearch(data_dir, config, listing)
    images, masks = (search.choose(kind) for kind in KEYS)
    masks = masks if masks.keys() - {"test"} else images  # side by side
    if "train" not in images or "train" not in masks:
        raise search.describe_missing("mask" if "train" in images else "image")
    image_files = search.files("image", images)
    mask_files = image_files if masks is images else search.files("mask", masks)
    shown, shown_masks = (path_in(data_dir, places["train"]) for places in (images, masks))
    rule = f"{shown}/ + {shown_masks}/" if masks is not images else "image and mask side by side"
    rule += f" in {shown}/" if masks is images and shown != "." else ""
    names = [search.name(None, images[part]) for part in ("train", "val") if part in images]
    division = f"folders {' and '.join(names)}" if "val" in images else ""
    values = search.name("image", images["train"]), search.name("mask", masks["train"])
    return Layout(image_files, mask_files, images, masks["train"], values, rule, division, search)


def images_of_dataset(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files that training would take for images, where folders or names say which are masks; else all files."""
    stems, kinds, masked = (
        {(file.parent, file.stem) for file in files},
        dict[Path, Kind | None](),
        set[tuple[Path, str]](),
    )
    for file in files:
        images = {(file.parent, file.stem.replace(mark.group(), "")) for mark in MASK_MARK.finditer(file.stem)} & stems
        masked |= images  # a for a_mask and gt_a beside it
        meanings = [folder_meaning(name) for name in file.relative_to(root).parts[:-1]]
        is_image = not meanings or any(part for part, _ in meanings)
        other: Kind | None = "mask" if images else "image" if is_image else None
        kinds[file] = next((kind for _, kind in reversed(meanings) if kind), other)
    kinds |= {file: "image" for file, kind in kinds.items() if not kind and (file.parent, file.stem) in masked}
    found = [file for file, kind in kinds.items() if kind == "image"]
    return found if found and "mask" in kinds.values() else [*files]


class FolderSearch:
    """The folders of a dataset that hold image files, by what they hold."""

    def __init__(self, data_dir: Path, config: Config, listing: Listing) -> None:
        self.data_dir, self.root, self.listing = data_dir, data_dir, listing
        self.explicit: dict[Kind, str] = {kind: value for kind, key in KEYS.items() if (value := getattr(config, key))}
        inside = {kind: os.path.relpath(data_dir / value, data_dir) for kind, value in self.explicit.items()}
        tops = {kind: data_dir / path for kind, path in inside.items()}
        # Of images/ and images/masks/, the latter decides. A name that is no folder here is looked for in parts.
        by_depth = sorted(tops, key=lambda kind: -len(tops[kind].parts))
        self.tops = {kind: tops[kind] for kind in by_depth if tops[kind].is_dir()}
        self.named = {value: kind for kind, value in self.explicit.items() if kind not in self.tops}
        if tops.get("image") == tops.get("mask"):
            self.tops.pop("mask", None)  # they lie side by side
        there = (listing.images(data_dir, self._follows), *map(listing.images, self.tops.values()))
        folders = [*dict(chain.from_iterable(there)).items()]
        if folders and not self.explicit:
            folders = self._keep_voc(folders)
            # An archive may have put a folder around its content.
            common = Path(os.path.commonpath([folders[0][0], folders[-1][0]])).relative_to(data_dir).parts
            self.root = data_dir.joinpath(*takewhile(lambda name: not any(folder_meaning(name)), common))
        self.folders = folders
        self.found: Found = {kind: defaultdict(list) for kind in (*KEYS, None)}
        for folder, names in folders:
            top, kind, part, shown = self._role(folder)
            inner = folder.relative_to(top).parts
            below = [name for index, name in enumerate(inner) if index >= len(shown) or shown[index] == "*"]
            self.found[kind][part, top.joinpath(*shown)].append((folder, names, "".join(f"{name}/" for name in below)))
        for kind in (*self.tops, *self.named.values()):
            if not self.found[kind]:
                raise self._ask_for(kind)
        self._settle_unnamed_folders()

    def _keep_voc(self, folders: list[ImageFolder]) -> list[ImageFolder]:
        """PASCAL VOC may lie in a repository, beside pictures of other folders."""
        years = {folder.parent for folder, _ in folders if folder.name == "JPEGImages"}
        years = {year for year in years if "SegmentationClass" in self.listing.entries(year).folders}
        names = map(folder_meaning, self.listing.entries(self.data_dir).folders)
        is_voc = years and not any(kind == "mask" for _, kind in names)
        return [each for each in folders if not years.isdisjoint(each[0].parents)] if is_voc else folders

    def _follows(self, link: Path) -> bool:
        """Links named as images, masks or parts: others may lead to a whole disk, or to a folder in which they lie."""
        is_near = len(link.relative_to(self.data_dir).parts) <= MAX_DEPTH
        is_meant = is_near and any(folder_meaning(link.name))
        return is_meant and not resolved(link.parent).is_relative_to(resolved(link))

    def _meaning(self, name: str) -> tuple[Part | None, Kind | None]:
        """As folder_meaning, but where image_dir or mask_dir is set, no other name means images or masks."""
        part, kind = (None, self.named[name]) if name in self.named else folder_meaning(name)
        return (part, kind) if kind not in self.explicit or name in self.named else (None, None)

    def _role(self, folder: Path) -> tuple[Path, Kind | None, Part | None, Sequence[str]]:
        """A folder above, kind and part by the names from there on, and those names that say so: * for a sequence."""
        for explicit, top in self.tops.items():
            if folder.is_relative_to(top):
                names = folder.relative_to(top).parts[:1]
                part, other = folder_meaning("".join(names))
                return (top, explicit, part, names) if part and not other else (top, explicit, None, ())
        names, part, shown = folder.relative_to(self.root).parts, None, list[str]()
        for depth, name in enumerate(names[:MAX_DEPTH], start=1):
            its_part, kind = self._meaning(name)
            if part and its_part not in (None, part):
                break
            part = part or its_part
            shown.append(name if kind or its_part else "*")
            if kind:
                below = folder_meaning("".join(names[depth : depth + 1]))  # images/train
                is_part = not part and below[0] and not below[1]
                return self.root, kind, *((below[0], [*shown, names[depth]]) if is_part else (part, shown))
        part = self._meaning("".join(names[:1]))[0]
        return self.root, None, part, names[:1] if part else ()

    def _settle_unnamed_folders(self) -> None:
        """Sequences are only where no other folder holds the data. And folders may hold images without being named so:
        train/ beside trainannot/, or images and masks in one."""
        named = [place for kind in KEYS for part, place in self.found[kind] if part in (None, "train")]
        at_root = any(folder == self.root for its in self.found[None].values() for folder, _, _ in its)
        if at_root or any("*" not in place.parts for place in named):
            for kind, found in self.found.items():
                self.found[kind] = {key: its for key, its in found.items() if "*" not in key[1].parts}
        has_masks = any(part != "test" for part, _ in self.found["mask"])
        with_images, unnamed = ({part for part, _ in self.found[kind]} for kind in ("image", None))
        is_divided = not with_images.isdisjoint({None, "train"}) or {"train", "val"} <= unnamed
        for (part, place), folders in self.found[None].items() if "image" not in self.explicit else ():
            is_at_root = any(not below for _, _, below in folders)
            if part not in with_images if part else not is_divided and (is_at_root or not has_masks):
                self.found["image"][part, place] = folders

    def choose(self, kind: Kind) -> dict[Part, Path]:
        """The folder of each part; raises Question if several may be it."""
        chosen: dict[Part, Path] = {}
        for part in get_args(Part):
            found = sorted((its or "", place) for its, place in self.found[kind] if (its or "train") == part)
            above = {place.parent for its, place in found if its}  # files beside images/train/ belong to no part
            places = [place for _, place in found if place not in above]
            if len(places) > 1 and part != "test":  # which stops no training
                paths = [path_in(self.data_dir, place) for place in places]
                values = [self.name(kind, place) for place in places]
                values = values if len({*values}) == len(values) else paths
                text = f"{KEYS[kind]}: {len(paths)} folders in {self.data_dir} could hold the {kind}s"
                raise Question(f"{text}: {'/, '.join(paths)}/", *({KEYS[kind]: value} for value in values))
            chosen |= {part: places[0]} if len(places) == 1 else {}
        return chosen

    def files(self, kind: Kind, places: dict[Part, Path]) -> list[File]:
        """The files of each part; where there is no val, the rest is not divided."""
        found: list[File] = []
        for part, place in places.items():
            file_part = part if part == "test" or "val" in places else None
            folders = [each for (_, its), some in self.found[kind].items() if its == place for each in some]
            found += [file for folder, names, below in folders for file in name_files(folder, names, file_part, below)]
        return found

    def name(self, kind: Kind | None, place: Path) -> str:
        """The name on the way to a place that says it is one of images or of masks, or of a part."""
        names = place.relative_to(self.root).parts if place.is_relative_to(self.root) else ()
        meanings = {name: self._meaning(name) for name in reversed(names)}
        said = [name for name in names if (meanings[name][1] == kind if kind else meanings[name][0])]
        return [*said, *names, "."][0]

    def _ask_for(self, kind: Kind) -> Question:
        """What image_dir or mask_dir says holds no image."""
        place = self.data_dir / self.explicit[kind]
        inner = [each for each in self.listing.subfolders(place.parent) if any(self.listing.images(each))]
        choices = [{KEYS[kind]: path_in(self.data_dir, each)} for each in inner[:MAX_PROPOSED]]
        is_there = "no image file in" if place.is_dir() else "no folder"
        above = next(folder for folder in place.parents if folder.is_dir())
        return Question(f"{KEYS[kind]}: {is_there} {place}; {self.contents(above)}", *choices)

    def describe_missing(self, kind: Kind) -> Question:
        """What was not found, with the key to set."""
        text = f"data_dir: no folder of {kind}s ({EXAMPLES[kind]}) in {self.root}; {self.contents()}"
        fix = f"set {KEYS[kind]} to the folder to use, or split_file to a CSV"
        return Question(text, *choices) if (choices := self.propose_folders()) else Question(f"{text}; {fix}")

    def propose_folders(self) -> list[Choice]:
        """image_dir and mask_dir for each two folders, whatever their names, whose files all pair up. In the first
        choice the first file of mask_dir has fewer values than that of image_dir."""
        by_top: dict[str, list[ImageFolder]] = defaultdict(list)
        for folder, names in self.folders:
            by_top["".join(folder.relative_to(self.root).parts[:1])].append((folder, names))
        if self.explicit or "" in by_top or len(by_top) > MAX_PROPOSED:
            return []
        files, num_values = dict[str, list[File]](), dict[str, int]()
        for its in by_top.values():
            top = Path(os.path.commonpath([folder for folder, _ in its]))
            shown = path_in(self.data_dir, top)
            for folder, names in its:
                below = f"{folder.relative_to(top).as_posix()}/".removeprefix("./")
                files.setdefault(shown, []).extend(name_files(folder, names, None, below))
            num_values[shown] = 0
            with contextlib.suppress(ReadError):
                num_values[shown] = len(np.unique(read_image(files[shown][0].path)))
        pairs = [(a, b) for a, b in permutations(files, 2) if match_names(files[a], files[b]).is_complete]
        pairs.sort(key=lambda pair: (num_values[pair[1]] - num_values[pair[0]], pair))
        return [Choice(f"{b} holds the masks", {"image_dir": a, "mask_dir": b}) for a, b in pairs[:MAX_PROPOSED]]

    def contents(self, folder: Path | None = None) -> str:
        """The folders in a folder, by default in that of the data, for messages."""
        folder = folder or self.root
        inner = {path.name: any(self.listing.images(path)) for path in self.listing.subfolders(folder)}
        names = (f"{name}/{'' if has_images else ' (no image file)'}" for name, has_images in inner.items())
        known = "" if all(inner.values()) else f"; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}"
        return f"{folder} holds {first_few(names, 10) or 'no folder'}{known}"
