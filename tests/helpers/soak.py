"""How long the random part of a soak runs, and what it found: UNET_SOAK_SECONDS for each test, UNET_SOAK_SEED for another sequence."""

from __future__ import annotations

import os
import time
from collections import Counter

SECONDS = float(os.environ.get("UNET_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("UNET_SOAK_SEED", "0"))


def rounds(least=1):
    """0, 1, 2, ... until the time is over, `least` in any case."""
    deadline = time.monotonic() + SECONDS
    number = 0
    while number < least or time.monotonic() < deadline:
        yield number
        number += 1


class Findings:
    """Counts what was tried; `check` fails with every finding and how to make it again."""

    def __init__(self, what):
        self.what, self.outcomes, self.bad = what, Counter(), []

    def tried(self, outcome, number=1):
        self.outcomes[outcome] += number

    def found(self, how, what):
        self.bad.append(f"{how}: {what}")

    def check(self):
        total = sum(self.outcomes.values())
        print(
            f"\n{self.what}, seed {SEED}: {total} tried, "
            + ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        )
        assert not self.bad, f"{len(self.bad)} findings:\n" + "\n".join(self.bad[:20])
