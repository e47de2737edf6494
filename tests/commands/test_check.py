"""`python train_unet.py check`: its arguments, its exit codes and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers.project import ROOT
from train_unet import main


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
