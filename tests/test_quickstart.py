"""docs/quickstart.ipynb runs from its first cell to its last."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from helpers.project import ROOT
from unet_trainer.datasets.demo import write_demo

CELLS = json.loads((ROOT / "docs/quickstart.ipynb").read_text())["cells"]


def test_the_notebook_is_kept_without_outputs():
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.real_pictures
def test_the_notebook_trains_shows_and_predicts(tmp_path, monkeypatch, capsys):
    for name in ("train_unet.py", "unet_trainer", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    write_demo(Path("data/demo"), num_images=24, side=64)  # fewer than it would make
    monkeypatch.setattr(sys, "path", [*sys.path])
    pictures = []

    def display(shown, display_id=False):
        pictures.append(shown if isinstance(shown, str) else shown.copy().size)
        return SimpleNamespace(update=display)

    for name, attributes in {  # matplotlib looks at IPython too
        "IPython": {"version_info": (9, 0), "get_ipython": lambda: None},
        "IPython.display": {"display": display},
    }.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
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
