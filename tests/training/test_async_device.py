"""Work beside the device: late reads, host copies, recorded graphs, and how long the device waited for a batch."""

import pytest
import torch

from helpers.steps import CPU
from unet_trainer.training import async_device
from unet_trainer.training.async_device import AsyncReader, HostCopy, WaitMeter


def test_a_copy_is_returned_once_with_its_label_as_it_was_when_it_began(monkeypatch):
    monkeypatch.setattr(async_device, "READ_SECONDS", 0.0)
    number = torch.tensor(1)
    reader = AsyncReader(CPU)
    assert reader.poll([number], 7) is None
    number += 1
    copies, label = reader.poll([number], 8)
    assert (copies[0].item(), label) == (1, 7)
    assert reader.poll([number], 9) is None  # the next copy begins
    copies, label = reader.poll([number], 10)
    assert (copies[0].item(), label) == (2, 9)


def test_tensors_of_another_copy_are_not_copied_again_and_it_does_not_keep_those_of_this_one():
    weights, momentum = torch.rand(100), torch.rand(100)
    best = HostCopy({"model": weights})
    last = HostCopy({"model": weights, "optimizer": momentum, "again": momentum}, best)
    assert last.content()["model"].data_ptr() == best.content()["model"].data_ptr()
    assert last.content()["optimizer"] is last.content()["again"]
    assert best.content()["model"].untyped_storage().nbytes() == 400  # best.pt does not come to hold the optimizer
    assert torch.equal(last.content()["optimizer"], momentum)


CUDA = torch.device("cuda")


class Timeline:
    """A host that runs ahead of its device, in seconds."""

    def __init__(self):
        self.host = 0.0
        self.device = 0.0  # when the device is done with all that is queued

    def wait(self, seconds):
        self.host += seconds

    def enqueue(self, seconds):
        self.device = max(self.host, self.device) + seconds

    def event(self):
        return Event(self)


class Event:
    """As torch.cuda.Event: recorded when the device reaches it, in milliseconds."""

    def __init__(self, timeline):
        self.timeline = timeline

    def record(self):
        self.time = max(self.timeline.host, self.timeline.device)

    def query(self):
        return self.timeline.host >= self.time

    def elapsed_time(self, end_event):
        return 1000 * (end_event.time - self.time)


@pytest.fixture
def timeline(monkeypatch):
    made = Timeline()
    monkeypatch.setattr(async_device.time, "perf_counter", lambda: made.host)
    return made


def take_steps(meter, timeline, num_steps, loading, computing, other=0.0):
    """Steps whose batch takes the host `loading` seconds and the device `computing`; `other` is host work between them."""
    for index in range(num_steps):
        batch = meter.wait_for(lambda index=index: (timeline.wait(loading), index)[1])
        assert batch == index
        timeline.enqueue(computing)
        meter.step_ends()
        timeline.wait(other)


def finish(meter, timeline):
    timeline.host = max(timeline.host, timeline.device)  # as reading the loss of the epoch waits for the device
    return meter.finish()


def test_a_device_that_is_busy_while_the_host_waits_does_not_wait(timeline):
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 5, loading=0.5, computing=1.0)
    assert finish(meter, timeline) == 0.5  # for the first batch: nothing is queued before it


def test_a_gap_counts_for_no_longer_than_the_host_waited(timeline):
    """The rest of it is something else: a save, a line on the console."""
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 5, loading=0.125, computing=0.25, other=2.0)
    assert finish(meter, timeline) == 5 * 0.125
