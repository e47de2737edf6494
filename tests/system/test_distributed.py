"""What a process is told by torchrun, what one alone agrees on, and how processes find each other.

Jobs that train, and whose processes fail, are in tests/test_torchrun.py.
"""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.ports import free_port
from unet_trainer.system import distributed
from unet_trainer.system.distributed import (
    Failure,
    Job,
    Launch,
    PeerFailed,
    PeerLost,
    choose_backend,
    decode,
    device_id,
    encode,
    find_attempt,
    read_launch,
)
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.training.run_folder import resume_command

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


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


@pytest.mark.parametrize(("rank", "before"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_rank_0_reads_first_then_the_first_of_each_other_machine_then_the_rest(rank, before, monkeypatch):
    """Two machines of two processes, which wait for each other twice."""
    job, exchanges = Job(Launch(rank, 4, rank % 2, 2, True)), []
    monkeypatch.setattr(job, "any_rank", lambda: exchanges.append(1))
    with job.main_process_first():
        assert len(exchanges) == before
    assert len(exchanges) == 2


class Meeting(Job):
    """Of processes on machines of two; this is rank 0, and these are the failures of the others."""

    _control = "gloo"

    def __init__(self, *others):
        super().__init__(Launch(0, 1 + len(others), 0, 2, True))
        self.others, self.has_told = others, False

    def any_rank(self, wanted=False, has_failed=False):
        self.has_told |= has_failed
        return wanted

    def all_gather(self, value):
        return [value, *map(tuple, self.others)]


def test_the_gravest_of_several_errors_is_the_cause_and_the_first_of_its_kind():
    told, user, late = (
        Failure(1, "told"),
        Failure(2, "error", "a.png: changed", 2),
        Failure(3, "error", "b.png: changed", 2),
    )
    assert Meeting(told, user, late).agree(Interrupted(15)) == user
    assert (str(user.as_error()), user.as_error().exit_code) == ("rank 2: a.png: changed", 2)
    assert Meeting(told, user).agree(ZeroDivisionError("a bug")) == Failure(0, "bug", "ZeroDivisionError: a bug", 1)
    cause = Meeting(told).agree(Interrupted(15))
    assert (cause.kind, cause.as_error().signal_number) == ("signal", 15)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False), (2, True)])
def test_who_has_the_cause_tells_the_others_and_speaks_and_rank_0_for_one_on_another_machine(rank, speaks):
    meeting = Meeting(*(Failure(peer, "bug" if peer == rank else "told") for peer in (1, 2)))
    meeting._was_told = rank != 0
    meeting.agree(PeerFailed() if meeting._was_told else ZeroDivisionError("a bug"))
    assert meeting.speaks is speaks
    assert meeting.has_told is (rank == 0)


@pytest.mark.parametrize(
    ("other", "agreed"), [((1, 3), (1, 3)), (None, None), ((1, 4), None)], ids=["there", "mid step", "elsewhere"]
)
def test_a_position_is_agreed_on_if_all_have_it(other, agreed):
    assert Meeting(Failure(1, "told", position=other)).agree(Interrupted(15), position=(1, 3)).position == agreed


def test_a_restart_with_the_same_store_reads_nothing_of_the_start_before():
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("hello/1", "of the start before")
    attempts = []
    for _ in range(2):
        peer = dist.TCPStore("127.0.0.1", port, is_master=False)
        thread = threading.Thread(target=lambda peer=peer: attempts.append(find_attempt(peer, 1, 2)))
        thread.start()
        attempts.append(find_attempt(store, 0, 2))
        thread.join()
    assert attempts[0] == attempts[1]
    assert attempts[2] == attempts[3]
    assert attempts[0] != attempts[2]


def start_alone(rank, monkeypatch):
    """One process of two, the other of which never comes: variables of torchrun that are left over in a shell."""
    monkeypatch.setattr(distributed, "START_SECONDS", 1)
    monkeypatch.setattr(distributed, "PATIENT_SECONDS", 0.1)
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PeerLost) as caught:
        Job(Launch(rank, 2, rank, 2, True)).start(Signals())
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_never_becomes_complete_says_so_and_ends(rank, monkeypatch, capsys):
    error = start_alone(rank, monkeypatch)
    assert error.startswith("not all 2 processes have started within 1 s (")
    assert error.endswith("; to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment")
    assert capsys.readouterr().err == (
        "Waiting for all 2 processes to start (WORLD_SIZE is 2) ...\n" if rank == 0 else ""
    )


class Runs:
    """Unpickled, it would run what it says."""

    def __reduce__(self):
        return print, ("run",)


def test_what_is_received_is_values_and_nothing_of_it_is_run(capsys):
    value = {"a": [1, 2.5, None, "text", b"bytes", (1, 2)], "b": torch.arange(3)}
    back = decode(encode(value))
    assert back["a"] == value["a"]
    assert torch.equal(back["b"], value["b"])
    for sent in (torch.frombuffer(bytearray(pickle.dumps(Runs(), protocol=2)), dtype=torch.uint8), encode(Runs())):
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            decode(sent)
    assert capsys.readouterr().out == ""
