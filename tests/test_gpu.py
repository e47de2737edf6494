"""What only a GPU can show: precisions agree, compiled equals eager, nothing waits, resume holds. Skipped without one."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.bad_numbers import SPOILERS
from helpers.custom_parts import Small
from helpers.jobs import end, torchrun
from helpers.ports import free_port
from helpers.runs import stop_after, weights_digest
from helpers.steps import everything, make_settings, same, silent_console, take_step, tiny_components
from train_unet import train
from unet_trainer import load
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.config.load import load_config
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import cut_boxes, paste_pieces
from unet_trainer.model.fast_layers import MaxPool
from unet_trainer.model.precision import set_backends
from unet_trainer.model.segmenter import network_weights
from unet_trainer.runs.record import read_run_summary
from unet_trainer.system.launch import Launch
from unet_trainer.system.signals import Interrupted
from unet_trainer.training import pilots, trials
from unet_trainer.training.async_device import DirectLauncher, HostCopy, WaitMeter
from unet_trainer.training.checkpoint import read_run
from unet_trainer.training.compilation import compile_steps
from unet_trainer.training.memory import release_device_memory
from unet_trainer.training.parallel import Job
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import TrainStep
from unet_trainer.training.trials import connect_gradients

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


def compile_all(components, batch, eval_batch):
    assert compile_steps(components, lambda times: trials.take_steps(components, batch, eval_batch, times))[0] is None


def make_components(compiled=False, batch_size=8, side=128, floats=False, **settings):
    facts = HardwareFacts("cuda", "a GPU", has_bfloat16=True, has_float16=True, num_cores=2)
    values = {
        "encoder": "resnet18",
        "decoder_channels": None,
        "device": "cuda",
        "batch_size": batch_size,
        "image_size": side,
    }
    resolved = make_settings(hardware=facts, **values, **settings)
    set_backends(resolved.taken.allow_tf32, resolved.taken.deterministic)
    components = tiny_components(num_batches=8, settings=resolved)
    if compiled:
        batch = make_batch(batch_size, side, floats=floats)
        compile_all(components, batch, batch)
    components.set_training_mode(0)
    return components


def make_batch(num_images=8, side=128, seed=0, floats=False):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8, generator=generator)
    images[:, : side // 2] //= 2
    masks = (images.float().mean(-1) > 100).to(torch.uint8)
    images = images.float() if floats else images
    return Batch(images.pin_memory(), masks.pin_memory(), num_images)


@contextlib.contextmanager
def refusing_to_wait():
    """What waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def take_steps(components, num_steps=6):
    metrics = EpochMetrics(1, components.numerics.device)
    for index in range(num_steps):
        take_step(components.train_step, make_batch(seed=index), metrics=metrics, learning_rate=1e-3)
    return metrics


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_follows_float32(precision, compiled):
    reference = take_steps(make_components())
    metrics = take_steps(make_components(compiled, **PRECISIONS[precision]))
    assert metrics.loss() == pytest.approx(reference.loss(), rel=0.05)
    assert int(metrics.num_skipped) <= 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("extra", [{}, {"grad_clip": 1.0, "ema_decay": 0.99}], ids=["plain", "clip and ema"])
def test_nothing_in_the_inner_loop_waits_for_the_device(precision, compiled, extra):
    components = make_components(compiled, **PRECISIONS[precision], **extra)
    metrics = take_steps(components, 3)  # the optimizer makes its state in the first; the second is recorded
    batches = [make_batch(seed=index) for index in range(3)]
    batches[1] = batches[1]._replace(cut_boxes=cut_boxes((0, 0, 1), 8, (128, 128), 0.5))
    paste_pieces(*(tensor.cuda() for tensor in (*batches[1][:2], batches[1].cut_boxes)))  # a first call loads kernels
    eval_metrics, meter = components.eval_step.new_metrics(), WaitMeter(components.numerics.device)
    with refusing_to_wait():
        for batch in batches:
            meter.wait_for(lambda: None)
            take_step(components.train_step, batch, metrics=metrics, learning_rate=1e-3)
            meter.step_ends()
            metrics.peek()
            components.train_step.guard.first_of_many_bad()
        components.eval_step.segmenter.eval()
        for batch in batches:
            components.eval_step(batch, eval_metrics)
            eval_metrics.peek()
    assert math.isfinite(metrics.loss())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pieces_of_other_images_are_trained_on_as_on_the_cpu(compiled):
    """CutMix moves pixels before the step, whose graphs are replayed with the mixed images."""
    mixed, expected = make_components(compiled, allow_tf32=False), make_components(compiled, allow_tf32=False)
    for index in range(4):
        batch = make_batch(seed=index)
        boxes = cut_boxes((0, 0, index), 8, (128, 128), 1.0)
        images, masks = (tensor.pin_memory() for tensor in paste_pieces(batch.images, batch.masks, boxes))
        found = take_step(
            mixed.train_step, batch._replace(cut_boxes=boxes), metrics=EpochMetrics(1, mixed.numerics.device)
        )
        known = take_step(
            expected.train_step,
            batch._replace(images=images, masks=masks),
            metrics=EpochMetrics(1, expected.numerics.device),
        )
        assert not torch.equal(masks, batch.masks)
        assert found.matrix.sum(1).tolist() == known.matrix.sum(1).tolist()  # the same truth
        assert found.loss() == pytest.approx(known.loss(), rel=1e-3)


def make_native_batch(seed=0):
    """Eight images at 128×128 with masks of three other sizes, and two of padding."""
    batch = make_batch(10, seed=seed)
    sizes = ((300, 200), (128, 128), (300, 200), (64, 500)) * 2
    masks = torch.full((10, 300, 500), 255, dtype=torch.uint8)
    for index, (height, width) in enumerate(sizes):
        values = batch.masks[index].float()[None, None]
        resized = torch.nn.functional.interpolate(values, (height, width), mode="nearest")[0, 0]
        masks[index, :height, :width] = resized.to(torch.uint8)
    return batch._replace(masks=masks.pin_memory(), num_images=8, mask_sizes=sizes)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_evaluation_at_native_resolution_never_waits_and_counts_what_the_cpu_counts(compiled, num_parts):
    """Replayed graphs overwrite their logits, so every batch is counted before the next."""
    components = make_components(allow_tf32=False)
    step, batches = components.eval_step, [make_native_batch(seed) for seed in range(4)]
    step.num_parts = num_parts
    if compiled:
        compile_all(components, make_batch(), batches[0])
    step.segmenter.eval()
    step(batches[0], step.new_metrics())  # a first call makes handles and workspaces
    metrics = step.new_metrics()
    with refusing_to_wait():
        for batch in batches:
            step(batch, metrics)
            metrics.peek()
    twin = tiny_components(settings=make_settings(encoder="resnet18", decoder_channels=None, image_size=128))
    twin.state.segmenter.network.load_state_dict(
        {name: value.cpu() for name, value in network_weights(step.segmenter).items()}
    )
    twin.eval_step.segmenter.eval()
    expected = twin.eval_step.new_metrics()
    for batch in batches:
        twin.eval_step(batch, expected)
    num_pixels = int(expected.matrix.sum())
    assert num_pixels == int(metrics.matrix.sum()) == 4 * 2 * (2 * 300 * 200 + 128 * 128 + 64 * 500)
    assert int((metrics.matrix.cpu() - expected.matrix).abs().sum()) < 0.01 * num_pixels
    assert step.loss.from_sums(metrics.loss_sums.cpu()) == pytest.approx(
        step.loss.from_sums(expected.loss_sums), rel=1e-2
    )


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {"ema_decay": 0.9, "grad_clip": 1.0}),
        ("bfloat16", {"optimizer": "sgd", "freeze_encoder_epochs": 1}),
        ("bfloat16", {"encoder_lr_factor": 0.2, "freeze_encoder_epochs": 1}),
        ("float16", {"ema_decay": 0.9, "grad_clip": 0.5, "scaler_init_scale": 2.0**30}),  # the first steps overflow
    ],
    ids=["float32", "bfloat16 clip ema", "bfloat16 sgd thawed", "bfloat16 slow encoder thawed", "float16 overflowing"],
)
def test_recorded_kernels_do_what_they_do_when_launched_one_by_one(precision, settings):
    """To the last bit: weights, statistics, the optimizer's state, the average, and what was counted."""
    ends = []
    for is_recorded in (True, False):
        components = make_components(True, deterministic=True, **PRECISIONS[precision], **settings)
        if not is_recorded:
            components.train_step.launcher = DirectLauncher()
        metrics = EpochMetrics(1, components.numerics.device)
        for index in range(12):
            components.set_training_mode(0 if index < 6 else 1)
            rate = 1e-3 / (1 + index)
            take_step(
                components.train_step, make_batch(seed=index), metrics=metrics, learning_rate=rate, first_batch=index
            )
        tensors = [*everything(components), *metrics.state_dict().values(), components.state.scaler.get_scale()]
        ends.append([torch.as_tensor(value).cpu().clone() for value in tensors])
        if is_recorded:
            assert (
                components.train_step.launcher.num_replays >= 16
            )  # of 24: counting and moving, recorded anew when thawed
    torch.use_deterministic_algorithms(False)
    assert same(*ends)
    assert (int(metrics.num_skipped) > 0) == (precision == "float16")


def test_gradients_of_several_replays_add_up():
    """An overwritten gradient would be that of the last batch alone, about a third of the sum's length."""
    gradients = []
    for compiled in (False, True):
        components = make_components(compiled, accumulation_steps=3, use_amp=False, allow_tf32=False)
        metrics = EpochMetrics(1, components.numerics.device)
        take_step(components.train_step, *(make_batch(seed=index) for index in range(3)), metrics=metrics)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in components.state.segmenter.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


@torch._dynamo.config.patch(optimize_ddp=False)  # one process sets it so, and it is as before afterwards
def test_a_compiled_step_of_a_job_has_the_gradients_of_one_alone():
    """At each replay."""
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    job, gradients = Job(Launch(is_torchrun=True)), []
    job.gradient_group = dist.group.WORLD
    try:
        for is_connected in (False, True):
            components = make_components(use_amp=False, allow_tf32=False)
            step = components.train_step
            if is_connected:
                connect_gradients(make_settings(), components, None, silent_console(), "nothing is saved", job)
            compile_all(components, make_batch(), make_batch())
            components.set_training_mode(0)
            for index in range(4):
                take_step(step, make_batch(seed=index), learning_rate=0.0, first_batch=index)
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in step.parameters]))
        assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()
        step.connect(None)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_pool_gives_its_gradient_to_the_largest_pixels(dtype):
    """Also if the compiler computes what comes before it once more, and does not round it."""
    pixels = (torch.rand(2, 8, 64, 64, device="cuda") + 0.5).to(memory_format=torch.channels_last).requires_grad_()
    pool = MaxPool(3, 2, 1)
    maxima = torch.compile(lambda values: pool((1.7 * values).to(dtype)))(pixels)
    maxima.sum(dtype=torch.float32).backward()
    assert float((pixels.grad * pixels.detach()).sum()) == pytest.approx(
        float(maxima.detach().sum(dtype=torch.float32)), rel=1e-3
    )


def test_a_checkpoint_of_the_cpu_goes_on_on_the_gpu(tiny_config):
    config = {**tiny_config, "num_epochs": 2, "encoder": "resnet18"}
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=stop_after(1))
    result = train(config, device="cuda", resume=f"{config['checkpoint_dir']}/run")
    assert math.isfinite(result.history[-1]["val_loss"])


def test_random_numbers_that_a_callback_draws_on_the_gpu_change_no_run_and_are_the_callers(tiny_config):
    config = {**tiny_config, "device": "cuda", "deterministic": True, "num_epochs": 2, "decoder_channels": None}
    parts = {"model": lambda spec: Small(dropout=0.5)}
    torch.cuda.manual_seed(5)
    expected = [float(torch.rand(1, device="cuda")) for _ in range(2)]
    torch.cuda.manual_seed(5)
    drawn = []
    plain = train(config, **parts, run_name="plain").run_dir
    other = train(config, lambda row: drawn.append(float(torch.rand(1, device="cuda"))), **parts, run_name="drawing")
    assert drawn == expected
    assert weights_digest(other.run_dir) == weights_digest(plain)


def test_a_model_that_was_trained_compiled_on_the_gpu_is_used_on_the_cpu(tiny_config):
    """With everything that training adds to a network: compiled, fast layers, averaged weights."""
    settings = {"device": "cuda", "use_amp": True, "compile_model": True, "ema_decay": 0.9}
    result = train({**tiny_config, **settings, "encoder": "resnet18", "decoder_channels": None, "image_size": 64})
    image = np.random.default_rng(0).integers(0, 256, (100, 75, 3), np.uint8)
    for options in ({}, {"raw": True}):
        on_cpu = load(result.run_dir, device="cpu", **options)
        on_gpu = load(result.run_dir, device="cuda", precision="float32", **options)
        assert np.allclose(on_cpu.probabilities(image), on_gpu.probabilities(image), atol=2e-2)  # TF32
        assert load(result.run_dir, **options).engine.description == "cuda, bfloat16"
    content = torch.load(result.run_dir / "best.pt", weights_only=True)
    assert {tensor.device.type for tensor in content["model"].values()} == {"cpu"}
    assert not any(name.startswith(("_orig_mod", "module")) for name in content["model"])


def test_bfloat16_takes_about_half_the_memory():
    peaks = {}
    for precision in ("float32", "bfloat16"):
        gc.collect()
        torch.cuda.empty_cache()
        components = make_components(side=256, batch_size=16, **PRECISIONS[precision])
        metrics = EpochMetrics(1, components.numerics.device)
        batch = make_batch(16, 256)
        # The search for kernels needs more than the step.
        take_step(components.train_step, batch, metrics=metrics, learning_rate=1e-3)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take_step(components.train_step, batch, metrics=metrics, learning_rate=1e-3)
        peaks[precision] = torch.cuda.max_memory_allocated() - before
        del components
    assert peaks["bfloat16"] < 0.65 * peaks["float32"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("phase", ["loss", "gradient"])
def test_a_bad_step_changes_nothing_and_nothing_waits_for_it(phase, precision, optimizer, compiled):
    components = make_components(
        compiled, **PRECISIONS[precision], optimizer=optimizer, ema_decay=0.9, scaler_init_scale=1024.0
    )
    take_steps(components, 3)
    before = everything(components)
    metrics = EpochMetrics(1, components.numerics.device)
    batch = SPOILERS[phase](components, make_batch(seed=9), math.nan)
    with refusing_to_wait():
        take_step(components.train_step, batch, metrics=metrics, learning_rate=1e-3)
    assert same(before, everything(components))
    overflowed = phase == "gradient" and precision == "float16"
    assert (int(metrics.num_skipped), int(metrics.num_nan)) == (1, 0 if overflowed else 1)
    take_step(components.train_step, make_batch(seed=10), metrics=metrics, learning_rate=1e-3)
    assert not same(before, everything(components))


def test_a_copy_to_the_host_is_of_its_moment_and_does_not_wait():
    weights = torch.zeros(20_000_000, device="cuda")
    with refusing_to_wait():
        for _ in range(50):
            weights += 1
        copy = HostCopy({"w": weights})
        weights += 1
    assert (copy.content()["w"] == 50).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_memory_that_really_runs_out_shrinks_the_batch(compiled, tiny_config, capsys):
    """The process may have a little more than half of what the batch needs."""
    config = {
        **tiny_config,
        "device": "cuda",
        "encoder": "resnet18",
        "image_size": 512,
        "batch_size": 8,
        "num_epochs": 2,
    }
    release_device_memory(torch.device("cuda"), is_compiled=True)  # what other tests recorded
    needed = train(config, run_name="whole").history[-1]["peak_memory_gib"]
    release_device_memory(torch.device("cuda"), is_compiled=False)
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction((0.75 * needed + 0.1) / total)
    try:
        result = train(config, run_name="short", on_oom="shrink", compile_model=compiled)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "goes through the model in" in capsys.readouterr().out
    assert load_config(result.run_dir / "config.yaml").batch_parts >= 2
    assert math.isfinite(result.best_val_iou)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_interrupted_within_an_epoch_goes_on_bit_for_bit_on_the_gpu(precision, tiny_config, monkeypatch):
    config = {**tiny_config, **PRECISIONS[precision], "device": "cuda", "encoder": "resnet18", "deterministic": True}
    config |= {"num_epochs": 3, "batch_size": 2, "accumulation_steps": 2, "ema_decay": 0.9}
    straight = train(config, run_name="straight")
    step, calls = TrainStep.__call__, []

    def interrupted(self, *given):
        step(self, *given)
        calls.extend([1] * (not self.is_trial))  # not while the step is timed
        if len(calls) == 5 and not self.is_trial:  # the second of the second epoch's three steps
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainStep, "__call__", interrupted)
    with pytest.raises(Interrupted):
        train(config, run_name="broken")
    resumed = train(config, run_name="broken", resume="auto")
    assert weights_digest(resumed.run_dir) == weights_digest(straight.run_dir)
    torch.use_deterministic_algorithms(False)


def assert_ends_as_one_of_rate_0_01(config):
    """A compiled run whose rate is decided tries rates, and then has the weights of one that was given the rate."""
    config = config | {
        "device": "cuda",
        "deterministic": True,
        "compile_model": True,
        "batch_size": 2,
        "ema_decay": 0.9,
    }
    decided = train(config, run_name="decided", learning_rate="auto")
    assert read_run_summary(decided.run_dir).trials
    given = train(config, run_name="given", learning_rate=0.01)
    torch.use_deterministic_algorithms(False)
    assert weights_digest(decided.run_dir) == weights_digest(given.run_dir)


def test_a_compiled_run_whose_learning_rate_was_tried_is_one_that_began_with_it(tiny_config, monkeypatch):
    monkeypatch.setattr(pilots, "num_pilot_steps", lambda num_steps: 12)  # kernels are recorded within them
    monkeypatch.setattr(pilots, "is_better", lambda lower, higher: higher.learning_rate == 0.03)
    monkeypatch.setattr("unet_trainer.config.auto_training.choose_learning_rate", lambda *_, **__: (0.03, "tried"))
    assert_ends_as_one_of_rate_0_01({**tiny_config, **PRECISIONS["float16"], "num_epochs": 4})


def test_a_compiled_run_shows_the_memory_it_takes(tiny_config):
    torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")  # not the run's: gone before it begins
    config = {
        **tiny_config,
        "device": "cuda",
        "use_amp": True,
        "compile_model": True,
        "image_size": 256,
        "encoder": "resnet18",
    }
    result = train(config)
    assert load_config(result.run_dir / "config.yaml").compile_model is True
    assert 0.2 < result.history[-1]["peak_memory_gib"] < 8
    assert math.isfinite(result.best_val_iou)


# Jobs: one process with NCCL, and two that share the GPU, compiled in bfloat16

COMPILING_SECONDS = 400  # after which a job that compiles hangs
COMPILED = {
    "device": "cuda",
    "use_amp": True,
    "amp_dtype": "bfloat16",
    "compile_model": True,
    "image_size": 64,
    "ema_decay": 0.9,
}


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
    settings = {
        **tiny_config,
        "device": "cuda",
        "num_epochs": 3,
        "batch_size": 2,
        "augmentation": "none",
        "loss": {"bce": 1.0},
    }
    settings |= {"optimizer": "sgd", "learning_rate": 0.1, "allow_tf32": False, "sync_batchnorm": True}
    for name, number, size in (("one", 1, 4), ("two", 2, 2)):
        log = tmp_path / f"{name}.log"
        job = torchrun(
            {**settings, "run_name": name, "batch_size": size}, f"--nproc-per-node={number}", "--standalone", log=log
        )
        assert end(job) == 0, log.read_text()
    one, two = (read_run(Path(settings["checkpoint_dir"]) / name, print) for name in ("one", "two"))
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, rtol=1e-3, atol=1e-5)
