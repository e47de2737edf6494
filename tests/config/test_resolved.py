"""Settings of a run: each value with its source and reason, and what changes during the run with the reason of the change."""

from __future__ import annotations

from helpers.steps import make_settings
from unet_trainer.config.resolved import Decision
from unet_trainer.config.schema import FIELDS


def test_every_setting_is_explained_by_value_source_and_reason():
    settings = make_settings(batch_size=3)
    explained = settings.explained()
    assert set(explained) == set(FIELDS)
    assert explained["batch_size"] == {"value": 3, "source": settings.decisions["batch_size"].source, "reason": ""}
    assert explained["grad_clip"] == {"value": None, "source": "default", "reason": ""}
    assert explained["device"]["source"] == "decided"
    assert explained["device"]["reason"]


def test_a_change_during_the_run_is_explained_by_its_reason():
    settings = make_settings()
    settings.change("memory ran out", batch_parts=4)
    assert settings.decisions["batch_parts"] == Decision("decided", "memory ran out")
    assert settings.explained()["batch_parts"] == {"value": 4, "source": "decided", "reason": "memory ran out"}


def test_values_are_plain_so_that_json_can_hold_them():
    assert make_settings(image_size=[32, 64]).explained()["image_size"]["value"] == [32, 64]
