"""Fixtures of several test files of this package."""

import io

import pytest

from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console


@pytest.fixture
def console():
    return Console(io.StringIO())


@pytest.fixture
def config(tiny_config):
    return load_config(tiny_config)
