"""Which files of a part are images and which are masks, and which mask belongs to which image: by their names. Opens no file.

What leaves files unpaired, or could be meant in several ways, is described with the settings that decide it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from unet_trainer.datasets.file_tree import list_files
from unet_trainer.datasets.layouts import Folders
from unet_trainer.datasets.name_matching import (
    CHANNEL,
    SEPARATOR,
    File,
    Match,
    best_match,
    extensions_of_shared_names,
    has_ending,
    is_channel_folder,
    mask_marks,
    name_files,
    without_ending,
)
from unet_trainer.datasets.problems import Choice, Problem, Question, first_few
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.system.console import counted

NUM_NAMED = 5  # files named in a message before "and N more"
UNPAIRED = ("no_mask", "no_image")  # kinds of problems
SKIP = Choice("", {"unpaired": "skip"})
SPLIT_FILE = "split_file to a CSV with the columns image and mask"


def collect_files(folders: Sequence[Folders], mask_suffix: str) -> tuple[list[File], list[File]]:
    """The images and the masks of a part; raises DataError where they cannot be told apart, or there are none."""
    if len(folders) == 1 and folders[0].images == folders[0].masks:
        return _side_by_side(folders[0], mask_suffix)
    return _two_folders(folders, mask_suffix)


def list_images(folders: Sequence[Folders]) -> list[File]:
    return _list_side(folders, "images")


def _list_side(folders: Sequence[Folders], side: str) -> list[File]:
    """The files of one of the two folders; if the other one is inside it, its files are not this one's."""
    found: list[File] = []
    for each in folders:
        folder, other = (each.images, each.masks) if side == "images" else (each.masks, each.images)
        inner = (other,) if other != folder and other.is_relative_to(folder) else ()
        found += name_files(list_files(folder, (*inner, *each.without)), folder, each.name)
    return found


def _two_folders(folders: Sequence[Folders], mask_suffix: str) -> tuple[list[File], list[File]]:
    images, masks = (_list_side(folders, side) for side in ("images", "masks"))
    for noun, files, folder in (("images", images, folders[0].images), ("masks", masks, folders[0].masks)):
        if not files:
            others = sorted({path.suffix for path in folder.rglob("*") if path.suffix and path.is_file()})
            there = f"; it holds {first_few(others)} files" if others else ""
            raise DataError(f"no {noun} in {folder}; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}{there}")
    if mask_suffix:
        named = [mask for mask in masks if has_ending(mask, mask_suffix)]
        if not named:
            raise Question(
                f"mask_suffix: no name in {folders[0].masks} ends in {mask_suffix!r}; {_examples(masks)}",
                *({"mask_suffix": ending} for ending in _common_endings(images, masks)),
            )
        masks = without_ending(named, mask_suffix)
    _refuse_shared_names(images, masks)
    return images, masks


def _refuse_shared_names(images: Sequence[File], masks: Sequence[File]) -> None:
    problems = [*_same_names(images), *_same_names(masks)]
    if not problems:
        return
    text = "images and masks do not pair up:\n  " + "\n  ".join(problems)
    extensions = extensions_of_shared_names(masks)
    if extensions and not _same_names(images):
        counts = Counter(extension for found in extensions for extension in found)
        raise Question(text, *({"mask_suffix": extension} for extension in sorted(counts)))
    raise DataError(f"{text}\n  set {SPLIT_FILE}, which says what belongs together")


def _side_by_side(folders: Folders, mask_suffix: str) -> tuple[list[File], list[File]]:
    """Images and masks of one folder, told apart by mask_suffix, by their extensions if they share their names, or by the one mark
    (such as _mask) that leaves no file unpaired."""
    folder = folders.images
    files = name_files(list_files(folder, folders.without), folder)
    if mask_suffix:
        return _by_suffix(files, folder, mask_suffix)
    if _same_names(files):
        return _by_extension(files, folder)
    counts = Counter(mark for file in files for mark in mask_marks(file.stem))
    marks = sorted(mark for mark, count in counts.items() if count < len(files))
    by_mark: dict[str, tuple[list[File], list[File]]] = {mark: ([], []) for mark in marks}  # images and masks by each mark
    for file in files:
        its_marks = mask_marks(file.stem)
        for mark, images_and_masks in by_mark.items():
            images_and_masks[mark in its_marks].append(file)
    complete = [mark for mark in marks if best_match(*by_mark[mark], folder).is_complete]
    if len(complete) == 1 or (not complete and len(marks) == 1):
        return by_mark[(complete or marks)[0]]
    if not marks:
        raise Question(
            f"cannot tell images from masks in {folder}: no file is named like a mask (X_mask, X_label, gt_X, ...), "
            f"{_examples(files)}; set mask_suffix, image_dir and mask_dir to two folders, or {SPLIT_FILE}",
            *({"mask_suffix": ending} for ending in _common_endings(files, files)),
        )
    listing = ", ".join(f"{mark} ({counts[mark]} files)" for mark in marks)
    endings = (next((file.stem[-len(mark) :] for file in files if file.stem.lower().endswith(mark)), None) for mark in marks)
    raise Question(
        f"cannot tell images from masks in {folder}: several kinds of names could be masks: {listing}",
        *({"mask_suffix": ending} for ending in endings if ending),
    )


def _by_suffix(files: Sequence[File], folder: Path, mask_suffix: str) -> tuple[list[File], list[File]]:
    masks = [file for file in files if has_ending(file, mask_suffix)]
    stems = {(file.folder, file.stem) for file in without_ending(masks, mask_suffix)}
    chosen = set(masks)
    images = [file for file in files if file not in chosen and not _is_another_mask(file, stems)]
    if not masks or not images:
        raise Question(
            f"mask_suffix: {'no' if not masks else 'every'} name in {folder} ends in {mask_suffix!r}; {_examples(files)}",
            *({"mask_suffix": ending} for ending in _common_endings(files, files)),
        )
    masks = without_ending(masks, mask_suffix)
    _refuse_shared_names(images, masks)
    return images, masks


def _by_extension(files: Sequence[File], folder: Path) -> tuple[list[File], list[File]]:
    """a.jpg is an image and a.png its mask, if all names that two files share are like this."""
    shared = extensions_of_shared_names(files)
    text = f"cannot tell images from masks in {folder}:\n  " + "\n  ".join(_same_names(files))
    counts = Counter(extension for found in shared for extension in found)
    if not shared or any(len(found) != 2 for found in shared):
        raise DataError(f"{text}\n  set {SPLIT_FILE}, which says what belongs together")
    others = sorted(extension for extension in counts if extension != ".jpg")
    has_marks = any(mask_marks(file.stem) for file in files) and not all(mask_marks(file.stem) for file in files)
    if has_marks or counts[".jpg"] != len(shared):
        raise Question(text, *({"mask_suffix": extension} for extension in others))
    masks = [file for file in files if file.path.suffix.lower().replace(".tiff", ".tif") in others]
    images = [file for file in files if file.path.suffix.lower() in (".jpg", ".jpeg")]
    rest = set(files) - set(masks) - set(images)
    if rest or _same_names(masks) or _same_names(images):
        raise DataError(f"{text}\n  set {SPLIT_FILE}, which says what belongs together")
    return images, masks


def _common_endings(images: Sequence[File], masks: Sequence[File]) -> list[str]:
    """What follows the name of an image in at least half as many names of masks as there are such images."""
    names = {(image.folder, image.stem) for image in images}
    counts: Counter[str] = Counter()
    for mask in masks:
        for found in SEPARATOR.finditer(mask.stem):
            if (mask.folder, mask.stem[: found.start()]) in names:
                counts[mask.stem[found.start() :]] += 1
    most = max(counts.values(), default=0)
    return [ending for ending, count in counts.most_common() if 2 * count > most]


def _is_another_mask(file: File, stems: set[tuple[str, str]]) -> bool:
    """Whether the file is another mask (a second annotator's) of an image that has a mask already."""
    marks = mask_marks(file.stem)
    cores = {file.stem[: -len(mark)] for mark in marks} | {file.stem[len(mark) :] for mark in marks}
    return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems


def refuse_channels(images: Sequence[File], masks: Sequence[File], image_folder: Path) -> None:
    """Raises DataError where each channel of an image is a file of its own, as in nnU-Net."""
    cases: dict[str, list[str]] = {mask.folder + mask.stem: [] for mask in masks}
    for image in images:
        cases.get(image.folder + CHANNEL.sub("", image.stem), []).append(image.path.name)
    case, files = max(cases.items(), key=lambda item: len(item[1]), default=("", []))
    if is_channel_folder(image_folder) and len(files) > 1:
        raise DataError(
            f"image_dir: {image_folder} has {len(files)} channel files for {case} ({first_few(files)}); "
            "an image must be one file: merge its channels, or set image_dir to a folder with one channel"
        )


def _same_names(files: Iterable[File]) -> list[str]:
    by_name: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in files:
        by_name[file.folder, file.stem].append(file.path)
    shared = [paths for paths in by_name.values() if len(paths) > 1]
    problems = [f"{' and '.join(str(path) for path in paths)} have the same name" for paths in shared]
    return [*problems[:NUM_NAMED], *([f"and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else [])]


def describe_unpaired(match: Match, image_folder: Path, mask_folder: Path, mask_suffix: str) -> str:
    """What the best rule pairs, what it leaves unpaired, and the keys to set."""
    images, masks, rule = sorted(match.images), sorted(match.masks), match.rule
    lines = ["images and masks do not pair up:"]
    if match.pairs:
        image, mask = min(match.pairs)
        num_images = len(match.pairs) + len(images)
        lines.append(f"the best rule pairs {len(match.pairs)} of {num_images} images, {image.path.name} with {mask.path.name}")
    else:
        lines.append("no rule pairs any of them (same names, a common prefix or suffix, zeros before numbers)")
    if images:
        ending = mask_suffix if mask_suffix.lower() in IMAGE_EXTENSIONS else f"{mask_suffix}.png"
        wanted = f"{rule.mask[0]}{rule.image_core(images[0].stem)}{rule.mask[1]}{ending}"
        paths = [str(image.path) for image in images]
        lines.append(f"{counted(len(paths), 'image')} without a mask in {mask_folder} (such as {wanted}): {first_few(paths)}")
    if masks:
        paths = [str(mask.path) for mask in masks]
        lines.append(f"{counted(len(paths), 'mask')} without an image in {image_folder}: {first_few(paths)}")
    here, there = (sorted({file.folder or "./" for file in files}) for files in (images, masks))
    if images and masks and not set(here) & set(there):
        lines.append(
            f"a pair must be in one subfolder, but these images are in {first_few(here)} and these masks in {first_few(there)}"
        )
    return "\n  ".join(lines)


def unpaired_problems(match: Match, image_folder: Path, mask_folder: Path) -> tuple[Problem, ...]:
    fix = "add the partner, or set mask_suffix, image_dir and mask_dir so that they pair up"
    images, masks = f"without a mask in {mask_folder}", f"without an image in {image_folder}"
    found = (
        Problem("no_mask", f"image {images}", f"images {images}", _paths(match.images), fix),
        Problem("no_image", f"mask {masks}", f"masks {masks}", _paths(match.masks), fix),
    )
    return tuple(problem for problem in found if problem.lines)


def ways_out(num_pairs: int, left_out: str) -> tuple[str, list[Choice]]:
    """What to do about unpaired files, and the settings for it."""
    others = "set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, "
    others += f"or {SPLIT_FILE}"
    if num_pairs < 2:
        return others, []
    return f"{others}; or, to train on the {num_pairs} pairs and leave out {left_out}", [SKIP]


def _paths(files: Sequence[File]) -> tuple[str, ...]:
    return tuple(str(file.path) for file in sorted(files))


def _examples(files: Sequence[File]) -> str:
    return f"such as {first_few([file.path.name for file in files])}"
