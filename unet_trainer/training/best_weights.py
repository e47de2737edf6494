"""Whether best.pt, which a run names as its result, is there and whole; and what to do where it is not."""

from __future__ import annotations

from unet_trainer.runs.checkpoint_file import why_unusable
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.run_folder import BEST
from unet_trainer.system.console import Console
from unet_trainer.training.state import TrainState


def look_for_best(checkpointer: Checkpointer, state: TrainState, console: Console) -> str | None:
    """What became of best.pt if it is missing or damaged and its weights are lost: the run then has no best epoch.

    If the state is that of the best epoch, the file is written anew, which is told. Raises UnreadableFile where it cannot be read:
    it may be whole.
    """
    best_epoch = state.early_stopping.best_epoch
    if best_epoch == 0 or BEST in checkpointer.waiting:
        return None
    path = checkpointer.folder / BEST
    damage = why_unusable(path)
    if damage is None:
        return None
    if (state.epoch, state.batch) == (best_epoch, 0):
        checkpointer.write_best(state.history[-1], state.eval_segmenter)
        console.warn(f"{path} {damage}; it is written anew from this state, which is that of the best epoch")
        return None
    state.early_stopping.forget_best()
    state.per_class_iou, state.confusion = [], []
    return f"{path} {damage}: the weights of epoch {best_epoch}, the best so far, are lost"
