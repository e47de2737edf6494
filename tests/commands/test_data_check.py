"""The report of `check`: what a dataset holds, what is wrong with it, and the settings for it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from helpers.annotated import annotate_masks
from helpers.class_masks import HEIGHT, WIDTH, ids_of
from train_unet import main, train
from unet_trainer.commands.data_check import check_data, names_inside
from unet_trainer.commands.data_pictures import sheet_name
from unet_trainer.config.load import load_config
from unet_trainer.datasets import scan
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
    assert f"Pictures:   {checkpoints / 'check' / sheet_name(data)}" in said
    lines = json.loads(report.read_text())["config"]
    assert lines == [
        f"data_dir: {data}",
        "num_classes: 3",
        "class_names: [background, cat, dog]",
        "mask_values: [0, 1, 2]",
        f"checkpoint_dir: {checkpoints}",
    ]
    assert check_data(load_config(yaml.safe_load("\n".join(lines))), Console(io.StringIO()))
    assert class_share(report, "cat") > 0.01


def class_share(report, name):
    (share,) = [row["share"] for row in json.loads(report.read_text())["classes"] if row["name"] == name]
    return share


def test_good_data_give_exit_code_0_and_a_report_of_the_contents(check, data, tmp_path):
    code, said, report = check()
    assert code == 0
    pixels = 10 * HEIGHT * WIDTH
    for part in (
        "Dataset my data\n",
        "  Pairs:      10 (images/ + masks/, same names)\n",
        "  Images:     8-bit RGB; 48×40\n",
        "(ImageNet's, for 8-bit RGB)\n",
        f"1 → class 1 {4 / 40:.1%}",
        f"      class 2         2  {80 / pixels:8.3%} of pixels, in 2 of 10 masks\n",
        f"      class 3         3  {6 / pixels:8.3%} of pixels, in 1 of 10 masks\n",
        "  Split:      8 train, 2 val (images/ + masks/, same names; val_fraction 0.2, seed 42)\n",
        f"  Pictures:   {tmp_path / 'runs/check' / sheet_name(data)} (the rarest classes first)\n",
        "Nothing stands in the way of training. The settings for this data (--write FILE writes them as a config):\n",
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
    assert report["contact_sheet"] == str(tmp_path / "runs/check" / sheet_name(data))
    assert report["data_dir"] == str(data)
    assert report["rule"] == "images/ + masks/, same names"


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
        "checkpoint_dir": str(tmp_path / "runs"),
    }
    assert report["settings"] == settings
    small = {name: value for name, value in tiny_config.items() if name not in (*settings, "class_weights")}
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join([*report["config"], *(f"{name}: {json.dumps(value)}" for name, value in small.items())]))
    result = train(file, num_epochs=1)
    assert len(load_config(result.run_dir / "config.yaml").class_weights) == 4


def test_the_config_lines_repeat_the_settings_that_the_data_needed(check, data, tmp_path):
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
        "checkpoint_dir": str(tmp_path / "runs"),
    }
    assert load_config(yaml.safe_load("\n".join(report["config"]))).resize_masks is True


def test_images_far_larger_than_image_size_are_advised_to_be_cropped(check, data):
    for index in range(10):
        cv2.imwrite(str(data / f"images/{index}.png"), np.full((100, 80, 3), index, np.uint8))
        cv2.imwrite(str(data / f"masks/{index}.png"), cv2.resize(ids_of(index), (80, 100), interpolation=cv2.INTER_NEAREST))
    lines = check("image_size=32", "fit=resize")[2]["config"]
    assert [line for line in lines if line.startswith("fit")] == ["fit: crop  # the images are larger than image_size: 32×32"]
    lines = check("image_size=64", "fit=resize")[2]["config"]  # 8000 pixels, less than 2.25 × 4096
    assert [line for line in lines if line.startswith("fit")] == ["fit: resize"]
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
        title, line = (text.replace(f"{data}/", "") for text in (problem["title"], problem["lines"][0]))
        assert f"{title}:\n  Fix: {problem['fix']}\n  {line}\n" in said
    assert (
        "This data cannot be trained on yet: 2 problems with files, and 1 decision is yours; the likely answer is taken in these "
        "settings, and in what is said above. With the files mended, they train as they are (--write FILE writes them as a config):\n"
    ) in said
    assert "unpaired: skip  # 1 image without a mask in masks" in report["config"]
    assert (report["num_pairs"], report["num_train"], report["num_val"]) == (9, 6, 1)


def test_a_question_that_only_the_user_can_answer_is_answered_in_the_settings_beside_the_other_answers(check, tmp_path):
    code, said, report = check("num_classes=1")
    assert code == 2
    (question,) = report["questions"]
    assert question["text"] in said
    assert question["choices"] == [
        {"meaning": "any value but 0 is foreground", "settings": {"num_classes": 1, "mask_values": "nonzero"}},
        {"meaning": "ids of 4 classes", "settings": {"num_classes": 4}},
    ]
    assert report["config"][1:] == [
        "# any value but 0 is foreground",
        "num_classes: 1",
        "mask_values: nonzero",
        "# or in their place: ids of 4 classes",
        "#   num_classes: 4",
        f"checkpoint_dir: {tmp_path / 'runs'}",
    ]
    assert said.endswith("".join(f"  {line}\n" for line in report["config"]))
    assert "This data cannot be trained on yet: 1 decision is yours; the likely answer is taken in these settings, and in" in said
    assert [row["name"] for row in report["classes"]] == ["background", "foreground"]  # as if it were answered
    assert (Path(report["contact_sheet"]).is_file(), report["problems"]) == (True, [])


def test_ten_files_of_a_kind_are_shown_and_the_json_has_all(check, data):
    for index in range(60):
        (data / f"images/bad{index:02d}.png").touch()
        shutil.copy(data / "masks/0.png", data / f"masks/bad{index:02d}.png")
    code, said, report = check()
    assert code == 2
    assert len(report["problems"][0]["lines"]) == 60
    assert said.count("the file is empty") == 10
    assert "  … and 50 more (--json FILE lists them)\n" in said


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
    assert "\n  num_folds: 3\n  fold: 2\n  image_size: 32\n  fit: crop\n" in said


def test_masks_without_a_foreground_give_exit_code_2(check, data):
    for index in range(10):
        cv2.imwrite(str(data / f"masks/{index}.png"), np.zeros((HEIGHT, WIDTH), np.uint8))
    code, said, report = check("num_classes=auto")
    assert code == 2
    assert "there is nothing to learn: every pixel of all 10 masks is 0;" in said
    assert (report["config"], report["settings"]) == ([], None)
    assert said.endswith("This data cannot be trained on, and no settings change that.\n")
    assert Path(report["contact_sheet"]).is_file()  # the masks are to be looked at


def test_the_number_of_classes_is_found_and_said_with_its_reason(check):
    code, said, report = check("num_classes=auto")
    assert code == 0
    assert "  Classes:    num_classes: 4 (the masks hold ids 0 to 3)\n" in said
    assert report["config"][1:-1] == ["num_classes: 4", "mask_values: [0, 1, 2, 3]"]
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
    ("num_bad", "said"),
    [
        (0, "This data cannot be trained on yet: 1 decision is yours; "),
        (1, "This data cannot be trained on yet: 1 problem with files, and 1 decision is yours; "),
        (2, "This data cannot be trained on yet: 2 problems with files, and 1 decision is yours; "),
    ],
)
def test_problems_and_decisions_are_counted(num_bad, said, check, data):
    for index in range(num_bad):
        (data / f"images/{index}.png").write_bytes(b"")
    assert said in check("num_classes=1")[1]


# Layouts


def test_test_data_and_what_to_skip_are_in_the_report_and_in_the_lines_to_paste(check, data):
    for folder in ("images", "masks"):
        (data / "test" / folder).mkdir(parents=True)
        shutil.copy(next((data / folder).iterdir()), data / "test" / folder / "90.png")
    sorted((data / "masks").iterdir())[-1].unlink()
    code, said, report = check()
    assert (code, report["num_test"]) == (2, 1)
    assert ", 1 test kept for evaluate (" in said
    assert "unpaired: skip  # 1 image without a mask in masks" in report["config"]
    code, said, report = check("unpaired=skip")
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
    lines = capsys.readouterr().out.rpartition("(--write FILE writes them as a config):\n")[2]
    pasted = yaml.safe_load(lines)
    assert (pasted["num_classes"], pasted["class_names"]) == (3, ["background", "sea", "whale"])
    (tmp_path / "mine.yaml").write_text("\n".join(line.strip() for line in lines.splitlines()))
    assert main(["check", str(tmp_path / "mine.yaml"), f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    assert "whale" in capsys.readouterr().out


# Paths and numbers


def test_files_are_named_inside_data_dir_and_no_absolute_path_is_said_twice(check, data):
    for index in range(4):
        cv2.imwrite(str(data / f"masks/{index}.png"), np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8))
    (data / "masks/9.png").unlink()
    (data / "images/8.png").write_bytes(b"")
    _, said, _ = check()
    assert "  masks/0.png: 24×20, its image images/0.png is 48×40\n" in said
    assert "  images/8.png: the file is empty\n" in said
    assert said.count(str(data)) == 1  # data_dir of the settings
    paths = re.findall(r"(?<![\w.])/[\w./-]+", said)
    assert len(paths) == len(set(paths)) == 3  # data_dir, the sheet and checkpoint_dir


@pytest.mark.parametrize(
    ("data_dir", "text", "shorter"),
    [
        ("/a/b", "/a/b/images/1.png = /a/b/images/2.png", "images/1.png = images/2.png"),
        ("/a/b", "2 folders in /a/b could hold", "2 folders in data_dir could hold"),
        ("/a/b", "/a/bc/1.png, /x/a/b/1.png", "/a/bc/1.png, /x/a/b/1.png"),
        ("b", "b/images/1.png in sub/b/1.png", "images/1.png in sub/b/1.png"),
        (".", "images/1.png: v. 2", "images/1.png: v. 2"),
        ("/a/b(c", "'/a/b(c/x'", "'x'"),
    ],
)
def test_a_path_is_shown_as_seen_from_data_dir(data_dir, text, shorter):
    assert names_inside(Path(data_dir))(text) == shorter


def test_what_is_one_is_singular(check, data):
    (data / "images/8.png").write_bytes(b"")
    (data / "masks/9.png").unlink()
    cv2.imwrite(str(data / "masks/4.png"), np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8))
    _, said, _ = check("num_classes=1")
    assert not re.findall(r"(?<![\d.])1 (?:images|masks|pairs|files|problems|decisions|values|sizes|classes|groups|sets)\b", said)
    assert "1 mask of another size than its image:\n" in said


# --write


@pytest.mark.usefixtures("small_network")
def test_the_config_that_check_writes_trains_as_it_is(data, tiny_config, tmp_path, capsys):
    small = {name: value for name, value in tiny_config.items() if name not in ("data_dir", "num_classes", "mask_values")}
    base, mine = tmp_path / "small.yaml", tmp_path / "mine.yaml"
    base.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in {**small, "num_epochs": 1}.items()))
    assert main(["check", str(base), f"data_dir={data}", "num_classes=1", "--write", str(mine)]) == 2
    said = capsys.readouterr().out
    assert said.endswith(f"\nWritten. It trains as it is: python train_unet.py {mine}\n")
    assert mine.read_text().startswith(
        f"# python train_unet.py {mine}\n# Written by check for my data; edit it as you like.\n\ndata_dir: {data}\n"
    )
    assert main([str(mine)]) == 0
    assert main(["check", str(mine)]) == 0


def test_a_file_that_is_there_is_not_overwritten(data, tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("seed: 7\n")
    assert main(["check", f"data_dir={data}", "--write", str(mine)]) == 2
    assert capsys.readouterr().err == f"Error: --write: {mine} exists; name another file, or remove it\n"
    assert mine.read_text() == "seed: 7\n"


def test_where_files_have_to_be_mended_the_config_is_written_and_it_is_said(data, tmp_path, capsys):
    good = (data / "images/8.png").read_bytes()
    (data / "images/8.png").write_bytes(b"")
    words = ["check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}"]
    assert main([*words, "--write", str(tmp_path / "mine.yaml")]) == 2
    assert "\nWritten. Once the files are mended, it trains as it is: python train_unet.py " in capsys.readouterr().out
    (data / "images/8.png").write_bytes(good)
    assert main(["check", str(tmp_path / "mine.yaml")]) == 0


def test_without_settings_nothing_is_written(data, tmp_path, capsys):
    for index in range(10):
        cv2.imwrite(str(data / f"masks/{index}.png"), np.zeros((HEIGHT, WIDTH), np.uint8))
    words = ["check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}"]
    assert main([*words, "--write", str(tmp_path / "mine.yaml")]) == 2
    assert capsys.readouterr().out.endswith("--write: nothing was written, since there are no settings for this data.\n")
    assert not (tmp_path / "mine.yaml").exists()
