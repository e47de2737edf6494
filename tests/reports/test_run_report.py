"""report.html as a whole: one file below its limit, from whatever a run's folder holds; hostile names are text in it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.report_runs import ATTACK, FOUR_IMAGES, epoch_event, scores_of, small_gallery, write_run
from unet_trainer.images.image_files import write_image
from unet_trainer.reports import run_report
from unet_trainer.reports.run_report import MAX_BYTES, REPORT, gallery_or_reason, latest_samples, render_report, write_report
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.run_summary import read_run_summary
from unet_trainer.runs.val_scores import worst_first

SECTIONS = ("result", "curves", "classes", "confusion", "images", "data", "settings", "machine", "events", "next")


def test_a_report_has_every_section_and_is_written_into_the_run(tmp_path):
    folder = write_run(tmp_path / "run")
    path = write_report(folder, with_pictures=False)
    assert path == folder / REPORT
    page = path.read_text()
    for key in SECTIONS:
        assert f'<section id="{key}"' in page
        assert f'href="#{key}"' in page
    assert "<title>run – training report</title>" in page
    assert "python train_unet.py report" in page


@pytest.mark.parametrize("files", [(), ("metrics.csv",), ("events.jsonl",), ("result.json",)])
def test_a_run_of_which_little_is_left_has_a_report(tmp_path, files):
    content = {
        "metrics.csv": "epoch,val_iou,train_loss\n1,0.5,1.0\n2,nan,1.0\n",
        "events.jsonl": '{"kind":"start"}\n{"kind":"epoch","epoch":1}\n{"kind":"epoch","epo',
        "result.json": '{"warnings": "no list", "per_class_iou": {"foreground": 0.5}}',
    }
    for name in files:
        (tmp_path / name).write_text(content[name])
    assert '<section id="next"' in render_report(read_run_summary(tmp_path))


def test_hostile_names_are_text(tmp_path):
    ids = ["background", ATTACK]
    folder = write_run(tmp_path / "run", tuple(ids), data_dir=ATTACK, encoder=ATTACK)
    log = EventLog()
    facts = {
        "data_dir": ATTACK,
        "notices": [ATTACK],
        "sizes": ATTACK,
        "classes": [{"name": ATTACK, "values": ATTACK, "share": 0.5}],
    }
    log.open(
        folder,
        resumed_after=None,
        machine={"name": ATTACK, "versions": {ATTACK: ATTACK}},
        data=facts,
        model={"ids": ids, "encoder": ATTACK},
    )
    log.add("epoch", **epoch_event(1, ids, 0.5))
    log.add("warning", text=ATTACK)
    log.add("end", how="failed", text=ATTACK)
    (folder / "result.json").write_text(json.dumps({"warnings": [ATTACK], "number_format": ATTACK}))
    page = render_report(read_run_summary(folder))
    assert "<img src=x" not in page
    assert page.count("<script>") == 1
    assert page.count("&lt;img src=x onerror=") > 10


def test_the_largest_report_stays_below_its_limit(tmp_path):
    """2,000 epochs of 150 classes, and pictures of noise, which no format makes small."""
    ids = [f"a class with a long name {index}" for index in range(150)]
    folder = write_run(tmp_path / "run", tuple(ids), ious=(), images=())
    log = EventLog()
    log.open(folder, resumed_after=None, model={"ids": ids})
    event = epoch_event(1, ids, 0.123456)
    for number in range(1, 2001):
        log.add("epoch", **{**event, "epoch": number, "confusion": None if number < 2000 else [[12345] * 150] * 150})
    summary = read_run_summary(folder)
    limit = run_report.make_gallery.__globals__["MAX_BYTES"] * 4 / 3
    assert len(render_report(summary).encode()) + limit < MAX_BYTES


def test_prediction_that_fails_is_told_and_the_rest_is_there(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")

    def fail(*_):
        raise RuntimeError("CUDA error: device-side <assert>")

    monkeypatch.setattr(run_report, "make_gallery", fail)
    page = write_report(folder).read_text()
    assert "There are no pictures: predicting them failed (RuntimeError: CUDA error: device-side &lt;assert&gt;)." in page
    assert '<section id="curves"' in page


def test_without_a_model_the_report_says_so(tmp_path):
    assert gallery_or_reason(read_run_summary(write_run(tmp_path / "run"))).note == "There are no pictures: the run has no best.pt."


def test_pictures_stand_in_the_page(tmp_path):
    summary = read_run_summary(write_run(tmp_path / "run"))
    page = render_report(summary, small_gallery(tmp_path / "data", worst_first(scores_of(FOUR_IMAGES))))
    assert page.count('class="photo"') == 4


def test_the_newest_samples_of_training_are_shown_and_a_broken_sheet_is_not(tmp_path):
    assert latest_samples(tmp_path) is None
    (tmp_path / "samples").mkdir()
    for epoch in (2, 10):
        write_image(tmp_path / f"samples/epoch_{epoch:04}.png", np.full((2200, 40, 3), epoch, np.uint8))
    epoch, content = latest_samples(tmp_path)
    assert (epoch, content[:2]) == (10, b"\xff\xd8")
    (tmp_path / "samples/epoch_0011.png").write_bytes(b"cut off")
    assert latest_samples(tmp_path) is None
