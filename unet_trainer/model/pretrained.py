"""Imagenet weights of an encoder by themselves: from this machine, or fetched within a time limit, or none, with the reason.

Nothing here raises or hangs because of a network, a disk or a cache: a download runs in a process of its own, which is ended at
the time limit, and what is on this machine is loaded without asking the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import segmentation_models_pytorch as smp
import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache

from unet_trainer.model import fetch_weights

TIME_LIMIT = 60.0  # seconds in all
CONNECT_LIMIT = 3.0  # of these, to reach the hub's host
TERMINATE_LIMIT = 2.0  # to delete what was fetched in part
TIMM_NAMES = ("model.safetensors", "pytorch_model.bin")  # as timm looks for them
ADVICE = "run once with a network, or give encoder_weights=FILE.safetensors"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository of the Hugging Face hub: the first of the names that it has."""

    repo_id: str
    revision: str | None
    names: tuple[str, ...]

    def is_here(self) -> bool:
        try:
            found = [try_to_load_from_cache(self.repo_id, name, constants.HF_HUB_CACHE, self.revision) for name in self.names]
        except (OSError, ValueError):  # a cache that cannot be read, or whose refs are no text
            return False
        return any(isinstance(path, str) for path in found)


@dataclass(frozen=True)
class UrlFile:
    """A file of another server, and where torch.hub keeps it."""

    url: str
    path: str

    def is_here(self) -> bool:
        return Path(self.path).is_file()


def choose_encoder_weights(
    encoder: str, say: Callable[[str], object], time_limit: float = TIME_LIMIT, connect_limit: float = CONNECT_LIMIT
) -> tuple[str | None, str]:
    """ "imagenet" or None for random weights, and why, in one clause. `say` is told when a download begins."""
    files = weight_files(encoder, "imagenet")
    if not files:
        return None, f"{encoder} has no imagenet weights: random weights"
    if is_here(encoder, "imagenet"):
        return "imagenet", "on this machine"
    if constants.HF_HUB_OFFLINE:
        return None, f"HF_HUB_OFFLINE is set: random weights; {ADVICE}"
    say(f"Fetching imagenet weights for {encoder} (once; at most {time_limit:g} s)")
    started = time.monotonic()
    failure = fetch(files, time_limit, connect_limit)
    if failure is None and is_here(encoder, "imagenet"):
        return "imagenet", f"fetched in {time.monotonic() - started:.0f} s"
    return None, f"{failure or 'the download left no file'}: random weights; {ADVICE}"


def is_here(encoder: str, weights: str) -> bool:
    """Whether all that is loaded for these weights is on this machine."""
    files = weight_files(encoder, weights)
    return bool(files) and all(file.is_here() for file in files)


def weight_files(encoder: str, weights: str) -> list[HubFile | UrlFile]:
    """What segmentation-models-pytorch or timm load for an encoder that exists; empty where there are no such weights."""
    if encoder.startswith("tu-"):
        return _timm_files(encoder.removeprefix("tu-"))
    settings = smp.encoders.encoders[encoder]["pretrained_settings"].get(weights)
    if settings is None:
        return []
    return [HubFile(settings["repo_id"], settings["revision"], (name,)) for name in ("config.json", "model.safetensors")]


def _timm_files(name: str) -> list[HubFile | UrlFile]:
    try:
        source = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a tag that does not exist, which build_network refuses
        return []
    if source is not None and source.hf_hub_id:
        repo_id, _, revision = source.hf_hub_id.partition("@")
        return [HubFile(repo_id, revision or None, (source.hf_hub_filename,) if source.hf_hub_filename else TIMM_NAMES)]
    if source is not None and source.url and isinstance(source.url, str):
        path = Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(source.url).path).name)
        return [UrlFile(source.url, str(path))]
    return []


def fetch(files: list[HubFile | UrlFile], time_limit: float, connect_limit: float = CONNECT_LIMIT) -> str | None:
    """Downloads the files into their caches; returns None, or why it failed."""
    url_files = [file for file in files if isinstance(file, UrlFile)]
    request: dict[str, Any] = {
        "hub_files": [dataclasses.asdict(file) for file in files if isinstance(file, HubFile)],
        "url_files": [dataclasses.asdict(file) for file in url_files],
        "endpoint": constants.ENDPOINT,
        "cache_dir": str(constants.HF_HUB_CACHE),
        "connect_to": url_files[0].url if url_files else constants.ENDPOINT,
        "connect_limit": connect_limit,
    }
    command = [sys.executable, "-P", fetch_weights.__file__, json.dumps(request)]
    variables = {**environ, "HF_HUB_DISABLE_XET": "1"}  # its native code does not end at SIGTERM, and would leave parts of files
    try:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        return f"no process could be started to fetch them ({error.strerror})"
    with process:
        try:
            output, _ = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            return f"not fetched within {time_limit:g} s"
        finally:
            _end(process)
    if process.returncode == 0:
        return None
    return output.strip() or f"the download failed (exit status {process.returncode})"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_LIMIT)
        process.kill()


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, the hub's client uses its cache alone: it would ask the network for a newer version first."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
