"""What processes tell each other through the store.

Jobs that train are in tests/test_torchrun.py.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from unittest import mock

import pytest
import torch

from helpers.ports import free_port
from unet_trainer.system import distributed
from unet_trainer.system.distributed import Launch, PeerFailed, PeerLost, TorchrunJob, choose_backend, decode, encode


@pytest.mark.parametrize(
    ("device", "local_world_size", "num_gpus", "backend"),
    [("cpu", 4, 0, "gloo"), ("cuda:0", 1, 1, "nccl"), ("cuda:3", 4, 4, "nccl"), ("cuda:0", 2, 1, "gloo")],
)
def test_nccl_unless_processes_share_a_gpu(device, local_world_size, num_gpus, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_backend(torch.device(device), local_world_size) == backend


@pytest.fixture
def make_job(monkeypatch):
    """Jobs of one start, as threads: each has a rank and a connection of its own to a store that lies in this process."""
    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    made = []

    def make(rank, world_size=2, local_world_size=None):
        local = local_world_size or world_size
        job = TorchrunJob(Launch(rank, world_size, rank % local, local, rank // local, True))
        made.append(job)
        return job

    def rendezvous(url, timeout):
        yield torch.distributed.TCPStore("127.0.0.1", port, is_master=False), 0, 1

    with mock.patch("torch.distributed.rendezvous", rendezvous):
        yield make
        for job in made:
            job.close()
    del store


def in_threads(*calls):
    """What each call returns or raises."""
    outcomes = [None] * len(calls)

    def run(index, call):
        try:
            outcomes[index] = call()
        except Exception as error:  # asserted on by the test
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    return outcomes


def test_what_rank_0_makes_is_everybodys_and_made_once(make_job):
    calls = []
    jobs = [make_job(rank, 3) for rank in range(3)]

    def make():
        calls.append(1)
        return {"value": 7}

    assert in_threads(*(lambda job=job: job.broadcast_made("it", make) for job in jobs)) == [{"value": 7}] * 3
    assert len(calls) == 1


def test_a_second_start_with_the_same_store_reads_nothing_of_the_first(make_job):
    """torchrun keeps the store when it restarts a job."""
    for value in ("first", "second"):
        jobs = [make_job(0), make_job(1)]
        assert in_threads(*(lambda job=job, value=value: job.broadcast_made("it", lambda: value) for job in jobs)) == [value] * 2


def test_rank_0_reads_first_then_the_first_of_each_other_machine_then_the_rest(make_job):
    order = []
    jobs = [make_job(rank, 4, 2) for rank in range(4)]

    def read(job):
        with job.main_process_first("dataset"):
            time.sleep(0.05)
            order.append(job.launch.rank)

    assert in_threads(*(lambda job=job: read(job) for job in jobs)) == [None] * 4
    assert order[0] == 0
    assert order.index(3) > order.index(2)


def test_who_waits_learns_that_another_has_failed_and_one_speaks(make_job):
    first, second = make_job(0), make_job(1)

    def fail():
        time.sleep(0.2)
        return first.report_failure("data_dir: nothing there", 2)

    spoke, error = in_threads(fail, lambda: second.broadcast_made("it", lambda: 0))
    assert spoke is True
    assert isinstance(error, PeerFailed)
    assert (str(error), error.exit_code) == ("rank 0: data_dir: nothing there", 2)
    assert second.report_failure("something else", 3) is False
    second._connected_store = lambda seconds: 1 / 0  # the store is gone with the first: what it said before holds
    assert second.report_failure("something else", 3) is False
    assert first.report_failure("data_dir: nothing there, in other words", 2) is True  # it is still the one that speaks


@pytest.mark.parametrize("is_in_torchrun", [False, True])
def test_the_process_with_the_store_stays_until_the_others_have_looked_why_the_job_ends(make_job, monkeypatch, is_in_torchrun):
    """Both find the same mistake in a config; the second when the first would be gone, and the store with it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_in_torchrun))
    first, second = make_job(0), make_job(1)
    order, may_look = [], threading.Event()

    def fail_first():
        spoke = first.report_failure("learning_rate: fast", 2)
        order.append("first is gone")
        may_look.set()
        return spoke

    def fail_second():
        second._connected_store()
        if is_in_torchrun:
            assert may_look.wait(60)
        else:
            time.sleep(0.5)
        order.append("second looks")
        return second.report_failure("learning_rate: fast", 2)

    assert in_threads(fail_first, fail_second) == [True, False]
    assert order == (["first is gone", "second looks"] if is_in_torchrun else ["second looks", "first is gone"])


def test_a_process_without_a_sign_of_life_is_not_waited_for(make_job, monkeypatch):
    monkeypatch.setattr(distributed, "SILENT_SECONDS", 1)
    first, second = make_job(0), make_job(1)

    def stay_silent():
        first._connected_store()
        first._is_closed.set()  # its thread stops, as in a process that was stopped

    _, error = in_threads(stay_silent, lambda: second.broadcast_made("it", lambda: 0))
    assert isinstance(error, PeerLost)
    assert str(error).startswith(f"no sign of life from rank 0 (process {os.getpid()} on ")


def test_who_waits_for_others_to_start_says_so(make_job, monkeypatch, capsys):
    """Variables of torchrun that are left over in a shell make a plain start wait."""
    monkeypatch.setattr(distributed, "START_SECONDS", 3)
    monkeypatch.setattr(distributed, "PATIENT_SECONDS", 0.1)
    in_threads(lambda: make_job(0, 3)._connected_store())
    assert capsys.readouterr().err == "Waiting for all 3 processes to start (WORLD_SIZE is 3) ...\n"


def test_a_process_that_ends_while_others_are_missing_speaks_for_itself_and_waits_once(make_job, monkeypatch):
    """One was killed before it appeared."""
    monkeypatch.setattr(distributed, "REPORT_SECONDS", 1)
    job = make_job(1)
    assert in_threads(lambda: job.report_failure("data_dir: nothing there", 2)) == [True]
    monkeypatch.setattr(distributed, "REPORT_SECONDS", 3600)
    assert in_threads(lambda: job.report_failure("data_dir: nothing there", 2)) == [True]


def test_signals_before_the_start_are_told_by_rank_0_without_waiting(make_job):
    jobs = [make_job(rank, 3) for rank in range(2)]
    assert in_threads(*(lambda job=job: job.report_failure("interrupted by SIGTERM", 143) for job in jobs)) == [True, False]


def test_a_store_that_waits_for_others_in_vain_is_no_traceback(monkeypatch):
    """Variables of torchrun that are left over, and no torchrun: rank 0 makes the store, which waits for all."""
    monkeypatch.setattr(distributed, "START_SECONDS", 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    (error,) = in_threads(lambda: TorchrunJob(Launch(0, 2, 0, 2, 0, True))._connected_store())
    assert isinstance(error, PeerLost)
    assert str(error).startswith("not all 2 processes have started within 1 s (")
    assert str(error).endswith("; to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment")


def test_a_job_that_never_becomes_complete_ends(make_job, monkeypatch):
    monkeypatch.setattr(distributed, "START_SECONDS", 0.5)
    (error,) = in_threads(lambda: make_job(0, 3)._connected_store())
    assert str(error).startswith("only 1 of 3 processes have started within 0.5 s; to train with one, unset RANK, WORLD_SIZE")
    (error,) = in_threads(lambda: make_job(1, 3)._connected_store())
    assert str(error) == "rank 0 has not answered within 0.5 s; did it start?"


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
