"""Jobs of several processes: they train as one would, and whatever happens to one of them, all know and none hangs."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from helpers.jobs import ForkedJob, end, torchrun
from helpers.killed_runs import is_running, wait_until
from helpers.ports import free_port
from helpers.runs import timeless_rows, weights_digest
from unet_trainer.datasets.demo import write_demo
from unet_trainer.runs.record import read_run_summary
from unet_trainer.training.checkpoint import read_checkpoint, read_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """16 train and 5 validate: an odd number, so that two processes validate 3 and 2."""
    folder = tmp_path_factory.mktemp("job") / "data"
    write_demo(folder, num_images=21, side=64)
    return folder


@pytest.fixture
def config(tiny_config, data):
    settings = {
        "data_dir": str(data),
        "val_fraction": 0.25,
        "batch_size": 2,
        "resume": "auto",
        "run_name": "run",
        "num_epochs": 2,
    }
    return {**tiny_config, **settings, "ema_decay": 0.9}


def folder_of(config, name="run"):
    return Path(config["checkpoint_dir"]) / name


def test_two_processes_have_the_same_bits_and_count_each_image_once(config, tmp_path):
    """With a worker process each, and one cache."""
    job = ForkedJob({**config, "num_workers": 2, "cache": "ram"}, tmp_path / "job")
    assert job.finish() == [0, 0], job.said()
    first, second = job.records(0), job.records(1)
    assert len(first) == 2
    assert [one["digest"] for one in first] == [one["digest"] for one in second]
    for record in (*first, *second):
        assert record["confusion"] == record["alone"]  # of all 5 images, at the same weights
    assert "4 effective (2 processes), 4 batches an epoch" in job.log(0)
    assert "2 on 1 machine, gradients averaged by gloo" in job.log(0)
    assert job.log(1) == ""  # rank 0 speaks
    scores = (folder_of(config) / "val_scores.csv").read_text().splitlines()
    assert len(scores) == 1 + 5
    assert "21 of 21 pairs in memory" in job.log(0)
    assert list((folder_of(config).parent / ".cache").glob("*.pixels")) == []  # it was a file, and goes with the run


def test_two_processes_begin_with_the_model_that_rank_0_has_read(config, tmp_path):
    """The other one follows its network, its normalisation and its weights."""
    first = ForkedJob({**config, "run_name": "first", "num_epochs": 1}, tmp_path / "first", world_size=1)
    assert first.finish() == [0], first.said()
    settings = {**config, "init_from": str(folder_of(config, "first")), "resume": "null", "learning_rate": 1e-9}
    open_keys = {"encoder": "auto", "decoder_channels": None, "encoder_weights": "auto", "num_epochs": 1}
    job = ForkedJob({**settings, **open_keys}, tmp_path / "job")
    assert job.finish() == [0, 0], job.said()
    assert [one["digest"] for one in job.records(0)] == [one["digest"] for one in job.records(1)]
    assert "16 of 16 tensors of" in job.log(0)
    before = read_checkpoint(folder_of(config, "first") / "best.pt")["model"]
    after = read_run(folder_of(config), print)["model"]
    torch.testing.assert_close(after["decoder.0.weight"], before["decoder.0.weight"], rtol=0, atol=1e-6)


def test_two_processes_try_learning_rates_together_and_take_the_same(config, tmp_path):
    faults = dict.fromkeys((0, 1), "pilots@0.03")
    job = ForkedJob({**config, "learning_rate": "auto", "num_workers": 2}, tmp_path / "job", faults=faults)
    assert job.finish() == [0, 0], job.said()
    assert [one["digest"] for one in job.records(0)] == [one["digest"] for one in job.records(1)]
    assert job.log(0).count("← taken") == 1


def test_two_processes_of_batch_2_train_as_one_of_batch_4(config, tmp_path):
    """Without batch norm and augmentation, and with a loss that is a mean over pixels. Accumulation averages once a group."""
    plain = {
        **config,
        "augmentation": "none",
        "loss": {"bce": 1.0},
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "ema_decay": None,
    }
    plain["accumulation_steps"] = 2
    one = ForkedJob({**plain, "batch_size": 4, "run_name": "one"}, tmp_path / "one", world_size=1, network="plain")
    two = ForkedJob({**plain, "run_name": "two"}, tmp_path / "two", network="plain")
    assert one.finish() == [0], one.said()
    assert two.finish() == [0, 0], two.said()
    alone, shared = (read_run(folder_of(config, name), print) for name in ("one", "two"))
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(shared["model"][name], tensor, rtol=1e-4, atol=1e-6)
    assert [content["num_processes"] for content in (alone, shared)] == [1, 2]
    for ours, theirs in zip(shared["history"], alone["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-3)


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={1: "nan@6"})
    assert job.finish() == [0, 0], job.said()
    assert [one["digest"] for one in job.records(0)] == [one["digest"] for one in job.records(1)]
    assert read_run_summary(folder_of(config)).column("skipped_steps") == {1: 0, 2: 1}


def test_memory_that_runs_out_in_one_process_shrinks_all_before_the_first_epoch_and_ends_the_run_later(
    config, tmp_path
):
    settings = {**config, "on_oom": "shrink", "batch_size": 4}
    job = ForkedJob(settings, tmp_path / "job", faults={1: "memory while connecting@1, memory@3"})
    assert job.finish() == [3, 3], job.said()
    assert "goes through the model in 2 parts (batch_parts)" in job.log(0)
    assert "Error: out of memory (in a step). Try batch_size=2 accumulation_steps=2, or batch_parts=4, or " in job.log(
        1
    )
    assert job.log(0).count("Error: another process of the job has ended or does not answer") == 1
    assert "Traceback" not in job.said()


def test_a_killed_process_ends_the_others_and_the_run_goes_on_to_the_same_bits(config, tmp_path):
    straight = ForkedJob({**config, "num_epochs": 4, "run_name": "straight"}, tmp_path / "straight")
    assert straight.finish() == [0, 0], straight.said()
    job = ForkedJob({**config, "num_epochs": 4}, tmp_path / "job", faults={1: "die@9"})
    assert job.finish() == [3, -signal.SIGKILL], job.said()
    (line,) = re.findall("^Error: (.*)", job.said(), re.M)
    assert line.startswith("another process of the job has ended or does not answer (")
    assert "to go on: torchrun --standalone --nproc-per-node=2 train_unet.py --resume " in line
    assert "Traceback" not in job.said()
    again = ForkedJob({**config, "num_epochs": 4}, tmp_path / "again")
    assert again.finish() == [0, 0], again.said()
    assert weights_digest(folder_of(config)) == weights_digest(folder_of(config, "straight"))
    assert timeless_rows(folder_of(config)) == timeless_rows(folder_of(config, "straight"))


def test_data_that_one_machine_alone_cannot_read_are_reported_by_its_process(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", data_dirs={1: "/nowhere"})
    assert job.finish() == [3, 2], job.said()
    assert len(re.findall("^Error: data_dir: ", job.log(1), re.M)) == 1, job.said()


def test_a_process_with_a_bug_shows_its_traceback_and_the_state_of_before_is_kept(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={1: "bug@6"})
    assert job.finish() == [3, 1]
    assert job.log(0).count("Traceback") == 0
    assert "ZeroDivisionError: division by zero" in job.log(1)
    content = read_run(folder_of(config), print)
    assert (content["epoch"], content["batch"]) == (1, 0)


def test_an_error_that_all_processes_have_is_shown_once(config, tmp_path):
    job = ForkedJob({**config, "batch_size": 512}, tmp_path / "job")
    assert job.finish() == [2, 2]
    assert len(re.findall("^Error: batch_size", job.said(), re.M)) == 1


@pytest.mark.soak
def test_a_process_that_hangs_ends_the_job_in_bounded_time(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={1: "hang@3"})
    job.processes[0].join(100)
    assert job.processes[0].exitcode == 3, job.said()
    assert "does not answer" in job.log(0)
    job.kill(1)
    job.finish()


def test_a_signal_to_one_process_saves_and_ends_all_at_the_same_step(config, tmp_path):
    """Three processes, on two machines."""
    config |= {"batch_size": 1, "cache": "ram"}
    job = ForkedJob(config, tmp_path / "job", world_size=3, machines=(1, 2), faults={1: "stop@3"})
    assert job.finish() == [143, 143, 143], job.said()
    assert job.said().count("Interrupted by SIGTERM. To go on where the state was saved") == 1
    content = read_run(folder_of(config), print)
    assert (content["epoch"], content["batch"]) == (0, 3)  # within an epoch
    again = ForkedJob(config, tmp_path / "again", world_size=3, machines=(1, 2))
    assert again.finish() == [0, 0, 0], again.said()
    assert "Resuming after batch 3 of epoch 1" in again.log(0)
    assert len({json.dumps([one["digest"] for one in again.records(rank)]) for rank in range(3)}) == 1


def test_a_run_of_two_processes_goes_on_with_one_and_says_what_changes(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={0: "stop@3"})
    assert job.finish() == [143, 143], job.said()
    alone = ForkedJob({**config, "scale_lr": True}, tmp_path / "alone", world_size=1)
    assert alone.finish() == [0], alone.said()
    assert (
        "2 processes → 1. The effective batch is 2 instead of 4, and so is the learning rate (scale_lr)" in alone.log(0)
    )
    assert "Resuming after batch 6 of epoch 1" in alone.log(0)  # 12 samples: 3 batches of 4, or 6 of 2
    rows = (folder_of(config) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3


def wait_for_epoch(folder, number):
    wait_until(lambda: any(epoch.number >= number for epoch in read_run_summary(folder).epochs))


@pytest.mark.soak
def test_sigterm_to_torchrun_saves_and_exits(config, tmp_path):
    log = tmp_path / "job.log"
    job = torchrun({**config, "num_epochs": 500}, "--nproc-per-node=2", f"--master-port={free_port()}", log=log)
    wait_for_epoch(folder_of(config), 2)
    os.kill(job.pid, signal.SIGTERM)
    assert end(job) != 0
    said = log.read_text()
    assert said.count("Interrupted by SIGTERM. To go on where the state was saved") == 1, said
    assert "torchrun --standalone --nproc-per-node=2 train_unet.py --resume" in said
    content = read_run(folder_of(config), print)
    assert content["epoch"] >= 2


@pytest.mark.soak
def test_processes_save_and_end_when_torchrun_itself_is_killed(config, tmp_path):
    """Nobody else would end them: they would train on, hold the GPUs and the lock of the run."""
    log = tmp_path / "job.log"
    job = torchrun({**config, "num_epochs": 5000}, "--nproc-per-node=2", f"--master-port={free_port()}", log=log)
    wait_for_epoch(folder_of(config), 2)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert len(ranks) == 2
    job.kill()
    job.wait()
    wait_until(lambda: not any(is_running(rank) for rank in ranks))
    said = log.read_text()
    assert "Interrupted by the end of torchrun (was it killed?). To go on where the state was saved" in said
    assert "Traceback" not in said


@pytest.mark.soak
def test_two_torchrun_agents_are_two_machines_and_both_restart_when_a_process_of_one_is_killed(config, tmp_path):
    """Only the agent whose process was killed counts a restart."""
    settings = config
    straight = ForkedJob({**settings, "run_name": "straight"}, tmp_path / "straight")
    assert straight.finish() == [0, 0], straight.said()
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job")
    address, logs = (
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        [tmp_path / f"machine{number}.log" for number in range(2)],
    )
    agents = [torchrun(settings, *options, address, log=log, fault="1:die@6") for log in logs]
    codes = [end(agent) for agent in agents]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert said.count("2 on 2 machines") == 2  # of the two starts
    assert weights_digest(folder_of(config)) == weights_digest(folder_of(config, "straight"))


@pytest.mark.soak
def test_ten_kills_of_either_process_at_random_moments_change_no_bit(config, tmp_path):
    """While they train, validate and save; each start goes on after the last epoch that was saved."""
    settings = {**config, "num_epochs": 30}
    straight = ForkedJob({**settings, "run_name": "straight"}, tmp_path / "straight")
    assert straight.finish() == [0, 0], straight.said()
    chooser = random.Random(5)
    num_killed = 0
    for number in range(10):
        job = ForkedJob(settings, tmp_path / f"job{number}")
        wait_until(lambda job=job: job.has_started() or job.processes[0].exitcode is not None)
        time.sleep(chooser.uniform(0, 0.2))
        job.kill(chooser.randrange(2))
        codes = job.finish()
        assert set(codes) <= {0, 3, -signal.SIGKILL}, job.said()  # 0: it was done before
        assert "Traceback" not in job.said()
        num_killed += -signal.SIGKILL in codes
    assert num_killed >= 5
    last = ForkedJob(settings, tmp_path / "last")
    assert last.finish() == [0, 0], last.said()
    assert weights_digest(folder_of(config)) == weights_digest(folder_of(config, "straight"))
    assert timeless_rows(folder_of(config)) == timeless_rows(folder_of(config, "straight"))
