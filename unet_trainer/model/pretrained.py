"""Imagenet weights of an encoder: from this machine, or fetched within a time limit, or none, with the reason. Nothing
here raises or hangs because of a network, a disk or a cache.
"""

import contextlib
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from unet_trainer.system.concurrency import ReadTimeout, call_with_timeout

TIME_LIMIT = 60.0  # seconds in all
CONNECT_LIMIT = 3.0  # of these, to reach the host
TIMM_NAMES = ("model.safetensors", "pytorch_model.bin")  # as timm looks for them
ADVICE = "run once with a network, or give encoder_weights=FILE.safetensors"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository of the Hugging Face hub: the first of the names that it has."""

    repo_id: str
    revision: str | None
    names: tuple[str, ...]

    def is_here(self) -> bool:
        place = constants.HF_HUB_CACHE, self.revision
        with contextlib.suppress(OSError, ValueError):  # a cache that cannot be read, or whose refs are no text
            return any(isinstance(try_to_load_from_cache(self.repo_id, name, *place), str) for name in self.names)
        return False

    def download(self) -> None:
        for name in self.names:
            try:
                hf_hub_download(self.repo_id, name, revision=self.revision)
                return
            except EntryNotFoundError as error:  # Local: the hub did not answer
                if isinstance(error, LocalEntryNotFoundError) or name == self.names[-1]:
                    raise


def choose_encoder_weights(
    encoder: str, say: Callable[[str], object], time_limit: float = TIME_LIMIT
) -> tuple[str | None, str]:
    """ "imagenet" or None for random weights, and why, in one clause. `say` is told when a download begins."""
    files = weight_files(encoder, "imagenet")
    if not files:
        return None, f"the hub has no imagenet weights of {encoder}: random weights"
    if all(file.is_here() for file in files):
        return "imagenet", "on this machine"
    if constants.HF_HUB_OFFLINE:
        return None, f"HF_HUB_OFFLINE is set: random weights; {ADVICE}"
    say(f"Fetching imagenet weights for {encoder} (once; at most {time_limit:g} s)")
    started = time.monotonic()
    failure = fetch(files, time_limit)
    if failure is None and all(file.is_here() for file in files):
        return "imagenet", f"fetched in {time.monotonic() - started:.0f} s"
    return None, f"{failure or 'the download left no file'}: random weights; {ADVICE}"


def is_here(encoder: str, weights: str) -> bool:
    """Whether all that is loaded for these weights is on this machine."""
    files = weight_files(encoder, weights)
    return bool(files) and all(file.is_here() for file in files)


def why_offline() -> str | None:
    """Why nothing can be fetched; None if it can."""
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _check_connection()


def weight_files(encoder: str, weights: str) -> list[HubFile]:
    """What segmentation-models-pytorch or timm load for an encoder; empty where there are no such weights."""
    if encoder.startswith("tu-"):
        return _timm_files(encoder.removeprefix("tu-"))
    import segmentation_models_pytorch as smp

    about = smp.encoders.encoders.get(encoder)  # None: small_resnet
    settings = about and about["pretrained_settings"].get(weights)
    names = () if settings is None else ("config.json", "model.safetensors")
    return [HubFile(settings["repo_id"], settings["revision"], (name,)) for name in names]


def _timm_files(name: str) -> list[HubFile]:
    """Empty for the few that lie on other servers: timm itself fetches them, where imagenet is asked for."""
    import timm

    source = None
    with contextlib.suppress(RuntimeError):  # a tag that does not exist, which build_network refuses
        source = timm.get_pretrained_cfg(name)
    if source is None or not source.hf_hub_id:
        return []
    repo_id, _, revision = source.hf_hub_id.partition("@")
    return [HubFile(repo_id, revision or None, (source.hf_hub_filename,) if source.hf_hub_filename else TIMM_NAMES)]


def fetch(files: list[HubFile], time_limit: float) -> str | None:
    """Downloads the files into their caches; returns None, or why it failed. What is not here in time is left to a
    thread, which ends with this process."""
    if failure := _check_connection():
        return failure

    def download() -> None:
        for file in files:
            file.download()

    disable_progress_bars()
    try:
        call_with_timeout(download, time_limit)
    except ReadTimeout:
        return f"not fetched within {time_limit:g} s"
    except Exception as error:  # whatever it is, the run goes on without these weights
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"the download failed ({type(cause).__name__}: {' '.join(str(cause).split())[:160]})"
    finally:
        enable_progress_bars()
    return None


def _check_connection() -> str | None:
    """Why the hub's host cannot be connected to within CONNECT_LIMIT; None if it can, or a proxy may reach it."""
    target, proxies = urlsplit(constants.ENDPOINT), urllib.request.getproxies()
    if target.scheme in proxies or "all" in proxies:
        return None
    host, port = target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
    try:  # resolving a name has no time limit of its own
        call_with_timeout(lambda: socket.create_connection((host, port), CONNECT_LIMIT).close(), CONNECT_LIMIT)
    except (ReadTimeout, TimeoutError):
        return f"no network ({host} did not answer within {CONNECT_LIMIT:g} s)"
    except OSError as error:
        return f"no network ({host}: {error.strerror or error})"
    return None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, the hub's client uses its cache alone: it would ask the network for a newer version first."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
