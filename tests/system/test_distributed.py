"""What a process is told by torchrun, what one alone agrees on, and how processes find each other.

Jobs that train, and whose processes fail, are in tests/test_torchrun.py.
"""

import pickle
from types import SimpleNamespace

import pytest
import torch

from helpers.hostile import Call
from helpers.ports import free_port
from unet_trainer.system import distributed
from unet_trainer.system.distributed import (
    Failure,
    Job,
    Launch,
    PeerLost,
    choose_backend,
    decode,
    device_id,
    encode,
    read_launch,
)
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.training.run_folder import resume_command

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_torchrun_has_not_started_is_alone(missing, monkeypatch):
    for name, value in {**TORCHRUN, "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert read_launch() == Launch()


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "python"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "torchrun --standalone --nproc-per-node=8"),
        (TORCHRUN, "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --nproc-per-node=4"),
    ],
)
def test_a_run_is_resumed_as_it_was_started(environment, start, monkeypatch, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resume_command(tmp_path) == f"{start} train_unet.py --resume {tmp_path}"


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(["", ""], "gloo"), (["a"], "nccl"), (["a", "b"], "nccl"), (["a", "b", "b"], "gloo"), (["a", ""], "gloo")],
)
def test_nccl_unless_processes_share_a_gpu(gpus, backend, monkeypatch):
    """Each process may see one GPU alone: all of them are cuda:0 then, and differ by their UUIDs."""
    assert device_id(torch.device("cpu")) == ""
    uuids = iter(gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(uuids)))
    assert choose_backend([device_id(torch.device("cuda:0")) for _ in gpus]) == backend


def agree(monkeypatch, error, *others):
    """What rank 0, which has this error, agrees on with ranks that have these failures."""
    job = Job(Launch(0, 1 + len(others), 0, 2, True))
    monkeypatch.setattr(job, "_control", "gloo")
    monkeypatch.setattr(job, "any_rank", lambda *_, **__: False)
    monkeypatch.setattr(job, "all_gather", lambda value: [value, *map(tuple, others)])
    return job.agree(error, position=(1, 3))


def test_the_gravest_of_several_errors_is_the_cause_and_the_first_of_its_kind(monkeypatch):
    told, user, late = (
        Failure(1, "told", position=(1, 3)),
        Failure(2, "error", "a.png: changed", 2),
        Failure(3, "error", "b.png: changed", 2),
    )
    assert agree(monkeypatch, Interrupted(15), told, user, late) == user  # and no position is common to all
    assert (str(user.as_error()), user.as_error().exit_code) == ("rank 2: a.png: changed", 2)
    bug = agree(monkeypatch, ZeroDivisionError("a bug"), told, user)
    assert bug == Failure(0, "bug", "ZeroDivisionError: a bug", 1)
    cause = agree(monkeypatch, Interrupted(15), told)
    assert (cause.kind, cause.as_error().signal_number, cause.position) == ("signal", 15, (1, 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_never_becomes_complete_says_so_and_ends(rank, monkeypatch, capsys):
    """Variables of torchrun that are left over in a shell: the other of two processes never comes."""
    monkeypatch.setattr(distributed, "START_SECONDS", 1)
    monkeypatch.setattr(distributed, "PATIENT_SECONDS", 0.1)
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PeerLost) as caught:
        Job(Launch(rank, 2, rank, 2, True)).start(Signals())
    error = str(caught.value)
    assert error.startswith("not all 2 processes have started within 1 s (")
    assert error.endswith("; to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment")
    said = "Waiting for all 2 processes to start (WORLD_SIZE is 2) ...\n"
    assert capsys.readouterr().err == (said if rank == 0 else "")


def test_what_is_received_is_values_and_nothing_of_it_is_run(capsys):
    value = {"a": [1, 2.5, None, "text", b"bytes", (1, 2)], "b": torch.arange(3)}
    back = decode(encode(value))
    assert back["a"] == value["a"]
    assert torch.equal(back["b"], value["b"])
    hostile = Call(print, "run")
    for sent in (torch.frombuffer(bytearray(pickle.dumps(hostile, protocol=2)), dtype=torch.uint8), encode(hostile)):
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            decode(sent)
    assert capsys.readouterr().out == ""
