"""An ONNX file is read without running it; damaged, foreign and hostile ones are refused in one sentence."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx", reason="exports need requirements-export.txt")

import onnx
from onnx import helper

from helpers.checkpoints import small_spec
from helpers.onnx_models import make_onnx, write_onnx
from unet_trainer.inference import onnx_file
from unet_trainer.inference.onnx_file import DATA_LOCATION, EXTERNAL_DATA, INNER, METADATA, add_digest, read_onnx
from unet_trainer.runs.errors import CheckpointError

MODEL = make_onnx(small_spec(), metadata={"one": "1", "Größe": "«2»", "empty": ""})


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        read_onnx(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


# The format


def test_the_fields_are_those_of_the_format():
    """Every way from a model to a tensor is in the table, and no other field."""
    messages = {name: getattr(onnx, f"{name}Proto").DESCRIPTOR for name in INNER}
    known = {descriptor.full_name: name for name, descriptor in messages.items()}
    for name, descriptor in messages.items():
        inner = {
            field.number: known[field.message_type.full_name]
            for field in descriptor.fields
            if field.message_type and field.message_type.full_name in known
        }
        assert inner == INNER[name], name
    fields = onnx.TensorProto.DESCRIPTOR.fields_by_name
    assert (fields["external_data"].number, fields["data_location"].number) == (EXTERNAL_DATA, DATA_LOCATION)
    assert onnx.ModelProto.DESCRIPTOR.fields_by_name["metadata_props"].number == METADATA


def test_no_other_message_leads_to_a_tensor():
    """A message outside of the table that held tensors would be a hole in it."""
    inside = {getattr(onnx, f"{name}Proto").DESCRIPTOR.full_name for name in INNER}

    def reachable(descriptor, seen):
        for field in descriptor.fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                reachable(inner, seen)
        return seen

    outside = [message for message in reachable(onnx.ModelProto.DESCRIPTOR, set()) if message not in inside]
    names = onnx.ModelProto.DESCRIPTOR.file.message_types_by_name
    for full_name in outside:
        message = names.get(full_name.removeprefix("onnx.").split(".")[0])
        assert message is not None, full_name
        assert not reachable(message, set()) & inside, full_name


def test_metadata_is_what_the_library_reads(tmp_path):
    path = write_onnx(tmp_path / "model.onnx", MODEL)
    file = read_onnx(path)
    assert file.content == path.read_bytes()
    assert file.metadata == {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert file.metadata["Größe"] == "«2»"


def test_a_file_with_a_digest_is_a_model_as_before(tmp_path):
    loaded = onnx.load(write_onnx(tmp_path / "model.onnx", MODEL))
    onnx.checker.check_model(loaded)
    assert loaded.graph == MODEL.graph


def test_a_file_without_a_digest_is_read(tmp_path):
    """Another program may have saved it anew."""
    assert read_onnx(write_onnx(tmp_path / "model.onnx", MODEL, digest=False)).metadata["one"] == "1"


def test_a_length_over_127_takes_two_bytes(tmp_path):
    model = make_onnx(small_spec(), metadata={"long": "x" * 70_000})
    assert read_onnx(write_onnx(tmp_path / "model.onnx", model)).metadata["long"] == "x" * 70_000


# Damage


def test_every_flipped_bit_is_found(tmp_path):
    """But in the entry of the digest, which then is another entry: the model is whole."""
    message = MODEL.SerializeToString()
    whole = add_digest(message)
    path = tmp_path / "model.onnx"
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = read_onnx(path).metadata
        except CheckpointError:
            continue
        assert position >= len(message)
        assert "sha256" not in found


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_off_is_refused(share, tmp_path):
    whole = add_digest(MODEL.SerializeToString())
    path = tmp_path / "model.onnx"
    path.write_bytes(whole[: int(share * len(whole))])
    try:
        metadata = read_onnx(path).metadata  # cut between two fields it is a shorter message, without a card
    except CheckpointError:
        return
    assert metadata == {}


def test_a_file_that_was_changed_says_how_to_use_it_all_the_same(tmp_path):
    model = onnx.load_model_from_string(add_digest(MODEL.SerializeToString()))
    model.graph.name = "changed"
    message = refusal(write_onnx(tmp_path / "model.onnx", model, digest=False))
    assert "is damaged, or was changed since it was exported" in message
    assert "delete sha256 from its metadata" in message
    del model.metadata_props[-1]
    assert read_onnx(write_onnx(tmp_path / "model.onnx", model, digest=False)).metadata["one"] == "1"


# What is no model


@pytest.mark.parametrize(
    "content",
    [
        b"\x00",
        b"\xff" * 100,
        b"\x0b\x0c",
        b"PK\x03\x04" + b"\0" * 50,
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + b"x" * 200,
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_other_bytes_are_no_onnx_file(content, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert refusal(path).endswith("is no ONNX file, or a damaged one")


def test_a_folder_a_missing_file_and_one_that_is_too_large_are_refused(tmp_path, monkeypatch):
    assert refusal(tmp_path).endswith("is no file")
    assert refusal(tmp_path / "missing.onnx").startswith("no model ")
    monkeypatch.setattr(onnx_file, "MAX_FILE_BYTES", 100)
    assert "is larger than an ONNX file can be" in refusal(write_onnx(tmp_path / "model.onnx", MODEL))


def test_huge_metadata_is_refused(tmp_path):
    model = make_onnx(small_spec(), metadata={"one": "x" * 3_000_000})
    assert refusal(write_onnx(tmp_path / "model.onnx", model)).endswith("its metadata holds 3 MB")


def test_metadata_that_is_no_text_or_says_a_thing_twice_is_refused(tmp_path):
    path = write_onnx(tmp_path / "model.onnx", MODEL.SerializeToString().replace("«2»".encode(), b"\xff\xfe\xff\xfe\xff"))
    assert refusal(path).endswith("its metadata is no text")
    twice = make_onnx(small_spec(), metadata={"one": "1"})
    twice.metadata_props.add(key="one", value="2")
    assert refusal(write_onnx(path, twice)).endswith("its metadata has two entries 'one'")


def test_a_message_of_endless_or_deeply_nested_parts_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(onnx_file, "MAX_FIELDS", 1000)
    path.write_bytes(b"\x08\x01" * 1001)
    assert refusal(path).endswith("it has too many parts")
    graph = b""
    for _ in range(40):  # a graph with a node with an attribute with a graph
        graph = onnx_file._field(1, onnx_file._field(5, onnx_file._field(6, graph)))
    path.write_bytes(onnx_file._field(7, graph))
    assert refusal(path).endswith("it is nested too deeply")


# Weights in other files


def external_tensor(name="weight"):
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[2, 3, 1, 1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../../etc/passwd")
    return tensor


def in_initializer():
    return make_onnx(small_spec(), initializers=[external_tensor()])


def in_constant():
    return make_onnx(small_spec(), nodes=[helper.make_node("Constant", [], ["logits"], value=external_tensor())])


def in_subgraph():
    inner = helper.make_graph([], "inner", [], [], [external_tensor()])
    return make_onnx(small_spec(), nodes=[helper.make_node("If", ["images"], ["logits"], then_branch=inner, else_branch=inner)])


def in_function():
    model = make_onnx(small_spec())
    function = helper.make_function("own", "f", [], ["x"], [helper.make_node("Constant", [], ["x"], value=external_tensor())], [])
    model.functions.append(function)
    return model


def in_sparse_initializer():
    model = make_onnx(small_spec())
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=external_tensor(), indices=onnx.TensorProto(), dims=[2]))
    return model


def by_location_alone():
    tensor = external_tensor()
    del tensor.external_data[:]
    return make_onnx(small_spec(), initializers=[tensor])


def without_location():
    tensor = external_tensor()
    tensor.ClearField("data_location")
    return make_onnx(small_spec(), initializers=[tensor])


@pytest.mark.parametrize(
    "make",
    [in_initializer, in_constant, in_subgraph, in_function, in_sparse_initializer, by_location_alone, without_location],
    ids=lambda make: make.__name__,
)
def test_weights_in_other_files_are_refused_wherever_they_are_named(make, tmp_path):
    message = refusal(write_onnx(tmp_path / "model.onnx", make()))
    assert message.endswith("keeps its weights in other files; export it again, into one file")
