"""What this machine can do for training, what is in the way, and what to do about it: GPU, compiler, cores, memory, disk, versions.

Every probe returns what it could find: a broken driver is a finding, not a crash.
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
from pathlib import Path
from typing import Any

from unet_trainer.images.file_bytes import ShardError, find_member
from unet_trainer.system.console import Finding, Level, counted, first_line
from unet_trainer.system.input_files import open_file, read_text
from unet_trainer.system.resources import ROOT, count_cores, free_disk, free_host_memory, memory_of_machine, total_host_memory

GIB = 2**30
COMPILE_LIMIT = 180.0  # seconds
BLOCK_BYTES, MAX_BYTES, MAX_SECONDS = 4 << 20, 64 << 20, 3.0  # of the trials of the disk
OWN_MEMORY = 0.7 * GIB  # of a GPU, that a process takes by being there
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # for a version of CUDA
OLDEST_TORCH = (2, 10)
ALBUMENTATIONS = "2.0.8"
SLOW = 20e6  # bytes a second, of a disk
PACKAGES = (
    "torch", "segmentation-models-pytorch", "albumentations", "opencv-python-headless", "numpy", "timm",
    "albumentationsx", "opencv-python", "opencv-contrib-python", "opencv-contrib-python-headless",
)  # fmt: skip
DRIVER_PAGE = "https://www.nvidia.com/drivers"
INSTALL_PAGE = "https://pytorch.org/get-started/locally"
CHILD_THAT_COMPILES = """
import json, sys, time, torch
started = time.perf_counter()
try:
    torch.compile(lambda values: (values.sin() * 2 + values).relu())(torch.ones(64, 64, device=sys.argv[1])).sum().item()
    print(json.dumps({"seconds": time.perf_counter() - started}))
except Exception as error:
    print(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
"""


def machine_findings(
    checkpoint_dir: Path, wants_gpu: bool, compiles_on: Sequence[str], say: Callable[[str], object]
) -> list[Finding]:
    """`wants_gpu`: a GPU that cannot be used is a problem; else the config says device: cpu.

    Compiling is tried if the device that torch has is among `compiles_on` (cuda, cpu); `say` is told before.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this adds to it
    import torch

    found = device_findings(torch, "problem" if wants_gpu else "warning")
    device = "cuda" if any(finding.title == "Precision" for finding in found) else "cpu"
    if device in compiles_on:
        say(f"Compiling a small function, to see whether that works (at most {COMPILE_LIMIT / 60:.0f} minutes) ...")
    return [
        *found,
        compile_finding(device, try_compiling(device) if device in compiles_on else {}),
        cores_finding(load, has_gpu=device == "cuda"),
        memory_finding(),
        disk_finding(checkpoint_dir),
        *version_findings(installed_versions()),
    ]


def device_findings(torch: Any, level: Level) -> list[Finding]:
    """`torch` is the module, or a stand-in for it; `level` that of a GPU that cannot be used."""

    def inspect_all() -> list[Finding]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [finding for index in range(count) for finding in gpu_findings(torch, index, level)]

    found, failure = guarded(inspect_all, [])
    if found:
        return list(found)
    if guarded(torch.backends.mps.is_available, False)[0]:
        return [Finding("ok", "GPU", f"Apple GPU (mps), torch {torch.__version__}")]
    if not failure and (torch.version.cuda or torch.version.hip):
        _, failure = guarded(torch.cuda.init, None)  # raises with the reason
    return [no_gpu_finding(str(torch.__version__), torch.version.cuda, failure, level)]


def guarded(call: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """The result and no failure; or `otherwise` and what was raised, or warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:  # a broken driver may raise anything; that is what is reported
            return otherwise, first_line(error)
    return result, str(warned[0].message).splitlines()[0] if warned and not result else ""


def gpu_findings(torch: Any, index: int, level: Level) -> list[Finding]:
    """Of one GPU that torch finds: a small calculation, its memory and its number formats."""
    hip = torch.version.hip
    capability = tuple(torch.cuda.get_device_capability(index))
    name = torch.cuda.get_device_name(index) + ("" if hip else f", compute capability {capability[0]}.{capability[1]}")
    (free, total), failure = guarded(lambda: torch.cuda.mem_get_info(index), (0, 0))
    if not failure:
        _, failure = guarded(lambda: torch.ones(8, device=f"cuda:{index}").sum().item(), None)
    if failure:
        fix = f"this torch may not be built for it: {INSTALL_PAGE} has builds for older and newer GPUs; or device: cpu"
        return [Finding(level, "GPU", f"{name} cannot compute with torch {torch.__version__}: {failure}", fix)]
    findings = [Finding("ok", "GPU", f"{name}; {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free")]
    if (used := total - free - OWN_MEMORY) > GIB:
        detail = f"other processes use about {used / GIB:.1f} GiB of its memory, and perhaps of its time"
        findings.append(Finding("warning", "GPU in use", detail, "nvidia-smi lists them; end them, or use another GPU"))
    driver = inspect_nvidia()["driver"]
    build = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}"
    findings.append(Finding("ok", "Driver", f"{f'driver {driver}, ' if driver else ''}torch {torch.__version__} for {build}"))
    is_ampere = not hip and capability >= (8, 0)
    rocm_bfloat16 = hip and guarded(lambda: bool(torch.cuda.is_bf16_supported(including_emulation=False)), False)[0]
    has = {"bfloat16": is_ampere or rocm_bfloat16, "float16": bool(hip) or capability >= (5, 3), "TF32": is_ampere}
    native, missing = ([name for name, is_native in has.items() if bool(is_native) == wanted] for wanted in (True, False))
    detail = f"in hardware: {', '.join(native) or 'float32 only'}" + (f"; not: {', '.join(missing)}" if missing else "")
    if not has["bfloat16"]:
        detail += "; mixed precision is float16 with loss scaling" if has["float16"] else "; no mixed precision"
    return [*findings, Finding("ok", "Precision", detail)]


def no_gpu_finding(version: str, cuda: str | None, failure: str, level: Level) -> Finding:
    """Why torch finds no GPU. `cuda`: the version that torch is built for; `failure`: what torch says."""
    nvidia, reason = inspect_nvidia(), f" ({failure})" if failure else ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not (nvidia["in_machine"] or nvidia["has_driver"] or nvidia["complaint"]):
        cpu = f"{cpu_name()}, {counted(count_cores(), 'core')}"
        detail = f"none: training runs on the CPU ({cpu}), in float32 and with a smaller model, many times slower than on a GPU"
        return Finding("ok", "GPU", detail)
    if cuda is None:
        detail = f"there is an NVIDIA GPU, and torch {version} is built without CUDA: training would run on the CPU"
        return Finding(level, "GPU", detail, f"install a torch with CUDA: {INSTALL_PAGE}")
    if hidden is not None and hidden.strip() in ("", "-1"):
        detail = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: training would run on the CPU"
        return Finding("warning", "GPU", detail, "unset CUDA_VISIBLE_DEVICES")
    if "mismatch" in nvidia["complaint"]:
        detail = f"the driver was updated and is not loaded yet (nvidia-smi: {nvidia['complaint']})"
        return Finding(level, "GPU", detail, "restart the machine")
    needed, driver = OLDEST_DRIVERS.get(int(cuda.partition(".")[0])), nvidia["driver"]
    if driver and needed is not None and int(driver.partition(".")[0]) < needed:
        detail = f"driver {driver} is too old for torch {version}: CUDA {cuda} needs {needed} or newer{reason}"
        return Finding(
            level, "GPU", detail, f"install a newer driver ({DRIVER_PAGE}), or a torch for an older CUDA ({INSTALL_PAGE})"
        )
    if not nvidia["has_driver"]:
        detail = f"there is an NVIDIA GPU in this machine, and no driver for it can be reached{reason}: training runs on the CPU"
        return Finding("warning", "GPU", detail, f"install the driver ({DRIVER_PAGE}); in a container: start it with --gpus all")
    complaint = f"; nvidia-smi: {nvidia['complaint']}" if nvidia["complaint"] else ""
    detail = (
        f"there is an NVIDIA GPU with driver {driver or '?'}, and torch {version} (CUDA {cuda}) cannot use it{reason}{complaint}"
    )
    fix = "if nvidia-smi does not list it: restart, or install the driver again; in a container: start it with --gpus all"
    return Finding(level, "GPU", detail, fix)


def inspect_nvidia(root: Path = ROOT) -> dict[str, Any]:
    """What the operating system shows of NVIDIA GPUs, whatever torch finds."""
    version_file = root / "proc/driver/nvidia/version"
    named = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read(version_file))
    driver, complaint = _ask_nvidia_smi()
    devices = (root / "sys/bus/pci/devices").glob("*")
    return {
        "in_machine": any(
            _read(device / "vendor").strip() == "0x10de" and _read(device / "class").startswith("0x03") for device in devices
        ),
        "has_driver": version_file.exists() or (root / "dev/nvidia0").exists() or bool(driver),
        "driver": driver or (named.group(1) if named else ""),
        "complaint": complaint,
    }


def _ask_nvidia_smi() -> tuple[str, str]:
    """The version of the driver, or what nvidia-smi complains about; neither where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", first_line(error)
    line = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "no output")
    return (line, "") if done.returncode == 0 and line[:1].isdigit() else ("", line)


def cpu_name(root: Path = ROOT) -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def try_compiling(device: str, limit: float = COMPILE_LIMIT) -> dict[str, Any]:
    """Compiles a small function in a process of its own, without what was compiled before: seconds, or a failure."""
    with tempfile.TemporaryDirectory(prefix="doctor", ignore_cleanup_errors=True) as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        environment = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # without helpers that outlive the child
        command = [sys.executable, "-c", CHILD_THAT_COMPILES, device]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment, errors="replace", check=False
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"a small function was not compiled in {limit:.0f} s"}
        except OSError as error:
            return {"failure": first_line(error)}
    with contextlib.suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    return {"failure": f"the process ended with code {done.returncode}"}


def compile_finding(device: str, tried: Mapping[str, Any]) -> Finding:
    """`tried`: the answer of try_compiling; empty if it was not tried. On CUDA it needs triton and a C compiler, on a CPU C++."""
    on_gpu, failure = device == "cuda", str(tried.get("failure", ""))
    if "seconds" in tried:
        on_cpu = "" if on_gpu else "; it pays on GPUs and is left off here"
        return Finding("ok", "Compiling", f"works (a small function took {tried['seconds']:.0f} s){on_cpu}")
    variable, names = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++", "c++"))
    chosen = os.environ.get(variable)
    compiler = next(filter(None, map(shutil.which, [chosen] if chosen else names)), None)
    missing, fix = failure.splitlines()[0][:200] if failure else "", ""
    if on_gpu and importlib.util.find_spec("triton") is None:
        missing, fix = "triton is not installed", "python -m pip install triton"
    elif compiler is None:
        missing = f"there is no {'C' if on_gpu else 'C++'} compiler"
        fix = f"install one, e.g. apt install {'gcc' if on_gpu else 'g++'}, or name it in {variable}"
    elif "Python.h" in failure:
        missing, fix = "Python's header files are missing (Python.h)", "install them, e.g. apt install python3-dev"
    if missing and on_gpu:
        return Finding("warning", "Compiling", f"does not work: {missing}; training goes on uncompiled, slower", fix)
    if missing:
        return Finding("ok", "Compiling", f"does not work: {missing}; nothing is lost: compiling pays on GPUs")
    why = "--fast, or compile_model is off" if on_gpu else "it pays on GPUs and is left off here"
    return Finding("ok", "Compiling", f"not tried ({why}); {compiler} is there")


def cores_finding(load: float, has_gpu: bool) -> Finding:
    """`load`: processes that want to run, on average over the last minute."""
    cores, machine_cores = count_cores(), os.cpu_count() or 1
    detail = counted(cores, "core")
    if cores < machine_cores:
        detail += f" of the {machine_cores} that the machine shows (a container or an affinity limits them)"
    if has_gpu and cores < 4:
        detail += "; few for a GPU, which may wait for data"
        return Finding("warning", "Cores", detail, "cache: ram spares them the decoding; get more cores if training waits for data")
    if load > 0.6 * machine_cores:
        detail += f"; other programs keep {min(load, machine_cores):.1f} of {machine_cores} busy"
        return Finding("warning", "Cores", detail, "times that are measured now hold under that load only")
    return Finding("ok", "Cores", detail)


def memory_finding() -> Finding:
    free, total, machine = free_host_memory(), total_host_memory(), memory_of_machine()
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if machine is not None and total < 0.95 * machine:
        detail += f" (the machine shows {machine / GIB:.0f} GiB; a container limits it)"
    if free < 2 * GIB:
        return Finding("warning", "Memory", detail, "end other programs, or take a smaller batch_size and num_workers: 0")
    return Finding("ok", "Memory", detail)


def disk_finding(folder: Path) -> Finding:
    """Writes a file of at most MAX_BYTES into the folder and deletes it again, and the folder too if it was not there."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    free, speed = free_disk(folder), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if free >= 4 * MAX_BYTES:
                speed = _write_speed(file)
    except OSError as error:
        detail = f"{folder} cannot be written to ({error.strerror or error})"
        return Finding("problem", "Disk", detail, "checkpoint_dir: a folder that you may write to")
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
    detail = f"{folder}: {free / GIB:.1f} GiB free" + (f", writes {speed / 1e6:.0f} MB/s" if speed is not None else "")
    if free < GIB // 2:
        return Finding("problem", "Disk", detail, "make room: a run keeps three checkpoints; or another checkpoint_dir")
    if free < 5 * GIB:
        return Finding("warning", "Disk", detail, "a run keeps three checkpoints, up to 1 GB each with a large encoder")
    if speed is not None and speed < SLOW:
        fix = "checkpoint_dir: a local disk; checkpoint_minutes: 60 saves less often"
        return Finding("warning", "Disk", f"{detail}: slow", fix)
    return Finding("ok", "Disk", detail)


def _write_speed(file: Any) -> float:
    block, written, started = os.urandom(BLOCK_BYTES), 0, time.perf_counter()  # bytes that no file system compresses
    while written < MAX_BYTES and time.perf_counter() - started < MAX_SECONDS:
        written += file.write(block)
    os.fsync(file.fileno())
    return written / (time.perf_counter() - started)


def reading_finding(files: Sequence[Path]) -> Finding:
    """Reads files from the disk, where the system can be asked to drop what it has in memory of them, or from shards."""
    num_files = num_bytes = 0
    seconds = 0.0
    for path in files:
        with contextlib.suppress(OSError, ShardError):
            length, taken = _timed_read(path)
            num_files, num_bytes, seconds = num_files + 1, num_bytes + length, seconds + taken
        if num_bytes >= MAX_BYTES or seconds >= MAX_SECONDS:
            break
    speed = num_bytes / max(seconds, 1e-9)
    detail = f"{counted(num_files, 'file')} of {num_bytes / 1e6:.1f} MB in {seconds * 1e3:.0f} ms"
    if num_bytes > 1e6 and speed < SLOW:
        fix = "copy the data to a local disk, or cache: ram, which reads each file once"
        return Finding("warning", "Reading", f"{detail}: {speed / 1e6:.0f} MB/s is slow", fix)
    return Finding("ok", "Reading", f"{detail} ({speed / 1e6:.0f} MB/s)")


def _timed_read(path: Path) -> tuple[int, float]:
    """Bytes and seconds. Raises OSError or ShardError."""
    if (stored := find_member(path)) is not None:
        started = time.perf_counter()
        return len(stored.read()), time.perf_counter() - started
    with open_file(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        return len(file.read(MAX_BYTES)), time.perf_counter() - started


def installed_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def version_findings(versions: Mapping[str, str]) -> list[Finding]:
    """Versions, and those known to be bad."""
    short = {"segmentation-models-pytorch": "smp", "opencv-python-headless": "opencv"}
    shown = [f"{short.get(name, name)} {version}" for name, version in versions.items()]
    found = [Finding("ok", "Versions", ", ".join([f"Python {platform.python_version()}", *shown]))]
    torch, albumentations = versions.get("torch", ""), versions.get("albumentations", ALBUMENTATIONS)
    if torch and tuple(int(number) for number in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        detail = f"{torch} can be made to run code by a checkpoint that it loads (CVE-2026-24747)"
        found.append(Finding("problem", "torch", detail, "python -m pip install -U 'torch>=2.10'"))
    if "albumentationsx" in versions:
        detail = "is installed: it has the import name of albumentations, and the AGPL asks you to publish your own code"
        fix = f"python -m pip uninstall albumentationsx; python -m pip install --force-reinstall albumentations=={ALBUMENTATIONS}"
        found.append(Finding("warning", "albumentationsx", detail, fix))
    if albumentations != ALBUMENTATIONS:
        detail = f"{albumentations}; this trainer is tested with {ALBUMENTATIONS}, the last version under the MIT licence"
        found.append(Finding("warning", "albumentations", detail, f"python -m pip install albumentations=={ALBUMENTATIONS}"))
    if len(opencvs := [name for name in versions if name.startswith("opencv-")]) > 1:
        fix = f"python -m pip uninstall {' '.join(opencvs)}; python -m pip install opencv-python-headless"
        found.append(Finding("warning", "opencv", f"{' and '.join(opencvs)} overwrite each other's files", fix))
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""
