"""Messages on the terminal, copied into the run's train.log; and the exit codes.

On a terminal an epoch has bars and a summary; anywhere else (a file, a pipe, a notebook) it is one line, and what takes
long has a line every half minute. Names of files
may hold any byte but / and NUL: a terminal shows them without acting on them, in tables and JSON files they come back
as they were."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from unet_trainer.config.choices import describe_seconds
from unet_trainer.system.atomic_files import open_to_append

EXIT_DONE, EXIT_USER_ERROR, EXIT_TRAINING_FAILED, EXIT_INTERRUPTED = 0, 2, 3, 130  # 143 after SIGTERM
RULE = "-" * 60
ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
MAX_CLASSES = 12  # rows of the table at the end
SILENT_SECONDS = 2.0  # without a terminal, a phase that takes longer says that it is under way
LINE_SECONDS = 30.0  # and again after so many, and a tenth of it
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
Colour = Literal["red", "green", "yellow", "blue", "grey", "bold"]
CODES: dict[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "grey": "90", "bold": "1"}
Level = Literal["ok", "warning", "problem"]
UNDECODED = re.compile("[\udc80-\udcff]")  # bytes of a file's name that are not UTF-8, as Python holds them
# What a terminal obeys instead of showing it (escapes, carriage returns, marks that turn the direction of text), but no
# line breaks and tabs; and what no encoding has.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PASSWORD = re.compile(r"(https?:/{1,2})[^\s/]+@|(://)[^\s/@:]*:[^\s/]+@", re.IGNORECASE)  # or user, in a URL


def readable(text: str) -> str:
    """A message with what a terminal would obey as \\x1b, with bytes that are not UTF-8 as \\xe4, and with *** in place
    of a password in a URL."""
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


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def painted(text: str, colour: Colour, stream: Any) -> str:
    """In a colour, where the stream is a terminal that has them and NO_COLOR (no-color.org) is not set."""
    kind = os.environ.get("TERM") or ("windows" if "WT_SESSION" in os.environ else "dumb")
    has_colours = _is_terminal(stream) and kind != "dumb" and not os.environ.get("NO_COLOR")
    return f"\033[{CODES[colour]}m{text}\033[0m" if has_colours else text


@dataclass(frozen=True)
class Finding:
    level: Level
    title: str  # a word or two: GPU, Disk; or the key of a config that it is about
    detail: str
    fix: str = ""  # a sentence, a command, or the line of the config to change


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
    """A progress bar; without a terminal, plain lines now and then. `keep`: it stays on the screen; one that does not
    has its first line soon. `images_per_tick`: 0 where it does not count batches of images."""

    def __init__(
        self, console: Console, label: str, total: int, keep: bool, num_done: int, images_per_tick: int = 0
    ) -> None:
        self.label, self.total, self.num_done, self.first_done = label.strip(), total, num_done, num_done
        self.images_per_tick, self.scores = images_per_tick, ""
        self.stream = None if console.interactive else console.stream
        self.started = time.monotonic()
        self.next_seconds, self.next_done = (LINE_SECONDS, num_done + total / 10) if keep else (SILENT_SECONDS, 0.0)
        self.tqdm = tqdm(
            total=total,
            initial=num_done,
            desc=label,
            file=console.stream,
            disable=not console.interactive,
            leave=keep,
            bar_format=BAR_FORMAT,
            dynamic_ncols=True,
            mininterval=0.2,
        )

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
        self.stream = stream
        self.report: Callable[[str], object] | None = report

    def write(self, text: str) -> int:
        text = UNDECODED.sub(_escaped, text)  # no more than that: progress bars move the cursor on purpose
        try:
            with contextlib.suppress(UnicodeEncodeError):
                return self.stream.write(text)
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
        if isinstance(error, BrokenPipeError):
            # The reader is gone. Text that stays in the stream would fail whenever others flush it, as multiprocessing
            # does before it starts a process.
            with contextlib.suppress(OSError, ValueError):
                number, nowhere = self.stream.fileno(), open_to_append(Path(os.devnull))
                os.dup2(nowhere, number)
                os.close(nowhere)
        report, self.report = self.report, None
        if report is not None:
            reason = getattr(error, "strerror", None) or str(error)
            report(
                f"Warning: the terminal cannot be written to ({reason}); training continues, and this file has "
                "what is said"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console:
    """Prints messages and logs them. Lines printed before the run has a folder go into its log once it has."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout or io.StringIO()  # None: standard output is closed
        self.interactive = stream.isatty()
        self.stream: Any = FaultTolerantStream(stream, self._record)
        self.log: Path | None = None
        self._log_folder: os.stat_result | None = None  # another folder of that name, made later, has a log of its own
        self.unlogged: list[str] = []
        self.log_has_failed = False
        self.on_message: Callable[[str, str], object] = lambda kind, text: None  # is told each warning and note

    def log_to(self, path: Path) -> None:
        """Raises OSError if the file cannot be written to."""
        os.close(open_to_append(path))
        self.log, self._log_folder = path, path.parent.stat()
        self._append(self.unlogged)
        self.unlogged = []

    def close_log(self) -> None:
        """Nothing more goes into it."""
        self._log_folder = None

    def say(self, text: str = "", colour: Colour | None = None) -> None:
        shown = readable(text)
        print(painted(shown, colour, self.stream) if colour else shown, file=self.stream, flush=True)
        self._record(text)

    def log_only(self, text: str) -> None:
        """For messages that the caller prints itself."""
        self._append([text])

    def fact(self, label: str, text: str) -> None:
        """`label`: "" for a line that goes on."""
        self.say(f"  {label and f'{label}:':<11} {text}")

    def warn(self, text: str) -> None:
        self._tell("warning", "yellow", text)

    def note(self, text: str) -> None:
        self._tell("note", "blue", text)

    def _tell(self, kind: str, colour: Colour, text: str) -> None:
        """The kind in a colour, where the terminal has them; not in the log."""
        self.on_message(kind, text)
        lead = f"{kind.capitalize()}:"
        print(f"{painted(lead, colour, self.stream)} {readable(text)}", file=self.stream, flush=True)
        self._record(f"{lead} {text}")

    def bar(self, label: str, total: int, keep: bool = True, num_done: int = 0, images_per_tick: int = 0) -> Bar:
        return Bar(self, label, total, keep, num_done, images_per_tick)

    def epoch_begins(self, epoch: int, num_epochs: int) -> None:
        if self.interactive:
            print(
                f"\n{painted(f'Epoch {epoch}/{num_epochs}', 'bold', self.stream)}\n{RULE}", file=self.stream, flush=True
            )

    def epoch_ends(self, row: Mapping[str, float | int], num_epochs: int, improved: bool, on_gpu: bool) -> None:
        best = " (best)" if improved else ""
        train_iou, val_iou = score_text(row["train_iou"]), score_text(row["val_iou"])
        memory = f"GPU memory: {row['peak_memory_gib']:.1f} GiB" if on_gpu else ""
        not_finite = f" ({row['nan_steps']} not finite)" if row["nan_steps"] else ""
        skipped = f"skipped steps: {row['skipped_steps']}{not_finite}" if row["skipped_steps"] else ""
        line = (
            f"Epoch {row['epoch']}/{num_epochs}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}"
            f"  train IoU {train_iou}  val IoU {val_iou}{best}  lr {row['learning_rate']:.2e}"
            f"  {row['seconds']:.1f} s  {row['images_per_second']:.0f} images/s  data wait {row['data_wait']:.0%}"
        )
        line += "".join(f"  {part}" for part in (memory, skipped) if part)
        self._record(line)
        if not self.interactive:
            print(line, file=self.stream, flush=True)
            return
        best = painted(best, "green", self.stream) if best else ""
        details = [
            f"LR: {row['learning_rate']:.2e}",
            f"Time: {row['seconds']:.1f}s",
            f"{row['images_per_second']:.0f} images/s",
        ]
        details += [part for part in (memory, f"data wait: {row['data_wait']:.0%}", skipped) if part]
        print(
            f"\nEpoch {row['epoch']} Summary:\n"
            f"  Train Loss: {row['train_loss']:.4f} | Val Loss: {row['val_loss']:.4f}\n"
            f"  Train IoU:  {train_iou} | Val IoU:  {val_iou}{best}\n"
            f"  {' | '.join(details)}",
            file=self.stream,
            flush=True,
        )

    def class_table(self, scores: Mapping[str, float | None]) -> None:
        """A class that does not occur shows as –. Of many classes the worst, so that the end of a run fits on a
        screen."""
        shown: Sequence[tuple[str, float | None]] = list(scores.items())
        if len(shown) > MAX_CLASSES:
            found = [(name, value) for name, value in shown if value is not None]
            shown = sorted(found, key=lambda entry: entry[1])[: MAX_CLASSES - 1]
        for line in aligned([("class", "IoU"), *((name, score_text(value)) for name, value in shown)]):
            self.say(f"  {line}")
        if len(shown) < len(scores):
            self.say(
                f"  and {len(scores) - len(shown)} more, which are better or do not occur: per_class_iou in run.json"
            )

    def _record(self, text: str) -> None:
        if self.log is None:
            self.unlogged.append(text)
        else:
            self._append([text])

    def _append(self, lines: list[str]) -> None:
        """Opens the file anew each time: a log that was deleted or rotated begins again."""
        if self.log is None or self._log_folder is None or not lines:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._log_folder, self.log.parent.stat()):
                    with os.fdopen(open_to_append(self.log), "ab", buffering=0) as file:
                        file.write((readable("\n".join(lines)) + "\n").encode("utf-8", "replace"))
        except (
            OSError
        ) as error:  # a full disk: failed saves are reported elsewhere; a missing log does not end training
            if not self.log_has_failed:
                print(
                    f"Warning: {readable(str(self.log))} cannot be written to ({error.strerror})",
                    file=self.stream,
                    flush=True,
                )
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
