"""val_scores.csv: by hand, the worst first, and read back as it was."""

from __future__ import annotations

import pytest

from unet_trainer.runs.val_scores import ClassCounts, image_score, read_val_scores, val_scores_text, worst_first

# Of background and foreground: pixels in both, in truth, in prediction; 100 in all.
GOOD = [[80, 85, 85], [10, 15, 15]]  # 10 of 20 foreground pixels: IoU 0.5, wrong 10
BAD = [[88, 98, 90], [0, 2, 10]]  # IoU 0, wrong 12
EMPTY = [[100, 100, 100], [0, 0, 0]]


def one(name, counts, classes=("cell",)):
    return image_score(f"images/{name}.png", f"masks/{name}.png", counts, classes)


def test_scores_are_those_computed_by_hand():
    counts = ClassCounts(hits=10, truth=15, predicted=20)
    assert (counts.iou, counts.dice) == (10 / 25, 20 / 35)
    assert (counts.precision, counts.recall) == (10 / 20, 10 / 15)
    nothing = ClassCounts(0, 0, 0)
    assert (nothing.iou, nothing.dice, nothing.precision, nothing.recall) == (None, None, None, None)


def test_with_one_class_the_background_is_counted_among_right_pixels_but_not_reported():
    score = one("a", GOOD)
    assert list(score.classes) == ["cell"]
    assert (score.iou, score.dice) == (0.5, 20 / 30)
    assert (score.wrong_pixels, score.counted_pixels) == (100 - 90, 100)


def test_the_mean_leaves_out_classes_that_do_not_occur():
    score = one("a", [[5, 10, 5], [0, 0, 5], [0, 0, 0]], ("sky", "road", "car"))
    assert score.classes["car"].iou is None
    assert score.iou == (0.5 + 0.0) / 2
    assert one("b", EMPTY).iou is None


def test_the_worst_come_first_and_those_without_a_score_last():
    scores = [
        one("empty", EMPTY),
        one("good", GOOD),
        one("bad", BAD),
        one("also_bad", BAD),
        one("worse", [[70, 98, 70], [0, 2, 30]]),
    ]
    order = [score.image.split("/")[1] for score in worst_first(scores)]
    assert order == ["worse.png", "also_bad.png", "bad.png", "good.png", "empty.png"]


def test_the_table_of_one_class():
    assert val_scores_text([one("good", GOOD), one("bad", BAD), one("empty", EMPTY)]) == (
        "image,mask,iou,dice,hit_pixels,truth_pixels,predicted_pixels,wrong_pixels,counted_pixels\n"
        "images/bad.png,masks/bad.png,0.000000,0.000000,0,2,10,12,100\n"
        "images/good.png,masks/good.png,0.500000,0.666667,10,15,15,10,100\n"
        "images/empty.png,masks/empty.png,,,0,0,0,0,100\n"
    )


def test_the_table_of_several_classes_has_their_mean_and_each():
    header, row = val_scores_text([one("a", GOOD, ("back ground", "road, wet"))]).splitlines()
    assert header == (
        "image,mask,mean_iou,mean_dice,iou back ground,hit_pixels back ground,truth_pixels back ground,predicted_pixels back ground,"
        '"iou road, wet","hit_pixels road, wet","truth_pixels road, wet","predicted_pixels road, wet",wrong_pixels,counted_pixels'
    )
    assert row.startswith("images/a.png,masks/a.png,0.694444,")


@pytest.mark.parametrize("classes", [("cell",), ("back ground", "road, wet")])
def test_what_was_written_is_read_back(classes, tmp_path):
    scores = [one("good", GOOD, classes), one("empty", EMPTY, classes), one("bad\udce4", BAD, classes)]
    file = tmp_path / "val_scores.csv"
    file.write_bytes(val_scores_text(scores).encode("utf-8", "surrogateescape"))
    assert read_val_scores(file, classes) == worst_first(scores)


@pytest.mark.parametrize("content", [None, "", "image,iou\na.png,0.5\n", "image,mask,hit_pixels\na,b,x\n"])
def test_a_table_that_is_missing_or_not_ours_is_empty(content, tmp_path):
    file = tmp_path / "val_scores.csv"
    if content is not None:
        file.write_text(content)
    assert read_val_scores(file) == []


def test_a_set_without_images_has_a_header_only():
    assert val_scores_text([]) == "image,mask,iou,dice,wrong_pixels,counted_pixels\n"
