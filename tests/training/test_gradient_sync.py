"""DistributedDataParallel around a step, in one process. Jobs of several are in tests/test_torchrun.py."""

import pytest
import torch
import torch.distributed as dist

from helpers.ports import free_port
from helpers.steps import (
    everything,
    make_batch,
    make_settings,
    make_step,
    plain_segmenter,
    same,
    silent_console,
    small_components,
    take_step,
)
from unet_trainer.system.distributed import Job, Launch
from unet_trainer.training.compilation import connect_gradients, unsynchronized
from unet_trainer.training.gradient_sync import GradientSync


class OneProcess(Job):
    """`faults`: what another process would add to those of this one."""

    faults = (0.0, 0.0)

    def __init__(self):
        super().__init__(Launch(is_torchrun=True))
        self.gradient_group = dist.group.WORLD

    def all_reduce_mean(self, tensor):
        tensor += torch.tensor(self.faults)


@pytest.fixture(scope="module")
def job():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield OneProcess()
    dist.destroy_process_group()


def connect(step, job, compression="none"):
    images, masks, *_ = make_batch(2, seed=9)
    step.forward(images, masks, None)[0].backward()
    step.sync = GradientSync(job, step, (images, masks, None), compression)
    return step


def copies(step):
    return [parameter.detach().clone() for parameter in step.parameters]


def take_group(step, batches):
    if step.sync is not None:
        step.sync.begin_step()
    return take_step(step, *batches, learning_rate=0.1)


@pytest.mark.parametrize(("num_batches", "num_parts"), [(1, 1), (1, 3), (3, 2)])
def test_one_process_trains_as_without_a_job_and_averages_once_a_group(num_batches, num_parts, job):
    batches = [make_batch(4, seed) for seed in range(num_batches)]
    alone, step = (make_step(plain_segmenter(), num_parts=num_parts) for _ in range(2))
    connect(step, job)
    for _ in range(3):
        take_group(alone, batches)
        take_group(step, batches)
        assert step.sync.num_reduced == len(step.sync.model.reducer._get_zeros_like_grad_buckets())
    assert same(step.parameters, alone.parameters)


class UsesAWeightTwice(torch.nn.Module):
    """In two compiled passes."""

    def __init__(self, network):
        super().__init__()
        self.network, self.shared = network, torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, pixels):
        pixels = self.shared(pixels)
        torch._dynamo.graph_break()
        return self.network(self.shared(pixels))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler, about itself
def test_gradients_of_a_weight_in_two_compiled_passes_add_up(job):
    steps = []
    for _ in range(2):
        segmenter = plain_segmenter()
        segmenter.network = UsesAWeightTwice(segmenter.network)
        steps.append(make_step(segmenter))
    connect(steps[1], job)
    for each in steps:
        each.forward = torch.compile(each.forward, backend="aot_eager")
        take_group(each, [make_batch(4)])
    assert same(*(each.parameters for each in steps))


def test_gradients_may_be_averaged_in_bfloat16(job):
    alone, step = make_step(plain_segmenter()), connect(make_step(plain_segmenter()), job, "bf16")
    before = copies(step)
    for each in (alone, step):
        take_group(each, [make_batch(2)])
    moved, wanted = (
        torch.cat([(now - then).flatten() for now, then in zip(each.parameters, before, strict=True)])
        for each in (step, alone)
    )
    assert not torch.equal(moved, wanted)
    torch.testing.assert_close(moved, wanted, rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("faults", [(0.5, 0.0), (0.0, 0.5)], ids=["a loss", "a statistic"])
def test_a_fault_of_another_process_skips_the_step_here(faults, job, monkeypatch):
    """The average of a flag over two processes is a half."""
    step = connect(make_step(plain_segmenter()), job)
    before = copies(step)
    with monkeypatch.context() as patch:
        patch.setattr(OneProcess, "faults", faults)
        assert int(take_group(step, [make_batch(2)]).num_skipped) == 1
    assert same(before, step.parameters)
    assert int(take_group(step, [make_batch(2)]).num_skipped) == 0  # and it is forgotten after the step


def test_parameters_that_get_no_gradient_are_left_out(job):
    """Some encoders have such; DistributedDataParallel would wait for them."""
    segmenter = plain_segmenter()
    segmenter.network[0].unused = torch.nn.Linear(2, 2)
    step = connect(make_step(segmenter), job)
    for _ in range(2):
        assert int(take_group(step, [make_batch(2)]).num_skipped) == 0


def test_other_parameters_are_averaged_once_the_encoder_is_trained_and_trying_changes_nothing(job):
    components = small_components(freeze_encoder_epochs=1)
    step, settings = components.train_step, make_settings()
    for epoch, num_trained in ((0, 6), (1, 10)):
        components.set_training_mode(epoch)
        before = everything(components)
        assert not step.is_connected()
        connect_gradients(settings, components, None, silent_console(), "nothing is saved", job)
        assert step.is_connected()
        buckets = step.sync.model.reducer._get_zeros_like_grad_buckets()
        assert sum(len(bucket.parameters()) for bucket in buckets) == num_trained
        assert same(before, everything(components))


def test_synchronised_layers_are_plain_ones_while_a_process_tries_something_alone():
    """On a CPU they cannot run otherwise."""
    network = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    with unsynchronized(network):
        network(torch.rand(2, 3, 4, 4))
    assert type(network[0]) is torch.nn.SyncBatchNorm
    assert int(network[0].num_batches_tracked) == 1
