"""Export as a folder for smp.from_pretrained: the same network, with what it needs beside it and no licence that is not ours."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
import segmentation_models_pytorch as smp
import torch
import yaml

from helpers.checkpoints import FOUR_FLOATS, make_card, random_batch, random_segmenter
from helpers.steps import make_spec
from unet_trainer.inference import export_check
from unet_trainer.inference.export_check import ExportError
from unet_trainer.inference.export_smp import export_smp, readme
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.inference.model_files import SMP_CARD

SPEC = make_spec(
    FOUR_FLOATS, num_classes=3, encoder="tu-mobilenetv3_small_050", decoder_channels=(32, 16, 16, 16, 16), decoder_attention="scse"
)
CARD = make_card(SPEC)


@pytest.fixture(scope="module")
def segmenter():
    return random_segmenter(SPEC)


@pytest.fixture(scope="module")
def exported(segmenter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model_smp"
    export_smp(segmenter, CARD, folder)
    return folder


def from_pretrained(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        return smp.from_pretrained(str(folder)).eval()


def test_the_folder_holds_the_network_and_what_is_known_of_it(exported, segmenter):
    assert sorted(file.name for file in exported.iterdir()) == ["README.md", "config.json", "model.safetensors", SMP_CARD]
    assert {file.stat().st_mode & 0o777 for file in exported.iterdir()} == {0o644}
    assert ModelCard.from_json((exported / SMP_CARD).read_text()) == CARD
    weights = from_pretrained(exported).state_dict()
    expected = segmenter.network.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_example_in_the_readme_computes_what_the_model_computes(exported, segmenter):
    (example,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    images = random_batch(SPEC, 2, 64, 96)
    found = {"pixels": images.permute(0, 3, 1, 2)}
    with contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
        exec(example.replace("FOLDER", str(exported)), found)
    assert torch.allclose(found["logits"], segmenter(images), atol=1e-3)
    assert (found["ids"] == segmenter(images).argmax(1)).float().mean() > 0.999


def test_the_example_of_one_class_compares_with_zero():
    assert "ids = (logits > 0)[:, 0].long()" in readme(make_card(make_spec()))
    assert "ids = logits.argmax(1)" in readme(CARD)


def test_the_licence_of_the_weights_is_not_that_of_the_library(exported):
    text = (exported / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "unknown"
    assert header["library_name"] == "segmentation-models-pytorch"
    assert "pushed to the Hub" not in text


def test_names_of_classes_do_not_break_the_table():
    names = ("a|b", "two\nlines")
    text = readme(make_card(make_spec(), run_name="x\n# y"))
    assert "# x # y\n" in text
    card = make_card(ModelCard.from_json(json.dumps(_renamed(names))).spec)
    assert "| 0 | a\\|b | (0, 0, 0) |\n| 1 | two lines | (1, 1, 1) |\n" in readme(card)


def _renamed(names):
    content = json.loads(make_card(make_spec()).to_json())
    content["spec"]["id_names"] = list(names)
    return content


def test_an_earlier_export_is_replaced_once_the_new_one_is_compared(exported, segmenter, tmp_path, monkeypatch):
    folder = tmp_path / "model_smp"
    folder.mkdir()
    (folder / "stale.txt").write_text("of the earlier export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_check, "TOLERANCE", -1.0)
        with pytest.raises(ExportError, match="computes other logits"):
            export_smp(segmenter, CARD, folder)
    assert [file.name for file in tmp_path.rglob("*")] == ["model_smp", "stale.txt"]
    export_smp(segmenter, CARD, folder)
    assert [file.name for file in tmp_path.iterdir()] == ["model_smp"]
    assert not (folder / "stale.txt").exists()


def test_an_earlier_export_comes_back_if_the_new_one_cannot_take_its_place(segmenter, tmp_path, monkeypatch):
    folder = tmp_path / "model_smp"
    folder.mkdir()
    (folder / "earlier.txt").touch()
    rename = type(folder).rename

    def rename_but_the_draft(self, target):
        if target == folder and self.parent == tmp_path:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(type(folder), "rename", rename_but_the_draft)
    with pytest.raises(OSError, match="No space left"):
        export_smp(segmenter, CARD, folder)
    assert [file.name for file in tmp_path.rglob("*")] == ["model_smp", "earlier.txt"]


def test_nothing_is_printed(segmenter, tmp_path, capfd):
    export_smp(segmenter, CARD, tmp_path / "model_smp")
    assert capfd.readouterr() == ("", "")
