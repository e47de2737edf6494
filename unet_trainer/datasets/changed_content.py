"""Whether the files of a run hold what they held when it began: a digest of every pair is in its split.csv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts
from unet_trainer.system.console import counted

NUM_DIGITS = 16  # of a file's digest


def with_content(pairs: Sequence[Pair], images: Sequence[ImageFacts], masks: Sequence[MaskFacts]) -> tuple[list[Pair], list[str]]:
    """The pairs with the digests of their files as they are now; and a notice about those that had others."""
    found, changed = [], []
    for pair, image, mask in zip(pairs, images, masks, strict=True):
        digests = image.digest[:NUM_DIGITS], mask.digest[:NUM_DIGITS]
        found.append(replace(pair, content="".join(digests)))
        if not pair.content:
            continue
        before = pair.content[:NUM_DIGITS], pair.content[NUM_DIGITS:]
        shown = pair.shown_image, pair.shown_mask
        changed += [name for name, now, then in zip(shown, digests, before, strict=True) if now != then]
    if not changed:
        return found, []
    have = "has" if len(changed) == 1 else "have"
    what = f"{counted(len(changed), 'file')} {have} changed since the run began: {first_few(changed)}"
    return found, [f"{what}; scores from before and after are not of the same data"]
