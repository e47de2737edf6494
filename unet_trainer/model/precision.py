"""Device, number format and torch's process-wide switches: what a forward pass computes on and in."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import HardwareFacts, NumberFormat
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.system.input_files import read_text
from unet_trainer.system.launch import Launch
from unet_trainer.system.resources import count_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Numerics:
    """Device and number format of a forward pass."""

    device: torch.device
    number_format: NumberFormat

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, DTYPES[self.number_format], enabled=self.number_format != "float32")


def local_device(name: str, launch: Launch) -> str:
    """The device of this process: with several on a machine, cuda is the GPU of its number; more processes than GPUs
    share them."""
    if not launch.is_torchrun or name not in ("auto", "cuda"):
        if launch.local_world_size > 1 and name.startswith("cuda:"):
            number = launch.local_world_size
            raise UserError(f"device: {name} is one GPU for {number} processes; need cuda, which gives each its own")
        return name
    if not torch.cuda.is_available():
        return "cpu" if name == "auto" else name
    return f"cuda:{launch.local_rank % torch.cuda.device_count()}"


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU if there is one. A device that is asked for and missing is an error, not a slow run on the
    CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: got {name!r}; need auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        why = f"torch {torch.__version__} finds no GPU"
        raise UserError(f"device: {name} is not available: {why}; use device: cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"device: {name} does not exist; this machine has cuda:0 to cuda:{last}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: mps is not available here; use device: cpu or auto")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events, pinned memory and random states follow it
    return device


def inspect_hardware(device: torch.device) -> HardwareFacts:
    """What the choice of precision and workers depends on."""
    cores = count_cores()
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has_bfloat16, has_float16 = major >= 8, (major, minor) >= (5, 3)
        if torch.version.hip is not None:
            has_bfloat16, has_float16 = torch.cuda.is_bf16_supported(including_emulation=False), True
        return HardwareFacts(str(device), torch.cuda.get_device_name(device), has_bfloat16, has_float16, cores)
    if device.type == "mps":
        has_bfloat16 = int(platform.mac_ver()[0].split(".")[0] or 0) >= 14
        return HardwareFacts("mps", "Apple GPU", has_bfloat16, has_float16=True, num_cores=cores)
    name = platform.processor() or platform.machine()
    return HardwareFacts("cpu", name, has_bfloat16=True, has_float16=False, num_cores=cores)


def cpu_computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions; assumed where there is no /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return True
    flags = {word for line in read_text(path).splitlines() for word in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def build_scaler(config: ResolvedConfig, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for float16; for the other formats it is disabled and passes everything through."""
    is_on = config.number_format == "float16"
    return torch.amp.GradScaler(device.type, init_scale=config.scaler_init_scale, enabled=is_on)


def set_backends(allow_tf32: bool, deterministic: bool) -> None:
    """Process-wide switches of torch, set from the config at each start of a run."""
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = False  # a search of up to half a minute: for compiled steps alone
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may differ from run to run
    torch.use_deterministic_algorithms(deterministic)
