"""Which images a command works on. Imports no torch.

predict     what IMAGE, FOLDER, GLOB and CSV mean: the files, and the name of each result
evaluate    the pairs of the model's run, or of a folder that is named, checked against what the model knows. Every file
is read
            before the model sees the first one, so that all that does not fit is told at once
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config
from unet_trainer.datasets.annotations import describe_other_files
from unet_trainer.datasets.converted import Converter
from unet_trainer.datasets.dataset_report import DatasetReport, find_dataset, read_every_pair, unknown_value_lines
from unet_trainer.datasets.layouts import images_of_dataset, list_files, resolved
from unet_trainer.datasets.mask_evidence import class_ids, total_counts
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, Problem, Question, first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, ScanCache, depth_of, describe_reading, open_scan_cache
from unet_trainer.datasets.shard_store import ShardStore
from unet_trainer.datasets.shards import find_in_shards, open_shards
from unet_trainer.datasets.splits import listed_files, read_split_csv, read_table
from unet_trainer.images.file_bytes import DataError, is_file
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS
from unet_trainer.images.image_spec import ImageSpec, depth_name
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, given_coding, show_value
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import Console, counted
from unet_trainer.training.run_folder import CONFIG_YAML, SPLIT_CSV

if TYPE_CHECKING:  # it needs torch
    from unet_trainer.model.segmenter import SegmenterSpec

CSV_SUFFIX = ".csv"
NUM_NAMED = 5


class Input(NamedTuple):
    path: Path
    name: str  # of the result, with its folders, without extension: a/b for a/b.jpg


def find_inputs(words: Sequence[str], out: Path, note: Callable[[str], object] = lambda text: None) -> list[Input]:
    """The files in the order of the words, each once. Of a folder or pattern, results of predictions are left out,
    which is told by
    `note` of those that do not lie in `out`. Raises UserError.
    """
    if not all(word.strip() for word in words):  # Path("") would be the current folder
        raise UserError(
            "got an empty name; need images, folders, patterns or CSV files (is a variable of the shell not set?)"
        )
    paths = [Path(word) for word in words]
    alone = [path for path in paths if path.exists() and not path.is_dir() and path.suffix.lower() != CSV_SUFFIX]
    base = _common_folder(alone)
    found: list[Input] = []
    for word, path in zip(words, paths, strict=True):
        if path.is_dir():
            for others in describe_other_files(path):
                note(f"left out of {word}: {others}")
            files = list_files(path, follows=_leads_elsewhere(path))
            inputs = _from_folder(path, files, out, f"{word} holds no image", note)
            found += _without_masks(path, inputs, note)
        elif path.suffix.lower() == CSV_SUFFIX and path.exists():
            found += _from_csv(path)
        elif path.exists():
            found.append(Input(path, _absolute(path).relative_to(base).with_suffix("").as_posix()))
        elif glob.has_magic(word):
            matches = map(Path, sorted(glob.glob(word, recursive=True)))  # noqa: PTH207 # Path.glob takes no absolute one
            images = [match for match in matches if match.suffix.lower() in IMAGE_EXTENSIONS and match.is_file()]
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            found += _from_folder(fixed, images, out, f"{word} matches no image", note)
        else:
            raise UserError(f"{word}: no such file or folder")
    return list(dict.fromkeys(found))


def refuse_among_images(inputs: Sequence[Input], out: Path) -> None:
    """Raises UserError if a result would lie beside an image: what reads that folder next would take it for one."""
    folders = {folder.resolve() for folder in {path.parent for path, _ in inputs}}
    results = {(out / name).parent: out / f"{name}.png" for _, name in reversed(inputs)}  # the first of each folder
    beside = next((result for folder, result in results.items() if folder.resolve() in folders), None)
    if beside is not None:
        raise UserError(
            f"--out: got {out}; {beside} would lie among the images, and may be taken for one when they are read "
            "again. Choose "
            f"another folder, e.g. --out {out.parent / 'predictions'}, or add --among-images"
        )


def _without_masks(folder: Path, inputs: Sequence[Input], note: Callable[[str], object]) -> list[Input]:
    """Of a dataset, its images."""
    images = set(images_of_dataset(folder, [path for path, _ in inputs]))
    others = [path for path, _ in inputs if path not in images]
    if others:
        left_out = counted(len(others), "mask or other file is", "masks and other files are")
        note(f"{folder} is a dataset: {counted(len(images), 'image')} in it; {left_out} left out, such as {others[0]}")
    return [given for given in inputs if given.path in images]


def _leads_elsewhere(folder: Path) -> Callable[[Path], bool]:
    """Links to folders beside this one, each folder once: links may lead in a circle."""
    seen = {resolved(folder)}

    def follows(link: Path) -> bool:
        target = resolved(link)
        if any(target.is_relative_to(other) or other.is_relative_to(target) for other in seen):
            return False
        seen.add(target)
        return True

    return follows


def _common_folder(files: Sequence[Path]) -> Path:
    """The lowest one that holds them all."""
    return Path(os.path.commonpath([_absolute(path).parent for path in files])) if files else Path()


def _absolute(path: Path) -> Path:
    """Without resolving links: a result is named as the user named the image."""
    return Path(os.path.abspath(path))  # noqa: PTH100 # Path.absolute() keeps ..


def _from_folder(
    folder: Path, files: Iterable[Path], out: Path, complaint: str, note: Callable[[str], object]
) -> list[Input]:
    inside, parent = _absolute(out), _absolute(folder)
    may_hold_results = inside != parent and inside.is_relative_to(parent)
    images: list[Path] = []
    results: list[Path] = []
    for path in files:
        is_inside = may_hold_results and _absolute(path).is_relative_to(inside)
        # of a prediction that was killed, the mask that would tell may be missing
        if is_inside and path.suffix == ".npy":
            continue
        if not is_result(path):
            images.append(path)
        elif not is_inside:
            results.append(path)
    found = [Input(path, path.relative_to(folder).with_suffix("").as_posix()) for path in images]
    if not found:
        but = f" but {counted(len(results), 'result')} of predict" if results else ""
        raise UserError(f"{complaint}{but}; known are {', '.join(sorted(IMAGE_EXTENSIONS))}")
    if results:
        note(f"{counted(len(results), 'result')} of an earlier predict in {folder} left out, such as {results[0]}")
    return found


def _from_csv(path: Path) -> list[Input]:
    """Of the column `image`; a path is relative to the folder of the CSV file, to that of its data in the split.csv of
    a run, or to where the command is given."""
    header, rows = read_table(path, str(path))
    if "image" not in header:
        columns = first_few((f"{name:.60}" for name in header), 10) or "none"
        raise UserError(f"{path} has the columns {columns}; need one named image, with a path in each row")
    written = [cell for _, row in rows if (cell := row.get("image", "").strip(" \t"))]
    if not written:
        raise UserError(f"{path} names no image")
    data_dir, shards = _data_of_run(path) if path.name == SPLIT_CSV else (None, None)

    def locate(base: Path, cell: Path | str) -> Path:
        file = shards.find((base / cell).as_posix()) if shards is not None else None
        return file or base / cell

    bases = [*([data_dir] if data_dir is not None else []), path.parent, Path()]
    base = next((base for base in bases if is_file(locate(base, written[0]))), path.parent)
    is_outside = {path: path.is_absolute() or ".." in path.parts for path in map(Path, written)}
    above = _common_folder([base / path for path in is_outside if is_outside[path]])
    found = []
    for path_in_row in map(Path, written):
        name = _absolute(base / path_in_row).relative_to(above) if is_outside[path_in_row] else path_in_row
        found.append(Input(locate(base, path_in_row), name.with_suffix("").as_posix()))
    missing = [str(image) for image, _ in found if not is_file(image)]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of its {len(found)} images are not there: {first_few(missing, NUM_NAMED)}"
        )
    return found


def _data_of_run(split_csv: Path) -> tuple[Path | None, ShardStore | None]:
    """The data_dir of the run whose split.csv it is, and the shards that it names."""
    try:
        config = load_config(split_csv.parent / CONFIG_YAML)  # one that is not there is an error too
        return Path(config.data_dir), open_shards(config)
    except UserError:
        return None, None


# Pairs that a model is evaluated on.

SplitName = Literal["train", "val", "test", "all"]
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
    """The run that a model's file lies in, if it does. A config.yaml that is empty would mean the data of the demo."""
    config_file = model_file.parent / CONFIG_YAML
    return model_file.parent if config_file.is_file() and config_file.stat().st_size else None


def find_validation_pairs(model: Path, data_dir: Path | None = None) -> tuple[Pair, ...]:
    """Of the run that the model's file lies in. `data_dir`: where the data are now, if not where the run had them.

    Raises DataError with the reason if the split or the data are not there.
    """
    folder = run_folder_of(model)
    if folder is None or not (folder / SPLIT_CSV).is_file():
        raise DataError(f"{model.parent} does not hold both {SPLIT_CSV} and {CONFIG_YAML}, which name them")
    config = load_config(folder / CONFIG_YAML)
    config = config if data_dir is None else dataclasses.replace(config, data_dir=str(data_dir))
    stored = find_in_shards(config)
    if stored is None and not Path(config.data_dir).is_dir():
        raise DataError(f"data_dir: {config.data_dir} does not exist here; data_dir=FOLDER names another place")
    return tuple(pair for pair in _read_split(folder, config, stored).pairs if pair.part == "val")


def _read_split(run_folder: Path, config: Config, now: FoundPairs | None) -> FoundPairs:
    """The table that the run wrote. `now`: pairs that are there; masks that are made from other files are found among
    those."""
    converter = Converter(Path(config.data_dir), Path(config.checkpoint_dir))
    return read_split_csv(run_folder / SPLIT_CSV, Path(config.data_dir), now, converter)


def find_source(model_file: Path, overrides: Mapping[str, str], num_classes: int) -> DataSource:
    """The settings of the run, or of another folder if data_dir names one. Raises UserError."""
    folder = run_folder_of(model_file)
    words = [f"{name}={value}" for name, value in overrides.items()]
    own = None if folder is None else load_config(folder / CONFIG_YAML)
    given = overrides.get("data_dir")
    if given is not None and (own is None or Path(given).resolve() != Path(own.data_dir).resolve()):
        return DataSource(load_config({"num_classes": num_classes}, words), folder, is_own=False)
    if own is None or folder is None:
        raise UserError(
            f"data_dir: {model_file} is not in a run folder, or its config.yaml is empty, so nothing says what to "
            "evaluate it on; "
            "name the images: data_dir=FOLDER with images/ and masks/"
        )
    is_own = not any(name in overrides for name in LAYOUT_KEYS)
    return DataSource(load_config(folder / CONFIG_YAML, words), folder, is_own)


def load_evaluation_data(
    source: DataSource, spec: SegmenterSpec, overrides: Mapping[str, str], split: SplitName | None, console: Console
) -> EvaluationData:
    """Finds the pairs, reads every file, and checks that the model knows such images and masks. Raises UserError."""
    config = source.config
    found, chosen = find_split(source, split, console)
    runs = Path(config.checkpoint_dir) if source.run_folder is None else source.run_folder.parent
    nodata = spec.image.nodata[0] if spec.image.is_nodata_set else config.nodata
    # Nothing is kept where there are no runs.
    cache = open_scan_cache(source.data_dir, runs, nodata) if runs.is_dir() else ScanCache(None, nodata)
    report = read_every_pair(config, found, cache, console)
    _refuse_other_kinds(report, spec.image)
    coding = _choose_coding(spec, config, overrides)
    _refuse_other_masks(report, coding, spec)
    if report.blocking_message or not report.pairs:
        raise DataError(report.blocking_message or f"{found.rule}: there is no pair to evaluate on")
    for notice in report.notices:
        console.note(notice)
    return EvaluationData(source, chosen, found.rule, report.pairs, report.images, report.masks, coding)


def find_split(
    source: DataSource, split: SplitName | None, console: Console | None = None
) -> tuple[FoundPairs, SplitName]:
    """The pairs of a split, and which one it is: without a wish val, or all pairs of a folder that is not divided. The
    data of a run are divided as the run divided them; `test` is what neither trained nor validated."""
    now: FoundPairs | None = None
    try:
        now = find_dataset(source.config, console)
    except DataError:
        if not source.is_own or split == "test":
            raise  # else the table of the run says what is missing
    found = _own_pairs(source, now) if source.is_own and split != "test" else now
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
        fix = (
            "; need test/images and test/masks there, or rows of test in split_file=FILE.csv" if split == "test" else ""
        )
        raise UserError(
            f"--split: {source.data_dir} has no {split} images with masks; it has {has} ({found.rule}){fix}"
        )
    return dataclasses.replace(found, pairs=chosen), split


def _own_pairs(source: DataSource, now: FoundPairs | None) -> FoundPairs:
    """Of the table that the run wrote, see _read_split."""
    assert source.run_folder is not None
    table = source.run_folder / SPLIT_CSV
    if not table.is_file():
        raise UserError(
            f"{table} is missing, which says what the run was validated on; name the images: data_dir=FOLDER"
        )
    try:
        return FoundPairs(_read_split(source.run_folder, source.config, now).pairs, str(table))
    except DataError as error:
        raise DataError(
            f"{error}\nIf the data have moved: data_dir=FOLDER split_file={shlex.quote(str(table))}"
        ) from None


def _refuse_other_kinds(report: DatasetReport, spec: ImageSpec) -> None:
    nodata = "ignore" if spec.ignores_nodata else "fill"
    report.notices += describe_reading(report.images, spec.channels, spec.nodata, nodata, can_be_set=False)
    report.images = [image.as_read(spec.channels) for image in report.images]
    differences = [
        (pair.image, kind_difference(depth_of(image), 1 if image.is_grey else image.channels, spec))
        for pair, image in zip(report.pairs, report.images, strict=True)
    ]
    if lines := [f"{path}: {difference}" for path, difference in differences if difference]:
        fix = "convert them to what the model was trained on"
        report.problems.append(Problem("kind", "image", "of a kind that the model does not know", tuple(lines), fix))


def kind_difference(depth: str, channels: int, spec: ImageSpec) -> str:
    """What a model of this spec does not know about such images; empty if it knows them."""
    if depth != spec.depth:
        return f"{depth_name(depth)} values; the model was trained on {depth_name(spec.depth)} images"
    if channels == spec.channels or (channels, spec.channels) == (1, 3):  # grey is repeated, as in training
        return ""
    if (channels, spec.channels) == (3, 1):
        how = "convert them (image.convert('L') of PIL), or train with in_channels=3, which takes both"
        return f"RGB in colour; the model was trained on grey images: {how}"
    return f"{counted(channels, 'channel')}; the model was trained on images of {spec.channels}"


def _choose_coding(spec: SegmenterSpec, config: Config, overrides: Mapping[str, str]) -> MaskCoding:
    """The model's own, unless mask_values or ignore_value say what these masks mean."""
    if "mask_values" in overrides and config.mask_values != "auto":
        return given_coding(config.mask_values, config.ignore_value, config.unknown_values == "ignore")
    ignored = given_coding("nonzero", config.ignore_value).ignored
    return (
        dataclasses.replace(spec.coding, ignore_value=ignored or None) if "ignore_value" in overrides else spec.coding
    )


def _refuse_other_masks(report: DatasetReport, coding: MaskCoding, spec: SegmenterSpec) -> None:
    names = ", ".join(f"{coding.describe(index)} → {name}" for index, name in enumerate(spec.id_names))
    order = "mask_values=[...] gives the value of each class of the model in these masks"
    lines = unknown_value_lines(report, coding)
    if lines:
        what = f"with values that belong to no class of the model ({names})"
        report.problems.append(
            Problem("values", "mask", what, tuple(lines), f"{order}; ignore_value=N leaves a value out")
        )
        return
    values, first = sorted(total_counts(report.masks)), spec.id_names[0]
    if {class_id for mask in report.masks for class_id in class_ids(mask.counts, coding)} - {0, IGNORED, UNKNOWN}:
        return
    if len(values) == 1:
        report.notices.append(f"no mask holds any class but {first}")
        return
    shown = first_few((show_value(value) for value in values), 8)
    by_coding = f"by the model's coding ({names}) none of them is any class but {first}; {order}"
    report.questions.append(Question(f"mask_values: the masks hold the values {shown}, and {by_coding}"))


def check_comparable(data: EvaluationData, this: Path, other: Path) -> None:
    """Raises UserError unless both models can be compared on these images: on their own splits these must be the
    same."""
    folder = run_folder_of(other)
    if not data.source.is_own or folder is None or data.split not in ("train", "val"):
        return
    same, num_theirs = listed_pairs(data.pairs, folder, data.split)
    if num_theirs is None or len(same) == len(data.pairs) == num_theirs:
        return
    seen, _ = listed_pairs(data.pairs, folder, "train")
    leak = (
        f"; {other} was trained on {len(seen)} of {this}'s, such as {seen[0].image}"
        if seen and data.split == "val"
        else ""
    )
    raise UserError(
        f"--compare: the {data.split} images of {this} and {other} differ ({len(data.pairs)} and {num_theirs}, "
        "of which "
        f"{len(same)} are the same){leak}. Compare them on images that neither was trained on (data_dir=FOLDER), "
        "or train "
        f"both with one split: split_file={shlex.quote(str(this.parent / SPLIT_CSV))}"
    )


def listed_pairs(pairs: Sequence[Pair], run_folder: Path, part: Part) -> tuple[list[Pair], int | None]:
    """Those of the pairs that are in this part of a run's data, and how many that has; None: the run does not say.
    Wherever the
    files lie now: in a folder, or in shards of it."""
    table = run_folder / SPLIT_CSV
    try:
        images, contents = listed_files(table, Path(load_config(run_folder / CONFIG_YAML).data_dir), part)
    except UserError:
        return [], None
    known = set(images)
    return [
        pair for pair in pairs if resolved(pair.image) in known or (pair.content and pair.content in contents)
    ], len(images)


def check_same_classes(data: EvaluationData, this: SegmenterSpec, other: SegmenterSpec, name: str) -> None:
    """Raises UserError unless both models have the same classes and, by their own coding, mean the same by these
    masks."""
    if list(this.id_names) != list(other.id_names):
        raise UserError(
            f"--compare: the classes of {name} are {', '.join(other.id_names)}; need {', '.join(this.id_names)}"
        )
    if data.coding != this.coding:  # given by the user for these masks, for both models
        return
    meanings = {**dict(enumerate(this.id_names)), IGNORED: "ignored", UNKNOWN: "no class"}
    values = np.array(sorted(total_counts(data.masks)))
    for value, mine, theirs in zip(
        values.tolist(), this.coding.encode(values), other.coding.encode(values), strict=True
    ):
        if mine != theirs:
            raise UserError(
                f"--compare: mask value {show_value(value)} is {meanings[int(mine)]} here and "
                f"{meanings[int(theirs)]} for {name}"
            )
