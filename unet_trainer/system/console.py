"""Messages on the terminal, copied into the run's train.log; and the exit codes.

On a terminal an epoch has bars and a summary; anywhere else one line. Names of files may hold any byte but / and NUL: a
terminal shows them without acting on them, in tables and JSON files they come back as they were."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from unet_trainer.config.parsers import describe_seconds
from unet_trainer.system.atomic_files import open_to_append

EXIT_DONE, EXIT_USER_ERROR, EXIT_TRAINING_FAILED, EXIT_INTERRUPTED = 0, 2, 3, 130  # 143 after SIGTERM
RULE = "-" * 60
ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
MAX_CLASSES = 12  # rows of the table at the end
SILENT_SECONDS = 2.0  # without a terminal, a phase that takes longer says that it is under way
LINE_SECONDS = 30.0  # and again after so many, and a tenth of it
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
BAR_OPTIONS: dict[str, Any] = {"bar_format": BAR_FORMAT, "dynamic_ncols": True, "mininterval": 0.2}
Colour = Literal["red", "green", "yellow", "blue", "grey", "bold"]
CODES: dict[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "grey": "90", "bold": "1"}
# Escapes, carriage returns and marks that turn the direction of text, which a terminal obeys; what no encoding has.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PASSWORD = re.compile(r"(https?:/{1,2})[^\s/]+@|(://)[^\s/@:]*:[^\s/]+@", re.IGNORECASE)  # or user, in a URL


def readable(text: str) -> str:
    """A message with what a terminal would obey as \\x1b, other bytes than UTF-8 as \\xe4, and a password as ***."""
    return UNSHOWABLE.sub(_escaped, PASSWORD.sub(r"\1\2***@", text))


def one_line(name: str) -> str:
    """A name in a message of lines. What else cannot be shown is escaped when the message is printed."""
    return name.replace("\n", "\\n").replace("\t", "\\t")


def _escaped(found: re.Match[str]) -> str:
    number = ord(found.group())
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00
    return {0x0D: "\\r"}.get(number, f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")


def json_text(content: Any, **options: Any) -> str:
    """JSON in which a name that is not UTF-8 has escapes (\\udce4), from which json.loads makes the same name again."""
    return json.dumps(content, ensure_ascii=False, **options).encode("utf-8", "backslashreplace").decode()


def csv_line(cells: Iterable[object]) -> str:
    """A row with its line break. The csv module quotes what occurs in its line terminator: a name may hold a \\r."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow([str(cell) for cell in cells])
    return text.getvalue().removesuffix("\r\n") + "\n"


def painted(text: str, colour: Colour, stream: Any) -> str:
    """In a colour, where the stream is a terminal that has them and NO_COLOR (no-color.org) is not set."""
    kind = os.environ.get("TERM") or os.environ.get("WT_SESSION", "dumb")
    has_colours = stream.isatty() and kind != "dumb" and not os.environ.get("NO_COLOR")
    return f"\033[{CODES[colour]}m{text}\033[0m" if has_colours else text


def counted(number: int, one: str, many: str | None = None) -> str:
    """1 image, 2 images."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def aligned(rows: Sequence[Sequence[str]], to_the_right: bool = False) -> list[str]:
    """Lines of a table. `to_the_right`: all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = str.rjust if to_the_right else str.ljust
    return ["  ".join([row[0].ljust(widths[0]), *map(justify, row[1:], widths[1:])]).rstrip() for row in rows]


def first_line(error: BaseException) -> str:
    """Of an error's message; its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def cause_line(error: BaseException) -> str:
    """As first_line; of a message that quotes the traceback of another process, the error at that traceback's end."""
    _, traceback_start, quoted = str(error).rpartition("Traceback (most recent call last)")
    errors = [line for line in quoted.splitlines() if ERROR_LINE.match(line)] if traceback_start else []
    return errors[0].strip() if errors else first_line(error)


class Bar(contextlib.AbstractContextManager["Bar"]):
    """A progress bar; without a terminal, plain lines now and then. One that does not stay (`keep`) has its
    first line soon. `images_per_tick`: 0 where it does not count batches of images."""

    def __init__(
        self, console: Console, label: str, total: int, keep: bool, num_done: int, images_per_tick: int = 0
    ) -> None:
        self.label, self.total, self.num_done, self.first_done = label.strip(), total, num_done, num_done
        self.images_per_tick, self.scores = images_per_tick, ""
        self.stream = None if console.interactive else console.stream
        self.started = time.monotonic()
        self.next_seconds, self.next_done = (LINE_SECONDS, num_done + total / 10) if keep else (SILENT_SECONDS, 0.0)
        options = {"disable": not console.interactive, "leave": keep, **BAR_OPTIONS}
        self.tqdm = tqdm(total=total, initial=num_done, desc=label, file=console.stream, **options)

    def __exit__(self, *_: object) -> None:
        self.tqdm.close()

    def tick(self, number: int = 1) -> None:
        self.tqdm.update(number)
        self.num_done += number
        seconds = time.monotonic() - self.started
        if self.stream is None or seconds < self.next_seconds or not self.next_done <= self.num_done < self.total:
            return
        self.next_seconds, self.next_done = seconds + LINE_SECONDS, self.num_done + self.total / 10
        rate = (self.num_done - self.first_done) / seconds
        images = f", {self.images_per_tick * rate:.3g} images/s" if self.images_per_tick else ""
        left = describe_seconds((self.total - self.num_done) / rate)
        line = f"{self.label} {self.num_done} of {self.total}{self.scores}{images}, about {left} to go"
        print(readable(line), file=self.stream, flush=True)

    def show(self, loss: float, iou: float) -> None:
        self.scores = f", loss {loss:.3f}, IoU {score_text(iou, 3)}"
        self.tqdm.set_postfix_str(f"loss={loss:.3f}, iou={score_text(iou, 3)}", refresh=False)


def score_text(value: float | None, digits: int = 4) -> str:
    """– where there is no class to score."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


class FaultTolerantStream:
    """A stream whose write errors (a closed terminal or pipe, a full disk) are reported once and do not end the run."""

    def __init__(self, stream: TextIO, report: Callable[[str], object]) -> None:
        self.stream, self.report, self.has_failed = stream, report, False

    def write(self, text: str) -> int:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self._try(self.stream.write, text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except (OSError, ValueError) as error:
            # Text that stays in the stream would fail whenever others flush it, as multiprocessing does.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if not self.has_failed:
                self.has_failed = True
                reason = getattr(error, "strerror", None) or str(error)
                what = f"the terminal cannot be written to ({reason})"
                self.report(f"Warning: {what}; training continues, and this file has what is said")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console:
    """Prints messages and logs them. Lines printed before the run has a folder go into its log once it has."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout or io.StringIO()  # None: standard output is closed
        self.interactive = stream.isatty()
        self.stream: Any = FaultTolerantStream(stream, self._record)
        self.log: Path | None = None
        self.is_log_closed = self.log_has_failed = False
        self.unlogged: list[str] = []
        self.on_message: Callable[[str, str], object] = lambda kind, text: None  # is told each warning and note

    def log_to(self, path: Path) -> None:
        """Raises OSError if the file cannot be written to."""
        os.close(open_to_append(path))
        self.log = path
        if self.unlogged:
            self._record("\n".join(self.unlogged))
        self.unlogged = []

    def close_log(self) -> None:
        self.is_log_closed = True

    def say(self, text: str = "", colour: Colour | None = None) -> None:
        shown = readable(text)
        self._print(painted(shown, colour, self.stream) if colour else shown)
        self._record(text)

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def log_only(self, text: str) -> None:
        """For messages that the caller prints itself."""
        if self.log is not None:
            self._record(text)

    def fact(self, label: str, text: str) -> None:
        """`label`: "" for a line that goes on."""
        self.say(f"  {label and f'{label}:':<11} {text}")

    def warn(self, text: str) -> None:
        self._report("Warning", "yellow", text)

    def note(self, text: str) -> None:
        self._report("Note", "blue", text)

    def _report(self, lead: str, colour: Colour, text: str) -> None:
        self.on_message(lead.lower(), text)
        self._print(f"{painted(f'{lead}:', colour, self.stream)} {readable(text)}")
        self._record(f"{lead}: {text}")

    def bar(self, label: str, total: int, keep: bool = True, num_done: int = 0, images_per_tick: int = 0) -> Bar:
        return Bar(self, label, total, keep, num_done, images_per_tick)

    def epoch_begins(self, epoch: int, num_epochs: int) -> None:
        if self.interactive:
            self._print(f"\n{painted(f'Epoch {epoch}/{num_epochs}', 'bold', self.stream)}\n{RULE}")

    def epoch_ends(self, row: Mapping[str, float | int], num_epochs: int, improved: bool, on_gpu: bool) -> None:
        best = " (best)" if improved else ""
        train_loss, val_loss = f"{row['train_loss']:.4f}", f"{row['val_loss']:.4f}"
        train_iou, val_iou = score_text(row["train_iou"]), score_text(row["val_iou"])
        rate, images = f"{row['learning_rate']:.2e}", f"{row['images_per_second']:.0f} images/s"
        wait = f"{row['data_wait']:.0%}"
        memory = [f"GPU memory: {row['peak_memory_gib']:.1f} GiB"] if on_gpu else []
        not_finite = f" ({row['nan_steps']} not finite)" if row["nan_steps"] else ""
        skipped = [f"skipped steps: {row['skipped_steps']}{not_finite}"] if row["skipped_steps"] else []
        scores = f"train loss {train_loss}  val loss {val_loss}  train IoU {train_iou}  val IoU {val_iou}{best}"
        speed = f"lr {rate}  {row['seconds']:.1f} s  {images}  data wait {wait}"
        line = "  ".join([f"Epoch {row['epoch']}/{num_epochs}", scores, speed, *memory, *skipped])
        self._record(line)
        if self.interactive:
            details = [f"LR: {rate}", f"Time: {row['seconds']:.1f}s", images, *memory, f"data wait: {wait}", *skipped]
            line = (
                f"\nEpoch {row['epoch']} Summary:\n"
                f"  Train Loss: {train_loss} | Val Loss: {val_loss}\n"
                f"  Train IoU:  {train_iou} | Val IoU:  {val_iou}{best and painted(best, 'green', self.stream)}\n"
                f"  {' | '.join(details)}"
            )
        self._print(line)

    def class_table(self, scores: Mapping[str, float | None]) -> None:
        """A class that does not occur shows as –. Of many classes the worst."""
        shown: Sequence[tuple[str, float | None]] = list(scores.items())
        if len(shown) > MAX_CLASSES:  # the end of a run should fit on a screen
            found = [(name, value) for name, value in shown if value is not None]
            shown = sorted(found, key=lambda entry: entry[1])[: MAX_CLASSES - 1]
        for line in aligned([("class", "IoU"), *((name, score_text(value)) for name, value in shown)]):
            self.say(f"  {line}")
        if len(shown) < len(scores):
            others = f"{len(scores) - len(shown)} more, which are better or do not occur"
            self.say(f"  and {others}: per_class_iou in run.json")

    def _record(self, text: str) -> None:
        """Opens the log anew each time: one that was deleted or rotated begins again."""
        if self.log is None:
            self.unlogged.append(text)
        elif not self.is_log_closed:
            try:
                with contextlib.suppress(FileNotFoundError), os.fdopen(open_to_append(self.log), "ab") as file:
                    file.write((readable(text) + "\n").encode("utf-8", "replace"))
            except OSError as error:  # a full disk: failed saves are reported elsewhere
                if not self.log_has_failed:
                    self._print(f"Warning: {readable(str(self.log))} cannot be written to ({error.strerror})")
                self.log_has_failed = True


def silent_console() -> Console:
    """For a process of a job other than the main one."""
    console = Console(io.StringIO())
    console.log = Path(os.devnull)  # else lines would be kept for a log that never comes
    return console


def show_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(f"{painted('Error:', 'red', sys.stderr)} {readable(text)}", file=sys.stderr, flush=True)
