"""Several processes that train one model, started by torchrun: plain DistributedDataParallel. The only module that
imports torch.distributed.

Rank 0 decides, writes and prints; the others take its values. Hosts exchange values through gloo. Gradients are
averaged by NCCL, or by gloo between processes that share a GPU or have none. A process that fails prints its error and
ends; torchrun then ends the others, starts all again if it was asked to, and the run resumes from its last save.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unet_trainer.config.errors import TrainingFailed
from unet_trainer.system.console import first_line
from unet_trainer.system.launch import Launch
from unet_trainer.system.signals import Signals
from unet_trainer.training.state import TrainState
from unet_trainer.training.step import TrainStep

Value = TypeVar("Value")

START = timedelta(minutes=5)  # within which all processes of a job have to appear
BEFORE_TRAINING = timedelta(days=2)  # limit of an exchange while rank 0 may still read a large dataset
POLL_SECONDS = 0.05
TRAINING = timedelta(minutes=15)  # limit of an exchange later: a process that takes longer hangs


class Job:
    """The processes that torchrun has started, one or many; or a plain python process, which exchanges nothing."""

    gradient_group: Any = None  # NCCL or gloo, from `connect` on
    _signals = Signals()
    _control: Any = None  # gloo, between the hosts; None: nothing is exchanged

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def is_alone(self) -> bool:
        return not self.launch.is_torchrun

    @property
    def is_main(self) -> bool:
        return self.launch.is_main

    def start(self, signals: Signals) -> None:
        """Wait for all processes. `signals` are deferred during each exchange: all take part in it to its end."""
        if self.is_alone:
            return
        self._signals = signals
        try:
            shared, rank, number = next(dist.rendezvous("env://", timeout=START))
            store = dist.PrefixStore(find_attempt(shared, rank, number), shared)
        except dist.DistError as error:
            text = f"not all {self.launch.world_size} processes have started within {START} ({first_line(error)[:160]})"
            fix = "to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment"
            raise TrainingFailed(f"{text}; {fix}") from None
        with self.exchange():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=BEFORE_TRAINING)
            self._control = dist.group.WORLD

    def connect(self, device: torch.device) -> None:
        """Make the group for gradients: after the worker processes were forked, since NCCL is not fork-safe."""
        if self.is_alone:
            return
        with self.exchange():
            backend = choose_backend(self.all_gather(device_id(device)))
            self._control = dist.new_group(backend="gloo", timeout=TRAINING)
            own = device if backend == "nccl" else None
            self.gradient_group = dist.new_group(backend=backend, timeout=TRAINING, device_id=own)

    def close(self) -> None:
        if self._control is not None:
            dist.destroy_process_group()
        self._control = None

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around work that waits for the others: a signal waits for its end, a lost connection ends the run."""
        was_deferred, self._signals.is_deferred = self._signals.is_deferred, True
        try:
            yield
        except RuntimeError as error:
            raise (self.lost(error) if is_of_the_link(error) else error) from None
        finally:
            self._signals.is_deferred = was_deferred
        if not was_deferred:
            self._signals.check()

    def lost(self, error: BaseException) -> TrainingFailed:
        """The error to end with after an exchange failed; nothing is exchanged any more."""
        self._control = None
        return TrainingFailed(f"another process of the job has ended or does not answer ({first_line(error)[:160]})")

    def largest(self, *numbers: int) -> list[int]:
        """Of each number the largest of all processes."""
        if self._control is None:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.int64)
        with self.exchange():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control)
        return tensor.tolist()

    def any_rank(self, wanted: bool = False) -> bool:
        """Return whether any process wants it; waits for all."""
        return bool(self.largest(int(wanted))[0])

    def broadcast(self, value: Value) -> Value:
        """Return rank 0's value."""
        if self._control is None or self.launch.world_size == 1:
            return value
        content = encode(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        with self.exchange():
            (length,) = self.largest(len(content))
            content = content if self.is_main else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._control)
        return value if self.is_main else decode(content)

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        if self._control is None:
            return [value]
        content = encode(value)
        with self.exchange():
            lengths = self.largest(
                *(len(content) * (rank == self.launch.rank) for rank in range(self.launch.world_size))
            )
            padded = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
            own = torch.nn.functional.pad(content, (0, max(lengths) - len(content)))
            dist.all_gather(padded, own, group=self._control)
        return [decode(one[:length]) for one, length in zip(padded, lengths, strict=True)]

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Average in place, on the tensor's device; the same bits on all processes."""
        with self.exchange():
            dist.all_reduce(tensor, group=self.gradient_group)
            tensor /= self.launch.world_size

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 first, then the first process of each other machine, then the rest: they find what was written."""
        is_elsewhere = self.launch.rank > self.launch.local_rank  # than on the machine of rank 0
        turn = min(1, self.launch.rank) + (self.launch.local_rank > 0 and is_elsewhere)
        for _ in range(turn):
            self.any_rank()
        yield
        for _ in range(turn, 2):
            self.any_rank()


ALONE = Job(Launch())


def broadcast_state(state: TrainState, processes: Job) -> None:
    """Rank 0's state on all ranks: weights, optimizer, position, history."""
    content = processes.broadcast(state.state_dict() if processes.is_main else {})
    if not processes.is_main:
        state.load_state_dict(content)


@torch.no_grad()
def average_statistics(state: TrainState, processes: Job) -> None:
    """Running means and variances become the mean over all ranks, the same bits on each."""
    networks = [state.segmenter.network, *([] if state.ema is None else [state.ema.segmenter.network])]
    for buffer in (buffer for network in networks for buffer in network.buffers()):
        if buffer.is_floating_point() and not processes.is_alone:
            processes.all_reduce_mean(buffer)


class GradientSync:
    """DistributedDataParallel around the model of a step: gradients are averaged over the processes in its last
    backward pass. Numbers of one process that are not finite make those of all so."""

    def __init__(self, processes: Job, step: TrainStep, compression: str = "none") -> None:
        """For the parameters that have gradients now, which are dropped. All processes at once. Two steps that are
        thrown away should follow: buckets are arranged in the first, and a resumed run must add up in the same
        order."""
        self.step = step
        self.trains = [parameter.requires_grad for parameter in step.parameters]
        self.is_divided = processes.launch.world_size > 1
        model = _Model(step)
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, without)
        step.optimizer.zero_grad(set_to_none=True)
        with processes.exchange(), warnings.catch_warnings():
            # broadcast_buffers has another name since torch 2.13; gradients of 1×1 kernels have strides of their own.
            warnings.simplefilter("ignore")
            self.model = DistributedDataParallel(
                model, process_group=processes.gradient_group, broadcast_buffers=False, gradient_as_bucket_view=True
            )
            if compression == "bf16":
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

                self.model.register_comm_hook(processes.gradient_group, bf16_compress_hook)

    def close(self) -> None:
        """The parameters may get another."""
        self.model.reducer._remove_autograd_hooks()
        del self.model

    def prepare_compiler(self) -> None:
        """Compile the backward pass in parts, a bucket each: one is averaged while the next is computed."""
        torch._dynamo.config.optimize_ddp = self.is_divided

    def spoiled_if_bad(self, loss: torch.Tensor) -> torch.Tensor:
        """NaN in the sum of gradients is NaN on every process: all skip the step, without asking each other."""
        is_finite = torch.isfinite(loss.detach()) & self.step.guard.buffers_are_finite()
        return loss * torch.where(is_finite, 1.0, math.nan)


class _Model(torch.nn.Module):
    """What DistributedDataParallel wraps. The step's forward pass may become a compiled one, and uncompiled again."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.network = step.segmenter.network
        self.step = step

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.step.forward(images)
        return logits


def find_attempt(store: Any, rank: int, world_size: int) -> str:
    """Return a prefix of this start's own. torchrun keeps the store when it restarts a job, with all that the last
    start left there, and restart counts differ between machines: rank 0 answers all that say hello now."""
    if rank == 0:
        attempt = uuid.uuid4().hex
        for peer in range(1, world_size):
            store.delete_key(f"hello/{peer}")  # of an earlier start: this one says it again
            store.set(f"answer/{store.get(f'hello/{peer}').decode()}", attempt)
        return attempt
    answer, deadline = uuid.uuid4().hex, time.monotonic() + START.total_seconds()
    while not store.check([f"answer/{answer}"]) and time.monotonic() < deadline:
        store.set(f"hello/{rank}", answer)
        time.sleep(POLL_SECONDS)
    return store.get(f"answer/{answer}").decode()


def encode(value: Any) -> torch.Tensor:
    """Numbers, texts, bytes, tensors, and lists, tuples and dicts of them, as bytes."""
    memory = io.BytesIO()
    torch.save(value, memory)
    return torch.frombuffer(memory.getbuffer(), dtype=torch.uint8)


def decode(content: torch.Tensor) -> Any:
    """The value of these bytes. The port of the job is open to others: nothing that is received is run."""
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


def is_of_the_link(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, within a library that waits for the others."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def device_id(device: torch.device) -> str:
    """Of a GPU, whatever its number in this process: SLURM may show each process one, which is cuda:0. Empty for a
    CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose_backend(device_ids: Sequence[str]) -> str:
    """NCCL, unless processes share a GPU, which it refuses."""
    return "nccl" if all(device_ids) and len(set(device_ids)) == len(device_ids) else "gloo"
