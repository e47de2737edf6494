"""What a step takes together with its samples. How runs keep to a time budget is in test_run.py and test_setup.py."""

import dataclasses

import pytest

from helpers.steps import make_settings
from unet_trainer.config.facts import StepCost
from unet_trainer.training import time_budget
from unet_trainer.training.time_budget import step_seconds


def make_config(device, **settings):
    return dataclasses.replace(make_settings(batch_size=4, **settings).taken, device=device)


@pytest.mark.parametrize(
    ("device", "num_workers", "num_cores", "seconds"),
    [
        ("cuda", 2, 8, 0.8),  # 1.6 s of loading by two workers, beside 0.5 s of the GPU
        ("cuda:1", 4, 8, 0.5),  # hidden behind the GPU
        ("cuda", 0, 8, 2.1),
        ("cpu", 2, 8, 0.8),  # 0.5 + 1.6 / 8 = 0.7 is less than what two workers need
        ("cpu", 4, 4, 0.9),  # the same cores do both
        ("cpu", 0, 4, 2.1),
    ],
)
def test_loading_is_hidden_by_workers_beside_a_gpu_and_shares_the_cores_of_a_cpu(
    device, num_workers, num_cores, seconds, monkeypatch
):
    monkeypatch.setattr(time_budget, "count_cores", lambda: num_cores)
    cost, loading = StepCost(seconds=0.5, eval_seconds=0.1, memory=7), (0.4, 0.0)
    found = step_seconds(make_config(device, num_workers=num_workers), cost, loading)
    assert found == pytest.approx((seconds, 0.1))
