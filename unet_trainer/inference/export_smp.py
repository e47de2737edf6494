"""Export as a folder that `smp.from_pretrained` loads: the bare network of segmentation-models-pytorch.

It knows nothing of normalisation, classes and sizes: those are in a JSON file beside it, and in the README of the folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import segmentation_models_pytorch as smp
import torch

from unet_trainer.inference.export_check import Comparison, ExportError, compare, quiet
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.inference.model_files import SMP_CARD
from unet_trainer.model.segmenter import STRIDE, Segmenter

README = "README.md"
FILES = ("config.json", "model.safetensors", README, SMP_CARD)  # of a folder


def export_smp(segmenter: Segmenter, card: ModelCard, folder: Path) -> Comparison:
    """Writes the folder and returns how it compares. An earlier export there is replaced once the new one is compared."""
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        draft.chmod(0o755)
        network: Any = segmenter.network
        network.save_pretrained(draft)
        indented = json.dumps(json.loads(card.to_json()), indent=2, ensure_ascii=False) + "\n"
        (draft / SMP_CARD).write_text(indented, encoding="utf-8")
        (draft / README).write_text(readme(card), encoding="utf-8")
        for file in draft.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone
        comparison = _compare(segmenter, card, draft)
        _replace(folder, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return comparison


@torch.inference_mode()
def _compare(segmenter: Segmenter, card: ModelCard, folder: Path) -> Comparison:
    with quiet(), contextlib.redirect_stdout(io.StringIO()):  # it prints where it loads from
        network = smp.from_pretrained(str(folder)).eval()
    if ModelCard.from_json((folder / SMP_CARD).read_text(encoding="utf-8")) != card:
        raise ExportError(f"{SMP_CARD} was not read back as it was written")
    return compare(segmenter, card, Segmenter(card.spec, network, channels_last=False), pads=True)


def _replace(folder: Path, draft: Path) -> None:
    """Renames the draft to the folder. An earlier export is moved out of the way first, and deleted last."""
    if not folder.exists():
        draft.rename(folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    folder.rename(old / "old")
    try:
        draft.rename(folder)
    except OSError:
        (old / "old").rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def readme(card: ModelCard) -> str:
    """In place of smp's, which states the licence of its own code as that of the weights."""
    spec, image = card.spec, card.spec.image
    is_single = spec.num_classes == 1
    names = zip(spec.id_names, spec.id_colours, strict=True)
    classes = "\n".join(f"| {index} | {_cell(name)} | {colour} |" for index, (name, colour) in enumerate(names))
    score = "" if card.val_iou is None else f", val IoU {card.val_iou:.4f}"
    sizes = (
        f"Images are resized to {spec.image_size[0]} × {spec.image_size[1]} (height × width), and the logits back."
        if spec.fit == "resize"
        else f"Images keep their resolution; sides are padded to multiples of {STRIDE} at the lower and right edge."
    )
    return f"""---
library_name: segmentation-models-pytorch
license: unknown
pipeline_tag: image-segmentation
tags:
- segmentation-models-pytorch
- semantic-segmentation
- pytorch
---
# {_cell(card.run_name)}

{spec.architecture} with encoder {spec.encoder}, trained with unet_trainer {card.version} (epoch {card.epoch}{score}).

The licence of these weights is for whoever trained them to state, in the `license` field above: the data and pretrained encoder
weights that they come from may set conditions. That of segmentation-models-pytorch (MIT) covers its code alone.

```python
import json
from pathlib import Path

import segmentation_models_pytorch as smp
import torch

network = smp.from_pretrained("FOLDER")
image = json.loads(Path("FOLDER/{SMP_CARD}").read_text())["spec"]["image"]
mean, std = (torch.tensor(image[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
# pixels: N,{image.channels},H,W in the files' own units ({image.depth}), H and W multiples of {STRIDE}
logits = network((pixels.float() - mean) / std)  # N,{spec.num_classes},H,W
ids = {"(logits > 0)[:, 0].long()" if is_single else "logits.argmax(1)"}
```

{sizes}

| class id | name | colour |
| --- | --- | --- |
{classes}
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
