"""The step: accumulation, clipping, precision, skipped steps, compilation."""

from __future__ import annotations

import copy
import gc
import io
import math

import pytest
import torch

from helpers.project import TINY_MODEL
from unet_trainer.config.load import load_config
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT, ImageSpec
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.ema import Ema
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.precision import Numerics, Precision
from unet_trainer.model.segmenter import STRIDE
from unet_trainer.system.console import Console
from unet_trainer.training import build as assemble
from unet_trainer.training.compilation import compile_steps
from unet_trainer.training.evaluation import EvalStep, predict
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import TrainStep, build_forward, build_logits, micro_batches

CPU = torch.device("cpu")
FLOAT32 = Numerics(CPU, Precision("float32", "test"), channels_last=True)


def make_batch(num_images, seed=0, side=16):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8, generator=generator)
    masks = (images[..., 0] > 128).to(torch.uint8)
    return Batch(images, masks, num_images)


def plain_model():
    """No batch norm: the gradient of a batch is the mean of its images' gradients."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1))


def make_step(model, numerics=FLOAT32, loss="bce", **options):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = options.pop("scaler", None) or torch.amp.GradScaler("cpu", enabled=False)
    forward = build_forward(model, WeightedLoss({loss: options.pop("loss_weight", 1.0)}, 1, None), numerics)
    return TrainStep(forward, model, optimizer, scaler, numerics.device, **options)


def tiny_machine(form=RGB_8BIT, **settings):
    settings = {"image_size": 32, "batch_size": 2, "device": "cpu", "in_channels": form.channels, **settings}
    config = load_config({**TINY_MODEL, **settings})
    config, numerics = assemble.build_numerics(config, Console(io.StringIO()))
    machine = assemble.build_machine(config, numerics, form, 4, Console(io.StringIO()))
    machine.set_training_mode(0)
    return machine


def weights(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def test_accumulation_equals_the_big_batch():
    whole, parts = plain_model(), plain_model()
    batch = make_batch(8)
    make_step(whole)(batch, EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=0.5)
    step = make_step(parts)
    for index in range(4):
        part = Batch(batch.images[index * 2 : index * 2 + 2], batch.masks[index * 2 : index * 2 + 2], 2)
        step(part, EpochMetrics(1, CPU), window=4, closes_window=index == 3, learning_rate=0.5)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-7)
    assert not torch.allclose(weights(whole), weights(plain_model()), atol=1e-3)


def test_weights_wait_for_the_end_of_the_window():
    model = plain_model()
    step = make_step(model)
    step(make_batch(2), EpochMetrics(1, CPU), window=2, closes_window=False, learning_rate=0.5)
    assert torch.equal(weights(model), weights(plain_model()))
    step(make_batch(2), EpochMetrics(1, CPU), window=2, closes_window=True, learning_rate=0.5)
    assert not torch.equal(weights(model), weights(plain_model()))


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_are_clipped_after_unscaling(scale):
    """The length of an SGD step is learning rate × clipped norm, whatever the loss scale."""
    model = plain_model()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    step = make_step(model, scaler=scaler, grad_clip=0.01)
    step(make_batch(4), EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=1.0)
    assert (weights(model) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_with_infinite_gradients_is_skipped_and_counted():
    model = plain_model()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    totals = EpochMetrics(1, CPU)
    step = make_step(model, scaler=scaler, loss_weight=1e6)  # 1e6 × 2^127 overflows float32
    step(make_batch(4), totals, window=1, closes_window=True, learning_rate=1.0)
    assert torch.equal(weights(model), before)
    assert int(totals.num_skipped) == 1
    assert scaler.get_scale() == 2.0**126
    assert math.isfinite(totals.loss())


def test_one_bad_loss_does_not_spoil_the_mean_of_the_epoch():
    totals = EpochMetrics(1, CPU)
    counts = torch.zeros(2, 2, dtype=torch.int64)
    totals.add(torch.tensor(2.0), counts, 4)
    totals.add(torch.tensor(float("inf")), counts, 4)
    totals.add(torch.tensor(float("nan")), counts, 2)
    totals.add(torch.tensor(5.0), counts, 2)
    assert totals.loss() == pytest.approx((2.0 * 4 + 5.0 * 2) / 6)
    only_bad = EpochMetrics(1, CPU)
    only_bad.add(torch.tensor(float("nan")), counts, 2)
    assert math.isnan(only_bad.loss())


def test_the_bar_sees_numbers_late_but_right(monkeypatch):
    monkeypatch.setattr("unet_trainer.training.async_reader.PEEK_SECONDS", 0.0)
    totals = EpochMetrics(1, CPU)
    totals.add(torch.tensor(3.0), torch.tensor([[5, 1], [1, 2]]), 2)
    assert totals.peek() is None  # the copy has only begun
    totals.add(torch.tensor(9.0), torch.tensor([[0, 0], [9, 0]]), 2)
    assert totals.peek() == (3.0, 0.5)  # as it was a moment ago: 2 / (2 + 1 + 1)


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16"])
def test_weights_and_optimizer_state_stay_float32(amp_dtype):
    machine = tiny_machine(use_amp=amp_dtype != "float32", amp_dtype="bfloat16", ema_decay=0.9)
    totals = EpochMetrics(1, CPU)
    machine.train_step(make_batch(2, side=32), totals, window=1, closes_window=True, learning_rate=1e-3)
    state = machine.state
    tensors = [*state.model.state_dict().values(), *state.ema.model.state_dict().values()]
    tensors += [value for entry in state.optimizer.state.values() for value in entry.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}  # int64: batch norm's counter
    assert math.isfinite(totals.loss())


def test_bfloat16_really_computes_in_bfloat16():
    seen = []
    machine = tiny_machine(use_amp=True)
    convolution = next(module for module in machine.state.model.modules() if isinstance(module, torch.nn.Conv2d))
    convolution.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    machine.train_step(make_batch(2, side=32), EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=1e-3)
    assert seen == [torch.bfloat16]


class Seen(torch.nn.Module):
    """Keeps what it is given, and answers with the first channel."""

    def forward(self, pixels):
        self.pixels = pixels
        return pixels[:, :1]


def test_pixels_are_normalised_channel_by_channel():
    model = Seen()
    form = ImageSpec(2, False, (33000.0, -4.0), (200.0, 0.5))
    images = torch.tensor([33000.0, -4.0]).repeat(1, 32, 32, 1)
    images[0, 3, 5] = torch.tensor([33400.0, -5.0])
    build_logits(model, FLOAT32, form)(images)
    assert model.pixels.shape == (1, 2, 32, 32)
    assert model.pixels[0, :, 3, 5].tolist() == pytest.approx([2.0, -2.0])
    assert model.pixels[0, :, 3, 4].tolist() == [0.0, 0.0]


def test_8_bit_colours_are_normalised_as_imagenet_is():
    model = Seen()
    build_logits(model, FLOAT32)(torch.tensor([255, 0, 128], dtype=torch.uint8).repeat(1, 32, 32, 1))
    expected = [(value - mean) / std for value, mean, std in zip((255, 0, 128), IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    assert model.pixels[0, :, 7, 9].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("height", "width"), [(50, 70), (32, 33), (31, 64), (1, 1), (64, 96)])
def test_any_size_is_padded_to_the_stride_by_repeating_the_border_and_cropped_back(height, width):
    model = Seen()
    form = ImageSpec(1, False, (0.0,), (1.0,))
    images = torch.rand(2, height, width, 1, generator=torch.Generator().manual_seed(0))
    logits = build_logits(model, FLOAT32, form)(images)
    padded = model.pixels[:, 0]
    assert padded.shape[1] % STRIDE == padded.shape[2] % STRIDE == 0
    assert padded.shape[1] - height < STRIDE
    assert padded.shape[2] - width < STRIDE
    assert torch.equal(padded[:, :height, :width], images[..., 0])
    assert torch.equal(padded[:, :height, width:], images[:, :, -1:, 0].expand(-1, -1, padded.shape[2] - width))
    assert torch.equal(padded[:, height:], padded[:, height - 1 : height].expand(-1, padded.shape[1] - height, -1))
    assert logits.shape == (2, 2, height, width)


def test_a_size_that_is_no_multiple_of_the_stride_equals_the_crop_of_the_padded_one():
    machine = tiny_machine()
    model = machine.state.model.eval()
    images = make_batch(2, side=70).images[:, :50]
    padded = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (0, 26, 0, 14), mode="replicate").permute(0, 2, 3, 1)
    compute = build_logits(model, machine.numerics)
    with torch.no_grad():
        assert torch.allclose(compute(images), compute(padded)[:, :, :50, :70], atol=1e-4)
    assert predict(model, images, machine.numerics).shape == (2, 50, 70)


def test_gradients_flow_and_padding_counts_nowhere_at_any_size():
    machine = tiny_machine()
    batch = make_batch(2, side=70)
    batch = Batch(batch.images[:, :50], batch.masks[:, :50], 2)
    totals = EpochMetrics(1, CPU)
    before = weights(machine.state.model)
    machine.train_step(batch, totals, window=1, closes_window=False, learning_rate=0.0)
    assert int(totals.matrix.sum()) == 2 * 50 * 70
    gradients = [parameter.grad.abs().sum().item() for parameter in machine.state.model.parameters()]
    assert all(math.isfinite(gradient) for gradient in gradients)
    assert sum(gradient > 0 for gradient in gradients) > 0.9 * len(gradients)
    machine.train_step(batch, totals, window=1, closes_window=True, learning_rate=1e-2)
    assert not torch.equal(weights(machine.state.model), before)


def test_ignored_pixels_at_the_border_of_a_window_count_nowhere():
    """A window at the edge of its image has a mirrored part that counts nowhere."""
    machine = tiny_machine()
    machine.eval_step.model.eval()
    batch = make_batch(2, side=64)
    batch.masks[:, 40:] = 255
    totals = EpochMetrics(1, CPU)
    machine.eval_step(batch, totals)
    assert int(totals.matrix.sum()) == 2 * 40 * 64
    ids = predict(machine.eval_step.model, batch.images, machine.numerics)[:, :40]
    assert int(totals.matrix[1, 1]) == int(((ids == 1) & (batch.masks[:, :40] == 1)).sum())


def test_a_form_of_five_deep_channels_is_trained_on():
    form = ImageSpec(5, False, (33000.0,) * 5, (200.0,) * 5)
    machine = tiny_machine(form)
    images = torch.randn(2, 32, 32, 5, generator=torch.Generator().manual_seed(0)) * 200 + 33000
    batch = Batch(images, (images[..., 4] > 33000).to(torch.uint8), 2)
    losses = []
    for _ in range(12):
        totals = EpochMetrics(1, CPU)
        machine.train_step(batch, totals, window=1, closes_window=True, learning_rate=1e-2)
        losses.append(totals.loss())
    assert losses[-1] < 0.8 * losses[0]
    assert predict(machine.state.model, images, machine.numerics, form).shape == (2, 32, 32)


def test_padding_changes_neither_validation_loss_nor_counts():
    machine = tiny_machine(loss={"dice": 1, "cross_entropy": 1, "focal": 1, "lovasz": 1, "tversky": 1, "iou": 1})
    machine.eval_step.model.eval()
    batch = make_batch(2, side=32)
    padded = Batch(
        torch.cat([batch.images, torch.zeros(2, 32, 32, 3, dtype=torch.uint8)]),
        torch.cat([batch.masks, torch.full((2, 32, 32), 255, dtype=torch.uint8)]),
        2,
    )
    alone, filled = EpochMetrics(1, CPU), EpochMetrics(1, CPU)
    machine.eval_step(batch, alone)
    machine.eval_step(padded, filled)
    assert filled.loss() == pytest.approx(alone.loss(), rel=1e-5)
    assert torch.equal(alone.matrix, filled.matrix)


def test_evaluation_moves_nothing():
    machine = tiny_machine()
    before = copy.deepcopy(machine.state.model.state_dict())
    machine.eval_step.model.eval()
    machine.eval_step(make_batch(2, side=32), EpochMetrics(1, CPU))
    assert all(torch.equal(value, before[name]) for name, value in machine.state.model.state_dict().items())


def test_ema_follows_each_step_of_the_optimizer():
    machine = tiny_machine(ema_decay=0.99, accumulation_steps=2)
    for closes in (False, True, False, True):
        machine.train_step(make_batch(2, side=32), EpochMetrics(1, CPU), window=2, closes_window=closes, learning_rate=1e-3)
    assert isinstance(machine.state.ema, Ema)
    assert machine.state.ema.num_updates == 2
    assert machine.eval_step.model is machine.state.ema.model


def test_predict_agrees_with_the_confusion_matrix_of_the_evaluation():
    machine = tiny_machine()
    batch = make_batch(2, side=32)
    totals = EpochMetrics(1, CPU)
    machine.eval_step.model.eval()
    machine.eval_step(batch, totals)
    ids = predict(machine.eval_step.model, batch.images, machine.numerics)
    assert ids.shape == (2, 32, 32)
    assert int(((ids == 1) & (batch.masks == 1)).sum()) == int(totals.matrix[1, 1])


def test_a_failing_compiler_leaves_the_steps_as_they_were(monkeypatch):
    def broken(function, **options):
        def call(*tensors):
            raise RuntimeError("\nno working C++ compiler\nand much more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    machine = tiny_machine()
    eager = machine.train_step.forward, machine.eval_step.forward
    failure = compile_steps(machine.train_step, machine.eval_step, make_batch(2, side=32), 1, machine.phases())
    assert failure == "RuntimeError: no working C++ compiler"
    assert (machine.train_step.forward, machine.eval_step.forward) == eager


def test_trying_the_compiled_steps_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    machine = tiny_machine(architecture="unet")
    before = copy.deepcopy(machine.state.model.state_dict())
    random_state = torch.get_rng_state()
    assert compile_steps(machine.train_step, machine.eval_step, make_batch(2, side=32), 1, machine.phases()) is None
    assert all(torch.equal(value, before[name]) for name, value in machine.state.model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in machine.state.model.parameters())


def test_validation_with_one_bad_batch_has_no_loss():
    totals = EpochMetrics(1, CPU)
    counts = torch.zeros(2, 2, dtype=torch.int64)
    totals.add(torch.tensor(0.1), counts, 4)
    assert totals.strict_loss() == pytest.approx(0.1)
    totals.add(torch.tensor(float("nan")), counts, 4)
    assert math.isnan(totals.strict_loss())


def test_a_compiler_that_fails_only_once_the_encoder_thaws_is_found_before_the_first_epoch(monkeypatch):
    def compile_frozen_only(function, **options):
        def call(*tensors):
            if next(machine.state.model.get_submodule("encoder").parameters()).requires_grad and torch.is_grad_enabled():
                raise RuntimeError("cannot compile this graph")
            return function(*tensors)

        return call

    monkeypatch.setattr(torch, "compile", compile_frozen_only)
    machine = tiny_machine(freeze_encoder_epochs=2)
    failure = compile_steps(machine.train_step, machine.eval_step, make_batch(2, side=32), 1, machine.phases())
    assert failure == "RuntimeError: cannot compile this graph"


def test_every_run_of_a_process_is_compiled():
    """The table of compiled code is emptied for each, or the fifth would run eager and be called compiled."""
    for num_images in range(1, 7):
        model = plain_model()
        step = make_step(model)
        evaluation = EvalStep(build_forward(model, WeightedLoss({"bce": 1.0}, 1, None), FLOAT32), model, CPU)
        torch._dynamo.utils.counters.clear()
        assert compile_steps(step, evaluation, make_batch(num_images, side=8), 1, [model.train]) is None
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compiled_and_eager_steps_agree():
    model, twin = plain_model(), plain_model()
    step, compiled = make_step(model), make_step(twin)
    evaluation = EvalStep(build_forward(twin, WeightedLoss({"bce": 1.0}, 1, None), FLOAT32), twin, CPU)
    assert compile_steps(compiled, evaluation, make_batch(4), 1, [twin.train]) is None
    totals, compiled_totals = EpochMetrics(1, CPU), EpochMetrics(1, CPU)
    for index in range(3):
        step(make_batch(4, index), totals, window=1, closes_window=True, learning_rate=0.1)
        compiled(make_batch(4, index), compiled_totals, window=1, closes_window=True, learning_rate=0.1)
    assert compiled_totals.loss() == pytest.approx(totals.loss(), rel=1e-5)
    assert torch.equal(totals.matrix, compiled_totals.matrix)
    assert torch.allclose(weights(model), weights(twin), atol=1e-6)


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(num_parts):
    """Three parts of eight images are of unequal size."""
    whole, parts = plain_model(), plain_model()
    make_step(whole)(make_batch(8), EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=0.5)
    totals = EpochMetrics(1, CPU)
    make_step(parts, num_parts=num_parts)(make_batch(8), totals, window=1, closes_window=True, learning_rate=0.5)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-7)
    assert totals.num_images == 8


def test_padding_falls_into_the_last_parts():
    batch = make_batch(8)._replace(num_images=5)
    assert [part.num_images for part in micro_batches(batch, 4)] == [2, 2, 1, 0]
    assert torch.equal(torch.cat([part.images for part in micro_batches(batch, 4)]), batch.images)


def test_totals_go_on_where_they_were_saved():
    counts = torch.tensor([[5, 1], [1, 2]])
    totals = EpochMetrics(1, CPU)
    totals.add(torch.tensor(0.1), counts, 3)
    other = EpochMetrics(1, CPU)
    other.load_state_dict(totals.state_dict())
    for part in (totals, other):
        part.add(torch.tensor(0.7), counts, 2)
    assert other.loss() == totals.loss() == pytest.approx((0.3 + 1.4) / 5)
    assert torch.equal(other.matrix, 2 * counts)
    other.reset()
    assert (other.num_images, int(other.matrix.sum())) == (0, 0)


def test_the_first_image_without_a_finite_loss_is_known():
    totals = EpochMetrics(1, CPU)
    for loss in (1.0, 1.0, float("nan"), 1.0, float("inf")):
        totals.add(torch.tensor(loss), torch.zeros(2, 2, dtype=torch.int64), 4)
    assert int(totals.first_bad) == 8


def test_gradients_that_add_up_keep_their_place_and_a_lone_batch_needs_none():
    """A CUDA graph overwrites the gradients of its last replay: sums need memory of their own."""
    machine = tiny_machine(architecture="unet")
    machine.set_training_mode(0)
    totals = EpochMetrics(1, CPU)
    step, parameter = machine.train_step, machine.train_step.parameters[0]
    step(make_batch(2, side=32), totals, 2, False, 1e-3)
    place, first = parameter.grad.data_ptr(), parameter.grad.clone()
    step(make_batch(2, side=32), totals, 2, True, 0.0)
    assert parameter.grad.data_ptr() == place
    assert not parameter.grad.any()
    assert first.any()
    step(make_batch(2, side=32), totals, 1, True, 0.0)
    assert parameter.grad is None


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_collected_while_compiling_and_as_before_after_it(was_on, monkeypatch):
    seen = []

    def compiled(forward, **options):
        def call(*arguments):
            seen.append(gc.isenabled())
            raise ValueError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    model = plain_model()
    step = make_step(model)
    (gc.enable if was_on else gc.disable)()
    try:
        assert "no compiler" in compile_steps(step, EvalStep(step.forward, model, CPU), make_batch(2), 1, [model.train])
        assert seen == [False]
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_memory_that_runs_out_within_the_compiler_is_no_failure_of_the_compiler(monkeypatch):
    def compiled(forward, **options):
        def call(*arguments):
            raise RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    model = plain_model()
    step = make_step(model)
    forward = step.forward
    with pytest.raises(RuntimeError, match="out of memory"):
        compile_steps(step, EvalStep(step.forward, model, CPU), make_batch(2), 1, [model.train])
    assert step.forward is forward
