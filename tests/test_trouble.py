"""What goes wrong in a run, and how it ends: it goes on, or it stops with one sentence and a state to go on from."""

import gc
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from helpers.killed_runs import be_quiet, start, train_once, use_small_network, wait_until
from helpers.runs import assert_same_run, flip_a_bit, weights_digest, words
from train_unet import TrainingFailed, main, train
from unet_trainer.config.facts import StepCost
from unet_trainer.config.load import load_config
from unet_trainer.model import losses
from unet_trainer.system.signals import Interrupted
from unet_trainer.training import build, setup
from unet_trainer.training.checkpoint import Checkpointer, read_last
from unet_trainer.training.evaluation import EvalStep
from unet_trainer.training.step import FiniteGuard, TrainStep

pytestmark = pytest.mark.usefixtures("small_network")

LONG = {"num_epochs": 2, "batch_size": 2}  # 5 steps an epoch


@pytest.fixture
def run_dir(tiny_config):
    """Of the run that a test calls `run`."""
    return Path(tiny_config["checkpoint_dir"]) / "run"


@pytest.fixture(autouse=True)
def _untimed():
    """The start times no steps: faults come in the steps that are counted, of the trial and of training.

    Not by the fixture monkeypatch, which would be undone after small_network and leave that in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "time_steps", lambda *_: StepCost(seconds=0.1, eval_seconds=0.1, memory=0))
        yield


def bad_dice(monkeypatch, is_bad):
    """Dice is NaN in the training batches for which is_bad(number) holds, counted from 0; the trial step before is none."""
    real, calls = losses.TERMS["dice"], []

    def sums(target):
        if not target.logits.requires_grad:
            return real.sums(target)
        calls.append(1)
        return real.sums(target) * (math.nan if is_bad(len(calls) - 2) else 1.0)

    monkeypatch.setitem(losses.TERMS, "dice", real._replace(sums=sums, eval_sums=real.sums))


def test_a_step_that_is_not_finite_is_skipped_counted_and_shown(tiny_config, monkeypatch, capsys):
    bad_dice(monkeypatch, lambda number: number in (1, 7))
    result = train(tiny_config, **LONG)
    assert [(row["skipped_steps"], row["nan_steps"]) for row in result.history] == [(1, 1), (1, 1)]
    said = capsys.readouterr().out
    assert said.count("skipped steps: 1 (1 not finite)") == 2
    assert (result.run_dir / "metrics.csv").read_text().splitlines()[1].split(",")[10:12] == ["1", "1"]


@pytest.mark.parametrize("saves_each_batch", [False, True])
def test_numbers_that_stay_bad_end_the_run_which_goes_on_when_they_are_good_again(
    tiny_config, run_dir, monkeypatch, capsys, saves_each_batch
):
    """From batch 7, in the second epoch, on."""
    bad_dice(monkeypatch, lambda number: number >= 7 and not is_cured)
    is_cured = []
    save_epoch = Checkpointer.save_epoch  # on a slow disk, an epoch may end before the one before it is written
    monkeypatch.setattr(Checkpointer, "save_epoch", lambda self, *given: (save_epoch(self, *given), self.finish()))
    if saves_each_batch:
        monkeypatch.setattr(Checkpointer, "save_if_due", lambda self: (self.wait(), self.save_state()))
    assert main(words({**tiny_config, **LONG, "num_epochs": 5, "run_name": "run"})) == 3
    error = capsys.readouterr().err
    where = "8 steps in a row were not finite from step 8 on (epoch 2, batch 3 of 5): the loss term dice is not finite"
    assert f"{where} (images of the batch: " in error
    assert error.count(".jpg") == 2
    assert "Try a lower learning_rate, grad_clip=1.0; " in error
    assert f"to go on where the state was saved: python train_unet.py --resume {run_dir}" in error
    assert "Traceback" not in error
    content = read_last(run_dir / "last.pt")
    assert all(value.isfinite().all() for value in content["model"].values())
    assert content["epoch"] == 2
    is_cured.append(True)
    assert train(tiny_config, **LONG | {"num_epochs": 3}, resume=str(run_dir)).epochs == 3


def test_a_short_run_whose_steps_were_all_skipped_fails_though_its_losses_are_finite(
    tiny_config, run_dir, monkeypatch, capsys
):
    """Gradients that are not finite; or, in a torchrun job, losses of another process. It has fewer steps than what rolls back."""
    judge = FiniteGuard.decide
    monkeypatch.setattr(FiniteGuard, "decide", lambda self, norm, *given: judge(self, norm * math.nan, *given))
    assert main(words({**tiny_config, "run_name": "run"})) == 3
    assert "no step of the epoch was finite from step 1 on" in capsys.readouterr().err
    assert json.loads((run_dir / "run.json").read_text())["result"] == {}


def short_of_memory(monkeypatch, limit, first_call):
    """The model takes at most `limit` images at once, from a call on."""
    real, calls = build.build_network, []

    def build_network(spec, encoder_weights):
        def refuse(module, inputs):
            calls.append(1)
            if len(calls) >= first_call and len(inputs[0]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        network = real(spec, encoder_weights)
        network.register_forward_pre_hook(refuse)
        return network

    monkeypatch.setattr(build, "build_network", build_network)


def test_memory_that_runs_out_in_the_first_step_leaves_the_start_to_go_on_from(
    tiny_config, run_dir, monkeypatch, capsys
):
    short_of_memory(monkeypatch, limit=2, first_call=3)
    assert main(words({**tiny_config, "run_name": "run"})) == 3
    error = capsys.readouterr().err
    assert error.startswith("Error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB). ")
    assert "Try batch_size=2 accumulation_steps=2, or on_oom=shrink, or use_amp=true; " in error
    assert f"; to go on where the state was saved: python train_unet.py --resume {run_dir}" in error
    monkeypatch.undo()
    assert main(["--resume", str(run_dir)]) == 0
    assert_same_run(run_dir, train(tiny_config, run_name="straight").run_dir)


def test_shrink_goes_on_in_smaller_parts_says_so_and_records_it(tiny_config, monkeypatch, capsys):
    """Equals a run that had two parts from the start: the one step before memory ran out is done again."""
    parts = train(tiny_config, batch_parts=2, run_name="parts")
    short_of_memory(monkeypatch, limit=2, first_call=4)  # in the second step
    result = train(tiny_config, on_oom="shrink", run_name="short")
    said = capsys.readouterr().out
    assert "From here on a batch of 4 goes through the model in 2 parts (batch_parts): batch norm statis" in said
    assert load_config(result.run_dir / "config.yaml").batch_parts == 2
    assert read_last(result.run_dir / "last.pt")["config"]["batch_parts"] == 2
    assert weights_digest(result.run_dir) == weights_digest(parts.run_dir)


def test_a_dead_worker_is_named_and_no_step_is_lost(tiny_config, run_dir):
    """Killed after the first epoch, as the kernel does when memory is short."""
    config = {**tiny_config, **LONG, "num_workers": 1, "accumulation_steps": 2}
    straight = train(config, run_name="straight")

    def kill_workers(row):
        for worker in multiprocessing.active_children():
            worker.kill()

    with pytest.raises(TrainingFailed, match=r"worker process \d+ died \(SIGKILL\); .*num_workers=0") as caught:
        train(config, run_name="run", on_epoch=kill_workers)
    assert f"to go on where the state was saved: python train_unet.py --resume {run_dir}" in str(caught.value)
    train(config, run_name="run", resume="auto")
    assert_same_run(run_dir, straight.run_dir)


def test_sigint_finishes_the_step_and_a_second_one_leaves_at_once(tiny_config, run_dir, monkeypatch, capsys):
    take_step = TrainStep.__call__

    def slow(self, *given):
        take_step(self, *given)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal did not end the step")

    monkeypatch.setattr(TrainStep, "__call__", slow)
    monkeypatch.setattr(setup, "try_components", lambda *arguments: None)
    assert main(words({**tiny_config, "run_name": "run"})) == 130
    assert not (run_dir / "last.pt").exists()
    assert "Interrupted; nothing is saved" in capsys.readouterr().out


def test_a_signal_in_validation_costs_no_step(tiny_config, run_dir, monkeypatch):
    straight = train(tiny_config, run_name="straight")
    real = EvalStep.__call__

    def interrupted(self, batch, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, batch, metrics)

    monkeypatch.setattr(setup, "try_components", lambda *arguments: None)
    monkeypatch.setattr(EvalStep, "__call__", interrupted)
    with pytest.raises(Interrupted, match="SIGTERM"):
        train(tiny_config, run_name="run")
    content = read_last(run_dir / "last.pt")
    assert (content["epoch"], content["batch"]) == (0, 2)
    monkeypatch.undo()
    train(tiny_config, run_name="run", resume="auto")
    assert_same_run(run_dir, straight.run_dir)


def note_what_is_held(settings, log, notes):
    """Trains, and writes down tensors, open files, threads and bytes of memory after some epochs."""
    seen = {}

    def look(row):
        if row["epoch"] in (5, 6, 47, 48, 49, 50):
            gc.collect()
            num_tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            num_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            files = list(Path("/proc/self/fd").iterdir())
            seen[row["epoch"]] = (num_tensors, len(files), threading.active_count(), num_bytes)

    be_quiet(log)
    use_small_network()
    train(settings, on_epoch=look)
    Path(notes).write_text(json.dumps(seen))


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_nothing_leaks_over_fifty_epochs(tiny_config, tmp_path):
    """In a process of its own. Of two early epochs the larger numbers and of four late ones the smaller: a file may just be open, or a
    copy of the loss be on its way. What leaks stays, and is in the smaller numbers too."""
    settings = {**tiny_config, "num_epochs": 50, "batch_size": 10, "augmentation": "none"}
    process = start(note_what_is_held, settings, tmp_path / "log", tmp_path / "notes")
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    seen = json.loads((tmp_path / "notes").read_text())
    early = [max(numbers) for numbers in zip(seen["5"], seen["6"], strict=True)]
    late = [min(numbers) for numbers in zip(*(seen[str(epoch)] for epoch in range(47, 51)), strict=True)]
    assert all(after <= before for before, after in zip(early[:3], late[:3], strict=True)), seen
    assert late[3] - early[3] < 20e6  # the allocator's own pools


def test_a_damaged_last_state_is_named_and_the_one_before_it_used_unless_the_file_was_named(
    tiny_config, run_dir, capsys
):
    train(tiny_config, run_name="run")
    before, last = weights_digest(run_dir), run_dir / "last.pt"
    flip_a_bit(last)
    (run_dir / ".last.pt.x2345678.tmp").touch()
    assert main(["--resume", str(last)]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {last} is damaged: the checksum of ")
    assert main(["--resume", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert f"Warning: {last} is damaged: the checksum of " in said
    assert f"(kept as damaged.pt); going on from {run_dir / 'previous.pt'}, which was saved before it" in said
    assert "Resuming after epoch 1; " in said
    assert weights_digest(run_dir) == before
    assert not (run_dir / ".last.pt.x2345678.tmp").exists()


@pytest.mark.parametrize(("line", "number", "code"), [("Data:", signal.SIGTERM, 143), ("Run:", signal.SIGINT, 130)])
def test_a_signal_while_a_run_starts_ends_it_at_once_with_one_message(line, number, code, tiny_config, tmp_path):
    """At the last of them workers are being forked, which swallows what a handler raises."""
    log = tmp_path / "log"
    process = start(train_once, {**tiny_config, "num_workers": 2, "num_epochs": 200}, log)
    wait_until(lambda: log.exists() and line in log.read_text())
    os.kill(process.pid, number)
    process.join(60)
    said = log.read_text().splitlines()
    assert process.exitcode == code
    assert said[-1] == f"Interrupted by {number.name}; nothing is saved"
    assert "Traceback" not in "\n".join(said)
