"""Advice from measured times: which setting would help, and how much."""

from __future__ import annotations

from unet_trainer.loading.wait_advice import EpochTimes, advise


def times(**changes):
    """400 images/s while waiting half of the time: the model could take 800. A worker needs 8 ms for an image."""
    given = {"images_per_second": 400.0, "data_wait": 0.5, "read_seconds": 0.006, "augment_seconds": 0.002, "num_workers": 4}
    return EpochTimes(**{**given, **changes})


def test_a_short_wait_needs_no_advice():
    assert advise(times(data_wait=0.10), 16, "none", on_cpu=False) is None
    assert advise(times(data_wait=0.11), 16, "none", on_cpu=False) is not None


def test_the_setting_with_the_largest_gain_is_named_with_the_rate_it_gives():
    # 15 workers: 15 / 8 ms = 1875 images/s; a cache: 4 / 2 ms = 2000; the model takes 800
    assert advise(times(), 16, "none", on_cpu=False) == (
        "the model waits for data in 50% of the time (reading 6.0 ms and augmenting 2.0 ms an image, 4 workers); "
        "cache: ram would give about 800 images/s instead of 400"
    )
    # 5 workers: 625 images/s, no cache to add
    assert advise(times(), 6, "ram", on_cpu=False).endswith("num_workers: 5 would give about 625 images/s instead of 400")


def test_a_cpu_leaves_half_of_its_cores_to_the_model():
    assert "num_workers: 4 " in advise(times(num_workers=0, augment_seconds=0.006, read_seconds=0.001), 8, "ram", on_cpu=True)
