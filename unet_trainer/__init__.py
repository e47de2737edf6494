"""The parts of the trainer, in packages that import in one direction; `train_unet.py` tells the story that joins
them."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unet_trainer.inference.predictor import load
    from unet_trainer.training.extension import Callback

__all__ = ["Callback", "__version__", "load"]

# OpenMP's threads spin while they wait for each other. Beside another busy process they then hold the core that the
# thread they wait for needs: on 2 cores a step took 3.4 times as long, with this 1.8 times, and alone as long as before
# (docs/performance.md). Read by libgomp when torch is loaded; a value of the user's own stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.9.0"


def __getattr__(name: str) -> Any:
    """Imported when they are used: `load` needs torch, and the command line must answer a typo at once."""
    modules = {"load": "inference.predictor", "Callback": "training.extension"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
