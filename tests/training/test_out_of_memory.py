"""Out of memory: every form of it is recognised, the user is told what to change, and batches are split into smaller parts."""

from __future__ import annotations

import io

import pytest
import torch

from helpers.steps import CPU, make_settings
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training.out_of_memory import (
    can_shrink,
    describe_parts,
    is_out_of_memory,
    out_of_memory_message,
    peak_memory_gib,
    release_device_memory,
    shrink,
)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_every_form_of_it_is_recognised(error, is_one):
    assert is_out_of_memory(error) is is_one


@pytest.mark.parametrize(
    ("has_gpu", "free", "reserved", "allocated", "is_one"),
    [
        (True, 2, 95, 93, True),  # GiB of 100
        (True, 2, 95, 40, False),  # torch holds most of it for the next tensors
        (True, 60, 30, 29, False),
        (False, 0, 0, 0, False),
    ],
)
def test_cudnn_that_finds_no_engine_lacks_memory_only_where_that_is_short(has_gpu, free, reserved, allocated, is_one, monkeypatch):
    """It says the same of layers and types that it has no algorithm for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated * 2**30)
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert is_out_of_memory(error) is is_one


def test_memory_that_really_runs_out_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert out_of_memory_message("why", CPU) == "out of memory (why)"


def test_a_cpu_has_no_device_memory_to_report_or_to_release():
    assert peak_memory_gib(CPU) == (0.0, 0.0)
    release_device_memory(CPU, is_compiled=False)


def call_shrink(**changes):
    """Six images a batch; returns the settings, the number of parts and the message."""
    stream = io.StringIO()
    settings = make_settings(batch_size=6, **changes)
    num_parts = shrink(settings, "why", CPU, Console(stream), "nothing was begun")
    return settings, num_parts, stream.getvalue()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 6)])
def test_parts_double_until_each_is_one_image(before, after):
    settings, num_parts, _ = call_shrink(on_oom="shrink", batch_parts=before)
    assert num_parts == settings.taken.batch_parts == after
    assert settings.reasons()["batch_parts"] == "decided: memory ran out (on_oom: shrink)"


def test_it_says_what_smaller_parts_change():
    _, _, said = call_shrink(on_oom="shrink", loss={"cross_entropy": 1.0, "dice": 0.5, "tversky": 0.5})
    assert said == (
        "Warning: out of memory (why). From here on a batch of 6 goes through the model in 2 parts (batch_parts): "
        "batch norm statistics and dice, tversky are computed over 3 images at a time, all else over the whole batch\n"
    )


@pytest.mark.parametrize(
    ("loss", "num_parts", "expected"),
    [
        ("bce", 4, "batch norm statistics are computed over 2 images at a time, all else over the whole batch"),
        ("focal", 6, "batch norm statistics are computed over 1 image at a time, all else over the whole batch"),
        ("lovasz", 6, "batch norm statistics and lovasz are computed over 1 image at a time, all else over the whole batch"),
    ],
)
def test_means_over_pixels_are_not_among_what_changes(loss, num_parts, expected):
    config = make_settings(batch_size=6, loss=loss).taken
    assert describe_parts(config, num_parts) == (
        f"a batch of 6 goes through the model in {num_parts} parts (batch_parts): {expected}"
    )


def test_parts_of_one_image_cannot_be_split():
    with pytest.raises(TrainingFailed, match=r"Try batch_size=3 accumulation_steps=2, or a smaller encoder, or "):
        call_shrink(on_oom="shrink", batch_parts=6)


@pytest.mark.parametrize(("use_amp", "third"), [(False, "use_amp=true"), (True, "a smaller image_size")])
def test_three_things_to_try_are_named(use_amp, third):
    with pytest.raises(TrainingFailed) as caught:
        call_shrink(use_amp=use_amp)
    expected = f"out of memory (why). Try batch_size=3 accumulation_steps=2, or on_oom=shrink, or {third}; nothing was begun"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"on_oom": "stop"}, False), ({"on_oom": "shrink"}, True), ({"on_oom": "shrink", "batch_parts": 6}, False)],
)
def test_a_batch_can_be_split_if_on_oom_allows_it_and_there_are_images_to_split(changes, expected):
    assert can_shrink(make_settings(batch_size=6, **changes).taken) is expected
