"""Facts of a machine → findings: what it can do, what is in the way, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unet_trainer.commands.machine_facts import CompileFacts, DiskFacts, GpuFacts, MachineFacts, ReadingFacts, TorchFacts
from unet_trainer.system.console import counted
from unet_trainer.system.findings import Finding, Level

GIB, MIB = 2**30, 2**20
OWN_MEMORY = 0.7 * GIB  # of a GPU, that a process takes by being there
MUCH_IN_USE = GIB  # of a GPU, by others
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # for a version of CUDA
OLDEST_TORCH = (2, 10)
ALBUMENTATIONS = "2.0.8"
SMALL_SHM = 128 * MIB
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK, NO_DISK = 5 * GIB, GIB // 2
BUSY = 0.6  # processes for each core
SLOW_WRITING, SLOW_READING = 20e6, 20e6  # bytes a second
DRIVER_PAGE = "https://www.nvidia.com/drivers"
INSTALL_PAGE = "https://pytorch.org/get-started/locally"


def machine_findings(facts: MachineFacts, wants_gpu: bool = True) -> list[Finding]:
    """`wants_gpu`: a GPU that cannot be used is a problem; else the config says device: cpu."""
    return [
        *_gpu_findings(facts, "problem" if wants_gpu else "warning"),
        _compile_finding(facts),
        _cores_finding(facts),
        _memory_finding(facts),
        *_shm_findings(facts.shm),
        disk_finding(facts.disk),
        *version_findings(facts.python, facts.versions),
    ]


def _gpu_findings(facts: MachineFacts, level: Level) -> list[Finding]:
    torch = facts.torch
    if torch.gpus:
        return [finding for gpu in torch.gpus for finding in _one_gpu(gpu, torch, facts.nvidia.driver, level)]
    if torch.has_mps:
        return [Finding("ok", "GPU", f"Apple GPU (mps), torch {torch.version}")]
    return [_no_gpu_finding(facts, level)]


def _one_gpu(gpu: GpuFacts, torch: TorchFacts, driver: str | None, level: Level) -> list[Finding]:
    capability = "" if gpu.capability is None else f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    build = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}"
    if gpu.failure:
        fix = f"this torch may not be built for it: {INSTALL_PAGE} has builds for older and newer GPUs; or device: cpu"
        return [Finding(level, "GPU", f"{gpu.name}{capability} cannot compute with torch {torch.version}: {gpu.failure}", fix)]
    memory = f"{gpu.total_memory / GIB:.1f} GiB, {gpu.free_memory / GIB:.1f} GiB free"
    findings = [Finding("ok", "GPU", f"{gpu.name}{capability}; {memory}")]
    used = gpu.total_memory - gpu.free_memory - OWN_MEMORY
    if used > MUCH_IN_USE:
        detail = f"other processes use about {used / GIB:.1f} GiB of its memory, and perhaps of its time"
        findings.append(Finding("warning", "GPU in use", detail, "nvidia-smi shows whose they are; end them, or take another GPU"))
    with_driver = f"driver {driver}, " if driver else ""
    findings.append(Finding("ok", "Driver", f"{with_driver}torch {torch.version} for {build}"))
    has = {"bfloat16": gpu.has_bfloat16, "float16": gpu.has_float16, "TF32": gpu.has_tf32}
    native = [name for name, is_native in has.items() if is_native]
    missing = [name for name, is_native in has.items() if not is_native]
    detail = f"in hardware: {', '.join(native) or 'float32 only'}" + (f"; not: {', '.join(missing)}" if missing else "")
    if not gpu.has_bfloat16:
        detail += "; mixed precision is float16 with loss scaling" if gpu.has_float16 else "; no mixed precision"
    return [*findings, Finding("ok", "Precision", detail)]


def _no_gpu_finding(facts: MachineFacts, level: Level) -> Finding:
    torch, nvidia = facts.torch, facts.nvidia
    reason = f" ({torch.failure})" if torch.failure else ""
    cpu = f"{facts.cpu_name}, {counted(facts.num_cores, 'core')}"
    if not (nvidia.is_in_machine or nvidia.has_driver or nvidia.smi_failure):
        detail = f"none: training runs on the CPU ({cpu}), in float32 and with a smaller model, many times slower than on a GPU"
        return Finding("ok", "GPU", detail)
    if torch.cuda is None:
        detail = f"there is an NVIDIA GPU, and torch {torch.version} is built without CUDA: training would run on the CPU"
        return Finding(level, "GPU", detail, f"install a torch with CUDA: {INSTALL_PAGE}")
    if nvidia.visible_devices is not None and nvidia.visible_devices.strip() in ("", "-1"):
        detail = f"hidden by CUDA_VISIBLE_DEVICES={nvidia.visible_devices!r}: training would run on the CPU"
        return Finding("warning", "GPU", detail, "unset CUDA_VISIBLE_DEVICES")
    if "mismatch" in nvidia.smi_failure:
        detail = f"the driver was updated and is not loaded yet (nvidia-smi: {nvidia.smi_failure})"
        return Finding(level, "GPU", detail, "restart the machine")
    needed = OLDEST_DRIVERS.get(int(torch.cuda.partition(".")[0]))
    if nvidia.driver is not None and needed is not None and int(nvidia.driver.partition(".")[0]) < needed:
        detail = f"driver {nvidia.driver} is too old for torch {torch.version}: CUDA {torch.cuda} needs {needed} or newer{reason}"
        fix = f"install a newer driver ({DRIVER_PAGE}), or a torch for an older CUDA ({INSTALL_PAGE})"
        return Finding(level, "GPU", detail, fix)
    if not nvidia.has_driver:
        detail = f"there is an NVIDIA GPU in this machine, and no driver for it can be reached{reason}: training runs on the CPU"
        fix = f"install the driver ({DRIVER_PAGE}); in a container: start it with --gpus all"
        return Finding("warning", "GPU", detail, fix)
    complaint = f"; nvidia-smi: {nvidia.smi_failure}" if nvidia.smi_failure else ""
    driver = f"driver {nvidia.driver}" if nvidia.driver else "a driver"
    detail = f"there is an NVIDIA GPU with {driver}, and torch {torch.version} (CUDA {torch.cuda}) cannot use it{reason}{complaint}"
    fix = "if nvidia-smi does not list it: restart, or install the driver again; in a container: start it with --gpus all"
    return Finding(level, "GPU", detail, fix)


def _compile_finding(facts: MachineFacts) -> Finding:
    found, on_gpu = facts.compiling, any(not gpu.failure for gpu in facts.torch.gpus)
    missing, fix = _what_compiling_lacks(found, on_gpu)
    without = "training goes on uncompiled, slower" if on_gpu else "nothing is lost: compiling pays on GPUs"
    level: Level = "warning" if on_gpu else "ok"
    if found.seconds is not None:
        on_cpu = "" if on_gpu else "; it pays on GPUs and is left off here"
        return Finding("ok", "Compiling", f"works (a small function took {found.seconds:.0f} s){on_cpu}")
    if found.failure:
        reason = missing or found.failure.splitlines()[0][:200]
        return Finding(level, "Compiling", f"does not work: {reason}; {without}", fix if on_gpu else "")
    if missing:
        return Finding(level, "Compiling", f"cannot work: {missing}; {without}", fix if on_gpu else "")
    why = "--fast, or compile_model is off" if on_gpu else "it pays on GPUs and is left off here"
    return Finding("ok", "Compiling", f"not tried ({why}); {found.compiler} is there")


def _what_compiling_lacks(found: CompileFacts, on_gpu: bool) -> tuple[str, str]:
    if on_gpu and not found.has_triton:
        return "triton is not installed", "python -m pip install triton"
    if found.compiler is None:
        name, package = ("C", "gcc") if on_gpu else ("C++", "g++")
        return f"there is no {name} compiler", f"install one, e.g. apt install {package}, or name it in {'CC' if on_gpu else 'CXX'}"
    if "Python.h" in found.failure:
        return "Python's header files are missing (Python.h)", "install them, e.g. apt install python3-dev"
    return "", ""


def _cores_finding(facts: MachineFacts) -> Finding:
    detail = counted(facts.num_cores, "core")
    if facts.num_cores < facts.machine_cores:
        detail += f" of the {facts.machine_cores} that the machine shows (a container or an affinity limits them)"
    if facts.torch.gpus and facts.num_cores < 4:
        detail += "; few for a GPU, which may wait for data"
        return Finding("warning", "Cores", detail, "cache: ram spares them the decoding; get more cores if training waits for data")
    if facts.load > BUSY * facts.machine_cores:
        detail += f"; other programs keep {min(facts.load, facts.machine_cores):.1f} of {facts.machine_cores} busy"
        return Finding("warning", "Cores", detail, "times that are measured now hold under that load only")
    return Finding("ok", "Cores", detail)


def _memory_finding(facts: MachineFacts) -> Finding:
    detail = f"{facts.free_memory / GIB:.1f} of {facts.total_memory / GIB:.1f} GiB free"
    if facts.machine_memory is not None and facts.total_memory < 0.95 * facts.machine_memory:
        detail += f" (the machine shows {facts.machine_memory / GIB:.0f} GiB; a container limits it)"
    if facts.free_memory < LITTLE_MEMORY:
        return Finding("warning", "Memory", detail, "end other programs, or take a smaller batch_size and num_workers: 0")
    return Finding("ok", "Memory", detail)


def _shm_findings(size: int | None) -> list[Finding]:
    if size is None or size >= SMALL_SHM:
        return []
    return [Finding("ok", "/dev/shm", f"{size / MIB:.0f} MiB, which is enough: batches do not lie there")]


def disk_finding(disk: DiskFacts) -> Finding:
    if disk.failure:
        fix = "checkpoint_dir: a folder that you may write to"
        return Finding("problem", "Disk", f"{disk.folder} cannot be written to ({disk.failure})", fix)
    detail = f"{disk.folder}: {disk.free / GIB:.1f} GiB free"
    if disk.write_speed is not None:
        detail += f", writes {disk.write_speed / 1e6:.0f} MB/s"
    if disk.free < NO_DISK:
        return Finding("problem", "Disk", detail, "make room: a run keeps three checkpoints; or another checkpoint_dir")
    if disk.free < LITTLE_DISK:
        return Finding("warning", "Disk", detail, "a run keeps three checkpoints, up to 1 GB each with a large encoder")
    if disk.write_speed is not None and disk.write_speed < SLOW_WRITING:
        return Finding(
            "warning", "Disk", f"{detail}: slow", "checkpoint_dir: a local disk; checkpoint_minutes: 60 saves less often"
        )
    return Finding("ok", "Disk", detail)


def reading_finding(reading: ReadingFacts) -> Finding:
    speed = reading.num_bytes / max(reading.seconds, 1e-9)
    detail = f"{counted(reading.num_files, 'file')} of {reading.num_bytes / 1e6:.1f} MB in {reading.seconds * 1e3:.0f} ms"
    if reading.num_bytes > 1e6 and speed < SLOW_READING:
        fix = "copy the data to a local disk, or cache: ram, which reads each file once"
        return Finding("warning", "Reading", f"{detail}: {speed / 1e6:.0f} MB/s is slow", fix)
    return Finding("ok", "Reading", f"{detail} ({speed / 1e6:.0f} MB/s)")


def version_findings(python: str, versions: Mapping[str, str]) -> list[Finding]:
    short = {"segmentation-models-pytorch": "smp", "opencv-python-headless": "opencv", "opencv-python": "opencv-python"}
    shown = [f"{short.get(name, name)} {version}" for name, version in versions.items()]
    found = [Finding("ok", "Versions", ", ".join([f"Python {python}", *shown]))]
    torch = versions.get("torch", "")
    if torch and _as_numbers(torch) < OLDEST_TORCH:
        detail = f"{torch} can be made to run code by a checkpoint that it loads (CVE-2026-24747)"
        found.append(Finding("problem", "torch", detail, "python -m pip install -U 'torch>=2.10'"))
    if "albumentationsx" in versions:
        detail = "is installed: it has the import name of albumentations, and the AGPL asks you to publish your own code"
        fix = f"python -m pip uninstall albumentationsx; python -m pip install --force-reinstall albumentations=={ALBUMENTATIONS}"
        found.append(Finding("warning", "albumentationsx", detail, fix))
    albumentations = versions.get("albumentations")
    if albumentations is not None and albumentations != ALBUMENTATIONS:
        detail = f"{albumentations}; this trainer is tested with {ALBUMENTATIONS}, the last version under the MIT licence"
        found.append(Finding("warning", "albumentations", detail, f"python -m pip install albumentations=={ALBUMENTATIONS}"))
    opencvs = [name for name in versions if name.startswith("opencv-")]
    if len(opencvs) > 1:
        detail = f"{' and '.join(opencvs)} overwrite each other's files"
        fix = f"python -m pip uninstall {' '.join(opencvs)}; python -m pip install opencv-python-headless"
        found.append(Finding("warning", "opencv", detail, fix))
    return found


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
