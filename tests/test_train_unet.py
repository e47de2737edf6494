"""The story: train, stop, resume, report; from Python and from the command line, on real files."""

import csv
import json
import math
import shutil

import cv2
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from PIL import Image
from torch.nn.functional import dropout

import train_unet
from helpers.layouts import write
from helpers.project import ROOT
from helpers.runs import assert_same_run, train_until, weights_digest
from helpers.steps import KnownCosts
from train_unet import main, train
from unet_trainer.config import auto
from unet_trainer.config.facts import StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolved_config import PRINTED_ELSEWHERE, WITHOUT_EFFECT
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.inference.evaluation_data import find_source, find_split
from unet_trainer.runs.tables import COLUMNS
from unet_trainer.training import build

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.mark.real_network
def test_a_run_leaves_everything_in_its_folder(tiny_config, capsys):
    result = train(tiny_config)
    names = """best.pt config.yaml curves.png last.pt metrics.csv previous.pt report.html run.json samples
        split.csv train.log val_scores.csv"""
    assert sorted(path.name for path in result.run_dir.iterdir()) == names.split()
    rows = list(csv.DictReader((result.run_dir / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert tuple(rows[0]) == COLUMNS
    written = json.loads((result.run_dir / "run.json").read_text())["result"]
    keys = {"best_val_iou", "best_epoch", "epochs", "stopped_early", "seconds", "images_per_second", "per_class_iou"}
    assert keys <= set(written)
    assert written["best_val_iou"] == result.best_val_iou == max(row["val_iou"] for row in result.history)
    assert written["per_class_iou"] == {"foreground": result.best_val_iou}
    assert (result.run_dir / "samples" / f"epoch_{result.best_epoch:04d}.png").exists()
    said = capsys.readouterr().out
    assert (result.run_dir / "train.log").read_text() == said
    for part in ("off, float32", "10 train, 2 val", "4 × 1 = 4 effective", "Epoch 2/2", "Best epoch", "Next: python"):
        assert part in said


def test_a_dict_a_path_and_a_config_train_the_same(tiny_config, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in tiny_config.items()))
    runs = [train(tiny_config), train(file), train(load_config(tiny_config)), train({}, **tiny_config)]
    runs.append(train(str(runs[0].run_dir / "config.yaml")))  # the config of a run runs again as it is
    assert len({weights_digest(run.run_dir) for run in runs}) == 1
    assert [run.run_dir.name for run in runs] == ["run", "run-2", "run-3", "run-4", "run-5"]
    assert load_config(runs[0].run_dir / "config.yaml").mask_values == (0, 255)


@pytest.mark.real_network
def test_training_learns(tiny_config):
    result = train(tiny_config, num_epochs=8, learning_rate=0.02, augmentation="none", image_size=48, batch_size=2)
    assert result.best_val_iou > 0.6
    assert result.history[-1]["train_loss"] < 0.5 * result.history[0]["train_loss"]


@pytest.mark.real_network
def test_a_run_in_which_everything_is_open_is_repeated_and_resumed_bit_for_bit(
    tiny_data, tmp_path, monkeypatch, capsys
):
    """Four steps of 8 images, an epoch each: what a very slow CPU has time for in an hour."""
    choose_weights = "unet_trainer.training.settings.choose_encoder_weights"
    monkeypatch.setattr(choose_weights, lambda encoder, say, limit: (None, "no network: random weights"))
    costs = KnownCosts(StepCost(seconds=900.0, eval_seconds=0.0, memory=0)).install(monkeypatch)
    config = {"data_dir": str(tiny_data), "checkpoint_dir": str(tmp_path), "device": "cpu"}
    straight = train(config, run_name="straight")
    said = capsys.readouterr().out
    taken = load_config(straight.run_dir / "config.yaml")
    assert (taken.encoder, taken.decoder_channels) == auto.CPU_ENCODERS_FROM_NOTHING[-1]
    assert (taken.batch_size, taken.repeats, taken.num_epochs, taken.image_size) == (8, 1, 4, (64, 64))
    for name in FIELDS:
        if getattr(Config(), name) == "auto" and name not in PRINTED_ELSEWHERE:
            does_something = name not in WITHOUT_EFFECT or getattr(taken, name) != WITHOUT_EFFECT[name]
            assert (f"\n  {name}: " in said) == does_something, name

    train_until(1, config, run_name="broken")
    costs.asked.clear()
    monkeypatch.setattr(choose_weights, lambda encoder, say, limit: pytest.fail("looked for weights"))
    assert_same_run(train(config, run_name="broken", resume="auto").run_dir, straight.run_dir)

    again = train(straight.run_dir / "config.yaml", run_name="again")
    assert weights_digest(again.run_dir) == weights_digest(straight.run_dir)
    assert costs.asked == []


EVERYTHING = {"ema_decay": 0.9, "accumulation_steps": 2, "grad_clip": 1.0, "warmup_epochs": 1, "optimizer": "sgd"}
EVERYTHING |= {"loss": {"dice": 1, "focal": 1}, "batch_size": 2, "freeze_encoder_epochs": 1, "cutmix": 0.5}
EVERYTHING |= {"num_workers": 1}
PLATEAU = {"scheduler": "plateau", "plateau_patience": 1, "learning_rate": 1e-9}


@pytest.mark.parametrize("settings", [pytest.param(EVERYTHING, marks=pytest.mark.real_network), PLATEAU])
def test_resumed_run_equals_uninterrupted_run(settings, tiny_config, monkeypatch):
    """With dropout, so that random state matters."""
    build_network = build.build_network

    def build_with_dropout(spec, weights):
        network = build_network(spec, weights)
        network.segmentation_head.register_forward_pre_hook(lambda head, inputs: dropout(*inputs, 0.2, head.training))
        return network

    monkeypatch.setattr(build, "build_network", build_with_dropout)
    config = {**tiny_config, **settings}
    straight = train(config, run_name="straight")
    train_until(1, config, run_name="broken")
    broken = straight.run_dir.parent / "broken"
    assert weights_digest(broken) != weights_digest(straight.run_dir)
    resumed = train(config, resume=str(broken), run_name="broken")
    assert resumed.run_dir == broken
    assert_same_run(broken, straight.run_dir)
    assert resumed.best_epoch == straight.best_epoch


def test_a_finished_run_says_how_to_train_on_and_two_and_two_epochs_equal_four(tiny_config, capsys):
    """With a schedule that has no horizon, raising num_epochs later is the same as having asked for it."""
    four = train(tiny_config, num_epochs=4, scheduler="constant", run_name="four").run_dir
    two = train(tiny_config, num_epochs=2, scheduler="constant", run_name="two").run_dir
    before = weights_digest(two)
    assert main(["--resume", str(two)]) == 0
    command = f"python train_unet.py --resume {two} num_epochs=4"
    assert f"this run had finished its 2 epochs; to train on: {command}" in capsys.readouterr().out
    assert weights_digest(two) == before
    assert main(["--resume", str(two), "num_epochs=4"]) == 0
    assert weights_digest(two) == weights_digest(four)
    assert len((two / "metrics.csv").read_text().splitlines()) == 5


def test_a_run_that_stopped_early_goes_on_only_when_asked(tiny_config, capsys):
    patience = {"early_stopping_patience": 1, "early_stopping_min_delta": 0.9}
    config = {**tiny_config, **patience, "num_epochs": 9, "scheduler": "constant"}
    stopped = train(config)
    assert stopped.stopped_early
    assert "Stopped early: no better val_iou in 1 epoch" in capsys.readouterr().out
    assert train(config, resume=str(stopped.run_dir)).epochs == stopped.epochs == 2
    assert "had stopped early after epoch 2; to train on: python train_unet.py --resume" in capsys.readouterr().out
    assert train(config, resume=str(stopped.run_dir), early_stopping_patience=3).epochs == 4


@pytest.mark.real_network
def test_bfloat16_and_sizes_that_no_encoder_divides_train_on_a_cpu(tiny_config, capsys):
    result = train(tiny_config, use_amp=True, image_size=[45, 70], num_epochs=1)
    said = capsys.readouterr().out
    assert "Mixed Precision Training: bfloat16\n✓ AMP enabled with bfloat16" in said
    taken = load_config(result.run_dir / "config.yaml")
    assert (taken.use_amp, taken.image_size) == (True, (45, 70))
    assert math.isfinite(result.best_val_iou)


@pytest.fixture(scope="module")
def preset_runs(tmp_path_factory):
    """One checkpoint_dir: what is measured of the data is kept there for the next preset."""
    return tmp_path_factory.mktemp("presets")


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_trains(preset, preset_runs, tiny_config, monkeypatch):
    """As it is but for size: small data, small model, one epoch. Compiling has tests of its own."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    named = ("data_dir", "encoder", "encoder_weights", "decoder_channels", "image_size")
    small = {name: tiny_config[name] for name in named} | {"checkpoint_dir": str(preset_runs), "device": "auto"}
    size = load_config(preset).batch_size
    result = train(preset, **small, num_epochs=1, batch_size=size if size == "auto" else min(size, 10))
    torch.use_deterministic_algorithms(False)
    assert math.isfinite(result.best_val_iou)


# The split of a run


def parts_of(run_dir):
    """Names of the pairs that train and that validate, as split.csv has them."""
    rows = list(csv.DictReader((run_dir / "split.csv").read_text().splitlines()))
    return tuple([row["name"] for row in rows if row["split"] == part] for part in ("train", "val"))


def test_the_split_is_written_down_and_can_be_used_as_split_file(tiny_config, tiny_data):
    run = train(tiny_config, num_epochs=1)
    lines = (run.run_dir / "split.csv").read_text().splitlines()
    assert lines[0] == "image,mask,split,group,name,content"
    assert "images/cells_000.jpg,masks/cells_000.png," in "\n".join(lines)
    train_names, val_names = parts_of(run.run_dir)
    assert (len(train_names), len(val_names)) == (10, 2)
    assert sorted(train_names + val_names) == [f"cells_{index:03d}" for index in range(12)]
    content = torch.load(run.run_dir / "last.pt", weights_only=True)
    assert content["split"] == {"train": train_names, "val": val_names}
    again = train(tiny_config, num_epochs=1, split_file=str(run.run_dir / "split.csv"), seed=7)
    assert parts_of(again.run_dir) == (train_names, val_names)


def test_a_resumed_run_keeps_its_split_when_files_were_added(tiny_config, tiny_data, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    folds = {"num_folds": 6, "fold": 1}  # of which the added files would make others
    config = {**tiny_config, **folds, "data_dir": str(data)}
    straight = train(tiny_config, **folds, run_name="straight")
    train_until(1, config, run_name="broken")
    broken = straight.run_dir.parent / "broken"
    before = (broken / "split.csv").read_text()
    for index in range(3):
        write(data / f"images/added_{index}.jpg", np.random.default_rng(index).integers(0, 256, (64, 64, 3), np.uint8))
        shutil.copy(data / "masks/cells_000.png", data / f"masks/added_{index}.png")
    capsys.readouterr()
    resumed = train(config, resume=str(broken))
    said, table = capsys.readouterr().out, broken / "split.csv"
    left_out = f"left out: 3 pairs, e.g. {data / 'images/added_0.jpg'}\n"
    assert f"Note: not in {table}, which the run began with, and {left_out}" in said
    assert f"10 train, 2 val (as the run began, {table})" in said
    assert resumed.epochs == 2
    assert (broken / "split.csv").read_text() == before
    assert weights_digest(broken) == weights_digest(straight.run_dir)  # as if nothing had been added


def test_one_large_image_is_trained_resumed_and_evaluated_in_blocks(tiny_config, tmp_path, capsys):
    data, chooser, mask = tmp_path / "data", np.random.default_rng(0), np.zeros((700, 800), np.uint8)
    for row, column in chooser.integers(0, (680, 780), (100, 2)):
        mask[row : row + 20, column : column + 20] = 255
    write(data / "images/map.png", chooser.integers(0, 90, (*mask.shape, 3), np.uint8) + mask[:, :, None] // 2)
    write(data / "masks/map.png", mask)
    config = {**tiny_config, "data_dir": str(data), "image_size": 64, "crops_per_image": 4, "learning_rate": 0.1}
    straight = train(config, fit="auto", cache="ram", run_name="straight")
    said = capsys.readouterr().out
    blocks = "blocks of about 266×233 of one image, 29 pixels between train"
    assert f"7 train, 2 val (images/ + masks/, same names; {blocks}" in said
    assert "Note: train and val are parts of one image" in said
    assert straight.best_val_iou > 0.5
    taken = load_config(straight.run_dir / "config.yaml")
    assert (taken.split, taken.fit) == ("blocks", "crop")

    config |= {"fit": "crop", "run_name": "broken"}
    train_until(1, config, cache="disk")
    folder = straight.run_dir.parent / "broken"
    assert (folder / "split.csv").read_text() == (straight.run_dir / "split.csv").read_text()
    shutil.rmtree(folder.parent / ".converted")  # the blocks are cut again
    capsys.readouterr()
    train(config, cache="none", num_workers=1, resume=str(folder))
    assert "left out" not in capsys.readouterr().out
    assert_same_run(folder, straight.run_dir)

    scored, split = find_split(find_source(folder / "best.pt", {}, 1), None)
    assert (split, len(scored.pairs)) == ("val", 2)
    assert {pair.user_files for pair in scored.pairs} == {(data / "images/map.png", data / "masks/map.png")}
    for pair in scored.pairs:
        _, _, top, left, bottom, right = pair.box
        assert (cv2.imread(str(pair.mask), cv2.IMREAD_UNCHANGED) == mask[top:bottom, left:right]).all()
    other = str(shutil.copytree(data, tmp_path / "other"))
    elsewhere, _ = find_split(find_source(folder / "best.pt", {"data_dir": other}, 1), None)
    assert [pair.box for pair in elsewhere.pairs] == [None]  # the whole image


# Crops in training, native resolution in validation


@pytest.mark.real_network
def test_iou_is_that_of_the_native_pixels_from_the_tile_they_lie_most_central_in(tiny_config, tmp_path):
    """32×56 is covered by tiles at columns 0 and 24, which meet at column 28."""
    data, chooser = tmp_path / "data", np.random.default_rng(0)
    for index in range(8):
        ids = np.zeros((32, 56), np.uint8)
        ids[5 + index : 20 + index, 10 : 30 + index] = 1
        ids[:2] = 255
        image = (chooser.integers(0, 90, (*ids.shape, 3)) + 150 * (ids == 1)[:, :, None]).astype(np.uint8)
        write(data / f"images/{index}.png", image)
        write(data / f"masks/{index}.png", ids)
    run = train(tiny_config, data_dir=data, fit="crop", num_epochs=2, learning_rate=0.01, augmentation="none")
    best = torch.load(run.run_dir / "best.pt", weights_only=True)
    channels = tiny_config["decoder_channels"]
    model = smp.Unet(tiny_config["encoder"], encoder_weights=None, decoder_channels=channels, classes=1).eval()
    model.load_state_dict(best["model"])
    mean, std = (torch.tensor(best["config"][name]).view(1, 3, 1, 1) for name in ("image_mean", "image_std"))
    hits = either = 0
    for name in parts_of(run.run_dir)[1]:
        image = np.asarray(Image.open(data / f"images/{name}.png"))
        truth = np.asarray(Image.open(data / f"masks/{name}.png"))
        pixels = (torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() - mean) / std
        with torch.no_grad():
            left, right = (model(pixels[:, :, :, start : start + 32])[0, 0].numpy() > 0 for start in (0, 24))
        predicted = np.concatenate([left[:, :28], right[:, 4:]], axis=1)
        counts = truth != 255
        hits += (predicted & (truth == 1) & counts).sum()
        either += ((predicted | (truth == 1)) & counts).sum()
    assert run.best_val_iou == pytest.approx(hits / either, abs=2e-3)
    assert 0 < hits < either


def test_config_is_the_default_argument(monkeypatch, tiny_config):
    monkeypatch.setattr(train_unet, "CONFIG", {**tiny_config, "run_name": "mine", "num_epochs": 1})
    assert train().run_dir.name == "mine"
    assert isinstance(load_config(train_unet.CONFIG), Config)
