"""The time that a run may take, counted from its command on: start-up, trial, epochs and report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from unet_trainer.config.parsers import seconds_of

END_SHARE = 0.1  # of the budget, that the end of a run may take: the last files and the report
END_SECONDS = 3.0  # that it takes without the pictures of the report
TRIAL_SHARE = 0.15  # that a trial of the step may take
MIN_TRIAL_SECONDS = 10.0  # with fewer there is none: most of them would go into starting its process


class TimeBudget:
    """`text` as in the config; None: no limit. `started`: when the command began, by the clock."""

    def __init__(
        self, text: str | None = None, started: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = math.inf if text is None else seconds_of(text)
        self.clock = clock
        self.started = clock() if started is None else started
        self.seconds_before = 0.0  # of training in earlier starts of the run

    def spent(self) -> float:
        return self.seconds_before + self.clock() - self.started

    def left(self) -> float:
        return self.seconds - self.spent()

    def end_seconds(self, picture_seconds: float) -> float:
        """That the end of the run will take, with pictures that take so long."""
        return min(END_SHARE * self.seconds, END_SECONDS + picture_seconds)

    def lost_to_training(self) -> float:
        """What is spent, and what the end of the run may take."""
        return self.spent() + END_SHARE * self.seconds

    def trial_seconds(self) -> float:
        seconds = TRIAL_SHARE * self.seconds
        return seconds if seconds >= MIN_TRIAL_SECONDS else 0.0
