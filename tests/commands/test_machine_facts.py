"""Probes of a machine: made-up file systems and a stand-in for torch; what is broken is told, never raised."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from helpers.shards import write_index_of
from unet_trainer.commands import machine_facts
from unet_trainer.commands.machine_facts import (
    MAX_BYTES,
    CompileFacts,
    GpuFacts,
    TorchFacts,
    cpu_name,
    find_compiler,
    find_versions,
    inspect_machine,
    inspect_nvidia,
    inspect_torch,
    measure_reading,
    measure_writing,
    try_compiling,
)
from unet_trainer.shards import shard_store

GIB = 2**30


def raises(message, kind=RuntimeError):
    def call(*arguments, **named):
        raise kind(message)

    return call


def fake_torch(cuda="13.0", hip=None, has_mps=False, **calls):
    """A torch with one A100; `calls` replace functions of torch.cuda, and `ones`."""
    working = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda index: (8, 0),
        "get_device_name": lambda index: "NVIDIA A100",
        "mem_get_info": lambda index: (39 * GIB, 40 * GIB),
        "is_bf16_supported": lambda including_emulation: True,
        "init": lambda: None,
    }
    ones = calls.pop("ones", lambda size, device: SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 8.0)))
    return SimpleNamespace(
        __version__="2.12.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(**{**working, **calls}),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: has_mps)),
        ones=ones,
    )


def test_a_gpu_that_works():
    gpu = GpuFacts("NVIDIA A100", (8, 0), 40 * GIB, 39 * GIB, has_bfloat16=True, has_float16=True, has_tf32=True)
    assert inspect_torch(fake_torch()) == TorchFacts("2.12.0", "13.0", None, (gpu,))


@pytest.mark.parametrize(
    ("capability", "native"), [((5, 2), (False, False, False)), ((7, 5), (False, True, False)), ((9, 0), (True,) * 3)]
)
def test_formats_follow_the_compute_capability(capability, native):
    (gpu,) = inspect_torch(fake_torch(get_device_capability=lambda index: capability)).gpus
    assert (gpu.has_bfloat16, gpu.has_float16, gpu.has_tf32) == native


def test_an_amd_gpu_has_no_compute_capability():
    (gpu,) = inspect_torch(fake_torch(cuda=None, hip="7.1")).gpus
    assert (gpu.capability, gpu.has_bfloat16, gpu.has_float16, gpu.has_tf32) == (None, True, True, False)


def test_a_driver_that_is_too_old_is_told_in_the_words_of_torch():
    old = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
    facts = inspect_torch(fake_torch(is_available=lambda: False, init=raises(old)))
    assert (facts.gpus, facts.failure) == ((), "The NVIDIA driver on your system is too old (found version 11040).")


def test_a_warning_of_torch_is_kept_and_not_shown():
    def is_available():
        warnings.warn("CUDA initialization: unknown error", stacklevel=1)
        return False

    assert inspect_torch(fake_torch(is_available=is_available)).failure == "CUDA initialization: unknown error"


@pytest.mark.parametrize("broken", ["is_available", "device_count", "get_device_capability", "get_device_name"])
def test_a_call_that_raises_is_a_failure_and_not_a_crash(broken):
    facts = inspect_torch(fake_torch(**{broken: raises("CUDA error: unknown error")}))
    assert (facts.gpus, facts.failure) == ((), "CUDA error: unknown error")


@pytest.mark.parametrize("broken", ["mem_get_info", "ones"])
def test_a_gpu_that_cannot_compute_says_why(broken):
    (gpu,) = inspect_torch(fake_torch(**{broken: raises("no kernel image is available for execution on the device")})).gpus
    assert (gpu.name, gpu.failure) == ("NVIDIA A100", "no kernel image is available for execution on the device")


def test_a_torch_without_cuda():
    facts = inspect_torch(fake_torch(cuda=None, is_available=lambda: False, init=raises("not compiled", AssertionError)))
    assert facts == TorchFacts("2.12.0", None, None, ())
    assert inspect_torch(fake_torch(cuda=None, is_available=lambda: False, has_mps=True)).has_mps


# The operating system's view


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name on the path, and nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def make(text, code=0):
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin/nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return make


def test_a_machine_without_nvidia(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = inspect_nvidia(tmp_path)
    assert (facts.is_in_machine, facts.has_driver, facts.driver, facts.smi_failure, facts.visible_devices) == (
        False,
        False,
        None,
        "",
        None,
    )


def test_the_driver_is_read_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: gcc 12\n"
    )
    facts = inspect_nvidia(tmp_path)
    assert (facts.has_driver, facts.driver, facts.visible_devices) == (True, "535.129.03", "")


def test_a_gpu_among_the_pci_devices_is_seen_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x8086", "0x030000")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert inspect_nvidia(tmp_path).is_in_machine
    (tmp_path / "sys/bus/pci/devices/a/class").write_text("0x040300\n")  # the sound of a graphics card
    assert not inspect_nvidia(tmp_path).is_in_machine


def test_nvidia_smi_tells_the_driver_or_its_complaint(tmp_path, nvidia_smi):
    nvidia_smi("580.95.05")
    facts = inspect_nvidia(tmp_path)
    assert (facts.driver, facts.smi_failure, facts.has_driver) == ("580.95.05", "", True)


def test_a_complaint_of_nvidia_smi_is_kept(tmp_path, nvidia_smi):
    nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", code=18)
    facts = inspect_nvidia(tmp_path)
    assert (facts.driver, facts.smi_failure) == (None, "Failed to initialize NVML: Driver/library version mismatch")


def test_the_name_of_the_processor(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_name(tmp_path) == "Some CPU @ 3 GHz"
    assert cpu_name(tmp_path / "nowhere") != ""


# Compiling


def test_the_compiler_is_that_of_the_device_or_the_one_that_is_named(tmp_path, monkeypatch):
    for name in ("gcc", "g++", "mine"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    assert find_compiler("cuda").compiler == str(tmp_path / "gcc")
    assert find_compiler("cpu").compiler == str(tmp_path / "g++")
    monkeypatch.setenv("CXX", "mine")
    assert find_compiler("cpu").compiler == str(tmp_path / "mine")
    monkeypatch.setenv("CXX", "missing")
    assert find_compiler("cpu").compiler is None


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ('print("noise"); print(\'{"seconds": 2.5}\')', CompileFacts(True, "gcc", 2.5)),
        ('print(\'{"failure": "InductorError: no"}\')', CompileFacts(True, "gcc", None, "InductorError: no")),
        ("import os; os._exit(7)", CompileFacts(True, "gcc", None, "the process ended with code 7")),
        ("import time; time.sleep(60)", CompileFacts(True, "gcc", None, "a small function was not compiled in 1 s")),
    ],
    ids=["works", "fails", "dies", "hangs"],
)
def test_compiling_is_tried_in_a_process_of_its_own(child, expected, monkeypatch):
    monkeypatch.setattr(machine_facts, "CHILD_THAT_COMPILES", child)
    assert try_compiling(CompileFacts(True, "gcc"), "cpu", limit=1.0 if "sleep" in child else 60.0) == expected


def test_the_child_says_why_it_cannot_compile():
    """With a device that does not exist, so that no compiler runs."""
    command = [sys.executable, "-c", machine_facts.CHILD_THAT_COMPILES, "no-such-device"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith('{"failure": "RuntimeError: ')


# Disk and versions


def test_writing_is_measured_and_leaves_nothing(tmp_path):
    facts = measure_writing(tmp_path / "a/b")
    assert facts.write_speed > 0
    assert (facts.failure, list(tmp_path.iterdir())) == ("", [])
    (tmp_path / "mine").mkdir()
    measure_writing(tmp_path / "mine")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_full_disk_is_not_filled_further(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_facts, "free_disk", lambda folder: MAX_BYTES)
    assert measure_writing(tmp_path).write_speed is None


def test_a_folder_that_cannot_be_written_to_says_why(tmp_path):
    (tmp_path / "file").touch()
    assert measure_writing(tmp_path / "file").failure == "File exists"


def test_reading_counts_what_can_be_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"678")
    facts = measure_reading([tmp_path / "a", tmp_path / "missing", tmp_path / "b"])
    assert (facts.num_files, facts.num_bytes) == (2, 8)
    assert facts.seconds > 0
    assert measure_reading([]).num_files == 0


def test_versions_are_those_of_the_packages_that_are_installed(monkeypatch):
    assert {"torch", "numpy", "albumentations"} <= find_versions().keys()
    monkeypatch.setattr(machine_facts, "PACKAGES", ("numpy", "no-such-package"))
    assert list(find_versions()) == ["numpy"]


def test_this_machine_is_inspected(tmp_path):
    facts = inspect_machine(tmp_path)
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert 0 < facts.free_memory <= facts.total_memory
    assert facts.compiling.seconds is None


def test_compiling_is_tried_on_the_devices_that_it_is_wanted_on_alone(tmp_path, monkeypatch):
    done = CompileFacts(True, "g++", 3.0)
    monkeypatch.setattr(machine_facts, "try_compiling", lambda found, device: done)
    monkeypatch.setattr(machine_facts, "inspect_torch", lambda torch: TorchFacts("2.15.0", None, None, ()))
    said = []
    assert inspect_machine(tmp_path, ("cuda",), said.append).compiling.seconds is None
    assert said == []
    assert inspect_machine(tmp_path, ("cuda", "cpu"), said.append).compiling == done
    assert said == ["Compiling a small function, to see whether that works (at most 3 minutes) ..."]


def test_reading_is_measured_from_shards_too(tmp_path):
    index = write_index_of(tmp_path, a={"k": (b"x" * 1000, b"m")})
    shard_store.open_store(shard_store.ShardStore(str(tmp_path), index))
    found = measure_reading([tmp_path / "a.tar/k.png", tmp_path / "a.tar/gone.png"])
    assert (found.num_files, found.num_bytes) == (1, 1000)
