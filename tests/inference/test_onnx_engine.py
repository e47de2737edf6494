"""An exported file as an engine: any size and batch, on the provider that there is. Damaged, foreign and hostile ones are refused."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="exports need requirements-export.txt")
pytest.importorskip("onnx", reason="exports need requirements-export.txt")

import onnx
from onnx import TensorProto, helper, numpy_helper

from helpers.checkpoints import make_card, random_batch, small_spec
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.inference import engine as engine_module
from unet_trainer.inference.engine import CARD_KEY, CPU, OnnxEngine, add_digest, read_onnx

SPEC = small_spec()
# Logits of three channels r, g, b: 2r - g + 1 and b - 3.
WEIGHT = np.array([[2, -1, 0], [0, 0, 1]], np.float32)[:, :, None, None]
BIAS = np.array([1, -3], np.float32)


def make_onnx(spec, metadata=None, nodes=None, initializers=None):
    """A ModelProto: a 1×1 convolution with a card, as small as a model can be."""
    nodes = nodes or [helper.make_node("Conv", ["images", "weight", "bias"], ["logits"])]
    initializers = initializers or [numpy_helper.from_array(WEIGHT, "weight"), numpy_helper.from_array(BIAS, "bias")]
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, "H", "W"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2, "H", "W"])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for key, value in ({CARD_KEY: make_card(spec).to_json()} if metadata is None else metadata).items():
        model.metadata_props.add(key=key, value=value)
    return model


def write_onnx(path, model, digest=True):
    message = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    path.write_bytes(add_digest(message) if digest else message)
    return path


MODEL = make_onnx(SPEC, metadata={"one": "1", "Größe": "«2»", "empty": ""})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_onnx(tmp_path_factory.mktemp("onnx") / "model.onnx", make_onnx(SPEC))


@pytest.fixture(scope="module")
def engine(path):
    return OnnxEngine(path, device="cpu")


def by_hand(images):
    """N,H,W,3 → N,2,H,W."""
    weighted = torch.einsum("nhwc,kc->nkhw", images.float(), torch.from_numpy(WEIGHT[:, :, 0, 0]))
    return weighted + torch.from_numpy(BIAS)[:, None, None]


@pytest.mark.parametrize(("count", "height", "width"), [(3, 64, 96), (2, 1, 1), (1, 33, 50)])
def test_images_of_any_size_and_number_give_logits_of_their_own_size(count, height, width, engine):
    images = random_batch(SPEC, count, height, width)
    found = engine.logits(images)
    assert (found.shape, found.dtype) == ((count, 2, height, width), torch.float32)
    assert torch.allclose(found, by_hand(images), rtol=1e-5)
    assert engine.card == make_card(SPEC)


def test_a_device_that_is_asked_for_and_missing_is_an_error(path, monkeypatch):
    with pytest.raises(UserError, match="device: cuda needs onnxruntime-gpu in place of onnxruntime; use device: cpu"):
        OnnxEngine(path, "cuda")
    with pytest.raises(UserError, match="device: got 'mps'; an exported model runs on auto, cpu, cuda or cuda:N"):
        OnnxEngine(path, "mps")
    # What onnxruntime falls back to.
    monkeypatch.setattr(engine_module, "_choose_providers", lambda device, available: [CPU])
    with pytest.raises(UserError, match="onnxruntime cannot load its CUDA libraries for cuda"):
        OnnxEngine(path, device="cuda")


# Files that cannot be used


def refusal(path, read=OnnxEngine):
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def card_json(**changes):
    return json.dumps({**json.loads(make_card(SPEC).to_json()), **changes})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param(metadata if isinstance(metadata, dict) else {CARD_KEY: metadata}, message, id=message)
        for metadata, message in (
            ({}, "is no model of this trainer (unet_trainer in its metadata: KeyError"),
            ("hello", "unet_trainer in its metadata: Expecting value"),
            ("[" * 100_000, "in its metadata: RecursionError"),
            (card_json(spec={}), "in its metadata: image: {}: Field required"),
            (card_json(symmetries=["mirror"]), "its symmetries, epoch or val_iou cannot be right)"),
            (card_json(format=99), "written by another version (format 99)"),
        )
    ],
)
def test_a_file_without_a_card_that_fits_its_graph_is_refused(metadata, message, tmp_path):
    assert message in refusal(write_onnx(tmp_path / "model.onnx", make_onnx(SPEC, metadata)))


def test_a_graph_that_cannot_be_run_or_gives_something_else_is_refused(tmp_path, capfd):
    unknown = [helper.make_node("NoSuchOperator", ["images"], ["logits"])]
    assert "is no model that onnxruntime" in refusal(write_onnx(tmp_path / "a.onnx", make_onnx(SPEC, nodes=unknown)))
    assert capfd.readouterr() == ("", "")
    nodes = [helper.make_node("MaxPool", ["images"], ["half"], kernel_shape=[2, 2], strides=[2, 2])]
    nodes.append(helper.make_node("Conv", ["half", "weight", "bias"], ["logits"]))
    engine = OnnxEngine(write_onnx(tmp_path / "c.onnx", make_onnx(SPEC, nodes=nodes)))
    message = r"gives an array of shape \(1, 2, 16, 16\) for images of shape \(1, 3, 32, 32\)"
    with pytest.raises(UserError, match=message):
        engine.logits(random_batch(SPEC, 1, 32, 32))


def test_every_flipped_bit_is_found(tmp_path):
    """But in the entry of the digest, which then is another entry: the model is whole."""
    message = MODEL.SerializeToString()
    whole = add_digest(message)
    path = tmp_path / "model.onnx"
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            metadata = read_onnx(path)[1]
        except CheckpointError:
            continue
        assert position >= len(message)
        assert "sha256" not in metadata


@pytest.mark.parametrize("content", [b"\x00", b"PK\x03\x04" + b"\0" * 50], ids=["zero", "a zip file"])
def test_what_is_no_model_is_refused(content, tmp_path):
    (tmp_path / "model.onnx").write_bytes(content)
    assert refusal(tmp_path / "model.onnx", read_onnx).endswith("is no ONNX file, or a damaged one")
    assert refusal(tmp_path / "none.onnx", read_onnx).endswith("cannot be read (No such file or directory)")


def test_a_file_that_was_changed_says_how_to_use_it_all_the_same(tmp_path):
    model = onnx.load_model_from_string(add_digest(MODEL.SerializeToString()))
    model.graph.name = "changed"
    message = refusal(write_onnx(tmp_path / "model.onnx", model, digest=False), read_onnx)
    assert "is damaged, or was changed since it was exported" in message
    assert "delete sha256 from its metadata" in message
    del model.metadata_props[-1]
    assert read_onnx(write_onnx(tmp_path / "model.onnx", model, digest=False))[1]["one"] == "1"


def external(location=True, data=True):
    tensor = onnx.TensorProto(name="weight", data_type=onnx.TensorProto.FLOAT, dims=[2, 3, 1, 1])
    if location:
        tensor.data_location = onnx.TensorProto.EXTERNAL
    if data:
        tensor.external_data.add(key="location", value="../../../../etc/passwd")
    return tensor


def with_function():
    model = make_onnx(SPEC)
    constant = helper.make_node("Constant", [], ["x"], value=external())
    model.functions.append(helper.make_function("own", "f", [], ["x"], [constant], []))
    return model


def with_subgraph():
    inner = helper.make_graph([], "inner", [], [], [external()])
    return make_onnx(SPEC, nodes=[helper.make_node("If", ["images"], ["logits"], then_branch=inner, else_branch=inner)])


EXTERNAL = {
    "location": make_onnx(SPEC, initializers=[external(data=False)]),
    "data": make_onnx(SPEC, initializers=[external(location=False)]),
    "constant": make_onnx(SPEC, nodes=[helper.make_node("Constant", [], ["logits"], value=external())]),
    "subgraph": with_subgraph(),
    "function": with_function(),
}


@pytest.mark.parametrize("where", EXTERNAL)
def test_weights_in_other_files_are_refused_wherever_they_are_named(where, tmp_path):
    message = refusal(write_onnx(tmp_path / "model.onnx", EXTERNAL[where]), read_onnx)
    assert message.endswith("keeps its weights in other files; export it again, into one file")
