"""Export as .onnx: one file that computes the same at any batch and size, says what it is, and holds nothing of this machine."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("onnxruntime", reason="exports need requirements-export.txt")
pytest.importorskip("onnxscript", reason="exports need requirements-export.txt")

import onnx

from helpers.checkpoints import FOUR_FLOATS, GREY_16BIT, make_card, random_batch, random_segmenter, small_segmenter, small_spec
from helpers.project import ROOT
from helpers.steps import make_spec
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.inference import export_check
from unet_trainer.inference.export_check import ExportError
from unet_trainer.inference.export_onnx import OPSET, export_onnx, metadata
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.inference.onnx_engine import CARD_KEY, OnnxEngine

SPEC = small_spec(GREY_16BIT)
CARD = make_card(SPEC)
BATCHES = [(1, 32, 32), (4, 64, 32), (1, 95, 130), (2, 192, 224)]


def largest_difference(segmenter, path):
    """Relative to the largest logit."""
    engine = OnnxEngine(path, device="cpu")
    found = []
    for batch in BATCHES:
        images = random_batch(segmenter.spec, *batch)
        expected = segmenter(images)
        found.append(((engine.logits(images) - expected).abs().max() / expected.abs().max()).item())
    return max(found)


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


@pytest.fixture(scope="module")
def exported(segmenter, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    return path, export_onnx(segmenter, CARD, path)


def test_an_exported_model_computes_what_torch_computes(exported, segmenter):
    path, comparison = exported
    assert largest_difference(segmenter, path) < 1e-5
    assert comparison.num_changed == 0
    assert comparison.difference < 1e-4


def test_the_export_is_one_file(exported):
    path, _ = exported
    assert list(path.parent.iterdir()) == [path]
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [OPSET]
    assert (model.producer_name, len(model.functions)) == ("unet_trainer", 0)


def test_the_file_names_nothing_of_the_machine_that_made_it(exported):
    content = exported[0].read_bytes()
    for trace in (str(ROOT), "site-packages", 'File "', ".py"):
        assert trace.encode() not in content, trace


def test_batch_height_and_width_are_variable(exported):
    graph = onnx.load(exported[0]).graph
    shapes = [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in (*graph.input, *graph.output)
    ]
    assert shapes == [["batch", 1, "32*rows", "32*columns"], ["batch", 2, "32*rows", "32*columns"]]


def test_the_metadata_has_the_card_and_its_main_points_in_plain_text(exported):
    found = {entry.key: entry.value for entry in onnx.load(exported[0]).metadata_props}
    assert ModelCard.from_json(found.pop(CARD_KEY)) == CARD
    assert len(found.pop("sha256")) == 64
    assert json.loads(found["classes"]) == ["background", "foreground"]
    assert json.loads(found["class_colours"]) == [[0, 0, 0], [1, 1, 1]]
    assert json.loads(found["mask_values"]) == [0, 1]
    assert (json.loads(found["image_mean"]), json.loads(found["image_std"])) == ([3000.0], [700.0])
    assert (found["image_channels"], found["image_depth"], found["trained_size"], found["fit"]) == (
        "1",
        "uint16",
        "[32, 32]",
        "crop",
    )
    assert (
        found["input"]
        == "images: N,1,H,W float32 in the files' own units (uint16, about 0 to 9000), not normalised; H and W multiples of 32"
    )
    assert found["output"] == "logits: N,2,H,W float32; over axis 1, argmax gives the class of a pixel, softmax probabilities"


def test_the_advice_about_sizes_is_that_of_training():
    assert metadata(make_card(make_spec(fit="resize")))["size_advice"].startswith("resize each image to trained_size")
    assert metadata(CARD)["size_advice"].startswith("give images at their own resolution")


def test_a_difference_is_an_error_and_no_file_stays(exported, segmenter, tmp_path, monkeypatch):
    monkeypatch.setattr("unet_trainer.inference.export_onnx._message", lambda *arguments: exported[0].read_bytes())
    monkeypatch.setattr(export_check, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="computes other logits"):
        export_onnx(segmenter, CARD, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_stays_as_it_was_if_the_export_fails(segmenter, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("earlier")

    def refuse(*arguments, **options):
        raise RuntimeError("an operator that has no counterpart")

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(ExportError, match=r"the network cannot be traced \(an operator that has no counterpart\)"):
        export_onnx(segmenter, CARD, path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["earlier"]


PARITY = {
    "resnet34": make_spec(RGB_8BIT, encoder="resnet34", image_size=(256, 256)),
    "mobilenet_v2": make_spec(GREY_16BIT, num_classes=4, encoder="mobilenet_v2", image_size=(128, 192)),
    "tu-mobilenetv3_small_100 with scse": make_spec(
        FOUR_FLOATS, num_classes=3, encoder="tu-mobilenetv3_small_100", decoder_attention="scse"
    ),
    "tu-convnext_atto": make_spec(RGB_8BIT, num_classes=12, encoder="tu-convnext_atto", fit="crop"),
    "tu-efficientnet_lite0": make_spec(FOUR_FLOATS, encoder="tu-efficientnet_lite0", fit="crop"),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", PARITY)
def test_networks_of_every_kind_compute_the_same(name, tmp_path, capsys):
    segmenter = random_segmenter(PARITY[name])
    comparison = export_onnx(segmenter, make_card(PARITY[name]), tmp_path / "model.onnx")
    difference = largest_difference(segmenter, tmp_path / "model.onnx")
    size = (tmp_path / "model.onnx").stat().st_size
    shutil.rmtree(tmp_path)
    with capsys.disabled():
        print(f"\n{name}: {size / 1e6:.1f} MB; {comparison}; relative difference of other batches {difference:.1e}")
    assert difference < 1e-4
