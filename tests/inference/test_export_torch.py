"""Exports for torch alone: they compute the same at any batch and size, and carry the card."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import FOUR_FLOATS, make_card, random_batch, small_segmenter, small_spec
from unet_trainer.inference import export_check
from unet_trainer.inference.export_check import ExportError, quiet
from unet_trainer.inference.export_torch import CARD_FILE, export_pt2, export_torchscript
from unet_trainer.inference.model_card import ModelCard

SPEC = small_spec(FOUR_FLOATS, num_classes=3)
CARD = make_card(SPEC)
EXPORTERS = {"pt2": export_pt2, "torchscript": export_torchscript}


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


@pytest.fixture(scope="module", params=EXPORTERS)
def exported(request, segmenter, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / f"model.{request.param}"
    EXPORTERS[request.param](segmenter, CARD, path)
    return path


def test_an_exported_program_computes_what_the_model_computes(exported, segmenter):
    with quiet():
        network = torch.export.load(exported).module() if exported.suffix == ".pt2" else torch.jit.load(exported)
        for count, height, width in [(1, 64, 64), (3, 96, 160), (2, 224, 64)]:
            images = random_batch(SPEC, count, height, width)
            found = network(images.permute(0, 3, 1, 2))
            assert found.dtype == torch.float32
            assert torch.allclose(found, segmenter(images), atol=1e-4)


def test_the_card_lies_in_the_file(exported):
    files = {CARD_FILE: ""}
    with quiet():
        if exported.suffix == ".pt2":
            torch.export.load(exported, extra_files=files)
        else:
            torch.jit.load(exported, _extra_files=files)
    content = files[CARD_FILE]
    assert ModelCard.from_json(content if isinstance(content, str) else content.decode()) == CARD


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_difference_is_an_error_and_no_file_stays(name, segmenter, tmp_path, monkeypatch):
    monkeypatch.setattr(export_check, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="computes other logits"):
        EXPORTERS[name](segmenter, CARD, tmp_path / f"model.{name}")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_traced_is_told_in_a_line(segmenter, tmp_path, monkeypatch):
    def refuse(self, images):
        raise TypeError("of the network\nand more")

    monkeypatch.setattr("unet_trainer.inference.export_check.ExportNetwork.forward", refuse)
    for name, export in EXPORTERS.items():
        with pytest.raises(ExportError, match=r"^the network cannot be traced \(.*of the network.*\)$"):
            export(segmenter, CARD, tmp_path / f"model.{name}")


def test_nothing_is_printed_or_warned(segmenter, tmp_path, capfd, recwarn):
    export_torchscript(segmenter, CARD, tmp_path / "model.torchscript")
    assert capfd.readouterr() == ("", "")
    assert list(recwarn) == []
