"""report.html: one run on one page. Never ends a run: what cannot be read or drawn is left out and said on the page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from unet_trainer.images.drawing import ERROR_COLOURS, ErrorKind
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.reports.comparison import iou_intervals
from unet_trainer.reports.gallery import MAX_SECONDS, Gallery, make_gallery
from unet_trainer.reports.page import (
    NONE,
    STALE_SECONDS,
    data_uri,
    distribution_chart,
    drawn_epochs,
    duration,
    moment,
    percent,
    rate,
    render_page,
    run_charts,
    score,
)
from unet_trainer.runs.folder import BEST, REPORT, SAMPLE_NAMES, SAMPLES, has_checkpoint
from unet_trainer.runs.record import RunSummary, read_run_summary
from unet_trainer.system.atomic_files import write_output, write_text_atomically
from unet_trainer.system.console import Console
from unet_trainer.system.input_files import read_bytes

if TYPE_CHECKING:
    from unet_trainer.model.custom import CustomModel

NO_PICTURES = Gallery()
SHEET_SIDE, SHEET_QUALITY = 1100, 78
FEW_IMAGES = 20  # with fewer, an interval is rough
MAX_MATRIX = 30  # classes in the confusion matrix
MAX_PROBLEMS = 5  # damaged files and lines that are shown
MAX_EVENTS = 200
ERROR_WORDS = {
    ErrorKind.FOUND: "found",
    ErrorKind.MISSED: "missed",
    ErrorKind.FALSE: "falsely found",
    ErrorKind.WRONG: "wrong",
}
EVENT_WORDS = {
    **{"start": "Started", "resumed": "Resumed", "killed": "Killed", "interrupted": "Interrupted", "failed": "Failed"},
    **{"finished": "Finished", "stopped early": "Stopped early"},
    **{"shrink": "Memory ran out", "warning": "Warning", "note": "Note"},
}


def write_report(
    folder: Path,
    with_pictures: bool = True,
    device: str = "auto",
    path: Path | None = None,
    data_dir: Path | None = None,
    max_seconds: float = MAX_SECONDS,
    console: Console | None = None,
    is_running: bool = False,
    model: CustomModel | None = None,
) -> Path:
    """Read the run, predict its pictures if they are wanted, and write the page. Raises OSError; errors of the pictures
    are on the page. `is_running`: it reloads itself. `model`: of a run with a custom one."""
    summary = read_run_summary(folder)
    gallery = NO_PICTURES
    if with_pictures:
        gallery = make_gallery(summary, device, data_dir, max_seconds, console, model)
    elif summary.best is not None:
        when = "follow when the run has ended" if is_running else "are made by the command `report`, see below"
        gallery = Gallery(note=f"Pictures of the worst and the best images {when}.")
    page = render_report(summary, gallery, is_running)
    if path is not None:
        write_output("--out", path, page)
        return path
    write_text_atomically(folder / REPORT, page)
    return folder / REPORT


def render_report(run: RunSummary, gallery: Gallery = NO_PICTURES, is_running: bool = False) -> str:
    longest = max(run.column("seconds").values(), default=0.0)
    (interval, class_intervals), best, epochs = iou_intervals(run.image_scores), run.best, drawn_epochs(run)
    counts = best.confusion if best is not None and best.confusion else []
    baseline = best_baseline(counts, 1 if run.has_background else len(run.class_names), run.id_names)
    sheet = None if gallery.pictures else _latest_samples(run.folder)
    distribution = distribution_chart(run.image_scores)
    events = [event for event in run.events if event.kind in EVENT_WORDS]
    confusion, stage_rows = _confusion(counts, run.id_names), _stage_rows(run)
    classes = run.class_names if best is not None and best.classes else []
    kinds = (ErrorKind.FOUND, ErrorKind.MISSED, ErrorKind.FALSE) if run.has_background else (ErrorKind.WRONG,)
    present = {
        **{"result": True, "images": distribution or gallery.pictures or gallery.note or sheet, "curves": epochs},
        **{"classes": classes, "confusion": confusion, "data": True, "settings": run.settings},
        **{"machine": run.machine or stage_rows, "events": events, "next": True},
    }
    return render_page(
        "report.html",
        f"{run.name} – training report",
        sections={key: key.capitalize() for key, is_there in present.items() if is_there},
        remark=f" Last written by the run: {moment(run.updated)}.",
        reload_for=max(STALE_SECONDS, 3 * longest) if is_running else None,
        run=run,
        interval=interval,
        few_images=FEW_IMAGES,
        baseline=baseline,
        doubts=_doubts(run, run.best_iou if interval is None else interval[0], baseline),
        charts=run_charts(run, epochs),
        num_drawn=len(epochs),
        distribution=distribution,
        classes=classes,
        class_intervals=class_intervals,
        class_shares={entry.get("name"): entry.get("share") for entry in run.data.get("classes", [])},
        val_shares={
            name: sum(row) / max(1, sum(map(sum, counts))) for name, row in zip(run.id_names, counts, strict=False)
        },
        confusion=confusion,
        sheet=sheet,
        stage_rows=stage_rows,
        events=events[-MAX_EVENTS:],
        num_events=len(events),
        event_words=EVENT_WORDS,
        num_interruptions=sum(event.kind in ("interrupted", "killed", "failed") for event in events),
        can_resume=has_checkpoint(run.folder),
        has_model=(run.folder / BEST).is_file(),
        gallery=gallery,
        pictures=sorted(gallery.pictures, key=lambda picture: picture.score.iou or 0.0),
        error_legend=[(ERROR_WORDS[kind], ERROR_COLOURS[kind]) for kind in kinds],
    )


def _doubts(run: RunSummary, low: float | None, baseline: Baseline | None) -> list[str]:
    """What a reader must not overlook. `low`: the least that the IoU may be."""
    found = ["\n".join(run.warnings)] if run.is_of_no_use else list(run.warnings)
    if baseline is not None and low is not None and low <= baseline.iou and not run.is_of_no_use:
        found.append(
            f"The model is not clearly better than no model: predicting {baseline.prediction} gives IoU "
            f"{score(baseline.iou)}."
        )
    found += [
        f"Files of the run are damaged, and what they hold is left out: {problem}"
        for problem in run.problems[:MAX_PROBLEMS]
    ]
    if run.state == "failed":
        found += [f"The run ended with an error: {event.text}" for event in run.events if event.kind == "failed"][-1:]
    return found


def _confusion(counts: Sequence[Sequence[int]], names: list[str]) -> dict[str, Any] | None:
    """Of the best epoch: which class is taken for which; with many classes those with the most wrong pixels."""
    if not counts:
        return None
    matrix = np.array(counts)
    wrong = matrix - np.diag(matrix.diagonal())
    with np.errstate(invalid="ignore"):  # NaN for a class that does not occur
        of_truth, of_predicted = (matrix / matrix.sum(axis, keepdims=True) for axis in (1, 0))
    shown = sorted(np.argsort(-(wrong.sum(1) + wrong.sum(0)), kind="stable")[:MAX_MATRIX].tolist())
    words = "No pixel of the validation images is predicted wrongly."
    if wrong.any():
        shares = np.where(np.eye(len(matrix), dtype=bool), 0, np.nan_to_num(of_truth))
        row, column = np.unravel_index(shares.argmax(), shares.shape)
        words = (
            f"The largest confusion: {percent(shares[row, column])} of {names[row]} is predicted as {names[column]}."
        )
    if len(matrix) > len(shown):
        words += f" The {len(shown)} of {len(matrix)} classes with the most wrong pixels are shown."
    return {"words": words, "ids": shown, "pixels": matrix, "of_truth": of_truth, "of_predicted": of_predicted}


def _stage_rows(run: RunSummary) -> list[list[str]]:
    """Seconds of each stage, over all epochs that are kept."""
    stages = [epoch.stages for epoch in run.epochs if epoch.stages]
    if not stages:
        return []
    startup = run.startup_seconds or 0.0
    whole = max(1e-9, startup + run.seconds)
    times = {
        "start-up (the last one)": startup,
        "training": sum(stage.get("train_seconds", 0.0) for stage in stages),
        "validation": sum(stage.get("val_seconds", 0.0) for stage in stages),
    }
    rows = [[name, duration(seconds), percent(seconds / whole, 0)] for name, seconds in times.items()]
    if waits := run.column("data_wait"):
        rows.append(["waiting for data, of training", NONE, percent(sum(waits.values()) / len(waits))])
    for key, words in (
        ("read_seconds_per_image", "reading an image"),
        ("augment_seconds_per_image", "augmenting an image"),
    ):
        if values := [stage[key] for stage in stages if key in stage]:
            rows.append([words, duration(sum(values) / len(values)), NONE])
    if speeds := run.column("images_per_second").values():
        rows.append(["images/s, slowest and fastest epoch", f"{rate(min(speeds))} – {rate(max(speeds))}", NONE])
    return rows


def _latest_samples(folder: Path) -> tuple[int, str] | None:
    """The newest sheet of samples that training drew, with its epoch, as a JPEG."""
    with contextlib.suppress(OSError, ValueError, cv2.error):
        path = max((folder / SAMPLES).glob(SAMPLE_NAMES))
        pixels = cv2.imdecode(np.frombuffer(read_bytes(path), np.uint8), cv2.IMREAD_COLOR)
        if pixels is None:
            return None
        factor = min(1.0, SHEET_SIDE / max(pixels.shape[:2]))
        small = cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        _, buffer = cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, SHEET_QUALITY])
        return int(path.stem.removeprefix("epoch_")), data_uri(buffer.tobytes(), "image/jpeg")
    return None
