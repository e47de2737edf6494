"""The processes of a torchrun job: which one this is, and what they exchange. A plain python process is a Job of one,
in which nothing is exchanged.

Rank 0 decides and broadcasts. The hosts exchange values through gloo, and every such exchange begins with an all_reduce
of a flag "I have failed": a process that fails takes part in the next one, whatever the others were about to exchange,
and all learn of it at the same point (PeerFailed); then they `agree` on the cause. A process that is killed or hangs
breaks the exchange
instead: the others end, and one message names it (PeerLost). Gradients have a group of their own, NCCL or gloo. It is
made in
`connect`, after the worker processes were forked, since NCCL is not fork-safe; from there on an exchange has a time
limit.

Imports torch only under torchrun.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from unet_trainer.system.console import EXIT_TRAINING_FAILED, first_line
from unet_trainer.system.signals import Interrupted, Signals, skip_teardown

if TYPE_CHECKING:
    import torch


Value = TypeVar("Value")

START_SECONDS = 300  # within which all processes of a job have to appear
PATIENT_SECONDS = 20  # after which rank 0 says that it waits for them
BEFORE_TRAINING = timedelta(days=2)  # limit of an exchange while rank 0 may still read a large dataset
SURVIVOR_SECONDS = 3  # in which those that are left report, so that the missing ones can be named
LATER_SECONDS = 60  # NCCL ends a process that waits for too long: after the hosts have said which one is missing
POLL_SECONDS = 0.05
KINDS = ("bug", "error", "memory", "non-finite", "signal", "told")  # of failures, the gravest first


class PeerFailed(RuntimeError):
    """Another process has failed; this one ends with the same exit code."""

    def __init__(self, text: str = "another process has failed", exit_code: int = EXIT_TRAINING_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class PeerLost(RuntimeError):
    """A process of the job was killed, hangs or cannot be reached."""

    exit_code = EXIT_TRAINING_FAILED


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process of its place."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_torchrun: bool = False


def read_launch() -> Launch:
    """From the variables that torchrun sets; others of the kind (SLURM's) are ignored."""
    given = os.environ
    numbers = [given.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    if not all(number.isdigit() for number in numbers) or not given.get("MASTER_ADDR"):
        return Launch()
    rank, world_size, local_rank, _ = map(int, numbers)
    return Launch(rank, world_size, local_rank, int(given.get("LOCAL_WORLD_SIZE", world_size)), True)


class Failure(NamedTuple):
    """What a process tells the others when one has failed; its kind is "told" if it has no error of its own."""

    rank: int
    kind: str
    text: str = ""
    exit_code: int = 1
    position: tuple[int, int] | None = None  # epoch and batch; None in the middle of a step

    def as_error(self) -> BaseException:
        """For the other processes."""
        if self.kind == "signal":
            return Interrupted(self.exit_code - 128, self.text)
        return PeerFailed(f"rank {self.rank}: {self.text}", self.exit_code)


class Job:
    """The processes that torchrun has started, one or many; or a plain python process."""

    gradient_group: Any = None  # NCCL or gloo, from `connect` on
    statistics_group: Any = (
        None  # another one for SyncBatchNorm: a process that fails must not answer it with gradients
    )
    _signals = Signals()
    _store: Any = None
    _control: Any = None  # gloo, between the hosts; where it is None, nothing is exchanged
    _was_told = False  # by the last exchange, that another process has failed

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.speaks = (
            launch.local_rank == 0
        )  # shows the error that it ends with. Before all are connected, all fail alike

    @property
    def is_alone(self) -> bool:
        return not self.launch.is_torchrun

    @property
    def is_main(self) -> bool:
        """Rank 0 writes files and prints."""
        return self.launch.rank == 0

    def start(self, signals: Signals) -> None:
        """Waits for all processes. `signals` are deferred during each exchange: all take part in it to its end."""
        if self.is_alone:
            return
        import torch.distributed as dist

        self._signals = signals
        rank, number = self.launch.rank, self.launch.world_size
        waiting = f"Waiting for all {number} processes to start (WORLD_SIZE is {number}) ..."
        timer = threading.Timer(PATIENT_SECONDS, print, [waiting], {"file": sys.stderr, "flush": True})
        timer.daemon = True
        if self.is_main:
            timer.start()
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
            self._store = dist.PrefixStore(find_attempt(store, rank, number), store)
        except dist.DistError as error:
            text = f"not all {number} processes have started within {START_SECONDS} s ({first_line(error)[:160]})"
            raise PeerLost(
                f"{text}; to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment"
            ) from None
        finally:
            timer.cancel()
        self._store.set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        with self.exchange():
            groups = dist.PrefixStore("groups", self._store)
            dist.init_process_group("gloo", store=groups, rank=rank, world_size=number, timeout=BEFORE_TRAINING)
            self._control = dist.group.WORLD

    def connect(self, device: torch.device, timeout: float) -> None:
        """Makes the groups for gradients and statistics. From here on an exchange may take `timeout` seconds."""
        if self.is_alone:
            return
        import torch.distributed as dist

        limit, name = timedelta(seconds=timeout), device_id(device)
        with self.exchange():
            backend = choose_backend(self.all_gather(name))
            self._control = dist.new_group(backend="gloo", timeout=limit)
            own = device if backend == "nccl" else None
            later = limit + timedelta(seconds=LATER_SECONDS) if backend == "nccl" else limit
            self.gradient_group = dist.new_group(backend=backend, timeout=later, device_id=own)
            self.statistics_group = dist.new_group(backend=backend, timeout=later)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 first, then the first process of each other machine, then the others: they find what was written
        before."""
        is_elsewhere = self.launch.rank > self.launch.local_rank  # than on the machine of rank 0
        turn = min(1, self.launch.rank) + (self.launch.local_rank > 0 and is_elsewhere)
        for _ in range(turn):
            self.any_rank()
        yield
        for _ in range(turn, 2):
            self.any_rank()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around work that waits for the others. A signal waits for the end of it. Errors of gloo and NCCL become
        PeerLost."""
        was_deferred, self._signals.is_deferred = self._signals.is_deferred, True
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PeerFailed | PeerLost) or "OutOfMemory" in type(error).__name__:
                raise
            skip_teardown()
            self._control = None  # of no use any more; leaving it could wait for ever
            try:
                text = self._describe_loss(error)
            except Exception:  # the store is gone, with the machine that held it
                self.speaks = True
                text = f"the first machine of the job cannot be reached any more ({first_line(error)[:160]})"
            raise PeerLost(text) from None
        finally:
            self._signals.is_deferred = was_deferred
        if not was_deferred:
            self._signals.check()

    def _describe_loss(self, error: Exception) -> str:
        """Those that are left report, and the first of them speaks; the others are the missing ones."""
        hangs = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self._store.set(f"survivor/{self.launch.rank}", "")
        time.sleep(SURVIVOR_SECONDS * (2 if hangs else 1))
        missing = [rank for rank in range(self.launch.world_size) if not self._store.check([f"survivor/{rank}"])]
        is_first = all(rank in missing for rank in range(self.launch.rank))
        self.speaks = is_first and not self._store.check(["told"])
        if not missing:
            return f"the connection between the processes broke ({first_line(error)[:160]})"
        who = ", ".join(f"rank {rank} ({self._store.get(f'who/{rank}').decode()})" for rank in missing[:4])
        state = "does not answer" if hangs else "has ended"
        return f"{who} {state}, so all others end too; what it said last, and torchrun's report, tell why"

    def any_rank(self, wanted: bool = False, has_failed: bool = False) -> bool:
        """Whether any process wants it; raises PeerFailed if another one has failed. Every exchange of values begins
        with this."""
        if self._control is None:
            return wanted
        import torch

        with self.exchange():
            flags = torch.tensor([has_failed, wanted], dtype=torch.int64)
            torch.distributed.all_reduce(flags, group=self._control)
            if flags[0] and not has_failed:
                self._was_told = True
                raise PeerFailed
        return bool(flags[1])

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value."""
        if self._control is None or self.launch.world_size == 1:
            return value
        import torch

        content = encode(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        with self.exchange():
            self.any_rank()
            length = torch.tensor([len(content)])
            torch.distributed.broadcast(length, src=0, group=self._control)
            content = content if self.is_main else torch.empty(int(length), dtype=torch.uint8)
            torch.distributed.broadcast(content, src=0, group=self._control)
            return value if self.is_main else decode(content)

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on rank 0; nothing on the others."""
        if self._control is None:
            return [value]
        import torch

        content = encode(value)
        with self.exchange():
            self.any_rank()
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.launch.world_size)]
            torch.distributed.all_gather(lengths, torch.tensor([len(content)]), group=self._control)
            longest = int(max(lengths))
            contents = [torch.empty(longest, dtype=torch.uint8) for _ in lengths] if self.is_main else []
            padded = torch.nn.functional.pad(content, (0, longest - len(content)))
            torch.distributed.gather(padded, contents or None, dst=0, group=self._control)
            return [decode(one[: int(length)]) for one, length in zip(contents, lengths, strict=False)]

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each of them."""
        return self.broadcast(self.gather(value))

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """In place, on its device; the same bits on all processes."""
        import torch.distributed as dist

        with self.exchange():
            if dist.get_backend(self.gradient_group) == "nccl":
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.gradient_group)
            else:
                dist.all_reduce(tensor, group=self.gradient_group)
                tensor /= self.launch.world_size

    def agree(self, error: BaseException, kind: str = "", position: tuple[int, int] | None = None) -> Failure:
        """Called by every process when one has failed, itself or another: the cause, which is the gravest failure, of
        several the one of the lowest rank. Its position is None unless all have the same. The process that has the
        cause speaks, and rank 0 where that is on another machine."""
        known: dict[type, str] = {PeerFailed: "told", Interrupted: "signal"}
        kind = kind or known.get(type(error), "error" if hasattr(error, "exit_code") else "bug")
        rank, text = self.launch.rank, f"{type(error).__name__}: {first_line(error)}" if kind == "bug" else str(error)
        own = Failure(rank, kind, text, getattr(error, "exit_code", 1), position)
        if self._control is None:  # another process is lost, or not all have started
            return own
        with self.exchange():
            if not self._was_told:
                self.any_rank(has_failed=True)
            self._was_told = False
            found = [Failure._make(one) for one in self.all_gather(tuple(own))]
        cause = min(found, key=lambda one: KINDS.index(one.kind))
        self.speaks = rank == cause.rank or (rank == 0 and cause.rank >= self.launch.local_world_size)
        return cause if len({one.position for one in found}) == 1 else cause._replace(position=None)

    def leave(self) -> None:
        """In the middle of an exchange of a library, where the others cannot be told: they learn of it when this
        process has ended, and leave it to this one to say why."""
        self._store.set("told", "")
        self._control, self.speaks = None, True
        skip_teardown()

    def close(self) -> None:
        """Leaves the process groups."""
        if self._control is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
        self._control = None


ALONE = Job(Launch())


def find_attempt(store: Any, rank: int, world_size: int) -> str:
    """A prefix of this start's own. torchrun keeps the store when it restarts a job, with all that the last start left
    there, and restart counts need not be the same on all machines: rank 0 answers all that say hello now."""
    if rank == 0:
        attempt = uuid.uuid4().hex
        for peer in range(1, world_size):
            store.delete_key(f"hello/{peer}")  # of an earlier start: this one says it again
            store.set(f"answer/{store.get(f'hello/{peer}').decode()}", attempt)
        return attempt
    answer, deadline = uuid.uuid4().hex, time.monotonic() + START_SECONDS
    while not store.check([f"answer/{answer}"]) and time.monotonic() < deadline:
        store.set(f"hello/{rank}", answer)
        time.sleep(POLL_SECONDS)
    return store.get(f"answer/{answer}").decode()


def encode(value: Any) -> torch.Tensor:
    """Numbers, texts, bytes, tensors, and lists, tuples and dicts of them, as bytes."""
    import torch

    memory = io.BytesIO()
    torch.save(value, memory)
    return torch.frombuffer(memory.getbuffer(), dtype=torch.uint8)


def decode(content: torch.Tensor) -> Any:
    """Whoever reaches the port of the job can send it something: nothing that is received is run."""
    import torch

    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


def is_of_the_link(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, within a library that waits for the others."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def device_id(device: torch.device) -> str:
    """Of a GPU, whatever number it has in this process: SLURM may show each process one, which is cuda:0. Empty for a
    CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose_backend(device_ids: Sequence[str]) -> str:
    """NCCL, unless processes share a GPU, which it refuses."""
    return "nccl" if all(device_ids) and len(set(device_ids)) == len(device_ids) else "gloo"


_job = lru_cache(Job)


def current() -> Job:
    """The job of this process."""
    return _job(read_launch())
