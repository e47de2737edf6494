"""Every row of the table use_amp × amp_dtype × hardware, with the reason that the user reads."""

from __future__ import annotations

import os

import pytest
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.model.precision import (
    DTYPES,
    Hardware,
    Precision,
    build_scaler,
    choose_device,
    choose_precision,
    cpu_computes_bfloat16,
    inspect_hardware,
    set_backends,
)

AMPERE = Hardware("cuda", "NVIDIA A100", has_bfloat16=True, has_float16=True)
TURING = Hardware("cuda", "Tesla T4", has_bfloat16=False, has_float16=True)
KEPLER = Hardware("cuda", "Tesla K80", has_bfloat16=False, has_float16=False)
CPU = Hardware("cpu", "x86_64", has_bfloat16=True, has_float16=False)
APPLE = Hardware("mps", "Apple GPU", has_bfloat16=True, has_float16=True)
OLD_APPLE = Hardware("mps", "Apple GPU", has_bfloat16=False, has_float16=True)


@pytest.mark.parametrize(
    ("hardware", "asked", "chosen", "fell_back", "reason"),
    [
        (AMPERE, "bfloat16", "bfloat16", False, "NVIDIA A100 takes it; no loss scaling needed"),
        (AMPERE, "float16", "float16", False, "NVIDIA A100 computes in it, with loss scaling against underflow"),
        (
            TURING,
            "bfloat16",
            "float16",
            True,
            "Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; float16 with loss scaling instead",
        ),
        (TURING, "float16", "float16", False, "Tesla T4 computes in it, with loss scaling against underflow"),
        (KEPLER, "bfloat16", "float32", True, "Tesla K80 has no bfloat16 arithmetic; float32 instead"),
        (KEPLER, "float16", "float32", True, "Tesla K80 has no float16 arithmetic; float32 instead"),
        (CPU, "bfloat16", "bfloat16", False, "x86_64 takes it; no loss scaling needed"),
        (CPU, "float16", "float32", True, "float16 is far slower than float32 on a CPU; float32 instead"),
        (APPLE, "bfloat16", "bfloat16", False, "Apple GPU takes it; no loss scaling needed"),
        (APPLE, "float16", "float16", False, "Apple GPU computes in it, with loss scaling against underflow"),
        (
            OLD_APPLE,
            "bfloat16",
            "float16",
            True,
            "Apple GPU has no bfloat16, which needs macOS 14 or newer; float16 with loss scaling instead",
        ),
    ],
)
def test_amp_takes_what_the_hardware_has_and_says_why(hardware, asked, chosen, fell_back, reason):
    assert choose_precision(True, asked, hardware) == Precision(chosen, reason, fell_back)


@pytest.mark.parametrize("hardware", [AMPERE, TURING, KEPLER, CPU, APPLE, OLD_APPLE])
@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_without_amp_everything_is_float32_and_nothing_fell_back(hardware, asked):
    assert choose_precision(False, asked, hardware) == Precision("float32", "use_amp is false", fell_back=False)


def test_float32_is_the_one_format_without_amp():
    assert {name: Precision(name, "").uses_amp for name in DTYPES} == {"float32": False, "bfloat16": True, "float16": True}


def test_a_gpu_that_is_asked_for_and_missing_is_an_error_with_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as raised:
        choose_device("cuda")
    assert str(raised.value) == (f"device: cuda is not available: torch {torch.__version__} finds no GPU; use device: cpu or auto")


def test_a_gpu_beyond_the_last_one_is_an_error_that_names_the_range(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]  # events, pinned memory and random states follow the current device
    with pytest.raises(UserError, match=r"^device: cuda:2 does not exist; this machine has cuda:0 to cuda:1$"):
        choose_device("cuda:2")


def test_a_missing_apple_gpu_is_an_error_with_the_fix(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^device: mps is not available here; use device: cpu or auto$"):
        choose_device("mps")


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"), [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_the_gpu_if_there_is_one(monkeypatch, has_cuda, has_mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert choose_device("auto").type == expected


def test_the_cpu_is_always_there():
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "has_float16"),
    [((3, 7), False, False), ((5, 3), False, True), ((7, 5), False, True), ((8, 0), True, True), ((9, 0), True, True)],
)
def test_the_compute_capability_decides_what_a_gpu_has(monkeypatch, capability, has_bfloat16, has_float16):
    """Not torch.cuda.is_bf16_supported: it counts emulation, which is slower than float32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert inspect_hardware(torch.device("cuda")) == Hardware("cuda", "a GPU", has_bfloat16, has_float16)


def test_a_cpu_has_bfloat16_and_a_name():
    hardware = inspect_hardware(torch.device("cpu"))
    assert (hardware.kind, hardware.has_bfloat16, hardware.has_float16) == ("cpu", True, False)
    assert hardware.name


@pytest.mark.parametrize(("release", "has_bfloat16"), [("13.6.1", False), ("14.0", True), ("26.1", True), ("", False)])
def test_the_macos_release_decides_what_an_apple_gpu_has(monkeypatch, release, has_bfloat16):
    monkeypatch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), ""))
    assert inspect_hardware(torch.device("mps")) == Hardware("mps", "Apple GPU", has_bfloat16, has_float16=True)


def test_the_scaler_works_for_float16_alone():
    for name in DTYPES:
        scaler = build_scaler(load_config({}), Precision(name, ""), torch.device("cpu"))
        assert scaler.is_enabled() == (name == "float16")


def test_the_scaler_takes_its_four_settings():
    config = load_config(
        {"scaler_init_scale": 1024, "scaler_growth_factor": 3, "scaler_backoff_factor": 0.25, "scaler_growth_interval": 7}
    )
    scaler = build_scaler(config, Precision("float16", ""), torch.device("cpu"))
    found = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert found == (1024.0, 3.0, 0.25, 7)


def test_a_disabled_scaler_passes_the_loss_through():
    scaler = build_scaler(load_config({}), Precision("bfloat16", ""), torch.device("cpu"))
    loss = torch.tensor(3.0)
    assert scaler.scale(loss) is loss


@pytest.fixture
def backends_restored():
    was = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    torch.set_float32_matmul_precision(was[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = was[1:4]
    torch.use_deterministic_algorithms(was[4])


def switches():
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def test_backend_switches_are_set_and_unset_again(backends_restored, monkeypatch, recwarn):
    """Two runs in one process: the second must not inherit what the first asked for."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for _ in range(2):
        set_backends(allow_tf32=True, deterministic=False, search_kernels=True)
        assert switches() == ("high", True, True, False, False)
        set_backends(allow_tf32=False, deterministic=True, search_kernels=False)
        assert switches() == ("highest", False, False, True, True)
    set_backends(allow_tf32=True, deterministic=False, search_kernels=False)
    assert switches() == ("high", True, False, False, False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own setting stays
    assert len(recwarn) == 0


def test_deterministic_runs_do_not_search_for_kernels(backends_restored, monkeypatch):
    """The search picks by the clock, so two runs could pick differently."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_backends(allow_tf32=True, deterministic=True, search_kernels=True)
    assert not torch.backends.cudnn.benchmark


def test_deterministic_gives_cublas_its_workspace(backends_restored, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the variable is put back afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_backends(allow_tf32=True, deterministic=True, search_kernels=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("flags\t\t: fpu avx512_bf16 amx_tile", True), ("Features\t: fp asimd bf16 i8mm", True), ("flags\t: fpu avx2", False)],
)
def test_bfloat16_of_a_cpu_is_read_from_what_it_says(line, expected, monkeypatch):
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: f"processor\t: 0\n{line}\n")
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)
    assert cpu_computes_bfloat16() is expected
