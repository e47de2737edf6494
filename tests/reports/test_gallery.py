"""Pictures of a report: which images, what the layers show, and that all of it is bounded."""

import io
import itertools
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import bright_predictor
from helpers.report_runs import FOUR_IMAGES, scores_of, small_gallery, write_run
from unet_trainer.data.pairs import Pair
from unet_trainer.images.image_decoding import write_image
from unet_trainer.reports import gallery
from unet_trainer.reports.gallery import choose_images, draw_gallery, draw_picture, make_gallery
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import image_score, worst_first

pytestmark = pytest.mark.real_pictures

SCORES = worst_first(scores_of(FOUR_IMAGES))
GREEN = (0, 200, 120)


def many(number):
    """IoU from 1 / number to 1."""
    return [
        image_score(f"{index:03}.png", "m.png", [[0, 0, 0], [index, number, index]], ["x"])
        for index in range(1, number + 1)
    ]


def test_the_worst_the_middle_and_the_best_are_chosen_and_take_turns():
    chosen = choose_images(many(101))
    names = {
        group: [int(score.image[:3]) for score, its in chosen if its == group] for group in ("worst", "median", "best")
    }
    assert names == {"worst": list(range(1, 10)), "median": list(range(48, 54)), "best": [101, 100, 99, 98, 97, 96]}
    assert [group for _, group in chosen[:6]] == ["worst", "median", "best"] * 2
    for number in (0, 1, 2, 3, 7, 21, 22, 24):
        chosen = [score.image for score, _ in choose_images(many(number))]
        assert len(set(chosen)) == len(chosen) == min(number, 21)
    assert choose_images(scores_of([[[5, 5, 5], [0, 0, 0]]])) == []  # without an IoU


def test_layers_show_truth_prediction_and_errors(tmp_path):
    found = small_gallery(tmp_path, SCORES)
    assert [picture.group for picture in found.pictures] == ["worst", "best", "worst", "best"]
    assert (found.note, found.colours) == ("", ((0, 0, 0), GREEN))
    picture = found.pictures[0]
    assert (picture.size, picture.shown, picture.score) == ((40, 60), (40, 60), SCORES[0])
    truth, prediction, errors = (np.asarray(Image.open(io.BytesIO(layer))) for layer in picture.layers.values())
    assert [truth[5, x, 3] for x in (35, 40, 50, 51)] == [0, 255, 72, 255]  # nothing, the outline, the class, its hatch
    assert tuple(truth[5, 41]) == (0, 0, 0, 180)  # within the outline, so that green is seen on green
    assert [prediction[5, x, 3] for x in (20, 30, 34)] == [0, 255, 72]
    assert tuple(truth[5, 50, :3]) == GREEN
    assert tuple(errors[5, 35, :3]) == (255, 120, 0)  # falsely found
    assert tuple(errors[5, 10]) == (0, 0, 0, 150)
    photo = cv2.imdecode(np.frombuffer(picture.image, np.uint8), cv2.IMREAD_COLOR)
    assert abs(int(photo[5, 50, 0]) - 200) < 6


def test_a_large_picture_is_made_smaller_until_it_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "SIZES", (gallery.SIZES[0], gallery.SIZES[-1]))
    noise = np.random.default_rng(0).integers(0, 256, (450, 800, 3), np.uint8)
    write_image(tmp_path / "a.png", noise)
    write_image(tmp_path / "m.png", (noise[:, :, 0] > 128).astype(np.uint8))
    pair = Pair("a", tmp_path / "a.png", tmp_path / "m.png")
    large = draw_picture(bright_predictor(), pair, SCORES[0], "worst", max_bytes=10**9)
    small = draw_picture(bright_predictor(), pair, SCORES[0], "worst", max_bytes=60_000)
    assert large.shown == (432, 768)
    assert max(small.shown) == 256  # the smallest that there is, if need be
    small_bytes, large_bytes = (len(one.image) + sum(map(len, one.layers.values())) for one in (small, large))
    assert small_bytes < large_bytes / 5
    assert large.size == small.size == (450, 800)


def test_files_that_are_broken_are_counted_and_time_that_runs_out_ends_it_within_a_large_image(tmp_path, monkeypatch):
    small_gallery(tmp_path, SCORES)
    pairs = [Pair(name, tmp_path / f"images/{name}.png", tmp_path / f"masks/{name}.png") for name in "abcd"]
    predictor, seconds = bright_predictor(), itertools.count()
    predictor.whole, predictor.tile = 100, (16, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gallery, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        found = draw_gallery(SCORES, pairs, tmp_path, predictor, max_seconds=3)
    assert list(found.pictures) == []
    assert found.note == "4 images could not be shown (images/a.png: there was no time left for it)."
    assert 0 < len(predictor.engine.shapes) < 5
    (tmp_path / "images/a.png").write_bytes(b"no image")
    found = draw_gallery(SCORES, pairs[:3], tmp_path, bright_predictor())
    assert [picture.score.image for picture in found.pictures] == ["images/b.png", "images/c.png"]
    assert found.note.startswith("2 images could not be shown (images/a.png: ")


def test_a_run_without_its_model_or_its_data_says_so(tmp_path):
    folder = write_run(tmp_path / "run")
    expected = "There are no pictures: the run has no best.pt, or no scores of its images."
    assert make_gallery(read_run_summary(folder)).note == expected
    (folder / "best.pt").write_bytes(b"x")
    assert "split.csv and config.yaml, which name them" in make_gallery(read_run_summary(folder)).note
