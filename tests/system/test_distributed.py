"""What a process is told by torchrun, what one alone agrees on, and how processes find each other.

Jobs that train, and whose processes fail, are in tests/test_torchrun.py.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from helpers.ports import free_port
from unet_trainer.system import distributed
from unet_trainer.system.distributed import (
    Failure,
    Launch,
    PeerLost,
    TorchrunJob,
    cause_of,
    choose_backend,
    decode,
    device_id,
    encode,
    read_launch,
    start_command,
)
from unet_trainer.system.signals import Signals

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_torchrun_has_not_started_is_alone(missing):
    assert read_launch({name: value for name, value in TORCHRUN.items() if name != missing}) == Launch()
    assert read_launch({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == Launch()


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


@pytest.mark.parametrize(
    ("gpus", "backend"), [(["", ""], "gloo"), (["a"], "nccl"), (["a", "b"], "nccl"), (["a", "b", "b"], "gloo"), (["a", ""], "gloo")]
)
def test_nccl_unless_processes_share_a_gpu(gpus, backend, monkeypatch):
    """Each process may see one GPU alone: all of them are cuda:0 then, and differ by their UUIDs."""
    assert device_id(torch.device("cpu")) == ""
    uuids = iter(gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(uuids)))
    assert choose_backend([device_id(torch.device("cuda:0")) for _ in gpus]) == backend


@pytest.mark.parametrize(("rank", "before"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_rank_0_reads_first_then_the_first_of_each_other_machine_then_the_rest(rank, before, monkeypatch):
    """Two machines of two processes, which wait for each other twice."""
    job, exchanges = TorchrunJob(Launch(rank, 4, rank % 2, 2, rank // 2, True)), []
    monkeypatch.setattr(job, "any_rank", lambda: exchanges.append(1))
    with job.main_process_first():
        assert len(exchanges) == before
    assert len(exchanges) == 2


def test_the_gravest_of_several_errors_is_the_cause():
    signal, user, none = Failure(0, "signal", "SIGTERM"), Failure(1, "user", "a.png: changed"), Failure(2, None, "")
    assert cause_of([signal, user, none]) is user
    assert cause_of([Failure(0, None, ""), Failure(1, "user", "first"), Failure(2, "user", "second")]).text == "first"


def start_alone(rank, monkeypatch):
    """One process of two, the other of which never comes: variables of torchrun that are left over in a shell."""
    monkeypatch.setattr(distributed, "START_SECONDS", 1)
    monkeypatch.setattr(distributed, "PATIENT_SECONDS", 0.1)
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PeerLost) as caught:
        TorchrunJob(Launch(rank, 2, rank, 2, 0, True)).start(Signals())
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_never_becomes_complete_says_so_and_ends(rank, monkeypatch, capsys):
    error = start_alone(rank, monkeypatch)
    assert error.startswith("not all 2 processes have started within 1 s (")
    assert error.endswith("; to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment")
    assert capsys.readouterr().err == ("Waiting for all 2 processes to start (WORLD_SIZE is 2) ...\n" if rank == 0 else "")


class Runs:
    """Unpickled, it would run what it says."""

    def __reduce__(self):
        return print, ("run",)


def test_what_is_received_is_values_and_nothing_of_it_is_run(capsys):
    value = {"a": [1, 2.5, None, "text", b"bytes", (1, 2)], "b": torch.arange(3)}
    back = decode(encode(value))
    assert back["a"] == value["a"]
    assert torch.equal(back["b"], value["b"])
    for sent in (pickle.dumps(Runs(), protocol=2), encode(Runs())):
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            decode(sent)
    assert capsys.readouterr().out == ""
