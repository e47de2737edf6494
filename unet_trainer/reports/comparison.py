"""Several runs beside each other: scores, paired differences where the validation images are the same, settings, time, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unet_trainer.reports.score_sections import epoch_seconds, images_per_second
from unet_trainer.reports.score_statistics import Difference, SetScores, paired_difference, same_images, set_scores
from unet_trainer.runs.run_summary import RunSummary

# Where a run lies and how it was started says nothing of why it is better.
NOT_COMPARED = frozenset({"run_name", "checkpoint_dir", "resume"})


@dataclass(frozen=True)
class ComparedRun:
    summary: RunSummary
    name: str  # as it is shown: the folder's, with its parent where two have the same
    scores: SetScores | None  # of the best epoch's images; None: the run kept none
    iou: float | None  # of the best epoch
    difference: Difference | None  # to the first run, on the same images; None of the first, and where they are not the same

    @property
    def seconds(self) -> float:
        return epoch_seconds(self.summary)

    @property
    def images_per_second(self) -> float | None:
        return images_per_second(self.summary)

    @property
    def memory_gib(self) -> float | None:
        return max((value for _, value in self.summary.column("peak_memory_gib")), default=0.0) or None


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[ComparedRun]
    note: str  # about the validation images: whether differences are paired
    settings: Sequence[tuple[str, Sequence[Any]]]  # that differ: name and a value for each run, None where it is not known

    @property
    def best(self) -> ComparedRun | None:
        """The run with the highest IoU."""
        scored = [run for run in self.runs if run.iou is not None]
        return max(scored, key=lambda run: run.iou or 0.0, default=None)


def compare_runs(summaries: Sequence[RunSummary]) -> Comparison:
    """The first is the one that the others are compared with."""
    first = summaries[0]
    names = shown_names(summaries)
    runs = [
        ComparedRun(
            summary,
            name,
            set_scores(summary.image_scores),
            None if summary.best is None else summary.best.get("val_iou"),
            paired_difference(summary.image_scores, first.image_scores) if summary is not first else None,
        )
        for summary, name in zip(summaries, names, strict=True)
    ]
    return Comparison(runs, _pairing_note(runs), different_settings(summaries))


def shown_names(summaries: Sequence[RunSummary]) -> list[str]:
    names = [summary.name for summary in summaries]
    return [
        summary.name if names.count(summary.name) == 1 else f"{summary.folder.absolute().parent.name}/{summary.name}"
        for summary in summaries
    ]


def _pairing_note(runs: Sequence[ComparedRun]) -> str:
    first = runs[0]
    without = [run.name for run in runs if not run.summary.image_scores]
    others = [
        run.name
        for run in runs[1:]
        if run.summary.image_scores
        and first.summary.image_scores
        and not same_images(run.summary.image_scores, first.summary.image_scores)
    ]
    parts = []
    if any(run.difference is not None for run in runs):
        parts.append(f"Differences are to {first.name}, paired image by image.")
    if others:
        is_are = "was" if len(others) == 1 else "were"
        parts.append(
            f"{', '.join(others)} {is_are} not validated on the same images as {first.name}: their scores cannot be compared."
        )
    if without:
        has_have = "keeps" if len(without) == 1 else "keep"
        parts.append(f"{', '.join(without)} {has_have} no scores of single images, so there is no interval.")
    return " ".join(parts)


def different_settings(summaries: Sequence[RunSummary]) -> list[tuple[str, list[Any]]]:
    """Settings that two runs have with different values, in the order of the first run's. One that a run does not have, of an
    earlier version, is no difference."""
    names = list(dict.fromkeys(name for summary in summaries for name in summary.settings if name not in NOT_COMPARED))
    found = []
    for name in names:
        known = [summary.settings[name].value for summary in summaries if name in summary.settings]
        if any(value != known[0] for value in known):
            found.append((name, [summary.value(name) for summary in summaries]))
    return found
