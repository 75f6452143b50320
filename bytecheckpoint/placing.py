"""Bytes that were read, put where they belong in tensors: the load's half of what staging is to a save. It knows
nothing of where in a file they lay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.tensors import LocalShard, torch_dtype
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.coalesce import BoxPart, Part
from bytecheckpoint.planner.load_plan import box_layout
from bytecheckpoint.tensor_memory import SAME_SIZE_INTEGERS, as_bytes, is_flat, view_region


class Target(NamedTuple):
    """A shard's memory as the destination of a load."""

    shard: LocalShard
    stored_dtype: str
    memory: memoryview | None
    """Its bytes, where stored bytes can be put there as they are."""


def takes_bytes(shard: LocalShard, stored_dtype: str) -> bool:
    """Whether stored bytes can be put into the shard's memory as they are."""
    return is_flat(shard.tensor) and shard.dtype == stored_dtype


def target_of(shard: LocalShard, stored_dtype: str) -> Target:
    return Target(shard, stored_dtype, as_bytes(shard.tensor) if takes_bytes(shard, stored_dtype) else None)


def place(part: Part, fetched: memoryview, fetched_offset: int, targets: Sequence[Target]) -> None:
    """Puts one part of the bytes that were read from `fetched_offset` of a file into its target."""
    target = targets[part.want]
    content = fetched[part.byte_offset - fetched_offset :][: part.byte_length]
    if isinstance(part, BoxPart):
        _place_box(part, content, target)
    elif target.memory is None:
        raise ValueError(f"the plan takes {target.shard.fqn} for memory that takes bytes, which it is not")
    else:
        target.memory[part.target_byte_offset : part.target_byte_offset + part.byte_length] = content


def _place_box(part: BoxPart, content: memoryview, target: Target) -> None:
    lengths, strides = box_layout(part)
    dtype = torch_dtype(target.stored_dtype)
    destination = view_region(target.shard, part.region)
    integers = SAME_SIZE_INTEGERS.get(itemsize(target.stored_dtype))
    is_raw = target.stored_dtype == target.shard.dtype and not destination.is_conj() and not destination.is_neg()
    if is_raw and integers is not None:
        dtype, destination = integers, destination.view(integers)
    source = torch.frombuffer(content, dtype=torch.uint8).view(dtype).as_strided(lengths, strides)
    destination.copy_(source)
