"""From a config to a run that is ready for its first epoch: new, resumed, or refused."""

import dataclasses
import re
import shutil
from unittest.mock import Mock

import pytest
import torch

from helpers.small_runs import ROW, judge, judge_epochs, stopped_budget
from helpers.steps import KnownCosts, SmallNetwork, make_settings, small_components, take_step
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.facts import StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config
from unet_trainer.system.console import counted
from unet_trainer.system.launch import Launch
from unet_trainer.training import build, schedule, setup, time_budget
from unet_trainer.training.checkpoint import FollowingCheckpointer, read_checkpoint, write_checkpoint
from unet_trainer.training.parallel import Job
from unet_trainer.training.resume import adapt_to_world_size
from unet_trainer.training.session import Session
from unet_trainer.training.setup import check_same, config_facts, set_up

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture
def config(tiny_config):
    return load_config({**tiny_config, "run_name": "run"})


@pytest.fixture
def folder(config, tmp_path):
    return tmp_path / "checkpoints" / "run"


def start(config, **changes):
    """A run as the script has it when its first epoch begins; closed again."""
    with Session() as session:
        return set_up(dataclasses.replace(config, **changes), session, Mock())


def save(run):
    run.checkpointer.save_state()
    run.checkpointer.finish()
    return run


def train_and_save(config, epochs=0):
    run = start(config)
    run.components.set_training_mode(0)
    take_step(run.components.train_step, run.loaders.train.read(0, 0), metrics=run.state.metrics)
    for epoch in range(epochs):
        judge(run, {**ROW, "epoch": epoch + 1})
    return save(run)


def test_a_model_that_cannot_run_is_told_before_the_run_has_a_folder(config, folder, monkeypatch):
    class Broken(SmallNetwork):
        def forward(self, pixels):
            raise RuntimeError("shapes do not match\nand more")

    monkeypatch.setattr(build, "build_network", lambda spec, weights: Broken())
    settings = "architecture: unet, encoder: .*, batch_size: 4, image_size: 32"
    with pytest.raises(UserError, match=rf"the model cannot run with {settings}: shapes do not match$"):
        start(config)
    assert not folder.exists()


@pytest.fixture
def budgeted(config, monkeypatch):
    """10 steps of a second in each epoch, of which 8 were planned; the clock stands still between epochs, and the report takes no
    time."""
    monkeypatch.setattr(time_budget, "END_SHARE", 0.0)
    monkeypatch.setattr(setup, "TimeBudget", lambda text, started: stopped_budget(text))
    KnownCosts(StepCost(seconds=1.0, eval_seconds=0.0, memory=0)).install(monkeypatch)
    time_steps_as(monkeypatch, 1.0)
    return dataclasses.replace(config, num_epochs="auto", time_budget="80s", repeats=4)


def time_steps_as(monkeypatch, seconds, eval_seconds=0.0):
    """From here on, steps take so long where they are timed, and samples are there."""
    cost = StepCost(seconds, eval_seconds, memory=0)
    monkeypatch.setattr(setup, "time_steps", lambda *_: cost)
    monkeypatch.setattr(schedule, "time_samples", lambda *_: (0.0, 0.0))


def test_a_start_says_how_long_an_epoch_and_the_run_will_take(config, monkeypatch, capsys):
    """2 batches of 4, and 2 images of validation."""
    time_steps_as(monkeypatch, 100.0, eval_seconds=25.0)
    train_and_save(config, epochs=1)
    assert "\n  Time:       about 8 min: 2 epochs of 4 min\n" in capsys.readouterr().out
    start(config, resume="run")
    assert "\n  Time:       about 1 s: 1 epoch of 1 s to go\n" in capsys.readouterr().out  # as the first one took
    start(config, num_epochs=6000, early_stopping_patience=9, run_name="long", optimizer="sgd", learning_rate="auto")
    text = "up to 25.0 h of it try learning rates; early stopping may end it sooner"  # 3 pilots of 300 steps
    assert f"\n  Time:       about 441.7 h: 6000 epochs of 4 min; {text}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text", "num_epochs", "num_steps"),
    [
        (1.0, "8 epochs of 10 s", 8, 80),
        (3.0, "3 epochs of 30 s, 26 steps in all", 3, 26),
        (10.0, "1 epoch of 80 s, 8 steps in all", 1, 8),
    ],
)
def test_epochs_in_a_time_are_planned_from_the_step_as_it_is_trained_and_printed_once(
    seconds, text, num_epochs, num_steps, budgeted, monkeypatch, capsys
):
    """A trial had said that a step takes a second, so 8 epochs."""
    time_steps_as(monkeypatch, seconds)
    run = start(budgeted)
    said = capsys.readouterr().out
    assert f"\n  Time:       about 80 s: {text}\n" in said
    planned = re.findall(r"(\d+) epochs?|num_epochs: (\d+)|(\d+) were planned|(\d+) steps", said)
    assert {number for numbers in planned for number in numbers if number} <= {str(num_epochs), str(num_steps), "10"}
    assert (run.config.num_epochs, run.state.learning_rate.num_steps) == (num_epochs, num_steps)
    assert "time_budget: " not in said


def test_a_resumed_run_goes_on_with_the_plan_that_it_had(budgeted, folder):
    first = start(budgeted)
    judge_epochs(first, 20.0)
    assert save(first).config.num_epochs == 4
    for config in (budgeted, load_config(folder / "config.yaml")):
        run = start(config, resume="run")
        assert run.config.num_epochs == run.state.learning_rate.num_epochs == 4
        assert run.settings["num_epochs"].reason == "as planned before the run was interrupted"
        assert run.settings.repeatable().num_epochs == "auto"
        judge_epochs(run, 5.0)  # 55 s are left
        assert run.config.num_epochs == 13


def test_a_run_that_used_its_time_has_finished_and_goes_on_with_more(budgeted, capsys):
    run = start(budgeted)
    judge_epochs(run, 20.0, 20.0, 40.0)
    assert save(run).is_finished()
    capsys.readouterr()
    assert start(budgeted, resume="run").is_finished()
    said = capsys.readouterr().out
    assert "Note: this run had finished its 3 epochs; to train on: python train_unet.py --resume " in said
    assert said.splitlines()[-1].endswith(" time_budget=3m")
    run = start(budgeted, resume="run", time_budget="3m")  # 100 s more, at 30 s an epoch: three and a third
    assert (run.config.num_epochs, run.state.learning_rate.num_epochs, run.is_finished()) == (7, 7, False)
    said = capsys.readouterr().out
    assert "time_budget: 80s → 3m" in said
    assert "  Time:       about 3 min: 4 epochs of 30 s to go, " in said


def test_a_run_that_another_process_began_in_the_meantime_is_left_alone(config, folder, monkeypatch):
    def begin_elsewhere(*arguments):
        folder.mkdir(parents=True)
        (folder / "last.pt").touch()

    monkeypatch.setattr(setup, "try_components", begin_elsewhere)
    with pytest.raises(
        UserError, match="run was begun by another process in the meantime; the same command resumes it"
    ):
        start(config, resume="auto")
    assert [path.name for path in folder.iterdir()] == ["last.pt"]


def test_a_compiler_that_fails_is_told_and_config_yaml_keeps_what_was_asked_for(config, folder, monkeypatch, capsys):
    def broken(function, **options):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    run = start(config, compile_model=True)
    assert not run.config.compile_model
    said, why = capsys.readouterr().out, "(RuntimeError: no working C++ compiler)"
    assert f"Warning: compile_model: compiling failed, training continues uncompiled {why}\n" in said
    assert "✓ Compiled" not in said
    line = f"compile_model: true  # here false: compiling failed {why}"
    assert line in (folder / "config.yaml").read_text().splitlines()


def test_a_state_that_lies_elsewhere_begins_a_new_run_and_its_folder_is_left_alone(config, folder, tmp_path, capsys):
    train_and_save(config, epochs=1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copy(folder / "last.pt", foreign / "x.pt")
    for name in ("best.pt", "metrics.csv", "config.yaml", ".report.docx.tmp", ".last.pt.abc45678.tmp"):
        (foreign / name).write_text("somebody's")
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    run = start(config, resume=str(foreign / "x.pt"))
    assert run.checkpointer.folder == folder.parent / "run-2"
    written = {path.name for path in run.checkpointer.folder.iterdir()}
    assert written == {"best.pt", "config.yaml", "run.json", "samples", "split.csv", "train.log"}
    assert (run.state.epoch, run.state.early_stopping.best_epoch) == (1, 1)
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before
    said = capsys.readouterr().out
    assert f"Note: {foreign / 'x.pt'} is not in a run folder: a new run continues from it\n" in said
    assert "best.pt is missing; it is written anew" in said


def test_a_run_folder_from_elsewhere_writes_nothing_through_its_links(config, folder, tmp_path):
    train_and_save(config)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("somebody's")
    (folder / "samples").rmdir()
    (folder / "samples").symlink_to(outside)
    with pytest.raises(UserError, match=rf"{folder / 'samples'} cannot be written to \(it is a link to {outside}\)"):
        start(config, resume="run")
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("file", "somebody's")]


def test_a_position_beyond_the_end_of_an_epoch_is_refused(config, folder):
    """It would wait for batches that never come."""
    run = train_and_save(config)
    run.state.batch = 1000
    save(run)
    with pytest.raises(CheckpointError, match=rf"{folder} cannot be resumed: batch is 1000 of "):
        start(config, resume="run")


@pytest.mark.parametrize("spec", [None, {}, {"tile": [0, 64]}])
def test_a_state_whose_model_is_not_described_is_refused_in_a_sentence(config, folder, spec):
    train_and_save(config)
    content = read_checkpoint(folder / "last.pt")
    write_checkpoint(folder / "last.pt", {**content, "spec": spec if not spec else {**content["spec"], **spec}})
    problem = r"cannot be resumed: what it says of its model cannot be right \("
    with pytest.raises(CheckpointError, match=f"^{folder} {problem}"):
        start(config, resume="run")


# How processes begin together; whole jobs are in tests/test_torchrun.py


def rank_1(value_of_rank_0):
    """The second of two processes, alone; rank 0 has sent it this."""
    job = Job(Launch(1, 2, 1, 2, is_torchrun=True))
    job.broadcast = lambda value: value_of_rank_0
    return job


def test_other_settings_on_another_machine_are_refused_by_name():
    """All would take rank 0's, in silence. Paths and workers may differ, packages may not."""
    facts = config_facts(Config(data_dir="/scratch/a", num_workers=4, batch_size=2, seed=42))
    assert {"torch", "timm"} <= set(facts)
    job, need = rank_1(facts), "the same config"
    check_same(job, config_facts(Config(data_dir="/scratch/b", num_workers=8, batch_size=2, seed=42)), "", need)
    with pytest.raises(UserError, match=r"^batch_size: 4 on .*, 2 for rank 0; all machines need the same config"):
        check_same(job, facts | {"batch_size": "4"}, "", need)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_best_epoch_whose_weights_are_lost_is_forgotten_by_all(is_lost, config, folder):
    """Or they would disagree on which epoch is the best, and when patience runs out."""
    run = train_and_save(config, epochs=1)
    run.processes, run.checkpointer = rank_1(is_lost), FollowingCheckpointer(folder)
    setup._resume(run, {"world_size": 2, "config": run.settings.repeatable_dict()}, [])
    found = run.state.early_stopping.best_epoch, run.state.per_class_iou, run.state.confusion
    assert found == ((0, [], []) if is_lost else (1, [0.5], [[5, 1], [1, 2]]))


@pytest.mark.parametrize(
    ("before", "now", "batch", "expected"), [(2, 1, 3, 6), (2, 1, 0, 0), (3, 1, 1, 3), (1, 2, 3, 0)]
)
def test_another_number_of_processes_goes_on_at_the_same_sample_or_begins_the_epoch_anew(
    before, now, batch, expected, console
):
    """Batches of 2 images: 3 batches of 2 processes are 12 samples, and 6 batches of one; 3 of one end within a step of two."""
    state, config = small_components().state, dataclasses.replace(make_settings().taken, batch_size=2)
    state.batch = batch
    adapt_to_world_size(config, before, Launch(world_size=now, is_torchrun=now > 1), state, console)
    assert state.batch == expected
    said = console.stream.getvalue()
    assert f" → {now}. The effective batch is {2 * now} instead of {2 * before}; learning_rate stays" in said
    assert f"changed since then: {counted(before, 'process', 'processes')} → " in said
    begins_anew = "epoch 1 begins anew: its 6 samples so far end within a step of today's size"
    assert (begins_anew in said) is (now == 2)
