"""Bytes that were read, put where they belong in tensors: the load's half of what staging is to a save. It knows
nothing of where in a file they lay.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch

from bytecheckpoint.adapters.tensors import LocalShard, torch_dtype
from bytecheckpoint.device_copies import has_streams
from bytecheckpoint.device_loads import Lane, Lanes
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError, StorageError
from bytecheckpoint.host_copies import scatter_pieces
from bytecheckpoint.planner.coalesce import BoxPart, FlatPart, Part
from bytecheckpoint.planner.load_plan import box_layout
from bytecheckpoint.planner.pieces import first_names
from bytecheckpoint.tensor_memory import SAME_SIZE_INTEGERS, as_bytes, is_row_major, view_region


class Targets:
    """Shards as the destinations of a load, by number."""

    def __init__(self, shards: Sequence[LocalShard], stored_dtypes: Sequence[str], lanes: Lanes) -> None:
        # By address and not by memoryview, which takes several calls to make: a state may hold 100,000 small tensors.
        addresses, byte_lengths = [], []
        for given, stored_dtype in zip(shards, stored_dtypes, strict=True):
            # It may have been moved since it was matched: others' state_dict() ran meanwhile, and sharing memory with a
            # process moves it.
            is_there = given.address and given.tensor.data_ptr() == given.address
            shard = given if is_there else given._replace(address=0)
            is_raw = takes_bytes(shard, stored_dtype)
            byte_lengths.append(shard.tensor.nbytes if is_raw else 0)
            on_host = is_raw and (shard.address or lanes.to(shard.tensor) is None)
            addresses.append((shard.address or shard.tensor.data_ptr()) if on_host else 0)
        self.shards = shards
        self.stored_dtypes = stored_dtypes
        self.addresses = np.array(addresses, np.int64)
        """Of the first byte of each, where it is on the host and takes stored bytes as they are; else 0."""
        self.byte_lengths = np.array(byte_lengths, np.int64)
        """Of each, wherever it is, that takes stored bytes as they are; else 0."""
        self._lanes = lanes

    def lane(self, number: int) -> Lane | None:
        """The way to a shard, where it is on a device that has one."""
        return self._lanes.to(self.shards[number].tensor)


def takes_bytes(shard: LocalShard, stored_dtype: str) -> bool:
    """Whether stored bytes can be put into the shard's memory as they are."""
    if shard.address or shard.dtype != stored_dtype:
        return shard.dtype == stored_dtype
    tensor = shard.tensor
    return (tensor.is_cpu or has_streams(tensor.device)) and is_row_major(tensor)


def memory_of(part: Part, targets: Targets) -> memoryview | None:
    """The host memory that the bytes of a part are for, where they can be put there as they are."""
    if not isinstance(part, FlatPart) or not targets.addresses[part.want]:
        return None
    memory = as_bytes(targets.shards[part.want].tensor)
    return memory[part.target_byte_offset : part.target_byte_offset + part.byte_length]


def place_all(parts: Sequence[Part], byte_offset: int, targets: Targets, fetched: memoryview) -> None:
    """Puts parts of the bytes that were read from `byte_offset` of a file into their targets. `fetched` is writable.

    Raises CheckpointMismatchError (conflict) where the memory of a target cannot be written to.
    """
    flat = [part for part in parts if not isinstance(part, BoxPart)]
    if flat:
        _place_flat(flat, byte_offset, targets, fetched)
    for part in parts if len(flat) < len(parts) else ():
        if isinstance(part, BoxPart):
            _place_box(part, fetched[part.byte_offset - byte_offset :][: part.byte_length], targets)


def _place_flat(parts: Sequence[FlatPart], byte_offset: int, targets: Targets, fetched: memoryview) -> None:
    wants, starts, lengths, skipped = np.fromiter(chain.from_iterable(parts), np.int64).reshape(-1, 4).T
    starts, ends = starts - byte_offset, starts + lengths - byte_offset
    is_outside = (skipped + lengths > targets.byte_lengths[wants]) | (ends > fetched.nbytes)
    if is_outside.any():
        raise _no_memory(parts[int(is_outside.argmax())], targets)
    addresses = targets.addresses[wants]
    on_host = addresses != 0
    source = ctypes.addressof(ctypes.c_char.from_buffer(fetched))
    with writable(lambda: first_names(targets.shards[part.want].fqn for part in parts)):
        scatter_pieces(source + starts[on_host], addresses[on_host] + skipped[on_host], lengths[on_host])
    for number in np.flatnonzero(~on_host & (lengths > 0)).tolist():
        part = parts[number]
        lane = targets.lane(part.want)
        if lane is None:
            raise _no_memory(part, targets)
        memory = targets.shards[part.want].tensor.reshape(-1).view(torch.uint8)
        memory = memory[part.target_byte_offset : part.target_byte_offset + part.byte_length]
        lane.copy(memory, fetched[part.byte_offset - byte_offset :][: part.byte_length], None)


def _no_memory(part: FlatPart, targets: Targets) -> ValueError:
    fqn = targets.shards[part.want].fqn
    return ValueError(f"the plan puts {part.byte_length} bytes where {fqn} has no memory that takes them")


@contextmanager
def writable(names: Callable[[], str]) -> Iterator[None]:
    """Around what writes to the memory of tensors of these names.

    Raises CheckpointMismatchError (conflict) where the kernel finds that it cannot be written to.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if not isinstance(cause, OSError) or cause.errno != errno.EFAULT:
            raise
        raise CheckpointMismatchError(
            f"memory of the state cannot be written to, as that of a file that is mapped to be read only: it is of "
            f"{names()}; load into a copy",
            kind="conflict",
        ) from error


def _place_box(part: BoxPart, content: memoryview, targets: Targets) -> None:
    lengths, strides = box_layout(part)
    shard, stored_dtype, lane = targets.shards[part.want], targets.stored_dtypes[part.want], targets.lane(part.want)
    dtype = torch_dtype(stored_dtype)
    destination = view_region(shard, part.region)
    integers = SAME_SIZE_INTEGERS.get(itemsize(stored_dtype))
    is_raw = stored_dtype == shard.dtype and not destination.is_conj() and not destination.is_neg()
    if is_raw and integers is not None:
        dtype, destination = integers, destination.view(integers)

    def shaped(stored: torch.Tensor) -> torch.Tensor:
        return stored.view(dtype).as_strided(lengths, strides)

    if lane is not None and stored_dtype == shard.dtype:
        lane.copy(destination, content, shaped)
        return
    stored = torch.frombuffer(content, dtype=torch.uint8)
    if stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()  # files of others may hold it so; torch crashes on complex numbers that are not aligned
    if lane is None:
        destination.copy_(shaped(stored))
        return
    # Converted on the host, so that the result is the same as there.
    converted = shaped(stored).to(destination.dtype).contiguous()
    lane.copy(destination, as_bytes(converted), lambda raw: raw.view(destination.dtype).view(lengths))
