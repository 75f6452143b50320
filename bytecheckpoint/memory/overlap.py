"""Overlaps between the tensors of a load: memory that two of them share cannot hold the values of both. Knows neither
checkpoints nor the names of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.adapters.target_shards import TargetShards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_MAX_RUNS = 1 << 22
"""Limit for the runs of tensors that may overlap. With more, as large transposed tensors have, all count as apart:
comparing them would take too much memory.
"""


class Overlaps(NamedTuple):
    """Pairs of shard numbers. The first shard of a pair was chosen to be filled; the second shares memory with it, and
    is in no other pair.
    """

    within: list[tuple[int, int]]
    """The second has only bytes of the first, with the same dtype: it is tied to it, or a view of a part."""
    clashing: list[tuple[int, int]]
    """The two have some bytes in common, and the second also has other bytes, or they have different dtypes."""


def find_overlaps(shards: Sequence[LocalShard]) -> Overlaps:
    """Chooses shards that share no memory, larger ones first, and returns a pair for each of the others. Where tensors
    that may overlap have more than _MAX_RUNS runs, finds only equal ones. Costs little if no memory is shared.
    """
    overlaps = Overlaps([], [])
    targets = TargetShards.of(shards)
    if all(tensor.is_cpu for tensor in targets.tensors_without_address):
        _compare_on_device(range(len(shards)), targets, overlaps)
        return overlaps
    by_device: dict[torch.device, list[int]] = {}  # an address says nothing about another device's
    for number, shard in enumerate(shards):
        by_device.setdefault(shard.tensor.device, []).append(number)
    for numbers in by_device.values():
        _compare_on_device(numbers, shards, overlaps)
    return overlaps


def _compare_on_device(numbers: Sequence[int], shards: Sequence[LocalShard], overlaps: Overlaps) -> None:
    """Adds the pairs among the shards that have these numbers, all on one device, to `overlaps`."""
    compared = TargetShards.of(shards if len(numbers) == len(shards) else [shards[number] for number in numbers])
    starts, lengths = compared.addresses.copy(), compared.byte_lengths.copy()
    for number, tensor in zip(compared.without_address, compared.tensors_without_address, strict=True):
        starts[number], lengths[number] = tensor.data_ptr(), _span_bytes(tensor)
    ends = starts + lengths
    filled = np.flatnonzero((starts != 0) & (ends > starts))
    order = filled[np.argsort(starts[filled], kind="stable")]
    # A span that begins before all earlier ones have ended belongs to their group.
    is_free = np.append(True, starts[order][1:] >= np.maximum.accumulate(ends[order])[:-1])[: len(order)]
    if is_free.all():
        return
    for group in np.split(order, np.flatnonzero(is_free)[1:]):
        if len(group) > 1:
            _compare_group([numbers[index] for index in group.tolist()], shards, overlaps)


def _compare_group(group: Sequence[int], shards: Sequence[LocalShard], overlaps: Overlaps) -> None:
    """Adds the pairs of a group, whose spans of memory overlap, that share bytes."""
    same: dict[object, list[int]] = {}
    for number in sorted(group):
        tensor = shards[number].tensor
        if not tensor.is_meta:  # a view has an address even there
            identity = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            same.setdefault(identity, []).append(number)
    views = {numbers[0]: _byte_runs_of(shards[numbers[0]].tensor) for numbers in same.values()}
    if sum(view.num_runs for view in views.values()) > _MAX_RUNS or not _have_common(views.values()):
        filled = views
    else:
        filled = _largest_apart(views)
    for first, *others in same.values():
        if first in filled:
            overlaps.within.extend((first, other) for other in others)
            continue
        dtype = shards[first].tensor.dtype  # of another one, the same bytes are other values
        same_dtype = {number: view for number, view in filled.items() if shards[number].tensor.dtype == dtype}
        within = next((number for number, view in same_dtype.items() if _is_within(views[first], view)), None)
        if within is not None:
            overlaps.within.extend((within, other) for other in (first, *others))
        else:
            meets = next(number for number, view in filled.items() if _have_common([views[first], view]))
            overlaps.clashing.extend((meets, other) for other in (first, *others))


def _largest_apart(views: Mapping[int, _ByteRuns]) -> dict[int, _ByteRuns]:
    """Chooses views that have no byte in common, larger ones first."""
    apart: dict[int, _ByteRuns] = {}
    chosen_starts, chosen_ends = np.empty(0, np.int64), np.empty(0, np.int64)
    for number in sorted(views, key=lambda number: -views[number].num_runs * views[number].run_bytes):
        starts = np.sort(views[number].starts())
        ends = starts + views[number].run_bytes
        # The last of the chosen runs that begins before the end of this run.
        last = np.searchsorted(chosen_starts, ends) - 1
        if not (chosen_ends[last[last >= 0]] > starts[last >= 0]).any():
            apart[number] = views[number]
            at = np.searchsorted(chosen_starts, starts)
            chosen_starts, chosen_ends = np.insert(chosen_starts, at, starts), np.insert(chosen_ends, at, ends)
    return apart


def _span_bytes(tensor: torch.Tensor) -> int:
    """Returns the distance from the first byte of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0


class _ByteRuns(NamedTuple):
    """The bytes of a tensor, as runs of equal length."""

    address: int
    run_bytes: int
    dims: list[tuple[int, int]]
    """Stride in bytes and length of the dimensions over which runs repeat."""

    @property
    def num_runs(self) -> int:
        return prod(length for _, length in self.dims)

    def starts(self) -> Int64s:
        """Returns the address of each run."""
        starts = np.array([self.address])
        for stride, length in self.dims:
            starts = (starts + np.arange(length)[:, None] * stride).reshape(-1)
        return starts


def _have_common(views: Collection[_ByteRuns]) -> bool:
    """Returns True if any two of the views have a byte in common, or one of them has the same byte twice."""
    if not views:
        return False
    starts = np.concatenate([view.starts() for view in views])
    ends = starts + np.repeat([view.run_bytes for view in views], [view.num_runs for view in views])
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] < ends[order][:-1]).any())


def _is_within(view: _ByteRuns, other: _ByteRuns) -> bool:
    starts, others = view.starts(), np.sort(other.starts())
    before = np.searchsorted(others, starts, side="right") - 1
    is_within = (before >= 0) & (starts + view.run_bytes <= others[before] + other.run_bytes)
    return bool(is_within.all())


def _byte_runs_of(tensor: torch.Tensor) -> _ByteRuns:
    run_bytes = tensor.element_size()
    dims: list[tuple[int, int]] = []
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        stride_bytes = stride * tensor.element_size()
        if length > 1 and stride_bytes == run_bytes and not dims:
            run_bytes *= length
        elif length > 1:
            dims.append((stride_bytes, length))
    return _ByteRuns(tensor.data_ptr(), run_bytes, dims)
