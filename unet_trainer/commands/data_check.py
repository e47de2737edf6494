"""The report of `check`: what a dataset holds, what is wrong with it, its contact sheet and the settings for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.commands.config_file import file_header, train_command, write_config_file
from unet_trainer.commands.data_pictures import draw_sheet
from unet_trainer.commands.settings_block import block_lines, block_settings
from unet_trainer.config.dump import to_plain
from unet_trainer.config.schema import Config, id_names, is_demo_dir
from unet_trainer.datasets.answered_report import AnsweredReport, build_answered_report
from unet_trainer.datasets.class_statistics import absent_classes, class_ids, class_table, describe_classes, value_table
from unet_trainer.datasets.dataset_report import DatasetReport, describe_sizes
from unet_trainer.datasets.demo import ensure_demo
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.problems import Question, describe_problems
from unet_trainer.datasets.splits import describe_split
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import depth_name
from unet_trainer.images.mask_coding import as_written
from unet_trainer.system.console import Console, counted
from unet_trainer.system.names import json_text
from unet_trainer.system.output_files import check_output, write_output

IN_JSON = " (--json FILE lists them)"
WRITES = "--write FILE writes them as a config"


def check_data(config: Config, console: Console, json_file: Path | None = None, config_file: Path | None = None) -> bool:
    """Prints the report and writes the contact sheet; returns whether the data can be trained on as it is. Raises UserError.

    The settings that it ends with are written to `config_file`, and everything to `json_file`.
    """
    data_dir = Path(config.data_dir)
    if json_file is not None:
        check_output("--json", json_file)
    if is_demo_dir(data_dir) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    try:
        answered = build_answered_report(config, console)
    except DataError as error:  # no pairs can be found
        if json_file is not None:
            empty = AnsweredReport(config, DatasetReport(FoundPairs((), "")), questions=[Question(str(error))])
            _write_json(json_file, empty, None, [])
        raise
    report, shorten = answered.report, names_inside(data_dir)
    console.say(f"Dataset {data_dir.resolve().name}")
    _say_contents(answered, console, is_open=config.num_classes == "auto")
    sheet = draw_sheet(answered.config, report)
    if sheet is not None:
        console.fact("Pictures", f"{sheet} (the rarest classes first)")
    if report.coding is not None:
        absent = absent_classes(report.masks, report.coding, id_names(report.decided(answered.config)))
        if absent:
            answered.notices.append(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")
    for notice in answered.notices:
        console.note(shorten(notice))
    for problem in answered.problems:
        console.say()
        console.say(shorten(describe_problems([problem], where=IN_JSON)))
    for question in answered.questions:
        console.say()
        console.say(shorten(question.text))
    lines = block_lines(answered, shorten) if answered.is_settled or answered.is_settled_but_for_files else []
    console.say()
    console.say(_verdict(answered))
    for line in lines:
        console.say(f"  {line}")
    if config_file is not None:
        _write_config(config_file, answered, lines, console)
    if json_file is not None:
        _write_json(json_file, answered, sheet, lines)
    return answered.is_trainable


def names_inside(data_dir: Path) -> Callable[[str], str]:
    """Makes paths in a text relative to data_dir, which the settings name."""
    forms = {re.escape(str(form)) for form in (data_dir, data_dir.absolute(), data_dir.resolve())} - {re.escape(".")}
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(forms, key=len, reverse=True))})(/(?=[^\s:;,])|/?(?![\w./-]))")
    return lambda text: pattern.sub(lambda found: "" if found.group(1) == "/" else "data_dir", text)


def _verdict(answered: AnsweredReport) -> str:
    """Whether the data can be trained on, as a heading for the settings."""
    if answered.is_trainable:
        return f"Nothing stands in the way of training. The settings for this data ({WRITES}):"
    left = answered.report
    num_files = sum(len(problem.lines) for problem in left.problems)
    num_solved = sum(problem not in left.problems for problem in answered.problems)
    num_answered = num_solved + len(answered.questions) - len(left.questions)
    yours = f"{counted(num_answered, 'decision')} {_is(num_answered)} yours"
    answers = f"the likely {'answer is' if num_answered == 1 else 'answers are'} taken in these settings, and in what is said above"
    if answered.is_settled:
        return f"This data cannot be trained on yet: {yours}; {answers}. They train as they are ({WRITES}):"
    if not answered.is_settled_but_for_files:
        return "This data cannot be trained on, and no settings change that."
    what = f"This data cannot be trained on yet: {counted(num_files, 'problem')} with files"
    if num_answered:
        return f"{what}, and {yours}; {answers}. With the files mended, they train as they are ({WRITES}):"
    return f"{what}. With the files mended, these settings train as they are ({WRITES}):"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _write_config(path: Path, answered: AnsweredReport, lines: Sequence[str], console: Console) -> None:
    console.say()
    if not lines:
        console.say("--write: nothing was written, since there are no settings for this data.")
        return
    header = [f"# {line}" for line in file_header(path, "check", Path(answered.config.data_dir).resolve().name).splitlines()]
    write_config_file(path, "\n".join([*header, "", *lines, ""]))
    when = "It trains as it is" if answered.is_settled else "Once the files are mended, it trains as it is"
    console.say(f"Written. {when}: {train_command(path)}")


def _say_contents(answered: AnsweredReport, console: Console, is_open: bool) -> None:
    report = answered.report
    config = report.decided(answered.config)
    console.fact("Pairs", f"{len(report.found.pairs)} ({report.found.rule})")
    if report.kind is None:
        return
    depths = Counter(f"{depth_name(image.dtype)} with {counted(image.channels, 'channel')}" for image in report.images)
    console.fact("Images", f"{report.kind}; {describe_sizes(report.images, 9)}")
    if len(depths) > 1:
        console.fact("", ", ".join(f"{count} {depth}" for depth, count in depths.most_common()))
    if report.image_spec is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (report.image_spec.mean, report.image_spec.std))
        console.fact("Statistics", f"mean {mean}; std {std} ({report.statistics_reason})")
    if report.coding is not None and report.classes is not None:
        console.fact("Masks", describe_classes(report.masks, report.coding, id_names(config)))
        if is_open:
            console.fact("Classes", f"num_classes: {config.num_classes} ({report.classes.num_classes_reason})")
        ids = [set(class_ids(mask, report.coding)) for mask in report.masks]
        table = class_table(report.masks, report.coding, id_names(config))
        width = max(len(name) for _, name, _ in table)
        for class_id, (values, name, share) in enumerate(table):
            holders = sum(class_id in held for held in ids)
            console.say(f"      {name:<{width}}  {values:>8}  {share:8.3%} of pixels, in {holders} of {counted(len(ids), 'mask')}")
    if report.split is not None:
        console.fact("Split", f"{describe_split(report.split)} ({report.split.rule})")


def _question_content(question: Question) -> dict[str, Any]:
    choices = [{"meaning": choice.meaning, "settings": to_plain(dict(choice.settings))} for choice in question.choices]
    return {"text": question.text, "choices": choices}


def _write_json(path: Path, answered: AnsweredReport, sheet: Path | None, lines: Sequence[str]) -> None:
    report = answered.report
    config, split = report.decided(answered.config), report.split
    content = {
        "ok": answered.is_trainable,
        "data_dir": config.data_dir,
        "rule": report.found.rule,
        "num_pairs": len(report.found.pairs),
        "num_train": None if split is None else len(split.train),
        "num_val": None if split is None else len(split.val),
        "num_test": None if split is None else len(split.test),
        "sizes": [
            [height, width, count] for (height, width), count in Counter(image.size for image in report.images).most_common()
        ],
        "dtypes": dict(Counter(image.dtype for image in report.images)),
        "channels": {str(count): number for count, number in Counter(image.channels for image in report.images).items()},
        "mean": None if report.image_spec is None else list(report.image_spec.mean),
        "std": None if report.image_spec is None else list(report.image_spec.std),
        "classes": []
        if report.coding is None
        else [
            {"values": values, "name": name, "share": share}
            for values, name, share in class_table(report.masks, report.coding, id_names(config))
        ],
        "values": [
            {"value": to_plain(as_written([row.value])), "share": row.share, "masks": row.num_masks}
            for row in value_table(report.masks)
        ],
        "problems": [
            {
                "kind": problem.kind,
                "title": problem.title,
                "lines": list(problem.lines),
                "fix": problem.fix,
                "settings": to_plain(dict(problem.settings)),
            }
            for problem in answered.problems
        ],
        "questions": [_question_content(question) for question in answered.questions],
        "notices": answered.notices,
        "contact_sheet": None if sheet is None else str(sheet),
        "settings": to_plain(block_settings(answered)) if lines else None,
        "config": list(lines),
    }
    write_output("--json", path, json_text(content, indent=2) + "\n")
