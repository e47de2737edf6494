"""The pairs in the shards that data_dir names, a folder or URL with shards.json, and how shards are written: KEY.jpg
and KEY.mask.png, byte for byte, the index last. Shards without an index are refused."""

import contextlib
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path

from unet_trainer.config.load import PROTOCOLS, url_problem
from unet_trainer.config.schema import Config
from unet_trainer.data import shard_index
from unet_trainer.data.file_facts import ImageFacts, MaskFacts, plain_facts
from unet_trainer.data.listing import Listing, list_files, walk
from unet_trainer.data.pairs import FoundPairs, Pair, Part
from unet_trainer.data.place import Place
from unet_trainer.data.shard_index import INDEX_NAME, Member, Sample, Shard, ShardIndex
from unet_trainer.data.shard_store import WAITS, Files, MissingFile, RangeCache, ShardStore, is_url
from unet_trainer.images.file_bytes import DataError, ShardError, content_digest, file_stamp, naming, read_bytes
from unet_trainer.system.console import counted

FOLDER = ".shards"  # in checkpoint_dir
UNFINISHED = "unfinished"  # a file that stands beside shards until their index is written
ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
SINGLE_SLASH = re.compile(rf"^({'|'.join(PROTOCOLS)}):/(?!/)")  # a URL that was a Path
MAKE_THEM = "unpack the images and masks, and make shards of them: python train_unet.py shard data_dir=FOLDER --out OUT"


def find_place(data_dir: str, listing: Listing | None = None) -> str | None:
    """The folder or URL of the shards; None if data_dir is a folder of other files. Opens no file."""
    data_dir = SINGLE_SLASH.sub(r"\1://", data_dir)
    if problem := url_problem(data_dir):
        raise DataError(f"data_dir: {problem}")
    path = Path(data_dir).parent if Path(data_dir).name == INDEX_NAME else Path(data_dir)
    place = data_dir.rstrip("/").removesuffix(f"/{INDEX_NAME}") if is_url(data_dir) else str(path)
    with contextlib.suppress(OSError):  # a folder that may not be read: reported where its files are looked for
        if place.lower().endswith(ENDINGS) and not path.is_dir():
            raise DataError(f"data_dir: {place} is one archive; name the folder with {INDEX_NAME}, or {MAKE_THEM}")
        if is_url(data_dir) or (path / INDEX_NAME).is_file():
            return place
        if any(walk(path, listing=listing, endings=(".tar",))) and not list_files(path, listing=listing):
            return place
    return None


def open_shards(config: Config, listing: Listing | None = None) -> ShardStore | None:
    """The shards that data_dir names, open for reading; None if it names none. Raises DataError."""
    if (place := find_place(config.data_dir, listing)) is None:
        return None
    try:
        index = _read_index(Files(place, WAITS[:3]))  # a wrong name of a host is reported within seconds
        store = ShardStore(Files(place), index)
        store.check()
    except ShardError as error:
        raise DataError(f"data_dir: {error}") from None
    if store.is_remote and (max_bytes := int(config.cache_gb * 1e9)):
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is kept
            store.cache = RangeCache(Path(config.checkpoint_dir) / FOLDER, place, index.shards, max_bytes)
    return store


def _read_index(files: Files) -> ShardIndex:
    try:
        files.size(INDEX_NAME)  # refuses what is no file
        return shard_index.index_from_json(files.read(INDEX_NAME))
    except MissingFile:
        what = f"there is no {INDEX_NAME}; shards that other tools made are not read: {MAKE_THEM}"
        if UNFINISHED in files.find():
            what = f"the shards there are not finished (no {INDEX_NAME} yet); start shard again"
        raise ShardError(f"{files.root}: {what}") from None


def find(place: Place, config: Config) -> list[Pair] | None:
    """The pairs of the shards that data_dir names; None if it names none, or where split_file says which to use."""
    found = None if config.split_file is not None else find_in_shards(config, place.listing)
    return None if found is None else place.take(found)


def find_in_shards(config: Config, listing: Listing | None = None) -> FoundPairs | None:
    """The pairs of the shards that data_dir names; None if it names none. Raises DataError."""
    if (store := open_shards(config, listing)) is None:
        return None
    for name in ("image_dir", "mask_dir", "mask_suffix"):
        if getattr(config, name):
            known = f"{config.data_dir} holds shards, which say what is an image and what a mask"
            raise DataError(f"{name}: {known}; leave it out")
    index, pairs = store.index, list[Pair]()
    repeated = Counter(sample.name for _, sample, *_ in store.samples)
    is_divided = any(sample.part == "val" for _, sample, *_ in store.samples)
    for shard, sample, image, mask in store.samples:
        name = sample.name if repeated[sample.name] == 1 else f"{shard.removesuffix('.tar')}/{sample.name}"
        part: Part | None = sample.part if sample.part in ("val", "test") else "train" if is_divided else None
        pairs.append(Pair(name, image, mask, part, sample.group, image.shown, mask.shown))
    used, test = (tuple(pair for pair in pairs if (pair.part == "test") is is_test) for is_test in (False, True))
    rule = f"{counted(len(index.shards), 'shard')}, {describe_size(index.num_bytes)}"
    return FoundPairs(used, rule, test=test, class_names=index.class_names, class_file=index.class_file)


def describe_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


# Writing. A pair, and what the scan measured in its files; None of test pairs, which are not read before they are used.
ScannedPair = tuple[Pair, ImageFacts | None, MaskFacts | None]
Tick = Callable[[], object]
Members = list[tuple[ScannedPair, str]]  # of a shard: the pairs and their keys


def refuse_other_files(files: Files) -> None:
    """Raises DataError if shards are there that are not what an earlier start of this command left unfinished."""
    names = files.find()
    there = [name for name in names if name == INDEX_NAME or (name.endswith(".tar") and UNFINISHED not in names)]
    if there:
        fix = "name another place, or delete them first"
        raise DataError(f"--out: there are shards in {files.root} ({there[0]}); {fix}")


def write_shards(
    found: FoundPairs, pairs: Sequence[ScannedPair], name: str, files: Files, shard_bytes: int, tick: Tick
) -> ShardIndex:
    """Write all pairs, in their order; `tick` is called after each. Raises UserError."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "data"
    with files.writing(UNFINISHED) as file:
        file.write(b"These shards are being written; shards.json comes last.\n")
    for other in files.find():  # of an earlier start, which may have written more
        if re.fullmatch(rf"\.?{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar(\..+\.tmp)?", other):
            files.delete(other)
    plan = _divide(pairs, stem, shard_bytes)
    shards = [_write_shard(shard, members, files, tick) for shard, members in plan.items()]
    index = ShardIndex(tuple(shards), found.class_names, class_file=found.class_file)
    with files.writing(INDEX_NAME) as file:
        file.write(shard_index.index_to_json(index).encode("utf-8", "surrogateescape"))
    files.delete(UNFINISHED)
    return index


def _divide(pairs: Sequence[ScannedPair], stem: str, shard_bytes: int) -> dict[str, Members]:
    """The pairs of each shard, with their WebDataset keys: their names without dots, each once. As many as fit go into
    one; a pair that is larger has one for itself."""
    shards: dict[str, Members] = {}
    keys, room, num_shards = set[str](), dict[str, int](), Counter[str]()
    for scanned in pairs:
        pair = scanned[0]
        plain = re.sub(r"[.\\\0]", "_", pair.name).strip("/") or "image"
        numbered = (f"{plain}-{number}" for number in count(2))
        keys.add(key := next(key for key in chain([plain], numbered) if key not in keys))
        # With header and padding; one that is gone has no bytes, which reading it reports.
        size = sum((file_stamp(file) or [0])[0] + 2 * shard_index.BLOCK for file in (pair.image, pair.mask))
        name = "-".join(filter(None, (stem, pair.part)))
        if size > room.get(name, -1):
            room[name] = shard_bytes
            num_shards[name] += 1
        room[name] -= size
        shards.setdefault(f"{name}-{num_shards[name] - 1:06d}.tar", []).append((scanned, key))
    return shards


def _write_shard(name: str, members: Members, files: Files, tick: Tick) -> Shard:
    samples: list[Sample] = []
    with (
        files.writing(name) as file,
        tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive,
    ):
        for (pair, image, mask), key in members:
            stored = (
                _add(archive, key, pair.image, pair.shown_image, image),
                _add(archive, f"{key}.mask", pair.mask, pair.shown_mask, mask),
            )
            facts = image and plain_facts("image", image), mask and plain_facts("mask", mask)
            samples.append(Sample(pair.name, *stored, pair.part or "", pair.group, *facts))
            tick()
        archive.close()
        return Shard(name, file.tell(), tuple(samples))


def _add(archive: tarfile.TarFile, stem: str, source: Path, shown: str, facts: ImageFacts | MaskFacts | None) -> Member:
    with naming(shown):
        content = read_bytes(source)
    if facts is not None and content_digest(content) != facts.digest:
        raise DataError(f"{shown}: changed while the shards were written; start again")
    return shard_index.add_member(archive, f"{stem}{source.suffix.lower()}", content)
