"""An exported file as an engine: any size and batch, from threads, on the provider that there is; other files are refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="exports need requirements-export.txt")
pytest.importorskip("onnx", reason="exports need requirements-export.txt")

from onnx import helper, numpy_helper

from helpers.checkpoints import FOUR_FLOATS, make_card, random_batch, random_image, small_spec
from helpers.onnx_models import BIAS, WEIGHT, make_onnx, write_onnx
from unet_trainer import load
from unet_trainer.config.errors import UserError
from unet_trainer.inference import onnx_engine
from unet_trainer.inference.onnx_engine import CARD_KEY, CPU, CUDA, OnnxEngine, import_optional
from unet_trainer.runs.errors import CheckpointError

SPEC = small_spec()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_onnx(tmp_path_factory.mktemp("onnx") / "model.onnx", make_onnx(SPEC))


@pytest.fixture(scope="module")
def engine(path):
    return OnnxEngine(path, device="cpu")


def by_hand(images):
    """N,H,W,3 → N,2,H,W."""
    return (
        torch.einsum("nhwc,kc->nkhw", images.float(), torch.from_numpy(WEIGHT[:, :, 0, 0])) + torch.from_numpy(BIAS)[:, None, None]
    )


@pytest.mark.parametrize(("count", "height", "width"), [(1, 32, 32), (3, 64, 96), (2, 1, 1), (1, 33, 50), (2, 45, 64)])
def test_images_of_any_size_and_number_give_logits_of_their_own_size(count, height, width, engine):
    images = random_batch(SPEC, count, height, width)
    found = engine.logits(images)
    assert (found.shape, found.dtype) == ((count, 2, height, width), torch.float32)
    assert torch.allclose(found, by_hand(images), rtol=1e-5)


def test_the_lower_and_right_edge_is_repeated_up_to_a_multiple_of_32(tmp_path):
    """As the Segmenter pads. A graph whose logits are the mean of the padded image shows it."""
    nodes = [
        helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=1),
        helper.make_node("Shape", ["images"], ["shape"]),
        helper.make_node("Expand", ["mean", "shape"], ["wide"]),
        helper.make_node("Slice", ["wide", "start", "end", "axis"], ["logits"]),
    ]
    numbers = {"axes": [2, 3], "start": [0], "end": [2], "axis": [1]}
    initializers = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    averaging = OnnxEngine(write_onnx(tmp_path / "mean.onnx", make_onnx(SPEC, nodes=nodes, initializers=initializers)))
    images = torch.zeros(1, 31, 32, 3, dtype=torch.uint8)
    images[:, 30] = 32  # the last row, and the one that is added
    assert averaging.logits(images)[0, 0, 0, 0].item() == pytest.approx(2.0)  # 2 of 32 rows


def test_the_card_comes_from_the_file(engine):
    assert engine.card == make_card(SPEC)
    assert (engine.description, engine.device) == ("onnxruntime on cpu, float32", torch.device("cpu"))


def test_threads_give_what_one_thread_gives(path):
    model = load(path)
    images = [random_image(SPEC, 40, 50 + index % 2, index) for index in range(8)]
    expected = [model(image) for image in images]
    assert np.array_equal(expected[0], by_hand(torch.from_numpy(images[0])[None])[0].argmax(0))
    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, pool.map(model, images), expected))


def test_images_of_another_kind_are_refused_as_for_a_checkpoint(path):
    with pytest.raises(UserError, match="16-bit values; the model was trained on 8-bit images"):
        load(path)(np.zeros((8, 8, 3), np.uint16))


# What is missing


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_in_one_line(name, path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # hides it
    expected = f"^{name} is not installed; exported models need: python -m pip install -r requirements-export.txt$"
    with pytest.raises(UserError, match=expected):
        import_optional(name)
    if name == "onnxruntime":
        with pytest.raises(UserError, match=expected):
            load(path)
    else:
        OnnxEngine(path, device="cpu")  # a file that is there needs onnxruntime alone


# Devices


@pytest.mark.parametrize(
    ("device", "available", "expected"),
    [
        ("auto", [CPU], [CPU]),
        ("auto", [CUDA, CPU], [(CUDA, {"device_id": "0"}), CPU]),
        ("cpu", [CUDA, CPU], [CPU]),
        ("cuda", [CUDA, CPU], [(CUDA, {"device_id": "0"}), CPU]),
        ("cuda:1", [CUDA, CPU], [(CUDA, {"device_id": "1"}), CPU]),
    ],
)
def test_cuda_is_taken_where_it_is_there_and_allowed(device, available, expected):
    assert onnx_engine._choose_providers(device, available) == expected


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device: cuda needs onnxruntime-gpu in place of onnxruntime; use device: cpu or auto"),
        ("mps", "device: got 'mps'; an exported model runs on auto, cpu, cuda or cuda:N"),
        ("cuda:x", "device: got 'cuda:x'"),
    ],
)
def test_a_device_that_is_asked_for_and_missing_is_an_error(device, message):
    with pytest.raises(UserError, match=message):
        onnx_engine._choose_providers(device, [CPU])


def test_cuda_that_is_installed_but_does_not_load_is_an_error_if_asked_for(path, monkeypatch):
    monkeypatch.setattr(onnx_engine, "_choose_providers", lambda device, available: [CPU])  # what onnxruntime falls back to
    with pytest.raises(UserError, match=r"device: cuda cannot be used by onnxruntime \(its CUDA libraries do not load\)"):
        OnnxEngine(path, device="cuda")


# Files that cannot be used


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        OnnxEngine(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def card_json(**changes):
    return json.dumps({**json.loads(make_card(SPEC).to_json()), **changes})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "is no model of this trainer: its metadata has no entry unet_trainer"),
        ({CARD_KEY: "hello"}, "unet_trainer in its metadata is no card of a model"),
        ({CARD_KEY: "[" * 100_000}, "is no card of a model (RecursionError"),
        ({CARD_KEY: card_json(spec={})}, "is no card of a model (KeyError: 'image')"),
        ({CARD_KEY: card_json(format=99)}, "written by a newer version (format 99)"),
        ({CARD_KEY: card_json(symmetries=7)}, "is no card of a model (TypeError"),
    ],
    ids=["none", "no JSON", "nested", "no spec", "newer", "another type"],
)
def test_a_file_without_a_card_that_can_be_used_is_refused(metadata, message, tmp_path):
    assert message in refusal(write_onnx(tmp_path / "model.onnx", make_onnx(SPEC, metadata)))


def test_an_empty_file_is_no_model(tmp_path):
    (tmp_path / "model.onnx").touch()
    assert refusal(tmp_path / "model.onnx").endswith("its metadata has no entry unet_trainer")


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": ("images", "more")},
        {"channels": 4, "nodes": [helper.make_node("Identity", ["images"], ["logits"])], "ids": 4},
        {"nodes": [helper.make_node("Conv", ["images", "weight", "bias"], ["scores"])], "outputs": ("scores",)},
        {"metadata": {CARD_KEY: make_card(dataclasses.replace(SPEC, image=FOUR_FLOATS)).to_json()}},
        {"metadata": {CARD_KEY: make_card(small_spec(num_classes=3)).to_json()}},
    ],
    ids=["two inputs", "another graph", "other names", "other channels", "other classes"],
)
def test_a_graph_that_does_not_go_with_its_card_is_refused(changes, tmp_path):
    assert "cannot be used: its graph does not take N," in refusal(write_onnx(tmp_path / "model.onnx", make_onnx(SPEC, **changes)))


def test_a_graph_that_cannot_be_run_is_refused(tmp_path, capfd):
    nodes = [helper.make_node("NoSuchOperator", ["images"], ["logits"])]
    message = refusal(write_onnx(tmp_path / "model.onnx", make_onnx(SPEC, nodes=nodes)))
    assert "is no model that onnxruntime" in message
    assert "NoSuchOperator" in message
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_gives_something_else_than_it_says_is_an_error(tmp_path):
    nodes = [helper.make_node("MaxPool", ["images"], ["half"], kernel_shape=[2, 2], strides=[2, 2])]
    nodes.append(helper.make_node("Conv", ["half", "weight", "bias"], ["logits"]))
    engine = OnnxEngine(write_onnx(tmp_path / "model.onnx", make_onnx(SPEC, nodes=nodes)))
    with pytest.raises(UserError, match=r"gives an array of shape \(1, 2, 16, 16\) for images of shape \(1, 3, 32, 32\)"):
        engine.logits(random_batch(SPEC, 1, 32, 32))


def test_a_batch_that_does_not_fit_into_memory_is_halved_and_other_failures_are_told(path):
    engine = OnnxEngine(path, device="cpu")
    run, sizes = engine.session.run, []

    def run_of_two(names, feeds):
        sizes.append(len(feeds["images"]))
        if sizes[-1] > 2:
            raise RuntimeError("Failed to allocate memory for requested buffer")
        return run(names, feeds)

    engine.session = SimpleNamespace(run=run_of_two)
    images = random_batch(SPEC, 3, 32, 40)
    assert torch.allclose(engine.logits(images), by_hand(images), rtol=1e-5)
    assert sizes == [3, 1, 2]

    def refuse(names, feeds):
        raise RuntimeError("no such kernel\nat all")

    engine.session = SimpleNamespace(run=refuse)
    with pytest.raises(UserError, match=r"^onnxruntime cannot compute 40×32 pixels \(no such kernel\)$"):
        engine.logits(images)
