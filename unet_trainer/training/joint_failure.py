"""When a process of a torchrun job fails: all of them learn why, and do the same about it.

The one that fails gives the others what they wait for in vain, so that nobody hangs, and tells them at their next agreement. Then
all meet, and the gravest of the reported errors is the cause. One that could be handled (memory, numbers that are not finite, a
signal) becomes an error of the same kind on every process; any other ends the job, and the process that had it says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from unet_trainer.config.errors import UserError
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.system.console import EXIT_TRAINING_FAILED, EXIT_USER_ERROR, first_line
from unet_trainer.system.processes import PeerFailed, Processes
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.out_of_memory import is_out_of_memory
from unet_trainer.training.state import TrainState
from unet_trainer.training.step import TrainStep

KINDS = ("bug", "user", "failed", "worker", "memory", "non-finite", "signal")  # the gravest first


@dataclass(frozen=True)
class FailureReport:
    """What a process tells the others; `kind` is None for one that had no error of its own."""

    rank: int
    kind: str | None
    text: str
    is_whole: bool  # no step is under way
    position: tuple[int, int]
    batch_number: int | None = None
    signal_number: int = 0


def agree_on_failure(error: BaseException, processes: Processes, step: TrainStep, state: TrainState) -> BaseException:
    """The error that this process has to handle: its own, if it is the cause, or one that stands for it. Raises PeerLost.

    The state counts as whole afterwards if it is on all of them.
    """
    own = not isinstance(error, PeerFailed)
    if own:
        if step.sync is not None:
            step.sync.average_in_vain()
        processes.fail()
    report = FailureReport(
        rank=processes.launch.rank,
        kind=kind_of(error) if own else None,
        text=describe(error),
        is_whole=not step.mid_accumulation,
        position=(state.epoch, state.batch),
        batch_number=error.batch_number if isinstance(error, NonFinite) else None,
        signal_number=error.signal_number if isinstance(error, Interrupted) else 0,
    )
    reports = [FailureReport(**one) for one in processes.meet(asdict(report))]
    if not all(one.is_whole for one in reports) or len({one.position for one in reports}) > 1:
        step.mid_accumulation = True
    cause = min((one for one in reports if one.kind is not None), key=lambda one: KINDS.index(str(one.kind)))
    return error if cause.rank == report.rank else stand_in(cause)


def kind_of(error: BaseException) -> str:
    if isinstance(error, WorkerError):  # before memory: a worker may die of it
        return "worker"
    if is_out_of_memory(error):
        return "memory"
    kinds = {NonFinite: "non-finite", Interrupted: "signal", UserError: "user", TrainingFailed: "failed"}
    return next((kind for of, kind in kinds.items() if isinstance(error, of)), "bug")


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError | TrainingFailed | WorkerError | NonFinite) else first_line(error)


def stand_in(cause: FailureReport) -> BaseException:
    """For a process that has no error of its own, or a lesser one."""
    if cause.kind == "signal":
        return Interrupted(cause.signal_number)
    if cause.kind == "memory":
        return torch.OutOfMemoryError(cause.text)
    if cause.kind == "non-finite":
        return NonFinite(cause.text, cause.batch_number)
    codes = {"user": EXIT_USER_ERROR, "failed": EXIT_TRAINING_FAILED, "worker": EXIT_TRAINING_FAILED}
    return PeerFailed(f"rank {cause.rank}: {cause.text}", codes.get(str(cause.kind), 1), cause.rank)
