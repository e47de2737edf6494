"""The report of `check`: what a dataset holds, what is wrong with it, and the settings for it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from itertools import pairwise

import cv2
import numpy as np
import pytest
import yaml

from helpers.annotated import annotate_masks
from helpers.class_masks import HEIGHT, WIDTH, ids_of
from train_unet import main, train
from unet_trainer.commands import data_check
from unet_trainer.commands.data_check import check_data
from unet_trainer.config.load import load_config
from unet_trainer.datasets import scan
from unet_trainer.images.overlays import CELL
from unet_trainer.system import forked_map
from unet_trainer.system.console import Console


@pytest.fixture
def check(data, tmp_path, capsys):
    """Runs the command; returns the exit code, what was printed, and the JSON report."""

    def run(*words):
        report = tmp_path / "report.json"
        classes = [] if any(word.startswith("num_classes=") for word in words) else ["num_classes=4"]
        words = [f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}", *classes, *words, "--json", str(report)]
        code = main(["check", *words])
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, captured.out, json.loads(report.read_text(encoding="utf-8"))

    return run


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


# Good data


def test_annotations_are_checked_like_masks_and_the_settings_train(tiny_data, tmp_path, capsys):
    data = annotate_masks(tiny_data, tmp_path / "mine", lambda index: ("cat", "dog")[index % 2])
    report, checkpoints = tmp_path / "report.json", tmp_path / "runs"
    assert main(["check", f"data_dir={data}", f"checkpoint_dir={checkpoints}", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "Pairs:      12 (annotations.json (COCO), drawn as masks, classes by category id)\n" in said
    assert "      cat         " in said
    assert f"Pictures:   {checkpoints / 'check/mine.png'}" in said
    lines = json.loads(report.read_text())["config"]
    assert sorted(lines[1:]) == ["class_names: [background, cat, dog]", "mask_values: [0, 1, 2]", "num_classes: 3"]
    settings = {**yaml.safe_load("\n".join(lines)), "checkpoint_dir": str(checkpoints)}
    assert check_data(load_config(settings), Console(io.StringIO()), None)
    assert class_share(report, "cat") > 0.01


def class_share(report, name):
    (share,) = [row["share"] for row in json.loads(report.read_text())["classes"] if row["name"] == name]
    return share


def test_good_data_give_exit_code_0_and_a_report_of_the_contents(check, data, tmp_path):
    code, said, report = check()
    assert code == 0
    pixels = 10 * HEIGHT * WIDTH
    for part in (
        f"Dataset {data}\n",
        "  Pairs:      10 (images/ + masks/, same names)\n",
        "  Images:     8-bit RGB; 48×40\n",
        "(ImageNet's, for 8-bit RGB)\n",
        f"1 → class 1 {4 / 40:.1%}",
        f"      class 2         2  {80 / pixels:8.3%} of pixels, in 2 of 10 masks\n",
        f"      class 3         3  {6 / pixels:8.3%} of pixels, in 1 of 10 masks\n",
        "  Split:      8 train, 2 val (images/ + masks/, same names; val_fraction 0.2, seed 42)\n",
        f"  Pictures:   {tmp_path / 'runs/check/my_data.png'} (the rarest classes first)\n",
        "Nothing stands in the way of training. The settings for this data:\n",
    ):
        assert part in said
    assert report["ok"] is True
    assert (report["num_pairs"], report["num_train"], report["num_val"]) == (10, 8, 2)
    assert (report["sizes"], report["dtypes"], report["channels"]) == ([[HEIGHT, WIDTH, 10]], {"uint8": 10}, {"3": 10})
    assert [row["values"] for row in report["classes"]] == ["0", "1", "2", "3"]
    assert [row["name"] for row in report["classes"]] == ["class 0", "class 1", "class 2", "class 3"]
    assert [row["share"] for row in report["classes"]] == pytest.approx([0.9 - 86 / pixels, 0.1, 80 / pixels, 6 / pixels])
    assert (report["problems"], report["questions"], report["notices"]) == ([], [], [])
    assert (report["mean"], report["std"]) == ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    assert report["contact_sheet"] == str(tmp_path / "runs/check/my_data.png")
    assert report["data_dir"] == str(data)
    assert report["rule"] == "images/ + masks/, same names"


def test_the_contact_sheet_is_a_picture_of_pairs_with_the_rarest_classes_first(check, data, tmp_path, monkeypatch):
    shown, real = [], data_check.contact_sheet
    monkeypatch.setattr(
        data_check,
        "contact_sheet",
        lambda pictures, labels: shown.append((pictures, labels)) or real(pictures, labels),
    )
    check()
    ((pictures, labels),) = shown
    assert labels[:3] == ["5: class 3", "2: class 2", "0: class 1"]
    assert sorted(label.partition(":")[0] for label in labels) == [f"{index}" for index in range(10)]
    assert pictures[0][1].tolist() == ids_of(5).tolist()
    file = tmp_path / "runs/check/my_data.png"
    assert file.read_bytes().startswith(b"\x89PNG")
    sheet = cv2.imread(str(file))
    height, width = sheet.shape[:2]
    assert 3 * CELL * HEIGHT // WIDTH < height < 3 * (CELL * HEIGHT // WIDTH + 50)  # ten pairs, four in a row
    assert 4 * 2 * CELL < width < 4 * 2 * (CELL + 20)
    assert len(np.unique(sheet)) > 100


def test_the_contact_sheet_shows_pairs_with_much_of_a_class_and_with_little(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "many"
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for index in range(48):
        mask = np.zeros((64, 64), np.uint8)
        mask[: index + 1, :8] = 255
        cv2.imwrite(str(folder / f"images/{index}.png"), np.full((64, 64, 3), index, np.uint8))
        cv2.imwrite(str(folder / f"masks/{index}.png"), mask)
    shown = []
    monkeypatch.setattr(data_check, "contact_sheet", lambda pictures, labels: shown.extend(labels) or pictures[0][0])
    assert main(["check", f"data_dir={folder}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    numbers = [int(label.partition(":")[0]) for label in shown]
    assert (len(numbers), numbers[0], numbers[-1]) == (24, 47, 0)
    assert max(before - after for before, after in pairwise(numbers)) <= 3


def test_the_contact_sheet_shows_24_pairs_at_most(tmp_path, capsys):
    folder = tmp_path / "many"
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for index in range(30):
        cv2.imwrite(str(folder / f"images/{index}.png"), np.full((32, 32, 3), index, np.uint8))
        cv2.imwrite(str(folder / f"masks/{index}.png"), ids_of(0)[:32, :32])
    assert main(["check", f"data_dir={folder}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    assert cv2.imread(str(tmp_path / "runs/check/many.png")).shape[0] < 6 * (CELL + 50)


def test_the_config_lines_train_as_they_are(check, tiny_config, tmp_path):
    """With no other settings than those that keep the test small."""
    _, said, report = check("ignore_value=200")
    assert [f"  {line}" for line in report["config"]] == said.splitlines()[-len(report["config"]) :]
    settings = yaml.safe_load("\n".join(report["config"]))
    assert settings == {
        "data_dir": report["data_dir"],
        "num_classes": 4,
        "mask_values": [0, 1, 2, 3],
        "ignore_value": 200,
    }
    small = {name: value for name, value in tiny_config.items() if name not in (*settings, "class_weights")}
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join([*report["config"], *(f"{name}: {json.dumps(value)}" for name, value in small.items())]))
    result = train(file, num_epochs=1)
    assert len(load_config(result.run_dir / "config.yaml").class_weights) == 4


def test_the_config_lines_repeat_the_settings_that_the_data_needed(check, data):
    for path in (data / "masks").iterdir():
        cv2.imwrite(str(path), cv2.resize(cv2.imread(str(path), cv2.IMREAD_UNCHANGED), None, fx=0.5, fy=0.5, interpolation=0))
    (data / "masks").rename(data / "truth-a")
    settings = ["mask_dir=truth-a", "resize_masks=true", "num_classes=1", "mask_values=nonzero", r"group_pattern='images/(\d)'"]
    code, _, report = check(*settings)
    assert code == 0
    assert yaml.safe_load("\n".join(report["config"][1:])) == {
        "mask_dir": "truth-a",
        "group_pattern": r"images/(\d)",
        "resize_masks": True,
        "num_classes": 1,
        "mask_values": "nonzero",
    }
    assert load_config(yaml.safe_load("\n".join(report["config"]))).resize_masks is True


def test_images_far_larger_than_image_size_are_advised_to_be_cropped(check, data):
    for index in range(10):
        cv2.imwrite(str(data / f"images/{index}.png"), np.full((100, 80, 3), index, np.uint8))
        cv2.imwrite(str(data / f"masks/{index}.png"), cv2.resize(ids_of(index), (80, 100), interpolation=cv2.INTER_NEAREST))
    lines = check("image_size=32", "fit=resize")[2]["config"]
    assert [line for line in lines if line.startswith("fit")] == ["fit: crop  # the images are larger than image_size: 32×32"]
    lines = check("image_size=64", "fit=resize")[2]["config"]  # 8000 pixels, less than 2.25 × 4096
    assert [line for line in lines if line.startswith("fit")] == ['fit: "resize"']
    assert not any("fit" in line for line in check("image_size=32")[2]["config"])  # left to auto


# Bad data


def test_bad_data_give_exit_code_2_and_every_problem_with_its_files_and_fix(check, data):
    (data / "images/1.png").write_bytes(b"")
    (data / "masks/9.png").unlink()
    cv2.imwrite(str(data / "masks/4.png"), np.zeros((7, 7), np.uint8))
    code, said, report = check()
    assert code == 2
    assert report["ok"] is False
    assert [(problem["kind"], len(problem["lines"])) for problem in report["problems"]] == [
        ("no_mask", 1),
        ("unreadable", 1),
        ("sizes", 1),
    ]
    for problem in report["problems"]:
        assert f"{len(problem['lines'])} {problem['title']}:\n  {problem['lines'][0]}\n  Fix: {problem['fix']}\n" in said
    assert "This data cannot be trained on yet: 3 problems with files, 0 open questions.\n" in said
    assert "Once they are settled, with these settings:\n" in said
    assert (report["num_pairs"], report["num_train"], report["num_val"]) == (9, 6, 1)


def test_a_question_that_only_the_user_can_answer_is_asked_with_its_lines(check):
    code, said, report = check("num_classes=1")
    assert code == 2
    (question,) = report["questions"]
    assert question in said
    assert question.endswith("    num_classes: 4")
    assert report["choices"] == [
        {"meaning": "any value but 0 is foreground", "settings": {"num_classes": 1, "mask_values": "nonzero"}},
        {"meaning": "ids of 4 classes", "settings": {"num_classes": 4}},
    ]
    assert report["config"][1:] == ["num_classes: 1", "mask_values: nonzero"]
    assert "0 problems with files, 1 open question.\n" in said
    assert (report["classes"], report["contact_sheet"], report["problems"]) == ([], None, [])


def test_fifty_files_of_a_kind_are_shown_and_the_json_has_all(check, data):
    for index in range(60):
        (data / f"images/bad{index:02d}.png").touch()
        shutil.copy(data / "masks/0.png", data / f"masks/bad{index:02d}.png")
    code, said, report = check()
    assert code == 2
    assert len(report["problems"][0]["lines"]) == 60
    assert said.count("the file is empty") == 50
    assert "  … and 10 more\n" in said


# Effects on the data and on the training after it


def test_nothing_is_written_into_data_dir(check, data, tmp_path):
    before = snapshot(data)
    check()
    assert snapshot(data) == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".scan", "check"]


def test_training_right_after_check_decodes_nothing_for_the_scan(check, data, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(forked_map, "CAN_FORK", False)  # reads in child processes would not be seen here
    read, real = [], scan.read_bytes
    monkeypatch.setattr(scan, "read_bytes", lambda path: read.append(path.name) or real(path))
    check()
    assert len(read) == 20
    read.clear()
    settings = {"data_dir": str(data), "checkpoint_dir": str(tmp_path / "runs"), "num_classes": 4, "num_epochs": 1}
    train({**tiny_config, **settings})
    assert read == []
    changed = data / "masks/3.png"
    cv2.imwrite(str(changed), ids_of(2))
    os.utime(changed, ns=(1, changed.stat().st_mtime_ns + 10))
    check()
    assert read == ["3.png"]


def test_a_class_without_pixels_is_noted_and_given_settings_are_repeated(check):
    code, said, _ = check("num_classes=6", "num_folds=3", "fold=2", "fit=crop", "image_size=32")
    assert code == 0
    assert "Note: no pixel of class 4, class 5 in any mask; is num_classes or mask_values right?" in said
    assert '\n  num_folds: 3\n  fold: 2\n  fit: "crop"\n' in said


def test_masks_without_a_foreground_give_exit_code_2(check, data):
    for index in range(10):
        cv2.imwrite(str(data / f"masks/{index}.png"), np.zeros((HEIGHT, WIDTH), np.uint8))
    code, said, report = check("num_classes=auto")
    assert code == 2
    assert "there is nothing to learn: every pixel of all 10 masks is 0;" in said
    assert not any("mask_values" in line for line in report["config"])


def test_the_number_of_classes_is_found_and_said_with_its_reason(check):
    code, said, report = check("num_classes=auto")
    assert code == 0
    assert "  Classes:    num_classes: 4 (the masks hold ids 0 to 3)\n" in said
    assert report["config"][1:] == ["num_classes: 4", "mask_values: [0, 1, 2, 3]"]
    assert "Classes:" not in check()[1]  # it was given


def test_every_value_of_the_masks_is_in_the_json(check, data):
    mask = np.dstack([ids_of(0)] * 3)
    mask[0, :2] = (10, 20, 30)  # OpenCV writes blue first
    cv2.imwrite(str(data / "masks/0.png"), mask)
    _, _, report = check("num_classes=auto", "mask_values=[0, 1, 2, 3]")
    rows = {str(row["value"]): (row["share"], row["masks"]) for row in report["values"]}
    pixels = 10 * HEIGHT * WIDTH
    assert rows["[30, 20, 10]"] == (2 / pixels, 1)
    assert rows["2"] == (80 / pixels, 2)
    assert sum(share for share, _ in rows.values()) == pytest.approx(1)
    assert report["values"][0]["value"] == 0  # the most frequent first


@pytest.mark.parametrize(
    ("num_problems", "said"), [(0, "0 problems with files, 1 open question."), (1, "1 problem with files, 1 open question.")]
)
def test_problems_and_questions_are_counted(num_problems, said, check, data):
    for index in range(num_problems):
        (data / f"images/{index}.png").write_bytes(b"")
    assert f"This data cannot be trained on yet: {said}\n" in check("num_classes=1")[1]


# Layouts


def test_test_data_and_what_to_skip_are_in_the_report_and_in_the_lines_to_paste(check, data):
    for folder in ("images", "masks"):
        (data / "test" / folder).mkdir(parents=True)
        shutil.copy(next((data / folder).iterdir()), data / "test" / folder / "90.png")
    sorted((data / "masks").iterdir())[-1].unlink()
    code, said, report = check()
    assert (code, report["num_test"], report["advised"]) == (2, 1, {})
    assert ", 1 test kept for evaluate (" in said
    assert 'unpaired: "skip"' in report["config"]
    code, said, report = check(
        *(line.replace(": ", "=").replace('"', "") for line in report["config"] if line.startswith("unpaired"))
    )
    assert (code, report["num_train"] + report["num_val"]) == (0, 9)


def test_names_of_classes_are_in_the_lines_to_paste(tmp_path, capsys):
    data = tmp_path / "data"
    for folder in ("images", "masks/sea", "masks/whale"):
        (data / folder).mkdir(parents=True)
    for index in range(4):
        pixels = np.random.default_rng(index).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        assert cv2.imwrite(str(data / f"images/{index}.png"), pixels)
        for number, name in enumerate(("sea", "whale")):
            mask = np.zeros((HEIGHT, WIDTH), np.uint8)
            mask[4 + 9 * number : 12 + 9 * number, 5:30] = 255
            assert cv2.imwrite(str(data / f"masks/{name}/{index}.png"), mask)
    words = ["check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}"]
    assert main(words) == 0
    lines = capsys.readouterr().out.rpartition("The settings for this data:\n")[2]
    pasted = yaml.safe_load(lines)
    assert (pasted["num_classes"], pasted["class_names"]) == (3, ["background", "sea", "whale"])
    (tmp_path / "mine.yaml").write_text("\n".join(line.strip() for line in lines.splitlines()))
    assert main(["check", str(tmp_path / "mine.yaml"), f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    assert "whale" in capsys.readouterr().out
