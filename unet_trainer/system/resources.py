"""Cores and memory that this process may use. In a container that is what its cgroup allows, not what the host has."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from pathlib import Path

from unet_trainer.system.input_files import read_text

ROOT = Path("/")  # tests put a made-up file system in its place
UNLIMITED_V1 = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


def count_cores(root: Path | None = None) -> int:
    """Cores: CPU affinity and the cgroup's CPU quota, whichever is less; a quota of 1.5 counts as 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(root or ROOT)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def free_host_memory(root: Path | None = None) -> int:
    """Bytes of host memory that this process could still take before the host or its cgroup runs out."""
    root = root or ROOT
    return min([_free_on_host(root), *(max(0, limit - used) for limit, used in _memory_limits(root))])


def total_host_memory(root: Path | None = None) -> int:
    """Bytes of host memory: the machine's, or the cgroup's limit where that is less."""
    root = root or ROOT
    total = _meminfo(root).get("MemTotal", 8 * 2**30)
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def memory_of_machine(root: Path | None = None) -> int | None:
    """Bytes of memory that the machine shows, whatever a container may use of it; None where it does not tell."""
    return _meminfo(root or ROOT).get("MemTotal")


def free_disk(folder: Path) -> int:
    """Bytes free on the disk that holds the folder, or would hold it."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    return shutil.disk_usage(existing).free


def _free_on_host(root: Path) -> int:
    meminfo = _meminfo(root)
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages else 4 * 2**30


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none (macOS, Windows)."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in read_text(root / "proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _cpu_quota(root: Path) -> float | None:
    """The smallest quota of the cgroup and those above it, in cores; None without one."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _read_words(folder / "cpu.max")  # v2: "150000 100000" or "max 100000"
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")  # v1
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of the cgroup and those above it. Page cache that can be dropped does not count as used."""
    found = []
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, usage_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _read_number(folder / limit_file), _read_number(folder / usage_file)
            if limit is not None and used is not None and limit < UNLIMITED_V1:
                found.append((limit, max(0, used - _droppable_cache(folder))))
    return found


def _droppable_cache(folder: Path) -> int:
    words = _read_words(folder / "memory.stat")
    numbers = dict(zip(words[::2], words[1::2], strict=False))
    # v1 counts the group alone in inactive_file and the groups below it too in total_inactive_file, as usage_in_bytes does.
    found = numbers.get("total_inactive_file") or numbers.get("inactive_file", "")
    return int(found) if found.isdigit() else 0


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and its parents, v2 and v1. Inside a container the mount shows its own group as /."""
    folders = []
    with contextlib.suppress(OSError):
        for line in read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            folders += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return list(dict.fromkeys(folders))


def _read_words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return read_text(path).split()
    return []


def _read_number(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if len(words) == 1 and words[0].lstrip("-").isdigit() else None
