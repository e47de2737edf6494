"""python train_unet.py export: what it says, where it writes, and what it refuses."""

import os
import sys

import pytest
import torch

from helpers.checkpoints import random_batch, random_segmenter, save_model, small_segmenter, small_spec
from helpers.steps import SmallNetwork, make_spec
from train_unet import main
from unet_trainer.commands.export import choose_target
from unet_trainer.config.errors import UserError
from unet_trainer.inference.export import SMP_FILES

SPEC = small_spec()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """checkpoints/demo with a small network in the current folder."""
    build = "unet_trainer.inference.engine.build_network"
    monkeypatch.setattr(build, lambda spec, encoder_weights: SmallNetwork(spec.image.channels, spec.num_classes))
    monkeypatch.chdir(tmp_path)
    return save_model(tmp_path / "checkpoints/demo/best.pt", small_segmenter(SPEC)).parent


def answer(capsys, *arguments):
    """What the user reads when the arguments are refused."""
    assert main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    return error.removeprefix("Error: ").removesuffix("\n")


def test_onnx_is_the_format_unless_another_is_named_and_the_next_command_is_printed(run, capsys):
    pytest.importorskip("onnxruntime", reason="exports need requirements-export.txt")
    pytest.importorskip("onnxscript", reason="exports need requirements-export.txt")
    (run.parent.parent / "my models").mkdir()
    assert main(["export", str(run / "best.pt"), "--out", "my models"]) == 0
    assert (run.parent.parent / "my models/model.onnx").is_file()
    said, errors = capsys.readouterr()
    assert said.endswith("\nNext: python train_unet.py predict 'my models/model.onnx' IMAGES --out predictions\n")
    assert errors == ""
    assert "is an export already; name the run or the .pt file" in answer(capsys, "my models/model.onnx")


def test_a_folder_of_smp_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "checkpoints/demo/best.pt", random_segmenter(make_spec(decoder_channels=(8, 8, 8, 8, 8))))
    folder = tmp_path / "checkpoints/demo/model_smp"
    for _ in range(2):  # again, over the earlier one
        assert main(["export", "demo", "--format", "smp"]) == 0
        assert "Written:    checkpoints/demo/model_smp (" in capsys.readouterr().out
        assert sorted(file.name for file in folder.iterdir()) == sorted(SMP_FILES)
    (folder / "LICENSE").write_text("mine")
    assert "model_smp holds LICENSE beside an earlier export, which would be deleted with it" in answer(
        capsys, "demo", "--format", "smp"
    )
    assert (folder / "LICENSE").read_text() == "mine"


def test_raw_weights_are_those_of_the_last_state(run, capsys):
    """best.pt holds averaged weights; last.pt both."""
    last = small_segmenter(SPEC, seed=1)
    save_model(run / "last.pt", last)
    assert main(["export", "demo", "--format", "pt2", "--raw"]) == 0
    assert "Exporting checkpoints/demo/last.pt as " in (said := capsys.readouterr().out)
    assert "raw weights, epoch 3" in said
    images = random_batch(SPEC, 1, 64, 64)
    network = torch.export.load(run / "model.pt2").module()
    assert torch.allclose(network(images.permute(0, 3, 1, 2).float()), last(images), atol=1e-4)


def test_a_missing_package_is_named_in_one_line(run, capsys, monkeypatch):
    pytest.importorskip("onnxruntime", reason="another would be named")
    pytest.importorskip("onnxscript", reason="another would be named")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    expected = "onnxscript is not installed; exported models need: python -m pip install -r requirements-export.txt"
    assert answer(capsys, "demo") == expected


@pytest.mark.parametrize(
    ("out", "name", "message"),
    [
        ("model.pt", "onnx", "model.pt does not end in .onnx; need the name of a .onnx file, or a folder for it"),
        ("nowhere/model.onnx", "onnx", "there is no folder .*nowhere"),
        ("notes.onnx", "onnx", "notes.onnx is there and is no .onnx model; choose another"),
        ("pipe.onnx", "onnx", "pipe.onnx cannot be written"),
        ("mine", "smp", "mine exists and is no earlier export; name a folder that does not exist"),
        (None, "pt2", "is a link to .*; remove it, or choose another place"),  # a folder from elsewhere may have any
        (None, "smp", "is a link to .*; remove it, or choose another place"),
    ],
)
def test_nothing_but_an_earlier_export_of_its_kind_is_replaced(out, name, message, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.onnx").write_bytes(b"notes")
    (tmp_path / "model.pt2").symlink_to(tmp_path / "elsewhere.pt2")
    (tmp_path / "model_smp").symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"^--out: .*{message}"):
        choose_target(out and tmp_path / out, name, tmp_path / "best.pt")
    (tmp_path / "earlier.onnx").write_bytes(b"\x08\x0a\x12")
    assert choose_target(tmp_path / "earlier.onnx", "onnx", tmp_path / "best.pt") == tmp_path / "earlier.onnx"
