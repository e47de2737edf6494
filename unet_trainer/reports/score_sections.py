"""What the model came to: headline, classes, confusion matrix, distribution over the images. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean, mean, median
from typing import Any

from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.reports.html_elements import Child, Html, element, figure, section, table
from unet_trainer.reports.number_texts import NONE, count, duration, percent, rate, score
from unet_trainer.reports.score_statistics import NUM_BINS, SetScores, histogram
from unet_trainer.runs.run_summary import EpochRecord, RunSummary
from unet_trainer.system.console import counted

FEW_IMAGES = 20  # with fewer, an interval is rough
MAX_MATRIX = 30  # classes in the confusion matrix
HEATS = 10  # shades of a cell
STATE_WORDS = {
    "running": "Running",
    "finished": "Finished",
    "stopped early": "Stopped early",
    "interrupted": "Interrupted",
    "failed": "Failed",
}


def state_pill(summary: RunSummary) -> Html:
    return element("span", STATE_WORDS[summary.state], class_=f"pill {summary.state.replace(' ', '-')}")


def baseline_of(summary: RunSummary) -> Baseline | None:
    """Of the best epoch's validation: the best prediction that needs no model."""
    best = summary.best
    if best is not None and best.confusion:
        num_classes = 1 if len(summary.class_names) < len(summary.id_names) else len(summary.class_names)
        return best_baseline(best.confusion, num_classes, summary.id_names)
    kept = (summary.result or {}).get("baseline_iou")
    return Baseline("one class everywhere", float(kept)) if isinstance(kept, int | float) else None


def epoch_seconds(summary: RunSummary) -> float:
    return sum(value for _, value in summary.column("seconds"))


def images_per_second(summary: RunSummary) -> float | None:
    values = [value for _, value in summary.column("images_per_second") if value > 0]
    return harmonic_mean(values) if values else None


def headline(summary: RunSummary, scores: SetScores | None) -> Html:
    """The first thing to see: the score, how sure it is, and what it means."""
    best, baseline = summary.best, baseline_of(summary)
    return element(
        "section",
        element("h2", "Result", id="result-title", class_="unseen"),
        _doubts(summary, scores, baseline),
        element("div", _score_card(summary, best, scores, baseline), _fact_cards(summary, best), class_="headline"),
        id="result",
        aria_labelledby="result-title",
    )


def _doubts(summary: RunSummary, scores: SetScores | None, baseline: Baseline | None) -> list[Html]:
    """What a reader must not overlook."""
    found = []
    value = None if summary.best is None else summary.best.get("val_iou")
    low = scores.interval[0] if scores is not None and scores.interval else value
    if baseline is not None and low is not None and low <= baseline.iou:
        found.append(
            f"The model is not clearly better than no model: predicting {baseline.prediction} gives IoU {score(baseline.iou)}."
        )
    found += [str(warning) for warning in (summary.result or {}).get("warnings") or []]
    failed = [event for event in summary.events if event.kind == "failed"]
    if summary.state == "failed" and failed:
        found.append(f"The run ended with an error: {failed[-1].text}")
    return [element("p", text, class_="banner", role="note") for text in found]


def _score_card(summary: RunSummary, best: EpochRecord | None, scores: SetScores | None, baseline: Baseline | None) -> Html:
    name = "IoU" if len(summary.class_names) == 1 else "Mean IoU"
    what = f"{name} on the validation images"
    value = None if best is None else best.get("val_iou")
    if value is None:
        missing = "No epoch has ended yet." if not summary.epochs else "No epoch has a score: validation has no pixel that counts."
        return element(
            "div", element("p", what, class_="label"), element("p", NONE, class_="big"), element("p", missing), class_="card hero"
        )
    lines = []
    if scores is not None and scores.interval is not None:
        low, high = scores.interval
        rough = "; so few images make it a rough one" if scores.num_images < FEW_IMAGES else ""
        images = counted(scores.num_images, "image")
        lines.append(element("p", f"95 % interval {score(low, 3)} – {score(high, 3)} (bootstrap over {images}{rough})"))
    else:
        lines.append(element("p", "No interval: the run kept no scores of its images.", class_="muted"))
    if baseline is not None:
        lines.append(
            element(
                "p", element("span", class_="tick-key"), f"{baseline.prediction} would give {score(baseline.iou)}", class_="muted"
            )
        )
    return element(
        "div",
        element("p", what, class_="label"),
        element("p", score(value), class_="big", id="best-iou"),
        scale(value, scores.interval if scores else None, baseline.iou if baseline else None),
        lines,
        class_="card hero",
    )


def scale(value: float, ends: tuple[float, float] | None, baseline: float | None, colour: int = 0) -> Html:
    """From 0 to 1: the interval as a band, the score as a dot, the baseline as a tick."""
    words = f"score {score(value)}"
    parts = [element("rect", x="0", y="9", width="100%", height="6", rx="3", class_="track")]
    if ends is not None:
        words += f", interval {score(ends[0], 3)} to {score(ends[1], 3)}"
        parts.append(
            element(
                "rect",
                x=_at(ends[0]),
                y="6",
                width=_at(max(0.004, ends[1] - ends[0])),
                height="12",
                rx="3",
                class_=f"band c{colour}",
            )
        )
    if baseline is not None:
        words += f", baseline {score(baseline)}"
        parts.append(element("rect", x=_at(baseline), y="3", width="3", height="18", class_="tick"))
    parts.append(element("circle", cx=_at(value), cy="12", r="6", class_=f"dot c{colour}"))
    return element("svg", parts, class_="scale", height="24", role="img", aria_label=f"On a scale from 0 to 1: {words}")


def _at(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def _fact_cards(summary: RunSummary, best: EpochRecord | None) -> list[Html]:
    planned = summary.num_epochs
    done = f"{len(summary.epochs)} of {counted(planned, 'epoch')}" if planned else counted(len(summary.epochs), "epoch")
    cards = []
    if best is not None:
        dice = best.get("val_dice")
        monitored = "" if summary.monitor == "val_iou" else f"by {summary.monitor}"
        cards += [("Dice", score(dice), "of the best epoch"), ("Best epoch", str(best.number), monitored or f"{done} done")]
    startup = summary.startup_seconds
    cards.append(("Time", duration(epoch_seconds(summary)), f"in epochs; start-up {duration(startup)}" if startup else "in epochs"))
    cards.append(("Images/s", rate(images_per_second(summary)), "in training"))
    return [
        element(
            "div",
            element("p", label, class_="label"),
            element("p", value, class_="value"),
            element("p", note, class_="muted small"),
            class_="card",
        )
        for label, value, note in cards
    ]


def class_section(summary: RunSummary, scores: SetScores | None) -> Html | None:
    """Scores of each class at the best epoch, with its share of the pixels."""
    best = summary.best
    names, per_class = summary.class_names, summary.per_class_iou
    if best is None or not per_class:
        return None
    shares = {str(entry.get("name")): entry.get("share") for entry in _entries(summary.data.get("classes"))}
    in_val = _val_shares(summary, best)
    rows = []
    for index, name in enumerate(names):
        found = best.classes.get(name)
        ends = scores.class_intervals.get(name) if scores is not None else None
        value = per_class.get(name)
        rows.append(
            [
                [swatch(index), name],
                element("span", score(value), _bar(value, index), class_="with-bar"),
                NONE if ends is None else f"{score(ends[0], 3)} – {score(ends[1], 3)}",
                *(score(getattr(found, kind)) if found else NONE for kind in ("dice", "precision", "recall")),
                percent(shares.get(name)),
                percent(in_val.get(name)),
            ]
        )
    header = ["class", "IoU", "95 % interval", "Dice", "precision", "recall", "share of all pixels", "of validation"]
    note = "A class that is in neither truth nor prediction has no score and shows as –."
    return section(
        "classes",
        "Classes",
        element("p", f"At the best epoch, {best.number}. {note}", class_="muted"),
        element("div", table(header, rows, "Scores of each class at the best epoch"), class_="panel"),
    )


def swatch(colour: int) -> Html:
    box = element("rect", width="12", height="12", rx="3", class_=f"fill c{colour % 8}")
    return element("svg", box, class_="swatch", width="12", height="12", aria_hidden="true")


def _bar(value: float | None, colour: int) -> Html:
    parts = [element("rect", width="100%", height="8", rx="4", class_="track")]
    if value is not None:
        parts.append(element("rect", width=_at(value), height="8", rx="4", class_=f"fill c{colour % 8}"))
    return element("svg", parts, class_="bar", height="8", aria_hidden="true")


def _entries(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _val_shares(summary: RunSummary, best: EpochRecord) -> dict[str, float]:
    if not best.confusion:
        return {}
    totals = [sum(row) for row in best.confusion]
    whole = max(1, sum(totals))
    return {name: total / whole for name, total in zip(summary.id_names, totals, strict=False)}


def confusion_section(summary: RunSummary) -> Html | None:
    """Of the best epoch: which class is taken for which."""
    best = summary.best
    if best is None or not best.confusion:
        return None
    names, matrix = summary.id_names, best.confusion
    shown, note = _most_confused(matrix)
    in_truth = [sum(row) for row in matrix]
    predicted = [sum(row[column] for row in matrix) for column in range(len(matrix))]
    head = element(
        "tr",
        element("th", "truth ↓ prediction →", scope="col", class_="corner"),
        [element("th", names[column], scope="col", class_="number") for column in shown],
    )
    body = []
    for row in shown:
        cells = []
        for column in shown:
            number = matrix[row][column]
            of_truth = number / in_truth[row] if in_truth[row] else None
            of_predicted = number / predicted[column] if predicted[column] else None
            cells.append(
                element(
                    "td",
                    element("span", percent(of_truth), class_="by-truth"),
                    element("span", percent(of_predicted), class_="by-prediction"),
                    element("span", count(number), class_="by-pixels"),
                    class_=f"number heat h{_heat(of_truth)} p{_heat(of_predicted)}{' diagonal' if row == column else ''}",
                )
            )
        body.append(element("tr", element("th", names[row], scope="row"), cells))
    caption = f"Confusion matrix of epoch {best.number}: rows are the truth, columns the prediction"
    whole = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", head),
        element("tbody", body),
        id="matrix",
        data_show="truth",
    )
    options = [
        element("option", text, value=value)
        for value, text in (
            ("truth", "share of the truth (rows add up to 100 %)"),
            ("prediction", "share of the prediction (columns do)"),
            ("pixels", "pixels"),
        )
    ]
    return section(
        "confusion",
        "Confusion matrix",
        element("p", _largest_confusion(matrix, names, in_truth), note, class_="muted"),
        element(
            "div",
            element("p", element("label", "Show ", element("select", options, id="matrix-show")), class_="controls"),
            element("div", whole, class_="scroller", tabindex="0", role="region", aria_label=caption),
            class_="panel",
        ),
    )


def _heat(share: float | None) -> int:
    return 0 if share is None else min(HEATS, round(HEATS * share))


def _most_confused(matrix: Sequence[Sequence[int]]) -> tuple[list[int], str]:
    """Ids to show, in their order; with many classes those with the most wrong pixels."""
    ids = list(range(len(matrix)))
    if len(ids) <= MAX_MATRIX:
        return ids, ""

    def num_wrong(index: int) -> int:
        return sum(matrix[index]) + sum(row[index] for row in matrix) - 2 * matrix[index][index]

    shown = sorted(sorted(ids, key=num_wrong, reverse=True)[:MAX_MATRIX])
    return shown, f" The {MAX_MATRIX} of {len(ids)} classes with the most wrong pixels are shown."


def _largest_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], in_truth: Sequence[int]) -> str:
    wrong = [
        (matrix[row][column] / in_truth[row], row, column)
        for row in range(len(matrix))
        for column in range(len(matrix))
        if row != column and in_truth[row] and matrix[row][column]
    ]
    if not wrong:
        return "No pixel of the validation images is predicted wrongly."
    share, row, column = max(wrong)
    return f"The largest confusion: {percent(share)} of {names[row]} is predicted as {names[column]}."


def distribution_figure(summary: RunSummary) -> Html | None:
    """How the validation images divide by their IoU."""
    scores = summary.image_scores
    values = [value for image in scores if (value := image.iou) is not None]
    if not values:
        return None
    counts, num_undefined = histogram(scores)
    middle, average = median(values), mean(values)
    words = f"{counted(len(values), 'image')}: median {score(middle, 3)}, mean {score(average, 3)}"
    words += f", worst {score(min(values), 3)}, best {score(max(values), 3)}"
    if num_undefined:
        words += f"; {counted(num_undefined, 'image')} without an IoU, because no class is in truth or prediction"
    marks = [{"x": middle, "text": f"median {score(middle, 3)}"}]
    data = {"counts": counts, "from": 0, "to": 1, "x": "IoU of an image", "unit": "image", "marks": marks}
    width = 1 / NUM_BINS
    rows: list[list[Child]] = [
        [f"{index * width:.2f} – {(index + 1) * width:.2f}", number] for index, number in enumerate(counts) if number
    ]
    return figure(
        "bars", data, "IoU of each validation image", words, table(["IoU", "images"], rows, "Images by IoU"), "distribution"
    )
