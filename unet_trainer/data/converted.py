"""Masks and images that are no plain files (polygons, one file an object or class, pages of a stack, blocks of a large
image, the arrays of a Python caller) as plain ones: written once, under checkpoint_dir/.converted, and again when a
source has changed. Everything after this sees files only; messages name the files that they come from."""

import contextlib
import hashlib
import io
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.data.name_matching import READERS, File, best_match, classes_by_ending
from unet_trainer.data.pairs import Box, Pair, Part
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import MAX_BYTES, DataError, ReadError, file_stamp, naming, read_bytes
from unet_trainer.images.image_decoding import VOLUME_EXTENSIONS, Pixels
from unet_trainer.images.mask_decoding import COLOUR, read_mask, whole_numbers
from unet_trainer.images.tiff_files import BOMB_PIXELS, BOMB_RATIO, COLOUR_CHANNELS, NODATA, open_pages, read_errors
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system import input_files
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.concurrency import Crash, ReadStderr, forked_map
from unet_trainer.system.console import Console, counted
from unet_trainer.system.json_cache import read_cache, write_cache
from unet_trainer.system.locks import draft_folder
from unet_trainer.system.os_errors import cannot
from unet_trainer.system.resources import count_cores

FORMAT, INDEX = 1, "index.json"
FEW = 8  # files for which another child process does not pay
FOREGROUND = 255
SOFT_EDGE = 127  # of a file with greys, pixels above this belong to the object
NUM_LOOKED_AT = 3  # masks of each class
TIFF = (".tif", ".tiff")


class Conversion(NamedTuple):
    """A file to make. `make` gives its pixels or bytes, and counts of what they hold; raises DataError."""

    name: str  # relative path, without extension
    sources: Sequence[Path]
    make: Callable[[], tuple[Pixels | bytes, Mapping[str, int]]]
    extension: str = ".png"


class Converted(NamedTuple):
    """The outcome of a conversion: the file and its facts, or the reason why there is none."""

    path: Path
    facts: Mapping[str, int]
    problem: str = ""


@dataclass(frozen=True)
class Converter:
    """Writes the converted files of a dataset, in child processes and with a progress bar if there is a console."""

    data_dir: Path
    checkpoint_dir: Path
    console: Console | None = None
    num_processes: int | None = None  # None: by the number of files

    def write(self, kind: str, settings: Any, conversions: Sequence[Conversion], label: str) -> list[Converted]:
        """The outcome of each; raises DataError for a source that is missing. `settings`: what the files depend on
        besides their sources, e.g. the names of the classes."""
        key = json.dumps([FORMAT, str(self.data_dir.resolve()), kind, settings], default=str)
        # split.csv names these files: absolute, because its paths are relative to data_dir.
        name = f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        folder = self.checkpoint_dir.absolute() / ".converted" / name
        files = read_cache(folder / INDEX).get("files")
        known = files if isinstance(files, dict) else {}  # name → stamps of the sources, and facts
        stamps = [[[str(source), file_stamp(source)] for source in conversion.sources] for conversion in conversions]
        if gone := next((source for sources in stamps for source, stamp in sources if stamp is None), None):
            raise DataError(f"{gone}: No such file or directory")
        made = [Converted(folder / f"{conversion.name}{conversion.extension}", {}) for conversion in conversions]
        waiting: list[int] = []
        for number, conversion in enumerate(conversions):
            match known.get(conversion.name):
                case [stored, dict(facts)] if stored == stamps[number] and made[number].path.is_file():
                    made[number] = made[number]._replace(facts=facts)
                case _:
                    waiting.append(number)

        def convert(number: int, _: ReadStderr) -> Converted:
            try:
                return made[number]._replace(facts=_make_file(conversions[number], made[number].path))
            except DataError as error:
                return made[number]._replace(problem=str(error))

        bar = (self.console or Console(io.StringIO())).bar(label, len(waiting), keep=False)  # silent without one
        outcomes = forked_map(convert, waiting, self.num_processes or min(count_cores(), 1 + len(waiting) // FEW))
        try:
            with bar as shown, contextlib.closing(outcomes):
                for number, outcome in ((waiting[position], outcome) for position, outcome in outcomes):
                    if isinstance(outcome, Crash):
                        outcome = made[number]._replace(problem=f"reading it crashed ({outcome.reason})")
                    if not outcome.problem:
                        known[conversions[number].name] = [stamps[number], outcome.facts]
                    made[number] = outcome
                    shown.tick()
        finally:
            if waiting:
                write_cache(folder / INDEX, {"files": known})
        return made

    def write_pairs(
        self, kind: str, settings: Any, wanted: list[tuple[Pair, Conversion, Conversion]], label: str
    ) -> list[Pair]:
        """The pairs with the files that are made for image and mask. Raises DataError for bad sources."""
        files = self.write(kind, settings, [conversion for _, *sides in wanted for conversion in sides], label)
        if problem := next((file.problem for file in files if file.problem), ""):
            raise DataError(problem)
        made = zip(wanted, files[::2], files[1::2], strict=True)
        return [replace(pair, image=image.path, mask=mask.path) for (pair, *_), image, mask in made]


def _make_file(conversion: Conversion, path: Path) -> Mapping[str, int]:
    """Writes it; raises DataError."""
    pixels, facts = conversion.make()
    data = pixels if isinstance(pixels, bytes) else image_decoding.encode_image(pixels, path.suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data)
    except OSError as error:
        where = "converted masks are kept under checkpoint_dir"
        raise DataError(f"{path} cannot be written ({error.strerror}); {where}") from None
    return facts


MaskParts = dict[File, list[tuple[str, Path]]]  # image → the files of its mask, each with its class; objects have none


def find_object_files(images: Sequence[File], masks: Sequence[File], is_in_sequences: bool) -> MaskParts | None:
    """The mask files of each image where each object has a file of its own: in a folder with the image
    (ID/images/x.png, ID/masks/*.png), or in one of the image's name (masks/x/*.png). Else None."""
    places = {image.folder if is_in_sequences else f"{image.folder}{image.stem}/": image for image in images}
    by_place: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        by_place[mask.folder].append(mask)
    if len(places) < len(images) or not by_place or not set(by_place) <= set(places):
        return None
    own = ((image, by_place[place]) for place, image in places.items() if place in by_place)
    return {image: [("", mask.path) for mask in its] for image, its in own}


def find_class_files(images: Sequence[File], masks: Sequence[File]) -> MaskParts | None:
    """The mask files of each image where each class has a folder of masks: masks/sea/a.png, masks/whale/a.png. Else
    None, also of folders that are named after readers. An image may lack the masks of some classes."""
    by_class: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        name, _, rest = mask.folder.partition("/")
        by_class[name].append(mask._replace(folder=rest))
    are_readers = any(map(READERS.search, by_class))
    if "" in by_class or are_readers or any(image.folder.partition("/")[0] in by_class for image in images):
        return None
    by_image: MaskParts = defaultdict(list)
    for name, files in sorted(by_class.items()):
        match = best_match(images, files)
        if match.masks:
            return None
        for image, mask in match.pairs:
            by_image[image].append((name, mask.path))
    return dict(sorted(by_image.items()))


def find_ending_files(images: Sequence[File], masks: Sequence[File]) -> MaskParts | None:
    """The mask files of each image whose names end in its class or in the number of an object: s0_head.png,
    s0_tail.png. None if they are named in another way, or hold more than two values."""
    by_ending = classes_by_ending(images, masks)
    first_masks = [mask.path for its in by_ending.values() for mask in list(its.values())[:NUM_LOOKED_AT]]
    if not by_ending or not all(map(_holds_two_values, first_masks)):
        return None
    are_objects = "" in by_ending or any(map(str.isdecimal, by_ending))
    found: MaskParts = defaultdict(list)
    for name, its in by_ending.items():
        for image, mask in its.items():
            found[image].append(("" if are_objects else name, mask.path))
    return found


def _holds_two_values(path: Path) -> bool:
    """At most. False for what cannot be read."""
    with contextlib.suppress(ReadError):
        return len(np.unique(read_mask(path))) < 3
    return False


class Merged(NamedTuple):
    """The pairs of images and merged masks, and the files that cannot be used."""

    pairs: list[Pair]
    unreadable: list[str]
    has_background: bool  # some pixels belong to no class


def merge_masks(
    converter: Converter, part: Part, parts: MaskParts, classes: Sequence[str], notices: list[str]
) -> Merged:
    """Writes one mask for each image: of its classes, or of its objects if there are no classes."""
    conversions = [
        Conversion(f"{part}/{image.folder}{image.stem}", [path for _, path in files], partial(_merge, files, classes))
        for image, files in parts.items()
    ]
    kind = "classes" if classes else "objects"
    written = converter.write(kind, list(classes), conversions, "Merging the masks of each image:")
    pairs = []
    for (image, files), mask in zip(parts.items(), written, strict=True):
        shown = f"{files[0][1]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        if not mask.problem:
            pairs.append(Pair(f"{image.folder}{image.stem}", image.path, mask.path, mask_origin=shown))
    facts = [Counter(mask.facts) for mask in written if not mask.problem]
    total = sum(facts, Counter())
    if total["overlap"]:
        holders = f"{sum(fact['overlap'] > 0 for fact in facts)} of {len(facts)} masks"
        wins = f"the later of {', '.join(classes)} wins (class_names sets another order)"
        notices.append(f"{total['overlap']} pixels in {holders} belong to several classes: {wins}")
    return Merged(pairs, [mask.problem for mask in written if mask.problem], total["background"] > 0)


def _merge(files: Sequence[tuple[str, Path]], classes: Sequence[str]) -> tuple[Pixels, dict[str, int]]:
    """The mask, and how many pixels there are of what."""
    merged: Pixels | None = None
    overlap: Any = False
    for name, path in sorted(files, key=lambda item: classes.index(item[0])) if classes else files:
        with naming(path):
            mask = read_mask(path)
        merged = np.zeros(mask.shape, np.uint8) if merged is None else merged
        if mask.shape != merged.shape:
            (height, width), (first_height, first_width) = mask.shape, merged.shape
            raise DataError(f"{path}: {width}×{height}, the other masks of this image are {first_width}×{first_height}")
        is_object, highest = mask > 0, int(mask.max())
        if mask.dtype == np.uint8 and highest > SOFT_EDGE and (is_object != (mask == highest)).any():
            is_object = mask > SOFT_EDGE
        overlap = overlap | ((merged > 0) & is_object)
        merged[is_object] = 1 + classes.index(name) if classes else FOREGROUND
    assert merged is not None  # there is a file
    facts = {"overlap": overlap, "background": merged == 0} if classes else {}
    return merged, {name: int(np.count_nonzero(pixels)) for name, pixels in facts.items()}


def join_channels(paths: Sequence[Path]) -> tuple[Pixels, dict[str, int]]:
    """Of an image or volume, the channels of its files in their order."""
    read: list[Pixels] = []
    for path in paths:
        with naming(path):
            is_volume = path.name.lower().endswith(VOLUME_EXTENSIONS)
            read.append(_read_pages(path)[..., None] if is_volume else image_decoding.read_image(path))
        if read[-1].shape[:-1] != read[0].shape[:-1]:
            size, first = ("×".join(map(str, pixels.shape[-2::-1])) for pixels in (read[-1], read[0]))
            raise DataError(f"{path}: {size}, the other channels of this image are {first}")
    return np.concatenate(read, axis=-1), {}


def has_pages(path: Path) -> bool:
    """Whether a file is a volume, or a TIFF with several pages. Reads a few bytes of it; False for a broken one."""
    with contextlib.suppress(DataError):
        if path.suffix.lower() in TIFF:
            return len(page_types(path)) > 1
    return path.name.lower().endswith(VOLUME_EXTENSIONS)


def page_types(path: Path) -> Sequence[Any]:
    """The dtype of each page, by the header; raises DataError, also for pages that are a decompression bomb."""
    with naming(path):
        if path.suffix.lower() == ".npy":  # of channels that were joined
            array = image_decoding.decode_array(read_bytes(path))
            return [array.dtype] * len(array)
        if _is_volume(path):
            shape, file = _open_volume(path)
            types, num_pixels = [file.get_data_dtype()] * shape[2], math.prod(shape)
        else:
            with open_pages(path) as file:
                pages = _full_pages(file)
                types, num_pixels = [page.dtype for page in pages], sum(page.size for page in pages) // COLOUR_CHANNELS
        if num_pixels > max(BOMB_PIXELS, (num_bytes := path.stat().st_size) * BOMB_RATIO):
            what = f"{num_bytes / 1e6:.2g} MB that decompress to {num_pixels / 1e6:.3g} Mpx on {len(types)} pages"
            raise ReadError(f"{what}: a decompression bomb")
        return types


@lru_cache(maxsize=2)  # an image stack and its mask stack
def _read_pages(path: Path) -> Any:
    """N,H,W or N,H,W,C, or a list of pages; of a volume Z,Y,X or Z,Y,X,C. Raises DataError."""
    with naming(path):
        if path.suffix.lower() == ".npy":
            return image_decoding.decode_array(read_bytes(path))
        if not _is_volume(path):
            with open_pages(path) as tiff:
                return [page.asarray() for page in _full_pages(tiff)]
        shape, file = _open_volume(path)
        with read_errors():
            pixels = np.asanyarray(file.dataobj).reshape(shape)
            return np.ascontiguousarray(np.moveaxis(pixels.swapaxes(0, 1), 2, 0))


def _is_volume(path: Path) -> bool:
    """Of NIfTI, or an array of the channels that were joined."""
    return path.name.lower().endswith((*VOLUME_EXTENSIONS, ".npy"))


def _full_pages(tiff: Any) -> list[Any]:
    """Without the smaller copies."""
    return [page for page in tiff.pages if not getattr(page, "is_reduced", False)]


def _open_volume(path: Path) -> tuple[tuple[int, ...], Any]:
    """Its shape in three or four dimensions, and nibabel's file."""
    try:
        import nibabel
    except ImportError:
        raise DataError(f"{path} is a NIfTI volume; pip install nibabel reads it") from None
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)  # it logs what it raises, and what it repairs
    with read_errors():
        file: Any = nibabel.load(path)
        shape, dtype = (*file.shape, *[1] * (3 - len(file.shape))), file.get_data_dtype()
        if len(shape) > 4 or min(shape) < 1 or dtype.kind not in "uifb":
            need = "need numbers in 3 dimensions, or 4 with channels"
            raise ReadError(f"a NIfTI volume of {dtype} of shape {file.shape}; {need}")
        return shape, file


def split_into_pages(converter: Converter, part: Part, stacks: Sequence[Pair]) -> list[Pair]:
    """A pair of files for each page of image stacks and their mask stacks; raises DataError."""
    wanted = []
    for stack in stacks:
        is_stack = _is_volume(stack.image) or stack.image.suffix.lower() in TIFF
        images, masks = page_types(stack.image) if is_stack else [None], page_types(stack.mask)
        if len(images) != len(masks):
            there = f"{stack.image} has {counted(len(images), 'page')} and {stack.mask} has {len(masks)}"
            raise DataError(f"{there}; need a page of the mask for each of the image")
        extension = ".npy" if _is_volume(stack.image) else ".png" if images[0] in (np.uint8, np.uint16) else ".tiff"
        for index in range(len(images)):
            name = f"{stack.name}/{index:0{len(str(len(images) - 1))}d}"  # with zeros in front: they sort
            origins = (f"{shown}, page {index}" for shown in (stack.shown_image, stack.shown_mask))
            make_image, make_mask = partial(_image_page, stack.image, index), partial(_mask_page, stack.mask, index)
            image = Conversion(f"images/{part}/{name}", [stack.image], make_image, extension)
            mask = Conversion(f"masks/{part}/{name}", [stack.mask], make_mask)
            wanted.append((Pair(name, stack.image, stack.mask, None, stack.name, *origins), image, mask))
    return converter.write_pairs("pages", None, wanted, "Splitting stacks into pages:")


def _image_page(path: Path, index: int) -> tuple[Pixels, dict[str, int]]:
    page = _read_pages(path)[index]
    if page.ndim > 3 or (page.ndim == 3 and page.shape[2] not in (1, 3) and not _is_volume(path)):
        raise DataError(f"{path}: a page of shape {page.shape}; need grey or RGB pages")
    page = page[:, :, 0] if page.ndim == 3 and page.shape[2] == 1 else page
    return page if page.dtype in (np.uint8, np.uint16) else page.astype(np.float32), {}


def _mask_page(path: Path, index: int) -> tuple[Pixels, dict[str, int]]:
    page = np.squeeze(_read_pages(path)[index])
    if page.ndim == 3 and page.shape[2] == 3 and page.dtype == np.uint8:
        return page, {}
    with naming(f"{path}, page {index}"):
        return whole_numbers(page), {}


def cut_blocks(converter: Converter, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, those with a box as files of their own; raises DataError, which names the user's files."""
    wanted = []
    for pair, box in ((pair, pair.box) for pair in pairs if pair.box is not None):
        # Not by the name of the pair: a table may have any.
        source = hashlib.sha256(f"{box.image}\n{box.mask}".encode(errors="surrogateescape")).hexdigest()[:8]
        name = box.name_in(f"{box.image.stem}-{source}")
        image = Conversion(f"images/{name}", [box.image], partial(_image_block, box), ".tiff")
        wanted.append((pair, image, Conversion(f"masks/{name}", [box.mask, box.image], partial(_mask_block, box))))
    # One process: it decodes the image once, and each further one would hold it in memory too.
    one = replace(converter, num_processes=1)
    blocks = iter(one.write_pairs("blocks", None, wanted, "Cutting the image into blocks:"))
    return [pair if pair.box is None else next(blocks) for pair in pairs]


@lru_cache(maxsize=1)
def _read_whole(path: Path) -> tuple[Pixels, bool, float | None]:
    """H,W,C with alpha, whether there is one, and the value of pixels without data."""
    with naming(path):
        file = image_decoding.EncodedImage(read_bytes(path))
        image = file.decode(channels=file.channels_with_alpha or None)
        return image, image.shape[2] == file.channels_with_alpha, file.nodata


@lru_cache(maxsize=1)
def _read_whole_mask(path: Path, size: tuple[int, int]) -> Pixels:
    """H,W values as read_mask gives them, at the size of the image."""
    with naming(path):
        return resize_mask(read_mask(path), size)


def _image_block(box: Box) -> tuple[bytes, dict[str, int]]:
    """A TIFF of any number of channels and depth, with what the file says of alpha and of missing data."""
    import tifffile

    image, has_alpha, nodata = _read_whole(box.image)
    height, width, channels = image.shape
    if box.bottom > height or box.right > width:
        raise DataError(f"{box.image}: box: {box.place} are not inside of its {width}×{height} pixels")
    is_colour = channels - has_alpha == COLOUR_CHANNELS
    extra = ["unspecified"] * (channels - (COLOUR_CHANNELS if is_colour else 1))
    file = io.BytesIO()
    tifffile.imwrite(
        file,
        np.ascontiguousarray(image[box.top : box.bottom, box.left : box.right]),
        photometric="rgb" if is_colour else "minisblack",
        planarconfig="contig",
        extrasamples=[*extra[1:], "unassalpha"] if has_alpha else extra,
        extratags=() if nodata is None else [(NODATA, "s", 0, repr(nodata), True)],
        metadata=None,
    )
    return file.getvalue(), {}


def _mask_block(box: Box) -> tuple[Pixels, dict[str, int]]:
    image, _, _ = _read_whole(box.image)
    block = _read_whole_mask(box.mask, (image.shape[0], image.shape[1]))[box.top : box.bottom, box.left : box.right]
    if block.dtype != np.int32:
        return np.ascontiguousarray(block), {}
    colours = np.where(block >= COLOUR, block - COLOUR, block * 0x010101)
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], 2).astype(np.uint8), {}


class Pairs(Protocol):
    """A list, a torch Dataset: anything with a length that gives (image, mask) for a number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def write_given(parts: Mapping[str, Pairs | None], folder: Path) -> Path:
    """Reads every pair once, in order, and returns the folder that holds them as .npy files, named by the digest of
    what was written. Where an earlier call wrote the same, damaged files are replaced. `parts`: train and val; without
    val the run splits. Raises UserError."""
    for part, pairs in parts.items():
        if pairs is not None and not (hasattr(pairs, "__len__") and hasattr(pairs, "__getitem__")):
            need = "a list, or an object with a length that gives (image, mask) for an index"
            raise UserError(f"{part}_data: got {type(pairs).__name__}; need {need}")
        if pairs is not None and len(pairs) == 0:
            raise UserError(f"{part}_data: it is empty; need (image, mask) pairs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder, ".draft-") as drafts:
            draft = drafts / "data"
            for part, pairs in parts.items():
                place = draft / part if parts.get("val") is not None else draft
                for index in range(len(pairs) if pairs is not None else 0):
                    for kind, array in _read_arrays(part, pairs, index).items():
                        path = place / kind / f"{index:06d}.npy"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        np.save(path, array, allow_pickle=False)
            digests = _digests_in(draft)
            made = folder / hashlib.sha256(repr(digests).encode()).hexdigest()[:16]
            try:
                if made.is_dir() and _digests_in(made) != digests:  # damaged since it was written
                    made.rename(drafts / "damaged")
                draft.rename(made)  # fails where an earlier call, or another process, wrote the same
            except OSError:
                if not made.is_dir():
                    raise
            return made
    except OSError as error:
        raise cannot(f"checkpoint_dir: {folder}", "take the data", error, folder) from None


def _read_arrays(part: str, pairs: Any, index: int) -> dict[str, Pixels]:
    try:
        image, mask = pairs[index]
        return {"images": as_pixels(image), "masks": as_pixels(mask)}
    except Exception as error:  # the caller's code may raise anything
        what = f"{part}_data[{index}]: {type(error).__name__}: {error}"
        raise UserError(f"{what}; need (image, mask), see docs/extending.md") from error


def _digests_in(folder: Path) -> dict[str, str]:
    """By the path in the folder; of links, and of files that cannot be read, there are none."""
    digests: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        digests[name := path.relative_to(folder).as_posix()] = ""
        with contextlib.suppress(OSError):
            digests[name] = hashlib.sha256(input_files.read_bytes(path, MAX_BYTES, follow=False)).hexdigest()
    return digests


def as_pixels(given: Any) -> Pixels:
    """H,W or H,W,C; a torch tensor has its channels first. Raises ValueError or TypeError."""
    is_tensor = hasattr(given, "detach")
    array = np.asarray(given.detach().cpu() if is_tensor else given)
    if is_tensor and array.ndim == 3:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(f"got {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array.astype(np.uint8) if array.dtype == bool else array)
