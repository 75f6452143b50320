"""Chunk locations, packed by each rank and made into the columns of a manifest by the coordinator. Ranks with the same
shards mostly report the same bytes, which are decoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zstandard

from bytecheckpoint.manifest import Columns
from bytecheckpoint.planner.file_layout import PlacedChunk
from bytecheckpoint.planner.save_plan import PlannedTensor
from bytecheckpoint.planner.write_items import ItemRegion
from bytecheckpoint.saving.plans.rank_plan import RankPlan
from bytecheckpoint.staging.compress import ChunkLocation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ZSTD_LEVEL = 1
_NOT_WRITTEN = (1 << 32) - 1
_CHUNKS_AT_ONCE = 1 << 20


class _RankLocations(msgspec.Struct, frozen=True, array_like=True):
    """Chunk locations of a rank, an array element for each slot of its writes (see SavePlan), written or not."""

    files: bytes
    """File numbers, or _NOT_WRITTEN, as u4."""
    byte_offsets: bytes
    byte_lengths: bytes
    codecs: bytes
    """Indices into `codec_names`."""
    codec_names: list[str]


def pack_locations(locations: Iterable[tuple[PlacedChunk, int, ChunkLocation]], plan: RankPlan) -> bytes:
    """Packs the chunk locations of a rank: of each chunk the number of its file and the location there."""
    slots_of_parts = {part: plan.num_items + index for index, part in enumerate(plan.parts)}
    num_slots = plan.num_items + len(plan.parts)
    files, codecs = np.full(num_slots, _NOT_WRITTEN, "<u4"), np.zeros(num_slots, "<u4")
    byte_offsets, byte_lengths = np.zeros(num_slots, "<u8"), np.zeros(num_slots, "<u8")
    indices = {"none": 0}
    for chunk, number, location in locations:
        slot = slots_of_parts.get(ItemRegion(chunk.item, chunk.region), chunk.item)
        files[slot], byte_offsets[slot], byte_lengths[slot] = number, location.byte_offset, location.byte_length
        codecs[slot] = indices.setdefault(location.codec, len(indices))
    packed = _RankLocations(
        files.tobytes(), byte_offsets.tobytes(), byte_lengths.tobytes(), codecs.tobytes(), codec_names=list(indices)
    )
    return zstandard.compress(msgspec.msgpack.encode(packed), _ZSTD_LEVEL)


class ChunkLocations:
    """Chunk locations of all ranks, `packed[r]` from rank r. The arrays hold the slots of one rank after those of
    another; ranks that report the same bytes share their slots there.
    """

    def __init__(self, packed: Sequence[bytes]) -> None:
        index_of = {content: index for index, content in enumerate(dict.fromkeys(packed))}
        decompressor = zstandard.ZstdDecompressor()
        distinct_locations = [
            msgspec.msgpack.decode(decompressor.decompress(content), type=_RankLocations) for content in index_of
        ]
        self._distinct_index = np.array([index_of[content] for content in packed])
        self._bounds = np.array([0, *accumulate(len(each.files) // 4 for each in distinct_locations)])
        self._files = np.frombuffer(b"".join(each.files for each in distinct_locations), "<u4")
        self._byte_offsets = np.frombuffer(b"".join(each.byte_offsets for each in distinct_locations), "<u8")
        self._byte_lengths = np.frombuffer(b"".join(each.byte_lengths for each in distinct_locations), "<u8")
        self._codec_names = list(dict.fromkeys(name for each in distinct_locations for name in each.codec_names))
        self._codecs = np.concatenate([self._codec_column(each) for each in distinct_locations])

    def _codec_column(self, locations: _RankLocations) -> NDArray[np.integer]:
        indices = np.array([self._codec_names.index(name) for name in locations.codec_names], np.uint8)
        column: NDArray[np.integer] = indices[np.frombuffer(locations.codecs, "<u4")]
        return column

    def is_written(self, rank: int) -> NDArray[np.bool_]:
        """Returns a flag for each slot of a rank, True if the rank reports it as written."""
        is_written: NDArray[np.bool_] = self._files[self._slots(rank)] != _NOT_WRITTEN
        return is_written

    def num_bytes(self, rank: int) -> int:
        """Returns the number of bytes that the chunks of a rank take in its files."""
        return int(self._byte_lengths[self._slots(rank)].sum())

    def _slots(self, rank: int) -> slice:
        index = self._distinct_index[rank]
        return slice(self._bounds[index], self._bounds[index + 1])

    def columns(self, tensors: Sequence[PlannedTensor], starts: Sequence[Sequence[int]]) -> Columns:
        """Returns the columns of these tensors for a manifest that lists the files of all ranks in order of rank.
        `starts` has, by rank and file, the byte of the file from which its chunk locations count.
        """
        num_chunks = np.array([len(tensor.ranks) for tensor in tensors], np.int64)
        is_compressed = len(self._codec_names) > 1
        dtype_indices = {dtype: index for index, dtype in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors))}
        total = int(num_chunks.sum())
        files, byte_offsets = np.empty(total, np.uint32), np.empty(total, np.uint64)
        byte_lengths, codecs = (np.empty(total if is_compressed else 0, kind) for kind in (np.uint64, np.uint8))
        first_files = np.array([0, *accumulate(map(len, starts))])
        all_starts = np.fromiter(chain.from_iterable(starts), np.uint64)
        for batch, chunks in _batches(tensors, num_chunks):
            ranks = np.concatenate([np.asarray(tensor.ranks, np.int32) for tensor in batch])
            positions = self._bounds[self._distinct_index[ranks]]
            positions += np.concatenate([np.asarray(tensor.slots, np.int32) for tensor in batch])
            if len({len(tensor.ranks) for tensor in batch}) == 1:
                # Rank by rank: the slots of one for these tensors are adjacent, those of many ranks for one are not.
                positions = np.ascontiguousarray(positions.reshape(len(batch), -1).T)
            files[chunks] = first_files[ranks] + self._files[positions].T.ravel()
            byte_offsets[chunks] = all_starts[files[chunks]] + self._byte_offsets[positions].T.ravel()
            if is_compressed:
                byte_lengths[chunks] = self._byte_lengths[positions].T.ravel()
                codecs[chunks] = self._codecs[positions].T.ravel()
        return Columns(
            dtype_names=list(dtype_indices),
            dtypes=np.array([dtype_indices[tensor.dtype] for tensor in tensors], np.uint32),
            num_dims=np.array([len(tensor.shape) for tensor in tensors], np.int64),
            num_chunks=num_chunks,
            shapes=_flat(tensor.shape for tensor in tensors),
            is_grid=np.array([tensor.part is not None for tensor in tensors], bool),
            grid_parts=_flat(tensor.part for tensor in tensors if tensor.part is not None),
            coordinates=_flat(tensor.coordinates for tensor in tensors),
            files=files,
            byte_offsets=byte_offsets,
            byte_lengths=byte_lengths,
            codec_names=self._codec_names if is_compressed else [],
            codecs=codecs,
        )


def _batches(
    tensors: Sequence[PlannedTensor], num_chunks: NDArray[np.int64]
) -> Iterator[tuple[Sequence[PlannedTensor], slice]]:
    """Yields runs of tensors with few enough chunks for temporary arrays, each with the range of its chunks."""
    ends = np.cumsum(num_chunks)
    first, start = 0, 0
    while first < len(tensors):
        last = max(first + 1, int(np.searchsorted(ends, start + _CHUNKS_AT_ONCE, side="right")))
        end = int(ends[last - 1])
        yield tensors[first:last], slice(start, end)
        first, start = last, end


def _flat(numbers: Iterable[Sequence[int] | NDArray[np.int64]]) -> NDArray[np.uint64]:
    return np.concatenate([np.zeros(0, np.uint64), *(np.asarray(each, np.uint64) for each in numbers)])
