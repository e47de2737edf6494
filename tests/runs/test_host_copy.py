"""Copies of the state: as it was at that moment, in few blocks of memory, nothing twice."""

from __future__ import annotations

import pytest
import torch

from unet_trainer.runs import host_copy
from unet_trainer.runs.host_copy import HostCopy


def test_a_copy_is_what_was_there_when_it_was_made():
    weights = torch.ones(3)
    rows = [{"epoch": 1}]
    copy = HostCopy({"model": {"w": weights}, "rows": rows, "name": "a", "none": None})
    weights += 1
    rows[0]["epoch"] = 2
    rows.append({"epoch": 3})
    content = copy.content()
    assert torch.equal(content["model"]["w"], torch.ones(3))
    assert (content["rows"], content["name"], content["none"]) == ([{"epoch": 1}], "a", None)


def test_a_copy_keeps_the_memory_layout():
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    copied = HostCopy([images]).content()[0]
    assert torch.equal(copied, images)
    assert copied.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(7),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.rand(4, 5).T,
        torch.rand(1).expand(3, 2),
        torch.rand(6)[::2],
        torch.rand(3, requires_grad=True),
        torch.nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        torch.tensor([True, False]),
        torch.rand(5).bfloat16(),
    ],
)
def test_every_kind_of_tensor_is_copied(tensor):
    (copied,) = HostCopy([tensor]).content()
    assert copied.dtype == tensor.dtype
    assert torch.equal(copied, tensor)
    assert not copied.requires_grad
    assert tensor.numel() == 0 or copied.data_ptr() != tensor.data_ptr()


def test_tensors_of_one_dtype_share_a_block_of_memory_up_to_its_size(monkeypatch):
    monkeypatch.setattr(host_copy, "BLOCK_BYTES", 400)
    content = {"floats": [torch.full((30,), float(number)) for number in range(7)], "counts": [torch.tensor(2), torch.tensor(3)]}
    content["large"] = torch.rand(1000)
    copied = HostCopy(content).content()
    blocks = [tensor.untyped_storage().data_ptr() for tensor in copied["floats"]]
    assert [blocks.count(block) for block in dict.fromkeys(blocks)] == [3, 3, 1]  # 120 bytes each
    assert copied["counts"][0].untyped_storage().data_ptr() == copied["counts"][1].untyped_storage().data_ptr()
    assert copied["large"].untyped_storage().nbytes() == 4000  # no block is larger than its tensors
    assert all(float(tensor.min()) == float(tensor.max()) == number for number, tensor in enumerate(copied["floats"]))
    assert torch.equal(copied["large"], content["large"])


def test_tensors_of_another_copy_are_not_copied_again_and_it_does_not_keep_those_of_this_one():
    weights, momentum = torch.rand(100), torch.rand(100)
    best = HostCopy({"model": weights})
    last = HostCopy({"model": weights, "optimizer": momentum, "again": momentum}, best)
    assert last.content()["model"].data_ptr() == best.content()["model"].data_ptr()
    assert last.content()["optimizer"] is last.content()["again"]
    assert best.content()["model"].untyped_storage().nbytes() == 400  # best.pt does not come to hold the optimizer
    assert torch.equal(last.content()["optimizer"], momentum)
