"""Files whose content is another than when the run began are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from helpers.mask_facts import facts_of
from unet_trainer.datasets.changed_content import with_content
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import ImageFacts

A, B, C = "a" * 32, "b" * 32, "c" * 32


def image(digest):
    return ImageFacts(4, 5, 3, "uint8", (0.0,) * 3, (1.0,) * 3, 0.0, 255.0, False, False, digest)


def mask(digest):
    return replace(facts_of(np.zeros((4, 5), np.uint8)), digest=digest)


def test_pairs_get_the_digests_of_both_files_and_a_new_run_has_no_notice():
    (pair,), notices = with_content([Pair("x", Path("x.png"), Path("m.png"))], [image(A)], [mask(B)])
    assert (pair.content, notices) == ("a" * 16 + "b" * 16, [])


def test_the_file_that_changed_is_named_and_its_partner_is_not():
    before = Pair("x", Path("x.png"), Path("m.png"), content="a" * 16 + "b" * 16)
    assert with_content([before], [image(A)], [mask(B)])[1] == []
    (pair,), (notice,) = with_content([before], [image(A)], [mask(C)])
    assert notice == ("1 file has changed since the run began: m.png; scores from before and after are not of the same data")
    assert pair.content == "a" * 16 + "c" * 16
    assert "2 files have changed since the run began: x.png, m.png;" in with_content([before], [image(C)], [mask(C)])[1][0]
