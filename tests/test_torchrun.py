"""Jobs of several processes: they train as one would, and whatever happens to one of them, none hangs."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from helpers.jobs import ForkedJob, end, torchrun
from helpers.killed_runs import wait_until
from helpers.ports import free_port
from helpers.runs import assert_same_run, weights_digest
from unet_trainer.data.formats.demo import write_demo
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
    settings = {"data_dir": str(data), "val_fraction": 0.25, "batch_size": 2, "num_epochs": 2, "ema_decay": 0.9}
    return {**tiny_config, **settings, "resume": "auto", "run_name": "run"}


@pytest.fixture
def run_job(config, tmp_path):
    """Trains with these settings in a process for each exit code that is expected (None: it ends since another one has,
    however it notices that); returns the job, which has ended."""

    def run(*codes, faults=None, network="small", data_dirs=None, machines=None, **settings):
        folder = tmp_path / f"job{len(list(tmp_path.glob('job*')))}"
        job = ForkedJob({**config, **settings}, folder, len(codes), faults, network, data_dirs, machines)
        found = [
            None if wanted is None and code in (1, 3) else code
            for wanted, code in zip(codes, job.finish(), strict=True)
        ]
        assert found == [*codes], job.said()
        assert None in codes or "Traceback" not in job.said()
        return job

    return run


@pytest.fixture
def folder(config):
    return Path(config["checkpoint_dir"]) / "run"


def test_two_processes_have_the_same_bits_and_count_each_image_once(folder, run_job):
    """With a worker process each, and one cache."""
    job = run_job(0, 0, num_workers=2, cache="ram")
    assert job.have_same_bits()
    assert len(job.records(0)) == 2
    for record in (*job.records(0), *job.records(1)):
        assert record["confusion"] == record["alone"]  # of all 5 images, at the same weights
    assert "4 effective (2 processes), 4 batches an epoch" in job.log(0)
    assert "2 on 1 machine, gradients averaged by gloo" in job.log(0)
    assert job.log(1) == ""  # rank 0 speaks
    assert len((folder / "val_scores.csv").read_text().splitlines()) == 1 + 5
    assert "21 of 21 pairs in memory" in job.log(0)
    assert list((folder.parent / ".cache").glob("*.pixels")) == []  # it was a file, and goes with the run


def test_two_processes_begin_with_the_model_that_rank_0_has_read(folder, run_job):
    """The other one follows its network, its normalisation and its weights."""
    run_job(0, run_name="first", num_epochs=1)
    first = folder.with_name("first")
    open_keys = {"encoder": "auto", "decoder_channels": None, "encoder_weights": "auto"}
    job = run_job(0, 0, init_from=str(first), resume="null", learning_rate=1e-9, num_epochs=1, **open_keys)
    assert job.have_same_bits()
    assert "16 of 16 tensors of" in job.log(0)
    before, after = read_checkpoint(first / "best.pt")["model"], read_run(folder, print)["model"]
    torch.testing.assert_close(after["decoder.0.weight"], before["decoder.0.weight"], rtol=0, atol=1e-6)


def test_two_processes_try_learning_rates_together_and_take_the_same(run_job):
    job = run_job(0, 0, faults=dict.fromkeys((0, 1), "pilots@0.03"), learning_rate="auto", num_workers=2)
    assert job.have_same_bits()
    assert job.log(0).count("← taken") == 1


def test_two_processes_of_batch_2_train_as_one_of_batch_4(folder, run_job):
    """Without batch norm and augmentation, and with a loss that is a mean over pixels. Accumulation averages once a group."""
    plain = {"augmentation": "none", "loss": {"bce": 1.0}, "optimizer": "sgd", "learning_rate": 0.1, "ema_decay": None}
    plain |= {"accumulation_steps": 2, "network": "plain"}
    run_job(0, **plain, batch_size=4, run_name="one")
    run_job(0, 0, **plain, run_name="two")
    alone, shared = (read_run(folder.with_name(name), print) for name in ("one", "two"))
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(shared["model"][name], tensor, rtol=1e-4, atol=1e-6)
    assert [content["num_processes"] for content in (alone, shared)] == [1, 2]
    for ours, theirs in zip(shared["history"], alone["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-3)


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(folder, run_job):
    assert run_job(0, 0, faults={1: "nan@6"}).have_same_bits()
    assert read_run_summary(folder).column("skipped_steps") == {1: 0, 2: 1}


def test_memory_that_runs_out_in_one_process_shrinks_all_before_the_first_epoch_and_ends_the_run_later(run_job):
    job = run_job(None, 3, faults={1: "memory while connecting@1, memory@3"}, on_oom="shrink", batch_size=4)
    assert "goes through the model in 2 parts (batch_parts)" in job.log(0)
    error = "Error: out of memory (in a step). Try batch_size=2 accumulation_steps=2, or batch_parts=4, or "
    assert error in job.log(1)


def test_a_killed_process_ends_the_others_and_the_run_goes_on_to_the_same_bits(folder, run_job):
    run_job(0, 0, num_epochs=4, run_name="straight")
    run_job(None, -signal.SIGKILL, num_epochs=4, faults={1: "die@9"})
    run_job(0, 0, num_epochs=4)
    assert_same_run(folder, folder.with_name("straight"))


def test_errors_of_data_that_one_machine_cannot_read_of_all_processes_and_of_a_bug_are_shown(folder, run_job):
    """By each process that has them; of a bug its traceback, and the state of before is kept."""
    job = run_job(None, 2, data_dirs={1: "/nowhere"})
    assert len(re.findall("^Error: data_dir: ", job.log(1), re.M)) == 1, job.said()
    job = run_job(2, 2, batch_size=512)
    assert all(len(re.findall("^Error: batch_size", job.log(rank), re.M)) == 1 for rank in (0, 1))
    job = run_job(None, 1, faults={1: "bug@6"})
    assert "ZeroDivisionError: division by zero" in job.log(1)
    content = read_run(folder, print)
    assert (content["epoch"], content["batch"]) == (1, 0)


@pytest.mark.soak
def test_a_process_that_hangs_ends_the_job_in_bounded_time(config, tmp_path):
    job = ForkedJob(config, tmp_path / "job", faults={1: "hang@3"})
    job.processes[0].join(100)
    assert job.processes[0].exitcode in (1, 3), job.said()
    job.kill(1)
    job.finish()


def test_a_signal_to_one_process_saves_and_ends_all_at_the_same_step(folder, run_job):
    """Three processes, on two machines."""
    job = run_job(143, 143, 143, machines=(1, 2), faults={1: "stop@3"}, batch_size=1, cache="ram")
    assert job.said().count("Interrupted by SIGTERM; to go on where the state was saved") == 1
    content = read_run(folder, print)
    assert (content["epoch"], content["batch"]) == (0, 3)  # within an epoch
    again = run_job(0, 0, 0, machines=(1, 2), batch_size=1, cache="ram")
    assert "Resuming after batch 3 of epoch 1" in again.log(0)
    assert again.have_same_bits()


def test_a_run_of_two_processes_goes_on_with_one_and_says_what_changes(folder, run_job):
    run_job(143, 143, faults={0: "stop@3"})
    said = run_job(0, scale_lr=True).log(0)
    assert "2 processes → 1. The effective batch is 2 instead of 4, and so is the learning rate (scale_lr)" in said
    assert "Resuming after batch 6 of epoch 1" in said  # 12 samples: 3 batches of 4, or 6 of 2
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3


def start_torchrun(config, folder, log):
    """A job that has finished two epochs."""
    job = torchrun({**config, "num_epochs": 5000}, "--nproc-per-node=2", f"--master-port={free_port()}", log=log)
    wait_until(lambda: any(epoch.number >= 2 for epoch in read_run_summary(folder).epochs))
    return job


@pytest.mark.soak
def test_sigterm_to_torchrun_saves_and_exits(config, folder, tmp_path):
    log = tmp_path / "job.log"
    job = start_torchrun(config, folder, log)
    os.kill(job.pid, signal.SIGTERM)
    assert end(job) != 0
    said = log.read_text()
    assert said.count("Interrupted by SIGTERM; to go on where the state was saved") == 1, said
    assert "torchrun --standalone --nproc-per-node=2 train_unet.py --resume" in said
    assert read_run(folder, print)["epoch"] >= 2


@pytest.mark.soak
def test_two_torchrun_agents_are_two_machines_and_both_restart_when_a_process_of_one_is_killed(
    config, folder, run_job, tmp_path
):
    """Only the agent whose process was killed counts a restart."""
    run_job(0, 0, run_name="straight")
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job")
    address, logs = f"--rdzv-endpoint=127.0.0.1:{free_port()}", [tmp_path / f"machine{number}.log" for number in (0, 1)]
    agents = [torchrun(config, *options, address, log=log, fault="1:die@6") for log in logs]
    codes = [end(agent) for agent in agents]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert said.count("2 on 2 machines") == 2  # of the two starts
    assert weights_digest(folder) == weights_digest(folder.with_name("straight"))


@pytest.mark.soak
def test_ten_kills_of_either_process_at_random_moments_change_no_bit(config, folder, run_job, tmp_path):
    """While they train, validate and save; each start goes on after the last epoch that was saved."""
    run_job(0, 0, num_epochs=30, run_name="straight")
    chooser = random.Random(5)
    num_killed = 0
    for number in range(10):
        job = ForkedJob({**config, "num_epochs": 30}, tmp_path / f"killed{number}")
        wait_until(lambda job=job: job.has_started() or job.processes[0].exitcode is not None)
        time.sleep(chooser.uniform(0, 0.2))
        job.kill(chooser.randrange(2))
        codes = job.finish()
        assert set(codes) <= {0, 1, 3, -signal.SIGKILL}, job.said()  # 0: it was done before
        num_killed += -signal.SIGKILL in codes
    assert num_killed >= 5
    run_job(0, 0, num_epochs=30)
    assert_same_run(folder, folder.with_name("straight"))
