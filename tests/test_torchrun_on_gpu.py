"""Jobs on a GPU: one process with NCCL, and two that share it, compiled in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.jobs import end, torchrun
from unet_trainer.training.checkpoint_file import read_run

pytestmark = pytest.mark.gpu

COMPILING_SECONDS = 400  # after which a job that compiles hangs
COMPILED = {"device": "cuda", "use_amp": True, "amp_dtype": "bfloat16", "compile_model": True, "image_size": 64, "ema_decay": 0.9}


@pytest.fixture
def config(tiny_config):
    return {**tiny_config, **COMPILED, "batch_size": 2, "num_workers": 2, "run_name": "run", "num_epochs": 3}


def run_job(config, num_processes, tmp_path):
    """What was said, and the records of each process."""
    log = tmp_path / "job.log"
    job = torchrun(config, f"--nproc-per-node={num_processes}", "--standalone", log=log, network="unet")
    assert end(job, COMPILING_SECONDS) == 0, log.read_text()
    assert "compiling failed" not in log.read_text()
    files = [tmp_path / f"job.rank{rank}" for rank in range(num_processes)]
    return log.read_text(), *([json.loads(line) for line in file.read_text().splitlines()] for file in files)


def test_one_process_with_nccl_trains_compiled(config, tmp_path):
    """The averaged gradients go through NCCL between replayed graphs."""
    said, records = run_job(config, 1, tmp_path)
    assert "1 on 1 machine, gradients averaged by nccl" in said
    assert "✓ Compiled in" in said
    assert all(record["confusion"] == record["alone"] for record in records)
    assert [record["skips"] for record in records] == [0, 0, 0]
    assert (
        records[-1]["replays"] >= records[0]["replays"] + 2
    )  # an epoch has at least one step: what follows the backward pass is replayed


def test_two_processes_that_share_a_gpu_have_the_same_bits(config, tmp_path):
    """With gloo: NCCL refuses two processes on one GPU."""
    said, first, second = run_job(config, 2, tmp_path)
    assert "Warning: 2 processes share 1 GPU: gradients go through the host (gloo)" in said
    assert len(first) == 3
    assert [record["digest"] for record in first] == [record["digest"] for record in second]
    assert all(record["confusion"] == record["alone"] and record["skips"] == 0 for record in (*first, *second))
    assert (Path(config["checkpoint_dir"]) / "run" / "best.pt").exists()


def test_synchronised_batch_norm_of_two_processes_is_that_of_one_with_both_batches(tiny_config, tmp_path):
    """In float32, without augmentation, and with a loss that is a mean over pixels."""
    settings = {**tiny_config, "device": "cuda", "num_epochs": 3, "batch_size": 2, "augmentation": "none", "loss": {"bce": 1.0}}
    settings |= {"optimizer": "sgd", "learning_rate": 0.1, "allow_tf32": False, "sync_batchnorm": True}
    for name, number, size in (("one", 1, 4), ("two", 2, 2)):
        log = tmp_path / f"{name}.log"
        job = torchrun({**settings, "run_name": name, "batch_size": size}, f"--nproc-per-node={number}", "--standalone", log=log)
        assert end(job) == 0, log.read_text()
    one, two = (read_run(Path(settings["checkpoint_dir"]) / name, print) for name in ("one", "two"))
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, rtol=1e-3, atol=1e-5)
