"""What this machine has: GPUs as torch and as the operating system see them, compilers, cores, memory, disk, versions.

Only looks; machine_report judges. Every probe returns what it could find: a broken driver is a finding, not a crash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet_trainer.shards.shard_store import find_member
from unet_trainer.shards.tar_files import ShardError
from unet_trainer.system.console import first_line
from unet_trainer.system.resources import ROOT, count_cores, free_disk, free_host_memory, memory_of_machine, total_host_memory

COMPILE_LIMIT = 180.0  # seconds
BLOCK_BYTES, MAX_BYTES, MAX_SECONDS = 4 << 20, 64 << 20, 3.0  # of the trials of the disk
MIN_FREE_TO_WRITE = 4 * MAX_BYTES
PACKAGES = (
    "torch", "segmentation-models-pytorch", "albumentations", "opencv-python-headless", "numpy", "timm",
    "albumentationsx", "opencv-python", "opencv-contrib-python", "opencv-contrib-python-headless",
)  # fmt: skip
CHILD_THAT_COMPILES = """
import json, sys, time, torch
started = time.perf_counter()
try:
    torch.compile(lambda values: (values.sin() * 2 + values).relu())(torch.ones(64, 64, device=sys.argv[1])).sum().item()
    print(json.dumps({"seconds": time.perf_counter() - started}))
except Exception as error:
    print(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
"""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as torch sees it."""

    name: str
    capability: tuple[int, int] | None  # of NVIDIA GPUs
    total_memory: int
    free_memory: int
    has_bfloat16: bool  # in hardware
    has_float16: bool
    has_tf32: bool
    failure: str = ""  # of a small calculation


@dataclass(frozen=True)
class TorchFacts:
    version: str
    cuda: str | None  # the version that it is built for; None: without CUDA
    hip: str | None  # likewise of ROCm
    gpus: Sequence[GpuFacts]
    has_mps: bool = False
    failure: str = ""  # why it finds no GPU, as it says itself


@dataclass(frozen=True)
class NvidiaFacts:
    """What the operating system shows of NVIDIA GPUs, whatever torch finds."""

    is_in_machine: bool  # among the PCI devices
    has_driver: bool  # its files are there
    driver: str | None  # version
    smi_failure: str  # what nvidia-smi complains about
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class CompileFacts:
    has_triton: bool
    compiler: str | None  # path
    seconds: float | None = None  # of compiling a small function; None: it failed or was not tried
    failure: str = ""


@dataclass(frozen=True)
class DiskFacts:
    folder: Path
    free: int  # bytes
    write_speed: float | None  # bytes a second; None: not measured
    failure: str = ""


@dataclass(frozen=True)
class MachineFacts:
    torch: TorchFacts
    nvidia: NvidiaFacts
    cpu_name: str
    compiling: CompileFacts
    num_cores: int  # that this process may use
    machine_cores: int
    load: float  # processes that want to run, on average over the last minute
    free_memory: int
    total_memory: int  # that this process may use
    machine_memory: int | None
    shm: int | None  # bytes of /dev/shm
    disk: DiskFacts
    python: str
    versions: Mapping[str, str]  # of the packages that are installed


def inspect_machine(
    checkpoint_dir: Path, compiles_on: Sequence[str] = (), say: Callable[[str], object] = lambda text: None
) -> MachineFacts:
    """Compiling is tried if the device that torch has is among `compiles_on` (cuda, cpu); `say` is told before."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this adds to it
    import torch

    torch_facts = inspect_torch(torch)
    device = "cuda" if any(not gpu.failure for gpu in torch_facts.gpus) else "cpu"
    compiling = find_compiler(device)
    if device in compiles_on:
        say(f"Compiling a small function, to see whether that works (at most {COMPILE_LIMIT / 60:.0f} minutes) ...")
        compiling = try_compiling(compiling, device)
    return MachineFacts(
        torch=torch_facts,
        nvidia=inspect_nvidia(),
        cpu_name=cpu_name(),
        compiling=compiling,
        num_cores=count_cores(),
        machine_cores=os.cpu_count() or 1,
        load=load,
        free_memory=free_host_memory(),
        total_memory=total_host_memory(),
        machine_memory=memory_of_machine(),
        shm=_size_of(Path("/dev/shm")),
        disk=measure_writing(checkpoint_dir),
        python=platform.python_version(),
        versions=find_versions(),
    )


def inspect_torch(torch: Any) -> TorchFacts:
    """`torch` is the module, or a stand-in for it."""
    cuda, hip = torch.version.cuda, torch.version.hip
    found, failure = _guarded(lambda: _gpus(torch, hip), [])
    if not found and not failure and (cuda or hip):
        _, failure = _guarded(torch.cuda.init, None)  # raises with the reason
    has_mps, _ = _guarded(torch.backends.mps.is_available, False)
    return TorchFacts(str(torch.__version__), cuda, hip, tuple(found), bool(has_mps), failure)


def _gpus(torch: Any, hip: str | None) -> list[GpuFacts]:
    if not torch.cuda.is_available():
        return []
    return [_inspect_gpu(torch, hip, index) for index in range(torch.cuda.device_count())]


def _inspect_gpu(torch: Any, hip: str | None, index: int) -> GpuFacts:
    capability = tuple(torch.cuda.get_device_capability(index))
    (free, total), failure = _guarded(lambda: torch.cuda.mem_get_info(index), (0, 0))
    if not failure:
        _, failure = _guarded(lambda: torch.ones(8, device=f"cuda:{index}").sum().item(), None)
    is_ampere = capability >= (8, 0)
    return GpuFacts(
        name=torch.cuda.get_device_name(index),
        capability=None if hip else (capability[0], capability[1]),
        total_memory=total,
        free_memory=free,
        has_bfloat16=_guarded(lambda: bool(torch.cuda.is_bf16_supported(including_emulation=False)), False)[0]
        if hip
        else is_ampere,
        has_float16=bool(hip) or capability >= (5, 3),
        has_tf32=not hip and is_ampere,
        failure=failure,
    )


def _guarded(call: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """The result and no failure; or `otherwise` and what was raised, or warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:  # a broken driver may raise anything; that is what is reported
            return otherwise, first_line(error)
    if warned and not result:
        return result, str(warned[0].message).splitlines()[0]
    return result, ""


def inspect_nvidia(root: Path = ROOT) -> NvidiaFacts:
    version_file = root / "proc/driver/nvidia/version"
    text = _read(version_file)
    driver, smi_failure = _ask_nvidia_smi()
    named = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return NvidiaFacts(
        is_in_machine=any(
            _read(device / "vendor").strip() == "0x10de" and _read(device / "class").startswith("0x03")
            for device in (root / "sys/bus/pci/devices").glob("*")
        ),
        has_driver=version_file.exists() or (root / "dev/nvidia0").exists() or driver is not None,
        driver=driver or (named.group(1) if named else None),
        smi_failure=smi_failure,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _ask_nvidia_smi() -> tuple[str | None, str]:
    """The version of the driver, or what nvidia-smi complains about; neither where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, first_line(error)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
    return (lines[0], "") if done.returncode == 0 and lines[0][:1].isdigit() else (None, lines[0])


def cpu_name(root: Path = ROOT) -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def find_compiler(device: str) -> CompileFacts:
    """What compiling needs: on CUDA triton and a C compiler, on a CPU a C++ compiler."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if device == "cuda" else ("CXX", ("g++", "clang++", "c++"))
    chosen = os.environ.get(variable)
    places = [shutil.which(name) for name in ([chosen] if chosen else names)]
    return CompileFacts(importlib.util.find_spec("triton") is not None, next(filter(None, places), None))


def try_compiling(found: CompileFacts, device: str, limit: float = COMPILE_LIMIT) -> CompileFacts:
    """Compiles a small function in a process of its own, without what was compiled before."""
    with tempfile.TemporaryDirectory(prefix="doctor", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # without helpers that outlive the child
        }
        command = [sys.executable, "-c", CHILD_THAT_COMPILES, device]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment, errors="replace", check=False
            )
        except subprocess.TimeoutExpired:
            return CompileFacts(found.has_triton, found.compiler, None, f"a small function was not compiled in {limit:.0f} s")
        except OSError as error:
            return CompileFacts(found.has_triton, found.compiler, None, first_line(error))
    answer: dict[str, Any] = {"failure": f"the process ended with code {done.returncode}"}
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(done.stdout.splitlines()[-1])
    return CompileFacts(found.has_triton, found.compiler, answer.get("seconds"), str(answer.get("failure", "")))


def measure_writing(folder: Path) -> DiskFacts:
    """Writes a file of at most MAX_BYTES into the folder and deletes it again, and the folder too if it was not there."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    free, speed, failure = free_disk(folder), None, ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if free >= MIN_FREE_TO_WRITE:
            speed = _write_speed(folder)
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        failure = error.strerror or str(error)
    for place in made:
        with contextlib.suppress(OSError):
            place.rmdir()
    return DiskFacts(folder, free, speed, failure)


def _write_speed(folder: Path) -> float:
    block = os.urandom(BLOCK_BYTES)  # that no file system compresses
    written = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        while written < MAX_BYTES and time.perf_counter() - started < MAX_SECONDS:
            written += file.write(block)
        os.fsync(file.fileno())
        return written / (time.perf_counter() - started)


@dataclass(frozen=True)
class ReadingFacts:
    num_files: int
    num_bytes: int
    seconds: float


def measure_reading(files: Sequence[Path]) -> ReadingFacts:
    """Reads files from the disk, where the system can be asked to forget what it has in memory of them, or from shards."""
    num_files = num_bytes = 0
    seconds = 0.0
    for path in files:
        with contextlib.suppress(OSError, ShardError):
            length, taken = _timed_read(path)
            num_files, num_bytes, seconds = num_files + 1, num_bytes + length, seconds + taken
        if num_bytes >= MAX_BYTES or seconds >= MAX_SECONDS:
            break
    return ReadingFacts(num_files, num_bytes, seconds)


def _timed_read(path: Path) -> tuple[int, float]:
    """Bytes and seconds. Raises OSError or ShardError."""
    if (stored := find_member(path)) is not None:
        started = time.perf_counter()
        return len(stored.read()), time.perf_counter() - started
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        return len(file.read(MAX_BYTES)), time.perf_counter() - started


def find_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _size_of(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
