"""Opens the shards that data_dir names: a folder or URL of shards, one shard, or several by a pattern (a-{000000..000011}.tar).

Shards that `shard` wrote have their index beside them. Those of other tools are read once, and their index is kept under
checkpoint_dir; as is what is fetched of remote shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.datasets.file_tree import list_files, walk
from unet_trainer.images.file_bytes import DataError
from unet_trainer.shards.range_cache import RangeCache
from unet_trainer.shards.remote_files import PACKAGES, MissingFile, RemoteFiles, is_url, url_join
from unet_trainer.shards.shard_index import INDEX_NAME, UNFINISHED, Shard, ShardIndex, index_from_json, index_shard, index_to_json
from unet_trainer.shards.shard_store import ShardStore, find_store, open_store
from unet_trainer.shards.tar_files import NOT_PLAIN, ShardError
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.console import Console
from unet_trainer.system.resources import free_disk

FOLDER = ".shards"  # in checkpoint_dir
COMPRESSED_TAR = re.compile(r"\.(tgz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
SINGLE_SLASH = re.compile(rf"^({'|'.join(PACKAGES)}):/(?!/)")  # a URL that was a Path
MAX_SHARDS = 1_000_000
MAX_SHARE = 0.5  # of the free disk, for what is fetched of remote shards
GB = 10**9
FIRST_WAITS = (0.5, 1.0, 2.0)  # a host whose name is wrong is told within seconds
REUSE_SECONDS = 300.0  # for which a remote index is not read again by one process


@dataclass(frozen=True)
class ShardPlace:
    """Where shards lie. `names`: of those that are meant; None: all that are there."""

    root: str
    names: tuple[str, ...] | None = None

    @property
    def is_remote(self) -> bool:
        return is_url(self.root)

    def of(self, name: str) -> str:
        return url_join(self.root, name) if self.is_remote else str(Path(self.root) / name)


def find_place(data_dir: str) -> ShardPlace | None:
    """None if data_dir is a folder of other files. Opens no file."""
    data_dir = SINGLE_SLASH.sub(r"\1://", data_dir)
    if COMPRESSED_TAR.search(data_dir) and not Path(data_dir).is_dir():
        raise DataError(f"data_dir: {data_dir}: {NOT_PLAIN}; an archive of folders images/ and masks/ has to be unpacked")
    if is_url(data_dir):
        _refuse_odd_url(data_dir)
        data_dir = data_dir.rstrip("/").removesuffix(f"/{INDEX_NAME}")
        folder, _, last = data_dir.rpartition("/")
        return ShardPlace(folder, _expand(last)) if last.endswith(".tar") else ShardPlace(data_dir)
    path = Path(data_dir)
    try:
        if path.name.endswith(".tar") and not path.is_dir():
            return ShardPlace(str(path.parent), _expand(path.name))
        if path.name == INDEX_NAME and path.is_file():
            return ShardPlace(str(path.parent))
        if not path.is_dir():
            return None
        if (path / INDEX_NAME).is_file():
            return ShardPlace(str(path))
        return ShardPlace(str(path)) if _local_shards(path) and not list_files(path) else None
    except OSError:  # a folder that may not be read; told where its files are looked for
        return None


def _refuse_odd_url(url: str) -> None:
    """Raises DataError, which does not repeat a password."""
    if not url.lower().startswith(("http://", "https://")):
        return
    if "?" in url or "#" in url:
        raise DataError("data_dir: a URL with ? or # (pre-signed?) names one file, and shards are several; take s3:// or gs://")
    if "@" in url.split("/")[2]:
        raise DataError("data_dir: a user or password in a URL would stand in every file of the run; put it into ~/.netrc")


def _expand(name: str) -> tuple[str, ...]:
    """a-{000..011}.tar as WebDataset writes it: all numbers with as many digits."""
    found = BRACES.search(name)
    rest = name if found is None else name[: found.start()] + name[found.end() :]
    if "{" in rest and "}" in rest and not Path(name).exists():
        raise DataError(f"data_dir: {name}: one {{FIRST..LAST}} is understood; name a folder for other choices of shards")
    if found is None:
        return (name,)
    first, last = int(found[1]), int(found[2])
    if last < first or last - first >= MAX_SHARDS:
        raise DataError(f"data_dir: {name}: need {{FIRST..LAST}} with at most {MAX_SHARDS} numbers")
    numbers = (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))
    return tuple(f"{name[: found.start()]}{number}{name[found.end() :]}" for number in numbers)


def _local_shards(folder: Path) -> list[str]:
    tars = ((here / name).relative_to(folder) for here, names in walk(folder) for name in names if name.endswith(".tar"))
    return sorted(path.as_posix() for path in tars)


def open_shards(config: Config, console: Console | None = None) -> ShardStore | None:
    """The shards that data_dir names, open for reading; None if it names none. Raises DataError."""
    place = find_place(config.data_dir)
    if place is None:
        return None
    try:
        return _open(place, config, console)
    except ShardError as error:
        raise DataError(f"data_dir: {error}") from None


_opened: dict[tuple[Any, ...], float] = {}  # place and settings → when


def _open(place: ShardPlace, config: Config, console: Console | None) -> ShardStore:
    key = place, config.checkpoint_dir, config.cache_gb, os.getpid()
    store = find_store(place)
    if store is not None and place.is_remote and time.monotonic() - _opened.get(key, -REUSE_SECONDS) < REUSE_SECONDS:
        return store
    files = RemoteFiles()
    folder = Path(config.checkpoint_dir) / FOLDER
    index = _read_index(place, RemoteFiles(FIRST_WAITS))
    if index is None:
        _refuse_unfinished(place, files)
        index = _index_others(place, files, folder, console)
    cache = _open_cache(place, index, folder, config.cache_gb, console) if place.is_remote else None
    store = ShardStore(place.root, index, cache, files)
    store.check()
    if place.is_remote and not files.has_ranges(store.place(index.shards[0].name)):
        store.gives_whole_files = True
        if console is not None:
            kept = "each is fetched once and kept (cache_gb)" if store.cache is not None else "each sample takes a whole shard"
            console.note(f"{place.root} gives whole files only, no parts of them (HTTP ranges): {kept}")
    _opened[key] = time.monotonic()
    return open_store(store, place)


def _refuse_unfinished(place: ShardPlace, files: RemoteFiles) -> None:
    where = place.of(UNFINISHED)
    is_there = files.exists(where) if place.is_remote and place.names is None else not place.is_remote and Path(where).is_file()
    if is_there:
        raise ShardError(f"{place.root}: the shards there are not finished (there is no {INDEX_NAME} yet); start shard again")


def _read_index(place: ShardPlace, files: RemoteFiles) -> ShardIndex | None:
    """The index beside the shards; None if there is none, or if it does not know those that are meant."""
    where = place.of(INDEX_NAME)
    try:
        content = files.read(where) if place.is_remote else Path(where).read_bytes()
    except (MissingFile, FileNotFoundError):
        return None
    except OSError as error:
        raise ShardError(f"{where} cannot be read ({error.strerror})") from None
    except ShardError:
        if place.names is None:
            raise
        return None  # shards that are named need no index, and who may not list a bucket may not ask for others
    try:
        index = index_from_json(content)
    except ShardError as error:
        if place.is_remote and place.names is not None:
            return None  # a server that answers everything with a page
        raise ShardError(f"{where}: {error}; write the shards again with shard") from None
    if place.names is None:
        return index
    known = {shard.name: shard for shard in index.shards}
    if not known.keys() >= set(place.names):
        return None
    return dataclasses.replace(index, shards=tuple(known[name] for name in place.names))


def _index_others(place: ShardPlace, files: RemoteFiles, folder: Path, console: Console | None) -> ShardIndex:
    """Of shards of other tools. What an earlier start has read is known, unless the shard has changed."""
    names = place.names or tuple(_list_shards(place, files))
    if not names:
        raise ShardError(f"{place.root}: no {INDEX_NAME} there, and no .tar files")
    digest = hashlib.sha256(json.dumps([place.root if place.is_remote else str(Path(place.root).resolve()), names]).encode())
    kept = folder / f"index-{digest.hexdigest()[:16]}.json"
    known, stamps = _read_kept(kept)
    sizes = {name: _size_and_stamp(place, name, files) for name in names}
    missing = [name for name in names if name not in known or stamps.get(name) != sizes[name][1]]
    unpaired: dict[str, list[str]] = {}
    total = sum(sizes[name][0] for name in missing)
    with console.bar("Indexing the shards once:", total, keep=False) if console else contextlib.nullcontext() as bar:
        for name in missing:
            known[name], unpaired[name] = _index_one(place, name, sizes[name][0], files, bar.tick if bar else _ignore)
    lacking = [key for name in names for key in unpaired.get(name, stamps.get(f"unpaired:{name}", []))]
    index = ShardIndex(tuple(known[name] for name in names), unpaired=tuple(lacking))
    if missing:
        now: dict[str, Any] = {name: sizes[name][1] for name in names}
        now |= {f"unpaired:{name}": [key for key in lacking if key.startswith(f"{name}/")] for name in names}
        with contextlib.suppress(OSError):  # then they are read again by the next start
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(kept, json.dumps({"stamps": now, "index": index_to_json(index)}))
    return index


def _ignore(num_bytes: int) -> None:
    pass


def _list_shards(place: ShardPlace, files: RemoteFiles) -> Sequence[str]:
    if not place.is_remote:
        return _local_shards(Path(place.root))
    try:
        found = files.find(place.root)
    except MissingFile:
        raise ShardError(
            f"{place.root}: nothing is there, or it cannot be listed; name the shards: .../a-{{000000..000011}}.tar"
        ) from None
    return [url.removeprefix(f"{place.root}/") for url in found if url.endswith(".tar") and url.startswith(f"{place.root}/")]


def _read_kept(path: Path) -> tuple[dict[str, Shard], dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
        return {shard.name: shard for shard in index_from_json(content["index"]).shards}, dict(content["stamps"])
    return {}, {}


def _size_and_stamp(place: ShardPlace, name: str, files: RemoteFiles) -> tuple[int, list[Any]]:
    where = place.of(name)
    if place.is_remote:
        size, version = files.size_and_version(where)
        if size is None:
            raise ShardError(f"{where}: the server does not tell its size, so that it cannot be read in parts")
        return size, [size, version]
    try:
        status = Path(where).stat()
    except OSError as error:
        raise ShardError(f"{where}: {error.strerror}") from None
    return status.st_size, [status.st_size, status.st_mtime_ns]


def _index_one(
    place: ShardPlace, name: str, num_bytes: int, files: RemoteFiles, tick: Callable[[int], object]
) -> tuple[Shard, list[str]]:
    where = place.of(name)
    try:
        with files.open(where) if place.is_remote else Path(where).open("rb") as file:
            return index_shard(name, file, num_bytes, tick)
    except OSError as error:
        raise ShardError(f"{where} cannot be read ({error.strerror or error})") from None
    except ShardError as error:
        raise ShardError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def _open_cache(place: ShardPlace, index: ShardIndex, folder: Path, cache_gb: float, console: Console | None) -> RangeCache | None:
    wanted = min(int(cache_gb * GB), index.num_bytes)
    if not wanted or not hasattr(os, "pread"):  # Windows: several processes cannot read one file at any place
        return None
    try:
        cache = RangeCache(folder, " ".join((place.root, *(place.names or ()))), index.shards, int(cache_gb * GB))
        room = int(MAX_SHARE * free_disk(folder)) + cache.allocated()
    except OSError as error:
        if console is not None:
            console.note(f"cache_gb: {folder} cannot be written to ({error.strerror}); what is fetched is not kept")
        return None
    if room < wanted:
        cache.limit(room)
        if console is not None:
            console.note(f"cache_gb: {room / GB:.3g} GB of the shards are kept, half of what is free on the disk of {folder}")
    return cache
