"""Cores and memory that this process may use. In a container that is what its cgroup allows, not what the host has."""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from unet_trainer.system.input_files import read_text

ROOT = Path("/")  # tests put a made-up file system in its place


def count_cores() -> int:
    """Cores: CPU affinity and the cgroup's CPU quota, whichever is less; a quota of 1.5 counts as 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _cpu_quotas())]))


def free_host_memory() -> int:
    """Bytes of host memory that this process could still take before the host or its cgroup runs out."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 * 2**30
    on_host = _meminfo().get("MemAvailable", pages // 2)
    return min([on_host, *(max(0, limit - used) for limit, used in _memory_limits())])


def total_host_memory() -> int:
    """Bytes of host memory: the machine's, or the cgroup's limit where that is less."""
    total = _meminfo().get("MemTotal", 8 * 2**30)
    return min([total, *(limit for limit, _ in _memory_limits())])


def free_disk(folder: Path) -> int:
    """Bytes free on the disk that holds the folder, or would hold it."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    return shutil.disk_usage(existing).free


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none (macOS, Windows)."""
    entries = re.findall(r"(\w+): +(\d+) kB", read_if_there(ROOT / "proc/meminfo"))
    return {name: 1024 * int(number) for name, number in entries}


def _cpu_quotas() -> Iterator[float]:
    """Of the cgroup and those above it, in cores."""
    for folder in _cgroup_folders("cpu"):
        # v2: "150000 100000" or "max 100000"; v1: a file for each of them, and -1 without a quota
        v1 = read_if_there(folder / "cpu.cfs_quota_us") + read_if_there(folder / "cpu.cfs_period_us")
        for text in (read_if_there(folder / "cpu.max"), v1):
            if found := re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", text):
                yield int(found[1]) / int(found[2])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, used) of the cgroup and those above it. Page cache that can be dropped does not count as used."""
    for folder in _cgroup_folders("memory"):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = (read_if_there(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():  # v1 writes a number near 2^63 where there is no limit, v2 a word
                # As usage_in_bytes, v1's total_inactive_file counts the groups below it too.
                entries = r"^(total_)?inactive_file (\d+)$"
                droppable = dict(re.findall(entries, read_if_there(folder / "memory.stat"), re.MULTILINE))
                yield int(limit), max(0, int(used) - int(droppable.get("total_") or droppable.get("", 0)))


def _cgroup_folders(controller: str) -> list[Path]:
    """The folders of this process's cgroup and its parents, v2 and v1. A container's mount shows its own group as /."""
    folders = []
    for line in read_if_there(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            folders += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return list(dict.fromkeys(folders))


def read_if_there(path: Path) -> str:
    """Empty where there is no such file."""
    with contextlib.suppress(OSError):
        return read_text(path, errors="replace")
    return ""
