"""curves.png: how training went; and how often it and the report are drawn while a run goes on. Imports no torch."""

import io
import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unet_trainer.runs.folder import CURVES
from unet_trainer.runs.record import RunSummary, read_run_summary
from unet_trainer.system.atomic_files import write_bytes_atomically

# Okabe and Ito's, distinct with common colour blindness, without their yellow, which is too light on white.
VAL, TRAIN, RATE, SPEED = "#0072b2", "#d55e00", "#009e73", "#6e6e6e"
CLASS_COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6e6e6e", "#783ca0")
INK, STOPPED, INTERRUPTED, ROLLBACK = "#2d3138", "#783ca0", "#969696", "#c81e3c"
MARKS = {  # colour, style and meaning of a vertical line
    "best": (INK, ":", "dotted: best epoch"),
    **dict.fromkeys(("interrupted", "killed", "failed"), (INTERRUPTED, "--", "grey: interrupted")),
    "shrink": (ROLLBACK, "--", "red: went on with smaller parts of a batch"),
    "stopped": (STOPPED, "-", "purple: stopped early"),
}
MAX_CLASSES = len(CLASS_COLOURS)  # with more, those that the best epoch scores worst
MAX_NAME = 32  # characters
MAX_DOTS = 40  # a line with fewer points shows them
MAX_CURVES_SHARE, MAX_REPORT_SHARE = 0.01, 0.02  # of the time that drawing may keep a core busy
REPORT_SECONDS = 30.0  # at least, from one report to the next


class PacedWriter:
    """Writes the curves or the report while a run goes on, for a small share of the time only. No error ends a run."""

    def __init__(self, draw: Callable[[], object], max_share: float, min_seconds: float = 0.0) -> None:
        """`min_seconds`: from the start of the run, and then from one writing to the next."""
        self.draw, self.max_share, self.min_seconds, self.lock = draw, max_share, min_seconds, threading.Lock()
        self.not_before = time.monotonic() + min_seconds
        self.error: Exception | None = None  # the first one

    def write(self, is_last: bool = False) -> None:
        with self.lock:  # a run that is interrupted twice ends while its files are written
            started, used = time.monotonic(), time.thread_time()
            if started < self.not_before and not is_last:
                return
            try:
                self.draw()
            except Exception as error:  # of any kind
                self.error = self.error or error
            self.not_before = started + max(self.min_seconds, (time.thread_time() - used) / self.max_share)

    def stop(self) -> None:
        """Wait for a writing under way; there is none after it."""
        with self.lock:
            self.not_before = math.inf


def write_curves(folder: Path) -> None:
    """Draws the curves of a run into its folder, if an epoch has ended. Raises OSError."""
    summary = read_run_summary(folder)
    if summary.epochs:
        write_bytes_atomically(folder / CURVES, draw_curves(summary))


def draw_curves(summary: RunSummary) -> bytes:
    """A PNG of loss, IoU overall and of each class, learning rate and throughput over the epochs."""
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and may open windows

    figure = Figure(figsize=(13.2, 8.3), dpi=100, facecolor="white")
    loss, iou, rate, speed = axes = list(figure.subplots(2, 2).flat)
    # constrained layout takes as long as all else
    figure.subplots_adjust(0.055, 0.12, 0.985, 0.9, wspace=0.12, hspace=0.3)
    _draw(loss, "Loss", {"val": (summary.column("val_loss"), VAL), "train": (summary.column("train_loss"), TRAIN)})
    num_classes = len(summary.class_names)
    names = summary.worst_classes(MAX_CLASSES) if num_classes > 1 else []
    note = f" (val IoU of the {len(names)} worst of {num_classes} classes)" if 0 < len(names) < num_classes else ""
    classes = {name: (summary.column(name, "iou"), colour) for name, colour in zip(names, CLASS_COLOURS, strict=False)}
    overall = {"val": (summary.column("val_iou"), VAL), "train": (summary.column("train_iou"), TRAIN)}
    _draw(iou, f"IoU{note}", {**overall, **classes})
    _draw(rate, "Learning rate", {"": (summary.column("learning_rate"), RATE)})
    _draw(speed, "Images per second, in training", {"": (summary.column("images_per_second"), SPEED)})
    low = min(itertools.chain(*(line.get_ydata() for line in iou.lines)), default=0.0)
    # values close together well above 0 would be a flat line
    iou.set_ylim(0.0 if low < 0.5 else int(low * 10) / 10, 1.0)
    for mark, ax in itertools.product(summary.marks, axes):
        colour, style, _ = MARKS[mark.kind]
        ax.axvline(mark.place, color=colour, linestyle=style, linewidth=1)
    meanings = dict.fromkeys(MARKS[mark.kind][2] for mark in summary.marks)
    when = "" if summary.updated is None else f", {summary.updated:%Y-%m-%d %H:%M} UTC"
    title = f"{_plain(summary.name)} – {summary.state}, {summary.progress} epochs{when}"
    figure.suptitle(title, color=INK, fontsize=14, x=0.01, ha="left")
    figure.supxlabel("   |   ".join(meanings), color=INK, fontsize=10, x=0.01, ha="left")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Any, title: str, lines: dict[str, tuple[dict[int, float], str]]) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.grid(color="#e4e7ec")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("epoch", color=SPEED)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    for name, (points, colour) in lines.items():
        style = {"linewidth": 2.0 if name in ("val", "train", "") else 1.0, "color": colour, "markersize": 3}
        style["marker"] = "o" if len(points) < MAX_DOTS else None
        axes.plot([*points], [*points.values()], label=_plain(name) or "_", **style)
    values = [value for points, _ in lines.values() for value in points.values()]
    if values and min(values) >= 0 and max(values) > 0:  # some losses are negative
        axes.set_ylim(0.0, 1.08 * max(values))
    if len(lines) > 1:
        axes.legend(fontsize=8, framealpha=0.7, edgecolor="none")


def _plain(text: str) -> str:
    """As matplotlib takes a name: no formula, no hidden line, no letter that the font lacks, not too long."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    shown = "".join(letter if font.get_char_index(ord(letter)) else "\ufffd" for letter in text[:MAX_NAME])
    return (f" {shown}" if shown.startswith("_") else shown).replace("$", r"\$")
