"""It has what a run asks of a checkpointer, and writes nothing."""

from __future__ import annotations

import inspect
import re

from helpers.project import ROOT
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.following_checkpointer import FollowingCheckpointer


def test_it_has_everything_that_training_asks_of_a_checkpointer():
    sources = [ROOT / "train_unet.py", *(ROOT / "unet_trainer/training").glob("*.py")]
    sources.remove(ROOT / "unet_trainer/training/best_weights.py")  # rank 0's alone
    asked = {name for path in sources for name in re.findall(r"\bcheckpointer\.(\w+)", path.read_text(encoding="utf-8"))}
    asked -= {"py"}
    assert {"save_epoch", "is_due", "restore_last", "describe_saved", "folder"} <= asked
    made = FollowingCheckpointer(ROOT)
    assert [name for name in sorted(asked) if not hasattr(made, name)] == []
    for name in asked - {"folder", "resume_command", "save_epoch"}:
        own, other = (list(inspect.signature(getattr(owner, name)).parameters) for owner in (FollowingCheckpointer, Checkpointer))
        assert set(own) <= set(other), name


def test_it_writes_nothing(tmp_path):
    made = FollowingCheckpointer(tmp_path / "a run")
    made.write_config()
    made.write_split()
    made.save_epoch({}, None, None, None)
    made.save_state()
    made.save_if_due()
    made.save_on_failure(state_is_whole=True)
    made.restore_last()
    made.finish()
    made.attempt(lambda: 1 / 0)
    assert (made.is_due(), made.unwritten()) == (False, [])
    assert made.describe_saved() == f"to go on: python train_unet.py --resume '{tmp_path}/a run'"
    assert list(tmp_path.iterdir()) == []
