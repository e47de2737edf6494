"""The state of training: all of it is restored, from this format and from older ones; and the metrics of an epoch."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.small_runs import ROW, Wrapper, older_content
from helpers.steps import CPU, everything, make_batch, same, small_components, take_step
from unet_trainer.runs.checkpoint_file import read_last, write_checkpoint
from unet_trainer.training.state import EpochMetrics

NO_COUNTS = torch.zeros(2, 2, dtype=torch.int64)


def step(components, seed):
    take_step(components.train_step, make_batch(2, seed, side=32), metrics=components.state.metrics)


@pytest.fixture
def components():
    """After two steps and an epoch."""
    made = small_components(ema_decay=0.9)
    for seed in range(2):
        step(made, seed)
    state = made.state
    state.epoch, state.batch, state.history = 1, 2, [dict(ROW)]
    state.seconds, state.train_seconds, state.wait_seconds = 10.0, 5.0, 1.0
    state.num_rollbacks, state.learning_rate.factor, state.per_class_iou = 1, 0.1, [0.25]
    state.confusion = [[5, 2**40], [1, 2]]  # more pixels than 32 bits count
    state.early_stopping.update(0.5, 1)
    return made


def add(metrics, loss, num_images, counts=NO_COUNTS):
    """As a step does it: on the device, and the number of images on the host."""
    metrics.add(torch.tensor(loss), counts, num_images)
    metrics.num_images += num_images


def through_a_file(state, folder, **more):
    write_checkpoint(folder / "last.pt", {"config": {}, "split": {"train": [], "val": []}, **state.state_dict(), **more})
    return read_last(folder / "last.pt")


def test_everything_is_restored(components, tmp_path):
    torch.manual_seed(7)
    content = through_a_file(components.state, tmp_path)
    expected = torch.rand(3)
    other = small_components(ema_decay=0.9)
    other.state.load_state_dict(content)
    assert torch.equal(torch.rand(3), expected)  # the random generator too
    assert same(everything(components), everything(other))
    one, two = components.state, other.state
    assert two.confusion == [[5, 2**40], [1, 2]]
    for name in ("epoch", "batch", "history", "per_class_iou", "seconds", "train_seconds", "wait_seconds", "num_rollbacks"):
        assert getattr(two, name) == getattr(one, name), name
    assert (two.learning_rate.factor, two.early_stopping) == (0.1, one.early_stopping)
    assert (two.metrics.loss(), two.metrics.num_images) == (one.metrics.loss(), 4)
    step(components, seed=5)
    step(other, seed=5)
    assert same(everything(components), everything(other))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_next_step_after_a_restart_is_the_same(optimizer, tmp_path):
    components, other = (small_components(optimizer=optimizer) for _ in range(2))
    step(components, seed=0)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    for made in (components, other):
        step(made, seed=1)
    assert same(everything(components), everything(other))


def test_a_loaded_state_does_not_change_with_the_one_that_it_was_loaded_from(components, tmp_path):
    content = through_a_file(components.state, tmp_path)
    other = small_components(ema_decay=0.9)
    other.state.load_state_dict(content)
    other.state.history[0]["val_iou"] = 0.9
    other.state.history.append({})
    assert content["history"] == [ROW]


def test_a_state_of_format_1_goes_on_from_the_end_of_its_epoch(components, tmp_path):
    torch.save(older_content(components.state, 1), tmp_path / "last.pt")
    other = small_components(ema_decay=0.9)
    other.state.load_state_dict(read_last(tmp_path / "last.pt"))
    state = other.state
    assert (state.epoch, state.batch, state.learning_rate.factor, state.num_rollbacks) == (1, 0, 1.0, 0)
    assert (state.metrics.num_images, int(state.metrics.matrix.sum())) == (0, 0)
    assert state.confusion == []
    assert state.ema.num_updates == 2
    assert "nan_steps" not in state.history[0]
    assert state.history[0]["peak_memory_gib"] == 0.0
    step(components, seed=5)
    step(other, seed=5)
    assert same(everything(components), everything(other))


def test_a_state_of_format_2_goes_on_within_its_epoch(components, tmp_path):
    write_checkpoint(tmp_path / "last.pt", older_content(components.state, 2))
    other = small_components(ema_decay=0.9)
    other.state.load_state_dict(read_last(tmp_path / "last.pt"))
    state = other.state
    assert (state.epoch, state.batch, state.learning_rate.factor, state.num_rollbacks) == (1, 2, 0.1, 1)
    assert (state.history, state.metrics.num_images) == ([ROW], 4)
    assert (state.train_seconds, state.wait_seconds, state.confusion) == (5.0, 1.0, [])
    step(components, seed=5)
    step(other, seed=5)
    assert same(everything(components), everything(other))
    assert state.metrics.loss() == components.state.metrics.loss()


def test_settings_of_the_optimizer_are_those_of_this_start(components, tmp_path):
    other = small_components(weight_decay=0.5)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    assert [group["weight_decay"] for group in other.state.optimizer.param_groups] == [0.5, 0.0]


def state_by_name(components):
    network, optimizer = components.state.segmenter.network, components.state.optimizer
    return {name: optimizer.state[parameter] for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("then", "now"), [(1.0, 0.2), (0.2, 1.0), (0.2, 0.5), (0.2, 0.2)])
def test_each_parameter_gets_its_own_state_when_the_rate_of_the_encoder_changes(optimizer, then, now, tmp_path):
    components = small_components(optimizer=optimizer, encoder_lr_factor=then)
    for seed in range(2):
        step(components, seed)
    other = small_components(optimizer=optimizer, encoder_lr_factor=now)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    before, after = state_by_name(components), state_by_name(other)
    assert all(before.values())
    for name in before:
        assert before[name].keys() == after[name].keys()
        assert all(torch.equal(before[name][key], after[name][key]) for key in before[name]), name
    assert other.state.optimizer.param_groups[0].get("lr_factor", 1.0) == now
    step(other, seed=2)


def test_the_next_step_with_a_rate_of_the_encoders_own_is_the_same_after_a_restart(tmp_path):
    components, other = (small_components(encoder_lr_factor=0.2) for _ in range(2))
    step(components, seed=0)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    for made in (components, other):
        step(made, seed=1)
    assert same(everything(components), everything(other))


def test_ema_switched_on_at_resume_begins_with_the_weights(tmp_path):
    components, other = small_components(), small_components(ema_decay=0.9)
    step(components, seed=0)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    assert same(other.state.ema.segmenter.state_dict().values(), components.state.segmenter.state_dict().values())
    assert other.state.ema.num_updates == 0


def test_ema_switched_off_at_resume_is_left_out(components, tmp_path):
    other = small_components()
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    assert other.state.ema is None
    assert other.state.eval_segmenter is other.state.segmenter


def test_the_scale_of_the_scaler_is_restored_and_its_settings_are_those_of_this_start(tmp_path):
    state = small_components().state
    state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    state.scaler.scale(torch.ones(()))
    content = through_a_file(state, tmp_path)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=100, backoff_factor=0.25)
    state.load_state_dict(content)
    assert (state.scaler.get_scale(), state.scaler.get_growth_interval(), state.scaler.get_backoff_factor()) == (128.0, 100, 0.25)


def test_a_scaler_that_the_run_did_not_have_begins_anew(components, tmp_path):
    content = through_a_file(components.state, tmp_path)
    components.state.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    components.state.load_state_dict(content)
    assert components.state.scaler.get_scale() == 32.0


def test_prefixes_of_compiled_and_distributed_models_never_reach_the_file(components, tmp_path):
    plain = list(components.state.segmenter.network.state_dict())
    segmenter = components.state.segmenter
    segmenter.network = Wrapper(Wrapper(Wrapper(segmenter.network, "module"), "_orig_mod"), "module")
    assert set(segmenter.network.state_dict()) == {f"module._orig_mod.module.{name}" for name in plain}
    content = through_a_file(components.state, tmp_path)
    assert list(content["model"]) == plain
    with torch.no_grad():
        for parameter in segmenter.parameters():
            parameter.zero_()
    components.state.load_state_dict(content)  # and a wrapped model takes them
    assert same(segmenter.network.state_dict().values(), content["model"].values())


def test_the_next_epoch_begins_with_nothing_done(components):
    components.state.begin_next_epoch()
    state = components.state
    assert (state.epoch, state.batch, state.train_seconds, state.wait_seconds) == (2, 0, 0.0, 0.0)
    assert (state.metrics.num_images, state.seconds) == (0, 10.0)
    assert math.isnan(state.metrics.loss())


def test_one_bad_loss_does_not_spoil_the_mean_of_the_epoch():
    metrics = EpochMetrics(1, CPU)
    for loss, num_images in ((2.0, 4), (math.inf, 4), (math.nan, 2), (5.0, 2)):
        add(metrics, loss, num_images)
    assert metrics.loss() == pytest.approx((2.0 * 4 + 5.0 * 2) / 6)


def test_an_epoch_without_a_finite_loss_has_none():
    metrics = EpochMetrics(1, CPU)
    assert math.isnan(metrics.loss())
    add(metrics, math.nan, 2)
    assert math.isnan(metrics.loss())


def test_the_counts_of_a_bad_batch_are_left_out():
    metrics = EpochMetrics(1, CPU)
    add(metrics, 1.0, 2, torch.tensor([[5, 1], [1, 2]]))
    add(metrics, math.nan, 2, torch.tensor([[0, 9], [9, 0]]))
    assert metrics.matrix.tolist() == [[5, 1], [1, 2]]
    assert metrics.scores().iou == 0.5  # 2 / (2 + 1 + 1)


def test_the_first_image_without_a_finite_loss_is_known():
    metrics = EpochMetrics(1, CPU)
    for loss in (1.0, 1.0, math.nan, 1.0, math.inf):
        add(metrics, loss, 4)
    assert (int(metrics.first_bad), int(metrics.num_bad)) == (8, 8)


def test_the_bar_gets_numbers_late_but_right(monkeypatch):
    monkeypatch.setattr("unet_trainer.training.async_reader.READ_SECONDS", 0.0)
    metrics = EpochMetrics(1, CPU)
    add(metrics, 3.0, 2, torch.tensor([[5, 1], [1, 2]]))
    assert metrics.peek() is None  # the copy has only begun
    add(metrics, 9.0, 2, torch.tensor([[0, 0], [9, 0]]))
    assert metrics.peek() == (3.0, 0.5)  # as it was when the copy began: 2 / (2 + 1 + 1)


@pytest.mark.parametrize("change", ["reset", "load"])
def test_the_bar_gets_no_numbers_of_before_a_restart(change, monkeypatch):
    monkeypatch.setattr("unet_trainer.training.async_reader.READ_SECONDS", 0.0)
    metrics, other = EpochMetrics(1, CPU), EpochMetrics(1, CPU)
    add(metrics, 3.0, 2)
    assert metrics.peek() is None  # a copy is under way
    metrics.reset() if change == "reset" else metrics.load_state_dict(other.state_dict())
    assert metrics.peek() is None  # another begins


def test_metrics_go_on_where_they_were_saved():
    counts = torch.tensor([[5, 1], [1, 2]])
    metrics, other = EpochMetrics(1, CPU), EpochMetrics(1, CPU)
    add(metrics, 0.1, 3, counts)
    other.load_state_dict(metrics.state_dict())
    for part in (metrics, other):
        add(part, 0.7, 2, counts)
        add(part, math.nan, 2, counts)
    assert other.loss() == metrics.loss() == pytest.approx((0.3 + 1.4) / 5)
    assert torch.equal(other.matrix, 2 * counts)
    assert int(other.first_bad) == int(metrics.first_bad) == 5
    other.reset()
    assert (other.num_images, int(other.matrix.sum()), int(other.num_bad), int(other.first_bad)) == (0, 0, 0, 0)
