"""What is open is answered with the likely answer, one after the other, and what follows is judged with it."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.report_data import HEIGHT, WIDTH, Dataset, noise, square
from unet_trainer.images.file_bytes import DataError


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def settings_of(answered):
    return [dict(answer.settings) for answer in answered.answers]


def test_data_that_trains_as_it_is_has_nothing_to_answer(data):
    answered = data.answered()
    assert (answered.answers, answered.problems, answered.questions) == ([], [], [])
    assert (answered.is_trainable, answered.is_settled, answered.is_settled_but_for_files) == (True, True, False)


def test_classes_and_split_are_judged_as_if_the_masks_were_resized(data):
    """Five of six masks are half the size; the values tell what they mean together only."""
    for index in range(5):
        data.mask(index, square(255 if index else 0, size=(HEIGHT // 2, WIDTH // 2)))
    answered = data.answered()
    assert settings_of(answered) == [{"resize_masks": True}]
    assert [problem.title for problem in answered.problems] == ["5 masks of another size than their images"]
    assert (answered.is_trainable, answered.is_settled) == (False, True)
    report = answered.report
    assert (len(report.split.train), len(report.split.val), report.classes.num_classes) == (5, 1, 1)
    assert data.report().questions == []  # training says nothing of too few pairs either


def test_several_things_are_answered_one_after_the_other(data):
    (data.folder / "masks/5.png").unlink()
    for index in range(5):
        data.mask(index, np.repeat(np.array([3, 9], np.uint8), 5)[:, None].repeat(15, 1))
    answered = data.answered()
    assert settings_of(answered) == [{"unpaired": "skip"}, {"resize_masks": True}, {"num_classes": 1, "mask_values": (3, 9)}]
    assert [choice.settings["mask_values"] for choice in answered.answers[2].others] == [(9, 3)]
    assert answered.is_settled
    assert (answered.config.unpaired, answered.config.resize_masks, answered.config.mask_values) == ("skip", True, (3, 9))


def test_files_that_no_setting_mends_are_left(data):
    (data.folder / "images/0.png").write_bytes(b"")
    data.mask(1, np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8))
    answered = data.answered()
    assert [problem.kind for problem in answered.problems] == ["sizes", "unreadable"]
    assert [problem.kind for problem in answered.report.problems] == ["unreadable"]
    assert (answered.is_settled, answered.is_settled_but_for_files) == (False, True)


def test_values_of_no_class_are_answered_with_what_counts_nowhere(data):
    data.mask(3, square(7))
    answered = data.answered(mask_values=[0, 255])
    assert settings_of(answered) == [{"unknown_values": "ignore"}]
    assert answered.is_settled


def test_masks_with_nothing_to_learn_have_no_answer(data):
    for index in range(6):
        data.mask(index, np.zeros((HEIGHT, WIDTH), np.uint8))
    answered = data.answered()
    assert (answered.answers, len(answered.questions)) == ([], 1)
    assert (answered.is_settled, answered.is_settled_but_for_files) == (False, False)


def test_of_several_folders_that_is_taken_in_which_every_image_has_its_mask(data):
    other = data.folder / "annotations"
    other.mkdir()
    for name in ("0.png", "x.png", "y.png"):
        (other / name).write_bytes((data.folder / "masks/0.png").read_bytes())
    answered = data.answered()
    (answer,) = answered.answers
    assert answer.settings == {"mask_dir": "masks"}
    assert [choice.settings for choice in answer.others] == [{"mask_dir": "annotations"}]
    assert answered.is_settled
    for path in (data.folder / "masks").iterdir():
        path.rename(path.with_stem(f"{path.stem}0"))  # now 0.png alone is paired, in annotations/
    assert data.answered().config.mask_dir == "annotations"


def test_a_setting_that_finds_nothing_is_answered_with_one_that_does(data):
    for path in (data.folder / "masks").iterdir():
        path.rename(path.with_stem(f"{path.stem}_m"))
    answered = data.answered(mask_suffix="_mask")
    assert settings_of(answered) == [{"mask_suffix": "_m"}]
    assert answered.is_settled


def test_a_folder_in_which_nothing_can_be_found_is_an_error(tmp_path):
    data = Dataset(tmp_path)
    for path in (data.folder / "masks").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no masks in"):
        data.answered()


def test_the_advice_of_a_note_is_taken(tmp_path):
    """Two frames follow each other in each scene; the others are unlike them."""
    data = Dataset(tmp_path)
    for index in range(6):
        (data.folder / f"images/{index}.png").unlink()
        (data.folder / f"masks/{index}.png").unlink()
    for scene in range(12):
        for frame in range(2):
            data.image(f"scene{scene:02d}_{frame}", noise(scene) // 2 + frame)
            data.mask(f"scene{scene:02d}_{frame}", square())
    answered = data.answered()
    (answer,) = answered.answers
    assert list(answer.settings) == ["group_pattern"]
    assert answered.config.group_pattern == answer.settings["group_pattern"]
    assert (answered.is_trainable, answered.is_settled) == (True, True)  # a note, not a question
    assert any("group_pattern: " in notice for notice in answered.notices)
    names = [{pair.name[:7] for pair in side} for side in (answered.report.split.train, answered.report.split.val)]
    assert not names[0] & names[1]
