"""What only a GPU can show: precisions agree, compiled equals eager, nothing waits, resume holds. Skipped without one."""

from __future__ import annotations

import gc
import io
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_guard import PHASES, everything, same

from helpers.project import ROOT
from test_train_unet import digest, stop_after, words
from train_unet import train
from unet_trainer.config.load import load_config
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.fast_layers import use_fast_layers
from unet_trainer.runs.host_copy import HostCopy
from unet_trainer.system.console import Console
from unet_trainer.system.signals import Interrupted
from unet_trainer.training import build as assemble
from unet_trainer.training.compilation import compile_steps
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler, about itself
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

PRECISIONS = {
    "float32": {"use_amp": False},
    "bfloat16": {"use_amp": True},
    "float16": {"use_amp": True, "amp_dtype": "float16"},
}


def make_machine(compiled=False, batch_size=8, side=128, floats=False, **settings):
    config = load_config(
        {"encoder": "resnet18", "in_channels": 3, "device": "cuda", "batch_size": batch_size, "image_size": side, **settings}
    )
    config, numerics = assemble.build_numerics(config, Console(io.StringIO()))
    machine = assemble.build_machine(config, numerics, RGB_8BIT, 8, Console(io.StringIO()))
    if compiled:
        use_fast_layers(machine.state.model)
        batch = make_batch(batch_size, side, floats=floats)
        assert compile_steps(machine.train_step, machine.eval_step, batch, config.num_classes, machine.phases()) is None
    machine.set_training_mode(0)
    return machine


def make_batch(num_images=8, side=128, seed=0, floats=False):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8, generator=generator)
    images[:, : side // 2] //= 2
    masks = (images.float().mean(-1) > 100).to(torch.uint8)
    images = images.float() if floats else images
    return Batch(images.pin_memory(), masks.pin_memory(), num_images)


def take_steps(machine, num_steps=6):
    totals = EpochMetrics(1, machine.numerics.device)
    for index in range(num_steps):
        machine.train_step(make_batch(seed=index), totals, 1, True, 1e-3)
    return totals


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_follows_float32(precision, compiled):
    reference = take_steps(make_machine())
    totals = take_steps(make_machine(compiled, **PRECISIONS[precision]))
    assert totals.loss() == pytest.approx(reference.loss(), rel=0.05)
    assert int(totals.num_skipped) <= 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("extra", [{}, {"grad_clip": 1.0, "ema_decay": 0.99}], ids=["plain", "clip and ema"])
def test_nothing_in_the_inner_loop_waits_for_the_device(precision, compiled, extra):
    machine = make_machine(compiled, **PRECISIONS[precision], **extra)
    totals = take_steps(machine, 3)  # the optimizer makes its state in the first; the second is recorded
    batches = [make_batch(seed=index) for index in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            machine.train_step(batch, totals, 1, True, 1e-3)
            totals.peek()
        machine.eval_step.model.eval()
        for batch in batches:
            machine.eval_step(batch, totals)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(totals.loss())


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {"ema_decay": 0.9, "grad_clip": 1.0}),
        ("bfloat16", {"optimizer": "sgd", "freeze_encoder_epochs": 1}),
        ("float16", {"ema_decay": 0.9, "grad_clip": 0.5, "scaler_init_scale": 2.0**30}),  # the first steps overflow
    ],
    ids=["float32", "bfloat16 clip ema", "bfloat16 sgd thawed", "float16 overflowing"],
)
def test_recorded_kernels_do_what_they_do_when_launched_one_by_one(precision, settings):
    """To the last bit: weights, statistics, the optimizer's state, the average, and what was counted."""
    ends = []
    for is_recorded in (True, False):
        machine = make_machine(True, deterministic=True, **PRECISIONS[precision], **settings)
        if not is_recorded:
            machine.train_step.recorder = None
        totals = EpochMetrics(1, machine.numerics.device)
        for index in range(12):
            machine.set_training_mode(0 if index < 6 else 1)
            machine.train_step.guard.batch_number = index
            machine.train_step(make_batch(seed=index), totals, 1, True, 1e-3 / (1 + index))
        tensors = [*machine.state.model.state_dict().values(), *totals.state_dict().values(), machine.state.scaler.get_scale()]
        tensors += [value for entry in machine.state.optimizer.state.values() for value in entry.values()]
        tensors += [] if machine.state.ema is None else [*machine.state.ema.model.state_dict().values()]
        ends.append([torch.as_tensor(value).cpu().clone() for value in tensors])
        if is_recorded:
            assert machine.train_step.recorder.num_replays >= 16  # of 24: counting and moving, recorded anew when thawed
    torch.use_deterministic_algorithms(False)
    assert same(*ends)
    assert (int(totals.num_skipped) > 0) == (precision == "float16")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bad_step_changes_nothing_when_its_kernels_are_replayed(precision, optimizer):
    settings = {**PRECISIONS[precision], "optimizer": optimizer, "ema_decay": 0.9, "scaler_init_scale": 1024.0}
    machine = make_machine(True, floats=True, **settings)
    totals = EpochMetrics(1, machine.numerics.device)
    for index in range(5):
        machine.train_step.guard.batch_number = index
        machine.train_step(make_batch(seed=index, floats=True), totals, 1, True, 1e-3)
    recorder = machine.train_step.recorder
    before = everything(machine)
    for index in range(5, 9):
        batch = make_batch(seed=index, floats=True)
        batch.images[3, 7, 9, 1] = math.nan
        machine.train_step.guard.batch_number = index
        num_replays = recorder.num_replays
        machine.train_step(batch, totals, 1, True, 1e-3)
    assert same(before, everything(machine))
    assert recorder.num_replays == num_replays + 2  # of counting and of moving, in the last of them at the latest
    assert (int(totals.num_skipped), int(totals.num_nan), int(totals.num_bad), int(totals.first_bad)) == (4, 4, 32, 40)
    guard = machine.train_step.guard
    assert (int(guard.most_in_a_row), int(guard.first_bad_batch)) == (4, 5)
    machine.train_step(make_batch(seed=8, floats=True), totals, 1, True, 1e-3)
    assert not same(before, everything(machine))


def test_gradients_of_several_replays_add_up():
    """An overwritten gradient would be that of the last batch alone, about a third of the sum's length."""
    gradients = []
    for compiled in (False, True):
        machine = make_machine(compiled, accumulation_steps=3, use_amp=False, allow_tf32=False)
        totals = EpochMetrics(1, machine.numerics.device)
        for index in range(3):
            machine.train_step(make_batch(seed=index), totals, 3, False, 1e-3)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in machine.state.model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


def test_a_checkpoint_of_the_cpu_goes_on_on_the_gpu(tiny_config):
    config = {**tiny_config, "num_epochs": 2, "encoder": "resnet18"}
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=stop_after(1))
    result = train(config, device="cuda", resume=f"{config['checkpoint_dir']}/run")
    assert math.isfinite(result.history[-1]["val_loss"])


def test_bfloat16_takes_about_half_the_memory():
    peaks = {}
    for precision in ("float32", "bfloat16"):
        gc.collect()
        torch.cuda.empty_cache()
        machine = make_machine(side=256, batch_size=16, **PRECISIONS[precision])
        totals = EpochMetrics(1, machine.numerics.device)
        batch = make_batch(16, 256)
        machine.train_step(batch, totals, 1, True, 1e-3)  # the search for kernels needs more than the step
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        machine.train_step(batch, totals, 1, True, 1e-3)
        peaks[precision] = torch.cuda.max_memory_allocated() - before
        del machine
    assert peaks["bfloat16"] < 0.65 * peaks["float32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_trains_and_resumes_on_the_gpu(precision, tiny_config):
    config = {
        **tiny_config,
        **PRECISIONS[precision],
        "device": "cuda",
        "num_epochs": 4,
        "deterministic": True,
        "encoder": "resnet18",
    }
    straight = train(config, run_name="straight")
    with pytest.raises(KeyboardInterrupt):
        train(config, run_name="broken", on_epoch=stop_after(2))
    resumed = train(config, run_name="broken", resume="auto")
    assert digest(resumed.run_dir) == digest(straight.run_dir)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("phase", ["loss", "gradient"])
def test_a_bad_step_changes_nothing_and_nothing_waits_for_it(phase, precision, optimizer, compiled):
    machine = make_machine(compiled, **PRECISIONS[precision], optimizer=optimizer, ema_decay=0.9, scaler_init_scale=1024.0)
    take_steps(machine, 3)
    before = everything(machine)
    totals = EpochMetrics(1, machine.numerics.device)
    batch = PHASES[phase](machine, make_batch(seed=9), math.nan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        machine.train_step(batch, totals, 1, True, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(before, everything(machine))
    overflowed = phase == "gradient" and precision == "float16"
    assert (int(totals.num_skipped), int(totals.num_nan)) == (1, 0 if overflowed else 1)
    machine.train_step(make_batch(seed=10), totals, 1, True, 1e-3)
    assert not same(before, everything(machine))


def test_a_copy_to_the_host_is_of_its_moment_and_does_not_wait():
    weights = torch.zeros(20_000_000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            weights += 1
        copy = HostCopy({"w": weights})
        weights += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (copy.content()["w"] == 50).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_memory_that_really_runs_out_shrinks_the_batch(compiled, tiny_config, capsys):
    """The process may have a little more than half of what the batch needs."""
    config = {**tiny_config, "device": "cuda", "encoder": "resnet18", "image_size": 512, "batch_size": 8, "num_epochs": 2}
    needed = train(config, run_name="whole").history[-1]["peak_memory_gib"]
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction((0.75 * needed + 0.1) / total)
    try:
        result = train(config, run_name="short", on_oom="shrink", compile_model=compiled)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "goes through the model in" in capsys.readouterr().out
    assert load_config(result.run_dir / "config.yaml").batch_parts >= 2
    assert math.isfinite(result.best_val_iou)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_run_interrupted_within_an_epoch_goes_on_bit_for_bit_on_the_gpu(precision, tiny_config, monkeypatch):
    config = {**tiny_config, **PRECISIONS[precision], "device": "cuda", "encoder": "resnet18", "deterministic": True}
    config |= {"num_epochs": 3, "batch_size": 2, "accumulation_steps": 2, "ema_decay": 0.9}
    straight = train(config, run_name="straight")
    optimizer_step, calls = TrainStep.optimizer_step, []

    def interrupted(self, totals, learning_rate):
        optimizer_step(self, totals, learning_rate)
        calls.append(1)
        if len(calls) == 5:  # the second of the second epoch's three steps
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainStep, "optimizer_step", interrupted)
    with pytest.raises(Interrupted):
        train(config, run_name="broken")
    resumed = train(config, run_name="broken", resume="auto")
    assert digest(resumed.run_dir) == digest(straight.run_dir)
    torch.use_deterministic_algorithms(False)


def test_a_compiled_run_shows_the_memory_it_takes(tiny_config):
    torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")  # not the run's: gone before it begins
    config = {**tiny_config, "device": "cuda", "use_amp": True, "compile_model": True, "image_size": 256, "encoder": "resnet18"}
    result = train(config)
    assert load_config(result.run_dir / "config.yaml").compile_model is True
    assert 0.2 < result.history[-1]["peak_memory_gib"] < 8
    assert math.isfinite(result.best_val_iou)


def test_three_deterministic_runs_have_the_same_bits(tiny_config):
    config = {**tiny_config, "device": "cuda", "encoder": "resnet18", "deterministic": True, "use_amp": True, "num_epochs": 3}
    digests = {digest(train(config, run_name=f"run{number}").run_dir) for number in range(3)}
    torch.use_deterministic_algorithms(False)
    assert len(digests) == 1


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_run_that_was_killed_goes_on_bit_for_bit_on_the_gpu(precision, tiny_config, tmp_path):
    config = {**tiny_config, **PRECISIONS[precision], "device": "cuda", "encoder": "resnet18", "deterministic": True}
    config |= {"num_epochs": 60, "batch_size": 2, "accumulation_steps": 2, "ema_decay": 0.9, "checkpoint_minutes": 0.001}
    straight = train(config, run_name="straight")
    torch.use_deterministic_algorithms(False)
    command = [sys.executable, str(ROOT / "train_unet.py"), *words({**config, "run_name": "killed", "resume": "auto"})]
    last = straight.run_dir.parent / "killed" / "last.pt"
    for number in range(2):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = last.stat().st_mtime_ns if last.exists() else 0
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (last.exists() and last.stat().st_mtime_ns > before):
            time.sleep(0.02)
        time.sleep(0.1 * number)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert digest(last.parent) == digest(straight.run_dir)
