"""A finding: one thing that is fine, worth a look, or in the way; with what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
MARKS: dict[Level, str] = {"ok": "✓", "warning": "⚠", "problem": "✗"}
WIDTH = 100  # columns
TITLE_WIDTH = 10  # at least


@dataclass(frozen=True)
class Finding:
    level: Level
    title: str  # a word or two: GPU, Disk; or the key of a config that it is about
    detail: str
    fix: str = ""  # a sentence, a command, or the line of the config to change

    def lines(self, title_width: int, width: int = WIDTH) -> list[str]:
        """As text: the mark and the title, then the detail and, on a line of its own, the fix."""
        lead = f"  {MARKS[self.level]} {self.title:<{title_width}}  "
        lines = wrapped(self.detail, lead, width)
        return lines + (wrapped(self.fix, " " * len(lead) + "→ ", width) if self.fix else [])


def finding_lines(findings: Sequence[Finding], width: int = WIDTH) -> list[str]:
    title_width = max([TITLE_WIDTH, *(len(finding.title) for finding in findings)])
    return [line for finding in findings for line in finding.lines(title_width, width)]


def wrapped(text: str, lead: str, width: int = WIDTH) -> list[str]:
    """The text in lines that begin below each other, the first after `lead`. Line breaks in it are kept; paths are not broken."""
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(paragraph, max(20, width - len(lead)), break_long_words=False, break_on_hyphens=False) or [""]
    return [(lead if number == 0 else " " * len(lead)) + line for number, line in enumerate(lines)]


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "problem" for finding in findings)
