"""Memory that runs out is known in all its forms, told with what to change, and a batch is made to fit."""

from __future__ import annotations

import io

import pytest
import torch

from unet_trainer.config.load import load_config
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training.out_of_memory import is_out_of_memory, one_line, out_of_memory_message, shrink

CPU = torch.device("cpu")


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
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_memory_that_ran_out_is_known_in_all_its_forms(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_a_machine_really_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert out_of_memory_message("why", CPU) == "out of memory (why)"


def test_the_first_line_of_an_error_is_enough():
    assert one_line(RuntimeError("\n  CUDA out of memory.\nand much more")) == "CUDA out of memory."
    assert one_line(MemoryError()) == "MemoryError"


def make_fit(**settings):
    stream, parts = io.StringIO(), []
    config = shrink(load_config({"batch_size": 6, **settings}), "why", CPU, parts.append, Console(stream), "nothing was begun")
    return config.batch_parts, parts, stream.getvalue()


def test_parts_double_until_each_is_one_image():
    assert make_fit(on_oom="shrink")[:2] == (2, [2])
    num_parts, parts, said = make_fit(on_oom="shrink", batch_parts=4)
    assert (num_parts, parts) == (6, [6])
    assert said == "Warning: out of memory (why). From here on a batch of 6 goes through the model in 6 parts (batch_parts)\n"
    with pytest.raises(TrainingFailed, match="a smaller encoder"):
        make_fit(on_oom="shrink", batch_parts=6)


@pytest.mark.parametrize(("use_amp", "third"), [(False, "use_amp=true"), (True, "a smaller image_size")])
def test_three_things_to_try_are_named(use_amp, third):
    with pytest.raises(TrainingFailed) as caught:
        make_fit(use_amp=use_amp)
    expected = f"out of memory (why). Try batch_size=3 accumulation_steps=2, or on_oom=shrink, or {third}; nothing was begun"
    assert str(caught.value) == expected
