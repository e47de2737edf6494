"""Jobs of several processes: they train as one would, and whatever happens to one of them, all know and none hangs."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from helpers.jobs import ForkedJob, end, torchrun
from helpers.killed_runs import is_running, wait_until
from helpers.ports import free_port
from helpers.runs import timeless_rows, weights_digest
from unet_trainer.datasets.demo import write_demo
from unet_trainer.training.checkpoint_file import read_checkpoint, read_run
from unet_trainer.training.history import read_events


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """16 train and 5 validate: an odd number, so that two processes validate 3 and 2."""
    folder = tmp_path_factory.mktemp("job") / "data"
    write_demo(folder, num_images=21, side=64)
    return folder


@pytest.fixture
def config(tiny_config, data):
    places = {"data_dir": str(data), "run_name": "run", "resume": "auto"}
    settings = {"val_fraction": 0.25, "batch_size": 2, "num_epochs": 2, "ema_decay": 0.9, "process_timeout": 60}
    return {**tiny_config, **places, **settings}


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
    assert len(list((folder_of(config).parent / ".cache").glob("*.pixels"))) == 2  # of training and validation


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
    plain = {**config, "augmentation": "none", "loss": {"bce": 1.0}, "optimizer": "sgd", "learning_rate": 0.1}
    plain |= {"ema_decay": None, "accumulation_steps": 2}
    one = ForkedJob({**plain, "batch_size": 4, "run_name": "one"}, tmp_path / "one", world_size=1, network="plain")
    two = ForkedJob({**plain, "run_name": "two"}, tmp_path / "two", network="plain")
    assert one.finish() == [0], one.said()
    assert two.finish() == [0, 0], two.said()
    alone, shared = (read_run(folder_of(config, name), print) for name in ("one", "two"))
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(shared["model"][name], tensor, rtol=1e-4, atol=1e-6)
    assert [len(content["ranks"]) for content in (alone, shared)] == [1, 2]
    for ours, theirs in zip(shared["history"], alone["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-3)


def test_what_goes_wrong_in_one_process_is_handled_by_all(config, tmp_path):
    """Rank 1 runs out of memory before the first step and has numbers that are not finite in step 3; rank 0 runs out of memory in
    step 6, when some of its gradients have been averaged and others not."""
    settings = {**config, "on_oom": "shrink", "batch_size": 4, "num_epochs": 4}
    faults = {0: "memory in backward@6", 1: "memory while connecting@1, nan@3"}
    job = ForkedJob(settings, tmp_path / "job", faults=faults)
    assert job.finish() == [0, 0], job.said()
    first, second = job.records(0), job.records(1)
    assert [one["digest"] for one in first] == [one["digest"] for one in second]
    # The first time that each was trained: an epoch whose state was still being written when memory ran out is trained again.
    events = [event for event in read_events(folder_of(config)) if event["kind"] == "epoch"]
    steps = {event["epoch"]: (event["skipped_steps"], event["nan_steps"]) for event in reversed(events)}
    assert steps == {1: (0, 0), 2: (1, 1), 3: (0, 0), 4: (0, 0)}
    for number, cause in ((2, "while connecting"), (4, "in the backward pass")):
        (line,) = [line for line in job.said().splitlines() if f"goes through the model in {number} parts" in line]
        assert cause in line


def test_a_process_that_fails_between_synchronised_layers_ends_the_job_and_says_why(config, tmp_path):
    """The other waits in a layer, where it cannot be told: it learns of it by the end of the first."""
    settings = {**config, "sync_batchnorm": True, "on_oom": "shrink"}
    job = ForkedJob(settings, tmp_path / "job", faults={1: "memory in forward@3"}, network="synchronised")
    assert job.finish() == [3, 3], job.said()
    (line,) = re.findall("^Error: (.*)", job.said(), re.M)
    assert line.startswith(
        "in the forward pass: with sync_batchnorm the others cannot go on in smaller parts. Try a smaller batch_size"
    )
    assert "Traceback" not in job.said()


def test_a_killed_process_ends_the_others_and_is_named(config, tmp_path):
    job = ForkedJob({**config, "num_epochs": 500}, tmp_path / "job")
    wait_until(lambda: "Epoch 1/500" in job.log(0))
    job.kill(1)
    assert job.finish() == [3, -signal.SIGKILL]
    (line,) = re.findall("^Error: (.*)", job.said(), re.M)
    assert line.startswith(f"rank 1 (process {job.processes[1].pid} on ")
    assert "to go on: torchrun --standalone --nproc-per-node=2 train_unet.py --resume " in line
    assert "Traceback" not in job.said()


def test_data_that_one_machine_alone_cannot_read_are_told_by_its_process(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", data_dirs={1: "/nowhere"})
    assert job.finish() == [2, 2], job.said()
    assert job.log(0).count("Error: ") == 0
    assert len(re.findall("^Error: data_dir: ", job.log(1), re.M)) == 1, job.said()


def test_a_bug_in_one_process_is_shown_once_and_the_state_of_before_is_kept(config, tmp_path):
    settings = {**config, "checkpoint_minutes": 1e-6}
    job = ForkedJob(settings, tmp_path / "job", faults={1: "bug@6"})
    assert job.finish() == [1, 1]
    assert job.said().count("Traceback (most recent call last)") == 1
    assert "ZeroDivisionError: division by zero" in job.log(1)
    assert "Error: rank 1: ZeroDivisionError: division by zero" in (folder_of(config) / "train.log").read_text()
    content = read_run(folder_of(config), print)
    assert (1, 0) <= (content["epoch"], content["batch"]) <= (1, 1)  # the step under way is not in it


@pytest.mark.soak
def test_a_process_that_hangs_ends_the_job_in_bounded_time(config, tmp_path):
    job = ForkedJob({**config, "process_timeout": 30}, tmp_path / "job", faults={1: "hang@3"})
    job.processes[0].join(100)
    assert job.processes[0].exitcode == 3, job.said()
    assert f"rank 1 (process {job.processes[1].pid} on " in job.log(0)
    assert "does not answer" in job.log(0)
    job.kill(1)
    job.finish()


def test_a_signal_to_one_process_saves_and_ends_all_and_the_bits_are_as_if_it_had_not_come(config, tmp_path):
    """Three processes, on two machines: what the sum of three numbers is depends on their order."""
    config |= {"batch_size": 1, "cache": "ram"}
    straight = ForkedJob({**config, "run_name": "straight"}, tmp_path / "straight", world_size=3, machines=(1, 2))
    assert straight.finish() == [0, 0, 0], straight.said()
    job = ForkedJob(config, tmp_path / "job", world_size=3, machines=(1, 2), faults={1: "stop@3"})
    assert job.finish() == [143, 143, 143], job.said()
    assert len(re.findall("^Error: interrupted by SIGTERM", job.said(), re.M)) == 1
    content = read_run(folder_of(config), print)
    assert (content["epoch"], content["batch"]) == (0, 3)  # within an epoch
    again = ForkedJob(config, tmp_path / "again", world_size=3, machines=(1, 2))
    assert again.finish() == [0, 0, 0], again.said()
    assert weights_digest(folder_of(config)) == weights_digest(folder_of(config, "straight"))
    assert timeless_rows(folder_of(config)) == timeless_rows(folder_of(config, "straight"))
    assert [one["digest"] for one in again.records(1)] == [one["digest"] for one in straight.records(1)]


def test_a_run_of_two_processes_goes_on_with_one_and_says_what_changes(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={0: "stop@3"})
    assert job.finish() == [143, 143], job.said()
    alone = ForkedJob({**config, "scale_lr": True}, tmp_path / "alone", world_size=1)
    assert alone.finish() == [0], alone.said()
    said = alone.log(0)
    assert "2 processes → 1. The effective batch is 2 instead of 4, and so is the learning rate (scale_lr)" in said
    assert "Resuming after batch 6 of epoch 1" in said  # 12 samples: 3 batches of 4, or 6 of 2
    rows = (folder_of(config) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3


def wait_for_epoch(folder, number):
    wait_until(
        lambda: any(event.get("epoch", 0) >= number for event in read_events(folder) if event["kind"] == "epoch")
    )


@pytest.mark.soak
def test_sigterm_to_torchrun_saves_and_exits(config, tmp_path):
    log = tmp_path / "job.log"
    job = torchrun({**config, "num_epochs": 500}, "--nproc-per-node=2", f"--master-port={free_port()}", log=log)
    wait_for_epoch(folder_of(config), 2)
    os.kill(job.pid, signal.SIGTERM)
    assert end(job) != 0
    said = log.read_text()
    assert said.count("Error: interrupted by SIGTERM") == 1, said
    assert "torchrun --standalone --nproc-per-node=2 train_unet.py --resume" in said
    assert "Interrupted. To go on where the state was saved" in said
    content = read_run(folder_of(config), print)
    assert len(content["ranks"]) == 2
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
    assert "Interrupted. To go on where the state was saved" in said
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if "Error: " in line] == [
        "Error: interrupted by the end of torchrun (was it killed?)"
    ]


@pytest.mark.soak
def test_two_torchrun_agents_are_two_machines_and_both_restart_when_a_process_of_one_is_killed(config, tmp_path):
    """Only the agent whose process was killed counts a restart."""
    settings = {**config, "checkpoint_minutes": 1e-6}
    straight = ForkedJob({**settings, "run_name": "straight"}, tmp_path / "straight")
    assert straight.finish() == [0, 0], straight.said()
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job")
    address = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    logs = [tmp_path / f"machine{number}.log" for number in range(2)]
    agents = [torchrun(settings, *options, address, log=log, fault="1:die@6") for log in logs]
    codes = [end(agent) for agent in agents]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert said.count("2 on 2 machines") == 2  # of the two starts
    assert said.count("Error: rank 1 (process ") == 1
    assert weights_digest(folder_of(config)) == weights_digest(folder_of(config, "straight"))
