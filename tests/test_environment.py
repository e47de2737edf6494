"""What importing the trainer sets in the environment of the process, before torch is loaded; and what pip installs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

import train_unet
from helpers.project import ROOT


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "10000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE"),
    ],
)
def test_waiting_openmp_threads_give_up_their_core_soon_unless_the_user_says_otherwise(given, found):
    kept = os.environ.keys() - {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: os.environ[name] for name in kept}
    script = "import train_unet, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*found.split(), "False"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip would install this project into."""
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "train_unet.py"):
        shutil.copy(ROOT / name, source)
    for name in ("configs", "train_unet-stubs", "unet_trainer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_holds_all_that_is_used_without_a_clone(installed, tmp_path):
    """Pages, templates and the demo's config."""
    kept = {
        path.relative_to(ROOT)
        for folder in ("unet_trainer", "train_unet-stubs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert [str(path) for path in sorted(kept) if not (installed / path).is_file()] == []
    script = "import train_unet; from pathlib import Path; print(Path(train_unet.__file__).parent, train_unet.script_config().run_name, train_unet.load_config('configs/fast.yaml').run_name)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(installed), "demo", "fast"], done.stderr


def required(path):
    lines = (re.sub(r"\s*#.*", "", line) for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-r")]


def test_each_package_that_is_imported_is_declared_and_those_used_inside_have_an_upper_bound():
    """At the top of a module or in a function. Imports that only tests have are not looked at."""
    imported = set()
    for path in (ROOT / "train_unet.py", *(ROOT / "unet_trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    names = {"PIL": "pillow", "cv2": "opencv-python-headless", "yaml": "pyyaml"}
    packages = {names.get(name, name).replace("_", "-") for name in imported - sys.stdlib_module_names}
    lines = [line for path in ROOT.glob("requirements*.txt") for line in required(path)]
    declared = {re.split("[=<>]", line)[0].replace("_", "-") for line in lines}
    assert packages - {"unet-trainer", "train-unet"} - declared == set()
    of_pip = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert of_pip == [line for line in required(ROOT / "requirements.txt") if not line.startswith("pytest")]
    for name in ("torch", "segmentation-models-pytorch", "timm"):
        assert re.search(rf"^{name}>=[\d.]+,<\d", "\n".join(of_pip), re.MULTILINE), name


TYPED = """
from pathlib import Path
from typing import Any
from train_unet import follow, train
from unet_trainer import Callback, load
settings: dict[str, Any] = {"batch_size": 4}
result = train({"data_dir": "data"}, image_size=[256, 512], loss={"dice": 1}, checkpoint_dir=Path("runs"), **settings)
for row in follow(class_names=["road", "sky"], learning_rate="auto", callbacks=[Callback()]):
    print(row["val_iou"] + 1)
mask = load(result.run_dir)
"""
WRONG = """
train(lerning_rate=0.1)
follow(batchsize=4)
train(batch_size="many")
train(optimizer="adan")
train(nonsense=1, loss=5)
result.nothing
"""


@pytest.mark.parametrize("from_a_clone", [False, True])
def test_a_type_checker_knows_the_keywords_of_train_and_follow(from_a_clone, installed, tmp_path):
    """Installed by pip, and where the folder of a clone is on the path."""
    pytest.importorskip("mypy", reason="checks types")
    if not from_a_clone:
        venv.create(tmp_path / "venv", symlinks=os.name != "nt")
        (site_packages,) = (tmp_path / "venv").rglob("site-packages")
        shutil.copytree(installed, site_packages, dirs_exist_ok=True)
    python = tmp_path / ("venv/Scripts/python.exe" if os.name == "nt" else "venv/bin/python")
    (tmp_path / "program.py").write_text(TYPED + WRONG)
    options = ["--no-site-packages"] if from_a_clone else ["--python-executable", str(python)]
    options += ["--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT) if from_a_clone else ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = re.findall(r"^program\.py:(\d+): error: (.*)", done.stdout, re.MULTILINE)
    first = TYPED.count("\n") + 2
    assert [int(line) - first for line, _ in found] == [0, 1, 2, 3, 4, 4, 5], done.stdout
    named = [
        '"lerning_rate" for "train"',
        '"batchsize" for "follow"',
        '"batch_size" to',
        '"optimizer" to',
        '"nonsense"',
    ]
    assert [name for name, (_, text) in zip(named, found, strict=False) if name not in text] == [], done.stdout


def test_the_types_of_the_script_where_it_is_installed_are_its_own():
    def signatures(path):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        return {node.name: (ast.unparse(node.args), ast.unparse(node.returns)) for node in functions}

    script, stub = signatures("train_unet.py"), signatures("train_unet-stubs/__init__.pyi")
    assert stub == {name: script[name] for name in stub}
    text = (ROOT / "train_unet-stubs/__init__.pyi").read_text(encoding="utf-8")
    assert [
        name for name in train_unet.__all__ if not re.search(rf"(def|as) {name}\b|^{name}:", text, re.MULTILINE)
    ] == []
