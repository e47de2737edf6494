"""Cores and memory of a container are those of its cgroup, in made-up file systems of both versions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from unet_trainer.system import resources
from unet_trainer.system.resources import count_cores, free_disk, free_host_memory, memory_of_machine, total_host_memory

GIB = 2**30
V1_UNLIMITED = 9223372036854771712  # what the kernel writes where there is no limit
HOST = {
    "proc/meminfo": "MemTotal:       67108864 kB\nMemFree:        1048576 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"
}
V2, V1_CPU, V1_MEMORY = "sys/fs/cgroup", "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory"


@pytest.fixture
def make_root(tmp_path):
    """Writes files of a host with 64 GiB, 32 GiB of them available; returns the root folder."""

    def make(files, host=HOST):
        for name, content in {**host, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


# Cores


def test_cores_without_a_cgroup_are_those_of_the_affinity(make_root):
    assert count_cores(make_root({})) == 8


def test_cores_where_there_is_no_affinity_are_those_of_the_host(make_root, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert count_cores(make_root({})) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores(make_root({})) == 1


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),  # 1.5
        ("50000 100000", 1),  # 0.5
        ("1000 100000", 1),
        ("100000 50000", 2),
        ("3200000 100000", 8),  # a quota of 32 on 8 cores
        ("", 8),
    ],
)
def test_quota_of_v2_limits_the_cores(cpu_max, cores, make_root):
    """As in a container, which sees its own group as the root."""
    assert count_cores(make_root({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": cpu_max})) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [(-1, 100000, 8), (200000, 100000, 2), (150000, 100000, 2), (50000, 100000, 1), (100000, 50000, 2), (200000, 0, 8)],
)
def test_quota_of_v1_limits_the_cores(quota, period, cores, make_root):
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n1:name=systemd:/",
        f"{V1_CPU}/cpu.cfs_quota_us": quota,
        f"{V1_CPU}/cpu.cfs_period_us": period,
    }
    assert count_cores(make_root(files)) == cores


def test_the_smallest_quota_of_nested_v2_groups_counts(make_root):
    files = {
        "proc/self/cgroup": "0::/user.slice/job.scope",
        f"{V2}/user.slice/job.scope/cpu.max": "max 100000",
        f"{V2}/user.slice/cpu.max": "300000 100000",
    }
    assert count_cores(make_root(files)) == 3
    assert count_cores(make_root({f"{V2}/user.slice/job.scope/cpu.max": "200000 100000"})) == 2
    assert count_cores(make_root({f"{V2}/user.slice/job.scope/cpu.max": "500000 100000"})) == 3


def test_groups_of_other_processes_do_not_count(make_root):
    files = {
        "proc/self/cgroup": "0::/mine",
        f"{V2}/mine/cpu.max": "max 100000",
        f"{V2}/other/cpu.max": "100000 100000",
        f"{V2}/other/memory.max": GIB,
        f"{V2}/other/memory.current": 0,
    }
    root = make_root(files)
    assert (count_cores(root), total_host_memory(root)) == (8, 64 * GIB)


def test_each_v1_controller_has_its_own_group(make_root):
    files = {
        "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/b\n2:cpuset:/c\n1:name=systemd:/d",
        f"{V1_MEMORY}/a/memory.limit_in_bytes": 4 * GIB,
        f"{V1_MEMORY}/a/memory.usage_in_bytes": 0,
        f"{V1_CPU}/b/cpu.cfs_quota_us": 300000,
        f"{V1_CPU}/b/cpu.cfs_period_us": 100000,
    }
    for other in "bcd":
        files |= {f"{V1_MEMORY}/{other}/memory.limit_in_bytes": GIB, f"{V1_MEMORY}/{other}/memory.usage_in_bytes": 0}
    for other in "acd":
        files |= {f"{V1_CPU}/{other}/cpu.cfs_quota_us": 100000, f"{V1_CPU}/{other}/cpu.cfs_period_us": 100000}
    root = make_root(files)
    assert (count_cores(root), total_host_memory(root)) == (3, 4 * GIB)


def test_v1_container_whose_mount_shows_its_own_group_as_the_root(make_root):
    """/proc/self/cgroup has the path on the host, which does not exist inside."""
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123abcd\n3:cpu,cpuacct:/docker/0123abcd",
        f"{V1_CPU}/cpu.cfs_quota_us": 300000,
        f"{V1_CPU}/cpu.cfs_period_us": 100000,
        f"{V1_MEMORY}/memory.limit_in_bytes": 4 * GIB,
        f"{V1_MEMORY}/memory.usage_in_bytes": GIB,
    }
    root = make_root(files)
    assert (count_cores(root), total_host_memory(root), free_host_memory(root)) == (3, 4 * GIB, 3 * GIB)


# Memory


def test_memory_without_a_cgroup_is_that_of_the_host(make_root):
    root = make_root({})
    assert (free_host_memory(root), total_host_memory(root)) == (32 * GIB, 64 * GIB)


def test_limit_of_v2_counts_less_what_is_used(make_root):
    files = {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.current": 3 * GIB}
    root = make_root(files)
    assert (free_host_memory(root), total_host_memory(root)) == (5 * GIB, 8 * GIB)


def test_v2_without_a_limit_is_the_host(make_root):
    root = make_root({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": 40 * GIB})
    assert (free_host_memory(root), total_host_memory(root)) == (32 * GIB, 64 * GIB)


def test_v1_without_a_limit_is_the_host(make_root):
    files = {
        "proc/self/cgroup": "4:memory:/",
        f"{V1_MEMORY}/memory.limit_in_bytes": V1_UNLIMITED,
        f"{V1_MEMORY}/memory.usage_in_bytes": 40 * GIB,
    }
    root = make_root(files)
    assert (free_host_memory(root), total_host_memory(root)) == (32 * GIB, 64 * GIB)


def test_a_limit_above_the_host_is_the_host(make_root):
    root = make_root({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 500 * GIB, f"{V2}/memory.current": GIB})
    assert (free_host_memory(root), total_host_memory(root)) == (32 * GIB, 64 * GIB)


def test_the_tightest_of_nested_v2_groups_counts(make_root):
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        f"{V2}/outer/inner/memory.max": 8 * GIB,
        f"{V2}/outer/inner/memory.current": GIB,
        f"{V2}/outer/memory.max": 10 * GIB,
        f"{V2}/outer/memory.current": 9 * GIB,  # other groups in it use 8
    }
    root = make_root(files)
    assert (free_host_memory(root), total_host_memory(root)) == (GIB, 8 * GIB)


def test_page_cache_that_can_be_dropped_is_free(make_root):
    files = {
        "proc/self/cgroup": "0::/",
        f"{V2}/memory.max": 8 * GIB,
        f"{V2}/memory.current": 7 * GIB,
        f"{V2}/memory.stat": f"anon {2 * GIB}\nfile {5 * GIB}\nactive_file {GIB}\ninactive_file {4 * GIB}",
    }
    assert free_host_memory(make_root(files)) == 5 * GIB


def test_page_cache_of_v1_groups_counts_with_that_of_the_groups_below(make_root):
    """usage_in_bytes has all of them; inactive_file is of the group alone."""
    files = {
        "proc/self/cgroup": "4:memory:/outer/inner",
        f"{V1_MEMORY}/outer/memory.limit_in_bytes": 8 * GIB,
        f"{V1_MEMORY}/outer/memory.usage_in_bytes": 7 * GIB,
        f"{V1_MEMORY}/outer/memory.stat": f"cache 0\ninactive_file 0\nhierarchical_memory_limit {8 * GIB}\ntotal_inactive_file {4 * GIB}",
    }
    assert free_host_memory(make_root(files)) == 5 * GIB


def test_a_group_that_is_full_leaves_nothing(make_root):
    root = make_root({"proc/self/cgroup": "0::/", f"{V2}/memory.max": GIB, f"{V2}/memory.current": GIB + 4096})
    assert free_host_memory(root) == 0


def test_hybrid_of_both_versions_takes_the_limits_where_they_are(make_root):
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job\n0::/job",
        f"{V1_CPU}/job/cpu.cfs_quota_us": 200000,
        f"{V1_CPU}/job/cpu.cfs_period_us": 100000,
        f"{V1_MEMORY}/job/memory.limit_in_bytes": 4 * GIB,
        f"{V1_MEMORY}/job/memory.usage_in_bytes": GIB,
    }
    root = make_root(files)
    assert (count_cores(root), free_host_memory(root)) == (2, 3 * GIB)


def test_memory_where_the_system_has_no_meminfo_is_a_guess(make_root, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 4 * GIB // 4096, "SC_PAGE_SIZE": 4096}.get)
    root = make_root({}, host={})
    assert (free_host_memory(root), total_host_memory(root)) == (2 * GIB, 8 * GIB)
    monkeypatch.delattr(os, "sysconf")
    assert free_host_memory(root) == 4 * GIB


def test_this_system_has_cores_and_memory():
    assert 1 <= count_cores() <= 8
    assert 0 < free_host_memory() <= total_host_memory()


def test_the_root_can_be_replaced_for_code_that_does_not_pass_one(make_root, monkeypatch):
    files = {"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "200000 100000", f"{V2}/memory.max": GIB, f"{V2}/memory.current": 0}
    monkeypatch.setattr(resources, "ROOT", make_root(files))
    assert (count_cores(), total_host_memory(), free_host_memory()) == (2, GIB, GIB)


# Disk


def test_free_disk_is_that_of_the_folder_or_of_its_nearest_parent_that_exists(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or shutil._ntuple_diskusage(30, 20, 10))
    assert free_disk(tmp_path) == 10
    assert free_disk(tmp_path / "runs" / "mine") == 10
    assert asked == [tmp_path, tmp_path]


def test_free_disk_of_this_system_is_a_number():
    assert free_disk(Path("no/such/folder")) > 0


def test_the_machine_shows_its_memory_whatever_a_container_may_use(make_root, tmp_path):
    root = make_root({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": GIB})
    assert total_host_memory(root) == 4 * GIB
    assert memory_of_machine(root) == 64 * GIB
    assert memory_of_machine(tmp_path / "elsewhere") is None
