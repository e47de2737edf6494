"""Problems of a dataset, each with its files and the fix, and their text, which is the same in training and in check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One kind of problem: a line for each file that has it, and the fix."""

    kind: str  # identifies it in the JSON report: unreadable, sizes, ...
    title: str  # "files that cannot be read"
    lines: tuple[str, ...]  # "path: reason"
    fix: str = ""


def describe_problems(problems: Sequence[Problem], most: int) -> str:
    """Every problem with its first `most` lines and its fix."""
    return "\n".join(_describe(problem, most) for problem in problems)


def _describe(problem: Problem, most: int) -> str:
    lines = [f"{len(problem.lines)} {problem.title}:", *(f"  {line}" for line in problem.lines[:most])]
    if len(problem.lines) > most:
        lines.append(f"  … and {len(problem.lines) - most} more")
    return "\n".join([*lines, *([f"  Fix: {problem.fix}"] if problem.fix else [])])


def first_few(items: Iterable[object], most: int = 5) -> str:
    """The first `most` items, and the number of the others."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
