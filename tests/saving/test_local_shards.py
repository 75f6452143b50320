"""Tensors turned into shards: what autograd notices of it, and what no cheap look may let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters.shards import LocalShard, LocalShards, dtype_name
from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.region import Region


def shard_of(tensor: torch.Tensor) -> LocalShard:
    shards = LocalShards()
    shards.add("t", tensor)
    return shards.found[0]


def view_made_without_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    with torch.no_grad():
        return parameter[0]


@pytest.mark.parametrize(
    "pick",
    [lambda p: p, lambda p: p * 1, lambda p: p[0], view_made_without_grad, lambda p: p.detach()],
    ids=["leaf", "result", "view", "view made without grad", "detached"],
)
def test_writing_into_a_shard_is_no_step_of_autograd(pick: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    tensor = pick(parameter)
    shard = shard_of(tensor)
    shard.tensor.copy_(torch.full(tuple(shard.tensor.shape), 5.0))
    assert not shard.tensor.requires_grad
    assert torch.equal(tensor.detach(), torch.full(tuple(tensor.shape), 5.0))
    assert parameter.grad_fn is None
    assert parameter.is_leaf
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(2, 3))


class WithAttributes(torch.Tensor):
    """A subclass that only adds Python attributes."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
        torch.ones(3, 2).T,
        torch.ones(()),
        torch.ones(0, 4),
        torch.ones(2, 3).as_subclass(WithAttributes),
    ],
    ids=["tensor", "parameter", "frozen", "view", "scalar", "empty", "subclass"],
)
def test_a_whole_tensor_is_one_shard_of_its_memory(tensor: torch.Tensor) -> None:
    shard = shard_of(tensor)
    shape = tuple(tensor.shape)
    region = Region((0,) * len(shape), shape)
    assert shard._replace(byte_length=0) == LocalShard("t", "float32", shape, region, shard.tensor)
    assert shard.byte_length in {0, tensor.nbytes}
    assert type(shard.global_shape) is tuple
    assert shard.tensor.data_ptr() == tensor.data_ptr()
    assert shard.tensor.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.eye(2).to_sparse(), "a sparse_coo tensor"),
        (lambda: torch.nn.Parameter(torch.eye(2).to_sparse()), "a sparse_coo tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a tensor of dtype torch.qint8"),
    ],
    ids=["nested", "sparse", "sparse parameter", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # torch's, about prototypes
def test_tensors_without_dense_memory_are_refused(make: Callable[[], torch.Tensor], what: str) -> None:
    tensor = make()
    with pytest.raises(bcp.CheckpointSaveError, match=what) as error:
        shard_of(tensor)
    assert error.value.kind == "unsupported_value"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2, 2)]), "a nested tensor"),
        (lambda: torch.eye(2).to_sparse(), "a sparse_coo tensor"),
        (lambda: torch.eye(2).to_mkldnn(), "a _mkldnn tensor"),
    ],
    ids=["nested", "sparse", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore")  # torch's, about prototypes
def test_a_tensor_without_dense_memory_is_refused_among_dense_ones_of_its_shape_and_dtype(
    make: Callable[[], torch.Tensor], what: str
) -> None:
    dense = torch.eye(2)
    with pytest.raises(bcp.CheckpointSaveError, match=f"odd is {what}"):
        LocalShards().add_all([("a", dense), ("odd", make()), ("b", dense)])


def test_tensors_that_are_almost_alike_do_not_pass_for_one_another() -> None:
    tensors = [
        torch.ones(2, 3),
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float16),
        torch.ones(2, 3, 1),
        torch.ones(3, 2).T,
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, device="meta"),
        torch.ones(6),
    ]
    shards = LocalShards()
    shards.add_all((str(number), tensor) for number, tensor in enumerate(tensors))
    for number, (shard, tensor) in enumerate(zip(shards.found, tensors, strict=True)):
        shape = tuple(tensor.shape)
        assert shard[:4] == (str(number), dtype_name(tensor.dtype), shape, ((0,) * len(shape), shape))
        assert (shard.tensor.data_ptr(), shard.tensor.stride()) == (tensor.data_ptr(), tensor.stride())
        assert not shard.tensor.requires_grad


def test_dtypes_are_called_what_torch_calls_them() -> None:
    for name in DTYPE_ITEMSIZES:
        dtype = getattr(torch, name, None)
        assert dtype is None or (dtype_name(dtype), f"torch.{name}") == (name, str(dtype))


@pytest.mark.parametrize("with_addresses", [True, False])
def test_an_address_is_told_only_of_memory_that_takes_bytes_as_they_are(with_addresses: bool) -> None:
    flat = torch.arange(12.0)
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    tensors = {
        "flat": flat,
        "parameter": torch.nn.Parameter(flat[4:]),
        "columns": flat.view(3, 4)[:, :2],
        "conjugated": conjugated,
        "negative": conjugated.imag,
        "meta": torch.empty(3, device="meta"),
        "empty": torch.empty(0),
    }
    shards = LocalShards(with_addresses=with_addresses)
    shards.add_all(tensors.items())
    told = {shard.fqn: shard.address for shard in shards.found if shard.address}
    assert told == ({"flat": flat.data_ptr(), "parameter": flat.data_ptr() + 16} if with_addresses else {})
