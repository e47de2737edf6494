"""The device, what it can compute in, loss scaling and torch's process-wide switches."""

import os

import pytest
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.model.precision import (
    choose_device,
    cpu_computes_bfloat16,
    inspect_hardware,
    local_device,
    set_backends,
)
from unet_trainer.system.launch import Launch

# The device


def test_a_gpu_that_is_asked_for_and_missing_is_an_error_with_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as raised:
        choose_device("cuda")
    assert str(raised.value) == (
        f"device: cuda is not available: torch {torch.__version__} finds no GPU; use device: cpu or auto"
    )


def test_a_gpu_beyond_the_last_one_is_an_error_that_names_the_range(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]  # events, pinned memory and random states follow the current device
    with pytest.raises(UserError, match=r"^device: cuda:2 does not exist; this machine has cuda:0 to cuda:1$"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_is_the_gpu_if_there_is_one(monkeypatch, has_cuda, has_mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert choose_device("auto").type == expected


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "has_float16"),
    [((3, 7), False, False), ((5, 3), False, True), ((7, 5), False, True), ((8, 0), True, True), ((9, 0), True, True)],
)
def test_the_compute_capability_decides_what_a_gpu_has(monkeypatch, capability, has_bfloat16, has_float16):
    """Not torch.cuda.is_bf16_supported: it counts emulation, which is slower than float32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("unet_trainer.model.precision.count_cores", lambda: 6)
    assert inspect_hardware(torch.device("cuda", 1)) == HardwareFacts("cuda:1", "a GPU", has_bfloat16, has_float16, 6)


# Process-wide switches


def switches():
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.fixture
def backends_restored():
    before = switches()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before[1:4]
    torch.use_deterministic_algorithms(before[4])


def test_backend_switches_are_set_and_unset_again(backends_restored, monkeypatch, recwarn):
    """Two runs in one process: the second must not inherit what the first asked for."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for _ in range(2):
        set_backends(allow_tf32=True, deterministic=False)
        assert switches() == ("high", True, False, False, False)
        torch.backends.cudnn.benchmark = True  # as a compiled step leaves it
        set_backends(allow_tf32=False, deterministic=True)
        assert switches() == ("highest", False, False, True, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own setting stays
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t: fpu avx2", False),
    ],
)
def test_bfloat16_of_a_cpu_is_read_from_its_flags(line, expected, monkeypatch):
    monkeypatch.setattr("unet_trainer.model.precision.read_text", lambda path: f"processor\t: 0\n{line}\n")
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)
    assert cpu_computes_bfloat16() is expected


@pytest.mark.parametrize(
    ("name", "local_rank", "num_gpus", "expected"),
    [
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 3, 4, "cuda:3"),
        ("cuda", 1, 1, "cuda:0"),
        ("auto", 1, 0, "cpu"),
        ("cpu", 1, 4, "cpu"),
    ],
)
def test_a_process_of_a_job_has_the_gpu_of_its_number(monkeypatch, name, local_rank, num_gpus, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    launch = Launch(rank=local_rank, world_size=4, local_rank=local_rank, local_world_size=4, is_torchrun=True)
    assert local_device(name, launch) == expected


def test_one_gpu_for_several_processes_is_refused():
    launch = Launch(world_size=2, local_world_size=2, is_torchrun=True)
    with pytest.raises(UserError, match="device: cuda:1 is one GPU for 2 processes; need cuda"):
        local_device("cuda:1", launch)
    assert local_device("cuda:1", Launch()) == "cuda:1"
