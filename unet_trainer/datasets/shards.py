"""The pairs in the shards that data_dir names: a folder or URL of shards, one shard, or several by a pattern
(a-{000..011}.tar).

Shards that `shard` wrote have their index beside them. Those of other tools are read once, and their index is kept
under checkpoint_dir; so is what is fetched of remote shards. Names, parts and groups are those of the files that they
were written from.

write_shards makes them of the pairs of a dataset: NAME-000000.tar, ... (NAME-train-000000.tar where the data is
divided), with KEY.jpg and KEY.mask.png, byte for byte. The index is written last: shards without one are unfinished.
"""

import contextlib
import dataclasses
import io
import os
import re
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unet_trainer.config.load import PROTOCOLS, url_problem
from unet_trainer.config.schema import Config
from unet_trainer.datasets import shard_index
from unet_trainer.datasets.layouts import Listing, list_files, walk
from unet_trainer.datasets.pairs import SKIP, FoundPairs, Pair, Part, Problem, first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, plain_facts
from unet_trainer.datasets.shard_index import INDEX_NAME, UNFINISHED, Sample, Shard, ShardIndex, index_shard
from unet_trainer.datasets.shard_store import Files, MissingFile, RangeCache, ShardStore, is_url, short_digest
from unet_trainer.images.file_bytes import (
    DataError,
    ShardError,
    content_digest,
    file_stamp,
    naming,
    open_stores,
    read_bytes,
)
from unet_trainer.system.atomic_files import DRAFT
from unet_trainer.system.console import Console, counted
from unet_trainer.system.input_files import open_handle
from unet_trainer.system.json_cache import read_cache, write_cache
from unet_trainer.system.locks import is_in_use, lock_shared
from unet_trainer.system.resources import free_disk

FOLDER = ".shards"  # in checkpoint_dir
COMPRESSED_TAR = re.compile(r"\.(tgz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
BRACES = re.compile(r"([^{}]*)\{(\d{1,18})\.\.(\d{1,18})\}([^{}]*)")
SINGLE_SLASH = re.compile(rf"^({'|'.join(PROTOCOLS)}):/(?!/)")  # a URL that was a Path
MAX_SHARDS = 1_000_000
GB = 10**9
FIRST_WAITS = (0.5, 1.0, 2.0)  # for the first file, so that a wrong host name is told within seconds
REUSE_SECONDS = 300.0  # for which a remote index is not read again by one process
KNOWN_BY_SHARDS = ("image_dir", "mask_dir", "mask_suffix")


class ShardPlace(NamedTuple):
    """Where shards lie. `names`: of those that are meant; None: all that are there."""

    root: str
    names: tuple[str, ...] | None = None


def find_place(data_dir: str, listing: Listing | None = None) -> ShardPlace | None:
    """None if data_dir is a folder of other files. Opens no file."""
    data_dir = SINGLE_SLASH.sub(r"\1://", data_dir)
    if COMPRESSED_TAR.search(data_dir) and not Path(data_dir).is_dir():
        raise DataError(
            f"data_dir: {data_dir}: {shard_index.NOT_PLAIN}; an archive of folders images/ and masks/ has to be "
            "unpacked"
        )
    if is_url(data_dir):
        if problem := url_problem(data_dir):
            raise DataError(f"data_dir: {problem}")
        data_dir = data_dir.rstrip("/").removesuffix(f"/{INDEX_NAME}")
        folder, _, last = data_dir.rpartition("/")
        return ShardPlace(folder, _expand(last)) if last.endswith(".tar") else ShardPlace(data_dir)
    path = Path(data_dir)
    with contextlib.suppress(OSError):  # a folder that may not be read; told where its files are looked for
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
    found = BRACES.fullmatch(name)
    if found is None or not 0 <= int(found[3]) - int(found[2]) < MAX_SHARDS:
        needed = f"need one {{FIRST..LAST}}, of at most {MAX_SHARDS} numbers"
        raise DataError(f"data_dir: {name}: {needed}; name a folder for other choices of shards")
    digits = len(found[2])
    return tuple(f"{found[1]}{number:0{digits}d}{found[4]}" for number in range(int(found[2]), int(found[3]) + 1))


def _list_shards(files: Files) -> list[str]:
    return [name for name in files.find() if name.endswith(".tar")]


def open_shards(config: Config, console: Console | None = None, listing: Listing | None = None) -> ShardStore | None:
    """The shards that data_dir names, open for reading; None if it names none. Raises DataError."""
    place = find_place(config.data_dir, listing)
    if place is None:
        return None
    key = place, config.checkpoint_dir, config.cache_gb
    known: ShardStore | None = open_stores.get(key)
    if known is not None and known.is_remote and time.monotonic() - known.opened < REUSE_SECONDS:
        return known
    try:
        store = _open(place, config, console or Console(io.StringIO()))  # silent without one
    except ShardError as error:
        raise DataError(f"data_dir: {error}") from None
    open_stores.pop(key, None)
    open_stores[key] = store  # the last: its files are found before those of others
    return store


def _open(place: ShardPlace, config: Config, console: Console) -> ShardStore:
    files, folder = Files(place.root), Path(config.checkpoint_dir) / FOLDER
    index = _read_index(place, Files(place.root, FIRST_WAITS))
    if index is None:
        if (place.names is None or not files.is_remote) and files.exists(UNFINISHED):
            raise ShardError(
                f"{place.root}: the shards there are not finished (there is no {INDEX_NAME} yet); start shard again"
            )
        index = _index_others(place, files, folder, console)
    store = ShardStore(files, index)
    store.check()
    if not files.is_remote:
        return store
    try:
        if max_bytes := int(config.cache_gb * GB):
            store.cache = cache = RangeCache(
                folder, " ".join((place.root, *(place.names or ()))), index.shards, max_bytes
            )
            if cache.is_limited_by_disk:
                kept = f"{cache.max_bytes / GB:.3g} GB of the shards are kept"
                console.note(f"cache_gb: {kept}, half of what is free on the disk of {folder}")
    except OSError as error:
        console.note(f"cache_gb: {folder} cannot be written to ({error.strerror}); what is fetched is not kept")
    store.gives_whole_files = bool(index.shards) and not files.has_ranges(index.shards[0].name)
    if store.gives_whole_files:
        kept = (
            "each is fetched once and kept (cache_gb)" if store.cache is not None else "each sample takes a whole shard"
        )
        console.note(f"{place.root} gives whole files only, not parts of them (no HTTP ranges): {kept}")
    return store


def _read_index(place: ShardPlace, files: Files) -> ShardIndex | None:
    """The index beside the shards; None if there is none, or if it does not know those that are meant."""
    try:
        index = shard_index.index_from_json(files.read(INDEX_NAME))
    except MissingFile:
        return None
    except ShardError as error:
        if (
            place.names is not None and files.is_remote
        ):  # a server that answers everything with a page, or refuses other files
            return None
        raise _naming(
            files.place(INDEX_NAME), f"{error}; if it is damaged, write the shards again with shard"
        ) from None
    if place.names is None:
        return index
    known = {shard.name: shard for shard in index.shards}
    if not known.keys() >= set(place.names):
        return None
    return dataclasses.replace(index, shards=tuple(known[name] for name in place.names))


def _naming(place: str, message: str) -> ShardError:
    """The error with the name of the file, which some messages have already."""
    return ShardError(message if message.startswith(place) else f"{place}: {message}")


def _index_others(place: ShardPlace, files: Files, folder: Path, console: Console) -> ShardIndex:
    """Of shards of other tools. What an earlier start has read of a shard is cached, and read again if it has
    changed."""
    try:
        names = place.names or tuple(_list_shards(files))
    except MissingFile:
        how = "name the shards: .../a-{000000..000011}.tar"
        raise ShardError(f"{place.root}: nothing is there, or it cannot be listed; {how}") from None
    if not names:
        raise ShardError(f"{place.root}: no {INDEX_NAME} there, and no .tar files")
    root = place.root if files.is_remote else str(Path(place.root).resolve())
    versions = [files.size_and_version(name) for name in names]
    found: list[ShardIndex] = []
    with console.bar("Indexing the shards once:", sum(size or 0 for size, _ in versions), keep=False) as bar:
        for name, version in zip(names, versions, strict=True):
            cache = folder / f"index-{short_digest(f'{root}/{name}')}.json"
            with contextlib.suppress(ShardError):
                known = read_cache(cache)
                if known.get("version") == list(version):
                    found.append(shard_index.index_from_json(str(known.get("index"))))
                    bar.tick(version[0] or 0)
                    continue
            try:
                with files.open_file(name) as file:
                    shard, unpaired = index_shard(name, file, version[0] or 0, bar.tick)
            except (OSError, ShardError) as error:
                raise _naming(files.place(name), str(getattr(error, "strerror", None) or error)) from None
            found.append(ShardIndex((shard,), unpaired=tuple(unpaired)))
            write_cache(cache, {"version": version, "index": shard_index.index_to_json(found[-1])})
    shards = tuple(shard for index in found for shard in index.shards)
    return ShardIndex(shards, unpaired=tuple(key for index in found for key in index.unpaired))


def find_in_shards(config: Config, console: Console | None = None, listing: Listing | None = None) -> FoundPairs | None:
    """The pairs of the shards that data_dir names, which are open from now on; None if it names none. Raises
    DataError."""
    store = open_shards(config, console, listing)
    if store is None:
        return None
    index, root = store.index, store.files.root
    for name in KNOWN_BY_SHARDS:
        if getattr(config, name):
            raise DataError(
                f"{name}: {config.data_dir} holds shards, which say what is an image and what a mask; leave it out"
            )
    pairs, num_shards = _pairs(store), counted(len(index.shards), "shard")
    if not pairs:
        there = f"; there is {first_few(index.unpaired, 3)}" if index.unpaired else ""
        needed = (
            "need WebDataset's names, a.jpg with a.png, a.seg.png or a.mask.png; an archive of folders has "
            "to be unpacked"
        )
        raise DataError(f"data_dir: no sample with an image and a mask in the {num_shards} of {root}{there}; {needed}")
    used, test = (tuple(pair for pair in pairs if (pair.part == "test") is is_test) for is_test in (False, True))
    notices, problems = [], []
    if not store.is_remote and (others := list_files(Path(root), listing=listing)):
        notices.append(
            f"{counted(len(others), 'image file')} beside the shards in {root} left out, such as {others[0]}"
        )
    what = "without one image and one mask"
    if index.unpaired and config.unpaired == "skip":
        notices.append(f"{counted(len(index.unpaired), 'sample')} {what} left out (unpaired: skip)")
    elif index.unpaired:
        problems.append(
            Problem("no_mask", "sample", what, index.unpaired, "unpaired: skip leaves them out", SKIP.settings)
        )
    rule = f"{num_shards}, {describe_size(index.num_bytes)}"
    return FoundPairs(used, rule, tuple(problems), test, (), tuple(notices), index.class_names, index.class_file)


def describe_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _pairs(store: ShardStore) -> list[Pair]:
    samples = [(shard.name, sample) for shard in store.index.shards for sample in shard.samples]
    repeated = Counter(sample.name for _, sample in samples)
    is_divided = any(sample.part == "val" for _, sample in samples)
    parts: dict[str, Part | None] = {"val": "val", "test": "test"}
    pairs = []
    for shard, sample in samples:
        name = sample.name if repeated[sample.name] == 1 else f"{shard.removesuffix('.tar')}/{sample.name}"
        members = sample.image.name, sample.mask.name
        image, mask = (Path(f"{store.path_prefix}{shard}/{member}") for member in members)
        origins = (f"{store.files.place(shard)}/{member}" for member in members)
        pairs.append(
            Pair(name, image, mask, parts.get(sample.part, "train" if is_divided else None), sample.group, *origins)
        )
    return pairs


# A pair, and what the scan found in its files; None of test pairs, which are not read before they are used.
ScannedPair = tuple[Pair, ImageFacts | None, MaskFacts | None]


def refuse_other_files(files: Files) -> None:
    """Raises DataError if shards are there: nothing is overwritten but what an earlier start of this command left
    unfinished."""
    names = _names(files)
    shards = sorted(name for name in names if name.endswith(".tar") or name == INDEX_NAME)
    if INDEX_NAME in names or (shards and UNFINISHED not in names):
        raise DataError(
            f"--out: there are shards in {files.root} ({shards[0]}); name another place, or delete them first"
        )


def _names(files: Files) -> list[str]:
    """Of the files at the top of the place, hidden ones too."""
    try:
        return files.find() if files.is_remote else [path.name for path in Path(files.root).iterdir()]
    except (FileNotFoundError, MissingFile):
        return []
    except OSError as error:
        raise DataError(f"--out: {files.root} cannot be read ({error.strerror}); need a folder or a URL") from None


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
    # Of both files with header and padding, about; one that is gone has no bytes, which reading it tells.
    sizes = [
        sum((file_stamp(path) or [0])[0] + 2 * shard_index.BLOCK for path in (pair.image, pair.mask))
        for pair, *_ in pairs
    ]
    if not files.is_remote:
        needed, free = sum(sizes), free_disk(Path(files.root))
        if needed > free:
            raise DataError(f"--out: {files.root} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there")
    divided: dict[str, list[list[tuple[ScannedPair, str]]]] = {}  # by part, those of each shard
    left: dict[str, int] = defaultdict(int)  # bytes in the last shard of each part
    for scanned, size, key in zip(pairs, sizes, _keys([pair for pair, *_ in pairs]), strict=True):
        part = scanned[0].part or ""
        if size > left[part] or part not in divided:  # a pair that is larger than a shard has one for itself
            divided.setdefault(part, []).append([])
            left[part] = shard_bytes
        divided[part][-1].append((scanned, key))
        left[part] -= size
    with _marked_unfinished(files):
        # What an earlier start left: its shards may be more than those that are written now.
        own = re.compile(rf"{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar")
        for other in _names(files):
            draft = DRAFT.fullmatch(other)
            if own.fullmatch(draft["name"] if draft else other) or (
                draft and draft["name"] in (INDEX_NAME, UNFINISHED)
            ):
                files.delete(other)
        shards = tuple(
            _write_shard(
                f"{stem}-{part}-{number:06d}.tar" if part else f"{stem}-{number:06d}.tar", members, files, tick
            )
            for part, its in divided.items()
            for number, members in enumerate(its)
        )
        index = ShardIndex(shards, found.class_names, found.num_classes, class_file=found.class_file)
        files.write(
            INDEX_NAME, lambda file: file.write(shard_index.index_to_json(index).encode("utf-8", "surrogateescape"))
        )
    return index


@contextlib.contextmanager
def _marked_unfinished(files: Files) -> Iterator[None]:
    """The file UNFINISHED stands there until the block has ended well, in a local folder locked by this process."""
    mark = Path(files.place(UNFINISHED))
    if not files.is_remote and mark.is_file() and not mark.is_symlink() and is_in_use(mark):
        raise DataError(f"--out: another shard command is writing to {files.root}; wait for it, or name another place")
    files.write(UNFINISHED, lambda file: file.write(b"These shards are being written; shards.json comes last.\n"))
    with contextlib.ExitStack() as stack:
        if not files.is_remote:
            handle = open_handle(mark, follow=False)
            stack.callback(os.close, handle)
            lock_shared(handle)
        yield
    files.delete(UNFINISHED)


def _keys(pairs: Sequence[Pair]) -> list[str]:
    """WebDataset's keys: the pairs' names, with no dot, since a key ends at the first; and each once."""
    taken: dict[str, None] = {}
    for pair in pairs:
        plain = re.sub(r"[.\\\0]", "_", pair.name).strip("/") or "image"
        key, number = plain, 2
        while key in taken:
            key, number = f"{plain}-{number}", number + 1
        taken[key] = None
    return list(taken)


def _write_shard(
    name: str, members: Sequence[tuple[ScannedPair, str]], files: Files, tick: Callable[[], object]
) -> Shard:
    samples: list[Sample] = []
    num_bytes = 0

    def fill(file: BinaryIO) -> None:
        nonlocal num_bytes
        with tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
            for (pair, *found), key in members:
                written = []
                both = (pair.image, pair.shown_image, key), (pair.mask, pair.shown_mask, f"{key}.mask")
                for (path, shown, stem), facts in zip(both, found, strict=True):
                    with naming(shown):
                        content = read_bytes(path)
                    if facts is not None and content_digest(content) != facts.digest:
                        raise DataError(f"{shown}: changed while the shards were written; start again")
                    written.append(shard_index.add_member(archive, f"{stem}{path.suffix.lower()}", content))
                plain = [None if facts is None else plain_facts(facts) for facts in found]
                samples.append(Sample(pair.name, written[0], written[1], pair.part or "", pair.group, *plain))
                tick()
        num_bytes = file.tell()

    files.write(name, fill)
    return Shard(name, num_bytes, tuple(samples))
