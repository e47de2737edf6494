"""Problems of a dataset, each with its files and the fix, and questions with the settings that answer them.

Their text is the same in training and in check. What a message asks for stands in lines that can be pasted into a config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import to_plain
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import counted, one_line

NUM_NAMED = 10  # files of one problem in a message
UNREADABLE = "file that cannot be used", "files that cannot be used"


@dataclass(frozen=True)
class Problem:
    """One kind of problem: a line for each file that has it, and the fix."""

    kind: str  # identifies it in the JSON report: unreadable, sizes, ...
    one: str  # what a file is that has it: "file that cannot be read"
    many: str  # "files that cannot be read"
    lines: tuple[str, ...]  # "path: reason"
    fix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # that solve it, if some do

    @property
    def title(self) -> str:
        return counted(len(self.lines), self.one, self.many)


@dataclass(frozen=True)
class Choice:
    """An answer to a question: what it means, and the settings to put into the config."""

    meaning: str
    settings: Mapping[str, Any]

    def lines(self) -> list[str]:
        return [*([f"# {self.meaning}"] if self.meaning else []), *setting_lines(self.settings)]


class Question(DataError):
    """What only the user knows, and its answers, the most likely first. As an error it goes on with `table`, what was found, and
    ends with the lines that answer it."""

    def __init__(self, text: str, *choices: Mapping[str, Any] | Choice, table: Sequence[str] = ()) -> None:
        self.text, self.table = text, table
        self.choices = tuple(choice if isinstance(choice, Choice) else Choice("", choice) for choice in choices)
        super().__init__(with_choices("\n  ".join([text, *table]), self.choices))


def with_choices(text: str, choices: Sequence[Choice]) -> str:
    """The text of a question, followed by the lines that answer it."""
    if not choices:
        return text
    if any(choice.meaning for choice in choices):
        lines = [f"    {line}".rstrip() for choice in choices for line in ("", *choice.lines())][1:]
        heading = "One of these goes into the config:" if len(choices) > 1 else "This goes into the config:"
        return "\n".join([text, f"  {heading}", *lines])
    one_line_each = all(len(choice.settings) == 1 for choice in choices)
    blocks = ["\n".join(f"  {line}" for line in choice.lines()) for choice in choices]
    asked = "set" if len(choices) == 1 else "set one of these"
    return f"{text}; {asked}:\n" + ("\n" if one_line_each else "\n  # or\n").join(blocks)


def setting_lines(settings: Mapping[str, Any]) -> list[str]:
    """Settings as lines of YAML."""
    return [f"{name}: {value_text(to_plain(value))}" for name, value in settings.items()]


def describe_problems(problems: Sequence[Problem], most: int = NUM_NAMED, where: str = "") -> str:
    """Every problem with its fix and its first `most` lines; `where` says where the others are."""
    return "\n".join(_describe(problem, most, where) for problem in problems)


def _describe(problem: Problem, most: int, where: str) -> str:
    """A reason that several files have stands once, with their number, above their names."""
    by_reason: dict[str, list[str]] = {}
    for line in problem.lines[:most]:
        name, _, reason = line.partition(": ")
        by_reason.setdefault(reason, []).append(name)
    counts = Counter(line.partition(": ")[2] for line in problem.lines)
    lines = [f"{problem.title}:", *([f"  Fix: {problem.fix}"] if problem.fix else [])]
    for reason, names in by_reason.items():
        if reason and len(names) > 1:
            lines += [f"  {one_line(reason)} ({counted(counts[reason], 'file')}):", *(f"    {one_line(name)}" for name in names)]
        else:
            lines += [f"  {one_line(f'{name}: {reason}' if reason else name)}" for name in names]
    if len(problem.lines) > most:
        lines.append(f"  … and {len(problem.lines) - most} more{where}")
    return "\n".join(lines)


def first_few(items: Iterable[object], most: int = 5) -> str:
    """The first `most` items, and the number of the others."""
    texts = [one_line(str(item)) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
