"""States of torch's global random generators, which networks are initialised from and which dropout draws from.

All threads of a process share these generators. A run seeds them, and puts its caller's states back while the caller's
code runs. Order, crops and augmentation draw from generators of their own, made from (seed, epoch, index).
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

LOCK = threading.RLock()  # held while a network is initialised and while states are exchanged
CPU = torch.device("cpu")


def generators(device: torch.device) -> list[torch.Generator]:
    """Those that a run on this device draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # before it there are none
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_generators(seed: int, device: torch.device) -> None:
    for generator in generators(device):
        generator.manual_seed(seed)
    if device.type == "mps":
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws inside follow from the seed, whatever other threads initialise."""
    with LOCK:
        seed_generators(seed, device)
        yield


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Draws inside, on the CPU, leave the state as it was."""
    with LOCK, torch.random.fork_rng(devices=[]):
        yield


class CallersRandomState:
    """The generators' states that belong to the caller of a run, while the run draws from them."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.generators = generators(device)
        self.states = self._read()

    def _read(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def _write(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def restore(self) -> None:
        """When the run ends."""
        with LOCK:
            self._write(self.states)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Around code of the caller, whose draws change nothing of the run."""
        with LOCK:
            of_run = self._read()
            self._write(self.states)
        try:
            yield
        finally:
            with LOCK:
                self.states = self._read()
                self._write(of_run)
