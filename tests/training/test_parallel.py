"""The processes of a torchrun job: what they exchange, and DistributedDataParallel around a step. Jobs that train, and
whose processes fail, are in tests/test_torchrun.py."""

import pickle
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.ports import free_port
from helpers.steps import (
    make_batch,
    make_settings,
    make_step,
    plain_segmenter,
    silent_console,
    small_components,
    take_step,
)
from unet_trainer.config.errors import TrainingFailed
from unet_trainer.runs.folder import resume_command
from unet_trainer.system.launch import Launch, read_launch
from unet_trainer.system.signals import Signals
from unet_trainer.training import parallel
from unet_trainer.training.parallel import GradientSync, Job, choose_backend, decode, device_id, encode, find_attempt
from unet_trainer.training.trials import connect_gradients

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_torchrun_has_not_started_is_alone(missing, monkeypatch):
    for name, value in {**TORCHRUN, "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert read_launch() == Launch()


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "python"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "torchrun --standalone --nproc-per-node=8"),
        (TORCHRUN, "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --nproc-per-node=4"),
    ],
)
def test_a_run_is_resumed_as_it_was_started(environment, start, monkeypatch, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resume_command(tmp_path) == f"{start} train_unet.py --resume {tmp_path}"


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(["", ""], "gloo"), (["a"], "nccl"), (["a", "b"], "nccl"), (["a", "b", "b"], "gloo"), (["a", ""], "gloo")],
)
def test_nccl_unless_processes_share_a_gpu(gpus, backend, monkeypatch):
    """Each process may see one GPU alone: all of them are cuda:0 then, and differ by their UUIDs."""
    assert device_id(torch.device("cpu")) == ""
    uuids = iter(gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(uuids)))
    assert choose_backend([device_id(torch.device("cuda:0")) for _ in gpus]) == backend


@pytest.mark.parametrize(("rank", "before"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_rank_0_reads_first_then_the_first_of_each_other_machine_then_the_rest(rank, before, monkeypatch):
    """Two machines of two processes, which wait for each other twice."""
    job, exchanges = Job(Launch(rank, 4, rank % 2, 2, True)), []
    monkeypatch.setattr(job, "any_rank", lambda: exchanges.append(1))
    with job.main_process_first():
        assert len(exchanges) == before
    assert len(exchanges) == 2


def test_a_restart_with_the_same_store_reads_nothing_of_the_start_before():
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("hello/1", "of the start before")
    attempts = []
    for _ in range(2):
        peer = dist.TCPStore("127.0.0.1", port, is_master=False)
        thread = threading.Thread(target=lambda peer=peer: attempts.append(find_attempt(peer, 1, 2)))
        thread.start()
        attempts.append(find_attempt(store, 0, 2))
        thread.join()
    assert attempts[0] == attempts[1]
    assert attempts[2] == attempts[3]
    assert attempts[0] != attempts[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_never_becomes_complete_says_so_and_ends(rank, monkeypatch):
    """Variables of torchrun that are left over in a shell."""
    monkeypatch.setattr(parallel, "START", timedelta(seconds=1))
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        TrainingFailed, match=r"^not all 2 processes have started within 0:00:01 \(.*; to train with one"
    ):
        Job(Launch(rank, 2, rank, 2, True)).start(Signals())


class Runs:
    """Unpickled, it would run what it says."""

    def __reduce__(self):
        return print, ("run",)


def test_what_is_received_is_values_and_nothing_of_it_is_run(capsys):
    value = {"a": [1, 2.5, None, "text", b"bytes", (1, 2)], "b": torch.arange(3)}
    back = decode(encode(value))
    assert back["a"] == value["a"]
    assert torch.equal(back["b"], value["b"])
    for sent in (torch.frombuffer(bytearray(pickle.dumps(Runs(), protocol=2)), dtype=torch.uint8), encode(Runs())):
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            decode(sent)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def job():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    made = Job(Launch(is_torchrun=True))
    made.gradient_group = dist.group.WORLD
    yield made
    dist.destroy_process_group()


def connect(step, job, compression="none"):
    batch = make_batch(2, seed=9)
    take_step(step, batch, learning_rate=0.0)
    step.connect(GradientSync(job, step, compression))
    return step


def take_group(step, batches):
    return take_step(step, *batches, learning_rate=0.1)


@pytest.mark.parametrize(("num_batches", "num_parts"), [(1, 1), (1, 3), (3, 2)])
def test_one_process_trains_as_without_a_job_and_averages_once_a_group(num_batches, num_parts, job):
    batches = [make_batch(4, seed) for seed in range(num_batches)]
    alone, step = (make_step(plain_segmenter(), num_parts=num_parts) for _ in range(2))
    connect(step, job)
    for _ in range(3):
        take_group(alone, batches)
        take_group(step, batches)
    for one, other in zip(step.parameters, alone.parameters, strict=True):
        assert torch.equal(one, other)


def test_gradients_may_be_averaged_in_bfloat16(job):
    alone, step = make_step(plain_segmenter()), connect(make_step(plain_segmenter()), job, "bf16")
    before = [parameter.detach().clone() for parameter in step.parameters]
    for each in (alone, step):
        take_group(each, [make_batch(2)])
    moved, wanted = (
        torch.cat([(now - then).flatten() for now, then in zip(each.parameters, before, strict=True)])
        for each in (step, alone)
    )
    assert not torch.equal(moved, wanted)
    torch.testing.assert_close(moved, wanted, rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("what", ["a loss", "a statistic"])
def test_what_is_not_finite_in_one_process_makes_the_gradients_of_all_so(what, job):
    step = connect(small_components().train_step, job)
    batch, moved = make_batch(2), step.segmenter.network.decoder[0].weight.detach().clone()
    if what == "a statistic":
        next(buffer for buffer in step.segmenter.network.buffers() if buffer.is_floating_point()).fill_(torch.inf)
    else:
        batch = batch._replace(images=batch.images.float() * torch.nan)
    assert int(take_step(step, batch).num_skipped) == 1
    assert torch.equal(step.segmenter.network.decoder[0].weight, moved)
    assert not any(parameter.grad.isfinite().all() for parameter in step.parameters)


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
        components.state.epoch, components.state.history = epoch, [{}] * epoch
        components.set_training_mode(epoch)
        before = {name: tensor.clone() for name, tensor in components.state.segmenter.state_dict().items()}
        assert not step.is_connected()
        connect_gradients(settings, components, None, silent_console(), "nothing is saved", job)
        assert step.is_connected()
        buckets = step.sync.model.reducer._get_zeros_like_grad_buckets()
        assert sum(len(bucket.parameters()) for bucket in buckets) == num_trained
        for name, tensor in components.state.segmenter.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_synchronised_layers_are_plain_ones_while_a_process_tries_something_alone():
    """On a CPU they cannot run otherwise."""
    components = small_components()
    network = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    components.state.segmenter.network = network
    with components.unsynchronized():
        network(torch.rand(2, 3, 4, 4))
    assert type(network[0]) is torch.nn.SyncBatchNorm
    assert int(network[0].num_batches_tracked) == 1
