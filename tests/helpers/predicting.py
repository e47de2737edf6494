"""Models with random weights as files, images to predict, and engines whose logits are known."""

import sys
import time
from pathlib import Path

import torch

from helpers.checkpoints import save_model
from helpers.steps import make_spec
from unet_trainer.model.network import build_network
from unet_trainer.model.segmenter import Segmenter

GEO_TAGS = [(33550, 12, 3, (0.5, 0.5, 0.0), True), (33922, 12, 6, (0.0, 0.0, 0.0, 100.0, 200.0, 0.0), True)]


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_model(path, augmentation="default", seed=0, **spec):
    """A checkpoint like best.pt, with random weights whose running statistics are those of random images. Returns the path."""
    spec = make_spec(**{"image_size": (64, 64), **spec})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_network(spec, encoder_weights=None)
        network.train()(torch.randn(4, spec.image.channels, 64, 64))
    settings = {"ema_decay": None, "augmentation": augmentation}
    return save_model(path, Segmenter(spec, network, channels_last=True), config=settings)


def predict_slowly(words, log):
    """Predict in a separate process, to be stopped: an image takes 50 ms to write, its file half written meanwhile."""
    from train_unet import main
    from unet_trainer.system.atomic_files import Draft

    sys.stdout = sys.stderr = Path(log).open("a", buffering=1)  # noqa: SIM115 (for the life of the process)
    keep = Draft.keep

    def keep_slowly(draft):
        draft.file.flush()
        time.sleep(0.05)
        keep(draft)

    Draft.keep = keep_slowly
    sys.exit(main(words))
