"""report.html: what it says of a run, from whatever the folder holds; hostile names are text in it; its size is bounded."""

import json
import re
from html import unescape

import numpy as np
import pytest

from helpers.report_runs import ATTACK, FOUR_IMAGES, epoch_of, go_on, scores_of, small_gallery, write_run
from unet_trainer.images.image_decoding import write_image
from unet_trainer.reports import gallery, page
from unet_trainer.reports.gallery import Gallery
from unet_trainer.reports.page import TEMPLATES, digest, page_policy
from unet_trainer.reports.run_report import MAX_EVENTS, MAX_MATRIX, render_report, write_report
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import worst_first

IDS = ("sky", "road", "cow")
TWO_IDS = ["background", "foreground"]
SECTIONS = ("result", "curves", "classes", "confusion", "images", "data", "settings", "machine", "events", "next")


def page_of(folder, *given, **named):
    return render_report(read_run_summary(folder), *given, **named)


def words(markup):
    return " ".join(
        unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script)>.*?</\1>", "", markup, flags=re.DOTALL))).split()
    )


def section(page, key):
    return re.search(rf'<section id="{key}".*?</section>', page, re.DOTALL).group()


def charts(page):
    """By key: what the page's script draws."""
    return {
        key: json.loads(unescape(data)) for data, key in re.findall(r'data-chart="([^"]*)" data-key="([^"]*)"', page)
    }


def test_a_report_has_every_section_and_says_what_the_run_came_to(tmp_path):
    page = write_report(write_run(tmp_path / "run", image_size=[32, 32]), with_pictures=False).read_text()
    assert page == (tmp_path / "run/report.html").read_text()
    for key in SECTIONS:
        assert f'<section id="{key}"' in page
        assert f'href="#{key}"' in page
    said = words(page)
    for part in (
        "run – training report",
        "IoU on the validation images 0.600 0 1 95 % interval 0.385 – 0.900 (bootstrap over 4 images; so few images make it a rough one)",
        "all foreground would give 0.500",  # 10 of 20 pixels in the matrix
        "Best epoch 2 3/3 epochs done Time 30 s in epochs; start-up 1.5 s Images/s 102 in training",
        "val 0.400 → 0.500; train 0.450 → 0.550; val is 0.600 at the best epoch, 2",
        "Folder data/mine Images 8-bit RGB; 64×48 Split 10 train, 4 val. val_fraction 0.2, seed 42",
        "32×32 (images are resized to it) Classes in the masks",
        "background 0 50.0 % foreground 1 50.0 % What the check of the data found two images are the same",
        "unet with resnet18, 1.0 M parameters.",
        "image_size [32, 32] command line",
        "batch_size 8 decided fits into memory",
        "cpu – test machine CPU and memory 2 cores, 8.0 GiB Numbers float32 Peak GPU memory 1.50 GiB (reserved 0.00 GiB) Versions Python 3.11, torch 2.10",
        "training 24 s 76 % validation 6 s 19 %",  # of 31.5 s
        "waiting for data, of training – 2.0 % reading an image 4 ms",
        "4 images: median 0.650, mean 0.625, worst 0.200, best 1.000",
        "python train_unet.py report",
    ):
        assert part in said, part
    assert said.index("Set by you (4)") < said.index("Decided from the data and the machine (1)")
    # Five curves, classes, matrix, bars, classes in the masks, two of settings, stages.
    assert page.count("<table") == 12


def test_curves_have_their_lines_and_marks(tmp_path):
    folder = write_run(tmp_path / "run", IDS, end="interrupted")
    record = go_on(folder, 3)
    record.add("shrink", "2 parts", epoch=3)
    record.add_epoch(*epoch_of(4, IDS, 0.5))
    record.save()
    go_on(folder, 4).end("stopped early")
    found = charts(page_of(folder))
    assert list(found) == ["distribution", "iou", "classes-curve", "loss", "rate", "speed"]
    (view,) = found["iou"]["views"]
    lines = {line["name"]: line["ys"][:3] for line in view["lines"]}
    assert lines == {"val": [0.4, 0.6, 0.5], "train": [0.45, 0.65, 0.55]}
    assert [view["name"] for view in found["classes-curve"]["views"]] == ["IoU", "Dice", "Precision", "Recall"]
    assert [line["name"] for line in found["classes-curve"]["views"][0]["lines"]] == list(IDS)
    marks = [(mark["kind"], mark["x"]) for mark in found["iou"]["marks"]]
    assert marks == [("best", 2), ("interrupted", 3.5), ("shrink", 3.5), ("killed", 4), ("stopped", 4)]
    (view,) = charts(page_of(write_run(tmp_path / "binary")))["classes-curve"]["views"]
    assert [line["name"] for line in view["lines"]] == ["Dice", "Precision", "Recall"]


def test_a_score_no_better_than_a_baseline_warnings_and_errors_stand_at_the_top(tmp_path):
    assert "not clearly better than no model" not in page_of(write_run(tmp_path / "good", images=(), ious=(0.9,)))
    useless = page_of(write_run(tmp_path / "bad", images=(), ious=(0.45,)))
    assert "not clearly better than no model: predicting all foreground gives IoU 0.500." in useless
    one = words(page_of(write_run(tmp_path / "one", images=FOUR_IMAGES[:1])))
    assert "No interval: it needs two validation images at least." in one
    weak = [[[80, 88, 88], [2, 6, 6]], [[80, 88, 88], [5, 6, 6]]]  # the interval reaches the baseline
    assert "not clearly better than no model" in page_of(write_run(tmp_path / "weak", images=weak, ious=(0.6,)))
    warnings = ["this model is of no use: <IoU> 0.45", "too few steps"]
    write_run(
        tmp_path / "useless",
        images=(),
        ious=(0.45,),
        result={"warnings": warnings, "best_val_iou": 0.45, "baseline_iou": 0.5},
    )
    page = page_of(tmp_path / "useless")
    assert re.findall(r'class="banner[^<]*', page) == [
        'class="banner bad" role="note">this model is of no use: &lt;IoU&gt; 0.45\ntoo few steps'
    ]
    assert '<span class="pill useless">Finished, of no use</span>' in page
    folder = write_run(tmp_path / "failed", end=None)
    record = go_on(folder, 3)
    record.update(result={"warnings": ["too few steps"], "baseline_iou": 0.2})
    record.end("failed", "the disk is full")
    said = words(section(page_of(folder), "result"))
    assert "too few steps" in said
    assert "The run ended with an error: the disk is full" in said


def test_classes_and_confusions_have_scores_and_shares(tmp_path):
    folder = write_run(tmp_path / "run", IDS, ious=(0.4,), images=())
    data = {"classes": [{"name": "cow", "share": 0.125}]}
    record = go_on(folder, 1, data=data)
    record.add_epoch(*epoch_of(2, IDS, 0.5, {"cow": None}))
    record.save()
    page = page_of(folder)
    said = words(section(page, "classes"))
    assert "sky 0.500 – 0.500 0.500 0.500 – 33.3 %" in said
    assert said.endswith("cow – – – – – 12.5 % 33.3 %")
    matrix = section(page, "confusion")
    assert "The largest confusion: 20.0 % of sky is predicted as road." in words(matrix)
    assert "heat h8 p8 diagonal" in matrix
    assert "80.0 % 80.0 % 8" in words(matrix)


def test_of_very_many_classes_epochs_and_events_some_are_shown_and_the_page_stays_below_its_limit(tmp_path):
    ids = [f"a class with a long name {index}" for index in range(100)]
    confusion = np.diag(np.full(100, 12345)) + np.diag(np.arange(99), 1)
    folder = write_run(tmp_path / "run", tuple(ids), ious=(), images=())
    scores, record = {name: index / 100 for index, name in enumerate(ids)}, go_on(folder, 0)
    for number in range(1, 421):
        record.add_epoch(*epoch_of(number, ids, 0.123456 + number // 420, scores, confusion.tolist()))
    for number in range(MAX_EVENTS + 20):
        record.add("note", f"note {number}")
    record.save()
    page = page_of(folder)
    assert len(page.encode()) + gallery.MAX_BYTES * 4 / 3 < 5_000_000
    assert "of 420 epochs are shown; metrics.csv has all of them." in words(page)
    found = charts(page)
    assert found["iou"]["xs"][-1] == 420
    assert len(found["iou"]["xs"]) <= 403
    assert [line["name"] for line in found["classes-curve"]["views"][0]["lines"]] == ids[:24]
    assert section(page, "confusion").count("diagonal") == MAX_MATRIX
    assert ">a class with a long name 90</th>" in section(page, "confusion")
    assert section(page, "events").count("<li") == MAX_EVENTS
    assert "run.json has the 23 before them" in words(page)  # 20 notes, and two starts with an end between them


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", "epoch,val_iou,train_loss\n1,0.5,1.0\n2,nan,1.0\n"),
        ("run.json", '{"format": 1, "epo'),
        ("run.json", '{"epochs": [{"number": 1, "row": {}}]}'),
        ("nothing", ""),
    ],
)
def test_a_run_of_which_little_is_left_has_a_report(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    said = words(page_of(tmp_path))
    assert "The run kept no facts of its data." in said or "Size in the model" in said
    assert "What to do next" in said


def test_hostile_names_are_text(tmp_path):
    ids = ["background", ATTACK]
    folder = write_run(tmp_path / "<b>\udce4", tuple(ids), data_dir=ATTACK, encoder=ATTACK)
    classes = [{"name": ATTACK, "values": ATTACK, "share": 0.5}]
    data = {"data_dir": ATTACK, "notices": [f"{ATTACK}\x00\x1b\ud800"], "sizes": ATTACK, "classes": classes}
    about = {
        "machine": {"name": ATTACK, "versions": {ATTACK: ATTACK}},
        "model": {"ids": ids, "classes": ids[1:], "encoder": ATTACK},
    }
    record = go_on(folder, 0, data=data, **about)
    record.add_epoch(*epoch_of(1, ids, 0.5))
    record.update(result={"warnings": [ATTACK], "number_format": ATTACK})
    record.end("failed", ATTACK)
    found = small_gallery(tmp_path / "data", worst_first(scores_of(FOUR_IMAGES)))
    page = page_of(folder, Gallery(**{**vars(found), "note": ATTACK}))
    page.encode()  # UTF-8 takes it
    assert "<img src=x" not in page
    assert "<b>" not in page
    assert page.count("<script>") == 1
    assert page.count("&lt;img src=x onerror=") > 10
    assert "\\x00\\x1b\\ud800" in page


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_from_elsewhere(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    (style,), (script,) = (re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL) for name in ("style", "script"))
    policy = page_policy()
    sources = f"script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; base-uri"
    assert policy.startswith(f"default-src 'none'; {sources}")
    assert "unsafe" not in policy
    assert f'content="{policy}"' in unescape(page)
    for path in TEMPLATES.iterdir():
        foreign = r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|innerHTML|eval\(|\| *safe"
        assert re.search(foreign, path.read_text()) is None, path


@pytest.mark.real_pictures
def test_prediction_that_fails_is_told_and_the_newest_samples_of_training_are_shown(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    (folder / "samples").mkdir()
    for epoch in (2, 10):
        write_image(folder / f"samples/epoch_{epoch:04}.png", np.full((2200, 40, 3), epoch, np.uint8))

    def fail(*_, **__):
        raise RuntimeError("CUDA error: device-side <assert>")

    (folder / "best.pt").touch()
    monkeypatch.setattr("unet_trainer.inference.evaluation_data.find_validation_pairs", fail)
    said = words(write_report(folder).read_text())
    assert "There are no pictures: CUDA error: device-side <assert>." in said
    assert "Samples of epoch 10" in said
    (folder / "samples/epoch_0011.png").write_bytes(b"cut off")
    assert "Samples of epoch" not in words(page_of(folder))


def test_what_happened_is_told_in_order(tmp_path):
    folder = write_run(tmp_path / "run", end="interrupted")
    record = go_on(folder, 3)
    record.add("warning", "the disk is slow")
    record.end("finished")
    said = words(section(page_of(folder), "events"))
    assert "Interrupted 1 time." in said
    kinds = re.findall(r"UTC (Started|Interrupted|Resumed|Warning|Finished)", said)
    assert kinds == ["Started", "Interrupted", "Resumed", "Warning", "Finished"]
    assert "Warning after epoch 3: the disk is slow" in said


def test_commands_fit_the_state_of_the_run(tmp_path):
    folder = write_run(tmp_path / "my run")
    said = words(section(page_of(folder), "next"))
    assert "--resume" not in said
    assert "evaluate" not in said
    for name in ("best.pt", "last.pt"):
        (folder / name).write_bytes(b"x")
    said = words(section(page_of(folder), "next"))
    for line in (
        f"--resume '{folder}' num_epochs=6",
        f"evaluate '{folder}'",
        f"predict '{folder}' IMAGES",
        "try ",
        "export ",
    ):
        assert line in said
    assert "--split test" not in said
    go_on(folder, 3, data={"num_test": 3})
    expected = f"scores on 3 test images, kept from training python train_unet.py evaluate '{folder}' --split test"
    assert expected in words(page_of(folder))


def test_the_page_of_a_run_that_goes_on_reloads_itself_until_its_run_must_have_been_killed(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", end=None)
    monkeypatch.setattr(page.time, "time", lambda: 1000.0)
    shown = write_report(folder, with_pictures=False, is_running=True).read_text()
    assert 'data-reload-until="1600000" data-reload-seconds="30"' in shown  # 10 minutes: epochs took 10 s
    assert "Pictures of the worst and the best images follow when the run has ended." in shown
    record = go_on(folder, 3)
    record.add_epoch(*epoch_of(4, TWO_IDS, 0.5, seconds=3600.0))
    record.save()
    assert 'data-reload-until="11800000"' in page_of(folder, is_running=True)  # three times the longest epoch
    assert "<body>" in page_of(folder)
