"""The pass over the data: counts by hand, equal to training's own validation, with bounded memory."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.brightness_engine import BrightnessEngine
from helpers.evaluated_models import bright, write_pairs
from helpers.predicting import files_in
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image, write_image
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.inference.evaluate import evaluate, make_folder, write_evaluation
from unet_trainer.inference.evaluation_data import DataSource, EvaluationData
from unet_trainer.inference.predictor import Predictor
from unet_trainer.inference.scores import summarise


def data_of(folder, pairs):
    sizes = [SimpleNamespace(size=read_image(pair.image).shape[:2]) for pair in pairs]
    source = DataSource(load_config({"data_dir": str(folder)}), None, is_own=False)
    return EvaluationData(source, "all", "by hand", pairs, sizes, sizes, MaskCoding((0, 255)))


def test_a_file_that_changed_since_it_was_looked_at_is_named(tmp_path):
    empty = np.zeros((16, 16), np.uint8)
    pairs = write_pairs(tmp_path, [(bright(empty), empty)] * 2)
    given = Predictor(BrightnessEngine()), data_of(tmp_path, pairs)
    write_image(pairs[1].mask, np.full((16, 16), 7, np.uint8))
    with pytest.raises(DataError, match=r"masks/1\.png: changed since the run began"):
        evaluate(*given)
    pairs[1].image.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"images/1\.png: "):
        evaluate(*given)
    write_image(pairs[1].image, np.zeros((16, 16, 3), np.uint16))
    write_image(pairs[1].mask, empty)
    with pytest.raises(DataError, match=r"images/1\.png: 16-bit values; the model was trained on 8-bit images"):
        evaluate(*given)


# What an evaluation writes: nothing beside its own files


NAMES = ("background", "cell")
SPEC = dataclasses.replace(make_spec(), id_names=NAMES)


def band(height, columns=20, rows=20):
    ids = np.zeros((rows, columns), np.uint8)
    ids[:height] = 1
    return ids


@pytest.fixture(scope="module")
def evaluated_pairs(tmp_path_factory):
    """Twelve images: of number n, n rows of ten are found; number 0 has no object and none is found."""
    folder = tmp_path_factory.mktemp("evaluated")
    images = [(bright(band(number)), band(10 if number else 0) * 255) for number in range(12)]
    pairs = write_pairs(folder, images)
    data = data_of(folder, pairs)
    return evaluate(Predictor(BrightnessEngine()), data), data


def write(folder, evaluated, data, **description):
    make_folder(folder, is_named=True)
    write_evaluation(folder, {**description, **summarise(evaluated, NAMES[1:], NAMES)}, evaluated, data, SPEC)


def test_the_table_has_a_row_for_each_image_the_worst_first(evaluated_pairs, tmp_path):
    write(tmp_path, *evaluated_pairs)
    rows = list(csv.DictReader((tmp_path / "evaluation.csv").read_text().splitlines()))
    order = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 10, 0)
    assert [row["image"] for row in rows] == [f"images/{number}.png" for number in order]
    expected = {"iou": "0.100000", "precision": "1.000000", "wrong_pixels": "180", "counted_pixels": "400"}
    assert expected.items() <= rows[0].items()
    assert rows[-1]["iou"] == rows[-1]["boundary_iou"] == ""  # undefined: no object, none found
    assert (rows[-1]["truth_pixels"], rows[-1]["predicted_pixels"]) == ("0", "0")


def test_pictures_of_the_evaluation_before_are_replaced_and_nothing_else_is_touched(evaluated_pairs, tmp_path):
    evaluated, data = evaluated_pairs
    out = tmp_path / "out"
    make_folder(out, is_named=True)
    (out / "worst").mkdir()
    for name in ("out/notes.txt", "out/worst/01_mine.png", "outside.png"):
        (tmp_path / name).write_text("mine")
    write(out, evaluated, data)
    write(out, dataclasses.replace(evaluated, worst=evaluated.worst[1:2]), data)
    written = ["evaluation.csv", "evaluation.json", "notes.txt", "worst/01_2.png", "worst/01_mine.png"]
    assert files_in(out) == written
    # A list that another program wrote: nothing outside is deleted.
    (out / "evaluation.json").write_text(json.dumps({"worst": [{"picture": "worst/../../outside.png"}]}))
    write(out, evaluated, data)
    assert (tmp_path / "outside.png").exists()


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.csv"])
def test_tables_of_others_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(UserError, match=rf"--out: .*{name} is there and is no "):
        make_folder(tmp_path, is_named=True)


def test_a_link_is_followed_if_the_user_names_it_and_not_if_it_lies_in_a_runs_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    link = tmp_path / "evaluation"
    link.symlink_to(tmp_path / "outside")
    make_folder(link, is_named=True)
    message = rf"^--out: {link} cannot be written to \(it is a link to .*outside\)"
    with pytest.raises(UserError, match=message):
        make_folder(link, is_named=False)


def test_the_json_file_has_every_score_with_its_reduction(evaluated_pairs, tmp_path):
    evaluated, data = evaluated_pairs
    write(tmp_path, evaluated, data, model={"file": "best.pt"})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    (cell,) = content["classes"]
    assert content["num_images"] == 12
    assert content["model"] == {"file": "best.pt"}
    assert cell["name"] == "cell"
    hits, truth, predicted = 20 * (55 + 10), 20 * 110, 20 * 66  # of 11 found rows 10 are right
    assert cell["dataset"]["iou"]["value"] == hits / (truth + predicted - hits)
    low, high = cell["dataset"]["iou"]["interval"]
    assert low < cell["dataset"]["iou"]["value"] < high
    assert cell["mean_over_images"]["iou"] == pytest.approx((5.5 + 10 / 11) / 11)
    assert (cell["images_with_a_score"], cell["empty_truths"], cell["empty_predictions"]) == (11, 1, 1)
    assert content["mean"]["dataset"]["iou"]["value"] == cell["dataset"]["iou"]["value"]
    assert content["confusion"] == {"ids": list(NAMES), "rows_are_truth": evaluated.confusion.tolist()}
    assert content["bootstrap"] == {"over": "images", "level": 0.95, "draws": 2000, "seed": 0}
    assert content["worst"][0] == {"image": "images/1.png", "iou": 0.1, "picture": "worst/01_1.png"}
