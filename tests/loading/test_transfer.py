"""Copies to a device. tests/test_gpu.py runs them on a GPU; here, which calls are made in which order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from unet_trainer.loading import transfer

CUDA = torch.device("cuda", 0)


def test_on_a_cpu_nothing_is_copied():
    tensors = torch.ones(3), torch.zeros(2)
    moved = transfer.to_device(tensors, torch.device("cpu"))
    assert [tensor.data_ptr() for tensor in moved] == [tensor.data_ptr() for tensor in tensors]


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


class Moved:
    def __init__(self, calls):
        self.calls = calls

    def to(self, device, non_blocking):
        assert device == CUDA
        assert non_blocking
        self.calls.append("copy")
        return self

    def record_stream(self, stream):
        self.calls.append(f"memory is used in {stream.name}")


def test_the_step_waits_for_the_copy_and_the_memory_is_not_reused_before_it_was_read(monkeypatch):
    calls = []
    streams = {"copying": Stream("copying", calls), "computing": Stream("computing", calls)}

    @contextlib.contextmanager
    def within(stream):
        calls.append(f"in {stream.name}")
        yield
        calls.append("out")

    monkeypatch.setattr(transfer, "copy_stream", lambda device: streams["copying"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["computing"])
    monkeypatch.setattr(torch.cuda, "stream", within)
    transfer.to_device((Moved(calls), Moved(calls)), CUDA)
    assert calls == ["in copying", "copy", "copy", "out", "computing waits for copying", *["memory is used in computing"] * 2]


@pytest.mark.parametrize(("code", "is_pinned"), [(0, True), (712, False)])
def test_memory_is_pinned_or_used_as_it_is(code, is_pinned, monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: (calls.append(given), code)[1], cudaHostUnregister=lambda *given: calls.append(given)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    kernels = []

    def failing(shape, device):
        kernels.append(device)
        raise RuntimeError("the error of cudaHostRegister")

    monkeypatch.setattr(torch, "zeros", failing)
    memory = torch.ones(100, dtype=torch.uint8)
    assert transfer.pin(memory) is is_pinned
    transfer.unpin(memory)
    assert calls == [(memory.data_ptr(), 100, 0), (memory.data_ptr(),)]
    assert kernels == ([] if is_pinned else ["cuda"])  # clears the error: the next kernel of the step would raise it
