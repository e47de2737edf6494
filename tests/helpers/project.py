"""Where the project lies, and the smallest model that tests train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

# The smallest U-Net that still has everything: skip connections, batch norm, depthwise convolutions.
TINY_MODEL: dict[str, Any] = {"encoder": "tu-mobilenetv3_small_050", "decoder_channels": [16, 8, 8, 8, 8]}
