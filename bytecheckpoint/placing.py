"""Bytes that were read, put where they belong in tensors: the load's half of what staging is to a save. It knows
nothing of where in a file they lay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.tensors import NEW_TUPLE, LocalShard, torch_dtype
from bytecheckpoint.device_copies import has_streams
from bytecheckpoint.device_loads import Lane
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.coalesce import BoxPart, FlatPart, Part
from bytecheckpoint.planner.load_plan import box_layout
from bytecheckpoint.tensor_memory import SAME_SIZE_INTEGERS, as_bytes, is_row_major, view_region


class Target(NamedTuple):
    """A shard's memory as the destination of a load."""

    shard: LocalShard
    stored_dtype: str
    address: int
    """Of its first byte, where it is on the host and stored bytes can be put there as they are; else 0."""
    byte_length: int
    """0 where stored bytes cannot be put there as they are."""
    lane: Lane | None
    """The way to it, where it is on a device that has one."""


def takes_bytes(shard: LocalShard, stored_dtype: str) -> bool:
    """Whether stored bytes can be put into the shard's memory as they are."""
    if shard.address or shard.dtype != stored_dtype:
        return shard.dtype == stored_dtype
    tensor = shard.tensor
    return (tensor.is_cpu or has_streams(tensor.device)) and is_row_major(tensor)


def target_of(shard: LocalShard, stored_dtype: str, lane: Lane | None) -> Target:
    # By address and not by memoryview, which takes several calls to make: a state may hold 100,000 small tensors.
    tensor = shard.tensor
    if shard.address and tensor.data_ptr() != shard.address:
        # Moved since it was matched: others' state_dict() ran meanwhile, and sharing memory with a process moves it.
        shard = shard._replace(address=0)
    if not takes_bytes(shard, stored_dtype):
        return Target(shard, stored_dtype, 0, 0, lane)
    address = (shard.address or tensor.data_ptr()) if lane is None else 0
    return NEW_TUPLE(Target, (shard, stored_dtype, address, tensor.nbytes, lane))


def memory_of(part: Part, targets: Sequence[Target]) -> memoryview | None:
    """The host memory that the bytes of a part are for, where they can be put there as they are."""
    target = targets[part.want]
    if not target.address or not isinstance(part, FlatPart):
        return None
    return as_bytes(target.shard.tensor)[part.target_byte_offset : part.target_byte_offset + part.byte_length]


def place_all(parts: Sequence[Part], byte_offset: int, targets: Sequence[Target], fetched: memoryview) -> None:
    """Puts parts of the bytes that were read from `byte_offset` of a file into their targets. `fetched` is writable."""
    source = ctypes.addressof(ctypes.c_char.from_buffer(fetched)) - byte_offset
    for part in parts:
        if isinstance(part, BoxPart):
            content = fetched[part.byte_offset - byte_offset :][: part.byte_length]
            _place_box(part, content, targets[part.want])
            continue
        want, start, length, target_offset = part
        shard, _, address, target_bytes, lane = targets[want]
        if target_offset + length > target_bytes or start + length > byte_offset + fetched.nbytes:
            raise ValueError(f"the plan puts {length} bytes where {shard.fqn} has no memory that takes them")
        if lane is None:
            ctypes.memmove(address + target_offset, source + start, length)
        else:
            memory = shard.tensor.reshape(-1).view(torch.uint8)[target_offset : target_offset + length]
            lane.copy(memory, fetched[start - byte_offset :][:length], None)


def _place_box(part: BoxPart, content: memoryview, target: Target) -> None:
    lengths, strides = box_layout(part)
    dtype = torch_dtype(target.stored_dtype)
    destination = view_region(target.shard, part.region)
    integers = SAME_SIZE_INTEGERS.get(itemsize(target.stored_dtype))
    is_raw = target.stored_dtype == target.shard.dtype and not destination.is_conj() and not destination.is_neg()
    if is_raw and integers is not None:
        dtype, destination = integers, destination.view(integers)

    def shaped(stored: torch.Tensor) -> torch.Tensor:
        return stored.view(dtype).as_strided(lengths, strides)

    if target.lane is not None and target.stored_dtype == target.shard.dtype:
        target.lane.copy(destination, content, shaped)
        return
    stored = torch.frombuffer(content, dtype=torch.uint8)
    if stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()  # files of others may hold it so; torch crashes on complex numbers that are not aligned
    if target.lane is None:
        destination.copy_(shaped(stored))
        return
    # Converted on the host, so that the result is the same as there.
    converted = shaped(stored).to(destination.dtype).contiguous()
    target.lane.copy(destination, as_bytes(converted), lambda raw: raw.view(destination.dtype).view(lengths))
