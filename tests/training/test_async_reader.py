"""Numbers on the device, seen late."""

from __future__ import annotations

import torch

from unet_trainer.training.async_reader import AsyncReader

CPU = torch.device("cpu")


def test_a_copy_is_handed_out_once_with_its_label_as_it_was_when_it_began(monkeypatch):
    monkeypatch.setattr("unet_trainer.training.async_reader.PEEK_SECONDS", 0.0)
    number = torch.tensor(1)
    glimpse = AsyncReader(CPU)
    assert glimpse.take([number], 7) is None
    number += 1
    copies, label = glimpse.take([number], 8)
    assert (copies[0].item(), label) == (1, 7)
    assert glimpse.take([number], 9) is None  # the next copy begins


def test_nobody_is_asked_before_the_time():
    glimpse = AsyncReader(CPU)
    assert [glimpse.take([torch.tensor(1)], 0) for _ in range(3)] == [None] * 3
    assert glimpse.copies is None
