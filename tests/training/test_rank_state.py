"""What differs between processes: averaged at the end of an epoch, saved for each within one."""

from __future__ import annotations

import pytest
import torch

from helpers.steps import make_batch, small_components, take_step
from unet_trainer.system.processes import Alone
from unet_trainer.training.rank_state import average_statistics, rank_state, statistics, sum_totals


class Pair(Alone):
    is_alone = False

    def __init__(self, other):
        self.other = other

    def average(self, tensor):
        tensor.copy_((tensor + self.other) / 2)


def components_of(rank, world_size, seed=0):
    """After one step on a batch of its own."""
    made = small_components(ema_decay=0.9)
    made.state.rank, made.state.world_size, made.state.is_in_job = rank, world_size, True
    take_step(made.train_step, make_batch(2, seed=seed), metrics=made.state.metrics)
    return made


@pytest.fixture(scope="module")
def two():
    """Two processes of a job after a step, and the checkpoint that rank 0 would save."""
    states = [components_of(rank, 2, seed=rank).state for rank in range(2)]
    ranks = [rank_state(state) for state in states]
    states[0].ranks = ranks
    return ranks, states[0].state_dict()


def test_statistics_are_those_of_the_model_and_of_its_average():
    state = components_of(0, 1).state
    names = [name for name, _ in state.segmenter.network.named_buffers() if "num_batches" not in name]
    assert len(statistics(state)) == 2 * len(names) == 8  # two batch norms: mean and variance each


def test_statistics_are_averaged_over_the_processes():
    state = components_of(0, 2).state
    before = [tensor.clone() for tensor in statistics(state)]
    average_statistics(state, Pair(1.0))
    for tensor, start in zip(statistics(state), before, strict=True):
        torch.testing.assert_close(tensor, (start + 1) / 2)


def test_one_process_keeps_its_statistics_to_the_bit():
    state = components_of(0, 1).state
    before = [tensor.clone() for tensor in statistics(state)]
    average_statistics(state, Alone())
    assert all(torch.equal(one, two) for one, two in zip(before, statistics(state), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_as_many_processes_go_on_with_their_own(two, rank):
    ranks, content = two
    state = components_of(rank, 2, seed=7).state
    state.load_state_dict(content)
    for tensor, saved in zip(statistics(state), ranks[rank]["statistics"], strict=True):
        assert torch.equal(tensor, saved)
    assert torch.equal(state.metrics.matrix, ranks[rank]["totals"]["matrix"])
    assert torch.equal(torch.get_rng_state(), ranks[rank]["random_state"])
    assert state.ranks is content["ranks"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_processes_goes_on_with_the_average_and_the_sum(two, world_size):
    ranks, content = two
    states = [components_of(rank, world_size, seed=7).state for rank in range(world_size)]
    for state in states:
        state.load_state_dict(content)
        for tensor, *saved in zip(statistics(state), *(rank["statistics"] for rank in ranks), strict=True):
            torch.testing.assert_close(tensor, sum(saved) / 2)
        assert state.ranks is None
    assert sum(state.metrics.num_images for state in states) == 4
    total = sum(state.metrics.matrix for state in states)
    assert torch.equal(total, sum(rank["totals"]["matrix"] for rank in ranks))


def test_processes_of_another_number_draw_different_random_numbers(two):
    _, content = two
    drawn = []
    for rank in range(3):
        components_of(rank, 3).state.load_state_dict(content)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_a_plain_process_saves_no_ranks():
    assert "ranks" not in small_components().state.state_dict()


def test_counts_of_processes_add_up_and_skipped_steps_do_not():
    """A step is skipped by all of them or by none."""
    ranks = [rank_state(components_of(rank, 2, seed=rank).state)["totals"] for rank in range(2)]
    for totals in ranks:
        totals["num_skipped"] = torch.tensor(3)
    summed = sum_totals(ranks)
    assert summed["num_images"] == 4
    assert int(summed["matrix"].sum()) == 4 * 16 * 16
    assert int(summed["num_skipped"]) == 3
    assert float(summed["loss_sum"]) == float(ranks[0]["loss_sum"] + ranks[1]["loss_sum"])


def test_a_random_state_that_lies_behind_others_in_memory_is_read_from_its_place(two):
    """torch.set_rng_state reads a view from the start of its memory; checkpoints put tensors one behind the other."""
    ranks, content = two
    block = torch.cat([ranks[0]["random_state"], ranks[1]["random_state"]])
    length = len(ranks[0]["random_state"])
    state = components_of(1, 2).state
    state.load_state_dict({**content, "random_state": block[length:]})
    assert torch.equal(torch.get_rng_state(), ranks[1]["random_state"])
