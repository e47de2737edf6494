"""Which process of a torchrun job this is, what a run asks of the processes that share its work, and the answers of one that is
alone. Imports no torch; those that torchrun starts are in distributed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


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


class Processes(Protocol):
    """What a run needs of the processes that share its work."""

    launch: Launch

    @property
    def is_main(self) -> bool:
        """Rank 0 writes and speaks."""

    @property
    def is_alone(self) -> bool:
        """Without torchrun: nothing is exchanged."""

    def share(self, name: str, make: Callable[[], Value]) -> Value:
        """What rank 0 makes. Before and after `connect`; each name once in a run."""

    def in_turn(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Rank 0 first, then the first process of each other machine, then the others: they find what was written before."""

    def connect(self, device: torch.device, timeout: float) -> None: ...

    def agree(self, wanted: bool = False) -> bool:
        """Whether any process wants it; raises PeerFailed if one has failed."""

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each of them."""

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value."""

    def average(self, tensor: torch.Tensor) -> None:
        """In place, on its device; the same bits on all processes."""

    def fail(self) -> None:
        """Tells the others, at their next agreement, that this process has failed."""

    def meet(self, value: Value) -> list[Value]:
        """As gather, after a failure: all processes have learned of it."""

    def report_failure(self, text: str, exit_code: int) -> bool:
        """Tells what ended this process; True for the first that does: it speaks for all."""

    def close(self) -> None: ...


class Alone:
    """One process, without torchrun."""

    launch = Launch()
    is_main = True
    is_alone = True

    def share(self, name: str, make: Callable[[], Value]) -> Value:
        return make()

    def in_turn(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def connect(self, device: torch.device, timeout: float) -> None:
        """There is nobody."""

    def agree(self, wanted: bool = False) -> bool:
        return wanted

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def broadcast(self, value: Value) -> Value:
        return value

    def average(self, tensor: torch.Tensor) -> None:
        """It is the average."""

    def fail(self) -> None:
        """Nobody waits."""

    def meet(self, value: Value) -> list[Value]:
        return [value]

    def report_failure(self, text: str, exit_code: int) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""


ALONE = Alone()
