"""Write items, the shards that ranks could write: records on each rank, which it packs into a message for the
coordinator, and tables on the coordinator. A table is of all ranks that hold parts of the same tensors, as thousands of
ranks mostly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import zstandard

from bytecheckpoint.region import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ZSTD_LEVEL = 1
_FEW_RANKS = 32


class WriteItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that a rank holds and could write."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """The global shape."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: int | None = None
    """The xxh3-64 of a small shard, by which replicas are compared."""

    @property
    def region(self) -> Region:
        return Region(self.offsets, self.lengths)


class ItemRegion(NamedTuple):
    """A write item, or a part of one: the elements of one chunk that a rank writes."""

    item: int
    """Index into the rank's items."""
    region: Region
    """The elements of the item's region, in global coordinates."""


class PackedItems(msgspec.Struct, frozen=True, array_like=True):
    """All write items of one rank, as a message."""

    described: bytes
    """The tensors: the same bytes on ranks that hold parts of the same tensors, in the same order."""
    coordinates: bytes
    digests: bytes


class _Described(msgspec.Struct, frozen=True, array_like=True):
    fqns: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    digested: list[int]
    """Indices of the items that have a digest."""


def pack_items(items: Sequence[WriteItem]) -> PackedItems:
    """Packs the items of a rank into few bytes."""
    described = _Described(
        [item.fqn for item in items],
        [item.dtype for item in items],
        [item.shape for item in items],
        [index for index, item in enumerate(items) if item.digest is not None],
    )
    coordinates = [number for item in items for number in (*item.offsets, *item.lengths)]
    digests = [item.digest for item in items if item.digest is not None]
    return PackedItems(
        zstandard.compress(msgspec.msgpack.encode(described), _ZSTD_LEVEL),
        zstandard.compress(np.array(coordinates, "<i8").tobytes(), _ZSTD_LEVEL),
        np.array(digests, "<u8").tobytes(),
    )


@dataclass(frozen=True, slots=True)
class ItemTable:
    """The items of ranks that hold parts of the same tensors, in the same order."""

    ranks: NDArray[np.int32]
    """Rising."""
    fqns: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    coordinates: NDArray[np.integer]
    """One row for each rank: offsets and lengths of one item after the other."""
    rows: Sequence[Sequence[int]]
    """The coordinates as lists if the ranks are few, because arrays of one item would be small and slow; else empty."""
    starts: Sequence[int]
    """First column of each item."""
    digest_columns: dict[int, int]
    """Item that has a digest -> its column in `digests`."""
    digests: NDArray[np.uint64]
    """One row for each rank."""

    def boxes(self, item: int) -> NDArray[np.int64]:
        """Returns offsets and lengths of one item of all these ranks: shape (ranks, 2, dimensions)."""
        columns = self.coordinates[:, self.starts[item] : self.starts[item + 1]]
        return columns.astype(np.int64).reshape(len(self.ranks), 2, len(self.shapes[item]))

    def boxes_of(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the boxes of many items, of tensors with equally many dimensions, as an array of shape (items, ranks,
        2, dimensions).
        """
        num_dims, first, last = len(self.shapes[items[0]]), int(items[0]), int(items[-1])
        if (np.diff(items) == 1).all():  # then their columns are adjacent: a slice is no copy
            columns = self.coordinates[:, self.starts[first] : self.starts[last + 1]]
        else:
            columns = self.coordinates[:, np.array(self.starts)[items][:, None] + np.arange(2 * num_dims)]
        boxes = columns.reshape(len(self.ranks), len(items), 2, num_dims).swapaxes(0, 1)
        return boxes.astype(np.int64, order="C")

    def regions(self, item: int) -> list[Region]:
        """Returns the region of one item on each of the `ranks`, in their order."""
        if not self.rows:
            return [Region(tuple(offsets), tuple(lengths)) for offsets, lengths in self.boxes(item).tolist()]
        start, end = self.starts[item : item + 2]
        middle = (start + end) // 2
        return [Region(tuple(row[start:middle]), tuple(row[middle:end])) for row in self.rows]


def unpack_items(packed: Sequence[PackedItems]) -> list[ItemTable]:
    """Returns a table for each set of ranks with items of the same tensors, in the order of the sets' first ranks.
    `packed[r]` comes from rank r.
    """
    by_tensors: dict[bytes, list[int]] = {}
    for rank, of_rank in enumerate(packed):
        by_tensors.setdefault(of_rank.described, []).append(rank)
    return [_unpack(described, ranks, packed) for described, ranks in by_tensors.items()]


def _unpack(content: bytes, ranks: Sequence[int], packed: Sequence[PackedItems]) -> ItemTable:
    """Returns the table of `ranks`, all of which have the tensors that `content` describes."""
    decompressor = zstandard.ZstdDecompressor()
    described = msgspec.msgpack.decode(decompressor.decompress(content), type=_Described)
    starts = [0, *accumulate(2 * len(shape) for shape in described.shapes)]
    largest = max((length for shape in described.shapes for length in shape), default=0)
    # Offsets and lengths should be at most a shape's: in a narrow type a million of them take a third of the memory.
    coordinates = np.empty((len(ranks), starts[-1]), np.uint32 if largest < 1 << 32 else np.int64)
    digests = np.empty((len(ranks), len(described.digested)), np.uint64)
    for row, rank in enumerate(ranks):
        of_rank = np.frombuffer(decompressor.decompress(packed[rank].coordinates), "<i8")
        if len(of_rank) and of_rank.view("<u8").max() > largest:  # a negative number is a large one in this view
            coordinates = coordinates.astype(np.int64)  # out of range: the planner's error shows these numbers
        coordinates[row] = of_rank
        digests[row] = np.frombuffer(packed[rank].digests, "<u8")
    return ItemTable(
        ranks=np.array(ranks, np.int32),
        fqns=described.fqns,
        dtypes=described.dtypes,
        shapes=described.shapes,
        coordinates=coordinates,
        rows=coordinates.tolist() if len(ranks) <= _FEW_RANKS else (),
        starts=starts,
        digest_columns={item: column for column, item in enumerate(described.digested)},
        digests=digests,
    )
