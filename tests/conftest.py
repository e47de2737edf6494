"""A small dataset and a small model: every test trains for real, in seconds.

With -n the process that hands the tests out loads this file too, and runs none: what takes seconds to import is imported where it is used.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.project import TINY_MODEL
from unet_trainer.system.resources import count_cores, total_host_memory

if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # started with nohup, the tests would inherit that it is ignored
# Here and in all processes that tests start. Tensors are tiny: threads would spend more time waiting for each other than computing,
# and ten times that where other tests have the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# What tests write need not survive a power failure: milliseconds for each file, and a run writes dozens.
os.fsync = lambda number: None

MEMORY_OF_A_PROCESS = 3 * 10**9  # 1.8 GB, and those that its tests start


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """-n auto: as many as this machine, or its container, has cores and memory for."""
    return max(1, min(count_cores(), total_host_memory() // MEMORY_OF_A_PROCESS))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tiny_data(shared_folder: Path) -> Path:
    """12 pairs of 64×64, masks in {0, 255}; 10 train and 2 validate at the default val_fraction. Read-only by agreement."""
    from filelock import FileLock

    from unet_trainer.data.formats.demo import write_demo

    with FileLock(shared_folder / "tiny.lock"):
        if not (shared_folder / "tiny").is_dir():
            write_demo(shared_folder / "tiny.new/data", num_images=12, side=64)
            (shared_folder / "tiny.new").rename(shared_folder / "tiny")
    return shared_folder / "tiny/data"


@pytest.fixture(scope="session")
def trained_run(tiny_data: Path, shared_folder: Path) -> Path:
    """The folder of a finished run of a real U-Net with its report and pictures, trained once. Read-only by agreement: copy it."""
    from filelock import FileLock

    from train_unet import train
    from unet_trainer.runs.record import read_run_summary

    folder = shared_folder / "trained/demo"
    settings = {**TINY_MODEL, "image_size": 64, "batch_size": 4, "num_epochs": 1, "num_workers": 0}
    with FileLock(shared_folder / "trained.lock"):
        if read_run_summary(folder).state != "finished":
            train(settings, data_dir=str(tiny_data), checkpoint_dir=str(folder.parent), run_name="demo", device="cpu")
    return folder


@pytest.fixture
def tiny_config(tiny_data: Path, tmp_path: Path) -> dict[str, Any]:
    """Two epochs of two steps on the CPU, in a second or two."""
    return {
        **TINY_MODEL,
        "data_dir": str(tiny_data),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "image_size": 32,
        "batch_size": 4,
        "num_epochs": 2,
        "num_workers": 0,
        "device": "cpu",
    }


@pytest.fixture
def small_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs in this process train a network of a few hundred parameters, unless the test is marked real_network."""
    from helpers.steps import SmallNetwork

    def make(spec, weights):
        return SmallNetwork(spec.image.channels, spec.num_classes)

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("real_network") is None:
            patch.setattr("unet_trainer.training.build.build_network", make)
        yield


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of the pictures of runs are marked real_pictures; other runs leave them out.

    Patches of its own: the fixture monkeypatch, begun here, would be undone after small_network, and leave that in place.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "train_unet" in sys.modules and request.node.get_closest_marker("real_pictures") is None:
            from helpers.killed_runs import leave_out_pictures

            leave_out_pictures(patch.setattr)
        yield


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The bytes of a file are no name: an archive holds the second in which it was written, and with -n every process must give a case
    the same name. Its number is added."""
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode("ascii").isprintable()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run. GPU tests say why they do not."""
    import torch

    torch.set_num_threads(1)  # where torch was loaded before this file
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
