"""The gallery on the page: cards with what the script needs, in words as well."""

from __future__ import annotations

import re

from helpers.report_runs import FOUR_IMAGES, scores_of, small_gallery, write_run
from unet_trainer.reports.gallery import Gallery
from unet_trainer.reports.gallery_section import image_section
from unet_trainer.runs.run_summary import read_run_summary
from unet_trainer.runs.val_scores import worst_first


def made(tmp_path, **changes):
    summary = read_run_summary(write_run(tmp_path / "run"))
    gallery = small_gallery(tmp_path / "data", worst_first(scores_of(FOUR_IMAGES)))
    return image_section(summary, None, Gallery(**{**vars(gallery), **changes}), None)


def test_cards_have_words_facts_to_sort_by_and_no_address(tmp_path):
    found = made(tmp_path)
    assert re.findall(r'data-iou="([\d.]+)"', found) == ["0.200000", "0.500000", "0.800000", "1.000000"]
    assert 'alt="images/a.png: IoU 0.200, 12.8 % of the pixels wrong"' in found  # 12 of 94
    assert found.count('class="layer truth"') == found.count('class="slide"') == 4
    assert {address.partition(",")[0] for address in re.findall(r'src="([^"]*)"', found)} <= {
        "data:image/webp;base64",
        "data:image/jpeg;base64",
        "data:image/png;base64",
    }
    for word in ("All (4)", "Worst (2)", "Best (2)", "missed", "falsely found", "Truth | prediction"):
        assert word in found


def test_pictures_that_were_not_ranked_and_notes_are_told(tmp_path):
    found = made(tmp_path, is_ranked=False, note="1 image could not be shown.")
    assert "4 images of the validation set, scored for this report: the run kept no scores." in found
    assert "1 image could not be shown." in found


def test_without_pictures_the_samples_of_training_are_shown(tmp_path):
    summary = read_run_summary(write_run(tmp_path / "run"))
    found = image_section(summary, None, Gallery(note="there is no best.pt"), (7, b"jpeg"))
    assert "Samples of epoch 7" in found
    assert "there is no best.pt" in found
    assert image_section(summary, None, Gallery(), None) is None
