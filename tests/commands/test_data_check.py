"""The report of `check`: what a dataset holds, what is wrong with it, and the settings for it."""

import json
import os
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from helpers.report_data import Dataset
from train_unet import main, train
from unet_trainer.commands import data_check
from unet_trainer.commands.data_check import draw_sheet, sheet_name
from unet_trainer.config.load import load_config
from unet_trainer.data import scan
from unet_trainer.images.drawing import COLOURS
from unet_trainer.system import concurrency

HEIGHT, WIDTH = 40, 48


def ids_of(index):
    """Class 1 in every mask, class 2 in two of ten, class 3 in one: a tenth, a hundredth, less."""
    ids = np.zeros((HEIGHT, WIDTH), np.uint8)
    ids[:4] = 1
    if index in (2, 7):
        ids[10:14, 10:20] = 2
    if index == 5:
        ids[20:22, 20:23] = 3
    return ids


@pytest.fixture
def data(tmp_path):
    """Ten pairs of three classes and background."""
    folder, chooser = tmp_path / "my data", np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for index in range(10):
        cv2.imwrite(str(folder / f"images/{index}.png"), chooser.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
        cv2.imwrite(str(folder / f"masks/{index}.png"), ids_of(index))
    return folder


@pytest.fixture
def check(data, tmp_path, capsys):
    """Runs the command; returns exit code, printed text and the JSON report, which is written through a link."""
    report = tmp_path / "report.json"
    report.symlink_to(tmp_path / "target.json")

    def run(*words):
        classes = [] if any(word.startswith("num_classes=") for word in words) else ["num_classes=4"]
        words = [f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}", *classes, *words, "--json", str(report)]
        code = main(["check", *words])
        captured = capsys.readouterr()
        assert (captured.err, report.is_symlink()) == ("", True)
        return code, captured.out, json.loads(report.read_text(encoding="utf-8"))

    return run


def test_good_data_give_exit_code_0_and_a_report_of_the_contents(check, data, tmp_path):
    code, said, report = check()
    pixels, sheet = 10 * HEIGHT * WIDTH, tmp_path / "runs/check" / sheet_name(data)
    for part in (
        "Dataset my data\n",
        "  Pairs:      10 (images/ + masks/, same names)\n",
        "  Images:     8-bit RGB; 48×40\n",
        "(ImageNet's, for 8-bit RGB)\n",
        "  Masks:      num_classes: 4 (ids 0 to 3)\n",
        f"      class 2  2  {80 / pixels:8.3%} of pixels, in 2 of 10 masks\n",
        f"      class 3  3  {6 / pixels:8.3%} of pixels, in 1 of 10 masks\n",
        "  Split:      8 train, 2 val (val_fraction 0.2, seed 42)\n",
        f"  Pictures:   {sheet} (the rarest classes first)\n",
        "\n\nReady to train with these settings (--write FILE writes them as a config):\n",
    ):
        assert said.count(part) == 1
    assert (code, report["ok"], report["problems"], report["questions"]) == (0, True, [], [])
    assert (report["num_pairs"], report["num_train"], report["num_val"]) == (10, 8, 2)
    assert [(row["values"], row["name"]) for row in report["classes"]] == [(f"{i}", f"class {i}") for i in range(4)]
    shares = [0.9 - 86 / pixels, 0.1, 80 / pixels, 6 / pixels]
    assert [row["share"] for row in report["classes"]] == pytest.approx(shares)
    lacking = "classes in no validation mask (val_iou says nothing of them): class 2, class 3"
    assert report["notices"] == [f"{lacking}; add images with them, or choose with split_file=FILE.csv"]
    assert (report["images"], report["contact_sheet"]) == ("8-bit RGB", str(sheet))


def test_the_config_lines_repeat_the_settings_that_the_data_needed(check, data, tmp_path):
    for path in (data / "masks").iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path), cv2.IMREAD_UNCHANGED)[::2, ::2])
    (data / "masks").rename(data / "truth-a")
    settings = {"mask_dir": "truth-a", "resize_masks": True, "num_classes": 1, "mask_values": "nonzero"}
    words = [f"{name}={str(value).lower()}" for name, value in settings.items()]
    code, _, report = check(*words, r"group_pattern='images/(\d)'")
    assert code == 0
    written = {**settings, "group_pattern": r"images/(\d)", "checkpoint_dir": str(tmp_path / "runs")}
    assert yaml.safe_load("\n".join(report["config"][1:])) == written
    assert load_config(yaml.safe_load("\n".join(report["config"]))).resize_masks is True


def test_bad_data_give_exit_code_2_and_every_problem_with_its_files_and_fix(check, data, tmp_path, capsys):
    (data / "images/1.png").write_bytes(b"")
    (data / "masks/9.png").unlink()
    cv2.imwrite(str(data / "masks/4.png"), np.zeros((7, 7), np.uint8))
    code, said, report = check()
    assert (code, report["ok"]) == (2, False)
    kinds = [(problem["kind"], len(problem["lines"])) for problem in report["problems"]]
    assert kinds == [("no_mask", 1), ("unreadable", 1), ("sizes", 1)]
    for problem in report["problems"]:
        title, line = (text.replace(f"{data}/", "") for text in (problem["title"], problem["lines"][0]))
        assert f"{title}:\n  Fix: {problem['fix']}\n  {line}\n" in said
    first = "\nNot ready to train: 2 files have to be fixed first."
    assert f"{first} Then these settings train, with one guess to confirm:\n" in said
    assert any(line.startswith("unpaired: skip  # GUESS: 1 image without a mask in masks") for line in report["config"])
    assert (report["num_pairs"], report["num_train"], report["num_val"]) == (9, 6, 1)
    paths = re.findall(r"(?<![\w.])/[\w./-]+", said)
    assert len(paths) == len(set(paths)) == 3  # data_dir, the sheet and checkpoint_dir: files are named inside data_dir
    assert main(["check", f"data_dir={data}", "--write", str(tmp_path / "mine.yaml")]) == 2
    assert capsys.readouterr().out.endswith("\n\n--write: nothing was written, because the data is not ready.\n")
    assert not (tmp_path / "mine.yaml").exists()


def test_a_question_is_answered_in_the_settings_beside_the_other_answers(check, tmp_path):
    code, said, report = check("num_classes=1")
    assert (code, report["ok"], report["problems"]) == (0, True, [])
    (question,) = report["questions"]
    assert question["text"] in said
    meaning, settings = "any value but 0 is foreground", {"num_classes": 1, "mask_values": "nonzero"}
    other = {"meaning": "ids of 4 classes", "settings": {"num_classes": 4}}
    assert question["choices"] == [{"meaning": meaning, "settings": settings}, other]
    assert report["guesses"] == [{"reason": meaning, "settings": settings}]
    assert report["config"][1:] == [
        f"# GUESS: {meaning}",
        "num_classes: 1",
        "mask_values: nonzero",
        "# or in their place: ids of 4 classes",
        "#   num_classes: 4",
        f"checkpoint_dir: {tmp_path / 'runs'}",
    ]
    assert said.endswith("".join(f"  {line}\n" for line in report["config"]))
    assert "\nReady to train with these settings, with one guess to confirm (--write FILE writes them as" in said
    assert f"  Masks:      num_classes: 1 (GUESS: {meaning})\n" in said
    assert [row["name"] for row in report["classes"]] == ["background", "foreground"]  # as if it were answered
    assert Path(report["contact_sheet"]).is_file()


def test_of_several_folders_the_one_whose_files_all_have_partners_is_chosen(check, data):
    (data / "annotations").mkdir()
    (data / "annotations/3.png").write_bytes((data / "masks/3.png").read_bytes())
    _, said, _ = check()
    assert "  Pairs:      10 (images/ + masks/, same names)\n" in said
    assert said.index("\n  mask_dir: masks") < said.index("\n  #   mask_dir: annotations")


def test_training_right_after_check_decodes_nothing_for_the_scan(check, data, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency, "CAN_FORK", False)  # reads in child processes would not be seen here
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


def test_a_folder_without_pairs_is_one_message_and_is_in_the_report(tmp_path, capsys):
    assert main(["check", f"data_dir={tmp_path / 'nowhere'}", "--json", str(tmp_path / "report.json")]) == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"]
    text = f"data_dir: {tmp_path / 'nowhere'} does not exist; need a folder with images/ and masks/"
    assert report["questions"][0]["text"] == text
    assert capsys.readouterr() == ("", f"Error: {text}\n")


def test_a_report_that_cannot_be_written_is_one_message(data, tmp_path, capsys):
    words = ["check", f"data_dir={data}", "num_classes=4"]
    assert main([*words, f"checkpoint_dir={tmp_path / 'runs'}", "--json", str(tmp_path / "no/where.json")]) == 2
    assert capsys.readouterr().err == f"Error: --json: there is no folder {tmp_path / 'no'} that can be written to\n"
    (tmp_path / "file").touch()
    assert main([*words, f"checkpoint_dir={tmp_path / 'file'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


# The contact sheet


@pytest.fixture
def shown(monkeypatch):
    """Pictures and labels of the sheets."""
    shown, real = [], data_check.contact_sheet

    def draw(pictures, labels, **others):
        shown.append((pictures, labels))
        return real(pictures, labels, **others)

    monkeypatch.setattr(data_check, "contact_sheet", draw)
    return shown


def test_the_contact_sheet_is_a_picture_of_pairs_with_the_rarest_classes_first(check, data, tmp_path, shown):
    check()
    ((pictures, labels),) = shown
    assert labels[:3] == ["5: class 3", "2: class 2", "0: class 1"]
    assert sorted(label.partition(":")[0] for label in labels) == [f"{index}" for index in range(10)]
    assert pictures[0][1].tolist() == ids_of(5).tolist()
    file = tmp_path / "runs/check" / sheet_name(data)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert len(np.unique(cv2.imread(str(file)))) > 100


def test_values_that_nobody_knows_are_drawn_each_as_a_class(tmp_path):
    data = Dataset(tmp_path)
    for index in range(6):
        data.mask(index, np.full((20, 30), 7, np.uint8))
    answered = data.answered()
    assert answered.report.coding is None
    sheet = cv2.cvtColor(cv2.imread(str(draw_sheet(answered.config, answered.report))), cv2.COLOR_BGR2RGB)
    legend = {tuple(colour) for colour in np.unique(sheet[-30:].reshape(-1, 3), axis=0).tolist()}
    assert tuple(COLOURS[-1].tolist()) in legend
