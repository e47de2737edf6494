"""docs/quickstart.ipynb runs from its first cell to its last, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.project import ROOT

NOTEBOOK = ROOT / "docs/quickstart.ipynb"
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=sys.argv[2])
nbformat.write(notebook, sys.argv[3])
"""


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_notebook_trains_shows_and_predicts(tmp_path):
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed (requirements-dev.txt)")
    for name in ("train_unet.py", "unet_trainer", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(tmp_path), str(tmp_path / "done.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [output for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] for output in cell.get("outputs", [])]
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "best val IoU 0." in said
    assert "'foreground': '" in said
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3  # curves, samples, prediction
    assert (tmp_path / "checkpoints/quickstart/report.html").is_file()
