"""What differs between the processes of a torchrun job: batch norm statistics, counts of the epoch so far, random states. Weights
and optimizer state are the same bits on all of them.

Statistics are averaged at the end of an epoch, before the model is evaluated and saved. A save within an epoch holds those of each
process, so that a job of as many processes goes on as if it had never stopped; one of another number begins with their average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unet_trainer.system.processes import Processes

if TYPE_CHECKING:
    from unet_trainer.training.state import TrainState

RankState = dict[str, Any]

COUNTED_BY_EACH = ("loss_sum", "matrix", "num_bad")  # skipped steps are the same on all


def rank_state(state: TrainState) -> RankState:
    """Of this process, on the host. Waits for the device."""
    on_cuda = state.device.type == "cuda"
    totals = {name: _on_host(value) for name, value in state.metrics.state_dict().items()}
    return {
        "statistics": [_on_host(tensor) for tensor in statistics(state)],
        "totals": totals,
        "random_state": torch.get_rng_state(),
        "cuda_random_state": torch.cuda.get_rng_state(state.device) if on_cuda else None,
    }


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def statistics(state: TrainState) -> list[torch.Tensor]:
    """Running means and variances of the model and of its average."""
    networks = [state.segmenter.network, *([] if state.ema is None else [state.ema.segmenter.network])]
    return [buffer for network in networks for buffer in network.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def average_statistics(state: TrainState, processes: Processes) -> None:
    """The mean over all processes, the same bits on each."""
    tensors = statistics(state)
    if processes.is_alone or not tensors:
        return
    processes.agree()
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    processes.average(flat)
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def sum_totals(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of an epoch: those of several processes as those of one."""
    summed = dict(totals[0])
    for name in COUNTED_BY_EACH:
        summed[name] = torch.stack([one[name] for one in totals]).sum(0)
    summed["num_images"] = sum(one["num_images"] for one in totals)
    return summed


def load_rank_state(state: TrainState, ranks: Sequence[RankState] | None) -> None:
    """After the common part of a state was loaded; `ranks` are those of the job that saved it, None if it was one process."""
    if ranks is not None and len(ranks) == state.world_size:
        own = ranks[state.rank]
        _copy_statistics(state, own["statistics"])
        state.metrics.load_state_dict(own["totals"])
        torch.set_rng_state(own["random_state"].clone())  # torch reads a view from the start of its memory
        if own["cuda_random_state"] is not None and state.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_random_state"].clone(), state.device)
        return
    if ranks is not None:
        columns = list(zip(*(rank["statistics"] for rank in ranks), strict=True))
        if any(tensor.shape != column[0].shape for column in columns for tensor in column):
            raise ValueError("ranks: the statistics of the processes have other shapes")
        _copy_statistics(state, [torch.stack([tensor.double() for tensor in column]).mean(0) for column in columns])
        state.metrics.load_state_dict(sum_totals([rank["totals"] for rank in ranks]))
    if state.rank > 0:  # rank 0 has counted for all
        state.metrics.reset()
        torch.manual_seed(torch.initial_seed() + state.rank)  # else all would drop the same activations


@torch.no_grad()
def _copy_statistics(state: TrainState, values: Sequence[torch.Tensor]) -> None:
    tensors = statistics(state)
    if len(tensors) == len(values):  # else the average of weights was switched on or off since
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                raise ValueError("ranks: statistics of other shapes than this model's")
            tensor.copy_(value)
