"""Puts bytes that other ranks have read into tensors: straight into their memory where they are contiguous there, else
through scratch memory that all connections share. What the coordinator broadcasts arrives without a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import WireHeader, check_digest, damaged
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.scatter import Targets, memory_of
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch, Frame, Part
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.byte_ranges import ByteRange, first_names, piece_of
from bytecheckpoint.planner.coalesce import fetch_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare, packed
from bytecheckpoint.runtime.buffers import ByteBudget
from bytecheckpoint.storage.compression import decode_frame

_MIN_DIRECT_BYTES = 1 << 16
"""Smaller pieces go through scratch memory, where they share a system call with their neighbours."""


class Receiver:
    """The destination of received bytes. Used by one thread for each connection."""

    def __init__(self, source: Source, match: Match, targets: Targets, *, scratch_bytes: int) -> None:
        self.scratch = ByteBudget(scratch_bytes)
        self._source = source
        self._stored_fqns = match.stored_fqns
        self._targets = targets

    def pieces(self, fetch: Fetch) -> tuple[ByteRange, ...]:
        """Returns the pieces to ask for, in the order in which `receive` takes them."""
        direct, others = self._split(fetch)
        return tuple(map(piece_of, (*(part for part, _ in direct), *others)))

    def receive(self, connection: Connection, header: WireHeader, fetch: Fetch) -> None:
        """Receives the pieces behind the header, and puts them into the tensors.

        Raises CheckpointCorruptError (checksum) if they are not those that were sent.
        """
        direct, others = self._split(fetch)
        bounds = [*accumulate((piece_of(item).byte_length for item in others), initial=0)]
        scratch_bytes = bounds[-1]
        num_bytes = scratch_bytes + sum(part.byte_length for part, _ in direct)
        names = first_names(self._stored_fqns[part.want] for part in fetch.all_parts)
        if header.byte_length != num_bytes:
            raise CheckpointError(
                f"rank {connection.global_rank} passed on {header.byte_length} bytes of {names}, and {num_bytes} "
                "were asked for: they were damaged on the way, or the ranks have different releases of bytecheckpoint",
                kind="rank_failed",
            )
        # A frame is there twice while it is decoded: as the codec returns it, and in its order.
        decoding_bytes = max((2 * frame.raw_bytes for frame in fetch.frames), default=0)
        with self.scratch.taken(scratch_bytes + decoding_bytes):
            scratch = np.empty(scratch_bytes, np.uint8).data
            buffers = [*(memory for _, memory in direct), scratch]
            with self._source.changes.overwriting() if direct else nullcontext():
                for buffer in buffers:
                    connection.receive_into(buffer)
            if self._source.options.verify:
                check_digest(header, buffers, reader=connection.global_rank, wanted_by=names)
            self.place(fetch_of(fetch.file, 0, scratch_bytes, [*map(packed, others, bounds)]), scratch)

    def place(self, fetch: Fetch, content: memoryview) -> None:
        """Puts the verified, writable bytes of a fetch into the tensors."""
        indirect = fetch._replace(is_direct=False)
        (fetch,) = self._source.with_targets([indirect], self._targets, self._stored_fqns)
        for frame in fetch.frames:
            encoded = content[frame.byte_offset - fetch.byte_offset :][: frame.byte_length]
            raw = np.empty(frame.raw_bytes, np.uint8).data if frame.target is None else frame.target
            decode_frame(frame.codec, encoded, frame.item_bytes, raw)
            frame.place(raw)
        fetch.place(content)

    def _split(self, fetch: Fetch) -> tuple[list[tuple[Part, memoryview]], list[Part | Frame]]:
        """Returns the parts that are received straight into tensor memory, with that memory, and the other items."""
        direct: list[tuple[Part, memoryview]] = []
        others: list[Part | Frame] = []
        for part in fetch.parts:
            memory = memory_of(part, self._targets) if part.byte_length >= _MIN_DIRECT_BYTES else None
            others.append(part) if memory is None else direct.append((part, memory))
        return direct, [*others, *fetch.frames]


def read_common(
    share: ReaderShare, extents: Extents, ranks: Ranks, source: Source, lanes: CopyStreams
) -> dict[tuple[int, int], memoryview]:
    """Returns few bytes that many ranks want, such as an optimizer's `step`: the content of each run, by its file and
    byte offset. Its reader passes it to the coordinator, which broadcasts it, so that no rank connects to another one
    for them. All ranks must call this with the same runs.

    Raises the errors of reading, and CheckpointCorruptError (checksum) for bytes that were damaged since.
    """
    runs, readers = share.common, share.common_readers
    if not runs:
        return {}
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
    """Brings what each reader has read to the coordinator."""
    own = b"".join(part for part, reader in zip(parts, readers, strict=True) if reader == ranks.rank)
    for reader, payload in enumerate(ranks.gather(own)):
        left = memoryview(payload)
        for part in (part for part, of_rank in zip(parts, readers, strict=True) if of_rank == reader):
            part[:], left = left[: part.nbytes], left[part.nbytes :]


def _verify(content: memoryview, run: ExtentRun, bounds: Sequence[int], file: DataFile, *, reader: str) -> None:
    """Compares each extent with the manifest, which finds bytes that changed in the reader's memory, too."""
    for number in range(run.first, run.end) if file.extent_lengths else ():
        start, end = bounds[number], bounds[number + 1]
        part = content[start - bounds[run.first] : end - bounds[run.first]]
        if xxhash.xxh3_64_intdigest(part) != file.extent_digests[number]:
            raise damaged(f"bytes {start} to {end} of {file.name}, which {reader} had read for all ranks, were")
