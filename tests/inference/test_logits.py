"""From logits to ids and probabilities, whole or in bands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unet_trainer.inference.logits import Band, WholeLogits, all_ids, all_probabilities, band_ids, predicted_ids
from unet_trainer.model import native_resolution

TWO = torch.tensor([[[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.5]]])  # K,1,3


def test_the_id_with_the_largest_logit_wins_and_the_first_of_equal_ones():
    assert predicted_ids(TWO).tolist() == [[1, 0, 0]]
    three = torch.tensor([[[0.0, 5.0]], [[2.0, 5.0]], [[1.0, 6.0]]])
    assert predicted_ids(three).tolist() == [[1, 2]]
    assert predicted_ids(torch.stack([three, -three])).tolist() == [[[1, 2]], [[0, 0]]]
    assert predicted_ids(three).dtype == torch.uint8


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, [1, 0, 0]), (0.7, [1, 0, 0]), (0.74, [0, 0, 0]), (0.3, [1, 1, 1])])
def test_a_threshold_is_the_least_probability_of_the_foreground(threshold, expected):
    # Probabilities of the foreground: 0.731, 0.5 and 0.378.
    assert band_ids(TWO, threshold).tolist() == [expected]


def test_logits_are_brought_to_the_size_of_the_image_in_bands(monkeypatch):
    monkeypatch.setattr(native_resolution, "MAX_ELEMENTS", 3 * 50 * 4)  # four rows at a time
    logits = torch.randn(3, 16, 20)
    whole = WholeLogits(logits, (45, 50))
    bands = list(whole.bands())
    assert [band.rows.stop - band.rows.start for band in bands] == [4] * 11 + [1]
    expected = F.interpolate(logits.unsqueeze(0), (45, 50), mode="bilinear")[0]
    np.testing.assert_allclose(torch.cat([band.logits for band in bands], 1), expected, atol=1e-5)
    np.testing.assert_array_equal(all_ids(whole), expected.argmax(0))
    np.testing.assert_allclose(all_probabilities(whole), expected.softmax(0).permute(1, 2, 0), atol=1e-5)


def test_logits_of_the_image_s_size_are_one_band():
    (band,) = WholeLogits(TWO, (1, 3)).bands()
    assert isinstance(band, Band)
    assert band.rows == slice(0, 1)
    assert band.logits is TWO
