"""What is done when an epoch cannot be finished: back to the last good state, or on with less memory, or a clear end."""

from __future__ import annotations

from unet_trainer.config import Config
from unet_trainer.console import Console
from unet_trainer.diagnosis import explain
from unet_trainer.guard import NonFinite
from unet_trainer.keeper import Keeper
from unet_trainer.machine import Data, Machine
from unet_trainer.memory import is_out_of_memory
from unet_trainer.resuming import describe_position
from unet_trainer.runs import TrainingFailed
from unet_trainer.step import leaving_no_trace

ROLLBACK_FACTOR = 0.1  # of the learning rate, when bad numbers send a run back


def roll_back(config: Config, machine: Machine, data: Data, keeper: Keeper, console: Console, trouble: NonFinite) -> None:
    """Once, with a lower learning rate; the second time training ends."""
    state = machine.state
    where = _explain(machine, data, trouble)
    if config.on_nan == "stop" or state.num_rollbacks:
        keeper.keep_what_there_is(state_is_whole=False)
        ideas = ["a lower learning_rate", "grad_clip=1.0"] + (["use_amp=false"] if config.use_amp else [])
        raise TrainingFailed(f"{where}. Try {', '.join(ideas)}; {keeper.describe()}")
    keeper.go_back()
    machine.train_step.abandon_window()
    state.num_rollbacks += 1
    state.learning_rate.factor *= ROLLBACK_FACTOR
    console.warn(f"{where}. Going back to {describe_position(state)}, with {ROLLBACK_FACTOR:g} of the learning rate")
    keeper.save_state(with_config=False)  # settings that failed are not kept


def _explain(machine: Machine, data: Data, trouble: NonFinite) -> str:
    """Where the numbers went bad: step, files, layer, term of the loss."""
    epoch, first = divmod(trouble.batch_number or 0, len(data.train))
    if trouble.val_batch is not None:
        model, loader, numbers = machine.eval_step.model, data.val, [trouble.val_batch]
        place = f"in epoch {machine.state.epoch + 1}"
        epoch = 0
    elif trouble.batch_number is not None:
        model, loader = machine.state.model, data.train
        numbers = list(range(first, min(first + machine.accumulation_steps, len(data.train))))
        step = epoch * machine.state.learning_rate.steps_per_epoch + first // machine.accumulation_steps + 1
        place = f"from step {step} on (epoch {epoch + 1}, batch {first + 1} of {len(data.train)})"
    else:
        return str(trouble)
    with leaving_no_trace(machine.train_step):
        for number in numbers:
            files = loader.files(epoch, number)
            try:
                found = explain(model, machine.loss, machine.numerics, loader.read(epoch, number), files, machine.form)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break  # layer by layer a batch takes more memory than a step does
            if found:
                names = ", ".join(str(file) for file in files)
                return f"{trouble} {place}: {found} (images of the batch: {names})"
    return f"{trouble} {place}"


def make_do_with_less(config: Config, machine: Machine, keeper: Keeper, console: Console, reason: str) -> Config:
    """After memory ran out: smaller pieces, from the last state that is whole; or the end, if that is what on_oom says."""
    is_whole = not machine.train_step.is_open
    if config.on_oom == "stop":
        keeper.keep_what_there_is(is_whole)
    keeper.config = config = machine.shrink(config, reason, console, keeper.describe())
    if not is_whole:
        keeper.go_back()
        machine.train_step.abandon_window()
    console.note(f"going on from {describe_position(machine.state)}")
    keeper.save_state()
    return config
