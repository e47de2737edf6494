"""`python train_unet.py check`: its arguments, its exit codes and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.project import ROOT
from train_unet import main
from unet_trainer.commands import data_check
from unet_trainer.commands.data_pictures import sheet_name


def test_a_folder_without_pairs_is_one_message_and_is_in_the_report(tmp_path, capsys):
    assert main(["check", f"data_dir={tmp_path / 'nowhere'}", "--json", str(tmp_path / "report.json")]) == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"]
    assert "does not exist" in report["questions"][0]["text"]
    captured = capsys.readouterr()
    assert captured.err == (f"Error: data_dir: {tmp_path / 'nowhere'} does not exist; need a folder with images/ and masks/\n")
    assert captured.out == ""


def test_a_report_that_cannot_be_written_is_one_message(data, tmp_path, capsys):
    words = [f"data_dir={data}", "num_classes=4"]
    assert main(["check", *words, f"checkpoint_dir={tmp_path / 'runs'}", "--json", str(tmp_path / "no/where.json")]) == 2
    assert capsys.readouterr().err == f"Error: --json: there is no folder {tmp_path / 'no'}\n"
    (tmp_path / "file").touch()
    assert main(["check", *words, f"checkpoint_dir={tmp_path / 'file'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "b.yaml"], "got 2 config files (a.yaml, b.yaml); need one, and key=value for the rest"),
        (["lr=1"], "1 problem in the config:\n  lr: unknown key; the name here is learning_rate"),
        (["group_pattern=(x"], "group_pattern: got '(x'; need a regular expression, e.g. '(patient\\d+)_'"),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_as_for_training(words, message, capsys):
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_config_file_is_read(data, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(f"data_dir: {json.dumps(str(data))}\nnum_classes: 4\ncheckpoint_dir: {tmp_path / 'elsewhere'}\nseed: 7\n")
    assert main(["check", str(file)]) == 0
    assert "val_fraction 0.2, seed 7" in capsys.readouterr().out
    assert (tmp_path / "elsewhere/check" / sheet_name(data)).exists()


def test_check_needs_no_torch(data, tmp_path):
    script = (
        "import sys\nfrom train_unet import main\n"
        "code = main(sys.argv[1:])\n"
        "print('loaded:', sorted({'torch', 'albumentations', 'timm', 'segmentation_models_pytorch'} & set(sys.modules)))\n"
        "sys.exit(code)"
    )
    words = ["check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}", "num_classes=4"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize(("is_good", "code"), [(True, 0), (False, 2)])
def test_the_exit_code_says_whether_the_data_can_be_trained_on(is_good, code, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(data_check, "check_data", lambda config, console, *files: calls.append((config, *files)) or is_good)
    assert main(["check", "seed=7", "--json", str(tmp_path / "report.json"), "data_dir=mine"]) == code
    ((config, json_file, config_file),) = calls
    assert (config.seed, config.data_dir, json_file, config_file) == (7, "mine", tmp_path / "report.json", None)
    assert main(["check", "--write", str(tmp_path / "mine.yaml")]) == code
    assert calls[1][1:] == (None, tmp_path / "mine.yaml")
