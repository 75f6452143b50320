"""Puts bytes that other ranks have read into tensors. What another host has sent comes first into memory that the ranks
of this one share. What the coordinator broadcasts arrives without a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, chain, pairwise

import numpy as np
import xxhash

from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import WireHeader, check_digest, damaged, view_pieces
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.byte_ranges import ByteRange, first_names, piece_of
from bytecheckpoint.planner.coalesce import fetch_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents
from bytecheckpoint.runtime.buffers import ByteBudget
from bytecheckpoint.storage.compression import decode_frame

_MOST_OF_A_UNIT = 0.95


class Receiver:
    """Puts bytes that other ranks have read into tensors. Used by several threads."""

    def __init__(self, source: Source, match: Match, targets: Targets, *, scratch_bytes: int) -> None:
        self.scratch = ByteBudget(scratch_bytes)
        self._source = source
        self._stored_fqns = match.stored_fqns
        self._targets = targets

    def receive(
        self,
        connection: Connection,
        header: WireHeader,
        fetch: Fetch,
        *,
        pieces: Sequence[ByteRange],
        content: memoryview,
    ) -> None:
        """Receives the pieces that follow the header into their places in `content`, the memory of the unit. Bytes
        between the pieces are not changed.

        Raises CheckpointError (rank_failed) if the header announces another length, and, if the options have `verify`,
        CheckpointCorruptError (checksum) if the bytes received are not those that were sent.
        """
        names = first_names(self._stored_fqns[part.want] for part in fetch.all_parts) or "what other ranks wanted"
        num_bytes = sum(piece.byte_length for piece in pieces)
        if header.byte_length != num_bytes:
            raise CheckpointError(
                f"rank {connection.global_rank} passed on {header.byte_length} bytes of {names}, and {num_bytes} "
                "were asked for: they were damaged on the way, or the ranks have different releases of bytecheckpoint",
                kind="rank_failed",
            )
        views = view_pieces(content, fetch.byte_offset, pieces)
        is_whole = len(views) == 1 and views[0].ndim == 1
        with nullcontext() if is_whole else self.scratch.taken(num_bytes):
            received = views[0] if is_whole else np.empty(num_bytes, np.uint8)
            connection.receive_into(received.data)
            if self._source.options.verify:
                check_digest(header, [received.data], reader=connection.global_rank, wanted_by=names)
            for view, end in [] if is_whole else zip(views, accumulate(view.size for view in views), strict=True):
                view[...] = received[end - view.size : end].reshape(view.shape)

    def place(self, fetch: Fetch, content: memoryview) -> None:
        """Puts the bytes of a fetch into the tensors; decodes its frames. `content` is writable, and was verified
        before if the options ask for that.
        """
        if not fetch.all_parts:
            return
        fetch = self._source.with_place(fetch._replace(is_direct=False), self._targets, self._stored_fqns)
        # A frame is in memory twice while it is decoded: shuffled, as the codec returns it, and in order.
        with self.scratch.taken(max((2 * frame.raw_bytes for frame in fetch.frames), default=0)):
            for frame in fetch.frames:
                encoded = content[frame.byte_offset - fetch.byte_offset :][: frame.byte_length]
                raw = np.empty(frame.raw_bytes, np.uint8).data if frame.target is None else frame.target
                decode_frame(frame.codec, encoded, frame.item_bytes, raw)
                frame.place(raw)
        fetch.place(content)


def pieces_of(fetch: Fetch) -> tuple[ByteRange, ...]:
    """Returns the ranges of the file that the parts and frames of a fetch want."""
    return tuple(map(piece_of, (*fetch.parts, *fetch.frames)))


def united(fetch: Fetch, requests: Iterable[Iterable[ByteRange]]) -> tuple[ByteRange, ...]:
    """Returns the pieces to ask for if several ranks want pieces of a unit: the whole unit as one piece if their pieces
    add up to nearly all of it, else each of these pieces once.
    """
    pieces = tuple(dict.fromkeys(chain.from_iterable(requests)))
    is_most = sum(piece.byte_length for piece in pieces) >= _MOST_OF_A_UNIT * fetch.byte_length
    return (ByteRange(fetch.byte_offset, (fetch.byte_length,), (1,)),) if is_most else pieces


def read_common(
    common: Sequence[tuple[int, ExtentRun]], extents: Extents, ranks: Ranks, source: Source, lanes: CopyStreams
) -> dict[tuple[int, int], memoryview]:
    """Reads the few bytes that many ranks want, such as an optimizer's `step`: the runs in `common`, each after its
    reader rank. Returns the content of each run, by its file and byte offset. The reader rank passes it to the
    coordinator, which broadcasts it: no rank connects to another one for it. All ranks must call this with the same
    runs.

    Raises the errors of reading, and, if the options have `verify`, CheckpointCorruptError (checksum) for bytes that
    were damaged since.
    """
    if not common:
        return {}
    readers, runs = zip(*common, strict=True)
    fetches = [fetch_of(run.file, *extents.span(run), ()) for run in runs]
    bounds = [*accumulate((fetch.byte_length for fetch in fetches), initial=0)]
    content = memoryview(bytearray(bounds[-1]))
    parts = [content[start:end] for start, end in pairwise(bounds)]
    own = [number for number, reader in enumerate(readers) if reader == ranks.rank]
    given: Callable[[memoryview], AbstractContextManager[memoryview]] = nullcontext
    reads = [
        fetches[number]._replace(target=partial(given, parts[number]), wanted_by=lambda *_: "what all ranks want")
        for number in own
    ]
    if reads:
        source.expect_bytes(reads)
    source.run(reads, lanes)
    if {*readers} != {COORDINATOR}:
        _gather_common(parts, readers, ranks)
    content[:] = ranks.broadcast(bytes(content))
    if source.options.verify:
        for run, reader, part in zip(runs, readers, parts, strict=True):
            name = f"rank {ranks.global_ranks[reader]}"
            _verify(part, run, extents.bounds(run.file), source.manifest.files[run.file], reader=name)
    return {(fetch.file, fetch.byte_offset): part for fetch, part in zip(fetches, parts, strict=True)}


def _gather_common(parts: Sequence[memoryview], readers: Sequence[int], ranks: Ranks) -> None:
    """Fills `parts` on the coordinator with what the reader of each has read."""
    own = b"".join(part for part, reader in zip(parts, readers, strict=True) if reader == ranks.rank)
    for reader, payload in enumerate(ranks.gather(own)):
        left = memoryview(payload)
        for part in (part for part, of_rank in zip(parts, readers, strict=True) if of_rank == reader):
            part[:], left = left[: part.nbytes], left[part.nbytes :]


def _verify(content: memoryview, run: ExtentRun, bounds: Sequence[int], file: DataFile, *, reader: str) -> None:
    """Raises CheckpointCorruptError (checksum) if an extent does not match its checksum in the manifest, even if its
    bytes changed only in the memory of the reader rank.
    """
    for number in range(run.first, run.end) if file.extent_lengths else ():
        start, end = bounds[number], bounds[number + 1]
        part = content[start - bounds[run.first] : end - bounds[run.first]]
        if xxhash.xxh3_64_intdigest(part) != file.extent_digests[number]:
            raise damaged(f"bytes {start} to {end} of {file.name}, which {reader} had read for all ranks, were")
