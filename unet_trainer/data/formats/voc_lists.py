"""The lists of PASCAL VOC, and of CVAT's masks: text files in ImageSets/Segmentation that say which images train and
which validate."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from unet_trainer.data.annotations import inside
from unet_trainer.data.listing import Listing
from unet_trainer.data.names import PARTS, File
from unet_trainer.data.pairs import Part, composed
from unet_trainer.system import input_files

LISTS = "ImageSets/Segmentation"

Lists = dict[str, Part | None]  # name of a listed image → its part, None where it is to be divided


def read_lists(image_dir: Path, listing: Listing, images: Sequence[File]) -> tuple[Lists, str]:
    """What the lists beside the folder of images say, and how messages name them; empty without any."""
    above, parts, read = image_dir.parent, Lists(), dict[str, None]()
    years = {"": above} if above.name != "*" else {f"{one.name}/": one for one in listing.subfolders(above.parent)}
    folders = {year: place / LISTS for year, place in years.items() if (place / LISTS).is_dir()}  # VOC2007/, VOC2012/
    known = {image.name for image in images} if folders else set()
    for year, folder in folders.items():
        texts = {Path(name).stem.lower(): name for name in listing.entries(folder).files if name.endswith(".txt")}
        files = {PARTS[name]: text for name, text in texts.items() if name in PARTS}  # of CVAT: Validation.txt
        if "trainval" in texts:
            files.setdefault("train", texts["trainval"])
        # A name in two lists belongs to the later part: it must not train.
        for part in (part for part in get_args(Part) if part in files and "train" in files):
            with inside(folder / files[part]):
                lines = input_files.read_text(folder / files[part], errors="surrogateescape").splitlines()
            # A line is a name, or its first word is: the rest then says whether a class occurs.
            for line in filter(None, map(str.strip, lines)):
                name = composed(f"{year}{line}")
                parts[name if name in known else composed(f"{year}{line.split()[0]}")] = part
            read[files[part]] = None
    if "val" not in parts.values():
        parts = {name: None if part == "train" else part for name, part in parts.items()}
    return parts, f"{LISTS}/{' and '.join(read)}" if read else ""
