"""python train_unet.py evaluate: scores of a trained model on images with masks, at the images' own size."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, split_words
from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import NumberFormat
from unet_trainer.config.load import check_onnx, load_config
from unet_trainer.config.parsers import tile_side
from unet_trainer.system.console import Console, aligned, counted, cut, score_text

if TYPE_CHECKING:  # a typo is answered before torch and OpenCV are loaded
    from unet_trainer.inference.evaluate import EvaluatedSet
    from unet_trainer.inference.evaluation_data import EvaluationData
    from unet_trainer.inference.predictor import Predictor

SPLITS = ("val", "test", "train", "all")
# Settings that say which images, and what their masks mean; all others are the model's own.
DATA_KEYS = (
    "data_dir", "image_dir", "mask_dir", "mask_suffix", "split_file", "resize_masks", "mask_values", "ignore_value",
    "unpaired", "checkpoint_dir",
)  # fmt: skip
FEW_IMAGES = 20  # with fewer, an interval is rough
FOLDER = "evaluation"
AS_TRAINED = "as-trained"
# Of the tables.
WIDTH = 100
MAX_NAME, MAX_LONG_NAME = 22, 36
MAX_CONFUSION = 7  # class ids in a confusion matrix that is printed
NUM_CONFUSED = 5
TITLES = {"iou": "IoU", "dice": "Dice", "boundary_iou": "boundary IoU", "cldice": "clDice"}  # other names are titles
COUNTS = {"images_with_a_score": "images", "empty_truths": "no truth", "empty_predictions": "no pred."}


def main(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    given = read_arguments(arguments)
    load_config({"device": given.device})
    names, overrides = split_words(given.words, "evaluate", DATA_KEYS)
    if len(names) != 1:
        command = "python train_unet.py evaluate RUN|FILE (a run's folder, .pt or .onnx)"
        raise UserError(f"evaluate takes one model, got {', '.join(names) or 'none'}: {command}")
    check_options(given)
    for model in (names[0], given.compare):
        check_onnx(model)

    from unet_trainer.inference import evaluation_data as inputs
    from unet_trainer.inference.engine import find_model
    from unet_trainer.inference.evaluate import make_folder, write_evaluation
    from unet_trainer.inference.scores import compare, summarise

    console, runs = Console(), Path(overrides.get("checkpoint_dir") or script_config(()).checkpoint_dir)
    file = find_model(names[0], runs, given.raw)
    other_file = None if given.compare is None else find_model(given.compare, runs, given.raw)
    predictor = load(given, file, console, given.precision)
    spec, card = predictor.spec, predictor.engine.card
    source = inputs.find_source(file, overrides, spec.num_classes)
    folder = given.out or (source.run_folder and source.run_folder / FOLDER)
    data = inputs.load_evaluation_data(source, spec, overrides, given.split, console)
    other = None
    if other_file is not None:
        inputs.check_comparable(data, file, other_file)
        other = load(given, other_file, console, given.precision)
        inputs.check_same_classes(data, spec, other.spec, str(other_file))
    if folder is not None:
        make_folder(folder, is_named=given.out is not None)
    where = {"data_dir": source.config.data_dir, "split": data.split, "rule": data.rule}
    console.say(f"Evaluating {file}")
    console.fact("Model", f"{spec.architecture}, {spec.encoder}{card.describe()}; {predictor.engine.description}")
    console.fact("Data", f"{counted(len(data.pairs), 'image')} of {where['data_dir']}: {data.split}, by {data.rule}")
    threshold = "" if given.threshold is None else f", foreground from a probability of {given.threshold:g} on"
    console.fact("Scored", f"at the images' own size{predictor.describe_input()}{threshold}")
    for each in [file] if other_file is None else [file, other_file]:
        run_folder = inputs.run_folder_of(each)
        if run_folder is None:
            console.note(f"{each} is not in a run folder: whether it was trained on these images cannot be told")
        elif seen := inputs.listed_pairs(data.pairs, run_folder, "train")[0]:
            some = f"{len(seen)} of these images, such as {seen[0].image}"
            console.warn(f"{each} was trained on {some}: its scores are too good")
    evaluated = evaluate_model(predictor, data, given, console)
    summary = summarise(evaluated, spec.class_names, spec.id_names)
    comparison, lines = None, summary_lines(summary)
    if other is not None:
        comparison = compare(evaluated, evaluate_model(other, data, given, console), spec.class_names)
        lines += ["", *comparison_lines(comparison, summary["num_images"], str(other_file))]
    for line in ["", *lines]:
        console.say(line)
    say_doubts(summary, predictor, data, given, console)
    if folder is None:
        console.note(f"nothing was written: {file} is not in a run folder; --out DIR keeps scores and pictures")
        return
    settings = {name: getattr(given, name) for name in ("threshold", "tta", "raw")}
    tile = None if spec.fit == "resize" else list(predictor.tile) if predictor.blends else AS_TRAINED
    about = {"run": card.run_name, "epoch": card.epoch, "val_iou": card.val_iou, "version": card.version}
    content = {
        "model": {"file": str(file), **about, "architecture": spec.architecture, "encoder": spec.encoder},
        "data": where,
        "settings": {"engine": predictor.engine.description, **settings, "fit": spec.fit, "tile": tile},
        "compared_with": None if other_file is None else str(other_file),
        **summary,
        "comparison": comparison,
    }
    write_evaluation(folder, content, evaluated, data, spec)
    console.say(f"Scores: {folder / 'evaluation.json'} | images, worst first: {folder / 'evaluation.csv'}")
    console.say(f"Pictures of the {counted(len(evaluated.worst), 'worst image')}: {folder / 'worst'}")


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    what = "Scores of a trained model on images with masks, at the images' own size (docs/metrics.md defines them)."
    words = f"a run's folder or name, a .pt or .onnx file; and the images, if not its own: {', '.join(DATA_KEYS)}"
    parser = CommandParser("evaluate", what, ("RUN|FILE | key=value", words), "tta threshold raw device")
    what = "which images; without it val, or all of a data_dir that is not divided into train and val"
    parser.add_argument("--split", choices=SPLITS, help=what)
    parser.add_argument("--compare", metavar="RUN|FILE", help="another model, on the same images: paired differences")
    parser.add_argument("--cldice", action="store_true", help="clDice as well, for thin structures (takes longer)")
    what = "fit: crop: side of the tiles, a multiple of 32; without it as predict, the one that training chose; "
    what += f"{AS_TRAINED}: those of training's validation, not blended"
    parser.add_argument("--tile", metavar=f"N|{AS_TRAINED}", help=what)
    formats = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--precision", choices=formats, default="auto", help="auto: bfloat16 on a GPU that has it")
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"where to write; without it RUN/{FOLDER}")
    return parser.parse_intermixed_args(arguments)


def check_options(given: argparse.Namespace) -> None:
    """Check those of evaluate and predict that need no model."""
    if given.threshold is not None and not 0 < given.threshold < 1:
        raise UserError(f"--threshold: got {given.threshold:g}; need a probability between 0 and 1, e.g. 0.5")
    if given.tile is not None and not ("split" in given and given.tile == AS_TRAINED):  # of evaluate alone
        tile_side(given.tile, "--tile")


def load(
    given: argparse.Namespace, file: Path, console: Console, precision: NumberFormat | Literal["auto"] = "auto"
) -> Predictor:
    """Load the model of evaluate and predict. Raises UserError for options that are not for it."""
    from unet_trainer.inference.engine import SymmetricEngine, load_engine
    from unet_trainer.inference.predictor import Predictor, chosen_tile

    engine = load_engine(file, given.device, precision, given.raw)
    spec, symmetries = engine.card.spec, engine.card.symmetries
    if given.threshold is not None and spec.num_ids != 2:
        raise UserError(f"--threshold: for a model of two class ids; {file} has {spec.num_ids}")
    tile = None if given.tile == AS_TRAINED else chosen_tile(given.tile, spec)
    if given.tta and not symmetries:
        console.note("--tta changes nothing: the model was trained without mirrored or turned images")
    elif given.tta:
        console.note(f"--tta: mean over the images that {', '.join(symmetries)} of training make")
        engine = SymmetricEngine(engine, symmetries)
    return Predictor(engine, tile, blends=given.tile != AS_TRAINED)


def evaluate_model(
    predictor: Predictor, data: EvaluationData, given: argparse.Namespace, console: Console
) -> EvaluatedSet:
    import torch

    from unet_trainer.inference.evaluate import evaluate

    try:
        with console.bar("Evaluating:", len(data.pairs), keep=False) as bar:
            found = evaluate(predictor, data, given.threshold, given.cldice, bar.tick)
    except torch.OutOfMemoryError:
        device = predictor.engine.device
        raise UserError(f"--device: {device} has no memory for the largest image; --device cpu takes longer") from None
    if (warning := predictor.take_scale_warning()) is not None:
        console.warn(warning)
    return found


def say_doubts(
    summary: dict[str, Any], predictor: Predictor, data: EvaluationData, given: argparse.Namespace, console: Console
) -> None:
    """What a reader of the numbers should know."""
    from unet_trainer.data.splits import OF_ONE_IMAGE

    if summary["num_images"] < FEW_IMAGES:
        images = counted(summary["num_images"], "image")
        console.note(f"{images}: intervals from so few are rough, and likely too narrow")
    if data.source.config.split == "blocks" and any(pair.box for pair in data.pairs):
        console.note(OF_ONE_IMAGE)
    trained, iou = predictor.engine.card.val_iou, summary["mean"]["dataset"]["iou"]["value"]
    if trained is None or iou is None or not data.source.is_own or data.split != "val" or given.raw:
        return
    reason = ""
    if abs(trained - iou) > 5e-5:
        blends = predictor.spec.fit == "crop" and predictor.blends
        reason = f" (training's tiles are not blended: --tile {AS_TRAINED})" if blends else " (other options or format)"
    console.say()
    console.say(f"Training's own validation of this model: IoU {trained:.4f}; here {iou:.4f}{reason}")


# The tables of what evaluation.json holds, at most WIDTH columns wide.


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the classes and of their mean, which with one class is the class itself."""
    return [*content["classes"], content["mean"]] if len(content["classes"]) > 1 else content["classes"]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """All tables of an evaluation, as `summarise` gives it."""
    names = list(summary["mean"]["dataset"])
    titles = [TITLES.get(name, name) for name in names]
    dataset, means = [["", titles[0], "95 % interval", *titles[1:]]], [["", *titles, *COUNTS.values()]]
    for row in _rows(summary):
        iou, *others = (score_text(row["dataset"][name]["value"]) for name in names)
        # of a class that no mask has, the pixels that are predicted as it
        interval = f"{row['predicted_pixels']} px predicted" if row.get("truth_pixels") == 0 else "–"
        if (ends := row["dataset"]["iou"]["interval"]) is not None:
            interval = f"{ends[0]:.4f} to {ends[1]:.4f}"
        dataset.append([row["name"], iou, interval, *others])
        scores, counts = map(score_text, row["mean_over_images"].values()), (str(row.get(name, "")) for name in COUNTS)
        means.append([row["name"], *scores, *counts])
    return [
        f"Whole set ({counted(summary['num_images'], 'image')} as one, from one confusion matrix):",
        *_table(dataset),
        "",
        "Mean over images (each scored by itself; images: those with the class in truth or prediction):",
        *_table(means),
        "",
        *confusion_lines(summary["confusion"]["rows_are_truth"], summary["confusion"]["ids"]),
    ]


def confusion_lines(rows: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Shares of the truth of each class: as a matrix, or of many classes the largest confusions alone."""
    shares = [[f"{count / sum(row):.1%}" if any(row) else "–" for count in row] for row in rows]
    if len(names) <= MAX_CONFUSION:
        header = ["truth ↓  predicted →", *(cut(name, (WIDTH - MAX_NAME) // len(names) - 3) for name in names)]
        table = _table([header, *([name, *row] for name, row in zip(names, shares, strict=True))])
        return ["Confusion (of the pixels of a class, the share predicted as each):", *table]
    wrong = [(count, i, j) for i, row in enumerate(rows) for j, count in enumerate(row) if count and i != j]
    lines = [
        f"  {cut(names[truth], MAX_NAME)} taken for {cut(names[found], MAX_NAME)}: {shares[truth][found]} of its pixels"
        for _, truth, found in sorted(wrong, reverse=True)[:NUM_CONFUSED]
    ]
    return ["Most confused:", *(lines or ["  nothing"])]


def comparison_lines(comparison: dict[str, Any], num_images: int, other: str) -> list[str]:
    """This model against another on the same images: IoU by class, every score in the mean, and what follows."""
    table = [["", "this", "other", "difference", "95 % interval", "draws above 0"]]
    *classes, overall = _rows(comparison)  # with one class, it alone
    for row, scores in [*((row, ["iou"]) for row in classes), (overall, overall["dataset"])]:
        for score in scores:
            found = row["dataset"][score]
            difference, ends, share = found["difference"], found["interval"], found["share_of_draws_above_0"]
            cells = [score_text(found["this"]), score_text(found["other"])]
            cells += ["–" if difference is None else f"{difference:+.4f}"]
            cells += ["–", "–"] if ends is None else [f"{ends[0]:+.4f} to {ends[1]:+.4f}", f"{share:.1%}"]
            table.append([f"{row['name']}: {TITLES.get(score, score)}", *cells])
    return [
        f"Whole set against {other}, on the same {counted(num_images, 'image')} (paired bootstrap):",
        *_table(table, MAX_LONG_NAME),
        verdict(overall["dataset"]["iou"]["difference"], overall["dataset"]["iou"]["interval"]),
    ]


def verdict(difference: float | None, ends: Sequence[float] | None) -> str:
    """What the interval of a difference says, in a sentence."""
    if difference is None or ends is None:
        return "  One image, or no IoU: nothing can be said of other images."
    if ends[0] <= 0 <= ends[1]:
        return "  The interval holds 0: these images do not tell which model has the better IoU."
    better = "This model is better" if difference > 0 else "The other model is better"
    return f"  {better} by {abs(difference):.4f} IoU; the interval does not hold 0."


def _table(rows: Sequence[Sequence[str]], max_name: int = MAX_NAME) -> list[str]:
    """Rows below a header: the first column to the left, the others to the right."""
    columns = list(zip(*rows, strict=True))
    room = min(max_name, WIDTH - 2 - sum(2 + max(map(len, column)) for column in columns[1:]))
    return [f"  {line}" for line in aligned([[cut(row[0], room), *row[1:]] for row in rows], to_the_right=True)]
