"""Several runs and models in one process: each keeps its loss, its network and its random numbers, and the caller's
random numbers and signal handlers stay as they are."""

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch

from helpers.checkpoints import save_model
from helpers.custom_parts import SETTINGS, Small, custom_loss, saved_weights
from helpers.steps import make_spec
from train_unet import follow, train
from unet_trainer import load
from unet_trainer.config.errors import UserError
from unet_trainer.model.segmenter import Segmenter

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IMAGE = np.zeros((32, 32, 3), np.uint8)


@pytest.fixture
def config(tiny_data, tmp_path):
    return {**SETTINGS, "data_dir": str(tiny_data), "checkpoint_dir": str(tmp_path / "runs"), "num_epochs": 2}


def constant_network(logit):
    """Its logits are all this, which no checkpoint holds."""
    network = torch.nn.Conv2d(3, 1, 1)
    network.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, logit))
    return network


class CountingLoss:
    """Cross entropy times `factor`, which a run ends with other weights for."""

    def __init__(self, factor):
        self.factor, self.num_calls = factor, 0

    def __call__(self, logits, masks):
        self.num_calls += 1
        return self.factor * custom_loss(logits, masks)


def in_threads(*functions):
    """Their results; all begin at the same moment."""
    barrier = Barrier(len(functions))

    def call(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions))


def test_trainings_in_threads_have_their_own_losses_networks_and_weights(config):
    """Bit for bit those that each has alone."""
    losses = [CountingLoss(factor) for factor in (1.0, 30.0)]
    runs = [
        partial(train, config, loss=loss, model=lambda spec: Small(), grad_clip=None, seed=seed, weight_decay=0.0)
        for seed, loss in enumerate(losses)
    ]
    alone = [run(run_name=f"alone-{number}").run_dir for number, run in enumerate(runs)]
    num_calls = [loss.num_calls for loss in losses]
    together = in_threads(*(partial(run, run_name=f"thread-{number}") for number, run in enumerate(runs)))
    assert all(loss.num_calls > number for loss, number in zip(losses, num_calls, strict=True))  # timed steps vary
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(saved_weights(one), saved_weights(other.run_dir))


def test_eight_threads_load_each_the_network_that_it_passes(tmp_path):
    spec = make_spec(architecture="own")
    path = save_model(tmp_path / "best.pt", Segmenter(spec, constant_network(0.0), channels_last=True))

    def load_often(logit):
        models = [load(path, device="cpu", model=constant_network(logit)) for _ in range(20)]
        return [float(model.probabilities(IMAGE)[0, 0, 1]) for model in models]

    found = in_threads(*(partial(load_often, logit) for logit in range(-4, 4)))
    assert np.allclose(found, torch.arange(-4.0, 4.0).sigmoid()[:, None])


def test_what_a_run_that_is_followed_trains_is_not_there_for_others(config, tmp_path):
    spec = make_spec(architecture="own")
    path = save_model(tmp_path / "best.pt", Segmenter(spec, Small(), channels_last=True))
    for _ in follow(config, model=Small(), loss=custom_loss, run_name="followed"):
        with pytest.raises(UserError, match=r"^model: .*pass it from Python, .* load\(\.\.\., model="):
            load(path)
        with pytest.raises(UserError, match=r"^loss: .*pass it from Python"):
            train({**config, "loss": {"own": 1.0}}, run_name="other")


def test_runs_that_are_followed_by_turns_mix_nothing_and_leave_nothing_behind(config):
    losses = [CountingLoss(1.0), CountingLoss(30.0)]
    dropout = {"model": lambda spec: Small(dropout=0.5)}
    options = [{**dropout, "loss": loss, "seed": seed} for seed, loss in enumerate(losses)]
    alone = [train(config, **each, run_name=f"alone-{number}").run_dir for number, each in enumerate(options)]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    turns = [follow(config, **each, run_name=f"turn-{number}") for number, each in enumerate(options)]
    for _ in itertools.zip_longest(*turns):
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    for number, run_dir in enumerate(alone):
        assert torch.equal(saved_weights(run_dir), saved_weights(run_dir.parent / f"turn-{number}"))
    with pytest.raises(UserError, match=r"^loss: .*pass it from Python"):
        train(config, model=Small(), resume=str(alone[0]), num_epochs=3)


def test_random_numbers_of_callbacks_change_no_run_and_the_callers_go_on_as_if_there_were_none(config):
    dropout = {"model": lambda spec: Small(dropout=0.5)}
    plain = train(config, **dropout, run_name="plain").run_dir
    torch.manual_seed(5)
    expected = torch.rand(6)

    torch.manual_seed(5)
    drawn = [torch.rand(1)]
    train(config, lambda row: drawn.append(torch.rand(1)), **dropout, run_name="drawing")
    rows = follow(config, **dropout, run_name="followed")
    drawn += [torch.rand(1) for _ in rows]
    load(plain, **dropout)
    drawn.append(torch.rand(1))
    assert torch.equal(torch.cat(drawn), expected)
    for name in ("drawing", "followed"):
        assert torch.equal(saved_weights(plain), saved_weights(plain.parent / name))

    def stop(row):
        torch.rand(7)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, stop, **dropout, run_name="stopped")
    resumed = train(config, **dropout, run_name="stopped", resume="auto").run_dir
    assert torch.equal(saved_weights(plain), saved_weights(resumed))
