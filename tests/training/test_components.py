"""Model, steps and loaders of a run, as the script uses them."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch

from helpers.small_runs import make_run
from unet_trainer.images.error_maps import sample_sheet
from unet_trainer.images.tiling import resize_mask
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.training.cuda_graphs import DirectLauncher
from unet_trainer.training.evaluation import predict


@pytest.fixture
def run(tiny_data, tmp_path):
    """10 images train and 2 validate; the encoder is frozen in the first two epochs."""
    return make_run(tiny_data, tmp_path / "run", freeze_encoder_epochs=2)


def is_frozen(components):
    return not any(parameter.requires_grad for parameter in components.state.segmenter.network.encoder.parameters())


def test_the_phases_are_those_that_are_still_to_come(run):
    seen = []
    for epoch in (0, 1, 2, 5):
        run.state.epoch = epoch
        phases = []
        for begin_phase in run.components.begin_phases():
            begin_phase()
            phases.append(is_frozen(run.components))
        seen.append(phases)
    assert seen == [[True, False], [True, False], [False], [False]]


def test_an_encoder_that_is_frozen_keeps_its_statistics(run):
    network = run.state.segmenter.network
    run.components.set_training_mode(1)
    assert (network.encoder.training, network.decoder.training) == (False, True)
    run.components.set_training_mode(2)
    assert (network.encoder.training, network.decoder.training) == (True, True)


class CountingLauncher(DirectLauncher):
    num_clears = 0

    def clear(self):
        self.num_clears += 1


def test_smaller_parts_are_for_both_steps_and_recorded_graphs_are_dropped(run):
    components = run.components
    components.train_step.launcher = launcher = CountingLauncher()
    components.set_num_parts(2)
    assert (components.train_step.num_parts, components.eval_step.num_parts) == (2, 2)
    assert launcher.num_clears == 1


@pytest.mark.parametrize("num_parts", [1, 2])
def test_samples_are_predicted_at_once_in_batches_that_fit_and_drawn_later(num_parts, run):
    components, loaders = run.components, run.loaders
    samples = loaders.samples
    assert len(samples.inputs) == 2
    ids = predict(components.state.eval_segmenter, torch.from_numpy(samples.inputs), components.numerics)
    predicted = list(ids.to(torch.uint8).numpy())
    expected = sample_sheet(samples.pictures, samples.truths, predicted, ("background", "foreground"), True)
    sizes = []
    components.state.eval_segmenter.network.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    components.set_num_parts(num_parts)
    draw = components.draw_samples(loaders)
    assert sizes == ([2] if num_parts == 1 else [1, 1])
    with torch.no_grad():
        for parameter in components.state.segmenter.parameters():  # training goes on meanwhile
            parameter.zero_()
    assert np.array_equal(draw(), expected)


def test_samples_are_read_once(run, monkeypatch):
    first = run.loaders.samples
    monkeypatch.setattr(SegmentationDataset, "timed_sample", lambda self, key: pytest.fail("read again"))
    assert run.loaders.samples is first


def test_samples_are_spread_over_the_validation_images(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", val_fraction=0.5)
    samples = run.loaders.samples
    assert len(run.loaders.val.dataset) == 6
    assert len(samples.pictures) == len(samples.truths) == 4
    for image, index in zip(samples.inputs, (0, 2, 3, 5), strict=True):
        assert np.array_equal(image, run.loaders.val.dataset[0, index][0])


def worker_names():
    return [process.name for process in multiprocessing.active_children() if process.daemon]


def test_closing_ends_the_workers_and_they_are_started_again_when_needed(tiny_data, tmp_path):
    before = worker_names()
    loaders = make_run(tiny_data, tmp_path / "run", num_workers=1).loaders
    try:
        next(loaders.train.epoch(0))
        assert len(worker_names()) == len(before) + 1
        loaders.close()
        assert worker_names() == before
        assert len(list(loaders.train.epoch(1))) == len(loaders.train)
    finally:
        loaders.close()


def test_loaders_without_workers_have_nothing_to_close_or_to_report(run):
    run.loaders.prepare(0, 0, is_last=False)
    run.loaders.close()
    assert run.loaders.take_failures() == (0, "")


def test_failures_of_workers_are_reported_once(tiny_data, tmp_path):
    loaders = make_run(tiny_data, tmp_path / "run", num_workers=1).loaders
    loaders.pool.failures.num_pieces, loaders.pool.failures.reason = 3, "MemoryError"
    assert loaders.take_failures() == (3, "MemoryError")
    assert loaders.take_failures()[0] == 0


@pytest.mark.parametrize("is_last", [False, True])
def test_workers_are_given_this_epoch_its_validation_and_the_next_epoch(is_last, tiny_data, tmp_path):
    loaders = make_run(tiny_data, tmp_path / "run", num_workers=1).loaders
    try:
        loaders.prepare(3, 2, is_last)
        train, val = loaders.train.number, loaders.val.number
        expected = [(train, 3, 2), (val, 0, 0)] + ([] if is_last else [(train, 4, 0)])
        assert [plan.key for plan in loaders.pool.plans] == expected
    finally:
        loaders.close()


def test_samples_show_masks_at_the_size_of_their_images(run):
    """Validation has them at native resolution, 64×64."""
    samples = run.loaders.samples
    assert [image.shape for image in samples.pictures] == [(32, 32, 3)] * 2
    dataset = run.loaders.val.dataset
    for index, mask in enumerate(samples.truths):
        assert dataset[0, index][1].shape == (64, 64)
        assert np.array_equal(mask, resize_mask(dataset[0, index][1], (32, 32)))
