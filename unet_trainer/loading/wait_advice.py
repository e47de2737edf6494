"""Which setting would shorten the time that training waits for data, from measured times."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WAIT = 0.10  # share of an epoch up to which there is no advice
MIN_GAIN = 1.05  # a setting that gains less is not named


@dataclass(frozen=True)
class EpochTimes:
    """Measured in an epoch of training."""

    images_per_second: float
    data_wait: float  # share of the time
    read_seconds: float  # of one image, in a worker
    augment_seconds: float
    num_workers: int


def advise(times: EpochTimes, num_cores: int, cache: str, on_cpu: bool) -> str | None:
    """One sentence when the model waits for more than a tenth of the time, else None."""
    if times.data_wait <= MAX_WAIT:
        return None
    limit = times.images_per_second / max(1 - times.data_wait, 0.01)  # without any wait
    workers = max(1, times.num_workers)
    per_image = times.read_seconds + times.augment_seconds
    rates: dict[str, float] = {}  # setting → images per second that the workers could read
    most = num_cores - 1 if not on_cpu else num_cores // 2
    if most > times.num_workers:
        rates[f"num_workers: {most}"] = most / max(per_image, 1e-9)
    if cache == "none":
        rates["cache: ram"] = workers / max(times.augment_seconds, 1e-9)
    reason = (
        f"the model waits for data in {times.data_wait:.0%} of the time "
        f"(reading {times.read_seconds * 1e3:.1f} ms and augmenting {times.augment_seconds * 1e3:.1f} ms an image, "
        f"{times.num_workers} workers)"
    )
    setting, rate = max(rates.items(), key=lambda item: item[1], default=("", 0.0))
    rate = min(rate, limit)
    if rate < MIN_GAIN * times.images_per_second:
        return f"{reason}; a smaller image_size or a lighter augmentation would help, or more cores"
    return f"{reason}; {setting} would give about {rate:.0f} images/s instead of {times.images_per_second:.0f}"
