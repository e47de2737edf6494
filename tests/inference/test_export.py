"""Exports: they compute the same at any batch and size, carry the card, and are kept only if that was seen."""

import contextlib
import io
import json
import re

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import yaml

pytest.importorskip("onnxruntime", reason="exports need requirements-export.txt")
pytest.importorskip("onnxscript", reason="exports need requirements-export.txt")

import onnx

from helpers.checkpoints import (
    FOUR_FLOATS,
    GREY_16BIT,
    make_card,
    random_batch,
    random_segmenter,
    small_segmenter,
    small_spec,
)
from helpers.predicting import files_in
from helpers.project import ROOT
from helpers.steps import make_spec
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.inference import export
from unet_trainer.inference.engine import SMP_CARD, ModelCard
from unet_trainer.inference.export import (
    CARD_FILE,
    OPSET,
    ExportError,
    compare,
    export_onnx,
    export_pt2,
    export_smp,
    smp_readme,
)

SPEC = small_spec(GREY_16BIT, normalize="image")
CARD = make_card(SPEC)
SMP_SPEC = make_spec(
    FOUR_FLOATS, num_classes=3, decoder_channels=(32, 16, 16, 16, 16), decoder_attention="scse", normalize="image"
)


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


@pytest.fixture(scope="module")
def onnx_path(segmenter, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    assert export_onnx(segmenter, CARD, path).endswith("; no pixel changes class")
    return path


@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_a_difference_of_one_pixel_is_an_error(value, segmenter):
    def run(images):
        logits = segmenter(images).clone()
        logits[-1, -1, -1, -1] += value
        return logits

    message = r"the exported file computes other logits for \d images? of \d+×\d+: they differ by"
    with pytest.raises(ExportError, match=message):
        compare(segmenter, run)


def test_a_difference_leaves_an_earlier_export_as_it_was(segmenter, tmp_path, monkeypatch):
    (tmp_path / "model.pt2").write_text("earlier")
    (tmp_path / "model_smp").mkdir()
    (tmp_path / "model_smp/earlier").touch()
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="computes other logits"):
        export_pt2(segmenter, CARD, tmp_path / "model.pt2")
    with pytest.raises(ExportError, match="computes other logits"):
        export_smp(random_segmenter(SMP_SPEC), make_card(SMP_SPEC), tmp_path / "model_smp")
    assert (tmp_path / "model.pt2").read_text() == "earlier"
    assert files_in(tmp_path) == ["model.pt2", "model_smp/earlier"]


def test_what_cannot_be_traced_is_told_in_a_line(segmenter, tmp_path, monkeypatch):
    def refuse(self, images):
        raise TypeError("of the network\nand more")

    monkeypatch.setattr(export.ExportNetwork, "forward", refuse)
    with pytest.raises(ExportError, match=r"^the network cannot be traced \(.*\)$"):
        export_pt2(segmenter, CARD, tmp_path / "model.pt2")


def test_the_onnx_export_is_one_file_of_variable_size_that_names_nothing_of_this_machine(onnx_path):
    assert list(onnx_path.parent.iterdir()) == [onnx_path]
    model = onnx.load(onnx_path)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [OPSET]
    values = (*model.graph.input, *model.graph.output)
    shapes = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]
    assert shapes == [["batch", 1, "height", "width"], ["batch", 2, "height", "width"]]
    for trace in (str(ROOT), "site-packages", 'File "', ".py"):
        assert trace.encode() not in onnx_path.read_bytes(), trace


PARITY = {
    "resnet34": make_spec(RGB_8BIT, encoder="resnet34", image_size=(256, 256)),
    "mobilenet_v2": make_spec(GREY_16BIT, num_classes=4, encoder="mobilenet_v2", image_size=(128, 192)),
    "tu-mobilenetv3_small_100 with scse": make_spec(
        FOUR_FLOATS, num_classes=3, encoder="tu-mobilenetv3_small_100", decoder_attention="scse"
    ),
    "tu-convnext_atto": make_spec(RGB_8BIT, num_classes=12, encoder="tu-convnext_atto", fit="crop"),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", PARITY)
def test_networks_of_every_kind_compute_the_same(name, tmp_path):
    spec = PARITY[name]
    export_onnx(random_segmenter(spec), make_card(spec), tmp_path / "model.onnx")  # raises where it differs


def test_an_exported_program_computes_what_the_model_computes_and_carries_the_card(tmp_path):
    spec = small_spec(FOUR_FLOATS, num_classes=3, normalize="image")
    segmenter, files = small_segmenter(spec), {CARD_FILE: ""}
    export_pt2(segmenter, make_card(spec), tmp_path / "model.pt2")
    network = torch.export.load(tmp_path / "model.pt2", extra_files=files).module()
    assert ModelCard.from_json(files[CARD_FILE]) == make_card(spec)
    for count, height, width in [(1, 64, 64), (3, 96, 160)]:
        images = random_batch(spec, count, height, width)
        assert torch.allclose(network(images.permute(0, 3, 1, 2)), segmenter(images), atol=1e-4)


@pytest.mark.skipif(not timm.is_model("test_resnet"), reason="it is a fixture of timm's own tests")
def test_the_small_residual_network_is_exported_for_smp(tmp_path):
    spec = small_spec(RGB_8BIT, encoder="small_resnet", decoder_channels=(64, 32, 16, 16, 8))
    export_smp(random_segmenter(spec), make_card(spec), tmp_path / "model_smp")  # raises where it differs
    assert json.loads((tmp_path / "model_smp/config.json").read_text())["encoder_name"] == "tu-test_resnet"


@pytest.fixture(scope="module")
def smp_export(tmp_path_factory):
    folder, segmenter = tmp_path_factory.mktemp("exported") / "model_smp", random_segmenter(SMP_SPEC)
    export_smp(segmenter, make_card(SMP_SPEC), folder)
    return folder, segmenter


def test_the_folder_holds_the_network_and_what_is_known_of_it(smp_export):
    folder, segmenter = smp_export
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors", SMP_CARD]
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert ModelCard.from_json((folder / SMP_CARD).read_text()) == make_card(SMP_SPEC)
    with contextlib.redirect_stdout(io.StringIO()):
        weights = smp.from_pretrained(str(folder)).state_dict()
    expected = segmenter.network.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_example_in_the_readme_computes_what_the_model_computes(smp_export):
    folder, segmenter = smp_export
    text = (folder / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["license"] == "unknown"  # not that of the library
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    images = random_batch(SMP_SPEC, 2, 64, 96)
    found = {"pixels": images.permute(0, 3, 1, 2)}
    with contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
        exec(example.replace("FOLDER", str(folder)), found)
    assert torch.allclose(found["logits"], segmenter(images), atol=1e-3)
    assert "ids = (logits > 0)[:, 0].long()" in smp_readme(make_card(make_spec()))


def test_an_earlier_folder_is_replaced(smp_export, tmp_path, capfd):
    segmenter, folder = smp_export[1], tmp_path / "model_smp"
    folder.mkdir()
    (folder / "earlier.txt").touch()
    export_smp(segmenter, make_card(SMP_SPEC), folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert not (folder / "earlier.txt").exists()
    assert capfd.readouterr() == ("", "")
