"""Problems of a dataset, each with its files and the fix, and questions with the settings that answer them.

Their text is the same in training and in check. What a message asks for stands in lines that can be pasted into a config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unet_trainer.config.dump import value_text
from unet_trainer.images.image_files import DataError
from unet_trainer.system.names import one_line


@dataclass(frozen=True)
class Problem:
    """One kind of problem: a line for each file that has it, and the fix."""

    kind: str  # identifies it in the JSON report: unreadable, sizes, ...
    title: str  # "files that cannot be read"
    lines: tuple[str, ...]  # "path: reason"
    fix: str = ""


class Question(DataError):
    """What only the user knows. Each of `choices` is an answer: the settings to add to the config."""

    def __init__(self, text: str, *choices: Mapping[str, Any]) -> None:
        self.choices = choices
        super().__init__(with_choices(text, choices))


def with_choices(text: str, choices: Sequence[Mapping[str, Any]]) -> str:
    """The text of a question, followed by the lines that answer it."""
    if not choices:
        return text
    one_line_each = all(len(choice) == 1 for choice in choices)
    blocks = ["\n".join(f"  {line}" for line in setting_lines(choice)) for choice in choices]
    asked = "set" if len(choices) == 1 else "set one of these"
    return f"{text}; {asked}:\n" + ("\n" if one_line_each else "\n  # or\n").join(blocks)


def setting_lines(settings: Mapping[str, Any]) -> list[str]:
    """Settings as lines of YAML."""
    return [f"{name}: {value_text(value)}" for name, value in settings.items()]


def describe_problems(problems: Sequence[Problem], most: int) -> str:
    """Every problem with its first `most` lines and its fix."""
    return "\n".join(_describe(problem, most) for problem in problems)


def _describe(problem: Problem, most: int) -> str:
    lines = [f"{len(problem.lines)} {problem.title}:", *(f"  {one_line(line)}" for line in problem.lines[:most])]
    if len(problem.lines) > most:
        lines.append(f"  … and {len(problem.lines) - most} more")
    return "\n".join([*lines, *([f"  Fix: {problem.fix}"] if problem.fix else [])])


def first_few(items: Iterable[object], most: int = 5) -> str:
    """The first `most` items, and the number of the others."""
    texts = [one_line(str(item)) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
