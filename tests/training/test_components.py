"""The parts that learn, as the script uses them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from helpers.project import TINY_MODEL
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
from unet_trainer.training import build as assemble
from unet_trainer.training import components as room
from unet_trainer.training.cuda_graphs import CudaGraphCache


@pytest.fixture
def built(tiny_data, tmp_path):
    """Data and machine as a run has them."""
    console = Console(io.StringIO())
    settings = {**TINY_MODEL, "data_dir": str(tiny_data), "image_size": 32, "batch_size": 2, "num_workers": 1, "device": "cpu"}
    config = load_config({**settings, "checkpoint_dir": str(tmp_path), "freeze_encoder_epochs": 2})
    config, numerics = assemble.build_numerics(config, console)
    config, data = assemble.build_data(config, console, numerics.device)
    yield data, assemble.build_machine(config, numerics, data.form, len(data.train), console)
    data.close()


def is_frozen(machine):
    return not any(parameter.requires_grad for parameter in machine.state.model.encoder.parameters())


def test_the_phases_are_those_that_are_still_to_come(built):
    _, machine = built
    seen = []
    for phase in machine.phases():
        phase()
        seen.append(is_frozen(machine))
    machine.state.epoch = 2
    for phase in machine.phases():
        phase()
        seen.append(is_frozen(machine))
    assert seen == [True, False, False]


def test_smaller_parts_are_for_both_steps_and_forget_what_was_recorded(built):
    _, machine = built
    machine.train_step.recorder = CudaGraphCache()
    machine.train_step.recorder.last["move"] = 1
    machine.split_batches(2)
    assert (machine.train_step.num_parts, machine.eval_step.num_parts) == (2, 2)
    assert machine.train_step.recorder.last == {}


@pytest.mark.parametrize("num_parts", [1, 2])
def test_samples_are_predicted_at_once_in_pieces_that_fit_and_drawn_when_asked_for(built, num_parts, monkeypatch):
    data, machine = built
    sizes, drawn = [], []
    predict = room.predict
    monkeypatch.setattr(room, "predict", lambda model, images, *more: (sizes.append(len(images)), predict(model, images, *more))[1])
    monkeypatch.setattr(room, "sample_sheet", lambda images, truths, ids: drawn.append((images, truths, ids)))
    machine.split_batches(num_parts)
    draw = machine.draw_samples(data)
    assert sizes == ([2] if num_parts == 1 else [1, 1])  # two images validate
    assert drawn == []
    with torch.no_grad():
        for parameter in machine.state.model.parameters():  # training goes on meanwhile
            parameter.zero_()
    expected = [np.zeros((32, 32))] * 2
    draw()
    ((images, truths, ids),) = drawn
    assert len(images) == len(truths) == len(ids) == 2
    assert {one.shape for one in ids} == {(32, 32)}
    assert not all(np.array_equal(one, other) for one, other in zip(ids, expected, strict=True))


def test_samples_are_read_once(built, monkeypatch):
    data, _ = built
    first = data.samples
    monkeypatch.setattr(type(data.val_dataset), "_read", lambda self, pair: pytest.fail("read again"))
    assert data.samples is first


def test_closing_ends_the_workers_and_they_come_back(built):
    data, _ = built
    next(data.train.epoch(0))
    assert data.pool.hands is not None
    data.close()
    assert data.pool.hands is None
    assert len(list(data.train.epoch(1))) == len(data.train)
