"""Images/s of a training step on this CPU: a plain loop over segmentation-models-pytorch and ours, in turns, on drawn numbers.

python tests/helpers/cpu_speed.py [--rounds 5] [--seconds 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import segmentation_models_pytorch as smp  # noqa: E402
import torch  # noqa: E402

from helpers.steps import make_batch, take_step, tiny_components  # noqa: E402

CASES = (("resnet18", 128, 8), ("tu-mobilenetv3_small_050", 64, 2), ("tu-mobilenetv3_small_050", 160, 8))


def plain_step(encoder, side, batch_size):
    network = smp.Unet(encoder, encoder_weights=None).train()
    optimizer, dice = torch.optim.AdamW(network.parameters(), 1e-3), smp.losses.DiceLoss("binary")
    batch = make_batch(batch_size, side=side)
    images = batch.images.permute(0, 3, 1, 2).contiguous().float() / 255
    masks = batch.masks[:, None].float()

    def step():
        optimizer.zero_grad()
        logits = network(images)
        loss = dice(logits, masks) + torch.nn.functional.binary_cross_entropy_with_logits(logits, masks)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def our_step(encoder, side, batch_size):
    settings = {"encoder": encoder, "image_size": side, "batch_size": batch_size, "decoder_channels": None, "optimizer": "adamw"}
    components = tiny_components(**settings, loss={"dice": 1.0, "cross_entropy": 1.0}, ema_decay=0.99)
    batch = make_batch(batch_size, side=side)
    return lambda: take_step(components.train_step, batch, metrics=components.state.metrics)


def speed(step, seconds):
    started, number = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        number += 1
    return number / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    for encoder, side, batch_size in CASES:
        steps = {"plain": plain_step(encoder, side, batch_size), "ours": our_step(encoder, side, batch_size)}
        for step in steps.values():
            speed(step, 0.1)  # warm
        rounds = [{name: batch_size * speed(step, given.seconds) for name, step in steps.items()} for _ in range(given.rounds)]
        plain, ours = (statistics.median(one[name] for one in rounds) for name in steps)
        print(
            f"{encoder}, {side}², batch {batch_size}: plain {plain:.1f}, ours {ours:.1f} images/s, {ours / plain:.2f}×", flush=True
        )


if __name__ == "__main__":
    main()
