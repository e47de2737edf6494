"""Which images a model is evaluated on: those of its run, or those of a folder that is named; checked against what the model knows.

Every file is read before the model sees the first one, so that all that does not fit is told at once. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config, is_demo_dir
from unet_trainer.datasets.class_statistics import class_ids, total_counts
from unet_trainer.datasets.dataset_report import DatasetReport, read_every_pair, unknown_value_lines
from unet_trainer.datasets.demo import ensure_demo
from unet_trainer.datasets.file_tree import resolved
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import depth_of, describe_reading
from unet_trainer.datasets.mask_evidence import MaskEvidence
from unet_trainer.datasets.mask_reading import choose_classes
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part
from unet_trainer.datasets.problems import Problem, Question, first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, ScanCache, open_scan_cache
from unet_trainer.datasets.shards import find_in_shards
from unet_trainer.datasets.split_csv import listed_contents, listed_images, read_split_csv
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import ImageSpec, depth_name
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, given_coding, show_value
from unet_trainer.system.console import Console, counted
from unet_trainer.training.run_folder import SPLIT_CSV

if TYPE_CHECKING:  # it needs torch
    from unet_trainer.model.segmenter import SegmenterSpec

SplitName = Literal["train", "val", "test", "all"]
RUN_CONFIG = "config.yaml"
LAYOUT_KEYS = ("image_dir", "mask_dir", "mask_suffix", "split_file")


@dataclass(frozen=True)
class DataSource:
    """The settings of the data, and whether they are those of the model's run."""

    config: Config
    run_folder: Path | None  # of the model
    is_own: bool  # the data of the run, divided as the run divided it

    @property
    def data_dir(self) -> Path:
        return Path(self.config.data_dir)


@dataclass(frozen=True)
class EvaluationData:
    """Pairs that fit the model, with the facts of their files, in the same order."""

    source: DataSource
    split: SplitName
    rule: str  # how they were found
    pairs: Sequence[Pair]
    images: Sequence[ImageFacts]
    masks: Sequence[MaskFacts]
    coding: MaskCoding


def run_folder_of(model_file: Path) -> Path | None:
    """The run that a model's file lies in, if it does."""
    return model_file.parent if (model_file.parent / RUN_CONFIG).is_file() else None


def find_validation_pairs(model: Path, data_dir: Path | None = None) -> tuple[Pair, ...]:
    """Of the run that the model's file lies in. `data_dir`: where the data are now, if not where the run had them.

    Raises DataError with the reason if the split or the data are not there.
    """
    run = model.parent
    if not (run / SPLIT_CSV).is_file():
        raise DataError(f"{run} has no {SPLIT_CSV}, which names them")
    config_file = run / RUN_CONFIG
    if data_dir is None and not config_file.is_file():
        raise DataError(f"{run} has no config.yaml, which says where the data are; data_dir=FOLDER says it too")
    config = load_config(config_file) if config_file.is_file() else Config(checkpoint_dir=str(run.parent))
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=str(data_dir))
    data_dir = Path(config.data_dir)
    stored = find_in_shards(config)
    if stored is None and not data_dir.is_dir():
        raise DataError(f"data_dir: {data_dir} does not exist here; data_dir=FOLDER names another place")
    found = read_split_csv(run / SPLIT_CSV, data_dir, [*stored.pairs, *stored.test] if stored else ())
    return tuple(pair for pair in found.pairs if pair.part == "val")


def find_source(model_file: Path, overrides: Mapping[str, str], num_classes: int) -> DataSource:
    """The settings of the run, or of another folder if data_dir names one. Raises UserError."""
    folder = run_folder_of(model_file)
    words = [f"{name}={value}" for name, value in overrides.items()]
    own = None if folder is None else load_config(folder / RUN_CONFIG)
    given = overrides.get("data_dir")
    if given is not None and (own is None or not _is_same(Path(given), Path(own.data_dir))):
        return DataSource(load_config({"num_classes": num_classes}, words), folder, is_own=False)
    if own is None or folder is None:
        raise UserError(
            f"data_dir: {model_file} lies in no run's folder, so nothing says what to evaluate it on; "
            "name the images: data_dir=FOLDER with images/ and masks/"
        )
    is_own = not any(name in overrides for name in LAYOUT_KEYS)
    return DataSource(load_config(folder / RUN_CONFIG, words), folder, is_own)


def load_evaluation_data(
    source: DataSource, spec: SegmenterSpec, overrides: Mapping[str, str], split: SplitName | None, console: Console
) -> EvaluationData:
    """Finds the pairs, reads every file, and checks that the model knows such images and masks. Raises UserError."""
    config = source.config
    if is_demo_dir(config.data_dir) and ensure_demo(source.data_dir):
        console.say(f"Made the demo dataset in {source.data_dir}")
    found, chosen = find_split(source, split)
    report = read_every_pair(found, config.resize_masks, _scan_cache(source), console, config.worker_timeout)
    _refuse_other_kinds(report, spec.image)
    coding = _choose_coding(report, spec, config, overrides)
    _refuse_other_masks(report, coding, spec)
    if report.blocking_message or not report.pairs:
        raise DataError(report.blocking_message or f"{found.rule}: there is no pair to evaluate on")
    for notice in report.notices:
        console.note(notice)
    return EvaluationData(source, chosen, found.rule, report.pairs, report.images, report.masks, coding)


def find_split(source: DataSource, split: SplitName | None) -> tuple[FoundPairs, SplitName]:
    """The pairs of a split, and which one it is: without a wish val, or all pairs of a folder that is not divided."""
    if source.is_own:
        return _own_pairs(source, split or "val"), split or "val"
    found = _find_parts(source, split)
    parts = {pair.part for pair in found.pairs}
    if split is None:
        split = "val" if "val" in parts else "test" if parts == {"test"} else "all"
    if split == "all":
        return found, split
    if split not in parts:
        has = ", ".join(sorted(part for part in parts if part)) or "pairs that are not divided (--split all)"
        raise UserError(f"--split: {source.data_dir} has no {split}; it has {has} ({found.rule})")
    return dataclasses.replace(found, pairs=tuple(pair for pair in found.pairs if pair.part == split)), split


def _own_pairs(source: DataSource, split: SplitName) -> FoundPairs:
    """As the run divided its data; `test` is what neither trained nor validated."""
    assert source.run_folder is not None
    if split == "test":
        return _test_pairs(source)
    table = source.run_folder / SPLIT_CSV
    if not table.is_file():
        raise UserError(f"{table} is missing, which says what the run was validated on; name the images: data_dir=FOLDER")
    try:
        found = read_split_csv(table, source.data_dir, _converted(source))
    except DataError as error:
        raise DataError(f"{error}\nIf the data have moved: data_dir=FOLDER split_file={shlex.quote(str(table))}") from None
    pairs = tuple(pair for pair in found.pairs if split in (pair.part, "all"))
    test = _test_or_none(source) if split == "all" else None
    return FoundPairs(pairs + (test.pairs if test is not None else ()), f"{table}{'' if test is None else f' and {test.rule}'}")


def _converted(source: DataSource) -> Sequence[Pair]:
    """Pairs whose masks are made from other files, which split.csv names by where they lay when it was written."""
    try:
        now = find_dataset(source.config)
    except DataError:  # reading the table says what is missing
        return ()
    return [*now.pairs, *now.test]


def _find_parts(source: DataSource, split: SplitName | None) -> FoundPairs:
    """The pairs of a folder by its layout or by split_file, with their parts; test is looked for where it may be wanted."""
    if split == "test":
        return _test_pairs(source)
    found = find_dataset(source.config)
    return dataclasses.replace(found, pairs=found.pairs + found.test) if split == "all" else found


def _test_or_none(source: DataSource) -> FoundPairs | None:
    try:
        return _test_pairs(source)
    except UserError:
        return None


def _test_pairs(source: DataSource) -> FoundPairs:
    found = find_dataset(source.config)
    if not found.test:
        raise UserError(
            f"--split: {source.data_dir} has no test images with masks; "
            "need test/images and test/masks there, or rows of test in split_file=FILE.csv"
        )
    return FoundPairs(found.test, f"test of {found.rule}")


def _scan_cache(source: DataSource) -> ScanCache | None:
    """Where runs remember what they read; nothing is remembered where there are no runs."""
    runs = Path(source.config.checkpoint_dir) if source.run_folder is None else source.run_folder.parent
    return open_scan_cache(source.data_dir, runs) if runs.is_dir() else None


def _refuse_other_kinds(report: DatasetReport, spec: ImageSpec) -> None:
    report.notices += describe_reading(report.images, spec.channels, spec.nodata, spec.ignores_nodata, can_be_set=False)
    report.images = [image.as_read(spec.channels, spec.nodata) for image in report.images]
    lines = []
    for pair, image in zip(report.pairs, report.images, strict=True):
        if depth_of(image) != spec.depth:
            lines.append(f"{pair.image}: {depth_name(depth_of(image))}; the model was trained on {depth_name(spec.depth)} images")
        elif image.channels not in (1, spec.channels):
            lines.append(f"{pair.image}: {counted(image.channels, 'channel')}; the model was trained on images of {spec.channels}")
    if lines:
        fix = "convert them to what the model was trained on"
        one, many = (f"{images} of a kind that the model does not know" for images in ("image", "images"))
        report.problems.append(Problem("kind", one, many, tuple(lines), fix))


def _choose_coding(report: DatasetReport, spec: SegmenterSpec, config: Config, overrides: Mapping[str, str]) -> MaskCoding:
    """The model's own, unless mask_values or ignore_value say what these masks mean."""
    coding = spec.coding
    if "mask_values" in overrides:
        if config.mask_values != "auto":
            return given_coding(config.mask_values, config.ignore_value, config.unknown_values == "ignore")
        ignored = given_coding("nonzero", config.ignore_value).ignored
        chosen = choose_classes(dataclasses.replace(config, num_classes=spec.num_classes), MaskEvidence(report.masks, ignored))
        if chosen is None:
            raise UserError("mask_values: auto cannot tell what the values in these masks mean; give the value of each class")
        return chosen.coding
    return dataclasses.replace(coding, ignore_value=config.ignore_value) if "ignore_value" in overrides else coding


def _refuse_other_masks(report: DatasetReport, coding: MaskCoding, spec: SegmenterSpec) -> None:
    names = ", ".join(f"{coding.describe(index)} → {name}" for index, name in enumerate(spec.id_names))
    order = "mask_values=[...] gives the value of each class of the model in these masks"
    lines = unknown_value_lines(report, coding)
    if lines:
        one, many = (f"{masks} with values that belong to no class of the model ({names})" for masks in ("mask", "masks"))
        report.problems.append(Problem("values", one, many, tuple(lines), f"{order}; ignore_value=N leaves a value out"))
        return
    ids = {class_id for mask in report.masks for class_id in class_ids(mask, coding)}
    values = sorted(total_counts(report.masks))
    if len(values) > 1 and not ids - {0, IGNORED, UNKNOWN}:
        shown = first_few((show_value(value) for value in values), 8)
        report.questions.append(
            Question(
                f"mask_values: the masks hold the values {shown}, and by the model's coding ({names}) none of them is any class "
                f"but {spec.id_names[0]}; {order}"
            )
        )
    elif not ids - {0, IGNORED, UNKNOWN}:
        report.notices.append(f"no mask holds any class but {spec.id_names[0]}")


def trained_on(data: EvaluationData, run_folder: Path | None) -> list[Pair]:
    """Those of the pairs whose images the run of this folder was trained on."""
    listed = None if run_folder is None else _listed(run_folder, "train")
    return [] if listed is None else [pair for pair in data.pairs if listed.holds(pair)]


def check_comparable(data: EvaluationData, this: Path, other: Path) -> None:
    """Raises UserError unless both models can be compared on these images: on their own splits these must be the same."""
    folder = run_folder_of(other)
    if not data.source.is_own or folder is None or data.split not in ("train", "val"):
        return
    theirs = _listed(folder, data.split)
    if theirs is None:
        return
    num_same = sum(theirs.holds(pair) for pair in data.pairs)
    if num_same == len(data.pairs) == len(theirs.images):
        return
    seen = trained_on(data, folder)
    leak = f"; {other} was trained on {len(seen)} of {this}'s, such as {seen[0].image}" if seen and data.split == "val" else ""
    raise UserError(
        f"--compare: the {data.split} images of {this} and {other} differ ({len(data.pairs)} and {len(theirs.images)}, of which "
        f"{num_same} are the same){leak}. Compare them on images that neither was trained on (data_dir=FOLDER), or train "
        f"both with one split: split_file={shlex.quote(str(this.parent / SPLIT_CSV))}"
    )


def check_same_classes(data: EvaluationData, this: SegmenterSpec, other: SegmenterSpec, name: str) -> None:
    """Raises UserError unless both models have the same classes and, by their own coding, mean the same by these masks."""
    if list(this.id_names) != list(other.id_names):
        raise UserError(f"--compare: the classes of {name} are {', '.join(other.id_names)}; need {', '.join(this.id_names)}")
    if data.coding != this.coding:  # given by the user for these masks, for both models
        return
    values = np.array(sorted(total_counts(data.masks)))
    for value, mine, theirs in zip(values.tolist(), this.coding.encode(values), other.coding.encode(values), strict=True):
        if mine != theirs:
            meanings = [_meaning(int(class_id), this.id_names) for class_id in (mine, theirs)]
            raise UserError(f"--compare: mask value {show_value(value)} is {meanings[0]} here and {meanings[1]} for {name}")


def _meaning(class_id: int, id_names: Sequence[str]) -> str:
    return {IGNORED: "ignored", UNKNOWN: "no class"}.get(class_id) or id_names[class_id]


@dataclass(frozen=True)
class _Listed:
    """A part of a run's data."""

    images: set[Path]
    contents: set[str]  # digests of pairs

    def holds(self, pair: Pair) -> bool:
        """Wherever the files lie now: in a folder, or in shards of it."""
        return resolved(pair.image) in self.images or (bool(pair.content) and pair.content in self.contents)


def _listed(run_folder: Path, part: Part) -> _Listed | None:
    """None if the run does not say."""
    table = run_folder / SPLIT_CSV
    try:
        images = listed_images(table, Path(load_config(run_folder / RUN_CONFIG).data_dir), part)
        return _Listed(images, listed_contents(table, part))
    except UserError:
        return None


def _is_same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()
