"""Facts of made-up machines → what is told of them, and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from unet_trainer.commands.machine_facts import (
    CompileFacts,
    DiskFacts,
    GpuFacts,
    MachineFacts,
    NvidiaFacts,
    ReadingFacts,
    TorchFacts,
)
from unet_trainer.commands.machine_report import disk_finding, machine_findings, reading_finding, version_findings

GIB = 2**30
H100 = GpuFacts("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB, has_bfloat16=True, has_float16=True, has_tf32=True)
T4 = dataclasses.replace(H100, name="Tesla T4", capability=(7, 5), has_bfloat16=False, has_tf32=False)
K80 = dataclasses.replace(T4, name="Tesla K80", capability=(3, 7), has_float16=False)
NO_NVIDIA = NvidiaFacts(is_in_machine=False, has_driver=False, driver=None, smi_failure="", visible_devices=None)
DRIVER = NvidiaFacts(is_in_machine=True, has_driver=True, driver="580.95.05", smi_failure="", visible_devices=None)
WITHOUT_GPU = MachineFacts(
    torch=TorchFacts("2.12.0", "13.0", None, ()),
    nvidia=NO_NVIDIA,
    cpu_name="Some CPU",
    compiling=CompileFacts(True, "/usr/bin/g++", 3.0),
    num_cores=8,
    machine_cores=8,
    load=0.0,
    free_memory=30 * GIB,
    total_memory=32 * GIB,
    machine_memory=32 * GIB,
    shm=16 * GIB,
    disk=DiskFacts(Path("checkpoints"), 100 * GIB, 500e6),
    python="3.12.1",
    versions={"torch": "2.12.0", "albumentations": "2.0.8", "opencv-python-headless": "4.12.0"},
)
WITH_GPU = dataclasses.replace(WITHOUT_GPU, torch=TorchFacts("2.12.0", "13.0", None, (H100,)), nvidia=DRIVER)


def finding(title, facts=WITHOUT_GPU, wants_gpu=True, **changes):
    (found,) = [one for one in machine_findings(dataclasses.replace(facts, **changes), wants_gpu) if one.title == title]
    return found


def titles(facts, **changes):
    return [(one.level, one.title) for one in machine_findings(dataclasses.replace(facts, **changes))]


def gpu_of(**changes):
    return TorchFacts("2.12.0", "13.0", None, (dataclasses.replace(H100, **changes),))


def test_a_good_machine_has_no_warnings():
    names = ["GPU", "Driver", "Precision", "Compiling", "Cores", "Memory", "Disk", "Versions"]
    assert titles(WITH_GPU) == [("ok", name) for name in names]
    assert finding("GPU", WITH_GPU).detail == "NVIDIA H100, compute capability 9.0; 80.0 GiB, 79.0 GiB free"
    assert finding("Driver", WITH_GPU).detail == "driver 580.95.05, torch 2.12.0 for CUDA 13.0"
    assert finding("Precision", WITH_GPU).detail == "in hardware: bfloat16, float16, TF32"


def test_no_gpu_is_not_a_problem():
    assert titles(WITHOUT_GPU) == [("ok", name) for name in ("GPU", "Compiling", "Cores", "Memory", "Disk", "Versions")]
    assert finding("GPU").detail.startswith("none: training runs on the CPU (Some CPU, 8 cores)")
    apple = TorchFacts("2.12.0", None, None, (), has_mps=True)
    assert finding("GPU", torch=apple).detail == "Apple GPU (mps), torch 2.12.0"


@pytest.mark.parametrize(
    ("gpu", "detail"),
    [
        (T4, "in hardware: float16; not: bfloat16, TF32; mixed precision is float16 with loss scaling"),
        (K80, "in hardware: float32 only; not: bfloat16, float16, TF32; no mixed precision"),
    ],
    ids=["Turing", "Kepler"],
)
def test_formats_that_a_gpu_lacks_are_named(gpu, detail):
    assert finding("Precision", WITH_GPU, torch=TorchFacts("2.12.0", "13.0", None, (gpu,))).detail == detail


def test_memory_that_others_use_is_a_warning():
    assert finding("GPU in use", WITH_GPU, torch=gpu_of(free_memory=20 * GIB)).detail == (
        "other processes use about 59.3 GiB of its memory, and perhaps of its time"
    )
    assert ("warning", "GPU in use") not in titles(WITH_GPU, torch=gpu_of(free_memory=int(78.5 * GIB)))


def test_a_gpu_that_cannot_compute_is_a_problem_unless_the_cpu_is_asked_for():
    broken = gpu_of(failure="no kernel image is available")
    found = finding("GPU", WITH_GPU, torch=broken)
    assert (found.level, found.detail) == (
        "problem",
        "NVIDIA H100, compute capability 9.0 cannot compute with torch 2.12.0: no kernel image is available",
    )
    assert finding("GPU", WITH_GPU, wants_gpu=False, torch=broken).level == "warning"


CPU_BUILD = TorchFacts("2.12.0+cpu", None, None, ())
TOO_OLD = TorchFacts("2.12.0", "13.0", None, (), failure="The NVIDIA driver on your system is too old")
BROKEN = TorchFacts("2.12.0", "13.0", None, (), failure="CUDA unknown error")


@pytest.mark.parametrize(
    ("torch", "nvidia", "level", "detail", "fix"),
    [
        (
            CPU_BUILD,
            DRIVER,
            "problem",
            "there is an NVIDIA GPU, and torch 2.12.0+cpu is built without CUDA: training would run on the CPU",
            "install a torch with CUDA: https://pytorch.org/get-started/locally",
        ),
        (
            TOO_OLD,
            dataclasses.replace(DRIVER, driver="535.129.03"),
            "problem",
            "driver 535.129.03 is too old for torch 2.12.0: CUDA 13.0 needs 580 or newer (The NVIDIA driver on your system is too old)",
            "install a newer driver (https://www.nvidia.com/drivers), or a torch for an older CUDA (https://pytorch.org/get-started/locally)",
        ),
        (
            BROKEN,
            DRIVER,
            "problem",
            "there is an NVIDIA GPU with driver 580.95.05, and torch 2.12.0 (CUDA 13.0) cannot use it (CUDA unknown error)",
            "if nvidia-smi does not list it: restart, or install the driver again; in a container: start it with --gpus all",
        ),
        (
            BROKEN,
            dataclasses.replace(DRIVER, driver=None, smi_failure="Driver/library version mismatch"),
            "problem",
            "the driver was updated and is not loaded yet (nvidia-smi: Driver/library version mismatch)",
            "restart the machine",
        ),
        (
            BROKEN,
            dataclasses.replace(DRIVER, visible_devices="-1"),
            "warning",
            "hidden by CUDA_VISIBLE_DEVICES='-1': training would run on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            BROKEN,
            dataclasses.replace(DRIVER, has_driver=False, driver=None),
            "warning",
            "there is an NVIDIA GPU in this machine, and no driver for it can be reached (CUDA unknown error): training runs on the CPU",
            "install the driver (https://www.nvidia.com/drivers); in a container: start it with --gpus all",
        ),
    ],
    ids=["CPU build", "old driver", "broken driver", "mismatch", "hidden", "no driver"],
)
def test_a_gpu_that_torch_does_not_find_is_explained_with_what_to_do(torch, nvidia, level, detail, fix):
    found = finding("GPU", torch=torch, nvidia=nvidia)
    assert (found.level, found.detail, found.fix) == (level, detail, fix)


@pytest.mark.parametrize(
    ("facts", "compiling", "level", "detail", "fix"),
    [
        (WITH_GPU, CompileFacts(True, "gcc", 9.6), "ok", "works (a small function took 10 s)", ""),
        (
            WITH_GPU,
            CompileFacts(False, "gcc", None, "no triton"),
            "warning",
            "does not work: triton is not installed; training goes on uncompiled, slower",
            "python -m pip install triton",
        ),
        (
            WITH_GPU,
            CompileFacts(True, None),
            "warning",
            "cannot work: there is no C compiler; training goes on uncompiled, slower",
            "install one, e.g. apt install gcc, or name it in CC",
        ),
        (
            WITH_GPU,
            CompileFacts(True, "gcc", None, "fatal error: Python.h: No such file"),
            "warning",
            "does not work: Python's header files are missing (Python.h); training goes on uncompiled, slower",
            "install them, e.g. apt install python3-dev",
        ),
        (
            WITH_GPU,
            CompileFacts(True, "gcc", None, "InductorError: no\nmore"),
            "warning",
            "does not work: InductorError: no; training goes on uncompiled, slower",
            "",
        ),
        (
            WITHOUT_GPU,
            CompileFacts(True, None, None, "InvalidCxxCompiler"),
            "ok",
            "does not work: there is no C++ compiler; nothing is lost: compiling pays on GPUs",
            "",
        ),
        (WITHOUT_GPU, CompileFacts(True, "g++"), "ok", "not tried (it pays on GPUs and is left off here); g++ is there", ""),
        (WITH_GPU, CompileFacts(True, "gcc"), "ok", "not tried (--fast, or compile_model is off); gcc is there", ""),
    ],
)
def test_compiling_says_what_is_missing(facts, compiling, level, detail, fix):
    found = finding("Compiling", facts, compiling=compiling)
    assert (found.level, found.detail, found.fix) == (level, detail, fix)


def test_cores_and_memory_are_those_of_the_container():
    found = finding("Cores", num_cores=2, machine_cores=64)
    assert (found.level, found.detail) == (
        "ok",
        "2 cores of the 64 that the machine shows (a container or an affinity limits them)",
    )
    assert finding("Memory", total_memory=4 * GIB, free_memory=3 * GIB, machine_memory=256 * GIB).detail == (
        "3.0 of 4.0 GiB free (the machine shows 256 GiB; a container limits it)"
    )
    assert finding("Memory", machine_memory=None).detail == "30.0 of 32.0 GiB free"
    assert finding("Memory", free_memory=GIB).level == "warning"


def test_few_cores_beside_a_gpu_and_a_busy_machine_are_warnings():
    assert finding("Cores", WITH_GPU, num_cores=2).level == "warning"
    busy = finding("Cores", load=7.0)
    assert (busy.level, busy.detail) == ("warning", "8 cores; other programs keep 7.0 of 8 busy")
    assert finding("Cores", load=2.0).level == "ok"


def test_shared_memory_is_named_only_if_it_is_tiny():
    assert finding("/dev/shm", shm=64 * 2**20).detail == "64 MiB, which is enough: batches do not lie there"
    for size in (None, 16 * GIB):
        assert "/dev/shm" not in [title for _, title in titles(WITHOUT_GPU, shm=size)]


@pytest.mark.parametrize(
    ("disk", "level", "detail"),
    [
        (DiskFacts(Path("a"), 100 * GIB, 500e6), "ok", "a: 100.0 GiB free, writes 500 MB/s"),
        (DiskFacts(Path("a"), 3 * GIB, 500e6), "warning", "a: 3.0 GiB free, writes 500 MB/s"),
        (DiskFacts(Path("a"), GIB // 4, None), "problem", "a: 0.2 GiB free"),
        (DiskFacts(Path("a"), 100 * GIB, 5e6), "warning", "a: 100.0 GiB free, writes 5 MB/s: slow"),
        (DiskFacts(Path("a"), 100 * GIB, None, "Permission denied"), "problem", "a cannot be written to (Permission denied)"),
    ],
)
def test_the_disk_has_room_and_is_fast_enough(disk, level, detail):
    found = disk_finding(disk)
    assert (found.level, found.detail) == (level, detail)


def test_slow_reading_is_a_warning_with_a_way_out():
    assert reading_finding(ReadingFacts(16, 8_000_000, 0.01)).detail == "16 files of 8.0 MB in 10 ms (800 MB/s)"
    slow = reading_finding(ReadingFacts(16, 8_000_000, 2.0))
    assert (slow.level, slow.fix) == ("warning", "copy the data to a local disk, or cache: ram, which reads each file once")
    assert reading_finding(ReadingFacts(0, 0, 0.0)).level == "ok"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.10.0+cu130", "albumentations": "2.0.8"}, []),
        ({"torch": "2.9.1"}, [("problem", "torch")]),
        ({"torch": "1.13.0"}, [("problem", "torch")]),
        ({"albumentations": "1.4.0"}, [("warning", "albumentations")]),
        ({"albumentationsx": "2.1.0"}, [("warning", "albumentationsx")]),
        ({"opencv-python": "4.1", "opencv-python-headless": "4.2"}, [("warning", "opencv")]),
    ],
    ids=str,
)
def test_versions_known_to_be_bad_are_named(versions, expected):
    found = version_findings("3.12.1", versions)
    assert found[0].detail.startswith("Python 3.12.1, ")
    assert [(one.level, one.title) for one in found[1:]] == expected
    assert all(one.fix.startswith("python -m pip ") for one in found[1:])
