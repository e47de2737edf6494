"""Numbers as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from unet_trainer.reports.number_texts import count, duration, listed, moment, percent, rate, score


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (1.25, "1.2 s"),
        (59.6, "1 min"),
        (90, "1 min 30 s"),
        (3600, "1 h"),
        (7384, "2 h 3 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, words):
    assert duration(seconds) == words


def test_what_is_not_known_is_a_dash():
    assert {score(None), score(math.nan), percent(None), duration(None), rate(None), moment(None)} == {"–"}


def test_scores_shares_rates_and_counts():
    assert (score(0.81234), score(0.81234, 3)) == ("0.8123", "0.812")
    assert (percent(0.1234), percent(0), percent(0.0001), percent(1)) == ("12.3 %", "0.0 %", "< 0.1 %", "100.0 %")
    assert (rate(812.4), rate(1.357)) == ("812", "1.36")
    assert count(1234567) == "1\u202f234\u202f567"
    assert moment(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02 03:04:05 UTC"
    assert (listed([]), listed(["a"]), listed(["a", "b", "c"])) == ("", "a", "a, b and c")
