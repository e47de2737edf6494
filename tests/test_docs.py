"""README and docs are true: their commands run, their trees and tables follow the code, their links lead somewhere."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from helpers.project import ROOT, TINY_MODEL
from train_unet import main
from unet_trainer import load
from unet_trainer.commands import COMMANDS, bench, try_model
from unet_trainer.commands.export import FORMATS
from unet_trainer.config.facts import StepCost
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.data.formats.demo import write_demo
from unet_trainer.training.trials import StepProbe

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
USING = ROOT / "docs/using-a-model.md"
README = (ROOT / "README.md").read_text()
SMALL_RUN = {**TINY_MODEL, "image_size": 32, "batch_size": 4, "num_epochs": 1, "num_workers": 0}
SMALL = [f"{name}={value_text(value)}" for name, value in SMALL_RUN.items()]
USE_A_MODEL = ("evaluate", "predict", "export", "try", "report", "compare", "runs")


def code_blocks(text):
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(*pages):
    """Of pages, each once; what srun starts is one too."""
    lines = [line for page in pages for block in code_blocks(page.read_text()) for line in block.splitlines()]
    lines = [line.removeprefix("srun ") for line in lines]
    return list(dict.fromkeys(line for line in lines if line.startswith("python ")))


ALL_WORDS = [shlex.split(line)[2:] for line in commands(*PAGES) if line.startswith("python train_unet.py ")]


@pytest.mark.soak
def test_the_demo_command_reaches_the_promised_iou(tmp_path):
    """Word for word but for the install, which made the environment that runs this. With a thread for each core, as a user's."""
    assert "python -m pip install -r requirements.txt && python train_unet.py" in commands(ROOT / "README.md")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(ROOT / "train_unet.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "checkpoints/demo/run.json").read_text())["result"]
    assert result["best_val_iou"] >= 0.90
    images, masks = (len(list((tmp_path / "data/demo" / name).iterdir())) for name in ("images", "masks"))
    assert images == masks >= 200


def small_words(words):
    """Of a command that trains: the same, with the settings of a small run."""
    words = [re.sub(r"^time_budget=.*", "time_budget=2s", word) for word in words]
    left_out = ["encoder="] if "--resume" in words else []  # that of the run
    left_out += ["num_epochs="] if "time_budget=2s" in words or "--resume" in words else []
    small = [word for word in SMALL if not word.startswith(tuple(left_out))]
    smaller = tuple(f"{word.partition('=')[0]}=" for word in small)
    return [*(word for word in words if not word.startswith(smaller)), *small]


def test_every_command_that_trains_or_looks_at_data_runs(tiny_data, tmp_path, monkeypatch, small_network, capsys):
    """In the order of the pages, made small; a run that one command makes is there for the next."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")  # check writes a config there
    Path("data").mkdir()
    Path("data/mine").symlink_to(tiny_data)
    # What takes a while has tests of its own.
    monkeypatch.setattr(bench, "bench", lambda *_: None)
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: StepCost(0.01, 0.001, 0))
    for words in ALL_WORDS:
        words = [re.sub("num_epochs=150", "num_epochs=2", word) for word in words]
        if words[0] not in USE_A_MODEL:
            assert main(small_words(words)) == 0, (words, capsys.readouterr().err)


@pytest.fixture(scope="module")
def used_model(tiny_data, trained_run, tmp_path_factory):
    """A folder with the runs that pages name, data/mine and photos; what one command writes is there for the next."""
    folder = tmp_path_factory.mktemp("used_model")
    (folder / "data").mkdir()
    (folder / "data/mine").symlink_to(tiny_data)
    (folder / "photos").mkdir()
    for name, image in zip("ab", sorted((tiny_data / "images").iterdir()), strict=False):
        shutil.copy(image, folder / f"photos/{name}{image.suffix}")
    for name in ("demo", "fast", "production", "mine", "other"):
        shutil.copytree(trained_run, folder / "checkpoints" / name)
    return folder


def test_every_command_that_uses_a_model_runs(used_model, monkeypatch, capsys):
    """As they stand there."""
    monkeypatch.chdir(used_model)
    monkeypatch.setattr(try_model, "find_spec", lambda name: name)
    monkeypatch.setattr(try_model, "serve", lambda *given: None)  # would wait for Ctrl-C
    has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    for words in ALL_WORDS:
        if words[0] in USE_A_MODEL and (has_onnx or "onnx" not in " ".join(words)):
            assert main(words) == 0, (words, capsys.readouterr().err)


def example_of(words):
    """The example of the page that has these words."""
    (found,) = [block for block in code_blocks(USING.read_text()) if words in block]
    return found


def need_file(used_model, name, made_by):
    """One that a command of the page makes and another one uses."""
    if not (used_model / name).is_file():
        (line,) = [line for line in commands(USING) if made_by in line]
        with contextlib.chdir(used_model):
            assert main(shlex.split(line)[2:]) == 0


def test_the_example_of_load_runs(used_model, monkeypatch, capsys):
    monkeypatch.chdir(used_model)
    found = {}
    exec(example_of("from unet_trainer import load"), found)
    mask = found["mask"]
    assert (mask.shape, found["foreground"].shape) == ((64, 64), (64, 64))
    shares = {name: round(float((mask == index).mean()), 3) for index, name in enumerate(("background", "foreground"))}
    assert capsys.readouterr().out == f"{shares}\n"


def test_the_example_of_onnxruntime_gives_what_the_model_gives_without_this_project(used_model):
    for package in ("onnxruntime", "onnx", "onnxscript"):
        pytest.importorskip(package, reason="exports need requirements-export.txt")
    need_file(used_model, "checkpoints/demo/model.onnx", "--format onnx")
    script = example_of("import onnxruntime") + "\nprint(ids.tolist())"
    # -I: neither this folder nor PYTHONPATH is searched.
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, cwd=used_model, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shares, ids = done.stdout.splitlines()
    assert json.loads(shares.replace("'", '"')).keys() == {"background", "foreground"}
    image = np.asarray(Image.open(used_model / "photos/a.jpg"))
    assert image.shape == (64, 64, 3)  # that of training: the two ways to resize do not matter
    assert np.array_equal(json.loads(ids), load(used_model / "checkpoints/demo", device="cpu")(image))


def test_the_example_of_torch_export_runs(used_model, monkeypatch, capsys):
    need_file(used_model, "model.pt2", "--format pt2")
    capsys.readouterr()
    monkeypatch.chdir(used_model)
    example = example_of("torch.export.load")
    assert "unet_trainer" not in example
    exec(example, {})
    assert capsys.readouterr().out == "['background', 'foreground'] torch.Size([1, 64, 96])\n"


def test_the_python_example_runs(tiny_data, tmp_path, small_network, capsys):
    example = next(block for block in code_blocks(README) if "from train_unet import train" in block)
    small = {**SMALL_RUN, "device": "cpu", "checkpoint_dir": str(tmp_path)}
    example = example.replace('"num_epochs": 20', '"num_epochs": 1').replace('"data/mine"', repr(str(tiny_data)))
    example = example.replace('{"data_dir"', f'{{**{small!r}, "data_dir"')
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert str(tmp_path / "run") in capsys.readouterr().out


def test_the_example_of_an_error_message_is_what_the_program_says(capsys):
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shown = next(block for block in code_blocks(page) if block.startswith("Error: 3 problems"))
    assert main(["lr=1", "amp_dtype=bf16", "warmup_epochs=8"]) == 2
    assert capsys.readouterr().err == shown


def test_the_tree_follows_the_code():
    tree = next(block for block in code_blocks(README) if block.startswith("train_unet.py"))
    listed = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    packages = {path.name for path in (ROOT / "unet_trainer").iterdir() if (path / "__init__.py").is_file()}
    assert listed == packages
    for line in tree.splitlines():
        for name in line.split("  ")[0].split() if not line.startswith(" ") else []:
            assert (ROOT / name).exists(), name


def test_every_command_preset_and_format_is_documented():
    table = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    assert [path.name for path in sorted((ROOT / "configs").glob("*.yaml")) if f"`{path.name}`" not in table] == []
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if f"python train_unet.py {name}" not in text] == []
    using = "\n".join(commands(USING))
    parts = ("evaluate ", "predict ", "try ", "export ", *(f"--format {name}" for name in FORMATS))
    assert [part for part in parts if part not in using] == []


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (page, target)


CELLS = json.loads((ROOT / "docs/quickstart.ipynb").read_text())["cells"]


@pytest.mark.real_pictures
def test_the_notebook_has_no_outputs_trains_shows_and_predicts(tmp_path, monkeypatch, capsys):
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
    for name in ("train_unet.py", "unet_trainer", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    write_demo(Path("data/demo"), num_images=24, side=64)  # fewer than it would make
    monkeypatch.setattr(sys, "path", [*sys.path])
    pictures = []

    def display(shown, display_id=False):
        pictures.append(shown if isinstance(shown, str) else shown.copy().size)
        return SimpleNamespace(update=display)

    ipython = SimpleNamespace(version_info=(9, 0), get_ipython=lambda: None)  # matplotlib looks at it too
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    names = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "best val IoU 0." in said
    assert "'foreground': '" in said
    assert pictures[:3] == ["training ...", (1320, 830), (1320, 830)]
    assert len(pictures) == 5  # and samples, and the prediction
    assert (tmp_path / "checkpoints/quickstart/report.html").is_file()
