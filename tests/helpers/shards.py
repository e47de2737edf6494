"""Small shards, written by hand."""

from __future__ import annotations

import io
import zlib

from unet_trainer.shards.shard_index import Member, Sample, Shard, ShardIndex
from unet_trainer.shards.tar_files import TarWriter


def write_tar(path, files):
    """A tar file of {name: content}; returns its members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    writer = TarWriter(file)
    members = {name: Member(*writer.add(name, content), zlib.crc32(content)) for name, content in files.items()}
    writer.finish()
    path.write_bytes(file.getvalue())
    return members


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
