"""Loaded once by the process from which test processes are forked, so that each begins to train at once."""

import torch

import train_unet  # noqa: F401
from helpers.project import TINY_MODEL
from unet_trainer.config.load import load_config
from unet_trainer.model.network import build_network
from unet_trainer.model.optimizer import build_optimizer
from unet_trainer.runs import checkpointer as keeper  # noqa: F401
from unet_trainer.training import build as assemble  # noqa: F401
from unet_trainer.training import diagnosis  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork
config = load_config({**TINY_MODEL, "in_channels": 3})
model = build_network(config)
for parameter in model.parameters():  # no backward pass: the threads of autograd do not survive a fork either
    parameter.grad = torch.zeros_like(parameter)
build_optimizer(config, model).step()  # loads what an optimizer needs, which takes seconds
