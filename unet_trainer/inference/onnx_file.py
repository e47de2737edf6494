"""What an ONNX file says of itself, read before anything runs it: its metadata, its digest, and whether its weights lie elsewhere.

ONNX is a protobuf message; the few fields that are needed are read here, so that a file is refused before onnxruntime sees it and
the package onnx is needed for exporting alone. Nothing is decoded but keys and lengths.

    the message   opset, graph, metadata entries …   as the exporter wrote it
    last entry    metadata: sha256                   the digest of every byte before it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from unet_trainer.runs.errors import CheckpointError

MAX_FILE_BYTES = 2**31 - 1  # of a protobuf message
MAX_TEXT_BYTES = 2**20  # of a key or a value in the metadata
MAX_FIELDS = 5_000_000  # a file of ours has some thousands
MAX_DEPTH = 32  # of messages in each other; a graph within a graph within the graph is at 10

DIGEST_KEY = "sha256"
METADATA = 14  # field of the model; in an entry, key and value are 1 and 2
KEY, VALUE = 1, 2
VARINT, FIXED_64, MESSAGE, FIXED_32 = 0, 1, 2, 5  # wire types
# Fields of each message that lead to a tensor. Functions hold nodes; nodes hold tensors and graphs in their attributes.
INNER: Mapping[str, Mapping[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor whose values are in another file


class OnnxFile(NamedTuple):
    content: bytes
    metadata: dict[str, str]


class Field(NamedTuple):
    number: int
    wire_type: int
    value: int  # of a varint; otherwise where the content starts
    start: int  # of the field
    end: int  # after it


class _Malformed(ValueError):
    """The message of a CheckpointError, without the name of the file."""


def read_onnx(path: Path) -> OnnxFile:
    """A file whose every byte is as it was exported, and that needs no other file. Raises CheckpointError."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _Malformed("is larger than an ONNX file can be")
        content = path.read_bytes()
        return OnnxFile(content, _read_metadata(content))
    except FileNotFoundError:
        raise CheckpointError(f"no model {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except _Malformed as error:
        raise CheckpointError(f"{path} {error}") from None


def add_digest(message: bytes) -> bytes:
    """The message with the digest of its bytes as a last metadata entry."""
    digest = hashlib.sha256(message).hexdigest().encode()
    entry = _field(KEY, DIGEST_KEY.encode()) + _field(VALUE, digest)
    return message + _field(METADATA, entry)


def _read_metadata(content: bytes) -> dict[str, str]:
    """Of the model; raises _Malformed."""
    walker = _Walker(content)
    found: dict[str, str] = {}
    for field in walker.fields(0, len(content)):
        if field.number == METADATA and field.wire_type == MESSAGE:
            key, value = walker.entry(field)
            if key in found:
                raise _Malformed(f"is no model of this trainer: its metadata has two entries {key[:50]!r}")
            found[key] = value
            if key == DIGEST_KEY:
                _check_digest(content, field, value)
    walker.refuse_external_data("Model", 0, len(content))
    return found


def _check_digest(content: bytes, field: Field, digest: str) -> None:
    if field.end != len(content) or hashlib.sha256(memoryview(content)[: field.start]).hexdigest() != digest:
        raise _Malformed(
            f"is damaged, or was changed since it was exported: its bytes do not match its digest "
            f"(if you changed it, delete {DIGEST_KEY} from its metadata)"
        )


class _Walker:
    """Walks through a protobuf message; raises _Malformed where it is none."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_fields = 0

    def fields(self, start: int, end: int) -> Iterator[Field]:
        position = start
        while position < end:
            self.num_fields += 1
            if self.num_fields > MAX_FIELDS:
                raise _Malformed("is no model that can be read: it has too many parts")
            key, value_start = self._varint(position, end)
            number, wire_type = key >> 3, key & 7
            value, after = value_start, value_start
            if wire_type == VARINT:
                value, after = self._varint(value_start, end)
            elif wire_type == MESSAGE:
                length, value = self._varint(value_start, end)
                after = value + length
            elif wire_type in (FIXED_32, FIXED_64):
                after = value_start + (4 if wire_type == FIXED_32 else 8)
            else:
                raise _Malformed("is no ONNX file, or a damaged one")
            if after > end or number == 0:
                raise _Malformed("is no ONNX file, or a damaged one")
            yield Field(number, wire_type, value, position, after)
            position = after

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Value, and where it ends: seven bits a byte, the lowest first."""
        value = 0
        for index, byte in enumerate(self.content[position : min(position + 10, end)]):
            value |= (byte & 127) << (7 * index)
            if byte < 128:
                return value, position + index + 1
        raise _Malformed("is no ONNX file, or a damaged one")

    def entry(self, field: Field) -> tuple[str, str]:
        """Key and value of a metadata entry."""
        texts = {KEY: "", VALUE: ""}
        for inner in self.fields(field.value, field.end):
            if inner.number not in texts or inner.wire_type != MESSAGE:
                continue
            if inner.end - inner.value > MAX_TEXT_BYTES:
                raise _Malformed(f"is no model of this trainer: its metadata holds {(inner.end - inner.value) / 1e6:.0f} MB")
            try:
                texts[inner.number] = self.content[inner.value : inner.end].decode()
            except UnicodeDecodeError:
                raise _Malformed("is no ONNX file, or a damaged one: its metadata is no text") from None
        return texts[KEY], texts[VALUE]

    def refuse_external_data(self, kind: str, start: int, end: int, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise _Malformed("is no model that can be read: it is nested too deeply")
        for field in self.fields(start, end):
            if kind == "Tensor" and field.number in (EXTERNAL_DATA, DATA_LOCATION):
                if field.wire_type == MESSAGE or field.value != 0:
                    raise _Malformed("keeps its weights in other files; export it again, into one file")
            elif field.wire_type == MESSAGE and field.number in INNER[kind]:
                self.refuse_external_data(INNER[kind][field.number], field.value, field.end, depth + 1)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | MESSAGE) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
