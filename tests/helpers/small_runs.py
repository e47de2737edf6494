"""Real runs with a small network in the test's own process, without the script: to be trained, saved, interrupted and recovered."""

import dataclasses
import io

import torch

from helpers.project import TINY_MODEL
from helpers.steps import CPU_FACTS, small_components
from unet_trainer.config.load import load_config
from unet_trainer.model.metrics import compute_scores
from unet_trainer.reports.run_report import write_report
from unet_trainer.runs.record import RunRecord
from unet_trainer.system.console import Console
from unet_trainer.system.signals import Signals
from unet_trainer.training.build import build_dataset, build_loaders
from unet_trainer.training.checkpoint import Checkpointer
from unet_trainer.training.evaluation import Evaluation
from unet_trainer.training.reporting import Reporter
from unet_trainer.training.resume import split_names
from unet_trainer.training.run import Run
from unet_trainer.training.schedule import fit_into_budget
from unet_trainer.training.settings import build_settings
from unet_trainer.training.time_budget import TimeBudget

# A row of metrics.csv as an epoch fills it.
SCORES = compute_scores(torch.tensor([[5, 1], [1, 2]]), 1)
ROW = {"epoch": 1, "train_loss": 1.0, "val_loss": 1.0, "train_iou": 0.5, "val_iou": 0.5, "val_dice": 0.5}
ROW |= {"learning_rate": 1e-3, "seconds": 1.0, "images_per_second": 1.0, "data_wait": 0.0}
ROW |= {"skipped_steps": 0, "nan_steps": 0, "peak_memory_gib": 0.0, "peak_reserved_gib": 0.0}


def make_run(data_dir, folder, **settings):
    """A run on a folder like tiny_data, 5 training batches of 2 images an epoch; its console writes to a StringIO."""
    defaults = {"data_dir": str(data_dir), "checkpoint_dir": str(folder.parent), "run_name": folder.name}
    defaults |= {"image_size": 32, "batch_size": 2, "num_workers": 0, "device": "cpu"}
    config = load_config({**TINY_MODEL, **defaults, **settings})
    folder.mkdir(exist_ok=True)
    console = Console(io.StringIO())
    dataset = _checked_dataset(config, console)
    budget = stopped_budget(config.time_budget)
    resolved = build_settings(config, CPU_FACTS, dataset, console, budget=budget)
    loaders = build_loaders(resolved.taken, dataset, torch.device("cpu"), console)
    components = small_components(dataset.image_spec, len(loaders.train), resolved)
    record, names = RunRecord(), split_names(dataset.split)
    before = [lambda: record.update(settings=resolved.explained()), record.save]
    checkpointer = Checkpointer(folder, resolved, components.state, names, console, before)
    run = Run(resolved, loaders, components, checkpointer, Reporter(console, record), Signals(), budget)
    run.reporter.make_report = lambda folder, *_, **__: write_report(folder, with_pictures=False)
    return run


def stopped_budget(text):
    """A time budget whose clock stands still until its `now` is moved."""
    budget = TimeBudget(text, started=0.0, clock=lambda: 0.0)
    budget.now, budget.clock = 0.0, lambda: budget.now
    return budget


def judge(run, row, scores=SCORES):
    """As the loop of the script does after validation."""
    improved = run.judge(row, scores)
    if run.settings.replans():
        fit_into_budget(run)
    return improved


def judge_epochs(run, *seconds):
    """Judges epochs that took so long, by their rows and by the clock."""
    for value in seconds:
        run.budget.now += value
        judge(run, {**ROW, "epoch": run.state.epoch + 1, "seconds": value})


def finish_epochs(run, values, scores=SCORES, rates=(10.0,) * 9, **more):
    """After epochs with these val_iou and images per second, best.pt as the run writes it."""
    for epoch, (value, rate) in enumerate(zip(values, rates, strict=False), start=1):
        row = {**ROW, "epoch": epoch, "val_iou": value, "seconds": 2.0, "images_per_second": rate, **more}
        if judge(run, row, scores):
            run.checkpointer._write_state("best.pt", run.checkpointer._copy_best(row, run.state.eval_segmenter))


def evaluation_of(run, scores):
    """What an evaluation of the run's validation images gives, with these scores and no pixel counted."""
    num_ids = len(scores.confusion)
    counts = torch.zeros(len(run.loaders.val.dataset), num_ids, 3, dtype=torch.int64)
    return Evaluation(loss=1.0, scores=scores, first_bad_batch=None, sample_counts=counts, seconds=0.5)


_datasets = {}


def _checked_dataset(config, console):
    """Read once for each config: nothing of a run changes it."""
    key = repr(dataclasses.replace(config, checkpoint_dir="", run_name="run", num_workers=0))
    if key not in _datasets:
        _datasets[key] = build_dataset(config, console, None)
    return _datasets[key]


def said(owner):
    """All that a run, or whatever else has a console, has told the user."""
    return owner.console.stream.getvalue()
