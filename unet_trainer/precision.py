"""use_amp and amp_dtype against the hardware → the number format of the run, and the reason for it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from unet_trainer.config import Config, UserError

FormatName = Literal["float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Hardware:
    """What decides about precision. `kind` is torch's device type; ROCm GPUs are `cuda` to torch."""

    kind: str
    name: str
    has_bfloat16: bool
    has_float16: bool


@dataclass(frozen=True)
class Precision:
    """The format of the forward pass. Weights, optimizer state and the loss are float32 in each."""

    format: FormatName
    reason: str
    fell_back: bool = False

    @property
    def uses_amp(self) -> bool:
        return self.format != "float32"


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU if there is one. A device that is asked for and missing is an error, not a slow run."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: {name} is not available: torch {torch.__version__} finds no GPU; use device: cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {name} does not exist; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: mps is not available here; use device: cpu or auto")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events, pinned memory and random states follow it
    return device


def inspect_hardware(device: torch.device) -> Hardware:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has_bfloat16 = major >= 8 if torch.version.hip is None else torch.cuda.is_bf16_supported(including_emulation=False)
        has_float16 = (major, minor) >= (5, 3) or torch.version.hip is not None
        return Hardware("cuda", torch.cuda.get_device_name(device), has_bfloat16, has_float16)
    if device.type == "mps":
        return Hardware("mps", "Apple GPU", has_bfloat16=_mps_release() >= 14, has_float16=True)
    return Hardware("cpu", platform.processor() or platform.machine(), has_bfloat16=True, has_float16=False)


def cpu_computes_bfloat16() -> bool:
    """Whether the processor says so; where it cannot be asked (no /proc/cpuinfo), it is believed to."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return True
    flags = {word for line in path.read_text().splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def _mps_release() -> int:
    return int(platform.mac_ver()[0].split(".")[0] or 0)


def choose_precision(use_amp: bool, amp_dtype: Literal["bfloat16", "float16"], hardware: Hardware) -> Precision:
    """What was asked for if the hardware has it, else the next best, with the reason."""
    if not use_amp:
        return Precision("float32", "use_amp is false")
    if amp_dtype == "bfloat16" and hardware.has_bfloat16:
        return Precision("bfloat16", f"{hardware.name} takes it; no loss scaling needed")
    if amp_dtype == "bfloat16" and hardware.has_float16:
        needs = "needs compute capability 8.0 (Ampere) or newer" if hardware.kind == "cuda" else "needs macOS 14 or newer"
        return Precision(
            "float16", f"{hardware.name} has no bfloat16, which {needs}; float16 with loss scaling instead", fell_back=True
        )
    if hardware.has_float16:
        return Precision("float16", f"{hardware.name} computes in it, with loss scaling against underflow")
    slow = (
        "float16 is far slower than float32 on a CPU"
        if hardware.kind == "cpu"
        else f"{hardware.name} has no {amp_dtype} arithmetic"
    )
    return Precision("float32", f"{slow}; float32 instead", fell_back=True)


def build_scaler(config: Config, precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for float16; for the other formats it is switched off and passes everything through."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=config.scaler_init_scale,
        growth_factor=config.scaler_growth_factor,
        backoff_factor=config.scaler_backoff_factor,
        growth_interval=config.scaler_growth_interval,
        enabled=precision.format == "float16",
    )


def set_backends(allow_tf32: bool, deterministic: bool, search_kernels: bool = False) -> None:
    """Process-wide switches of torch, set from the config at each start of a run."""
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = search_kernels and not deterministic  # 5 % for a search of up to half a minute
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may differ from run to run
    torch.use_deterministic_algorithms(deterministic)
