"""Scatters bytes that were read into tensor memory. This is the reverse of staging, which gathers them in a save."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import eq
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.shards import LocalShard, flat_bytes, is_row_major, torch_dtype
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, FlatParts, Part, split_flat
from bytecheckpoint.memory.batched_copy import FEW_PIECES, memory_at, scatter_pieces
from bytecheckpoint.memory.device_to_host import has_streams
from bytecheckpoint.memory.host_to_device import CopyStream, CopyStreams
from bytecheckpoint.memory.tensor_bytes import SAME_SIZE_INTEGERS, as_bytes, view_region
from bytecheckpoint.planner.load_plan import box_layout

_MEAN_BYTES = 2048
"""Shorter parts are copied out of a buffer in less time than it takes to name the memory of each."""
_NAN_CODES = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
"""The bytes of NaN in dtypes that may turn numbers into it: others have an infinity."""
_COMPARABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_E4M3FN_END = 464
"""The last number that is rounded to the largest of float8_e4m3fn, 448."""


class Targets:
    """Shards as the destinations of a load, by number."""

    def __init__(self, shards: Sequence[LocalShard], stored_dtypes: Sequence[str], lanes: CopyStreams) -> None:
        # By address and not by memoryview, which takes several calls to make: a state may hold 100,000 small tensors.
        self.shards = shards
        self.stored_dtypes = stored_dtypes
        self._lanes = lanes
        columns = TargetShards.of(shards)
        self.addresses = columns.addresses.copy()
        """Address of the first byte of each shard that is on the host and takes stored bytes as they are; else 0."""
        self.byte_lengths = columns.byte_lengths.copy()
        """Length of each shard, on any device, that takes stored bytes as they are; else 0."""
        # A tensor may have been moved since it was matched: the state_dict() of other objects was called meanwhile, and
        # sharing memory with a process moves a tensor.
        is_known = self.addresses != 0
        tensors = columns.tensors if is_known.all() else list(compress(columns.tensors, is_known.tolist()))
        is_known[is_known] = self.addresses[is_known] == np.array(list(map(torch.Tensor.data_ptr, tensors)), np.int64)
        if [*columns.dtypes] != [*stored_dtypes]:
            is_known &= np.fromiter(map(eq, columns.dtypes, stored_dtypes), bool, len(shards))
        for number in np.flatnonzero(~is_known).tolist():
            self._look_at(number)

    def _look_at(self, number: int) -> None:
        """Sets the memory address and length of a shard that came without an address, lies elsewhere by now, or has
        another dtype than what is stored.
        """
        matched = self.shards[number]
        has_moved = matched.address and matched.tensor.data_ptr() != matched.address
        shard = matched._replace(address=0) if has_moved else matched
        is_raw = takes_bytes(shard, self.stored_dtypes[number])
        self.byte_lengths[number] = shard.tensor.nbytes if is_raw else 0
        on_host = is_raw and (shard.address or self._lanes.to(shard.tensor) is None)
        self.addresses[number] = (shard.address or shard.tensor.data_ptr()) if on_host else 0

    def lane(self, number: int) -> CopyStream | None:
        """Returns the copy stream to a shard on a device that has one."""
        return self._lanes.to(self.shards[number].tensor)


def takes_bytes(shard: LocalShard, stored_dtype: str) -> bool:
    """Returns True if stored bytes can be put as they are into the shard's memory, on the host or on a device."""
    if shard.address or shard.dtype != stored_dtype:
        return shard.dtype == stored_dtype
    tensor = shard.tensor
    return (tensor.is_cpu or has_streams(tensor.device)) and is_row_major(tensor)


def memory_of(part: Part, targets: Targets) -> memoryview | None:
    """Returns the host memory that takes the bytes of a part as they are; None if there is none."""
    if not isinstance(part, FlatPart) or not targets.addresses[part.want]:
        return None
    memory = as_bytes(targets.shards[part.want].tensor)
    return memory[part.target_byte_offset : part.target_byte_offset + part.byte_length]


def device_memory_of(part: Part, targets: Targets) -> torch.Tensor | None:
    """Returns the memory on a device with streams that takes the bytes of a part as they are; None if there is none."""
    if not isinstance(part, FlatPart) or targets.lane(part.want) is None:
        return None
    end = part.target_byte_offset + part.byte_length
    if end > targets.byte_lengths[part.want]:
        return None
    return flat_bytes(targets.shards[part.want].tensor)[part.target_byte_offset : end]


def places_of(fetch: Fetch, targets: Targets) -> Places | None:
    """Returns host memory that one read can fill with the bytes of a fetch: each piece goes to its tensor, and bytes
    that no part wants go to scratch memory. None where the bytes have to be copied, or copying costs less.
    """
    if fetch.frames or len(fetch.parts) < FEW_PIECES:
        return None
    flat, others = split_flat(fetch.parts)
    wants, starts, lengths, skipped = flat.rows.T
    addresses = targets.addresses[wants]
    gaps = np.append(starts, fetch.end) - np.append(fetch.byte_offset, starts + lengths)
    is_simple = (addresses != 0) & (skipped + lengths <= targets.byte_lengths[wants])
    is_dense = fetch.byte_length >= _MEAN_BYTES * len(flat) and gaps.sum() <= fetch.byte_length // 4
    if not (not others and is_dense and is_simple.all() and (gaps >= 0).all()):
        return None
    return Places(addresses + skipped, lengths, gaps)


class Places(NamedTuple):
    """Places in memory that take the bytes of a fetch in turn, and the number of bytes before each of them, and after
    the last, that nothing wants.
    """

    addresses: np.ndarray
    lengths: np.ndarray
    gaps: np.ndarray

    @contextmanager
    def opened(self, changes: StateChanges) -> Iterator[list[memoryview]]:
        """Yields the memory of all places and gaps, in the order of the file; notes in `changes` that it is filled."""
        unwanted = np.empty(int(self.gaps.sum()), np.uint8)
        starts, sizes = np.zeros((2, 2 * len(self.lengths) + 1), np.int64)
        starts[::2], sizes[::2] = unwanted.ctypes.data + np.cumsum(self.gaps) - self.gaps, self.gaps
        starts[1::2], sizes[1::2] = self.addresses, self.lengths
        with changes.overwriting():
            yield memory_at(starts[sizes > 0], sizes[sizes > 0])


def place_all(parts: Sequence[Part], byte_offset: int, targets: Targets, fetched: memoryview) -> None:
    """Puts parts of the bytes that were read from `byte_offset` of a file into their targets; copies to devices may go
    on afterwards. `fetched` is writable. Converts another dtype, and raises CheckpointMismatchError (dtype) if a value
    does not fit the target's dtype.
    """
    others: Sequence[Part] = parts
    if len(parts) >= FEW_PIECES:
        flat, others = split_flat(parts)
        _place_together(flat, byte_offset, targets, fetched)
    for part in others:
        content = fetched[part.byte_offset - byte_offset :][: part.byte_length]
        if isinstance(part, BoxPart):
            _place_box(part, content, targets)
        else:
            _place_flat(part, content, targets)


def _place_together(parts: FlatParts, byte_offset: int, targets: Targets, fetched: memoryview) -> None:
    wants, starts, lengths, skipped = parts.rows.T
    starts, ends = starts - byte_offset, starts + lengths - byte_offset
    addresses = targets.addresses[wants]
    is_simple = (addresses != 0) & (skipped + lengths <= targets.byte_lengths[wants]) & (ends <= fetched.nbytes)
    source = ctypes.addressof(ctypes.c_char.from_buffer(fetched))
    scatter_pieces(source + starts[is_simple], (addresses + skipped)[is_simple], lengths[is_simple])
    for number in np.flatnonzero(~is_simple).tolist():
        part = parts[number]
        _place_flat(part, fetched[part.byte_offset - byte_offset :][: part.byte_length], targets)


def _place_flat(part: FlatPart, content: memoryview, targets: Targets) -> None:
    want, _, length, skipped = part
    address, lane = int(targets.addresses[want]), targets.lane(want)
    if skipped + length > targets.byte_lengths[want] or content.nbytes < length or not (address or lane or not length):
        fqn = targets.shards[want].fqn
        raise ValueError(f"the plan puts {length} bytes where {fqn} has no memory that takes them")
    if lane is not None and length:
        memory = flat_bytes(targets.shards[want].tensor)[skipped : skipped + length]
        lane.copy(memory, content, None)
    elif length:
        ctypes.memmove(address + skipped, ctypes.addressof(ctypes.c_char.from_buffer(content)), length)


def _place_box(part: BoxPart, content: memoryview, targets: Targets) -> None:
    """Copies the elements of a box from the bytes that were read for it into its target; converts another dtype. Raises
    CheckpointMismatchError (dtype) if a value does not fit the target's dtype.
    """
    lengths, strides = box_layout(part)
    shard, stored_dtype, lane = targets.shards[part.want], targets.stored_dtypes[part.want], targets.lane(part.want)
    dtype = torch_dtype(stored_dtype)
    destination = view_region(shard, part.region).detach()
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
    if stored_dtype != shard.dtype:
        _check_values_fit(shard, shaped(stored))
    if lane is None:
        destination.copy_(shaped(stored))
        return
    # Converted on the host, so that the result is the same as there.
    converted = shaped(stored).to(destination.dtype).contiguous()
    lane.copy(destination, as_bytes(converted), lambda raw: raw.view(destination.dtype).view(lengths))


def _check_values_fit(shard: LocalShard, stored: torch.Tensor) -> None:
    """Raises CheckpointMismatchError (dtype) if a stored value would change in the shard's dtype, other than by the
    rounding of a floating-point or complex dtype: an integer out of range, a fraction, an imaginary part; a number that
    a float8 dtype turns into NaN, or without its sign.
    """
    dtype = torch_dtype(shard.dtype)
    is_rounded = dtype.is_complex or (dtype.is_floating_point and not stored.is_complex())
    if is_rounded and shard.dtype not in _NAN_CODES:
        return
    if is_rounded:
        differs = _are_lost_in_float8(stored, shard.dtype)
    elif dtype.is_floating_point:
        differs = torch.view_as_real(stored)[..., 1] != 0
        if shard.dtype in _NAN_CODES:
            differs |= _are_lost_in_float8(stored.real, shard.dtype)
    else:
        converted = stored.to(dtype)
        differs = converted.to(stored.dtype) != stored
        # An unsigned integer and a signed one wrap around into each other, there and back, and so may infinity.
        differs |= (_are_negative(stored) != _are_negative(converted)) | ~_are_finite(stored)
    differs = differs.reshape(-1)
    if differs.any():
        value = stored.reshape(-1)[differs][0].item()
        raise CheckpointMismatchError(
            f"{shard.fqn}: {value} and perhaps other values in the checkpoint are no {shard.dtype}, which the state "
            "has: load into another dtype",
            kind="dtype",
        )


def _are_finite(values: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(values.float() if values.is_floating_point() else values)


def _are_lost_in_float8(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a mask of the numbers that become NaN in this dtype or exceed it, and of negative ones if it has none."""
    # By the bytes, with numpy: torch takes ten times as long to convert float8 back, and four times the memory.
    codes = stored.to(torch_dtype(dtype)).view(torch.uint8).numpy()
    first, *others = _NAN_CODES[dtype]
    is_nan = codes == first
    for code in others:
        is_nan |= codes == code
    lost = torch.from_numpy(np.asarray(is_nan))  # of a 0-d tensor it is a number
    if stored.is_floating_point() and is_nan.any():
        lost &= ~torch.isnan(stored.float())
    if dtype == "float8_e4m3fn":  # torch makes the largest number of what exceeds it, and NaN in other releases
        values = stored if stored.dtype in _COMPARABLE else stored.float()
        lost |= (values > _E4M3FN_END) | (values < -_E4M3FN_END)
    if dtype == "float8_e8m0fnu":  # which has no negative numbers
        lost |= _are_negative(stored)
    return lost


def _are_negative(values: torch.Tensor) -> torch.Tensor:
    """Returns a mask, also for dtypes that torch cannot compare with a number."""
    if values.is_complex():
        values = values.real
    if not values.dtype.is_signed:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    # Not of a float64: a tiny one would become 0 as a float32.
    return (values.float() if values.is_floating_point() and values.itemsize < 4 else values) < 0
