"""How certain the scores of runs are, and several runs beside each other. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unet_trainer.config.safe_yaml import value_text
from unet_trainer.inference.scores import Interval, drawn_scores, intervals, resampled_sums, set_scores
from unet_trainer.reports.page import NONE, overlay_charts, render_page, score
from unet_trainer.runs.record import RunSummary
from unet_trainer.runs.tables import ImageScore

# Where a run lies and how it was started does not explain its score.
NOT_COMPARED = frozenset({"run_name", "checkpoint_dir", "resume"})


@dataclass(frozen=True)
class Difference:
    """IoU of one run minus that of another on the same images, paired."""

    iou: float
    interval: Interval | None

    @property
    def verdict(self) -> str:
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "no clear difference"
        return "better" if self.iou > 0 else "worse"

    def __str__(self) -> str:
        ends = "" if self.interval is None else f" ({self.interval[0]:+.3f} to {self.interval[1]:+.3f})"
        return f"{self.iou:+.3f}{ends}"


def iou_intervals(scores: Sequence[ImageScore]) -> tuple[Interval | None, dict[str, Interval | None]]:
    """95 % intervals of the IoU of a set of images and of each class in it, from the counts of all images together."""
    names = list(scores[0].classes) if scores else []
    if len(scores) < 2:
        return None, dict.fromkeys(names)
    draws = drawn_scores(resampled_sums([_count_array(scores)])[0])["iou"]
    *of_classes, of_mean = intervals(draws, len(scores))
    return of_mean, dict(zip(names, of_classes, strict=True))


def paired_difference(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> Difference | None:
    """Of two runs that were scored on the same images; None if they were not."""
    if not same_images(this, other):
        return None
    mine, theirs = (_count_array(sorted(scores, key=lambda score: score.image)) for scores in (this, other))
    difference = set_scores(mine.sum(0))["iou"][-1] - set_scores(theirs.sum(0))["iou"][-1]
    if np.isnan(difference):
        return None
    my_draws, their_draws = (drawn_scores(drawn)["iou"][:, -1:] for drawn in resampled_sums([mine, theirs]))
    return Difference(float(difference), intervals(my_draws - their_draws, len(mine))[0])


def same_images(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> bool:
    """Whether two runs validated on the same files with the same classes, and counted the same pixels of them."""

    def facts(scores: Sequence[ImageScore]) -> dict[tuple[str, str], list[tuple[str, int]]]:
        return {
            (score.image, score.mask): [(name, counts.truth) for name, counts in score.classes.items()]
            for score in scores
        }

    return bool(this) and facts(this) == facts(other)


def _count_array(scores: Sequence[ImageScore]) -> NDArray[np.int64]:
    """N,K,3: pixels in both, in truth, in prediction of each class that is reported."""
    rows = [[(one.hits, one.truth, one.predicted) for one in image.classes.values()] for image in scores]
    return np.array(rows, np.int64).reshape(len(rows), -1, 3)


@dataclass(frozen=True)
class ComparedRun:
    summary: RunSummary
    name: str  # as it is shown: the folder's, with its parent where two have the same
    interval: Interval | None  # of the IoU; None: the run kept no scores of its images
    difference: Difference | None  # to the first run; None for the first, and where the images are not the same

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


def compare_runs(summaries: Sequence[RunSummary]) -> Comparison:
    """The first is the one that the others are compared with."""
    first = summaries[0]
    folder_names = [summary.name for summary in summaries]
    runs, others, without = [], [], []
    for summary in summaries:
        is_unique = folder_names.count(summary.name) == 1
        name = summary.name if is_unique else f"{summary.folder.absolute().parent.name}/{summary.name}"
        difference = None if summary is first else paired_difference(summary.image_scores, first.image_scores)
        runs.append(ComparedRun(summary, name, iou_intervals(summary.image_scores)[0], difference))
        if not summary.image_scores:
            without.append(name)
        elif first.image_scores and not same_images(summary.image_scores, first.image_scores):
            others.append(name)
    notes = []
    if any(run.difference is not None for run in runs):
        notes.append(f"Differences are to {runs[0].name}, paired image by image.")
    if others:
        notes.append(f"Not validated on the same images as {runs[0].name}, so not comparable: {', '.join(others)}.")
    if without:
        notes.append(f"No scores of single images, so no interval: {', '.join(without)}.")
    return Comparison(runs, " ".join(notes), _different_settings(summaries))


def _different_settings(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """Settings that two runs have with different values, in the order of the first run's."""
    found = []
    for name in dict.fromkeys(name for summary in summaries for name in summary.settings if name not in NOT_COMPARED):
        values = [value_text(summary.value(name)) if name in summary.settings else None for summary in summaries]
        if len({value for value in values if value is not None}) > 1:
            found.append((name, [value or NONE for value in values]))
    return found


def zoomed_axis(runs: Sequence[ComparedRun]) -> Interval:
    """Round ends within 0 and 1, between which all scores and their intervals lie."""
    values = [value for run in runs for value in (run.summary.best_iou, *(run.interval or ())) if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    step = 10.0 ** math.floor(math.log10(max(high - low, 0.01)))
    return max(0.0, round((math.ceil(low / step) - 1) * step, 6)), min(
        1.0, round((math.floor(high / step) + 1) * step, 6)
    )


def render_comparison(summaries: Sequence[RunSummary]) -> str:
    found = compare_runs(summaries)
    charts = overlay_charts([(run.name, run.summary) for run in found.runs])
    class_names = summaries[0].class_names
    has_classes = len(class_names) > 1 and all(summary.class_names == class_names for summary in summaries)
    per_class = [summary.per_class_iou for summary in summaries]
    class_rows = (
        [[name, *(score(values.get(name)) for values in per_class)] for name in class_names] if has_classes else []
    )
    scored = [run for run in found.runs if run.summary.best_iou is not None]
    present = {"runs": True, "curves": charts, "classes": class_rows, "settings": True}
    return render_page(
        "comparison.html",
        f"{', '.join(found.names)} – comparison",
        sections={key: key.capitalize() for key, is_there in present.items() if is_there},
        found=found,
        best=max(scored, key=lambda run: run.summary.best_iou or 0.0, default=None),
        axis=zoomed_axis(found.runs),
        charts=charts,
        class_rows=class_rows,
        has_memory=any(summary.peak("peak_memory_gib") for summary in summaries),
    )
