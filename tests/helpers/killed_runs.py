"""Trains in processes of their own, which tests kill, starve, crash and deprive of things."""

import contextlib
import io
import itertools
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from helpers.project import ROOT
from helpers.runs import words

CONTEXT = multiprocessing.get_context("forkserver")
TESTS = ROOT / "tests"
HANG_SECONDS = 120  # after which a process that should have ended hangs


def start(target, *arguments):
    if not forkserver._forkserver._forkserver_pid:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{TESTS}{os.pathsep}{ROOT}"  # it does not take over the path of this process
        CONTEXT.set_forkserver_preload(["helpers.preloaded"])
        forkserver.ensure_running()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def wait_until(is_true):
    """Polls; a process that should have come so far and has not, hangs."""
    deadline = time.monotonic() + HANG_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.003)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def be_quiet(log):
    """In a process that is to train: what it says goes to a file, and it draws no pictures, as quick_pictures has it in this one."""
    stream = Path(log).open("a", buffering=1)  # noqa: SIM115 (for the life of the process)
    sys.stdout = sys.stderr = stream
    leave_out_pictures(setattr)


def leave_out_pictures(patch):
    """Runs draw no curves, and write their report without loading best.pt and predicting: two seconds for each."""
    from unet_trainer.reports import run_report
    from unet_trainer.reports.gallery import Gallery
    from unet_trainer.runs import curves

    patch(run_report, "make_gallery", lambda *_: Gallery())
    patch(curves, "draw_curves", lambda summary: b"")


def use_small_network():
    """In a process that is to train: a step takes a few milliseconds."""
    from helpers.steps import SmallNetwork
    from unet_trainer.training import build

    build.build_network = lambda spec, weights: SmallNetwork(spec.image.channels, spec.num_classes)


def train_once(settings, log, crash_at=None, with_small_network=False):
    """Exits with the code of the command. `crash_at` ends the process at that moment of its first save."""
    signal.signal(
        signal.SIGINT, lambda *_: os._exit(130)
    )  # as the script begins and ends: a signal then is no traceback
    from train_unet import main
    from unet_trainer.system.signals import exit_process

    be_quiet(log)
    if with_small_network:
        use_small_network()
    if crash_at is not None:
        crash_when_saving(crash_at)
    exit_process(main(words(settings)))


NUM_MOMENTS = 14


def crash_when_saving(moment):
    """The process ends, with nothing flushed and nothing tidied, at moment 1 to NUM_MOMENTS of writing last.pt: before and
    after each call that touches the disk."""
    from unet_trainer.system import atomic_files as atomic
    from unet_trainer.training import checkpoint

    atomic_open = atomic.atomic_open
    calls = (Path, "open"), (os, "fsync"), (Path, "replace")
    moments = itertools.count(1)

    def tick():
        if next(moments) == moment:
            os._exit(9)

    def watched(real):
        def call(*arguments, **options):
            tick()
            result = real(*arguments, **options)
            tick()
            return result

        return call

    @contextlib.contextmanager
    def crashing(path, **options):
        if path.name != "last.pt":
            with atomic_open(path, **options) as file:
                yield file
            return
        with contextlib.ExitStack() as stack:
            for owner, name in calls:
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
            with atomic_open(path, **options) as file:
                yield (whole := io.BytesIO())
                middle = len(whole.getvalue()) // 2
                for half in (whole.getvalue()[:middle], whole.getvalue()[middle:]):
                    file.write(half)
                    file.flush()
                    tick()

    checkpoint.atomic_open = crashing
