"""What importing the trainer sets in the environment of the process, before torch is loaded; and what pip installs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

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
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    script = "import train_unet, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*found.split(), "False"]


def test_a_wheel_holds_all_that_is_used_without_a_clone(tmp_path):
    """Pages, templates and the demo's config; and it asks for what requirements.txt has, but for pytest."""
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "train_unet.py"):
        shutil.copy(ROOT / name, source)
    for name in ("configs", "unet_trainer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    kept = {
        path.relative_to(ROOT)
        for path in (ROOT / "unet_trainer").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert [str(path) for path in sorted(kept) if not (tmp_path / "installed" / path).is_file()] == []
    script = "import train_unet; from pathlib import Path; print(Path(train_unet.__file__).parent, train_unet.script_config().run_name, train_unet.load_config('configs/fast.yaml').run_name)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "installed"), "demo", "fast"], done.stderr
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lines = [
        re.sub(r"\s*#.*", "", line) for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    ]
    assert asked == [line for line in lines if not line.startswith("pytest")]
