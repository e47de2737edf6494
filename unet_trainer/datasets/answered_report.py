"""The report of a dataset as it is with its questions answered: each by the most likely of its answers.

What settings solve is solved first, so that classes and split are judged as training will find them. `check` shows the answers
beside the others, and writes them as a config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config, to_plain
from unet_trainer.datasets.dataset_report import DatasetReport, build_dataset_report, report_on
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.problems import Choice, Problem, Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console

MAX_ANSWERS = 12
# Settings by which other pairs are found, or other masks are made.
FIND_KEYS = {"image_dir", "mask_dir", "mask_suffix", "unpaired", "split_file", "group_pattern", "class_names"}


class Answer(NamedTuple):
    """Settings that were added to the config, why, and what may be set in their place."""

    settings: Mapping[str, Any]
    reason: str
    others: Sequence[Choice] = ()
    is_guess: bool = True  # the user is to confirm it; else it is advice


@dataclass
class AnsweredReport:
    """`report` is that of `config`, which has the answers."""

    config: Config
    report: DatasetReport
    answers: list[Answer] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)  # all of them: those that the answers solve, and those that are left
    questions: list[Question] = field(default_factory=list)  # likewise
    notices: list[str] = field(default_factory=list)

    @property
    def guesses(self) -> list[Answer]:
        """What the config as it was given leaves open, with the likely answer."""
        return [answer for answer in self.answers if answer.is_guess]

    @property
    def is_settled(self) -> bool:
        """Whether the config with the answers can be trained on."""
        return self.report.split is not None and not self.report.blocking_message

    @property
    def is_settled_but_for_files(self) -> bool:
        """Whether it can be once the files are mended that have a problem."""
        return bool(self.report.problems) and not self.report.questions and self.report.split is not None


def build_answered_report(config: Config, console: Console) -> AnsweredReport:
    """Builds the report, answers what is open and builds it again, until no answer is left. Raises DataError if no pairs can be
    found, and no answer is known."""
    answers: list[Answer] = []
    problems: list[Problem] = []
    questions: list[Question] = []
    found: FoundPairs | None = None
    while True:
        try:
            found = found or find_dataset(config, console)
        except Question as question:
            if len(answers) == MAX_ANSWERS:
                raise
            config, answer, found = _answer_where_the_data_is(config, question, console)
            answers.append(answer)
            questions.append(question)
            continue
        report = report_on(found, config, console)
        next_answer = _next_answer(config, report) if len(answers) < MAX_ANSWERS else None
        if next_answer is None:
            break
        answer, solved = next_answer
        config = with_settings(config, answer.settings)
        found = None if FIND_KEYS & answer.settings.keys() else found
        answers.append(answer)
        problems += [one for one in solved if isinstance(one, Problem)]
        questions += [one for one in solved if isinstance(one, Question)]
    problems += [problem for problem in report.problems if problem not in problems]
    answered = AnsweredReport(config, report, answers, problems, [*questions, *report.questions], list(report.notices))
    return _take_advice(answered, console) if report.advised else answered


def _next_answer(config: Config, report: DatasetReport) -> tuple[Answer, Sequence[Problem | Question]] | None:
    """An answer, and what it solves. Problems come first: what is asked may be another thing once they are solved."""
    for problem in report.problems:
        if problem.settings and with_settings(config, problem.settings) != config:
            same = [other for other in report.problems if other.settings == problem.settings]
            return Answer(problem.settings, "; ".join(other.title for other in same)), same
    for question in report.questions:
        if question.choices and with_settings(config, question.choices[0].settings) != config:
            first, *others = question.choices
            return Answer(first.settings, first.meaning, others), [question]
    return None


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    return load_config(config, to_plain(dict(settings)))


def _answer_where_the_data_is(config: Config, question: Question, console: Console) -> tuple[Config, Answer, FoundPairs | None]:
    """The config with the first answer by which every file has its partner, or else with that which pairs most, and what it finds
    if nothing is left to ask; raises the question if no answer helps."""
    best: tuple[int, Config, FoundPairs | None] | None = None  # place of the choice
    most = -1
    for place, choice in enumerate(question.choices):
        found = None
        try:
            answered = with_settings(config, choice.settings)
            found = find_dataset(answered, console)
        except Question as following:
            if not following.choices or str(following) == str(question):
                continue
        except (DataError, ConfigError):
            continue
        is_complete = found is not None and not found.blocking_message
        num_pairs = 0 if found is None else len(found.pairs)
        if is_complete or num_pairs > most:
            best, most = (place, answered, found), num_pairs
        if is_complete:
            break
    if best is None:
        raise question
    place, answered, found = best
    others = [other for number, other in enumerate(question.choices) if number != place]
    return answered, Answer(question.choices[place].settings, question.choices[place].meaning, others), found


def _take_advice(answered: AnsweredReport, console: Console) -> AnsweredReport:
    """With the settings that a notice advises for a better split, if they do what they are for."""
    advised = answered.report.advised
    config = with_settings(answered.config, advised)
    report = build_dataset_report(config, console)
    if report.questions or report.split is None:
        return answered
    note = [notice for notice in answered.notices if notice not in report.notices]
    reason = "keeps images that are alike on one side of the split, see the note above"
    answers = [*answered.answers, Answer(advised, reason, is_guess=False)]
    return AnsweredReport(config, report, answers, answered.problems, answered.questions, [*report.notices, *note])
