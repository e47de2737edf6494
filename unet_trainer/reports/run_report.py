"""report.html: one run on one page. Never ends a run: what cannot be read or drawn is left out and said."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

import cv2
import numpy as np

from unet_trainer import __version__
from unet_trainer.reports.curve_section import curve_section
from unet_trainer.reports.fact_sections import command_section, data_section, event_section, machine_section, settings_section
from unet_trainer.reports.gallery import MAX_SECONDS, Gallery, make_gallery
from unet_trainer.reports.gallery_section import image_section
from unet_trainer.reports.html_elements import Html, text
from unet_trainer.reports.number_texts import count, moment
from unet_trainer.reports.page import fill_page, layout
from unet_trainer.reports.score_sections import class_section, confusion_section, distribution_figure, headline, state_pill
from unet_trainer.reports.score_statistics import set_scores
from unet_trainer.runs.run_folder import REPORT
from unet_trainer.runs.run_summary import RunSummary, read_run_summary
from unet_trainer.system.atomic_files import write_bytes_atomically

SAMPLES = "samples"
MAX_BYTES = 5_000_000
NO_PICTURES = Gallery()
SHEET_SIDE, SHEET_QUALITY = 1100, 78


def write_report(
    folder: Path,
    with_pictures: bool = True,
    device: str = "auto",
    path: Path | None = None,
    data_dir: Path | None = None,
    max_seconds: float = MAX_SECONDS,
) -> Path:
    """Reads the run, predicts its pictures if they are wanted, and writes the page. Raises OSError; errors of the pictures are
    told on the page."""
    summary = read_run_summary(folder)
    gallery = NO_PICTURES
    if with_pictures:
        gallery = gallery_or_reason(summary, device, data_dir, max_seconds)
    elif summary.best is not None:
        gallery = Gallery(note=f"Pictures of the worst and the best images are made by: python train_unet.py report {folder}")
    path = path or folder / REPORT
    write_bytes_atomically(path, render_report(summary, gallery).encode())
    return path


def gallery_or_reason(
    summary: RunSummary, device: str = "auto", data_dir: Path | None = None, max_seconds: float = MAX_SECONDS
) -> Gallery:
    """Predicting may fail in ways that cannot be listed (memory, a driver, a damaged file); the report is written all the same."""
    try:
        return make_gallery(summary, device, data_dir, max_seconds)
    except Exception as error:
        return Gallery(note=f"There are no pictures: predicting them failed ({type(error).__name__}: {str(error)[:300]}).")


def render_report(summary: RunSummary, gallery: Gallery = NO_PICTURES, live: str | None = None) -> str:
    scores = set_scores(summary.image_scores)
    sheet = None if gallery.pictures else latest_samples(summary.folder)
    sections: list[tuple[str, str, Html | None]] = [
        ("result", "Result", headline(summary, scores)),
        ("curves", "Curves", curve_section(summary)),
        ("classes", "Classes", class_section(summary, scores)),
        ("confusion", "Confusion", confusion_section(summary)),
        ("images", "Images", image_section(summary, distribution_figure(summary), gallery, sheet)),
        ("data", "Data", data_section(summary)),
        ("settings", "Settings", settings_section(summary)),
        ("machine", "Machine", machine_section(summary)),
        ("events", "Events", event_section(summary)),
        ("next", "Next", command_section(summary)),
    ]
    body = layout([summary.name, " ", state_pill(summary)], _subtitle(summary), sections, _footer(summary, live))
    return fill_page(f"{summary.name} – training report", body, live)


def _subtitle(summary: RunSummary) -> Html:
    model, data, machine = summary.model, summary.data, summary.machine
    parts = [
        " · ".join(str(part) for part in (model.get("architecture"), model.get("encoder")) if part),
        f"{count(data['num_train'])} training and {count(data['num_val'])} validation images"
        if isinstance(data.get("num_train"), int) and isinstance(data.get("num_val"), int)
        else "",
        ", ".join(str(part) for part in (machine.get("device"), machine.get("name")) if part),
        f"started {moment(summary.starts[0])}" if summary.starts else "",
    ]
    return text(" · ".join(part for part in parts if part))


def _footer(summary: RunSummary, live: str | None) -> Html:
    if live is not None:
        return text(
            f"U-Net trainer {__version__}; refreshed as epochs end. The run's last sign of life: {moment(summary.updated)}."
        )
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    seen = f"; the run's last sign of life: {moment(summary.updated)}" if summary.updated else ""
    return text(f"Made {made} by U-Net trainer {__version__}{seen}. This page is one file and asks the network for nothing.")


def latest_samples(folder: Path) -> tuple[int, bytes] | None:
    """The newest sheet of samples that training drew, with its epoch, as a JPEG."""
    with contextlib.suppress(OSError, ValueError, cv2.error):
        path = max((folder / SAMPLES).glob("epoch_*.png"))
        pixels = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
        if pixels is None:
            return None
        factor = min(1.0, SHEET_SIDE / max(pixels.shape[:2]))
        small = cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        done, buffer = cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, SHEET_QUALITY])
        return (int(path.stem.removeprefix("epoch_")), buffer.tobytes()) if done else None
    return None
