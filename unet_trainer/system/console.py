"""Messages on the terminal, copied into the run's train.log; and the exit codes.

On a terminal an epoch has bars and a summary; anywhere else (a file, a pipe, a notebook) it is one line.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from unet_trainer.system.atomic_files import open_to_append
from unet_trainer.system.names import encodable, readable
from unet_trainer.system.terminal import Colour, num_columns, painted

EXIT_DONE, EXIT_USER_ERROR, EXIT_TRAINING_FAILED, EXIT_INTERRUPTED = 0, 2, 3, 130  # 143 after SIGTERM

RULE = "-" * 60
ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
MAX_CLASSES = 12  # rows of the table at the end
SILENT_SECONDS = 2.0  # without a terminal, a phase that takes longer says that it is under way
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def counted(number: int, one: str, many: str | None = None) -> str:
    """1 image, 2 images."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException) -> str:
    """Of an error's message; its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def cause_line(error: BaseException) -> str:
    """As first_line; of a message that quotes the traceback of another process, the error at that traceback's end."""
    _, traceback_start, quoted = str(error).rpartition("Traceback (most recent call last)")
    errors = [line for line in quoted.splitlines() if ERROR_LINE.match(line)] if traceback_start else []
    return errors[0].strip() if errors else first_line(error)


class Bar:
    """A progress bar. Where there is no terminal, a line once `say` is given and it takes long."""

    def __init__(
        self,
        stream: TextIO,
        label: str,
        total: int,
        visible: bool,
        keep: bool = True,
        num_done: int = 0,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.label, self.total, self.num_done = label, total, num_done
        self.say = say
        self.started = time.monotonic()
        self.tqdm = tqdm(
            total=total,
            initial=num_done,
            desc=label,
            file=stream,
            disable=not visible,
            leave=keep,
            bar_format=BAR_FORMAT,
            dynamic_ncols=True,
            mininterval=0.2,
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tqdm.close()

    def tick(self, number: int = 1) -> None:
        self.tqdm.update(number)
        self.num_done += number
        if self.say is not None:
            self._say_if_long()

    def _say_if_long(self) -> None:
        seconds = time.monotonic() - self.started
        if seconds > SILENT_SECONDS and self.num_done < self.total and self.say is not None:
            left = seconds / self.num_done * (self.total - self.num_done)
            self.say(f"{self.label} {self.num_done} of {self.total}, about {left:.0f} s to go")
            self.say = None

    def show(self, loss: float, iou: float) -> None:
        self.tqdm.set_postfix_str(f"loss={loss:.3f}, iou={iou:.3f}", refresh=False)


class FaultTolerantStream:
    """A stream whose write errors (a closed terminal or pipe, a full disk) are reported once and do not end the run."""

    def __init__(self, stream: TextIO, report: Callable[[str], object]) -> None:
        self.stream = stream
        self.report: Callable[[str], object] | None = report

    def write(self, text: str) -> int:
        try:
            with contextlib.suppress(UnicodeEncodeError):
                return self.stream.write(encodable(text))
            return self.stream.write(text.encode("ascii", "replace").decode())
        except (OSError, ValueError) as error:
            self._report(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._report(error)

    def _report(self, error: OSError | ValueError) -> None:
        report, self.report = self.report, None
        if report is not None:
            reason = getattr(error, "strerror", None) or str(error)
            report(f"Warning: the terminal cannot be written to ({reason}); training goes on, and this file has what is said")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console:
    """Prints messages and logs them. Lines printed before the run has a folder go into its log once it has."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout or io.StringIO()  # None: standard output is closed
        self.interactive = stream.isatty()
        self.stream: Any = FaultTolerantStream(stream, self._record)
        self.log: Path | None = None
        self._log_handle: int | None = None  # stays open: a folder of that name that is made anew has a log of its own
        self._log_folder: os.stat_result | None = None
        self.unlogged: list[str] = []
        self.log_has_failed = False
        self.on_message: Callable[[str, str], object] = lambda kind, text: None  # is told each warning and note

    def log_to(self, path: Path) -> None:
        """Raises OSError if the file cannot be written to."""
        handle = open_to_append(path)
        self.close_log()
        self.log, self._log_handle, self._log_folder = path, handle, path.parent.stat()
        self._append(self.unlogged)
        self.unlogged = []

    def close_log(self) -> None:
        handle, self._log_handle = self._log_handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def say(self, text: str = "") -> None:
        print(readable(text), file=self.stream, flush=True)
        self._record(text)

    def log_only(self, text: str) -> None:
        """For messages that the caller prints itself."""
        if self.log is not None:
            self._append([text])

    def fact(self, label: str, text: str) -> None:
        self.say(f"  {label + ':':<11} {text}")

    def warn(self, text: str) -> None:
        self.on_message("warning", text)
        self._say_painted("Warning:", "yellow", text)

    def note(self, text: str) -> None:
        self.on_message("note", text)
        self._say_painted("Note:", "blue", text)

    def _say_painted(self, lead: str, colour: Colour, text: str) -> None:
        """The lead in a colour, where the terminal has them; not in the log."""
        print(f"{painted(lead, colour, self.stream)} {readable(text)}", file=self.stream, flush=True)
        self._record(f"{lead} {text}")

    def bar(self, label: str, total: int, keep: bool = True, num_done: int = 0) -> Bar:
        """`keep`: it stays on the screen. One that does not stays silent without a terminal, unless it takes long."""
        say = None if self.interactive or keep else self.say
        return Bar(self.stream, label, total, self.interactive, keep, num_done, say)

    def epoch_begins(self, epoch: int, num_epochs: int) -> None:
        if self.interactive:
            rule = RULE[: num_columns(self.stream)]
            print(f"\n{painted(f'Epoch {epoch}/{num_epochs}', 'bold', self.stream)}\n{rule}", file=self.stream, flush=True)

    def epoch_ends(self, row: Mapping[str, float | int], num_epochs: int, improved: bool, on_gpu: bool) -> None:
        best = " (best)" if improved else ""
        memory = f"GPU memory: {row['peak_memory_gib']:.1f} GiB" if on_gpu else ""
        not_finite = f" ({row['nan_steps']} not finite)" if row["nan_steps"] else ""
        skipped = f"skipped steps: {row['skipped_steps']}{not_finite}" if row["skipped_steps"] else ""
        line = (
            f"Epoch {row['epoch']}/{num_epochs}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}"
            f"  train IoU {row['train_iou']:.4f}  val IoU {row['val_iou']:.4f}{best}  lr {row['learning_rate']:.2e}"
            f"  {row['seconds']:.1f} s  {row['images_per_second']:.0f} images/s  data wait {row['data_wait']:.0%}"
        )
        line += "".join(f"  {part}" for part in (memory, skipped) if part)
        self._record(line)
        if not self.interactive:
            print(line, file=self.stream, flush=True)
            return
        best = painted(best, "green", self.stream) if best else ""
        details = [f"LR: {row['learning_rate']:.2e}", f"Time: {row['seconds']:.1f}s", f"{row['images_per_second']:.0f} images/s"]
        details += [part for part in (memory, f"data wait: {row['data_wait']:.0%}", skipped) if part]
        print(
            f"\nEpoch {row['epoch']} Summary:\n"
            f"  Train Loss: {row['train_loss']:.4f} | Val Loss: {row['val_loss']:.4f}\n"
            f"  Train IoU:  {row['train_iou']:.4f} | Val IoU:  {row['val_iou']:.4f}{best}\n"
            f"  {' | '.join(details)}",
            file=self.stream,
            flush=True,
        )

    def class_table(self, scores: Mapping[str, float | None]) -> None:
        """A class that does not occur shows as –. Of many classes the worst, so that the end of a run fits on a screen."""
        shown: Sequence[tuple[str, float | None]] = list(scores.items())
        if len(shown) > MAX_CLASSES:
            found = [(name, value) for name, value in shown if value is not None]
            shown = sorted(found, key=lambda entry: entry[1])[: MAX_CLASSES - 1]
        width = max(len(name) for name in ("class", *(name for name, _ in shown)))
        self.say(f"  {'class':<{width}}  IoU")
        for name, value in shown:
            self.say(f"  {name:<{width}}  {'–' if value is None else f'{value:.4f}'}")
        if len(shown) < len(scores):
            self.say(f"  and {len(scores) - len(shown)} more, which are better or do not occur: per_class_iou in result.json")

    def _record(self, text: str) -> None:
        if self.log is None:
            self.unlogged.append(text)
        else:
            self._append([text])

    def _reopen_deleted_log(self, path: Path, handle: int) -> None:
        """A log that was deleted or rotated begins anew, unless its folder is another one now."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return
        with contextlib.suppress(FileNotFoundError):
            if self._log_folder is not None and os.path.samestat(self._log_folder, path.parent.stat()):
                self._log_handle = open_to_append(path)
                os.close(handle)

    def _append(self, lines: list[str]) -> None:
        if self._log_handle is None or self.log is None or not lines:
            return
        try:
            self._reopen_deleted_log(self.log, self._log_handle)
            os.write(self._log_handle, (readable("\n".join(lines)) + "\n").encode("utf-8", "replace"))
        except OSError as error:  # a full disk: failed saves are reported elsewhere; a missing log does not end training
            if not self.log_has_failed:
                print(f"Warning: {readable(str(self.log))} cannot be written to ({error.strerror})", file=self.stream, flush=True)
            self.log_has_failed = True


class _Nowhere(io.StringIO):
    def write(self, text: str, /) -> int:
        return len(text)


def silent_console() -> Console:
    """For a process of a job that is not the one which speaks."""
    console = Console(_Nowhere())
    console.log = Path(os.devnull)  # else lines would be kept for a log that never comes
    return console


def show_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(f"{painted('Error:', 'red', sys.stderr)} {readable(text)}", file=sys.stderr, flush=True)
