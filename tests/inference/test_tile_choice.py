"""The tile of validation, which a model is used with too: larger than training's crops where the network sees the same in it."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch

from helpers.evaluated_models import train_tiny, write_cells
from helpers.steps import make_spec
from train_unet import main, train
from unet_trainer import load
from unet_trainer.images.image_decoding import read_image
from unet_trainer.images.mask_decoding import read_mask
from unet_trainer.inference.engine import read_model
from unet_trainer.training.build import choose_tile

RESIDUAL = "small_resnet"
SPEC = make_spec(encoder=RESIDUAL, decoder_channels=(16, 8, 8, 8, 8), fit="crop", image_size=(32, 64))


@pytest.mark.parametrize(
    ("sizes", "batch_size", "tile"),
    [
        ([(500, 500), (10, 500)], 4, (64, 128)),
        ([(32, 70), (20, 65)], 2, (32, 96)),
        ([(32, 64), (20, 20)], 8, None),
        ([(500, 500)], 3, None),
        ([(500, 500), *[(32, 64)] * 90], 8, None),
    ],
)
def test_a_tile_is_twice_a_crop_where_images_and_batches_are_so_large(sizes, batch_size, tile):
    before = torch.get_rng_state()
    assert choose_tile(SPEC, sizes, batch_size) == tile
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("encoder", "tu-mobilenetv3_small_050"),
        ("encoder", "tu-seresnet18"),  # this and the next begin with branches times 0
        ("encoder", "tu-convnextv2_atto"),
        ("fit", "resize"),
        ("architecture", "fpn"),  # group norm
    ],
)
def test_networks_that_pool_over_their_input_and_those_of_whole_images_have_no_larger_tile(key, value):
    spec = dataclasses.replace(SPEC, decoder_channels=None, **{key: value})
    assert choose_tile(spec, [(500, 500)], 8) is None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    settings = {"fit": "crop", "crops_per_image": 2, "image_size": 32, "batch_size": 4, "encoder": RESIDUAL}
    train_tiny(write_cells(folder / "data"), folder / "runs", "crop", **settings)
    return folder


def specs(run_dir):
    return [read_model(run_dir / name)[0].spec for name in ("best.pt", "last.pt")]


def test_the_tile_is_kept_in_both_checkpoints_and_used_unless_another_is_asked_for(place, tmp_path):
    spec, last = specs(place / "runs/crop")
    assert spec.tile == last.tile == (64, 64)
    assert load(place / "runs/crop").predictor.tile == spec.tile
    image = place / "data/val/images/2.jpg"
    assert main(["predict", str(place / "runs/crop"), str(image), "--out", str(tmp_path), "--tile", "96"]) == 0
    mask, pixels = read_mask(tmp_path / "2.png"), read_image(image)
    assert np.array_equal(mask, load(place / "runs/crop", tile=96)(pixels))
    assert not np.array_equal(mask, load(place / "runs/crop")(pixels))


def test_predict_and_evaluate_agree(place, tmp_path, capsys):
    """The IoU of evaluate, and of the masks that predict writes. Batches differ, and with them the rounding of a pixel or two."""
    run, data = place / "runs/crop", place / "data"
    assert main(["evaluate", str(run), "--out", str(tmp_path / "scores")]) == 0
    expected = r"IoU 0\.\d+; here (0\.\d+) \(training's tiles are not blended: --tile as-trained\)"
    here = re.search(expected, capsys.readouterr().out)
    assert main(["predict", str(run), str(data / "val/images"), "--out", str(tmp_path / "masks")]) == 0
    assert "in blended tiles of 64×64 (as in validation)" in capsys.readouterr().out
    hits = union = 0
    for path in sorted((tmp_path / "masks").glob("*.png")):
        truth, found = read_mask(data / f"val/masks/{path.name}") > 0, read_mask(path) > 0
        hits, union = hits + (truth & found).sum(), union + (truth | found).sum()
    assert hits / union == pytest.approx(float(here[1]), abs=3e-4)


def test_tiles_as_trained_give_trainings_number(place, tmp_path, capsys):
    """To the last digit: the same pixels, JPEGs decoded alike, images smaller than a tile, sizes that no batch shares."""
    assert main(["evaluate", str(place / "runs/crop"), "--tile", "as-trained", "--out", str(tmp_path)]) == 0
    iou = json.loads((tmp_path / "evaluation.json").read_text())["mean"]["dataset"]["iou"]["value"]
    assert iou == json.loads((place / "runs/crop/run.json").read_text())["result"]["best_val_iou"]
    assert 0 < iou < 1  # an equal score says something


def test_a_resumed_run_keeps_its_tile(place, tmp_path):
    """Scores of two sizes of tiles cannot be compared; a new run with such a batch would have another."""
    shutil.copytree(place / "runs", tmp_path / "runs")
    changes = {"checkpoint_dir": str(tmp_path / "runs"), "batch_size": 2, "num_epochs": 3}
    train(tmp_path / "runs/crop/config.yaml", resume=str(tmp_path / "runs/crop"), **changes)
    assert [spec.tile for spec in specs(tmp_path / "runs/crop")] == [(64, 64)] * 2


def test_models_that_resize_have_no_tile_and_know_how_large_their_images_were(trained_run):
    assert [(spec.tile, spec.source_sides) for spec in specs(trained_run)] == [(None, (64.0, 64.0))] * 2
