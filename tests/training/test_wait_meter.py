"""Waiting for data is the time in which the device is idle, measured here on the clock of a made-up device."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.steps import CPU
from unet_trainer.loading.wait_advice import EpochTimes, advise
from unet_trainer.training import wait_meter
from unet_trainer.training.wait_meter import WaitMeter

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
    monkeypatch.setattr(wait_meter.time, "perf_counter", lambda: made.host)
    return made


def take_steps(meter, timeline, num_steps, loading, computing, other=0.0):
    """Steps whose batch takes the host `loading` seconds and the device `computing`; `other` is host work between them."""
    for index in range(num_steps):
        batch = meter.wait_for(lambda index=index: (timeline.wait(loading), index)[1])
        assert batch == index
        meter.step_begins()
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


def test_a_device_that_is_idle_waits_for_the_gap(timeline):
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 5, loading=1.0, computing=0.25)
    assert finish(meter, timeline) == 1.0 + 4 * 0.75


def test_a_gap_counts_for_no_longer_than_the_host_waited(timeline):
    """The rest of it is something else: a save, a line on the console."""
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 5, loading=0.125, computing=0.25, other=2.0)
    assert finish(meter, timeline) == 5 * 0.125


def test_on_a_cpu_the_host_is_the_device(timeline):
    meter = WaitMeter(CPU)
    take_steps(meter, timeline, 4, loading=0.5, computing=1.0)
    assert meter.seconds == 4 * 0.5
    assert meter.finish() == 4 * 0.5


def test_seconds_lag_behind_until_the_device_has_reached_the_step(timeline):
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 1, loading=0.0, computing=0.25)
    timeline.host = 1.0
    take_steps(meter, timeline, 1, loading=1.0, computing=8.0)  # a gap of 1.75 s, of which the host waited 1 s
    assert meter.seconds == 1.0  # the host is there when the step begins
    take_steps(meter, timeline, 1, loading=0.5, computing=1.0)
    assert meter.seconds == 1.0  # begins in the future: the device is at the step before
    assert finish(meter, timeline) == 1.0


def test_gaps_that_are_not_known_yet_are_added_at_the_end(timeline, monkeypatch):
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 1, loading=0.0, computing=0.25)
    with monkeypatch.context() as behind:
        behind.setattr(Event, "query", lambda self: False)  # the device has reached none of the steps
        take_steps(meter, timeline, 3, loading=1.0, computing=0.25)
        assert meter.seconds == 0.0
    assert finish(meter, timeline) == 3 * 0.75
    assert meter.finish() == 3 * 0.75  # each gap once


def test_a_resumed_epoch_goes_on_from_what_it_has_waited(timeline):
    meter = WaitMeter(CUDA, seconds=3.0, new_event=timeline.event)
    assert meter.seconds == 3.0
    take_steps(meter, timeline, 2, loading=1.0, computing=0.25)
    assert finish(meter, timeline) == 3.0 + 1.0 + 0.75


def test_an_error_of_the_loader_goes_through():
    def fail():
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        WaitMeter(CPU).wait_for(fail)


@pytest.mark.parametrize(("loading", "computing"), [(0.5, 0.25), (0.3, 0.25), (1.0, 0.01), (2.0, 1.5)])
def test_advice_never_promises_more_than_the_step_alone_gives(loading, computing, timeline):
    """8 images a step. By the host's clock it would wait all of the time, and any promise would pass."""
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 100, loading, computing)
    seconds = max(timeline.host, timeline.device)
    data_wait = finish(meter, timeline) / seconds
    times = EpochTimes(800 / seconds, data_wait, read_seconds=loading / 8, augment_seconds=0.0, num_workers=1)
    advice = advise(times, num_cores=64, cache="none", on_cpu=False)
    promised = int(re.search(r"would give about (\d+) images/s", advice)[1])
    assert promised <= round(8 / computing * 1.02)  # the last step of the epoch has no wait behind it
    assert promised > 800 / seconds


def test_no_advice_is_given_where_the_device_is_busy(timeline):
    meter = WaitMeter(CUDA, new_event=timeline.event)
    take_steps(meter, timeline, 100, loading=0.9, computing=1.0)
    data_wait = finish(meter, timeline) / timeline.device
    assert advise(EpochTimes(8.0, data_wait, 0.1, 0.0, 1), num_cores=64, cache="none", on_cpu=False) is None
