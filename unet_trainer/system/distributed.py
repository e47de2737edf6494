"""The processes of a torchrun job: which one this is, and what they exchange. A plain python process is a Job of one, in which
nothing is exchanged.

Two channels connect them. The store, torchrun's own, is there from the start. It carries small values while each process still
works by itself: which run is resumed, who reads the dataset first, the settings. The process groups are there from `connect` on,
after the worker processes were forked (NCCL is not fork-safe): gloo between the hosts, and NCCL or gloo for gradients.

Every exchange between the hosts begins with an all_reduce of a flag "I have failed". A process that fails takes part in the next
one, whatever the others were about to exchange, and all learn of it at the same point (PeerFailed). A process that is killed or
hangs breaks the exchange instead: the others end, with one message that names it (PeerLost).

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from unet_trainer.system.signals import ended_parent, skip_teardown

if TYPE_CHECKING:
    import torch


Value = TypeVar("Value")

START_SECONDS = 300  # within which all processes of a job have to appear
REPORT_SECONDS = 25  # that a process which fails before all have appeared waits for them, to agree on who speaks
PATIENT_SECONDS = 20  # after which rank 0 says that it waits for them
BEAT_SECONDS = 5  # between signs of life: rank 0 may work for long (scan, download weights) while the others wait on the store
SILENT_SECONDS = 120  # without a sign of life, after which it counts as lost
POLL_SECONDS = 0.05
SURVIVOR_SECONDS = 3  # in which those that are left report, so that the missing ones can be named
EXIT_LOST = 3
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set to True by torchrun where the store lies in its own process
HOW_TO_BE_ALONE = "to train with one, unset RANK, WORLD_SIZE and LOCAL_RANK in the environment"
FIRST_SIGNAL_CODE = 128  # exit codes above are those of signals


class PeerFailed(RuntimeError):
    """Another process has failed and says why; this one ends with the same exit code and says nothing, unless it is rank 0 and the
    other says it on another machine."""

    def __init__(self, text: str, exit_code: int, rank: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.rank = rank  # that failed; None: not known


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


class Job:
    """One process, without torchrun: nothing is exchanged. With torchrun it is a TorchrunJob."""

    launch = Launch()
    is_alone = True

    @property
    def is_main(self) -> bool:
        """Rank 0 writes files and prints."""
        return self.launch.rank == 0

    def broadcast_made(self, name: str, make: Callable[[], Value]) -> Value:
        """What rank 0 makes. Before and after `connect`; each name once in a run."""
        return make()

    def main_process_first(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Rank 0 first, then the first process of each other machine, then the others: they find what was written before."""
        return contextlib.nullcontext()

    def connect(self, device: torch.device, timeout: float) -> None:
        """Creates the process groups."""

    def any_rank(self, wanted: bool = False) -> bool:
        """Whether any process wants it; raises PeerFailed if one has failed."""
        return wanted

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each of them."""
        return [value]

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value."""
        return value

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """In place, on its device; the same bits on all processes."""

    def announce_failure(self) -> None:
        """Tells the others, at their next exchange, that this process has failed."""

    def all_gather_failed(self, value: Value) -> list[Value]:
        """As all_gather, after a failure: all processes have learned of it."""
        return [value]

    def report_failure(self, text: str, exit_code: int) -> bool:
        """Tells what ended this process; True for the first that does: it speaks for all."""
        return True

    def close(self) -> None:
        """Leaves the process groups."""


ALONE = Job()


class TorchrunJob(Job):
    """The processes that torchrun has started, one or many."""

    is_alone = False

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.is_lost = False  # an exchange has failed: the groups are of no use any more
        self._store: Any = None
        self._control: Any = None  # gloo, between the hosts
        self._beats: dict[int, tuple[int, float]] = {}  # rank: its last sign of life, and when it was new
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._has_given_up = False  # not all processes have appeared
        self._has_groups = False  # or had: the others need not look at the store to learn that this process ends
        self._has_let_know = False
        self._speaks: bool | None = None  # whether this process was the first to report a failure

    def _lose(self) -> None:
        self.is_lost = True
        skip_teardown()

    # The store.

    def _connected_store(self, seconds: float | None = None) -> Any:
        """Waits so long for all processes to appear, START_SECONDS if not told."""
        if self._store is None:
            import torch.distributed as dist

            seconds = START_SECONDS if seconds is None else seconds
            self._has_given_up = True  # until they have
            with self._saying_that_it_waits():
                try:
                    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
                except dist.DistError as error:  # without torchrun the store lies in rank 0, and making it waits for all others
                    text = f"not all {self.launch.world_size} processes have started within {seconds} s ({_first_words(error)})"
                    raise PeerLost(f"{text}; {HOW_TO_BE_ALONE}") from None
                self._store = dist.PrefixStore(self._find_attempt(store, seconds), store)
            self._has_given_up = False
            self._store.set(f"who/{self.launch.rank}", f"process {os.getpid()} on {socket.gethostname()}")
            threading.Thread(target=self._beat, daemon=True).start()
        return self._store

    @contextlib.contextmanager
    def _saying_that_it_waits(self) -> Iterator[None]:
        """Rank 0 does, once, after a while."""
        number = self.launch.world_size
        text = f"Waiting for all {number} processes to start (WORLD_SIZE is {number}) ..."
        timer = threading.Timer(PATIENT_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
        timer.daemon = True
        if self.is_main:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _find_attempt(self, store: Any, seconds: float) -> str:
        """A prefix of this start's own. torchrun keeps the store when it restarts a job, with all that the last start left there,
        and restart counts need not be the same on all machines: rank 0 counts, and answers whoever says hello."""
        rank, world_size = self.launch.rank, self.launch.world_size
        deadline = time.monotonic() + seconds
        if rank > 0:
            token = uuid.uuid4().hex
            store.set(f"hello/{rank}", token)
            while not store.check([f"answer/{token}"]):
                if time.monotonic() > deadline:
                    raise PeerLost(f"rank 0 has not answered within {seconds} s; did it start?")
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
                raise PeerLost(
                    f"only {len(answered) + 1} of {world_size} processes have started within {seconds} s; {HOW_TO_BE_ALONE}"
                )
            time.sleep(POLL_SECONDS)
        return attempt

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(Exception):  # the store is gone: whoever waits finds out
            while True:
                number += 1
                with self._lock:
                    self._store.set(f"beat/{self.launch.rank}", str(number))
                if self._is_closed.wait(BEAT_SECONDS):
                    return

    def _set(self, name: str, value: bytes | str) -> None:
        with self._store_errors(), self._lock:
            self._store.set(name, value)

    def _wait(self, name: str, rank: int) -> bytes:
        """A value that this rank sets. Raises PeerFailed if a process fails, PeerLost if the rank shows no sign of life."""
        with self._store_errors():
            while True:
                with self._lock:
                    if self._store.check([name]):
                        return self._store.get(name)
                self._raise_if_reported()
                self._expect_sign_of_life(rank)
                time.sleep(POLL_SECONDS)

    def _expect_sign_of_life(self, rank: int) -> None:
        with self._lock:
            name = f"beat/{rank}"
            beat = int(self._store.get(name)) if self._store.check([name]) else 0
        seen, since = self._beats.get(rank, (-1, 0.0))
        if beat != seen:
            self._beats[rank] = beat, time.monotonic()
        elif time.monotonic() - since > SILENT_SECONDS:
            raise PeerLost(f"no sign of life from {self._describe(rank)} for {SILENT_SECONDS} s")

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        import torch.distributed as dist

        self._connected_store()
        try:
            yield
        except dist.DistError as error:
            self._lose()
            raise PeerLost(f"the first machine of the job cannot be reached any more ({_first_words(error)})") from None

    def _raise_if_reported(self) -> None:
        with self._lock:
            if not self._store.check(["failure"]):
                return
            rank, text, exit_code = decode(self._store.get("failure"))
            self._store.set(f"knows/{self.launch.rank}", "yes")
        raise PeerFailed(f"rank {rank}: {text}", exit_code, rank)

    def broadcast_made(self, name: str, make: Callable[[], Value]) -> Value:
        if not self.is_main:
            return decode(self._wait(f"shared/{name}", rank=0))
        value = make()
        self._set(f"shared/{name}", encode(value))
        return value

    @contextlib.contextmanager
    def main_process_first(self, name: str) -> Iterator[None]:
        launch = self.launch
        if launch.rank > 0:
            self._wait(f"{name}/first", rank=0)
        if launch.local_rank > 0 and launch.node > 0:
            self._wait(f"{name}/node {launch.node}", rank=launch.rank - launch.local_rank)
        yield
        if launch.rank == 0:
            self._set(f"{name}/first", "done")
        elif launch.local_rank == 0:
            self._set(f"{name}/node {launch.node}", "done")

    def report_failure(self, text: str, exit_code: int) -> bool:
        # Nobody waits yet for this process, and torchrun signals all; or torchrun is gone, and with it perhaps the store.
        if exit_code > FIRST_SIGNAL_CODE and (self._store is None or ended_parent()):
            return self.is_main
        if self._has_given_up:
            return True
        try:
            mine = encode((self.launch.rank, text, exit_code))
            store = self._connected_store(REPORT_SECONDS)
            with self._lock:
                stored = mine if not store.check(["failure"]) and store.add("failures", 1) == 1 else None
                if stored is not None:
                    store.set("failure", mine)
                is_known = stored is None and bool(store.check(["failure"]))
                self._speaks = stored is not None or (is_known and decode(store.get("failure"))[0] == self.launch.rank)
                store.set(f"knows/{self.launch.rank}", "yes")
            self._let_others_know()
        except Exception:  # the store is gone, with the machine or the process that held it
            pass
        return self._speaks is not False  # not asked while there was a store: better twice than never

    def _let_others_know(self) -> None:
        """While a job starts all look at the store. Where it lies in this process, and not in torchrun, it must not be gone before
        they have seen there why the job ends: each would say it again."""
        if not self.is_main or self._has_groups or self._has_let_know or os.environ.get(AGENT_STORE) == "True":
            return
        self._has_let_know = True
        names = [f"knows/{rank}" for rank in range(1, self.launch.world_size)]
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if self._store.check(names):
                    return
            time.sleep(POLL_SECONDS)

    # The groups.

    def connect(self, device: torch.device, timeout: float) -> None:
        """Waits for all processes on the store first: a group that waits knows nothing of failures."""
        import torch.distributed as dist

        self._set(f"ready/{self.launch.rank}", "yes")
        for rank in range(self.launch.world_size):
            self._wait(f"ready/{rank}", rank)
        backend = choose_backend(device, self.launch.local_world_size)
        limit = timedelta(seconds=timeout)
        with self._exchange("connecting"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("gradients", self._store),
                rank=self.launch.rank,
                world_size=self.launch.world_size,
                timeout=limit,
                device_id=device if backend == "nccl" else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=limit)
        self._has_groups = True

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Errors of gloo and NCCL become PeerFailed, if a process has told why it ended, or PeerLost."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PeerFailed | PeerLost):
                raise
            self._lose()
            try:
                text = self._describe_loss(what, error)
            except PeerFailed:
                raise
            except Exception:  # the store is gone, with the machine that held it
                text = f"the first machine of the job cannot be reached any more ({_first_words(error)})"
            raise PeerLost(text) from None

    def _describe_loss(self, what: str, error: Exception) -> str:
        """Those that are left report; the others are the missing ones. Raises PeerFailed if one of those has told why it ended."""
        hangs = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        with self._lock:
            self._store.set(f"survivor/{self.launch.rank}", "yes")
        missing = list(range(self.launch.world_size))
        deadline = time.monotonic() + SURVIVOR_SECONDS * (2 if hangs else 1)
        while missing and time.monotonic() < deadline:
            self._raise_if_reported()
            with self._lock:
                missing = [rank for rank in missing if not self._store.check([f"survivor/{rank}"])]
            time.sleep(POLL_SECONDS)
        if not missing:
            return f"the connection between the processes broke while {what} ({_first_words(error)})"
        who = ", ".join(self._describe(rank) for rank in missing[:4]) + (", ..." if len(missing) > 4 else "")
        verb = "does not answer" if hangs else "has ended"
        return f"{who} {verb}, so all others end too; what it said last, and torchrun's report, tell why"

    def _describe(self, rank: int) -> str:
        with self._lock:
            known = self._store.check([f"who/{rank}"])
            return f"rank {rank} ({self._store.get(f'who/{rank}').decode()})" if known else f"rank {rank}"

    def _sum_flags(self, failed: bool, wanted: bool) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        flags = torch.tensor([failed, wanted], dtype=torch.int64)
        with self._exchange("agreeing"):
            dist.all_reduce(flags, group=self._control)
        num_failed, num_wanted = flags.tolist()
        return num_failed, num_wanted

    def any_rank(self, wanted: bool = False) -> bool:
        num_failed, num_wanted = self._sum_flags(False, wanted)
        if num_failed:
            raise PeerFailed("another process has failed", EXIT_LOST)
        return num_wanted > 0

    def announce_failure(self) -> None:
        self._sum_flags(True, False)

    def all_gather_failed(self, value: Value) -> list[Value]:
        import torch
        import torch.distributed as dist

        content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.launch.world_size)]
        with self._exchange("meeting"):
            dist.all_gather(lengths, torch.tensor([len(content)]), group=self._control)
            longest = max(int(length) for length in lengths)
            contents = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
            dist.all_gather(contents, torch.nn.functional.pad(content, (0, longest - len(content))), group=self._control)
        return [decode(one[: int(length)].numpy().tobytes()) for one, length in zip(contents, lengths, strict=True)]

    def all_gather(self, value: Value) -> list[Value]:
        self.any_rank()
        return self.all_gather_failed(value)

    def broadcast(self, value: Value) -> Value:
        import torch
        import torch.distributed as dist

        self.any_rank()
        content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        with self._exchange("sharing"):
            dist.broadcast(length, src=0, group=self._control)
            content = content if self.is_main else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._control)
        return value if self.is_main else decode(content.numpy().tobytes())

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        with self._exchange("averaging gradients"):
            if dist.get_backend() == "nccl":
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            else:
                dist.all_reduce(tensor)
                tensor /= self.launch.world_size

    def close(self) -> None:
        """Leaves the groups; after a failed exchange they are left to the end of the process, since leaving could wait for ever."""
        self._is_closed.set()
        if self._control is not None and not self.is_lost:
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


def choose_backend(device: torch.device, local_world_size: int) -> str:
    """NCCL, unless processes share a GPU, which it refuses."""
    import torch

    return "nccl" if device.type == "cuda" and local_world_size <= torch.cuda.device_count() else "gloo"


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
