"""The pairs that a model is evaluated on: of its run, or of a folder that is named, checked against what it knows.
Every file is read before the model sees the first, so that one message has all that does not fit. Imports no torch."""

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
from unet_trainer.config.schema import Config
from unet_trainer.data.converted import Converter
from unet_trainer.data.dataset_notices import describe_reading, unknown_value_lines
from unet_trainer.data.dataset_report import DatasetReport, read_every_pair
from unet_trainer.data.find import find_dataset
from unet_trainer.data.formats.table import listed_files, read_split_csv
from unet_trainer.data.listing import resolved
from unet_trainer.data.mask_evidence import class_ids, total_counts
from unet_trainer.data.pairs import FoundPairs, Pair, Part, Problem, Question, first_few
from unet_trainer.data.scan import ImageFacts, MaskFacts, ScanCache, depth_of, open_scan_cache
from unet_trainer.data.shards import find_in_shards
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, given_coding, show_value
from unet_trainer.loading.sample_reader import kind_difference
from unet_trainer.runs.folder import CONFIG_YAML, SPLIT_CSV
from unet_trainer.system.console import Console

if TYPE_CHECKING:  # it needs torch
    from unet_trainer.model.segmenter import SegmenterSpec

SplitName = Literal["train", "val", "test", "all"]
LAYOUT_KEYS = {"image_dir", "mask_dir", "mask_suffix", "split_file"}


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
    """The run that a model's file lies in, if any. A config.yaml that is empty would mean the data of the demo."""
    config_file = model_file.parent / CONFIG_YAML
    return model_file.parent if config_file.is_file() and config_file.stat().st_size else None


def find_validation_pairs(model: Path, data_dir: Path | None = None) -> tuple[Pair, ...]:
    """Those of the run that the model's file lies in. `data_dir`: where the data are now. Raises DataError."""
    folder = run_folder_of(model)
    if folder is None or not (folder / SPLIT_CSV).is_file():
        raise DataError(f"{model.parent} does not hold both {SPLIT_CSV} and {CONFIG_YAML}, which name them")
    config = load_config(folder / CONFIG_YAML)
    config = config if data_dir is None else dataclasses.replace(config, data_dir=str(data_dir))
    stored = find_in_shards(config)
    if stored is None and not Path(config.data_dir).is_dir():
        raise DataError(f"data_dir: {config.data_dir} does not exist here; data_dir=FOLDER names another place")
    return tuple(pair for pair in _read_split(folder, config, stored) if pair.part == "val")


def _read_split(run_folder: Path, config: Config, now: FoundPairs | None) -> tuple[Pair, ...]:
    """The table that the run wrote. Masks that are made from other files are found among the pairs of `now`."""
    data_dir = Path(config.data_dir)
    return read_split_csv(run_folder / SPLIT_CSV, data_dir, now, Converter(data_dir, Path(config.checkpoint_dir))).pairs


def find_source(model_file: Path, overrides: Mapping[str, str], num_classes: int) -> DataSource:
    """The settings of the run, or of another folder if data_dir names one. Raises UserError."""
    folder = run_folder_of(model_file)
    words = [f"{name}={value}" for name, value in overrides.items()]
    own = None if folder is None else load_config(folder / CONFIG_YAML)
    data_dir = overrides.get("data_dir")
    if data_dir is not None and (own is None or Path(data_dir).resolve() != Path(own.data_dir).resolve()):
        return DataSource(load_config({"num_classes": num_classes}, words), folder, is_own=False)
    if folder is None:
        need = "data_dir=FOLDER with images/ and masks/"
        raise UserError(f"data_dir: {model_file} is not in a run folder; name the images: {need}")
    return DataSource(load_config(folder / CONFIG_YAML, words), folder, is_own=LAYOUT_KEYS.isdisjoint(overrides))


def load_evaluation_data(
    source: DataSource, spec: SegmenterSpec, overrides: Mapping[str, str], split: SplitName | None, console: Console
) -> EvaluationData:
    """Find the pairs, read every file, and check that the model knows such images and masks. Raises UserError."""
    config = source.config
    found, chosen = find_split(source, split, console)
    runs = Path(config.checkpoint_dir) if source.run_folder is None else source.run_folder.parent
    nodata = spec.image.nodata[0] if spec.image.is_nodata_set else config.nodata
    # Nothing is kept where there are no runs.
    cache = open_scan_cache(source.data_dir, runs, nodata) if runs.is_dir() else ScanCache(None, nodata)
    report = read_every_pair(config, found, cache, console)
    report = _refuse_other_images(report, spec.image)
    coding = spec.coding
    if "mask_values" in overrides and config.mask_values != "auto":
        coding = given_coding(config.mask_values, config.ignore_value, config.unknown_values == "ignore")
    elif "ignore_value" in overrides:
        ignored = given_coding("nonzero", config.ignore_value).ignored or None
        coding = dataclasses.replace(coding, ignore_value=ignored)
    report = _refuse_other_masks(report, coding, spec)
    if report.blocking_message or not report.pairs:
        raise DataError(report.blocking_message or f"{found.rule}: there is no pair to evaluate on")
    for notice in report.notices:
        console.note(notice)
    return EvaluationData(source, chosen, found.rule, report.pairs, report.images, report.masks, coding)


def find_split(
    source: DataSource, split: SplitName | None, console: Console | None = None
) -> tuple[FoundPairs, SplitName]:
    """The pairs of a split, and which one it is: by default val, or all pairs of a folder that is not divided. The data
    of a run are divided as the run divided them; `test` is what neither trained nor validated."""
    table = source.run_folder / SPLIT_CSV if source.is_own and source.run_folder and split != "test" else None
    now: FoundPairs | None = None
    try:
        now = find_dataset(source.config, console)
    except DataError:
        if table is None:
            raise  # else the table of the run says what is missing
    found = now
    if table is not None:
        if not table.is_file():
            raise UserError(f"{table} is missing; name the images: data_dir=FOLDER")
        try:
            found = FoundPairs(_read_split(table.parent, source.config, now), str(table))
        except DataError as error:
            moved = f"If the data have moved: data_dir=FOLDER split_file={shlex.quote(str(table))}"
            raise DataError(f"{error}\n{moved}") from None
    assert found is not None
    test, parts = now.test if now else (), {pair.part for pair in found.pairs}
    if split is None:
        split = "val" if source.is_own or "val" in parts else "test" if parts == {"test"} else "all"
    if split == "all":
        rule = f"{found.rule} and test of {now.rule}" if source.is_own and now and test else found.rule
        return dataclasses.replace(found, pairs=found.pairs + test, rule=rule), split
    if split == "test" and test:
        return FoundPairs(test, f"test of {found.rule}"), split
    chosen = tuple(pair for pair in found.pairs if pair.part == split)
    if not chosen:
        has = ", ".join(sorted(part for part in parts if part)) or "pairs that are not divided (--split all)"
        fix = "; need test/images and test/masks there, or rows of test in split_file=FILE.csv"
        what = f"{source.data_dir} has no {split} images with masks; it has {has} ({found.rule})"
        raise UserError(f"--split: {what}{fix if split == 'test' else ''}")
    return dataclasses.replace(found, pairs=chosen), split


def _refuse_other_images(report: DatasetReport, spec: ImageSpec) -> DatasetReport:
    nodata = "ignore" if spec.ignores_nodata else "fill"
    notices = describe_reading(report.images, spec.channels, spec.nodata, nodata, can_be_set=False)
    images = [image.as_read(spec.channels) for image in report.images]
    lines = tuple(
        f"{pair.image}: {difference}"
        for pair, image in zip(report.pairs, images, strict=True)
        if (difference := kind_difference(depth_of(image), 1 if image.is_grey else image.channels, spec))
    )
    what = "of a kind that the model does not know"
    problem = Problem("kind", "image", what, lines, "convert them to what it was trained on")
    return report.plus(*notices, problem, images=images)


def _refuse_other_masks(report: DatasetReport, coding: MaskCoding, spec: SegmenterSpec) -> DatasetReport:
    names = ", ".join(f"{coding.describe(index)} → {name}" for index, name in enumerate(spec.id_names))
    order = "mask_values=[...] gives the value of each class of the model in these masks"
    if lines := unknown_value_lines(report.pairs, report.masks, coding):
        what, fix = f"with values that belong to no class of the model ({names})", "ignore_value=N leaves a value out"
        return report.plus(Problem("values", "mask", what, tuple(lines), f"{order}; {fix}"))
    values, first = sorted(total_counts(report.masks)), spec.id_names[0]
    if {class_id for mask in report.masks for class_id in class_ids(mask.counts, coding)} - {0, IGNORED, UNKNOWN}:
        return report
    if len(values) == 1:
        return report.plus(f"no mask holds any class but {first}")
    shown = first_few((show_value(value) for value in values), 8)
    by_coding = f"by the model's coding ({names}) none of them is any class but {first}; {order}"
    return report.plus(Question(f"mask_values: the masks hold the values {shown}, and {by_coding}"))


def check_comparable(data: EvaluationData, this: Path, other: Path) -> None:
    """Raises UserError unless the own splits of two models are the same, where these are evaluated."""
    folder = run_folder_of(other)
    if not data.source.is_own or folder is None or data.split not in ("train", "val"):
        return
    same, num_theirs = listed_pairs(data.pairs, folder, data.split)
    if num_theirs is None or len(same) == len(data.pairs) == num_theirs:
        return
    differ = f"differ ({len(data.pairs)} and {num_theirs}, of which {len(same)} are the same)"
    fix = f"name others (data_dir=FOLDER), or train both with split_file={shlex.quote(str(this.parent / SPLIT_CSV))}"
    raise UserError(f"--compare: the {data.split} images of {this} and {other} {differ}; {fix}")


def listed_pairs(pairs: Sequence[Pair], run_folder: Path, part: Part) -> tuple[list[Pair], int | None]:
    """Those of the pairs that are in this part of a run's data, in a folder or in shards of it, and how many that part
    has; None: the run does not say."""
    try:
        data_dir = Path(load_config(run_folder / CONFIG_YAML).data_dir)
        images, contents = listed_files(run_folder / SPLIT_CSV, data_dir, part)
    except UserError:
        return [], None
    known = set(images)
    same = [pair for pair in pairs if resolved(pair.image) in known or (pair.content and pair.content in contents)]
    return same, len(images)


def check_same_classes(data: EvaluationData, this: SegmenterSpec, other: SegmenterSpec, name: str) -> None:
    """Raises UserError unless both models have the same classes and, by their own coding, read these masks alike."""
    if list(this.id_names) != list(other.id_names):
        names = [", ".join(spec.id_names) for spec in (other, this)]
        raise UserError(f"--compare: the classes of {name} are {names[0]}; need {names[1]}")
    values = np.array(sorted(total_counts(data.masks)))
    differing = values[this.coding.encode(values) != other.coding.encode(values)]
    if data.coding == this.coding and len(differing):  # else set by the user for these masks, for both models
        raise UserError(f"--compare: mask value {show_value(differing[0])} is another class, or none, for {name}")
