"""Types that stand for torch's are told from all others, and make the real things."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.adapters import torch_types


def test_instances_of_the_real_types_are_instances() -> None:
    assert isinstance(Shard(0), torch_types.Shard)
    assert isinstance(_StridedShard(0, split_factor=2), torch_types.StridedShard)
    assert isinstance(Replicate(), torch_types.Shard | torch_types.Replicate)
    assert not isinstance(Replicate(), torch_types.Shard)
    assert not isinstance(torch.zeros(1), torch_types.DTensor)


def test_calling_one_makes_the_real_thing() -> None:
    assert type(torch_types.Shard(1)) is Shard
    assert torch_types.Replicate() == Replicate()


def test_the_real_types_are_told_once_they_are_imported() -> None:
    assert torch_types.loaded_dtensor() is DTensor
    assert torch_types.placement_types() == {Replicate, Shard, _StridedShard}
