"""What a process is told by torchrun, and what one alone agrees on."""

from __future__ import annotations

import pytest
import torch

from unet_trainer.system.distributed import ALONE, Launch, current, read_launch, start_command

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_tells_each_process_its_place():
    assert read_launch(TORCHRUN) == Launch(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1, is_torchrun=True)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_torchrun_has_not_started_is_alone(missing):
    assert read_launch({name: value for name, value in TORCHRUN.items() if name != missing}) == Launch()
    assert read_launch({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == Launch()


def test_one_process_agrees_with_itself_and_loads_nothing():
    tensor = torch.ones(2)
    ALONE.all_reduce_mean(tensor)
    ALONE.connect(torch.device("cpu"), 1)
    with ALONE.main_process_first("dataset"):
        assert ALONE.broadcast_made("name", lambda: 3) == 3
    assert (ALONE.is_main, ALONE.is_alone, ALONE.launch.world_size) == (True, True, 1)
    assert (ALONE.any_rank(), ALONE.any_rank(True)) == (False, True)
    assert (ALONE.all_gather(1), ALONE.all_gather_failed(2), ALONE.broadcast(3)) == ([1], [2], 3)
    assert ALONE.report_failure("a reason", 2)
    assert tensor.tolist() == [1, 1]
    assert not torch.distributed.is_initialized()
    assert current() is ALONE


@pytest.mark.parametrize(
    ("launch", "command"),
    [
        (Launch(), "python train_unet.py"),
        (Launch(3, 8, 3, 8, 0, True), "torchrun --standalone --nproc-per-node=8 train_unet.py"),
        (
            Launch(9, 16, 1, 8, 1, True),
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --nproc-per-node=8 train_unet.py",
        ),
    ],
)
def test_a_process_knows_how_it_was_started(launch, command):
    assert start_command(launch) == command
