"""The processes of a torchrun job: which one this is, and what they exchange. A plain python process is a Job of one, in which
nothing is exchanged.

The hosts exchange small values through gloo. Every such exchange begins with an all_reduce of a flag "I have failed": a process
that fails takes part in the next one, whatever the others were about to exchange, and all learn of it at the same point
(PeerFailed); then they `agree` on the cause. A process that is killed or hangs breaks the exchange instead: the others end, and one
message names it (PeerLost). Gradients have a group of their own, NCCL or gloo. It is made in `connect`, after the worker
processes were forked, since NCCL is not fork-safe; from there on an exchange has a time limit.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from unet_trainer.system.signals import Signals, skip_teardown

if TYPE_CHECKING:
    import torch


Value = TypeVar("Value")

START_SECONDS = 300  # within which all processes of a job have to appear
PATIENT_SECONDS = 20  # after which rank 0 says that it waits for them
BEFORE_TRAINING = timedelta(days=2)  # limit of an exchange while rank 0 may still read a large dataset
SURVIVOR_SECONDS = 3  # in which those that are left report, so that the missing ones can be named
LATER_SECONDS = 60  # NCCL ends a process that waits for too long: after the hosts have said which one is missing
POLL_SECONDS = 0.05
EXIT_LOST = 3
HOW_TO_BE_ALONE = "to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment"
KINDS = ("bug", "user", "failed", "worker", "memory", "non-finite", "signal")  # of failures, the gravest first


class PeerFailed(RuntimeError):
    """Another process has failed and says why; this one ends with the same exit code and says nothing, unless it is rank 0 and the
    other says it on another machine. `rank`: None until the processes have agreed on the cause."""

    def __init__(self, text: str, exit_code: int, rank: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.rank = rank


class PeerLost(RuntimeError):
    """A process of the job was killed, hangs or cannot be reached."""


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process of its place."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    is_torchrun: bool = False

    def is_on_this_machine(self, rank: int) -> bool:
        first = self.rank - self.local_rank
        return first <= rank < first + self.local_world_size


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """From the variables that torchrun sets; others of the kind (SLURM's) do not count."""
    given = os.environ if environment is None else environment
    if not all(given.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")):
        return Launch()
    if not given.get("MASTER_ADDR"):
        return Launch()
    rank, world_size, local_rank = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world_size = int(given.get("LOCAL_WORLD_SIZE", world_size))
    return Launch(rank, world_size, local_rank, local_world_size, int(given.get("GROUP_RANK", rank // local_world_size)), True)


def start_command(launch: Launch) -> str:
    """How such a process is started."""
    if not launch.is_torchrun:
        return "python train_unet.py"
    num_machines = launch.world_size // max(1, launch.local_world_size)
    machines = "--standalone" if num_machines <= 1 else f"--nnodes={num_machines} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
    return f"torchrun {machines} --nproc-per-node={launch.local_world_size} train_unet.py"


@dataclass(frozen=True)
class Failure:
    """What a process tells the others when one has failed; `kind` is None for one that had no error of its own."""

    rank: int
    kind: str | None
    text: str
    exit_code: int = 1
    is_whole: bool = True  # no step is under way
    position: tuple[int, int] = (0, 0)  # epoch and batch
    batch_number: int | None = None
    signal_number: int = 0


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The gravest; of several the one of the lowest rank."""
    return min((one for one in failures if one.kind is not None), key=lambda one: KINDS.index(str(one.kind)))


class Job:
    """One process, without torchrun: nothing is exchanged. With torchrun it is a TorchrunJob."""

    launch = Launch()
    is_alone = True
    speaks = True  # shows the error that it ends with
    gradient_group: Any = None  # NCCL or gloo, from `connect` on
    statistics_group: Any = None  # another one for SyncBatchNorm: a process that fails must not answer it with gradients

    @property
    def is_main(self) -> bool:
        """Rank 0 writes files and prints."""
        return self.launch.rank == 0

    def start(self, signals: Signals) -> None:
        """Waits for all processes. `signals` are deferred during each exchange: all take part in it to its end."""

    def connect(self, device: torch.device, timeout: float) -> None:
        """Makes the groups for gradients and statistics. From here on an exchange may take `timeout` seconds."""

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Rank 0 first, then the first process of each other machine, then the others: they find what was written before."""
        return contextlib.nullcontext()

    def any_rank(self, wanted: bool = False) -> bool:
        """Whether any process wants it; raises PeerFailed if one has failed."""
        return wanted

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each of them."""
        return [value]

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on rank 0; nothing on the others."""
        return [value]

    def combine(self, value: Value, add: Callable[[list[Value]], Value]) -> Value:
        """What rank 0 makes of the values of all."""
        values = self.gather(value)
        return self.broadcast(add(values) if self.is_main else value)

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value."""
        return value

    def broadcast_made(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes."""
        return self.broadcast(make() if self.is_main else None)  # type: ignore[return-value]

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """In place, on its device; the same bits on all processes."""

    def exchange(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around work that waits for the others. A signal waits for the end of it. Errors of gloo and NCCL become PeerLost."""
        return contextlib.nullcontext()

    def agree(self, own: Failure, was_told: bool) -> list[Failure]:
        """Called by every process when one has failed: those of all, by rank. The process that has the cause speaks. `was_told`: by
        a PeerFailed of the last exchange."""
        return [own]

    def leave(self, text: str) -> None:
        """In the middle of an exchange of a library, where the others cannot be told: they learn of it when this process has ended,
        and leave it to this one to say why."""

    def close(self) -> None:
        """Leaves the process groups."""


ALONE = Job()


class TorchrunJob(Job):
    """The processes that torchrun has started, one or many."""

    is_alone = False

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.speaks = launch.local_rank == 0  # until all are connected: what fails before, fails alike on a machine
        self._signals = Signals()
        self._store: Any = None
        self._control: Any = None  # gloo, between the hosts

    def start(self, signals: Signals) -> None:
        import torch.distributed as dist

        self._signals = signals
        number = self.launch.world_size
        text = f"Waiting for all {number} processes to start (WORLD_SIZE is {number}) ..."
        timer = threading.Timer(PATIENT_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
        timer.daemon = True
        if self.is_main:
            timer.start()
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
            self._store = dist.PrefixStore(self._find_attempt(store), store)
        except dist.DistError as error:  # without torchrun the store lies in rank 0, and making it waits for all others
            text = f"not all {number} processes have started within {START_SECONDS} s ({_first_words(error)})"
            raise PeerLost(f"{text}; {HOW_TO_BE_ALONE}") from None
        finally:
            timer.cancel()
        self._store.set(f"who/{self.launch.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        with self.exchange("connecting"):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("groups", self._store),
                rank=self.launch.rank,
                world_size=number,
                timeout=BEFORE_TRAINING,
            )
            self._control = dist.group.WORLD

    def _find_attempt(self, store: Any) -> str:
        """A prefix of this start's own. torchrun keeps the store when it restarts a job, with all that the last start left there,
        and restart counts need not be the same on all machines: rank 0 counts, and answers whoever says hello."""
        rank, world_size = self.launch.rank, self.launch.world_size
        deadline = time.monotonic() + START_SECONDS
        if rank > 0:
            token = uuid.uuid4().hex
            store.set(f"hello/{rank}", token)
            while not store.check([f"answer/{token}"]):
                if time.monotonic() > deadline:
                    raise PeerLost(f"rank 0 has not answered within {START_SECONDS} s; did it start?")
                time.sleep(POLL_SECONDS)
            attempt = store.get(f"answer/{token}").decode()
            store.add(f"greeted/{attempt}", 1)
            return attempt
        attempt = f"start {store.add('starts', 1)}"
        answered: dict[int, bytes] = {}
        while store.add(f"greeted/{attempt}", 0) < world_size - 1:
            for peer in range(1, world_size):
                if store.check([f"hello/{peer}"]) and (greeting := store.get(f"hello/{peer}")) != answered.get(peer):
                    store.set(f"answer/{greeting.decode()}", attempt)
                    answered[peer] = greeting
            if time.monotonic() > deadline:
                started = f"only {len(answered) + 1} of {world_size} processes have started within {START_SECONDS} s"
                raise PeerLost(f"{started}; {HOW_TO_BE_ALONE}")
            time.sleep(POLL_SECONDS)
        return attempt

    def connect(self, device: torch.device, timeout: float) -> None:
        import torch.distributed as dist

        self.any_rank()
        limit, backend = timedelta(seconds=timeout), choose_backend(self.all_gather(device_id(device)))
        with self.exchange("connecting"):
            self._control = dist.new_group(backend="gloo", timeout=limit)
            own = device if backend == "nccl" else None
            later = limit + timedelta(seconds=LATER_SECONDS) if backend == "nccl" else limit
            self.gradient_group = dist.new_group(backend=backend, timeout=later, device_id=own)
            self.statistics_group = dist.new_group(backend=backend, timeout=later)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        turn = min(1, self.launch.rank) + (self.launch.local_rank > 0 and self.launch.node > 0)
        for _ in range(turn):
            self.any_rank()
        yield
        for _ in range(turn, 2):
            self.any_rank()

    # Exchanges.

    @contextlib.contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        was_deferred, self._signals.is_deferred = self._signals.is_deferred, True
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PeerFailed | PeerLost) or "OutOfMemory" in type(error).__name__:
                raise
            skip_teardown()
            self._control = None  # of no use any more; leaving it could wait for ever
            try:
                text = self._describe_loss(what, error)
            except Exception:  # the store is gone, with the machine that held it
                self.speaks = True
                text = f"the first machine of the job cannot be reached any more ({_first_words(error)})"
            raise PeerLost(text) from None
        finally:
            self._signals.is_deferred = was_deferred
        if not was_deferred:
            self._signals.check()

    def _describe_loss(self, what: str, error: Exception) -> str:
        """Those that are left report, and the first of them speaks; the others are the missing ones."""
        hangs = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self._store.set(f"survivor/{self.launch.rank}", "yes")
        ranks = range(self.launch.world_size)
        missing = list(ranks)
        deadline = time.monotonic() + SURVIVOR_SECONDS * (2 if hangs else 1)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"survivor/{rank}"])]
            time.sleep(POLL_SECONDS)
        self.speaks = self.launch.rank == min(set(ranks) - set(missing)) and not self._store.check(["told"])
        if not missing:
            return f"the connection between the processes broke while {what} ({_first_words(error)})"
        who = ", ".join(f"rank {rank} ({self._store.get(f'who/{rank}').decode()})" for rank in missing[:4])
        verb = f"{', ...' if len(missing) > 4 else ''} {'does not answer' if hangs else 'has ended'}"
        return f"{who}{verb}, so all others end too; what it said last, and torchrun's report, tell why"

    def _sum_flags(self, failed: bool, wanted: bool) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        flags = torch.tensor([failed, wanted], dtype=torch.int64)
        dist.all_reduce(flags, group=self._control)
        num_failed, num_wanted = flags.tolist()
        return num_failed, num_wanted

    def _begin(self, wanted: bool = False) -> bool:
        num_failed, num_wanted = self._sum_flags(False, wanted)
        if num_failed:
            raise PeerFailed("another process has failed", EXIT_LOST)
        return num_wanted > 0

    def any_rank(self, wanted: bool = False) -> bool:
        with self.exchange("agreeing"):
            return self._begin(wanted)

    def all_gather(self, value: Value) -> list[Value]:
        with self.exchange("gathering"):
            self._begin()
            return self._gather(value)

    def gather(self, value: Value) -> list[Value]:
        with self.exchange("gathering"):
            self._begin()
            return self._gather(value, to_all=False)

    def _gather(self, value: Value, to_all: bool = True) -> list[Value]:
        import torch
        import torch.distributed as dist

        content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.launch.world_size)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self._control)
        longest = max(int(length) for length in lengths)
        contents = [torch.empty(longest, dtype=torch.uint8) for _ in lengths] if to_all or self.is_main else []
        padded = torch.nn.functional.pad(content, (0, longest - len(content)))
        if to_all:
            dist.all_gather(contents, padded, group=self._control)
        else:
            dist.gather(padded, contents or None, dst=0, group=self._control)
        return [decode(one[: int(length)].numpy().tobytes()) for one, length in zip(contents, lengths, strict=False)]

    def broadcast(self, value: Value) -> Value:
        import torch
        import torch.distributed as dist

        with self.exchange("sharing"):
            self._begin()
            content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
            length = torch.tensor([len(content)])
            dist.broadcast(length, src=0, group=self._control)
            content = content if self.is_main else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._control)
            return value if self.is_main else decode(content.numpy().tobytes())

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        with self.exchange("averaging gradients"):
            if dist.get_backend(self.gradient_group) == "nccl":
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.gradient_group)
            else:
                dist.all_reduce(tensor, group=self.gradient_group)
                tensor /= self.launch.world_size

    def agree(self, own: Failure, was_told: bool) -> list[Failure]:
        if self._control is None:  # another process is lost, or not all have started
            return [own]
        with self.exchange("meeting"):
            if not was_told:
                self._sum_flags(True, False)
            failures = [Failure(**one) for one in self._gather(asdict(own))]
        self.speaks = cause_of(failures).rank == self.launch.rank
        return failures

    def leave(self, text: str) -> None:
        self._store.set("told", text)
        self._control, self.speaks = None, True
        skip_teardown()

    def close(self) -> None:
        if self._control is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
        self._control = None


def encode(value: Any) -> bytes:
    """Numbers, texts, bytes, tensors, and lists, tuples and dicts of them."""
    import torch

    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def decode(content: bytes) -> Any:
    """Whoever reaches the port of the job can send it something: nothing that is received is run."""
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def is_of_the_link(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, within a library that waits for the others."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def device_id(device: torch.device) -> str:
    """Of a GPU, whatever number it has in this process: SLURM may show each process one, which is cuda:0. Empty for a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose_backend(device_ids: Sequence[str]) -> str:
    """NCCL, unless processes share a GPU, which it refuses."""
    return "nccl" if all(device_ids) and len(set(device_ids)) == len(device_ids) else "gloo"


def _first_words(error: Exception) -> str:
    """Of the errors of gloo and NCCL, which go on with addresses and advice."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.rpartition("] ")[2][:160] or text[:160]


@lru_cache
def _torchrun_job(launch: Launch) -> TorchrunJob:
    return TorchrunJob(launch)


def current() -> Job:
    """The job of this process."""
    launch = read_launch()
    return _torchrun_job(launch) if launch.is_torchrun else ALONE
