"""Fixtures of several test files of this package."""

from __future__ import annotations

import io

import pytest

from helpers.steps import SmallNetwork
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
from unet_trainer.training import build


@pytest.fixture
def console():
    return Console(io.StringIO())


@pytest.fixture
def config(tiny_config):
    return load_config(tiny_config)


@pytest.fixture
def small_network(monkeypatch):
    """In place of a U-Net."""
    monkeypatch.setattr(build, "build_network", lambda spec, weights: SmallNetwork(spec.image.channels, spec.num_classes))
