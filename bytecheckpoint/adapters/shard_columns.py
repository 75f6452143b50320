"""Whole, dense tensors of the host as columns: a state may hold 100,000 small ones, and a record of each would cost a
save more than its bytes. What their names, dtypes and shapes decide is made once and found again by the names; each
save looks at every tensor twice, a few hundred at a time: for what it is, and then for where it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec
import numpy as np
import torch
import xxhash

from bytecheckpoint.adapters.shards import (
    AT_ONCE,
    NEW_TUPLE,
    PLAIN_TENSORS,
    LocalShard,
    LocalShards,
    Memories,
    check_has_all_memory,
    is_row_major,
    kind_of,
    look_at,
)
from bytecheckpoint.region import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_LOOKS = attrgetter("dtype", "shape", "is_cpu")
"""Reads the attributes that decide, besides its elements, what is saved of a plain tensor that has memory."""


class _ColumnLayout(NamedTuple):
    """All that follows from names, dtypes and shapes. Holds no tensor."""

    layouts: list[Any]
    """Dtype, shape and `is_cpu` of each tensor."""
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    regions: list[Region]
    lengths: Int64s
    """Bytes of each tensor."""
    are_complex: bool
    """True if some are of complex numbers."""
    digest: bytes
    """Digest of all that a plan depends on: names, dtypes, shapes and regions."""


class _KnownLayout:
    """The layout that the tensors of one tuple of FQNs had last; None before the first save of them."""

    def __init__(self) -> None:
        self.layout: _ColumnLayout | None = None


@lru_cache(maxsize=16)
def _known(fqns: tuple[str, ...]) -> _KnownLayout:  # noqa: ARG001  the key
    return _KnownLayout()


class _MemoryPlaces(NamedTuple):
    """The memory of the tensors of one save. Keeps that memory alive."""

    addresses: Int64s
    """Address of the first byte of each tensor; 0 for those in `separate`, and for empty ones."""
    starts: Int64s
    """Address of each tensor's storage."""
    storages: list[torch.UntypedStorage]
    separate: dict[int, torch.Tensor]
    """By index: tensors whose bytes are not consecutive in memory, and copies that replace tensors."""


class ShardColumns(Sequence[LocalShard]):
    """The shards of whole tensors on the host. Records, each a LocalShard, are made on demand; few are needed."""

    def __init__(self, fqns: tuple[str, ...], layout: _ColumnLayout, places: _MemoryPlaces) -> None:
        self._fqns = fqns
        self._layout = layout
        self._places = places

    @property
    def digest(self) -> bytes:
        return self._layout.digest

    @property
    def addresses(self) -> Int64s:
        """Address of each tensor; 0 for empty ones, and for those that have to be read through their record."""
        return self._places.addresses

    @property
    def lengths(self) -> Int64s:
        """Bytes of each tensor."""
        return self._layout.lengths

    def __len__(self) -> int:
        return len(self._fqns)

    @overload
    def __getitem__(self, index: int) -> LocalShard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalShard]: ...
    def __getitem__(self, index: int | slice) -> LocalShard | Sequence[LocalShard]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        layout, index = self._layout, range(len(self))[index]
        about = self._fqns[index], layout.dtypes[index], layout.shapes[index], layout.regions[index]
        return NEW_TUPLE(LocalShard, (*about, self._memory_of(index), 0, None, 0))

    def described(self) -> Iterable[tuple[str, str, tuple[int, ...], Region]]:
        """Returns FQN, dtype, global shape and region of each shard, without its memory, which is the slowest part of a
        record to make.
        """
        return zip(self._fqns, self._layout.dtypes, self._layout.shapes, self._layout.regions, strict=True)

    def _memory_of(self, index: int) -> torch.Tensor:
        places, (dtype, shape, _) = self._places, self._layout.layouts[index]
        if index in places.separate:
            return places.separate[index]
        # From the storage: the tensor itself may have been given other memory since it was looked at.
        memory = torch.empty(0, dtype=dtype, device="cpu")
        if self._layout.lengths[index]:
            memory = memory.set_(places.storages[index])
        start = int(places.addresses[index] - places.starts[index]) // memory.element_size()
        return memory[start : start + prod(shape)].view(shape)

    def copy_changing(self, changing: Collection[int], copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces tensors whose storages begin at these addresses by what `copied` makes; their address becomes 0."""
        if not changing:
            return
        places = self._places
        for number in np.flatnonzero(np.isin(places.starts, np.fromiter(changing, np.int64))).tolist():
            places.separate[number] = copied(self._memory_of(number))
            places.addresses[number] = 0


class WholeTensors(Sequence[LocalShard]):
    """Whole tensors of an entry whose memory is not located yet. That is done when all entries have been collected,
    because an object that makes its state may move the memory of others. Each index locates all anew: call `shards`.
    """

    def __init__(self, fqns: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
        self._fqns = fqns
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._fqns)

    @overload
    def __getitem__(self, index: int) -> LocalShard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalShard]: ...
    def __getitem__(self, index: int | slice) -> LocalShard | Sequence[LocalShard]:
        return self.shards()[index]

    def shards(self) -> Sequence[LocalShard]:
        """Returns the shards: columns if all tensors are plain, dense and on the host.

        Raises CheckpointSaveError (unsupported_value) for a tensor that cannot be saved, or whose memory is not all
        there.
        """
        is_plain = PLAIN_TENSORS.issuperset(map(type, self._tensors))
        found = self._columns() if is_plain and self._tensors[0].is_cpu else None
        if found is not None:
            return found
        shards = LocalShards()
        shards.add_all(zip(self._fqns, self._tensors, strict=True))
        return shards.found

    def _columns(self) -> ShardColumns | None:
        known = _known(self._fqns)
        layout = known.layout  # once: another thread may save a state of the same names
        try:
            places = None if layout is None else self._look(layout)
            if places is None:
                layout = known.layout = self._new_layout()
                places = None if layout is None else self._look(layout)
        except (RuntimeError, NotImplementedError):  # a nested tensor has no shape, a sparse one no storage
            return None
        return None if layout is None or places is None else ShardColumns(self._fqns, layout, places)

    def _new_layout(self) -> _ColumnLayout | None:
        layout_of: dict[Any, Any] = {}
        kinds: dict[Any, Any] = {}
        layouts, of_each = [], []
        for fqn, tensor in zip(self._fqns, self._tensors, strict=True):
            found = _LOOKS(tensor)
            if found not in kinds:
                kinds[found] = kind_of(fqn, tensor)
            layouts.append(layout_of.setdefault(found, found))
            of_each.append(kinds[found])
        if not all(is_cpu for *_, is_cpu in kinds):
            return None
        dtypes, shapes, regions, lengths = map(list, zip(*of_each, strict=True)) if of_each else ([], [], [], [])
        are_complex = any(dtype.is_complex for dtype, _, _ in kinds)
        digest = xxhash.xxh3_128_digest(msgspec.msgpack.encode((self._fqns, dtypes, shapes, regions)))
        return _ColumnLayout(layouts, dtypes, shapes, regions, np.array(lengths, np.int64), are_complex, digest)

    def _look(self, layout: _ColumnLayout) -> _MemoryPlaces | None:
        """Returns where the tensors lie; None if they have another layout. Reads each once: it is a cache miss."""
        addresses, starts, sizes = np.zeros((3, len(self)), np.int64)
        storages: list[torch.UntypedStorage] = []
        others: list[int] = []
        for first in range(0, len(self), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            tensors = self._tensors[some]
            if list(map(_LOOKS, tensors)) != layout.layouts[some]:
                return None
            found = look_at(tensors, are_complex=layout.are_complex)
            addresses[some], starts[some], sizes[some] = found.addresses, found.starts, found.sizes
            storages += found.storages
            if not found.are_flat:
                others += [first + number for number, each in enumerate(tensors) if not is_row_major(each)]
        is_missing = ~Memories(addresses, starts, sizes, storages, not others).has(layout.lengths)
        for number in (*np.flatnonzero(is_missing).tolist(), *others):
            check_has_all_memory(self._fqns[number], self._tensors[number])
        addresses[others] = 0
        return _MemoryPlaces(addresses, starts, storages, {number: self._tensors[number].detach() for number in others})


class ShardBlocks(Sequence[LocalShard]):
    """Shards in blocks: columns, records, or WholeTensors, which `resolved` replaces."""

    def __init__(self, blocks: Iterable[Sequence[LocalShard]]) -> None:
        each = (block.blocks if isinstance(block, ShardBlocks) else [block] for block in blocks)
        self.blocks: list[Sequence[LocalShard]] = [block for block in chain.from_iterable(each) if len(block)]
        self._starts = [0, *accumulate(map(len, self.blocks))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[LocalShard]:
        return chain.from_iterable(self.blocks)

    @overload
    def __getitem__(self, index: int) -> LocalShard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalShard]: ...
    def __getitem__(self, index: int | slice) -> LocalShard | Sequence[LocalShard]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        block = bisect_right(self._starts, index) - 1
        return self.blocks[block][index - self._starts[block]]

    def resolved(self) -> ShardBlocks:
        """Returns these shards, each WholeTensors replaced by its located `shards()`, whose errors this raises."""
        return ShardBlocks(block.shards() if isinstance(block, WholeTensors) else block for block in self.blocks)

    def records(self) -> Iterator[LocalShard]:
        """Yields the shards that are not in columns."""
        return chain.from_iterable(block for block in self.blocks if not isinstance(block, ShardColumns))

    def described(self) -> Iterator[tuple[str, str, tuple[int, ...], Region]]:
        """Yields FQN, dtype, global shape and region of each shard."""
        for block in self.blocks:
            yield from block.described() if isinstance(block, ShardColumns) else (shard[:4] for shard in block)

    def digests(self) -> list[Any]:
        """Returns what a plan depends on, an item a block: the digest of columns, or names, dtypes, shapes, regions."""
        return [
            block.digest if isinstance(block, ShardColumns) else [*zip(*block, strict=True)][:4]
            for block in self.blocks
        ]

    def addresses(self) -> Int64s:
        """Returns the address of each shard as ShardColumns has it, 0 for all that are not in columns."""
        return self.places()[0]

    def places(self) -> tuple[Int64s, Int64s]:
        """Returns the address and the number of bytes of each shard, as its `ShardColumns` has them; both 0 for a shard
        that is not in columns.
        """
        addresses, lengths = np.zeros((2, len(self)), np.int64)
        for block, start in zip(self.blocks, self._starts, strict=False):
            if isinstance(block, ShardColumns):
                addresses[start : start + len(block)] = block.addresses
                lengths[start : start + len(block)] = block.lengths
        return addresses, lengths
