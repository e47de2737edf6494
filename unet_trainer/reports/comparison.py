"""Several runs beside each other: `compare`, its page, and `watch` with several runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unet_trainer.config.safe_yaml import value_text
from unet_trainer.reports.charts import overlay_charts
from unet_trainer.reports.page import NONE, render_page, score
from unet_trainer.reports.score_statistics import Difference, Interval, paired_difference, same_images, set_scores
from unet_trainer.training.run_summary import RunSummary

# Where a run lies and how it was started does not explain its score.
NOT_COMPARED = frozenset({"run_name", "checkpoint_dir", "resume"})


@dataclass(frozen=True)
class ComparedRun:
    summary: RunSummary
    name: str  # as it is shown: the folder's, with its parent where two have the same
    interval: Interval | None  # of the IoU; None: the run kept no scores of its images
    difference: Difference | None  # to the first run; None for the first, and where the images are not the same

    @property
    def iou(self) -> float | None:
        return self.summary.best_iou

    @property
    def difference_text(self) -> str:
        return NONE if self.difference is None else str(self.difference)

    @property
    def verdict(self) -> str:
        return "" if self.difference is None else self.difference.verdict

    @property
    def memory_text(self) -> str:
        peak = self.summary.peak("peak_memory_gib")
        return f"{peak:.2f} GiB" if peak else NONE


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[ComparedRun]
    note: str  # about the validation images: whether differences are paired
    settings: Sequence[tuple[str, Sequence[str]]]  # that differ: name and a value for each run

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    @property
    def best(self) -> ComparedRun | None:
        """The run with the highest IoU."""
        return max((run for run in self.runs if run.iou is not None), key=lambda run: run.iou or 0.0, default=None)


def compare_runs(summaries: Sequence[RunSummary]) -> Comparison:
    """The first is the one that the others are compared with."""
    first = summaries[0]
    folder_names = [summary.name for summary in summaries]
    runs = []
    for summary in summaries:
        is_unique = folder_names.count(summary.name) == 1
        name = summary.name if is_unique else f"{summary.folder.absolute().parent.name}/{summary.name}"
        scores = set_scores(summary.image_scores)
        difference = None if summary is first else paired_difference(summary.image_scores, first.image_scores)
        runs.append(ComparedRun(summary, name, scores.interval if scores else None, difference))
    return Comparison(runs, _pairing_note(runs), _different_settings(summaries))


def render_comparison(summaries: Sequence[RunSummary], live: str | None = None, links: bool = False) -> str:
    """`links`: to the report of each run, below the address of this page."""
    found = compare_runs(summaries)
    charts = overlay_charts([(run.name, run.summary) for run in found.runs])
    class_names = summaries[0].class_names
    has_classes = len(class_names) > 1 and all(summary.class_names == class_names for summary in summaries)
    per_class = [summary.per_class_iou for summary in summaries]
    class_rows = [[name, *(score(values.get(name)) for values in per_class)] for name in class_names] if has_classes else []
    sections = {"runs": "Runs", "curves": "Curves", "classes": "Classes", "settings": "Settings"}
    present = {"runs": True, "curves": charts, "classes": class_rows, "settings": True}
    return render_page(
        "comparison.html",
        f"{', '.join(found.names)} – comparison",
        live,
        subtitle=", ".join(found.names),
        sections={key: name for key, name in sections.items() if present[key]},
        found=found,
        links=links,
        charts=charts,
        class_rows=class_rows,
        has_memory=any(summary.peak("peak_memory_gib") for summary in summaries),
    )


def _pairing_note(runs: Sequence[ComparedRun]) -> str:
    first = runs[0]
    scores = {run.name: run.summary.image_scores for run in runs}
    without = [name for name, found in scores.items() if not found]
    others = [name for name, found in scores.items() if found and scores[first.name] and not same_images(found, scores[first.name])]
    parts = []
    if any(run.difference is not None for run in runs):
        parts.append(f"Differences are to {first.name}, paired image by image.")
    if others:
        parts.append(f"Not validated on the same images as {first.name}, so not comparable: {', '.join(others)}.")
    if without:
        parts.append(f"No scores of single images, so no interval: {', '.join(without)}.")
    return " ".join(parts)


def _different_settings(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """Settings that two runs have with different values, in the order of the first run's. One that a run does not have, of an
    earlier version, is no difference."""
    found = []
    for name in dict.fromkeys(name for summary in summaries for name in summary.settings if name not in NOT_COMPARED):
        values = [value_text(summary.value(name)) if name in summary.settings else None for summary in summaries]
        if len({value for value in values if value is not None}) > 1:
            found.append((name, [value or NONE for value in values]))
    return found
