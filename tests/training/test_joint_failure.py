"""The gravest error is the cause, on all processes."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

from helpers.steps import make_batch, small_components, take_step
from unet_trainer.config.errors import UserError
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.system.processes import Alone, Launch, PeerFailed
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.joint_failure import FailureReport, agree_on_failure, kind_of
from unet_trainer.training.out_of_memory import is_out_of_memory


class Meeting(Alone):
    """This is rank 0; the others have reported."""

    is_alone = False

    def __init__(self, *others):
        self.launch = Launch(world_size=1 + len(others), is_torchrun=True)
        self.others = list(others)
        self.num_failed = 0

    def fail(self):
        self.num_failed += 1

    def meet(self, value):
        return [value, *map(dataclasses.asdict, self.others)]


@pytest.fixture(scope="module")
def components():
    made = small_components()
    take_step(made.train_step, make_batch(2))
    return made


def report(kind, text="", is_whole=True, position=(0, 0), **facts):
    return FailureReport(1, kind, text, is_whole, position, **facts)


def agree(error, components, *others):
    components.train_step.mid_accumulation = False
    meeting = Meeting(*others)
    return agree_on_failure(error, meeting, components.train_step, components.state), meeting


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerError("worker process 3 died (SIGKILL): out of memory"), "worker"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (NonFinite("a step was not finite", 3), "non-finite"),
        (Interrupted(signal.SIGTERM), "signal"),
        (UserError("a.png: changed"), "user"),
        (TrainingFailed("no room"), "failed"),
        (ZeroDivisionError(), "bug"),
    ],
)
def test_every_error_has_a_kind(error, kind):
    assert kind_of(error) == kind


def test_who_fails_tells_the_others_and_who_hears_of_it_does_not(components):
    own = ZeroDivisionError("a bug")
    found, meeting = agree(own, components, report(None))
    assert found is own
    assert meeting.num_failed == 1
    found, meeting = agree(PeerFailed("another", 3), components, report("user", "a.png: changed"))
    assert meeting.num_failed == 0
    assert isinstance(found, PeerFailed)
    assert (str(found), found.exit_code) == ("rank 1: a.png: changed", 2)


def test_what_can_be_handled_is_an_error_of_the_same_kind_everywhere(components):
    heard = PeerFailed("another", 3)
    stopped, _ = agree(heard, components, report("signal", signal_number=15))
    assert isinstance(stopped, Interrupted)
    assert stopped.signal_number == 15
    full, _ = agree(heard, components, report("memory", "CUDA out of memory"))
    assert is_out_of_memory(full)
    bad, _ = agree(heard, components, report("non-finite", "8 steps in a row were not finite", batch_number=40))
    assert isinstance(bad, NonFinite)
    assert bad.batch_number == 40


def test_the_gravest_of_several_errors_is_the_cause(components):
    found, _ = agree(Interrupted(signal.SIGTERM), components, report("memory", "full"), report("bug", "division by zero"))
    assert isinstance(found, PeerFailed)
    assert (str(found), found.exit_code) == ("rank 1: division by zero", 1)
    own = UserError("a.png: changed")
    assert agree(own, components, report("signal", signal_number=15))[0] is own


@pytest.mark.parametrize(("is_whole", "position"), [(False, (0, 0)), (True, (0, 3))], ids=["mid step", "elsewhere"])
def test_the_state_is_whole_only_if_it_is_on_all_of_them(is_whole, position, components):
    agree(PeerFailed("another", 3), components, report("signal", is_whole=True, signal_number=15))
    assert not components.train_step.mid_accumulation
    agree(PeerFailed("another", 3), components, report("signal", is_whole=is_whole, position=position, signal_number=15))
    assert components.train_step.mid_accumulation
