"""Gradients and faults, averaged over made-up processes."""

from __future__ import annotations

import pytest
import torch

from helpers.steps import make_batch, make_step, plain_segmenter, take_step
from unet_trainer.system.distributed import Job, PeerLost
from unet_trainer.training.step import GradientSync


class Pair(Job):
    """Two processes, of which the other one has these numbers in its buffer."""

    is_alone = False

    def __init__(self, other=None, digest=None):
        self.other = other
        self.digest = digest
        self.num_averages = 0

    def all_reduce_mean(self, tensor):
        self.num_averages += 1
        tensor.copy_((tensor + self.other) / 2)

    def all_gather(self, value):
        return [value, self.digest or value]


@pytest.fixture
def step():
    return make_step(plain_segmenter())


def other_buffer(step, value=0.0, faults=(0.0, 0.0)):
    buffer = torch.full((sum(parameter.numel() for parameter in step.parameters) + 2,), value)
    buffer[-2:] = torch.tensor(faults)
    return buffer


def test_a_step_takes_the_average_of_the_gradients(step):
    alone = make_step(plain_segmenter())
    before = [parameter.detach().clone() for parameter in step.parameters]
    take_step(alone, make_batch(2), learning_rate=0.1)
    step.sync = GradientSync(Pair(other_buffer(step)), step.parameters)  # the other one's gradients are 0
    take_step(step, make_batch(2), learning_rate=0.1)
    for start, half, whole in zip(before, step.parameters, alone.parameters, strict=True):
        torch.testing.assert_close(half - start, (whole - start) / 2)


@pytest.mark.parametrize("faults", [(0.5, 0.0), (0.0, 0.5)], ids=["a loss", "a statistic"])
def test_a_fault_of_another_process_skips_the_step_here(step, faults):
    """The average of a flag over two processes is a half."""
    before = [parameter.detach().clone() for parameter in step.parameters]
    buffer = other_buffer(step, faults=[2 * fault for fault in faults])
    step.sync = GradientSync(Pair(buffer), step.parameters)
    metrics = take_step(step, make_batch(2))
    assert all(torch.equal(one, two) for one, two in zip(before, step.parameters, strict=True))
    assert int(metrics.num_skipped) == 1
    step.sync.processes.other = other_buffer(step)  # and it is forgotten after the step
    assert int(take_step(step, make_batch(2)).num_skipped) == 0


def test_another_layout_in_memory_is_refused(step):
    GradientSync(Pair(), step.parameters).check_layout()
    with pytest.raises(PeerLost, match="lay out the model differently"):
        GradientSync(Pair(digest="of another layout"), step.parameters).check_layout()
