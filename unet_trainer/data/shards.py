"""The pairs in the shards that data_dir names (a folder or URL of shards, one shard, or a pattern: a-{000..011}.tar),
and how shards are written: KEY.jpg and KEY.mask.png, byte for byte, the index last.

Shards of other tools are read once, and their index is kept under checkpoint_dir; so is what is fetched."""

import contextlib
import dataclasses
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from unet_trainer.config.load import PROTOCOLS, url_problem
from unet_trainer.config.schema import Config
from unet_trainer.data import shard_index
from unet_trainer.data.file_facts import ImageFacts, MaskFacts, plain_facts
from unet_trainer.data.listing import Listing, list_files, walk
from unet_trainer.data.pairs import SKIP, FoundPairs, Pair, Part, Problem, first_few
from unet_trainer.data.place import Place
from unet_trainer.data.shard_index import INDEX_NAME, Member, Sample, Shard, ShardIndex
from unet_trainer.data.shard_store import WAITS, Files, MissingFile, RangeCache, ShardStore, is_url, short_digest
from unet_trainer.images.file_bytes import DataError, ShardError, content_digest, file_stamp, naming, read_bytes
from unet_trainer.system.console import Console, counted
from unet_trainer.system.json_cache import read_cache, write_cache

FOLDER = ".shards"  # in checkpoint_dir
UNFINISHED = "unfinished"  # a file that stands beside shards until their index is written
ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")  # compressed ones are refused when read
BRACES = re.compile(r"([^{}]*)\{(\d{1,18})\.\.(\d{1,18})\}([^{}]*)")
SINGLE_SLASH = re.compile(rf"^({'|'.join(PROTOCOLS)}):/(?!/)")  # a URL that was a Path
MAX_SHARDS = 1_000_000


class ShardPlace(NamedTuple):
    """Where shards lie. `names`: of those that are meant; None: all that are there."""

    root: str
    names: tuple[str, ...] | None = None


def find_place(data_dir: str, listing: Listing | None = None) -> ShardPlace | None:
    """None if data_dir is a folder of other files. Opens no file."""
    data_dir = SINGLE_SLASH.sub(r"\1://", data_dir)
    if problem := url_problem(data_dir):
        raise DataError(f"data_dir: {problem}")
    if is_url(data_dir):
        folder, _, last = data_dir.rstrip("/").removesuffix(f"/{INDEX_NAME}").rpartition("/")
        return ShardPlace(folder, _expand(last)) if last.lower().endswith(ENDINGS) else ShardPlace(f"{folder}/{last}")
    path = Path(data_dir)
    with contextlib.suppress(OSError):  # a folder that may not be read: reported where its files are looked for
        if path.name.lower().endswith(ENDINGS) and not path.is_dir():
            return ShardPlace(str(path.parent), _expand(path.name))
        path = path.parent if path.name == INDEX_NAME and path.is_file() else path
        has_shards = any(walk(path, listing=listing, endings=(".tar",))) and not list_files(path, listing=listing)
        return ShardPlace(str(path)) if (path / INDEX_NAME).is_file() or has_shards else None
    return None


def _expand(name: str) -> tuple[str, ...]:
    """a-{000..011}.tar as WebDataset writes it: all numbers with as many digits."""
    if "{" not in name:
        return (name,)
    parts = BRACES.fullmatch(name)
    if parts is None or not 0 <= int(parts[3]) - int(parts[2]) < MAX_SHARDS:
        needed = f"need one {{FIRST..LAST}}, of at most {MAX_SHARDS} numbers"
        raise DataError(f"data_dir: {name}: {needed}; name a folder for other choices of shards")
    numbers = range(int(parts[2]), int(parts[3]) + 1)
    return tuple(f"{parts[1]}{number:0{len(parts[2])}d}{parts[4]}" for number in numbers)


def open_shards(config: Config, console: Console | None = None, listing: Listing | None = None) -> ShardStore | None:
    """The shards that data_dir names, open for reading; None if it names none. Raises DataError."""
    place = find_place(config.data_dir, listing)
    try:
        return None if place is None else _open(place, config, console or Console(io.StringIO()))  # silent without one
    except ShardError as error:
        raise DataError(f"data_dir: {error}") from None


def _open(place: ShardPlace, config: Config, console: Console) -> ShardStore:
    files, folder = Files(place.root), Path(config.checkpoint_dir) / FOLDER
    index = _read_index(place, Files(place.root, WAITS[:3]))  # a wrong host name is reported within seconds
    store = ShardStore(files, _index_others(place, files, folder, console) if index is None else index)
    store.check()
    if not files.is_remote or not store.index.shards:
        return store
    if max_bytes := int(config.cache_gb * 1e9):
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is kept
            url = " ".join((place.root, *(place.names or ())))
            store.cache = RangeCache(folder, url, store.index.shards, max_bytes)
    if not files.has_ranges(store.index.shards[0].name):
        store.gives_whole_files = True
        cost = "each is fetched once and kept (cache_gb)" if store.cache else "each file takes a whole shard"
        console.note(f"{place.root} gives whole files only, not parts of them (no HTTP ranges): {cost}")
    return store


def _read_index(place: ShardPlace, files: Files) -> ShardIndex | None:
    """The index beside the shards; None if there is none, or if it does not know those that are meant."""
    try:
        files.size_and_version(INDEX_NAME)  # refuses what is no file
        content = files.read(INDEX_NAME)
    except MissingFile:
        return None
    try:
        index = shard_index.index_from_json(content)
    except ShardError as error:
        raise ShardError(f"{files.place(INDEX_NAME)}: {error}") from None
    known = {shard.name: shard for shard in index.shards}
    names = known if place.names is None else place.names
    return dataclasses.replace(index, shards=tuple(known[name] for name in names)) if {*names} <= {*known} else None


def _index_others(place: ShardPlace, files: Files, folder: Path, console: Console) -> ShardIndex:
    """Of shards of other tools; of a shard that has not changed, as an earlier start has read it."""
    there = files.find(is_deep=place.names is None) if place.names is None or not files.is_remote else []
    if UNFINISHED in there:
        raise ShardError(f"{place.root}: the shards there are not finished (no {INDEX_NAME} yet); start shard again")
    names = place.names or tuple(name for name in there if name.endswith(".tar"))
    if not names:
        how = "name the shards: .../a-{000000..000011}.tar"
        raise ShardError(f"{place.root}: no {INDEX_NAME} and no .tar files there, or they cannot be listed; {how}")
    found: list[ShardIndex] = []
    with console.bar("Indexing the shards once:", len(names), keep=False) as bar:
        for name, stamp in zip(names, files.sizes_and_versions(names), strict=True):
            found.append(_index_other(name, stamp, files, folder))
            bar.tick()
    unpaired = tuple(key for index in found for key in index.unpaired)
    return ShardIndex(tuple(shard for index in found for shard in index.shards), unpaired=unpaired)


def _index_other(name: str, stamp: tuple[int | None, str], files: Files, folder: Path) -> ShardIndex:
    cache = folder / f"index-{short_digest(files.place(name))}.json"
    known = read_cache(cache)
    if known.get("version") == [*stamp]:
        with contextlib.suppress(ShardError):
            return shard_index.index_from_json(str(known.get("index")))
    shard, unpaired = files.read_through(name, partial(shard_index.index_shard, name, stamp[0] or 0))
    index = ShardIndex((shard,), unpaired=tuple(unpaired))
    write_cache(cache, {"version": stamp, "index": shard_index.index_to_json(index)})
    return index


def find(place: Place, config: Config) -> list[Pair] | None:
    """The pairs of the shards that data_dir names; None if it names none, or where split_file says which to use."""
    if config.split_file is not None:
        return None
    found = find_in_shards(config, place.console, place.listing)
    return None if found is None else place.take(found)


def find_in_shards(config: Config, console: Console | None = None, listing: Listing | None = None) -> FoundPairs | None:
    """The pairs of the shards that data_dir names; None if it names none. Raises DataError."""
    store = open_shards(config, console, listing)
    if store is None:
        return None
    index, root = store.index, store.files.root
    for name in ("image_dir", "mask_dir", "mask_suffix"):
        if getattr(config, name):
            known = f"{config.data_dir} holds shards, which say what is an image and what a mask"
            raise DataError(f"{name}: {known}; leave it out")
    pairs, num_shards = _pairs(store), counted(len(index.shards), "shard")
    if not pairs:
        there = f"; there is {first_few(index.unpaired, 3)}" if index.unpaired else ""
        needed = "need WebDataset's names, a.jpg with a.png, a.seg.png or a.mask.png"
        fix = f"{needed}; an archive of folders has to be unpacked"
        raise DataError(f"data_dir: no sample with an image and a mask in the {num_shards} of {root}{there}; {fix}")
    used, test = (tuple(pair for pair in pairs if (pair.part == "test") is is_test) for is_test in (False, True))
    rule = f"{num_shards}, {describe_size(index.num_bytes)}"
    found = FoundPairs(used, rule, test=test, class_names=index.class_names, class_file=index.class_file)
    what = "without one image and one mask"
    if index.unpaired and config.unpaired == "skip":
        notice = f"{counted(len(index.unpaired), 'sample')} {what} left out (unpaired: skip)"
        return dataclasses.replace(found, notices=(notice,))
    if index.unpaired:
        fix = "unpaired: skip leaves them out"
        problem = Problem("no_mask", "sample", what, index.unpaired, fix, SKIP.settings)
        return dataclasses.replace(found, problems=(problem,))
    return found


def describe_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _pairs(store: ShardStore) -> list[Pair]:
    repeated = Counter(sample.name for _, sample, *_ in store.samples)
    is_divided = any(sample.part == "val" for _, sample, *_ in store.samples)
    pairs = []
    for shard, sample, image, mask in store.samples:
        name = sample.name if repeated[sample.name] == 1 else f"{shard.removesuffix('.tar')}/{sample.name}"
        part: Part | None = sample.part if sample.part in ("val", "test") else "train" if is_divided else None
        pairs.append(Pair(name, image, mask, part, sample.group, image.shown, mask.shown))
    return pairs


# Writing. A pair, and what the scan measured in its files; None of test pairs, which are not read before they are used.
ScannedPair = tuple[Pair, ImageFacts | None, MaskFacts | None]
Tick = Callable[[], object]
Members = list[tuple[ScannedPair, str]]  # of a shard: the pairs and their keys


def refuse_other_files(files: Files) -> None:
    """Raises DataError if shards are there that are not what an earlier start of this command left unfinished."""
    names = files.find(is_deep=False)
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
    for other in files.find(is_deep=False):  # of an earlier start, which may have written more
        if re.fullmatch(rf"\.?{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar(\..+\.tmp)?", other):
            files.delete(other)
    shards = []
    for part, of_part in _with_keys(pairs).items():
        for number, members in enumerate(_divide(of_part, shard_bytes)):
            shard = f"{'-'.join(filter(None, (stem, part)))}-{number:06d}.tar"
            shards.append(_write_shard(shard, members, files, tick))
    index = ShardIndex(tuple(shards), found.class_names, class_file=found.class_file)
    with files.writing(INDEX_NAME) as file:
        file.write(shard_index.index_to_json(index).encode("utf-8", "surrogateescape"))
    files.delete(UNFINISHED)
    return index


def _with_keys(pairs: Sequence[ScannedPair]) -> dict[str, Members]:
    """By part. WebDataset's keys are the pairs' names without dots, each once."""
    by_part: dict[str, Members] = {}
    keys = set[str]()
    for scanned in pairs:
        plain = re.sub(r"[.\\\0]", "_", scanned[0].name).strip("/") or "image"
        numbered = (f"{plain}-{number}" for number in count(2))
        keys.add(key := next(key for key in chain([plain], numbered) if key not in keys))
        by_part.setdefault(scanned[0].part or "", []).append((scanned, key))
    return by_part


def _divide(members: Members, shard_bytes: int) -> Iterator[Members]:
    """As many as fit into each shard; a pair that is larger has one for itself."""
    some: Members = []
    room = shard_bytes
    for member in members:
        files = member[0][0].image, member[0][0].mask
        # With header and padding; one that is gone has no bytes, which reading it reports.
        size = sum((file_stamp(file) or [0])[0] + 2 * shard_index.BLOCK for file in files)
        if some and size > room:
            yield some
            some, room = [], shard_bytes
        some.append(member)
        room -= size
    yield some


def _write_shard(name: str, members: Members, files: Files, tick: Tick) -> Shard:
    samples: list[Sample] = []

    def add(source: Path, shown: str, stem: str, facts: ImageFacts | MaskFacts | None) -> Member:
        with naming(shown):
            content = read_bytes(source)
        if facts is not None and content_digest(content) != facts.digest:
            raise DataError(f"{shown}: changed while the shards were written; start again")
        return shard_index.add_member(archive, f"{stem}{source.suffix.lower()}", content)

    with (
        files.writing(name) as file,
        tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive,
    ):
        for (pair, image, mask), key in members:
            stored = add(pair.image, pair.shown_image, key, image), add(pair.mask, pair.shown_mask, f"{key}.mask", mask)
            facts = image and plain_facts("image", image), mask and plain_facts("mask", mask)
            samples.append(Sample(pair.name, *stored, pair.part or "", pair.group, *facts))
            tick()
        archive.close()
        return Shard(name, file.tell(), tuple(samples))
