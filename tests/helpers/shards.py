"""Small shards, written by hand."""

import tarfile

from unet_trainer.data.pairs import Pair
from unet_trainer.data.shard_index import Sample, Shard, ShardIndex, add_member
from unet_trainer.data.shard_store import Files, ShardStore


def write_tar(path, files):
    """A tar file of {name: content}; returns its members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        return {name: add_member(archive, name, content) for name, content in files.items()}


def write_shard(folder, name, contents, **sample):
    """A shard of samples {key: (image, mask)}; returns what its index says of it."""
    files = {}
    for key, (image, mask) in contents.items():
        files |= {f"{key}.png": image, f"{key}.mask.png": mask}
    members = write_tar(folder / name, files)
    samples = [Sample(key, members[f"{key}.png"], members[f"{key}.mask.png"], **sample) for key in contents]
    return Shard(name, (folder / name).stat().st_size, tuple(samples))


def write_index_of(folder, **shards):
    """Shards {name: {key: (image, mask)}} and their index."""
    return ShardIndex(tuple(write_shard(folder, f"{name}.tar", contents) for name, contents in shards.items()))


class DeadRemote:
    """The file system of a server that gives an index and never a file again; `log` has a byte for each time it was asked, by
    whatever process."""

    def __init__(self, log):
        self.log = log

    def cat_file(self, url, start=None, end=None):
        with self.log.open("ab") as file:
            file.write(b"x")
        raise OSError("connection refused")


def pairs_on_a_dead_remote(folder, names):
    """Pairs in a shard behind a URL, and a function that tells how often the server was asked for one."""
    index = write_index_of(folder, dead=dict.fromkeys(names, (b"image", b"mask")))
    log = folder / "asked"
    log.touch()
    store = ShardStore(Files("http://dead/x", (0.0,)), index)
    store.files.connect = lambda protocol, process: DeadRemote(log)
    pairs = [
        Pair(sample.name, image, mask, None, "", image.shown, mask.shown) for _, sample, image, mask in store.samples
    ]
    return pairs, lambda: log.stat().st_size
