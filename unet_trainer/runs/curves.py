"""curves.png: how training went, from what the run's folder holds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unet_trainer.images.image_files import Pixels, encode_image
from unet_trainer.images.line_charts import LINE_COLOURS, Chart, Colour, Line, Mark, Picture, draw_charts
from unet_trainer.runs.run_folder import CURVES
from unet_trainer.runs.run_summary import EpochRecord, Event, RunSummary, read_run_summary
from unet_trainer.system.atomic_files import write_bytes_atomically

TRAIN_COLOUR, VAL_COLOUR, BEST_COLOUR = LINE_COLOURS[1], LINE_COLOURS[0], (45, 49, 56)
STOPPED_COLOUR, INTERRUPTED_COLOUR, ROLLBACK_COLOUR = (120, 60, 160), (150, 150, 150), (200, 30, 60)
MAX_CLASSES = 6  # with more, those that the best epoch scores worst


def write_curves(folder: Path) -> None:
    """Draws the curves of a run into its folder, if an epoch has ended. Raises OSError."""
    summary = read_run_summary(folder)
    if summary.epochs:
        write_bytes_atomically(folder / CURVES, encode_image(draw_curves(summary), ".png"))


def draw_curves(summary: RunSummary) -> Pixels:
    """Loss, IoU overall and of each class, learning rate and throughput over the epochs. H,W,3 RGB."""
    best = summary.best
    classes, note = _class_lines(summary)
    overall = [
        Line("val", summary.column("val_iou"), VAL_COLOUR, 2),
        Line("train", summary.column("train_iou"), TRAIN_COLOUR, 1),
    ]
    loss = [Line("val", summary.column("val_loss"), VAL_COLOUR, 2), Line("train", summary.column("train_loss"), TRAIN_COLOUR, 1)]
    rate = [Line("", summary.column("learning_rate"), LINE_COLOURS[2])]
    speed = [Line("", summary.column("images_per_second"), LINE_COLOURS[6])]
    charts = [
        Chart("Loss", loss, limits=_from_zero(loss), circled=_point(best, "val_loss")),
        Chart("IoU", [*classes, *reversed(overall)], limits=_iou_limits(summary), circled=_point(best, "val_iou"), note=note),
        Chart("Learning rate", rate, limits=_from_zero(rate)),
        Chart("Images per second, in training", speed, limits=_from_zero(speed)),
    ]
    marks, meanings = _marks(summary)
    return draw_charts(Picture(summary.name, _subtitle(summary), charts, marks, meanings))


def _class_lines(summary: RunSummary) -> tuple[list[Line], str]:
    """Of the validation IoU of each class, thin; with one class there is nothing to tell apart."""
    names = summary.class_names
    if len(names) < 2:
        return [], ""
    best = summary.per_class_iou
    shown = names
    note = ""
    if len(names) > MAX_CLASSES:
        shown = sorted(names, key=lambda name: 2.0 if best.get(name) is None else best[name] or 0.0)[:MAX_CLASSES]
        note = f"val IoU of the {MAX_CLASSES} worst of {len(names)} classes"
    colours = [colour for colour in LINE_COLOURS if colour not in (TRAIN_COLOUR, VAL_COLOUR)]
    lines = [Line(name, summary.class_column(name, "iou"), colours[index % len(colours)], 1) for index, name in enumerate(shown)]
    return lines, note


def _from_zero(lines: Sequence[Line]) -> tuple[float, float] | None:
    """None where there is nothing above 0: some losses are negative."""
    values = [value for line in lines for _, value in line.points]
    return (0.0, 1.08 * max(values)) if values and min(values) >= 0 and max(values) > 0 else None


def _iou_limits(summary: RunSummary) -> tuple[float, float]:
    """From 0, unless all values lie close together well above it: then what matters would be a flat line."""
    names = ("val_iou", "train_iou")
    values = [value for name in names for _, value in summary.column(name)]
    values += [value for name in summary.class_names for _, value in summary.class_column(name, "iou")]
    low = min(values, default=0.0)
    return (0.0 if low < 0.5 else int(low * 10) / 10, 1.0)


def _point(epoch: EpochRecord | None, column: str) -> tuple[float, float] | None:
    value = None if epoch is None else epoch.get(column)
    return None if epoch is None or value is None else (epoch.number, value)


def _marks(summary: RunSummary) -> tuple[list[Mark], list[tuple[str, Colour]]]:
    marks: list[Mark] = []
    meanings: list[tuple[str, Colour]] = []
    best = summary.best
    if best is not None:
        marks.append(Mark(best.number, BEST_COLOUR, is_dotted=True))
        value = best.get(summary.monitor)
        meanings.append((f"best epoch: {best.number} ({summary.monitor} {value:.4f})", BEST_COLOUR))
    for kinds, colour, name in (
        (("interrupted", "killed", "failed"), INTERRUPTED_COLOUR, "interrupted"),
        (("rollback", "shrink"), ROLLBACK_COLOUR, "went back to a saved state"),
    ):
        events = [event for event in summary.events if event.kind in kinds and event.epoch is not None]
        marks += [Mark(_place(event, summary), colour) for event in events]
        if events:
            meanings.append((name if len(events) == 1 else f"{name} ({len(events)} times)", colour))
    if summary.state == "stopped early":
        marks.append(Mark(summary.epochs[-1].number, STOPPED_COLOUR, is_dotted=False))
        meanings.append((f"stopped early after epoch {summary.epochs[-1].number}", STOPPED_COLOUR))
    return marks, meanings


def _place(event: Event, summary: RunSummary) -> float:
    """Between the last epoch that was finished and the next one; within the chart."""
    return min(max((event.epoch or 0) + 0.5, 1), max(1, summary.epochs[-1].number))


def _subtitle(summary: RunSummary) -> str:
    done, planned = len(summary.epochs), summary.num_epochs
    epochs = f"{done} of {planned} epochs" if planned else f"{done} epochs"
    when = "" if summary.updated is None else f", {summary.updated:%Y-%m-%d %H:%M} UTC"
    return f"{summary.state}, {epochs}{when}"
