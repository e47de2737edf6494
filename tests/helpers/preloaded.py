"""Loaded once by the process from which test processes are forked, so that each begins to train at once."""

import os

import torch

import train_unet  # noqa: F401
from helpers.steps import tiny_components
from unet_trainer.reports import run_report  # noqa: F401
from unet_trainer.reports.page import _environment
from unet_trainer.training import recovery, result, setup  # noqa: F401

os.fsync = lambda number: None  # as in conftest.py
torch.set_num_threads(1)  # threads do not survive a fork
components = tiny_components()
for (
    parameter
) in components.state.segmenter.parameters():  # no backward pass: autograd's threads do not survive a fork either
    parameter.grad = torch.zeros_like(parameter)
components.state.optimizer.step()  # loads what an optimizer needs, which takes seconds
for name in ("base.html", "parts.html", "report.html"):
    _environment().get_template(name)  # compiled once
