"""How fast this machine is at what docs/ gives numbers of, in a temporary folder. What is compared is measured in turns.

python tests/helpers/speed.py step [--rounds 5] [--seconds 3]       a training step on this CPU, plain and ours, on drawn numbers
python tests/helpers/speed.py predict [--images 1000] [--encoder resnet34] [options of predict, e.g. --batch-size 32]
python tests/helpers/speed.py shards FOLDER [--epochs 3] [--workers 2] [--size 256] [--delay 0.02]
python tests/helpers/speed.py torchrun [--rounds 2] [--images 1024] [--epochs 6] [settings, e.g. batch_size=64]

predict: JPEGs of 512 × 512 and a U-Net with random weights. shards: reading a dataset without a model, from its files, from shards
of it and from a web server; `later` are the passes after the first. torchrun: plain python and one process with NCCL.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import segmentation_models_pytorch as smp  # noqa: E402
import torch  # noqa: E402

from helpers.predicting import write_model  # noqa: E402
from helpers.shard_server import serving  # noqa: E402
from helpers.steps import make_batch, silent_console, take_step, tiny_components  # noqa: E402
from train_unet import main  # noqa: E402
from unet_trainer import load as load_model  # noqa: E402
from unet_trainer.config.load import load_config  # noqa: E402
from unet_trainer.data.dataset_report import build_dataset_report  # noqa: E402
from unet_trainer.data.formats.demo import draw_sample  # noqa: E402
from unet_trainer.images.image_decoding import write_image  # noqa: E402
from unet_trainer.images.tiling import WholeImages  # noqa: E402
from unet_trainer.loading.dataset import SegmentationDataset  # noqa: E402
from unet_trainer.loading.loader import Loader  # noqa: E402
from unet_trainer.loading.sample_reader import PairSize  # noqa: E402
from unet_trainer.loading.worker_pool import WorkerPool  # noqa: E402
from unet_trainer.runs.tables import column, read_metrics  # noqa: E402

SIDE = 512
PREDICT_BATCH, PLAIN_IMAGES = 32, 100
STEPS = (("resnet18", 128, 8), ("tu-mobilenetv3_small_050", 64, 2), ("tu-mobilenetv3_small_050", 160, 8))
SETTINGS = ["image_size=512", "fit=resize", "cache=none", "repeats=1"]
SETTINGS += ["encoder_weights=null", "early_stopping_patience=null"]
LAUNCHERS = {"python": [], "torchrun, one process": ["-m", "torch.distributed.run", "--nproc-per-node=1"]}


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
    settings = {"encoder": encoder, "image_size": side, "batch_size": batch_size, "decoder_channels": None}
    settings |= {"optimizer": "adamw", "loss": {"dice": 1.0, "cross_entropy": 1.0}, "ema_decay": 0.99}
    components = tiny_components(**settings)
    batch = make_batch(batch_size, side=side)
    return lambda: take_step(components.train_step, batch, metrics=components.state.metrics)


def speed(step, seconds):
    started, number = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        number += 1
    return number / (time.perf_counter() - started)


def measure_step(given, folder, further):
    for encoder, side, batch_size in STEPS:
        steps = {"plain": plain_step(encoder, side, batch_size), "ours": our_step(encoder, side, batch_size)}
        for step in steps.values():
            speed(step, 0.1)  # warm
        rounds = [
            {name: batch_size * speed(step, given.seconds) for name, step in steps.items()} for _ in range(given.rounds)
        ]
        plain, ours = (statistics.median(one[name] for one in rounds) for name in steps)
        speeds = f"plain {plain:.1f}, ours {ours:.1f} images/s, {ours / plain:.2f}×"
        print(f"{encoder}, {side}², batch {batch_size}: {speeds}", flush=True)


def write_photo(path):
    """Smooth areas, edges and grain: about as many bytes as a photograph."""
    random = np.random.default_rng(int(path.stem))
    coarse = cv2.resize(random.integers(0, 256, (12, 12, 3), np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    for _ in range(20):
        centre, axes = random.integers(0, SIDE, 2).tolist(), random.integers(8, 90, 2).tolist()
        cv2.ellipse(coarse, centre, axes, int(random.integers(180)), 0, 360, random.integers(0, 256, 3).tolist(), -1)
    grain = random.normal(0, 6, coarse.shape)
    cv2.imwrite(str(path), (coarse + grain).clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])


def measure_predict(given, folder, further):
    (folder / "images").mkdir()
    with ThreadPoolExecutor() as threads:
        list(threads.map(write_photo, [folder / f"images/{number:04}.jpg" for number in range(given.images)]))
    model = write_model(
        folder / "run/best.pt", encoder=given.encoder, decoder_channels=None, fit="resize", image_size=(SIDE, SIDE)
    )
    engine = load_model(model).engine
    batch = torch.zeros(PREDICT_BATCH, SIDE, SIDE, 3, dtype=torch.uint8)
    batch = batch.pin_memory() if engine.device.type == "cuda" else batch
    for _ in range(2):
        rate(lambda: engine.logits(batch), PREDICT_BATCH, engine.device)
    forward = rate(lambda: engine.logits(batch), PREDICT_BATCH, engine.device)
    names = sorted((folder / "images").iterdir())[:PLAIN_IMAGES]
    (folder / "plain").mkdir()
    plain = rate(lambda: plain_loop(engine, names, folder / "plain"), len(names), engine.device, seconds=0)
    print(f"forward pass alone {forward:.0f} images/s, plain loop {plain:.0f}; predict:", flush=True)
    for turn in range(3):
        main(["predict", str(model), str(folder / "images"), "--out", str(folder / f"out{turn}"), *further])


def rate(call, num_images, device, seconds=2.0):
    started, num_calls = time.perf_counter(), 0
    while not num_calls or time.perf_counter() - started < seconds:
        call()
        num_calls += 1
        if device.type == "cuda" and num_calls % 4 == 0:
            torch.cuda.synchronize(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_calls * num_images / (time.perf_counter() - started)


@torch.no_grad()
def plain_loop(engine, names, out):
    """Predict as the examples of segmentation-models-pytorch do: one image after the other, in float32."""
    spec = engine.card.spec
    for path in names:
        image = cv2.imread(str(path))[:, :, ::-1]
        pixels = torch.from_numpy(spec.image.to_batch(image.copy())).unsqueeze(0).to(engine.device)
        mask = engine.segmenter(pixels).argmax(1)[0]
        cv2.imwrite(str(out / f"{path.stem}.png"), mask.cpu().numpy().astype(np.uint8))


def measure_shards(given, folder, further):
    shards = folder / "shards"
    words = [f"data_dir={given.folder}", f"checkpoint_dir={folder / 'runs'}", "--out", str(shards), "--shard-mb", "20"]
    assert main(["shard", *words]) == 0
    with serving(shards) as server:
        server.delay = given.delay
        for place in (given.folder, shards, server.url):
            config = load_config({"data_dir": str(place), "checkpoint_dir": str(folder / "runs")})
            checked = build_dataset_report(config, silent_console()).checked()
            pairs, pool = checked.split.train, WorkerPool(given.workers)
            known = [PairSize(image.size, mask.size) for image, mask in zip(*checked.facts_of(pairs), strict=True)]
            tiling = WholeImages((given.size, given.size), len(pairs))
            dataset = SegmentationDataset(pairs, known, checked.coding, checked.image_spec, tiling, None, 0)
            loader, speeds = Loader(dataset, 16, shuffle=True, pool=pool), []
            for epoch in range(given.epochs + 1):
                started = time.perf_counter()
                number = sum(batch.num_images for batch in loader.epoch(epoch))
                speeds.append(f"{number / (time.perf_counter() - started):.0f}")
            pool.close()
            print(f"{str(place)[-40:]:40s} first {speeds[0]}, later {' '.join(speeds[1:])} images/s", flush=True)


def train_with(launcher, folder, name, epochs, further):
    """Images/s of each epoch but the first, which starts the workers."""
    places = [
        f"data_dir={folder / 'data'}",
        f"checkpoint_dir={folder / 'runs'}",
        f"run_name={name}",
        f"num_epochs={epochs}",
    ]
    script = [str(ROOT / "train_unet.py"), str(ROOT / "configs/fast.yaml")]
    command = [sys.executable, *LAUNCHERS[launcher], *script, *SETTINGS, *places, *further]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(f"{launcher} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return column(read_metrics(folder / "runs" / name / "metrics.csv")[1:], "images_per_second")


def measure_torchrun(given, folder, further):
    for part in ("images", "masks"):
        (folder / "data" / part).mkdir(parents=True)

    def draw(index):
        image, mask = draw_sample(index, side=SIDE)
        write_image(folder / f"data/images/{index:05d}.jpg", image)
        write_image(folder / f"data/masks/{index:05d}.png", mask)

    with ThreadPoolExecutor() as threads:
        list(threads.map(draw, range(given.images)))
    found = {launcher: [] for launcher in LAUNCHERS}
    for number in range(given.rounds):
        for launcher, rates in found.items():
            measured = train_with(launcher, folder, f"{launcher.split(',')[0]}-{number}", given.epochs, further)
            speeds = ", ".join(f"{rate:.0f}" for rate in measured)
            print(f"round {number + 1}, {launcher}: {speeds} images/s", flush=True)
            rates += measured
    plain, job = (statistics.median(rates) for rates in found.values())
    print(f"medians: python {plain:.1f}, torchrun {job:.1f} images/s: {job / plain:.1%} of plain python")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for measure, options in (
        (measure_step, {"rounds": 5, "seconds": 3.0}),
        (measure_predict, {"images": 1000, "encoder": "resnet34"}),
        (measure_shards, {"epochs": 3, "workers": 2, "size": 256, "delay": 0.02}),
        (measure_torchrun, {"rounds": 2, "images": 1024, "epochs": 6}),
    ):
        command = commands.add_parser(measure.__name__.removeprefix("measure_"))
        command.set_defaults(measure=measure)
        for name, value in options.items():
            command.add_argument(f"--{name}", type=type(value), default=value)
        if measure is measure_shards:
            command.add_argument("folder")
    given, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        given.measure(given, Path(name), further)
