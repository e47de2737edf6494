"""Work beside the device: host copies, and how long the device waited for a batch."""

import pytest
import torch

from unet_trainer.training import async_device
from unet_trainer.training.async_device import HostCopy, WaitMeter


def test_a_copy_is_of_its_moment_and_holds_each_tensor_once():
    momentum = torch.rand(100)
    before, copied = momentum.clone(), HostCopy({"optimizer": momentum, "again": [momentum]}).content()
    momentum += 1
    assert copied["optimizer"] is copied["again"][0]
    assert torch.equal(copied["optimizer"], before)


class Timeline:
    """A host that runs ahead of its device, in seconds."""

    def __init__(self):
        self.host = 0.0
        self.device = 0.0  # when the device is done with all that is queued

    def wait(self, seconds):
        self.host += seconds

    def enqueue(self, seconds):
        self.device = max(self.host, self.device) + seconds


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


@pytest.mark.parametrize(
    ("loading", "computing", "other", "waited"),
    [
        (0.5, 1.0, 0.0, 0.5),  # for the first batch alone: later the device is busy while the host waits
        (0.125, 0.25, 2.0, 5 * 0.125),  # the rest of a gap is something else: a save, a line on the console
    ],
)
def test_the_device_waits_while_nothing_is_queued_and_the_host_loads(loading, computing, other, waited, monkeypatch):
    """Five steps whose batch takes the host `loading` seconds and the device `computing`; `other` is host work between them."""
    timeline = Timeline()
    monkeypatch.setattr(async_device.time, "perf_counter", lambda: timeline.host)
    meter = WaitMeter(torch.device("cuda"), new_event=lambda: Event(timeline))
    for _ in range(5):
        meter.wait_for(lambda: timeline.wait(loading))
        timeline.enqueue(computing)
        meter.step_ends()
        timeline.wait(other)
    timeline.host = max(timeline.host, timeline.device)  # as reading the loss of the epoch waits for the device
    assert meter.finish() == waited
