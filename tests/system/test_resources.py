"""Cores and memory of a container are those of its cgroup, in made-up file systems of both versions."""

import os

import pytest

from unet_trainer.system import resources
from unet_trainer.system.resources import count_cores, free_host_memory, total_host_memory

GIB = 2**30
HOST = {
    "proc/meminfo": "MemTotal:  67108864 kB\nMemFree:  1048576 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"
}
V2, V1_CPU, V1_MEMORY = "sys/fs/cgroup", "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory"
UNLIMITED = 9223372036854771712  # what the kernel writes in v1 where there is no limit


@pytest.fixture
def make_root(tmp_path, monkeypatch):
    """Writes files of a host with 64 GiB, 32 GiB of them available."""
    monkeypatch.setattr(resources, "ROOT", tmp_path)

    def make(files, host=HOST):
        for name, content in {**host, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    return make


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def group(names, **files):
    """The files of a machine whose process is in this cgroup."""
    return {"proc/self/cgroup": names, **files}


def quota_v1(folder, quota, period=100000):
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


def memory_v1(folder, limit, usage):
    return {f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": usage}


def memory_v2(folder, limit, usage):
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        # A container sees its own group as the root.
        *(
            (group("0::/", **{f"{V2}/cpu.max": quota}), cores)
            for quota, cores in (("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("3200000 100000", 8))
        ),
        *(
            (group("4:memory:/\n3:cpu,cpuacct:/\n1:name=systemd:/", **quota_v1(V1_CPU, quota, period)), cores)
            for quota, period, cores in ((-1, 100000, 8), (150000, 100000, 2), (200000, 0, 8))
        ),
        (group("0::/a/b", **{f"{V2}/a/b/cpu.max": "max 100000", f"{V2}/a/cpu.max": "300000 100000"}), 3),
        (group("0::/mine", **{f"{V2}/mine/cpu.max": "max 100000", f"{V2}/other/cpu.max": "100000 100000"}), 8),
        (group("3:cpu,cpuacct:/docker/0123abcd", **quota_v1(V1_CPU, 300000)), 3),  # the path on the host
    ],
    ids=str,
)
def test_the_smallest_quota_of_the_groups_limits_the_cores(files, cores, make_root):
    make_root(files)
    assert count_cores() == cores


# Other groups in the outer one use 8 GiB.
NESTED = group("0::/a/b", **memory_v2(f"{V2}/a/b", 8 * GIB, GIB), **memory_v2(f"{V2}/a", 10 * GIB, 9 * GIB))
# What can be dropped of it is free.
PAGE_CACHE = f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {4 * GIB}"
# Each controller of v1 has its own group.
BOTH_VERSIONS = group("3:cpu,cpuacct:/other\n2:memory:/job\n0::/job", **memory_v1(f"{V1_MEMORY}/job", 4 * GIB, GIB))
BOTH_VERSIONS |= memory_v1(f"{V1_MEMORY}/other", GIB, GIB)


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({}, 32, 64),
        (group("0::/", **memory_v2(V2, 8 * GIB, 3 * GIB)), 5, 8),
        (group("0::/", **memory_v2(V2, "max", 40 * GIB)), 32, 64),
        (group("4:memory:/", **memory_v1(V1_MEMORY, UNLIMITED, 40 * GIB)), 32, 64),
        (group("4:memory:/docker/0123abcd", **memory_v1(V1_MEMORY, 4 * GIB, GIB)), 3, 4),
        (NESTED, 1, 8),
        (group("0::/", **memory_v2(V2, 8 * GIB, 7 * GIB), **{f"{V2}/memory.stat": PAGE_CACHE}), 5, 8),
        (BOTH_VERSIONS, 3, 4),
    ],
)
def test_the_tightest_limit_of_the_groups_limits_the_memory(files, free, total, make_root):
    make_root(files)
    assert (free_host_memory(), total_host_memory()) == (free * GIB, total * GIB)
