"""Processes that write the files of images: the same files as threads, their faults, their bounds and their end."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import itertools
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.image_bytes import cv2_bytes, tiff_bytes
from helpers.killed_runs import wait_until
from helpers.predicting import BrightnessEngine, write_model
from helpers.steps import make_spec
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.inference import writer_processes
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.loaded_model import load
from unet_trainer.inference.prediction_files import ImageFiles, Kinds, PredictionFolder
from unet_trainer.inference.prediction_stream import PredictionStream
from unet_trainer.inference.predictor import Predictor
from unet_trainer.inference.writer_processes import MIN_IMAGES, RESULT, TASK, WriterProcesses, _Ring, start_writers, suits
from unet_trainer.loading.worker_backends import CAN_FORK, WorkerError
from unet_trainer.system.atomic_files import Draft

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")

GEO_TAGS = [(33550, 12, 3, (0.5, 0.5, 0.0), True), (33922, 12, 6, (0.0, 0.0, 0.0, 100.0, 200.0, 0.0), True)]
SIZES = ((20, 30), (24, 16), (20, 30), (20, 30), (24, 16), (33, 9), (20, 30))


class Progress:
    def __init__(self):
        self.num_done = 0

    def images_done(self, number):
        self.num_done += number

    @contextlib.contextmanager
    def large_image(self, path, num_tiles):
        yield lambda number: None


class Soft(BrightnessEngine):
    """Probabilities between 0 and 1, of as many ids as the spec has."""

    def logits(self, images):
        two = super().logits(images) / 50
        return two if self.card.spec.num_ids == 2 else torch.cat([two, -two[:, 1:]], 1)


@pytest.fixture
def given(tmp_path):
    """PNGs of several sizes, and a GeoTIFF."""
    random = np.random.default_rng(0)
    (tmp_path / "images/sub").mkdir(parents=True)
    found = []
    for number, size in enumerate(SIZES):
        pixels = random.integers(0, 256, (*size, 3), np.uint8)
        is_geo = number == 4
        name = f"sub/{number}" if number % 2 else f"{number}"
        found.append(Input(tmp_path / f"images/{name}.{'tif' if is_geo else 'png'}", name))
        found[-1].path.write_bytes(tiff_bytes(pixels, extratags=GEO_TAGS) if is_geo else cv2_bytes(".png", pixels))
    return found


def predict(tmp_path, given, kinds=None, num_processes=2, out="out", spec=None, engine=None, started=None, batch_size=4, **options):
    """`num_processes` 0: threads. Returns the stream after its run. `started` is called with the processes."""
    engine = engine or Soft(spec or make_spec(fit="crop"))
    folder = PredictionFolder(tmp_path / out, engine.card.spec, kinds or Kinds())
    folder.out.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        processes = None
        if num_processes:
            processes = stack.enter_context(WriterProcesses(given, num_processes, **options))
        stream = PredictionStream(Predictor(engine), folder, Progress(), batch_size=batch_size, processes=processes)
        if started is not None:
            started(processes)
        stream.run(given)
    return stream


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KINDS = [
    Kinds(),
    Kinds(values=True, overlay=True, probabilities="png"),
    Kinds(probabilities="npy"),
    Kinds(overlay=True, polygons=True),  # by threads, whatever is asked for
]


@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("kinds", KINDS)
def test_processes_write_the_bytes_that_threads_write(tmp_path, given, kinds, num_classes):
    spec = make_spec(fit="crop", num_classes=num_classes)
    contents = []
    for out, num_processes in (("threads", 0), ("processes", 3)):
        stream = predict(tmp_path, given, kinds, num_processes, out, spec)
        assert (stream.outcome.num_written, stream.outcome.failed, stream.progress.num_done) == (7, [], 7)
        contents.append(files_in(tmp_path / out))
    assert contents[0] == contents[1]
    assert {"0.png", "sub/1.png", "4.png", "4.tif"} <= set(contents[0])


def test_a_resizing_model_gives_each_image_its_own_size(tmp_path, given):
    spec = make_spec(fit="resize", image_size=(32, 32))
    predict(tmp_path, given, Kinds(probabilities="png"), 0, "threads", spec, batch_size=7)
    predict(tmp_path, given, Kinds(probabilities="png"), 2, "processes", spec, batch_size=7)
    assert files_in(tmp_path / "threads") == files_in(tmp_path / "processes")
    assert np.array(Image.open(tmp_path / "processes/0.png")).shape == (20, 30)


def test_a_memory_that_holds_a_few_images_only_is_enough_for_all(tmp_path, given):
    many = [Input(path, f"{turn}/{name}") for turn in range(6) for path, name in given]
    predict(tmp_path, many, Kinds(probabilities="png"), 0, "threads")
    stream = predict(tmp_path, many, Kinds(probabilities="png"), 2, "processes", num_bytes=2**14)
    assert stream.outcome.num_written == 42
    assert files_in(tmp_path / "threads") == files_in(tmp_path / "processes")


def test_pipes_are_never_filled(tmp_path, given):
    """Two full pipes would block both ends for ever. A batch has more messages than both pipes hold."""
    import fcntl

    def narrow(processes):
        for end in (processes.backend.task_writer, processes.backend.result_reader):
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
        processes.max_tasks = 4096 // TASK.size - len(processes.backend.workers)

    many = [Input(given[0].path, f"{number}") for number in range(300)]
    assert len(many) > 4096 / TASK.size + 4096 / RESULT.size
    stream = predict(tmp_path, many, started=narrow, batch_size=300)
    assert stream.outcome.num_written == len(files_in(tmp_path / "out")) == 300


def test_a_ring_gives_places_out_again_once_those_before_them_are_free():
    ring = _Ring(100, 200)
    assert [ring.take(40), ring.take(40), ring.take(40)] == [100, 140, None]  # 180 to 200 is too little
    ring.free(140)
    assert ring.take(40) is None  # the one before it is not free
    ring.free(100)
    assert [ring.take(60), ring.take(40), ring.take(1)] == [100, 160, None]
    ring.free(100)
    assert [ring.take(30), ring.take(30), ring.take(31)] == [100, 130, None]  # from the start again, up to 160
    for place in (130, 160, 100):
        ring.free(place)
    assert ring.take(100) == 100
    assert not ring.freed


def test_pieces_are_small_enough_for_several_in_memory(tmp_path):
    folder = PredictionFolder(tmp_path, make_spec(fit="crop", num_classes=3), Kinds(probabilities="npy"))
    with WriterProcesses([], 1, num_bytes=2**20) as processes:
        processes.open(folder, torch.device("cpu"), lambda num_written, unreadable: None)
        # 512 bytes of text, 64 × 64 ids, 3 × 64 × 64 probabilities of 4 bytes: 53,760; four pieces in 1 MiB less what is stored.
        assert processes.num_at_once((64, 64)) == 4
        assert processes.num_at_once((4096, 4096)) == 1


def test_messages_of_a_piece_are_written_at_once():
    assert TASK.size * 64 < writer_processes.ATOMIC_BYTES <= 4096  # of a batch; what Linux writes to a pipe in one piece
    assert RESULT.size < TASK.size


def test_an_image_that_can_no_longer_be_read_counts_as_bad_with_a_reason_of_any_length(tmp_path, given, monkeypatch):
    open_picture = ImageFiles._open_picture

    def fail(files):
        if files.given.name == "2":
            raise ReadError("ä" * 1000)
        return open_picture(files)

    monkeypatch.setattr(ImageFiles, "_open_picture", fail)

    class Vandal(Soft):
        def logits(self, images):
            given[0].path.unlink(missing_ok=True)
            return super().logits(images)

    stream = predict(tmp_path, given, Kinds(overlay=True), engine=Vandal(make_spec(fit="crop")))
    assert [(path.name, reason) for path, reason in stream.outcome.failed] == [
        ("0.png", "No such file or directory"),
        ("2.png", "ä" * 252),  # 504 bytes
    ]
    assert (stream.outcome.num_written, stream.progress.num_done) == (5, 7)
    assert not {"0.png", "2.png", "overlays/0.png", "overlays/2.png"} & set(files_in(tmp_path / "out"))


def in_a_writer(monkeypatch, owner, name, act):
    """Calls `act` with what `owner.name` is called with, before it, in processes other than this one."""
    before, here = getattr(owner, name), os.getpid()

    def changed(*given):
        if os.getpid() != here:
            act(*given)
        return before(*given)

    monkeypatch.setattr(owner, name, changed)


def flush_and_end(number):
    """Ends the process that writes image 3 (sub/3) while half of its files are there."""

    def act(files):
        if files.given.name == "sub/3":
            for draft in files.drafts:
                draft.file.flush()
            faulthandler.disable()  # pytest's would print a traceback
            os.kill(os.getpid(), number)

    return act


def whole_files(folder):
    """Their names. Fails if one is damaged or temporary."""
    found = files_in(folder)
    for name in found:
        assert name.endswith((".png", ".tif"))
        np.array(Image.open(folder / name))
    return set(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_while_it_writes_ends_it_and_leaves_whole_files_only(tmp_path, given, monkeypatch, number):
    in_a_writer(monkeypatch, ImageFiles, "finish", flush_and_end(number))
    seen = []
    with pytest.raises(
        WorkerError, match=rf"worker process \d+ died \({number.name}.*\) while it wrote the results of .*/sub/3.png"
    ):
        predict(tmp_path, given, Kinds(values=True), started=seen.append)
    left = whole_files(tmp_path / "out")
    assert "sub/3.png" not in left
    assert all(worker.exitcode is not None for worker in seen[0].backend.workers)


def opened(tmp_path, given, num_processes=1, kinds=None):
    """Processes that wait for ids, and a list that gets the number of images of each answer."""
    folder, answers = PredictionFolder(tmp_path / "out", make_spec(fit="crop"), kinds or Kinds()), []
    folder.out.mkdir()
    processes = WriterProcesses(given, num_processes)
    processes.open(folder, torch.device("cpu"), lambda num_written, unreadable: answers.append(num_written))
    return processes, answers


def ids_of(num_images):
    return [torch.zeros((num_images, 20, 30), dtype=torch.uint8)]


def write_and_finish(processes, images):
    processes.write(images, (20, 30), ids_of(len(images)))
    processes.finish()


def test_a_process_that_dies_between_two_images_ends_it(tmp_path, given):
    processes, answers = opened(tmp_path, given)
    write_and_finish(processes, [0])
    assert answers == [1]
    processes.backend.workers[0].kill()
    with pytest.raises(WorkerError, match=r"died \(SIGKILL, which the system sends where memory has run out\)$"):
        write_and_finish(processes, [2])
    processes.close()
    assert whole_files(tmp_path / "out") == {"0.png"}


def test_images_that_are_not_begun_are_dropped_at_the_end(tmp_path, given, monkeypatch):
    in_a_writer(monkeypatch, ImageFiles, "finish", lambda files: time.sleep(0.3))
    processes, answers = opened(tmp_path, given)
    processes.write([0, 1, 2, 3, 4], (20, 30), ids_of(5))
    processes.poll()
    wait_until(lambda: processes.shared.in_progress[0] == 0)
    processes.close()
    assert sum(answers) == len(whole_files(tmp_path / "out")) < 5


def test_no_further_image_is_begun_after_one_that_failed(tmp_path, given, monkeypatch):
    def fail(files, rows):
        if files.given.name == "0":
            raise OSError(errno.ENOSPC, "No space left on device")

    in_a_writer(monkeypatch, ImageFiles, "write", fail)
    processes, _ = opened(tmp_path, given)
    with pytest.raises(OSError, match="No space left"):
        write_and_finish(processes, [0, 1, 2])
    processes.close()
    assert files_in(tmp_path / "out") == {}


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_full_disk_is_the_same_error_from_processes_and_threads(tmp_path, given, monkeypatch, num_processes):
    def fail(draft):
        raise OSError(errno.ENOSPC, "No space left on device", str(draft.path))

    monkeypatch.setattr(Draft, "keep", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        predict(tmp_path, [given[0]], Kinds(values=True), num_processes)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "out/values/0.png"))
    assert files_in(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError("no memory"), MemoryError, "no memory"),
        (KeyError("a fault of ours"), RuntimeError, "a process that writes results failed:\n(.|\n)*KeyError: 'a fault of ours'"),
        (KeyError("x" * 20000), RuntimeError, "x" * 1000),
        (OSError(5, "Input/output error", "x" * 20000), OSError, r"\[Errno 5\] Input/output error: 'x{1000}"),
        (OSError("without a number"), RuntimeError, "a process that writes results failed:\n(.|\n)*without a number"),
    ],
)
def test_what_fails_in_a_process_is_raised_here(tmp_path, given, monkeypatch, error, kind, text):
    def fail(*arguments):
        raise error

    in_a_writer(monkeypatch, ImageFiles, "write", fail)
    with pytest.raises(kind, match=text):
        predict(tmp_path, given)
    assert files_in(tmp_path / "out") == {}


class Interrupting(Soft):
    """Ctrl-C while the second batch is computed."""

    def logits(self, images):
        if len(self.shapes) == 1:
            raise KeyboardInterrupt
        return super().logits(images)


def test_an_interruption_waits_for_the_images_that_are_under_way_and_counts_them(tmp_path, given, monkeypatch):
    in_a_writer(monkeypatch, ImageFiles, "finish", lambda files: time.sleep(0.3))
    engine, seen = Interrupting(make_spec(fit="crop")), []
    folder = PredictionFolder(tmp_path / "out", engine.card.spec, Kinds())
    folder.out.mkdir()
    with WriterProcesses(given, 2) as processes:
        stream = PredictionStream(Predictor(engine), folder, Progress(), batch_size=2, processes=processes)
        seen += processes.backend.workers
        with pytest.raises(KeyboardInterrupt):
            stream.run(given)
        assert processes.is_closed  # before it is said how many are done
    left = whole_files(tmp_path / "out")
    assert len([name for name in left if name.endswith(".png")]) == stream.outcome.num_written <= 2
    assert all(worker.exitcode == 0 for worker in seen)


@pytest.mark.parametrize("is_second_interrupt", [False, True])
def test_a_process_that_hangs_is_killed_and_its_drafts_are_deleted(tmp_path, given, monkeypatch, is_second_interrupt):
    """After JOIN_SECONDS, or at once if the user stops waiting."""
    monkeypatch.setattr(writer_processes, "JOIN_SECONDS", 600.0 if is_second_interrupt else 0.1)
    in_a_writer(monkeypatch, ImageFiles, "finish", flush_and_end(signal.SIGSTOP))
    processes, _ = opened(tmp_path, given, kinds=Kinds(overlay=True))
    processes.write([3], (20, 30), ids_of(1))
    processes.poll()
    worker = processes.backend.workers[0]
    assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])
    assert len(list((tmp_path / "out").rglob("*.tmp"))) == 2
    if is_second_interrupt:
        with pytest.raises(KeyboardInterrupt):
            interrupted_once(processes.close, worker, monkeypatch)
    else:
        processes.close()
    assert files_in(tmp_path / "out") == {}
    assert worker.exitcode == -signal.SIGKILL


def interrupted_once(call, worker, monkeypatch):
    """The first time that the worker is waited for, Ctrl-C comes."""
    join, calls = worker.join, itertools.count()

    def interrupt(timeout=None):
        if next(calls) == 0:
            raise KeyboardInterrupt
        return join(timeout)

    monkeypatch.setattr(worker, "join", interrupt)
    call()


def test_processes_that_are_not_needed_end_at_once_and_can_be_closed_twice(given):
    processes = WriterProcesses(given, 3)
    processes.close()
    processes.close()
    assert [worker.exitcode for worker in processes.backend.workers] == [0, 0, 0]


def test_they_start_for_many_images_on_a_gpu_only(given, monkeypatch):
    many = [*given] * MIN_IMAGES
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert start_writers(many, "auto") is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert start_writers(many, "cpu") is None
    assert start_writers(many, "mps") is None
    assert start_writers(many[: MIN_IMAGES - 1], "auto") is None
    for cores, expected in ((1, 2), (8, 4), (64, 8)):
        monkeypatch.setattr(writer_processes, "count_cores", lambda cores=cores: cores)
        with start_writers(many[:MIN_IMAGES], "cuda:0") as processes:
            assert len(processes.backend.workers) == expected
    monkeypatch.setattr(writer_processes, "CAN_FORK", False)
    assert start_writers(many, "cuda") is None
    monkeypatch.setattr(writer_processes, "CAN_FORK", True)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert start_writers(many, "cuda") is None
    assert not suits(torch.device("cpu"))
    assert suits(torch.device("cuda"))


def test_too_many_processes_are_told(given, monkeypatch):
    def fail(process):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", fail)
    with pytest.raises(WorkerError, match="worker process 1 of 2 could not be started"):
        WriterProcesses(given, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_a_gpu_writes_the_same_bytes_with_processes_and_threads(tmp_path, given, fit):
    path = write_model(tmp_path / "run/best.pt", fit=fit, num_classes=3)
    many = [Input(path, f"{turn}/{name}") for turn in range(30) for path, name in given]
    for out, num_processes in (("threads", 0), ("processes", 4)):
        engine = load(path, device="cuda").engine
        stream = predict(tmp_path, many, Kinds(probabilities="png"), num_processes, out, engine=engine, batch_size=8)
        assert num_processes == 0 or stream.processes.pinned_for == engine.device
    assert len(files_in(tmp_path / "threads")) == 30 * (7 * 4 + 4)
    assert files_in(tmp_path / "threads") == files_in(tmp_path / "processes")
