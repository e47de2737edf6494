"""The pairs in the shards that data_dir names (a folder or URL of shards, one shard, or a pattern: a-{000..011}.tar),
and how shards are written: KEY.jpg and KEY.mask.png, byte for byte, the index last.

Shards of other tools are read once, and their index is kept under checkpoint_dir; so is what is fetched."""

import contextlib
import dataclasses
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from unet_trainer.config.load import PROTOCOLS, url_problem
from unet_trainer.config.schema import Config
from unet_trainer.data import shard_index
from unet_trainer.data.listing import Listing, list_files, walk
from unet_trainer.data.pairs import SKIP, FoundPairs, Pair, Part, Problem, first_few
from unet_trainer.data.place import Place
from unet_trainer.data.scan import ImageFacts, MaskFacts, plain_facts
from unet_trainer.data.shard_index import INDEX_NAME, UNFINISHED, Sample, Shard, ShardIndex, index_shard
from unet_trainer.data.shard_store import WAITS, Files, MissingFile, RangeCache, ShardStore, is_url, short_digest
from unet_trainer.images.file_bytes import DataError, ShardError, content_digest, file_stamp, naming, read_bytes
from unet_trainer.system.console import Console, counted
from unet_trainer.system.json_cache import read_cache, write_cache
from unet_trainer.system.resources import free_disk

FOLDER = ".shards"  # in checkpoint_dir
COMPRESSED_TAR = re.compile(r"\.(tgz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
BRACES = re.compile(r"([^{}]*)\{(\d{1,18})\.\.(\d{1,18})\}([^{}]*)")
SINGLE_SLASH = re.compile(rf"^({'|'.join(PROTOCOLS)}):/(?!/)")  # a URL that was a Path
MAX_SHARDS = 1_000_000
GB = 10**9
KNOWN_BY_SHARDS = ("image_dir", "mask_dir", "mask_suffix")


class ShardPlace(NamedTuple):
    """Where shards lie. `names`: of those that are meant; None: all that are there."""

    root: str
    names: tuple[str, ...] | None = None


def find_place(data_dir: str, listing: Listing | None = None) -> ShardPlace | None:
    """None if data_dir is a folder of other files. Opens no file."""
    data_dir = SINGLE_SLASH.sub(r"\1://", data_dir)
    if COMPRESSED_TAR.search(data_dir) and not Path(data_dir).is_dir():
        fix = "an archive of folders images/ and masks/ has to be unpacked"
        raise DataError(f"data_dir: {data_dir}: {shard_index.NOT_PLAIN}; {fix}")
    if is_url(data_dir):
        if problem := url_problem(data_dir):
            raise DataError(f"data_dir: {problem}")
        data_dir = data_dir.rstrip("/").removesuffix(f"/{INDEX_NAME}")
        folder, _, last = data_dir.rpartition("/")
        return ShardPlace(folder, _expand(last)) if last.endswith(".tar") else ShardPlace(data_dir)
    path = Path(data_dir)
    with contextlib.suppress(OSError):  # a folder that may not be read: reported where its files are looked for
        if path.name.endswith(".tar") and not path.is_dir():
            return ShardPlace(str(path.parent), _expand(path.name))
        path = path.parent if path.name == INDEX_NAME and path.is_file() else path
        if (path / INDEX_NAME).is_file():
            return ShardPlace(str(path))
        if any(walk(path, listing=listing, endings=(".tar",))) and not list_files(path, listing=listing):
            return ShardPlace(str(path))
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
    max_bytes = int(config.cache_gb * GB)
    if files.is_remote and store.index.shards and max_bytes:
        url = " ".join((place.root, *(place.names or ())))
        try:
            store.cache = kept = RangeCache(folder, url, store.index.shards, max_bytes)
        except OSError as error:
            console.note(f"cache_gb: {folder} cannot be written to ({error.strerror}); what is fetched is not kept")
        else:
            if kept.is_limited_by_disk:
                most = f"{kept.max_bytes / GB:.3g} GB of the shards are kept"
                console.note(f"cache_gb: {most}, half of what is free on the disk of {folder}")
    if files.is_remote and store.index.shards and not files.has_ranges(store.index.shards[0].name):
        store.gives_whole_files = True
        cost = "each is fetched once and kept (cache_gb)" if store.cache else "each sample takes a whole shard"
        console.note(f"{place.root} gives whole files only, not parts of them (no HTTP ranges): {cost}")
    return store


def _read_index(place: ShardPlace, files: Files) -> ShardIndex | None:
    """The index beside the shards; None if there is none, or if it does not know those that are meant."""
    try:
        files.size_and_version(INDEX_NAME)  # refuses what is no file: reading a pipe would wait
        index = shard_index.index_from_json(files.read(INDEX_NAME))
    except MissingFile:
        return None
    except ShardError as error:
        fix = f"{error}; if it is damaged, write the shards again with shard"
        raise _naming(files.place(INDEX_NAME), fix) from None
    known = {shard.name: shard for shard in index.shards}
    names = known if place.names is None else place.names
    return dataclasses.replace(index, shards=tuple(known[name] for name in names)) if {*names} <= {*known} else None


def _naming(place: str, message: object) -> ShardError:
    """The error with the name of the file, which some messages have already."""
    return ShardError(f"{message}" if str(message).startswith(place) else f"{place}: {message}")


def _index_others(place: ShardPlace, files: Files, folder: Path, console: Console) -> ShardIndex:
    """Of shards of other tools; of a shard that has not changed, as an earlier start has read it."""
    there = files.find(is_deep=place.names is None) if place.names is None or not files.is_remote else []
    if UNFINISHED in there:
        raise ShardError(f"{place.root}: the shards there are not finished (no {INDEX_NAME} yet); start shard again")
    names = place.names or tuple(name for name in there if name.endswith(".tar"))
    if not names:
        how = "name the shards: .../a-{000000..000011}.tar"
        raise ShardError(f"{place.root}: no {INDEX_NAME} and no .tar files there, or they cannot be listed; {how}")
    root = place.root if files.is_remote else str(Path(place.root).resolve())
    indices: list[ShardIndex] = []
    with console.bar("Indexing the shards once:", len(names), keep=False) as bar:
        for name, (size, version) in zip(names, files.sizes_and_versions(names), strict=True):
            cache = folder / f"index-{short_digest(f'{root}/{name}')}.json"
            known = read_cache(cache)
            index = None
            if known.get("version") == [size, version]:
                with contextlib.suppress(ShardError):
                    index = shard_index.index_from_json(str(known.get("index")))
            if index is None:
                try:
                    shard, unpaired = files.read_through(name, partial(index_shard, name, size or 0))
                except ShardError as error:
                    raise _naming(files.place(name), error) from None
                index = ShardIndex((shard,), unpaired=tuple(unpaired))
                write_cache(cache, {"version": [size, version], "index": shard_index.index_to_json(index)})
            indices.append(index)
            bar.tick()
    shards = tuple(shard for index in indices for shard in index.shards)
    return ShardIndex(shards, unpaired=tuple(key for index in indices for key in index.unpaired))


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
    for name in KNOWN_BY_SHARDS:
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
    notices, problems = [], []
    what = "without one image and one mask"
    if index.unpaired and config.unpaired == "skip":
        notices.append(f"{counted(len(index.unpaired), 'sample')} {what} left out (unpaired: skip)")
    elif index.unpaired:
        fix = "unpaired: skip leaves them out"
        problems.append(Problem("no_mask", "sample", what, index.unpaired, fix, SKIP.settings))
    rule = f"{num_shards}, {describe_size(index.num_bytes)}"
    return FoundPairs(used, rule, tuple(problems), test, (), tuple(notices), index.class_names, index.class_file)


def describe_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _pairs(store: ShardStore) -> list[Pair]:
    samples = [(shard.name, sample) for shard in store.index.shards for sample in shard.samples]
    repeated = Counter(sample.name for _, sample in samples)
    is_divided = any(sample.part == "val" for _, sample in samples)
    pairs = []
    for shard, sample in samples:
        name = sample.name if repeated[sample.name] == 1 else f"{shard.removesuffix('.tar')}/{sample.name}"
        image, mask = store.file(shard, sample.image), store.file(shard, sample.mask)
        part: Part | None = sample.part if sample.part in ("val", "test") else "train" if is_divided else None
        pairs.append(Pair(name, image, mask, part, sample.group, image.shown, mask.shown))
    return pairs


# A pair, and what the scan measured in its files; None of test pairs, which are not read before they are used.
ScannedPair = tuple[Pair, ImageFacts | None, MaskFacts | None]


def refuse_other_files(files: Files) -> None:
    """Raises DataError if shards are there that are not what an earlier start of this command left unfinished."""
    names = files.find(is_deep=False)
    there = [name for name in names if name == INDEX_NAME or (name.endswith(".tar") and UNFINISHED not in names)]
    if there:
        fix = "name another place, or delete them first"
        raise DataError(f"--out: there are shards in {files.root} ({there[0]}); {fix}")


def write_shards(
    found: FoundPairs,
    pairs: Sequence[ScannedPair],
    name: str,
    files: Files,
    shard_bytes: int,
    tick: Callable[[], object],
) -> ShardIndex:
    """Writes all pairs, in their order; `tick` is called after each. Raises UserError."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "data"
    num_bytes = sum((file_stamp(file) or [0])[0] for pair, *_ in pairs for file in (pair.image, pair.mask))
    if not files.is_remote and num_bytes > (free := free_disk(Path(files.root))):
        needed = f"{files.root} needs {describe_size(num_bytes)}, and {describe_size(free)} are free there"
        raise DataError(f"--out: {needed}")
    with files.writing(UNFINISHED) as file:
        file.write(b"These shards are being written; shards.json comes last.\n")
    # What an earlier start left: its shards may be more than those that are written now.
    own = re.compile(rf"\.?{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar(\..+\.tmp)?")
    for other in filter(own.fullmatch, files.find(is_deep=False)):
        files.delete(other)
    shards = _divide(pairs, stem, shard_bytes).items()
    written = tuple(_write_shard(shard, members, files, tick) for shard, members in shards)
    index = ShardIndex(written, found.class_names, found.num_classes, class_file=found.class_file)
    with files.writing(INDEX_NAME) as file:
        file.write(shard_index.index_to_json(index).encode("utf-8", "surrogateescape"))
    files.delete(UNFINISHED)
    return index


Members = list[tuple[ScannedPair, str]]  # of a shard: the pairs and their keys


def _divide(pairs: Sequence[ScannedPair], stem: str, shard_bytes: int) -> dict[str, Members]:
    """The pairs of each shard, by its name. WebDataset's keys are the pairs' names without dots, each once."""
    by_part: dict[str, list[Members]] = {}
    room: dict[str, int] = {}  # in the last shard of each part
    keys = set[str]()
    for scanned in pairs:
        pair, part = scanned[0], scanned[0].part or ""
        # Of both files with header and padding; one that is gone has no bytes, which reading it reports.
        size = sum((file_stamp(file) or [0])[0] + 2 * shard_index.BLOCK for file in (pair.image, pair.mask))
        if part not in room or size > room[part]:  # a pair that is larger than a shard has one for itself
            by_part.setdefault(part, []).append([])
            room[part] = shard_bytes
        plain = re.sub(r"[.\\\0]", "_", pair.name).strip("/") or "image"
        names = chain([plain], (f"{plain}-{number}" for number in count(2)))
        keys.add(key := next(name for name in names if name not in keys))
        by_part[part][-1].append((scanned, key))
        room[part] -= size
    return {
        f"{'-'.join(filter(None, (stem, part)))}-{number:06d}.tar": members
        for part, of_part in by_part.items()
        for number, members in enumerate(of_part)
    }


def _write_shard(name: str, members: Members, files: Files, tick: Callable[[], object]) -> Shard:
    samples: list[Sample] = []
    with (
        files.writing(name) as file,
        tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive,
    ):
        for (pair, *facts), key in members:
            written = []
            sources = (pair.image, pair.shown_image, key), (pair.mask, pair.shown_mask, f"{key}.mask")
            for (source, shown, stem), measured in zip(sources, facts, strict=True):
                with naming(shown):
                    content = read_bytes(source)
                if measured is not None and content_digest(content) != measured.digest:
                    raise DataError(f"{shown}: changed while the shards were written; start again")
                written.append(shard_index.add_member(archive, f"{stem}{source.suffix.lower()}", content))
            plain = [None if measured is None else plain_facts(measured) for measured in facts]
            samples.append(Sample(pair.name, written[0], written[1], pair.part or "", pair.group, *plain))
            tick()
        archive.close()
        return Shard(name, file.tell(), tuple(samples))
