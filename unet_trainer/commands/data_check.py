"""The report of `check`: what a dataset holds, what is wrong with it, its contact sheet and the settings for it.

Each open question is answered by the most likely of its answers. The settings are one block of YAML that trains."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from unet_trainer.commands.command_line import file_header, train_command
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS, Config, as_dict, id_names, to_plain
from unet_trainer.data import mask_evidence as evidence
from unet_trainer.data.dataset_notices import describe_ignored, describe_sizes
from unet_trainer.data.dataset_report import DatasetReport, build_dataset_report
from unet_trainer.data.find import find_dataset
from unet_trainer.data.mask_evidence import MaskEvidence, class_ids
from unet_trainer.data.pairs import Choice, FoundPairs, Problem, Question, describe_problems, setting_lines
from unet_trainer.data.scan import MaskFacts
from unet_trainer.data.splits import describe_split
from unet_trainer.images.drawing import COLOURS, contact_sheet, to_display
from unet_trainer.images.file_bytes import DataError, naming
from unet_trainer.images.image_decoding import encode_image, read_image
from unet_trainer.images.mask_decoding import IGNORED, MaskCoding, as_written, given_coding, read_mask, show_value
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.atomic_files import write_bytes_atomically, write_output
from unet_trainer.system.console import Console, counted, json_text
from unet_trainer.system.os_errors import cannot

MAX_ANSWERS = 12
# Settings by which other pairs are found, or other masks are made.
FIND_KEYS = {"image_dir", "mask_dir", "mask_suffix", "unpaired", "split_file", "group_pattern", "class_names"}
IN_JSON = " (--json FILE lists them)"
MAX_WIDTH = 15  # of the values of a class: those of a colour fit
WRITES = "--write FILE writes them as a config"
GUESS = "GUESS"  # begins what the user is to confirm
ADVICE = "keeps images that are alike on one side of the split, see the note above"
CLASS_KEYS = ("num_classes", "class_names", "mask_values", "ignore_value", "unknown_values", "mask_tolerance")
NUM_PICTURES = 24


# What is open, answered


class Answer(NamedTuple):
    """Settings that were added to the config, why, and what may be set in their place."""

    settings: Mapping[str, Any]
    reason: str
    others: Sequence[Choice] = ()
    is_guess: bool = True  # the user is to confirm it; else it is advice

    @property
    def keys(self) -> set[str]:
        """Of the settings that stand together with it in the block."""
        return {*self.settings, *(CLASS_KEYS if "num_classes" in self.settings else ())}


@dataclass
class AnsweredReport:
    """`report` is that of `config` with the answers; `problems` and `questions`: those they solve, and those left."""

    config: Config
    report: DatasetReport
    answers: list[Answer] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def guesses(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_guess]

    @property
    def is_settled(self) -> bool:
        """Whether the config with the answers can be trained on."""
        return self.report.split is not None and not self.report.blocking_message

    @property
    def is_settled_but_for_files(self) -> bool:
        """Whether it can be once the files that have a problem are fixed."""
        return bool(self.report.problems) and not self.report.questions and self.report.split is not None


def build_answered_report(config: Config, console: Console) -> AnsweredReport:
    """Builds the report, answers what is open and builds it again, until no answer is left. Raises DataError."""
    answers, solved, earlier = list[Answer](), list[Problem | Question](), list[str]()
    found: FoundPairs | None = None
    while True:
        try:
            found = found or find_dataset(config, console)
            report = build_dataset_report(config, console, found)
            answer, of = _next_answer(config, report)
        except Question as question:
            if len(answers) == MAX_ANSWERS:
                raise
            answer, of = _choose_place(config, question, console), [question]
        if answer is None or len(answers) == MAX_ANSWERS:
            break
        earlier = earlier if answer.is_guess else report.notices  # the advice is one of them
        config, found = _with_settings(config, answer.settings), None if FIND_KEYS & answer.settings.keys() else found
        answers.append(answer)
        solved += of
    problems = [each for each in solved if isinstance(each, Problem)]
    problems += [problem for problem in report.problems if problem not in problems]
    questions = [*(each for each in solved if isinstance(each, Question)), *report.questions]
    notices = [*report.notices, *(notice for notice in earlier if notice not in report.notices)]
    return AnsweredReport(config, report, answers, problems, questions, notices)


def _next_answer(config: Config, report: DatasetReport) -> tuple[Answer | None, Sequence[Problem | Question]]:
    """An answer, and what it solves. Problems come first: what is asked may be another thing once they are solved."""
    for problem in report.problems:
        if problem.settings and _with_settings(config, problem.settings) != config:
            same = [other for other in report.problems if other.settings == problem.settings]
            return Answer(problem.settings, "; ".join(other.title for other in same)), same
    for question in report.questions:
        if question.choices and _with_settings(config, question.choices[0].settings) != config:
            first, *others = question.choices
            return Answer(first.settings, first.meaning, others), [question]
    return (Answer(report.advised, ADVICE, is_guess=False) if report.advised else None), []


def _with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    return load_config(config, to_plain(dict(settings)))


def _choose_place(config: Config, question: Question, console: Console) -> Answer:
    """The first answer by which every file has its partner, or else that which pairs most; raises the question if no
    answer helps."""
    scores = []
    for choice in question.choices:
        try:
            found = find_dataset(_with_settings(config, choice.settings), console)
            scores.append((not found.problems, len(found.pairs)))
        except (DataError, ConfigError) as error:  # one more question may have an answer too
            leads_on = isinstance(error, Question) and error.choices and str(error) != str(question)
            scores.append((False, 0 if leads_on else -1))
    best = max(scores, default=(False, -1))
    if best == (False, -1):
        raise question
    chosen = question.choices[scores.index(best)]
    return Answer(chosen.settings, chosen.meaning, [other for other in question.choices if other is not chosen])


# What is printed and written


def check_data(
    config: Config, console: Console, json_file: Path | None = None, config_file: Path | None = None
) -> bool:
    """Prints the report, writes contact sheet, settings and JSON; returns whether the settings train."""
    data_dir = Path(config.data_dir)
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
    if (sheet := draw_sheet(answered.config, report)) is not None:
        console.fact("Pictures", f"{sheet} (the rarest classes first)")
    answered_keys = {name for guess in answered.guesses for name in guess.settings}
    for notice in answered.notices:
        if not any(f"({name}" in notice for name in answered_keys):  # what a problem below says
            console.note(shorten(notice))
    for problem in answered.problems:
        console.say(f"\n{shorten(describe_problems([problem], where=IN_JSON))}")
    # The lines of the classes show each value of the masks, and the table of a question would repeat them.
    shows_values = report.coding is not None and report.coding.values is not None and not report.coding.ignores_unknown
    for question in answered.questions:
        lines = [question.text] if shows_values else [question.text, *question.table]
        console.say("\n" + shorten("\n  ".join(lines)))
    lines = block_lines(answered, shorten) if answered.is_settled or answered.is_settled_but_for_files else []
    console.say(f"\n{_verdict(answered)}")
    for line in lines:
        console.say(f"  {line}", "yellow" if f"# {GUESS}" in line else None)
    if config_file is not None:
        _write_config(config_file, answered, lines, console)
    if json_file is not None:
        _write_json(json_file, answered, sheet, lines)
    return answered.is_settled


def names_inside(data_dir: Path) -> Callable[[str], str]:
    """Makes paths in a text relative to data_dir. A name without a slash, such as size, may be a word."""
    forms = {re.escape(str(form)) for form in (data_dir, data_dir.absolute(), data_dir.resolve())}
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(forms)})(?:(/)|(?![\w./-]))")
    return lambda text: pattern.sub(lambda found: "" if found[1] else "data_dir" if "/" in found[0] else found[0], text)


def _verdict(answered: AnsweredReport) -> str:
    """Whether the data can be trained on, as a heading for the settings."""
    number = len(answered.guesses)
    guesses = f", with {'one guess' if number == 1 else f'{number} guesses'} to confirm" if number else ""
    if answered.is_settled:
        return f"Ready to train with these settings{guesses} ({WRITES}):"
    if not answered.is_settled_but_for_files:
        return "Not ready to train: what is said above has to be solved first."
    num_files = sum(len(problem.lines) for problem in answered.report.problems)
    first = f"{counted(num_files, 'file')} {'has' if num_files == 1 else 'have'} to be fixed first"
    return f"Not ready to train: {first}. Then these settings train{guesses}:"


def _write_config(path: Path, answered: AnsweredReport, lines: Sequence[str], console: Console) -> None:
    if not answered.is_settled:
        console.say("\n--write: nothing was written, because the data is not ready.")
        return
    header = file_header(path, "check", Path(answered.config.data_dir).resolve().name).splitlines()
    write_output("--write", path, "\n".join([*(f"# {line}" for line in header), "", *lines, ""]))
    console.say(f"\nWritten. It trains as it is: {train_command(path)}")


def _say_contents(answered: AnsweredReport, console: Console, is_open: bool) -> None:
    report, config = answered.report, answered.report.decided(answered.config)
    console.fact("Pairs", f"{len(report.found.pairs)} ({report.found.rule})")
    if report.kind is None:
        return
    console.fact("Images", f"{report.kind}; {describe_sizes(report.images, 9)}")
    if (spec := report.image_spec) is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (spec.mean, spec.std))
        console.fact("Statistics", f"mean {mean}; std {std} ({report.statistics_reason})")
    if report.classes is not None:
        coding = report.classes.coding
        guess = next((guess.reason for guess in answered.guesses if "num_classes" in guess.settings), None)
        why = f"{GUESS}: {guess}" if guess else report.classes.num_classes_reason if is_open else coding.reason
        why += f"; {coding.reason}" if coding.tolerance and is_open and not guess else ""
        console.fact("Masks", f"num_classes: {config.num_classes}" + (f" ({why})" if why != "mask_values" else ""))
        _say_classes(report.masks, coding, id_names(config), console)
    if report.split is not None:
        how = report.split.rule.removeprefix(report.found.rule).removeprefix("; ")
        console.fact("Split", f"{describe_split(report.split)}{f' ({how})' if how else ''}")


def _say_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str], console: Console) -> None:
    """A line for each class, and one for what is ignored."""
    ids = [class_ids(mask.counts, coding) for mask in masks]
    rows = enumerate(evidence.class_table(masks, coding, names))
    table = [(class_id, name, values, f"{share:8.3%} of pixels") for class_id, (values, name, share) in rows]
    if ignored := evidence.ignored_share(masks, coding):
        table.append((IGNORED, "ignored", describe_ignored(coding), f"{ignored:8.3%} of all pixels"))
    name_width, value_width = max(len(row[1]) for row in table), max(len(row[2]) for row in table)
    for class_id, name, values, share in table:
        holders = f"{sum(class_id in held for held in ids)} of {counted(len(ids), 'mask')}"
        console.say(f"      {name:<{name_width}}  {values:>{min(MAX_WIDTH, value_width)}}  {share}, in {holders}")


def _write_json(path: Path, answered: AnsweredReport, sheet: Path | None, lines: Sequence[str]) -> None:
    report, config = answered.report, answered.report.decided(answered.config)
    split, coding, found = report.split, report.coding, MaskEvidence(report.masks)
    rows = evidence.class_table(report.masks, coding, id_names(config)) if coding else []
    content = {
        "ok": answered.is_settled,
        "data_dir": config.data_dir,
        "rule": report.found.rule,
        "num_pairs": len(report.found.pairs),
        **{f"num_{name}": None if split is None else len(getattr(split, name)) for name in ("train", "val", "test")},
        "images": None if report.kind is None else str(report.kind),
        "classes": [row._asdict() for row in rows],
        "values": [
            {"value": to_plain(as_written([value])), "share": found.share(value), "masks": found.holders[value]}
            for value, _ in found.counts.most_common()
        ],
        "problems": [to_plain(asdict(problem)) | {"title": problem.title} for problem in answered.problems],
        "questions": [
            {"text": question.text, "choices": [to_plain(asdict(choice)) for choice in question.choices]}
            for question in answered.questions
        ],
        "guesses": [{"reason": guess.reason, "settings": to_plain(dict(guess.settings))} for guess in answered.guesses],
        "notices": answered.notices,
        "contact_sheet": None if sheet is None else str(sheet),
        "settings": to_plain(block_settings(answered)) if lines else None,
        "config": list(lines),
    }
    write_output("--json", path, json_text(content, indent=2) + "\n")


# The settings


def block_settings(answered: AnsweredReport) -> dict[str, Any]:
    """data_dir, all that differs from the defaults, and the classes that were found or given."""
    set_values, defaults, classes = as_dict(answered.config), as_dict(Config()), answered.report.classes
    values = {name: set_values[name] for name in FIELDS if set_values[name] != defaults[name] and name != "resume"}
    if classes is not None:
        coding = classes.coding
        found = (classes.num_classes, classes.class_names, coding.mask_values, coding.written_ignore_value)
        others = ("ignore" if coding.ignores_unknown else None, coding.tolerance or None)
        by_key = zip(CLASS_KEYS, (*found, *others), strict=True)
        values |= {name: value for name, value in by_key if value is not None}
    return {"data_dir": answered.config.data_dir, **{name: values[name] for name in FIELDS if name in values}}


def block_lines(answered: AnsweredReport, shorten: Callable[[str], str] = str) -> list[str]:
    """The settings: answers with their reasons, the other answers as comments, those of classes together."""
    values, lines = block_settings(answered), list[str]()
    answer_to = {key: answer for answer in answered.answers for key in answer.keys}
    while values:
        answer = answer_to.get(name := next(iter(values)))
        keys = [each for each in values if each == name or (answer and each in answer.keys)]
        group = {each: values.pop(each) for each in keys}
        lines += setting_lines(group) if answer is None else _group_lines(group, answer, shorten)
    return lines


def _group_lines(settings: Mapping[str, Any], answer: Answer, shorten: Callable[[str], str]) -> list[str]:
    reason = shorten(" ".join(answer.reason.split()))
    if answer.is_guess:
        reason = f"{GUESS}: {reason}" if reason else GUESS
    lines = setting_lines(settings)
    if len(lines) == 1 and not answer.others:
        return [f"{lines[0]}  # {reason}" if reason else lines[0]]
    place = "its place" if len(lines) == 1 else "their place"
    lines = [*([f"# {reason}"] if reason else []), *lines]
    for other in answer.others:
        lines.append(f"# or in {place}{': ' if other.meaning else ''}{other.meaning}")
        lines += [f"#   {line}" for line in setting_lines(other.settings)]
    return lines


# The contact sheet


def draw_sheet(config: Config, report: DatasetReport) -> Path | None:
    """Write the sheet under checkpoint_dir. Values without a meaning are drawn as classes of their own."""
    if not report.pairs:
        return None
    if (coding := report.coding) is not None:
        names = id_names(report.decided(config))
    else:  # the most frequent values, as many as there are colours; the others are drawn as ignored
        values = sorted(value for value, _ in MaskEvidence(report.masks).counts.most_common(len(COLOURS)))
        coding = given_coding([as_written([value]) for value in values], None, True)
        names = [show_value(value) for value in values]
    shares = evidence.class_shares(report.masks, coding, len(names))
    pictures, labels = [], []
    for index, class_id in _rarest_first(report.masks, coding, shares)[:NUM_PICTURES]:
        pair = report.pairs[index]
        with naming(pair.image):  # facts of an earlier scan do not show that a file can be read today
            image = to_display(read_image(pair.image))
        with naming(pair.mask):
            ids = resize_mask(coding.encode(read_mask(pair.mask)), (image.shape[0], image.shape[1]))  # resize_masks
        pictures.append((image, ids))
        labels.append(f"{pair.name}: {names[class_id]}" if class_id < len(names) else pair.name)
    path = Path(config.checkpoint_dir) / "check" / sheet_name(Path(config.data_dir))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        has_background = evidence.has_background(names, shares)
        sheet = contact_sheet(pictures, labels, names=names, has_background=has_background)
        write_bytes_atomically(path, encode_image(sheet, ".png"))
    except OSError as error:
        raise cannot(f"checkpoint_dir: {path}", "be written", error, path) from None
    return path


def sheet_name(data_dir: Path) -> str:
    """The name of the folder, and digits that differ for folders of the same name."""
    folder = data_dir.resolve()
    name = re.sub(r"[^\w.-]+", "_", folder.name, flags=re.ASCII) or "data"
    return f"{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]}.png"


def _rarest_first(masks: Sequence[MaskFacts], coding: MaskCoding, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Index of a pair and the class it is shown for: by turns those of each class but the most common, rarest first, of
    each with much of it and with little."""
    held = [class_ids(mask.counts, coding) for mask in masks]
    classes = sorted((index for index, share in enumerate(shares) if share > 0), key=shares.__getitem__)
    rare, turns = classes[:-1] or classes, []
    for class_id in rare:
        holders = [index for index, its in enumerate(held) if class_id in its]
        holders.sort(key=lambda index: -held[index][class_id])
        step = 1 + len(holders) * len(rare) // NUM_PICTURES
        turns.append([(index, class_id) for first in range(step) for index in holders[first::step]])
    by_turns = [each for turn in zip_longest(*turns) for each in turn if each is not None]
    chosen: dict[int, int] = {}
    for index, class_id in (*by_turns, *((index, IGNORED) for index in range(len(held)))):
        chosen.setdefault(index, class_id)
    return [*chosen.items()]
