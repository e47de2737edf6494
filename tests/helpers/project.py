"""Where the project lies, and the smallest model that tests train."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

# A recipe in which nothing is left open, so that no test measures data or tries steps to decide it.
FIXED_RECIPE: dict[str, Any] = {
    "fit": "resize",
    "augmentation": [{"HorizontalFlip": {"p": 0.5}}, {"VerticalFlip": {"p": 0.5}}],
    "cache": "none",
    "encoder_weights": None,
    "loss": {"dice": 1.0, "cross_entropy": 1.0},
    "class_weights": None,
    "decoder_attention": "none",
    "cutmix": 0,
    "batch_size": 8,
    "num_epochs": 50,
    "learning_rate": 1e-3,
    "weight_decay": 1e-4,
    "warmup_epochs": 0,
    "ema_decay": None,
    "early_stopping_patience": None,
    "use_amp": False,
    "compile_model": False,
}
# The smallest U-Net that still has everything: skip connections, batch norm, depthwise convolutions.
TINY_MODEL: dict[str, Any] = {
    **FIXED_RECIPE,
    "encoder": "tu-test_efficientnet",  # which timm has for tests
    "decoder_channels": [16, 8, 8, 8, 8],
}
