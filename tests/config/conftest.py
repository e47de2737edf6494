"""YAML text as a user's file."""

import pytest

from unet_trainer.config.load import load_config


@pytest.fixture
def load_text(tmp_path):
    """Writes YAML text to a file and loads it."""

    def load(text, overrides=()):
        file = tmp_path / "mine.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(file, overrides)

    return load
