"""Packages that some settings need and requirements.txt does not bring.

What is missing is said before torch is imported, which takes seconds. None of them is imported here.
"""

from __future__ import annotations

from importlib.util import find_spec

from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")  # keys of the config; the packages have the same names
# Protocol → what fsspec needs for it. No others: a name in a config must not choose which code is loaded.
PROTOCOLS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp", "memory": "fsspec"}


def check_trackers(config: Config) -> None:
    """Raises UserError where the package of a tracker that is switched on is missing."""
    for name in TRACKERS:
        if getattr(config, name) and find_spec(name) is None:
            raise UserError(f"{name}: the package is not installed; pip install {name}, or set {name}: false")


def check_url(key: str, place: str) -> None:
    """Raises UserError where a place is a URL and the package of its protocol is missing."""
    protocol, is_url, _ = place.partition("://")
    package = PROTOCOLS.get(protocol) if is_url else None
    if package is not None and find_spec(package) is None:
        raise UserError(f"{key}: {protocol}:// needs the package {package}: pip install {package}")
