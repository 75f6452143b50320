"""What ranks offer to write: as records on the rank that holds the tensors, packed on the way to the coordinator, and
there as tables of all ranks that hold parts of the same tensors, because thousands of them mostly do.
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


class Offer(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class Write(NamedTuple):
    """A chunk that a rank is to write."""

    offer: int
    """Index into that rank's offers."""
    region: Region
    """What of the offered region, in global coordinates."""


class PackedOffers(msgspec.Struct, frozen=True, array_like=True):
    """All offers of one rank. Travels between ranks."""

    described: bytes
    """What they are parts of: the same bytes on ranks that hold parts of the same tensors, in the same order."""
    coordinates: bytes
    digests: bytes


class _Described(msgspec.Struct, frozen=True, array_like=True):
    fqns: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    digested: list[int]
    """Which offers have a digest."""


def pack_offers(offers: Sequence[Offer]) -> PackedOffers:
    """The offers of a rank, in few bytes."""
    described = _Described(
        [offer.fqn for offer in offers],
        [offer.dtype for offer in offers],
        [offer.shape for offer in offers],
        [index for index, offer in enumerate(offers) if offer.digest is not None],
    )
    coordinates = [number for offer in offers for number in (*offer.offsets, *offer.lengths)]
    digests = [offer.digest for offer in offers if offer.digest is not None]
    return PackedOffers(
        zstandard.compress(msgspec.msgpack.encode(described), _ZSTD_LEVEL),
        zstandard.compress(np.array(coordinates, "<i8").tobytes(), _ZSTD_LEVEL),
        np.array(digests, "<u8").tobytes(),
    )


@dataclass(frozen=True, slots=True)
class AlikeRanks:
    """The offers of ranks that hold parts of the same tensors, in the same order."""

    ranks: NDArray[np.int32]
    """Rising."""
    fqns: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    coordinates: NDArray[np.integer]
    """A row a rank: offsets and lengths of one offer after the other."""
    rows: Sequence[Sequence[int]]
    """The same as lists, where the ranks are few: of these, arrays of one offer would be small and slow."""
    starts: Sequence[int]
    """Where those of each offer begin."""
    digest_columns: dict[int, int]
    """Of the offers that have a digest: which column of `digests` has it."""
    digests: NDArray[np.uint64]
    """A row a rank."""

    def boxes(self, offer: int) -> NDArray[np.int64]:
        """Offsets and lengths of one offer of all these ranks: shape (ranks, 2, dimensions)."""
        columns = self.coordinates[:, self.starts[offer] : self.starts[offer + 1]]
        return columns.astype(np.int64).reshape(len(self.ranks), 2, len(self.shapes[offer]))

    def boxes_of(self, offers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of many offers, of tensors with as many dimensions: shape (offers, ranks, 2, dimensions)."""
        num_dims = len(self.shapes[offers[0]])
        columns = np.array(self.starts)[offers][:, None] + np.arange(2 * num_dims)
        boxes = self.coordinates[:, columns].astype(np.int64).reshape(len(self.ranks), len(offers), 2, num_dims)
        return boxes.swapaxes(0, 1)

    def regions(self, offer: int) -> list[Region]:
        """Of one offer of all these ranks."""
        if not self.rows:
            return [Region(tuple(offsets), tuple(lengths)) for offsets, lengths in self.boxes(offer).tolist()]
        start, end = self.starts[offer : offer + 2]
        middle = (start + end) // 2
        return [Region(tuple(row[start:middle]), tuple(row[middle:end])) for row in self.rows]


def unpack_offers(packed: Sequence[PackedOffers]) -> list[AlikeRanks]:
    """The offers of all ranks, `packed[r]` those of rank r, by what they are parts of; in the order of lowest ranks."""
    alike: dict[bytes, list[int]] = {}
    for rank, of_rank in enumerate(packed):
        alike.setdefault(of_rank.described, []).append(rank)
    return [_unpack(described, ranks, packed) for described, ranks in alike.items()]


def _unpack(content: bytes, ranks: Sequence[int], packed: Sequence[PackedOffers]) -> AlikeRanks:
    decompressor = zstandard.ZstdDecompressor()
    described = msgspec.msgpack.decode(decompressor.decompress(content), type=_Described)
    starts = [0, *accumulate(2 * len(shape) for shape in described.shapes)]
    largest = max((length for shape in described.shapes for length in shape), default=0)
    # Offsets and lengths should be at most a shape's: in a narrow type a million of them take a third of the memory.
    coordinates = np.empty((len(ranks), starts[-1]), np.uint32 if largest < 1 << 32 else np.int64)
    digests = np.empty((len(ranks), len(described.digested)), np.uint64)
    for row, rank in enumerate(ranks):
        of_rank = np.frombuffer(decompressor.decompress(packed[rank].coordinates), "<i8")
        if len(of_rank) and (of_rank.min() < 0 or of_rank.max() > largest):
            coordinates = coordinates.astype(np.int64)  # it is wrong, and is refused with these numbers
        coordinates[row] = of_rank
        digests[row] = np.frombuffer(packed[rank].digests, "<u8")
    return AlikeRanks(
        ranks=np.array(ranks, np.int32),
        fqns=described.fqns,
        dtypes=described.dtypes,
        shapes=described.shapes,
        coordinates=coordinates,
        rows=coordinates.tolist() if len(ranks) <= _FEW_RANKS else (),
        starts=starts,
        digest_columns={offer: column for column, offer in enumerate(described.digested)},
        digests=digests,
    )
