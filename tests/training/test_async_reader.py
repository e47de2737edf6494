"""Numbers of the device are read late, at intervals, and never after they were replaced."""

from __future__ import annotations

import pytest
import torch

from helpers.steps import CPU
from unet_trainer.training import async_reader
from unet_trainer.training.async_reader import AsyncReader


@pytest.fixture
def at_every_poll(monkeypatch):
    monkeypatch.setattr(async_reader, "READ_SECONDS", 0.0)


@pytest.mark.usefixtures("at_every_poll")
def test_a_copy_is_returned_once_with_its_label_as_it_was_when_it_began():
    number = torch.tensor(1)
    reader = AsyncReader(CPU)
    assert reader.poll([number], 7) is None
    number += 1
    copies, label = reader.poll([number], 8)
    assert (copies[0].item(), label) == (1, 7)
    assert reader.poll([number], 9) is None  # the next copy begins
    copies, label = reader.poll([number], 10)
    assert (copies[0].item(), label) == (2, 9)


@pytest.mark.usefixtures("at_every_poll")
def test_a_copy_that_is_dropped_is_never_returned():
    number = torch.tensor(1)
    reader = AsyncReader(CPU)
    assert reader.poll([number], 0) is None
    reader.clear()
    number.fill_(5)
    assert reader.poll([number], 1) is None
    copies, label = reader.poll([number], 2)
    assert (copies[0].item(), label) == (5, 1)


def test_no_copy_begins_before_its_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(async_reader.time, "perf_counter", lambda: clock[0])
    reader, number = AsyncReader(CPU), torch.tensor(1)
    seen = []
    for _ in range(12):  # 1/8 s each: a copy begins at every fourth poll, and the next poll returns it
        clock[0] += 0.125
        seen.append(reader.poll([number], 0) is not None)
    assert [index for index, is_seen in enumerate(seen) if is_seen] == [4, 8]
