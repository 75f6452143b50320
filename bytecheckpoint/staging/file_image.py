"""Images of data files: the plan of each file, and any range of its bytes gathered from live tensors into host memory.
snapshots.py decides when, and into which memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.shard_columns import ShardBlocks
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.manifest.frames import count_frames, frame_bytes
from bytecheckpoint.manifest.plain_wire import unsupported
from bytecheckpoint.manifest.ranges import Block, cut_blocks
from bytecheckpoint.memory.batched_copy import gather_pieces
from bytecheckpoint.memory.device_to_host import has_streams
from bytecheckpoint.memory.tensor_bytes import is_row_major_on_host, narrowed, to_host, view_region
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.file_layout import CodecOption, PlacedChunk, codec_of, cut_extents, lay_out_files
from bytecheckpoint.planner.write_items import ItemRegion, WriteItem
from bytecheckpoint.region import Region, split_rows, whole
from bytecheckpoint.storage.object_io import BLOCK_BYTES
from bytecheckpoint.storage.safetensors_header import chunk_entry, encode_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

COPY_BYTES = 4 << 20
"""Bytes copied at a time of a tensor that is not flat on the host."""

MAX_COMPRESSED_FILE_BYTES = 64 << 20
"""Bytes of tensors in a compressed file, before compression. Such files are put together in memory, two at a time:
with the scratch memory, less than 256 MB."""

_NO_LIMIT = 1 << 62
_HEADER_METADATA = {"format": "pt"}
"""Some readers refuse safetensors files that do not name a framework."""


class PlannedFile(NamedTuple):
    """A data file before its bytes are gathered. Holds no tensor, and serves every save with the same plan."""

    chunks: Sequence[PlacedChunk]
    parts: Sequence[Region | None]
    """Region of each chunk; None if it is all of its shard."""
    codecs: Sequence[str]
    """Codec of each chunk; empty if none is compressed."""
    header: bytes
    """Empty if chunks are compressed, because it has their compressed lengths."""
    extent_lengths: Sequence[int]
    """Lengths in bytes that add up to `byte_length`; empty if chunks are compressed."""
    blocks: Sequence[Block]
    """Without content: the ranges in which the file is gathered, in whole extents, or in whole frames if chunks are
    compressed."""
    byte_length: int
    """Length of header and chunks before compression."""
    lengths: Int64s
    """Bytes of each chunk before compression."""
    whole_items: Int64s
    """Index of the write item of each chunk that is all of its shard, -1 for the others."""
    is_frozen: bool = False
    """True if its tensors are expected not to change, so that a later save may reuse the file."""


def cut_to_files(shard: LocalShard, options: SaveOptions) -> list[LocalShard]:
    """Returns the shard, cut by rows into parts that fit into a file each if it is compressed and too large for one."""
    max_bytes = min(options.max_file_bytes, MAX_COMPRESSED_FILE_BYTES)
    if shard.tensor.nbytes <= max_bytes or codec_of(shard.fqn, options.codec) == "none":
        return [shard]
    parts = split_rows(shard.region, max_bytes // shard.tensor.element_size())
    return [shard._replace(region=part, tensor=view_region(shard, part), address=0) for part in parts]


class FileApart(NamedTuple):
    """The contents of a data file that is planned apart from others, in the same way on each rank that holds them."""

    writes: Sequence[ItemRegion]
    groups: Sequence[Sequence[int]]
    """As in `lay_out_files`; items that are not in the file are ignored."""
    state_bytes: int
    """Approximate size of the checkpoint, as in `cut_extents`."""
    is_frozen: bool = False


def plan_apart(number: int, apart: FileApart, items: Sequence[WriteItem]) -> PlannedFile:
    """Returns the one data file of these writes, which is not compressed."""
    (chunks,) = lay_out_files(items, apart.writes, groups=apart.groups, max_file_bytes=_NO_LIMIT)
    return _plan_file(number, chunks, items, apart.state_bytes)._replace(is_frozen=apart.is_frozen)


def plan_files(
    items: Sequence[WriteItem],
    writes: Sequence[ItemRegion],
    *,
    apart: Sequence[FileApart],
    groups: Sequence[Sequence[int]],
    max_file_bytes: int,
    codec: CodecOption,
    num_ranks: int,
    frozen: Collection[str],
) -> list[PlannedFile]:
    """Returns the data files of these writes of one rank, one of `num_ranks` that write about as much each. Those that
    are planned `apart` come first, and files of compressed tensors last. The FQNs in `frozen` share no file with
    other FQNs. `groups` is as in `lay_out_files`.
    """
    codecs = {index: codec_of(items[index].fqn, codec) for index in {write.item for write in writes}}

    def lay_out(*, is_raw: bool, max_bytes: int) -> list[tuple[bool, Sequence[PlacedChunk]]]:
        wanted = [write for write in writes if (codecs[write.item] == "none") == is_raw]
        by_kind: dict[bool, list[ItemRegion]] = {False: [], True: []}
        for write in wanted:
            by_kind[items[write.item].fqn in frozen].append(write)
        return [
            (is_frozen, chunks)
            for is_frozen, alike in by_kind.items()
            for chunks in lay_out_files(items, alike, groups=groups, max_file_bytes=max_bytes)
        ]

    files = [plan_apart(number, each, items) for number, each in enumerate(apart)]
    laid_out = lay_out(is_raw=True, max_bytes=max_file_bytes)
    state_bytes = num_ranks * sum(chunk.byte_length for _, chunks in laid_out for chunk in chunks)
    files += [
        _plan_file(number, chunks, items, max(state_bytes, *(each.state_bytes for each in apart), 0))._replace(
            is_frozen=is_frozen
        )
        for number, (is_frozen, chunks) in enumerate(laid_out, start=len(files))
    ]
    compressed = lay_out(is_raw=False, max_bytes=min(max_file_bytes, MAX_COMPRESSED_FILE_BYTES))
    return files + [
        _plan_compressed_file(number, chunks, items, [codecs[chunk.item] for chunk in chunks])._replace(
            is_frozen=is_frozen
        )
        for number, (is_frozen, chunks) in enumerate(compressed, start=len(files))
    ]


def _plan_file(number: int, chunks: Sequence[PlacedChunk], items: Sequence[WriteItem], state_bytes: int) -> PlannedFile:
    lengths, groups = [chunk.byte_length for chunk in chunks], [chunk.group for chunk in chunks]
    parts = _parts(chunks, items)
    header = encode_file_header([(chunk, chunk.byte_length, "none") for chunk in chunks])
    extent_lengths = cut_extents(len(header), lengths, block_bytes=BLOCK_BYTES, state_bytes=state_bytes, groups=groups)
    return PlannedFile(
        chunks=chunks,
        parts=parts,
        codecs=(),
        header=header,
        extent_lengths=extent_lengths,
        blocks=cut_blocks(extent_lengths, max_bytes=BLOCK_BYTES, file=number),
        byte_length=len(header) + sum(lengths),
        lengths=np.array(lengths, np.int64),
        whole_items=_whole_items(chunks, parts),
    )


def _plan_compressed_file(
    number: int, chunks: Sequence[PlacedChunk], items: Sequence[WriteItem], codecs: Sequence[str]
) -> PlannedFile:
    frames = [
        frame_bytes(chunk.byte_length, frame) for chunk in chunks for frame in range(count_frames(chunk.byte_length))
    ]
    blocks = cut_blocks(frames, max_bytes=BLOCK_BYTES, file=number)
    parts = _parts(chunks, items)
    lengths = np.array([chunk.byte_length for chunk in chunks], np.int64)
    return PlannedFile(chunks, parts, codecs, b"", (), blocks, sum(frames), lengths, _whole_items(chunks, parts))


def _parts(chunks: Sequence[PlacedChunk], items: Sequence[WriteItem]) -> list[Region | None]:
    return [None if chunk.region == items[chunk.item].region else chunk.region for chunk in chunks]


def _whole_items(chunks: Sequence[PlacedChunk], parts: Sequence[Region | None]) -> Int64s:
    both = zip(chunks, parts, strict=True)
    return np.array([chunk.item if part is None else -1 for chunk, part in both], np.int64)


def encode_file_header(chunks: Sequence[tuple[PlacedChunk, int, str]]) -> bytes:
    """Returns the header of a file with these chunks, each with its stored length in bytes and its codec."""
    return encode_header(
        [
            chunk_entry(chunk.fqn, chunk.dtype, chunk.shape, region=chunk.region, byte_length=num_bytes, codec=codec)
            for chunk, num_bytes, codec in chunks
        ],
        _HEADER_METADATA,
    )


class _TensorPiece(NamedTuple):
    """Consecutive bytes of a file, and the tensor that they are in."""

    tensor: torch.Tensor
    nbytes: int
    address: int
    """0 where the bytes have to be copied by torch."""


class LiveFile:
    """One data file whose bytes are those of live tensors.

    Flat host tensors are kept as addresses, so that one call gathers a thousand small ones; all others are copied.
    """

    def __init__(self, planned: PlannedFile, shards: ShardBlocks) -> None:
        self.planned = planned
        self._shards = shards  # keeps alive the memory behind the addresses
        located = np.append(shards.addresses(), 0)[planned.whole_items]  # the last, 0, is for shards that are not whole
        is_separate = (located == 0) & (planned.lengths > 0)
        separate_pieces = list(map(self._look_at, np.flatnonzero(is_separate).tolist()))
        num_pieces = np.ones(len(located), np.int64)
        num_pieces[is_separate] = list(map(len, separate_pieces))
        lengths, addresses = np.repeat(planned.lengths, num_pieces), np.repeat(located, num_pieces)
        places = np.flatnonzero(np.repeat(is_separate, num_pieces))
        pieces = list(chain.from_iterable(separate_pieces))
        lengths[places], addresses[places] = [piece.nbytes for piece in pieces], [piece.address for piece in pieces]
        header = planned.header
        self._lengths, self._addresses = np.append(len(header), lengths), np.append(_address_of(header), addresses)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._others = {
            place + 1: piece.tensor for place, piece in zip(places.tolist(), pieces, strict=True) if not piece.address
        }
        """Tensors that are not flat, or not on the host, by index. Their address is 0."""

    def _look_at(self, index: int) -> list[_TensorPiece]:
        """Returns the pieces of a chunk without an address in `shards`. Raises CheckpointSaveError for freed memory."""
        chunk, part = self.planned.chunks[index], self.planned.parts[index]
        shard = self._shards[chunk.item]
        tensor = shard.tensor if part is None else view_region(shard, part)
        if not is_row_major_on_host(tensor):
            return [_TensorPiece(each, each.nbytes, 0) for each in _in_copies(tensor)]
        address = tensor.data_ptr()
        if not address:
            advice = "save while it has its memory: outside of the context that frees it"
            raise unsupported(chunk.fqn, "a tensor whose memory has been freed", advice)
        return [_TensorPiece(tensor, chunk.byte_length, address)]

    def leave_out_devices(self) -> dict[int, torch.Tensor]:
        """Returns the tensors on devices with streams, by byte offset in the file. From now on `gather` skips them, and
        the caller copies them.
        """
        on_devices = {index: tensor for index, tensor in self._others.items() if has_streams(tensor.device)}
        for index in on_devices:
            self._lengths[index] = 0
        return {int(self._starts[index]): tensor for index, tensor in on_devices.items()}

    def gather(self, byte_offset: int, into: memoryview) -> None:
        """Fills this writable memory with the file's bytes from `byte_offset` on."""
        if not into.nbytes:
            return
        end = byte_offset + into.nbytes
        target = ctypes.addressof(ctypes.c_char.from_buffer(into)) - byte_offset
        first, last = np.searchsorted(self._starts, [byte_offset, end - 1], side="right").tolist()
        pieces = slice(first - 1, last)
        starts, lengths, addresses = self._starts[pieces], self._lengths[pieces], self._addresses[pieces]
        is_whole = (addresses != 0) & (starts >= byte_offset) & (starts + lengths <= end)
        gather_pieces(addresses[is_whole], target + starts[is_whole], lengths[is_whole])
        for index in (pieces.start + np.flatnonzero(~is_whole)).tolist():
            start = int(self._starts[index])
            skipped = max(byte_offset - start, 0)
            num_bytes = min(start + int(self._lengths[index]), end) - start - skipped
            if num_bytes > 0:
                copy = None if self._addresses[index] else to_host(self._others[index])
                address = int(self._addresses[index]) if copy is None else copy.data_ptr()
                ctypes.memmove(target + start + skipped, address + skipped, num_bytes)


def _in_copies(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor in parts of at most COPY_BYTES, because torch copies all of a tensor at once."""
    for region in split_rows(whole(tensor.shape), max(1, COPY_BYTES // tensor.element_size())):
        yield narrowed(tensor, region)


def _address_of(content: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0
