"""The tile that a model is used with: the best on validation images, within the time, kept in the checkpoint, and used by all."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from helpers.brightness_engine import BrightnessEngine
from helpers.evaluated_models import bright, train_tiny, write_cells, write_pairs
from train_unet import main, train
from unet_trainer import load
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import MaskCoding, read_mask
from unet_trainer.images.tiling import tile_images
from unet_trainer.inference import evaluate
from unet_trainer.inference.engine import read_model
from unet_trainer.inference.evaluate import TileScores, candidate_tiles, measure_tiles
from unet_trainer.loading.dataset import PairSize, SegmentationDataset
from unet_trainer.training import time_budget

CODING = MaskCoding((0, 255))


class BestAt(BrightnessEngine):
    """Sees what is there in tiles of these sides, and foreground everywhere in others."""

    def __init__(self, *sides, **spec):
        super().__init__(**spec)
        self.sides = sides

    def logits(self, images):
        logits = super().logits(images)
        logits[:, 1] += 0.0 if images.shape[1] in self.sides else 100.0
        return logits


class Clock:
    """One second for each call of the engine, and none for anything else."""

    def __init__(self, engine):
        self.engine = engine

    def monotonic(self):
        return float(len(self.engine.shapes))


def dataset_of(folder, sizes):
    """Half of each image is foreground, in its lower part."""
    masks = [np.repeat(np.arange(height) >= height // 2, width).reshape(height, width).astype(np.uint8) for height, width in sizes]
    pairs = write_pairs(folder, [(bright(mask), mask * 255) for mask in masks])
    known = [PairSize(size, size) for size in sizes]
    return SegmentationDataset(pairs, known, CODING, RGB_8BIT, tile_images(sizes, (32, 32)), None, seed=0)


@pytest.mark.parametrize(
    ("sizes", "most_pixels", "tiles"),
    [
        ([(32, 32), (20, 90)], 10**6, [(32, 48), (64, 96)]),
        ([(500, 500)], 128 * 192 - 1, [(32, 48), (64, 96)]),
        ([(65, 20), (10, 10)], 10**6, [(32, 48), (64, 96), (128, 192)]),
    ],
)
def test_larger_tiles_are_tried_as_long_as_an_image_is_larger_than_the_one_before(sizes, most_pixels, tiles):
    assert candidate_tiles((32, 48), sizes, most_pixels) == tiles


@pytest.mark.parametrize(("sides", "best"), [((32,), 32), ((64, 128), 64), ((), 32)])
def test_the_best_tile_is_chosen_and_of_equal_ones_the_smallest(tmp_path, sides, best):
    found = measure_tiles(BestAt(*sides), dataset_of(tmp_path, [(128, 128)] * 2), seconds=60)
    assert found.best == (best, best)
    assert found.iou[best, best] == (1.0 if sides else 0.5)
    assert (found.num_images, found.num_all) == (2, 2)


def test_fewer_sizes_are_tried_where_time_is_short_and_none_where_there_is_no_time(tmp_path, monkeypatch):
    dataset = dataset_of(tmp_path, [(128, 128)] * 5)
    engine = BestAt(32)
    monkeypatch.setattr(evaluate, "time", Clock(engine))
    assert list(measure_tiles(engine, dataset, seconds=100).iou) == [(32, 32), (64, 64)]
    engine.shapes.clear()
    with pytest.raises(DataError, match=r"^there is no time to try larger ones, 0\.25 s for each tile$"):  # 4 × 13 / 4
        measure_tiles(engine, dataset, seconds=12)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:  # a busy machine has time for all images too
        patch.setattr(time_budget, "MIN_TILE_SECONDS", 600.0)
        patch.setattr(time_budget, "MAX_TILE_SECONDS", 600.0)
        train_tiny(write_cells(folder / "data"), folder / "runs", "crop", fit="crop", crops_per_image=2, image_size=64)
    return folder


def specs(run_dir):
    return [read_model(run_dir / name)[0].spec for name in ("best.pt", "last.pt")]


def test_the_tile_is_kept_in_both_checkpoints_and_used(place, capsys):
    spec, last = specs(place / "runs/crop")
    assert spec.tile == last.tile
    assert spec.tile in [(64, 64), (128, 128), (256, 256)]
    model = load(place / "runs/crop")
    assert model.predictor.tile == spec.tile
    assert load(place / "runs/crop", tile=96).predictor.tile == (96, 96)
    log = (place / "runs/crop/train.log").read_text()
    side = spec.tile[0]
    assert re.search(
        rf"Tile for predict and evaluate: {side}×{side}(, as trained)?: IoU 0\.\d+ on the fullest part of 5 validation images, blended \(",
        log,
    )


def test_predict_and_evaluate_agree_and_training_says_their_number(place, tmp_path, capsys):
    """The IoU of the line, of evaluate, and of the masks that predict writes. No image of this set is larger than the largest tile:
    the line is that of whole images. Batches differ, and with them the rounding of a pixel or two."""
    run, data = place / "runs/crop", place / "data"
    log = (run / "train.log").read_text()
    said = pytest.approx(float(re.search(r"Tile for predict and evaluate: .*: IoU (0\.\d+) on", log)[1]), abs=3e-4)
    assert main(["evaluate", str(run), "--out", str(tmp_path / "scores")]) == 0
    shown = capsys.readouterr().out
    here = re.search(r"IoU 0\.\d+; here (0\.\d+) \(training's tiles are of 64×64 and not blended: --tile as-trained\)", shown)
    assert float(here[1]) == said
    assert main(["predict", str(run), str(data / "val/images"), "--out", str(tmp_path / "masks")]) == 0
    side = specs(run)[0].tile[0]
    assert f"Images      5, in blended tiles of {side}×{side}" in re.sub(r"Images: +", "Images      ", capsys.readouterr().out)
    hits = union = 0
    for path in sorted((tmp_path / "masks").glob("*.png")):
        truth, found = read_mask(data / f"val/masks/{path.name}") > 0, read_mask(path) > 0
        hits, union = hits + (truth & found).sum(), union + (truth | found).sum()
    assert hits / union == said


def test_tiles_as_trained_give_trainings_number(place, tmp_path, capsys):
    """To the last digit: the same pixels, JPEGs decoded alike, images smaller than a tile, sizes that no batch shares."""
    assert main(["evaluate", str(place / "runs/crop"), "--tile", "as-trained", "--out", str(tmp_path)]) == 0
    iou = json.loads((tmp_path / "evaluation.json").read_text())["mean"]["dataset"]["iou"]["value"]
    assert iou == json.loads((place / "runs/crop/result.json").read_text())["best_val_iou"]
    assert 0 < iou < 1  # an equal score says something


def test_a_tile_that_is_asked_for_is_used_by_predict_and_evaluate_alike(place, tmp_path, capsys):
    image, run = place / "data/val/images/2.jpg", place / "runs/crop"
    assert main(["predict", str(run), str(image), "--out", str(tmp_path), "--tile", "96"]) == 0
    mask = read_mask(tmp_path / "2.png")
    assert np.array_equal(mask, load(run, tile=96)(read_image(image)))
    assert not np.array_equal(mask, load(run)(read_image(image)))
    assert main(["evaluate", str(run), "--out", str(tmp_path / "scores"), "--tile", "96"]) == 0
    assert "; as predict --tile 96 does" in capsys.readouterr().out


def test_a_choice_that_fails_leaves_trainings_tile_and_a_run_that_goes_on_measures_again(place, tmp_path, capsys, monkeypatch):
    def fail(*given):
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(evaluate, "measure_tiles", fail)
    result = train_tiny(place / "data", tmp_path, "run", fit="crop", crops_per_image=2, num_epochs=1)
    assert "Tile for predict and evaluate: 32×32, as trained (CUDA out of memory)\n" in capsys.readouterr().out
    assert [spec.tile for spec in specs(result.run_dir)] == [None, None]
    assert load(result.run_dir).predictor.tile == (32, 32)
    monkeypatch.setattr(evaluate, "measure_tiles", lambda *given: TileScores({(32, 32): 0.1, (96, 96): 0.2}, 1, 2))
    train(result.run_dir / "config.yaml", resume=str(result.run_dir))  # had ended: the tile that is missing is measured
    assert [spec.tile for spec in specs(result.run_dir)] == [(96, 96)] * 2
    monkeypatch.setattr(evaluate, "measure_tiles", fail)
    train(result.run_dir / "config.yaml", resume=str(result.run_dir))
    assert [spec.tile for spec in specs(result.run_dir)] == [(96, 96)] * 2


def test_models_that_resize_have_no_tile_and_know_how_large_their_images_were(place, tmp_path, capsys):
    result = train_tiny(place / "data", tmp_path, "run", fit="resize", num_epochs=1)
    assert "Tile for" not in capsys.readouterr().out
    for spec in specs(result.run_dir):
        assert spec.tile is None
        assert spec.source_sides == pytest.approx((40, (50 * 70) ** 0.5))
