"""What this machine can do for training, what is in the way, and what to do about it: GPU, cores, memory, disk, versions.

Every probe returns what it could find: a broken driver is a finding, not a crash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unet_trainer.system.console import Finding, Level, counted, first_line
from unet_trainer.system.input_files import read_text
from unet_trainer.system.resources import ROOT, count_cores, free_disk, free_host_memory, memory_of_machine, total_host_memory

GIB = 2**30
OWN_MEMORY = 0.7 * GIB  # of a GPU, that a process takes by being there
OLDEST_TORCH = (2, 10)
ALBUMENTATIONS = "2.0.8"
PACKAGES = ("torch", "segmentation-models-pytorch", "albumentations", "opencv-python-headless", "numpy", "timm")
INSTALL_PAGE = "https://pytorch.org/get-started/locally"
MEND_DRIVER = (
    "if nvidia-smi does not list it: restart, or install the driver (https://www.nvidia.com/drivers); "
    f"if the driver is too old for this torch: a newer one, or a torch for an older CUDA ({INSTALL_PAGE}); "
    "in a container: start it with --gpus all"
)


def machine_findings(checkpoint_dir: Path, wants_gpu: bool) -> list[Finding]:
    """`wants_gpu`: a GPU that cannot be used is a problem; else the config says device: cpu."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this adds to it
    import torch

    found = device_findings(torch, "problem" if wants_gpu else "warning")
    has_gpu = any(finding.title == "Precision" for finding in found)
    versions = version_findings(installed_versions())
    return [*found, cores_finding(load, has_gpu), memory_finding(), disk_finding(checkpoint_dir), *versions]


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
    return [no_gpu_finding(f"torch {torch.__version__}", torch.version.cuda, failure, level)]


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
    build = f"torch {torch.__version__} for {f'ROCm {hip}' if hip else f'CUDA {torch.version.cuda}'}"
    (free, total), failure = guarded(lambda: torch.cuda.mem_get_info(index), (0, 0))
    if not failure:
        _, failure = guarded(lambda: torch.ones(8, device=f"cuda:{index}").sum().item(), None)
    if failure:
        fix = f"this torch may not be built for it: {INSTALL_PAGE} has builds for older and newer GPUs; or device: cpu"
        return [Finding(level, "GPU", f"{name} cannot compute with {build}: {failure}", fix)]
    findings = [Finding("ok", "GPU", f"{name}; {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free; {build}")]
    if (used := total - free - OWN_MEMORY) > GIB:
        detail = f"other processes use about {used / GIB:.1f} GiB of its memory, and perhaps of its time"
        findings.append(Finding("warning", "GPU in use", detail, "nvidia-smi lists them; end them, or use another GPU"))
    is_ampere = not hip and capability >= (8, 0)
    rocm_bfloat16 = hip and guarded(lambda: bool(torch.cuda.is_bf16_supported(including_emulation=False)), False)[0]
    has = {"bfloat16": is_ampere or rocm_bfloat16, "float16": bool(hip) or capability >= (5, 3), "TF32": is_ampere}
    native, missing = ([name for name, is_native in has.items() if bool(is_native) == wanted] for wanted in (True, False))
    detail = f"in hardware: {', '.join(native) or 'float32 only'}" + (f"; not: {', '.join(missing)}" if missing else "")
    return [*findings, Finding("ok", "Precision", detail)]


def no_gpu_finding(torch: str, cuda: str | None, failure: str, level: Level) -> Finding:
    """Why torch finds no GPU. `torch`: its name and version; `cuda`: the version that it is built for; `failure`: what it says."""
    seen, hidden = nvidia_facts(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        detail = "none: training runs on the CPU, in float32 and with a smaller model, many times slower than on a GPU"
        return Finding("ok", "GPU", detail)
    if cuda is None:
        detail = f"there is an NVIDIA GPU, and {torch} is built without CUDA: training would run on the CPU"
        return Finding(level, "GPU", detail, f"install a torch with CUDA: {INSTALL_PAGE}")
    if hidden is not None and hidden.strip() in ("", "-1"):
        detail = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: training would run on the CPU"
        return Finding("warning", "GPU", detail, "unset CUDA_VISIBLE_DEVICES")
    said = "; ".join(filter(None, [failure, seen]))
    return Finding(level, "GPU", f"there is an NVIDIA GPU, and {torch} (CUDA {cuda}) cannot use it ({said})", MEND_DRIVER)


def nvidia_facts(root: Path = ROOT) -> str | None:
    """What nvidia-smi says of an NVIDIA GPU, whatever torch finds; None where there is none."""
    if (program := shutil.which("nvidia-smi")) is not None:
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace", check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi: {first_line(error)}"
        line = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "no output")
        return f"driver {line}" if done.returncode == 0 and line[:1].isdigit() else f"nvidia-smi: {line}"
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor").strip() == "0x10de" and _read(device / "class").startswith("0x03"):
            return "there is no nvidia-smi"
    return None


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
    """Writes a file into the folder and deletes it again, and the folder too if it was not there."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    free = free_disk(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"{folder} cannot be written to ({error.strerror or error})"
        return Finding("problem", "Disk", detail, "checkpoint_dir: a folder that you may write to")
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
    level: Level = "ok" if free >= 5 * GIB else "warning" if free >= GIB // 2 else "problem"
    fix = "make room, or another checkpoint_dir: a run keeps three checkpoints, up to 1 GB each with a large encoder"
    return Finding(level, "Disk", f"{folder}: {free / GIB:.1f} GiB free", "" if level == "ok" else fix)


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
    if albumentations != ALBUMENTATIONS:
        detail = f"{albumentations}; this trainer is tested with {ALBUMENTATIONS}, the last version under the MIT licence"
        found.append(Finding("warning", "albumentations", detail, f"python -m pip install albumentations=={ALBUMENTATIONS}"))
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""
