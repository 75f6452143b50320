"""Puts bytes that other ranks have read into tensors: straight into their memory where they are contiguous there, else
through scratch memory that all connections share. What the coordinator broadcasts arrives without a connection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from bytecheckpoint.distributed.connection import Connection, PeerLeftError
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import WireHeader, check_digest, damaged
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.loading.read import Source, frame_with_target
from bytecheckpoint.loading.scatter import Targets, memory_of, place_all
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch, Frame, Part
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.byte_ranges import ByteRange, first_names, piece_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents
from bytecheckpoint.planner.exchange_split import packed
from bytecheckpoint.runtime.buffers import ByteBudget
from bytecheckpoint.storage.compression import decode_frame

_MIN_DIRECT_BYTES = 1 << 16
"""Smaller pieces go through scratch memory, where they share a system call with their neighbours."""


class Receiver:
    """The destination of received bytes. Used by one thread for each connection."""

    def __init__(
        self, targets: Targets, stored_fqns: Sequence[str], *, scratch_bytes: int, verify: bool, changes: StateChanges
    ) -> None:
        self._targets = targets
        self._stored_fqns = stored_fqns
        self._scratch = ByteBudget(scratch_bytes)
        self._verify = verify
        self._changes = changes

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
        with self._scratch.taken(scratch_bytes + decoding_bytes):
            scratch = np.empty(scratch_bytes, np.uint8).data
            buffers = [*(memory for _, memory in direct), scratch]
            with self._changes.overwriting() if direct else nullcontext():
                for buffer in buffers:
                    connection.receive_into(buffer)
            if self._verify:
                check_digest(header, buffers, reader=connection.global_rank, wanted_by=names)
            self.place(map(packed, others, bounds), 0, scratch)

    def place(self, items: Iterable[Part | Frame], byte_offset: int, content: memoryview) -> None:
        """Puts verified, writable bytes, which begin at this byte of the file, into the tensors of these items."""
        parts: list[Part] = []
        for item in items:
            if not isinstance(item, Frame):
                parts.append(item)
                continue
            frame = frame_with_target(item, self._targets, self._changes)
            encoded = content[frame.byte_offset - byte_offset :][: frame.byte_length]
            raw = np.empty(frame.raw_bytes, np.uint8).data if frame.target is None else frame.target
            decode_frame(frame.codec, encoded, frame.item_bytes, raw)
            frame.place(raw)
        with self._changes.overwriting() if parts else nullcontext():
            place_all(parts, byte_offset, self._targets, content)

    def stop(self) -> None:
        """Ends all waits for scratch memory with PeerLeftError."""
        self._scratch.break_off(PeerLeftError)

    def _split(self, fetch: Fetch) -> tuple[list[tuple[Part, memoryview]], list[Part | Frame]]:
        """Returns the parts that are received straight into tensor memory, with that memory, and the other items."""
        direct: list[tuple[Part, memoryview]] = []
        others: list[Part | Frame] = []
        for part in fetch.parts:
            memory = memory_of(part, self._targets) if part.byte_length >= _MIN_DIRECT_BYTES else None
            others.append(part) if memory is None else direct.append((part, memory))
        return direct, [*others, *fetch.frames]


class CommonBytes:
    """Few bytes that many ranks want, such as an optimizer's `step`: the coordinator reads and broadcasts them, so that
    no rank connects to another one for them. The runs are in the order of the files.
    """

    def __init__(self, runs: Sequence[ExtentRun], extents: Extents) -> None:
        self._runs = runs
        self._extents = extents
        self._starts = [(run.file, extents.bounds(run.file)[run.first]) for run in runs]
        bounds = [*accumulate(map(extents.num_bytes, runs), initial=0)]
        self.content = memoryview(bytearray(bounds[-1]))
        self._contents = [self.content[start:end] for start, end in pairwise(bounds)]

    def broadcast(self, ranks: Ranks, source: Source, lanes: CopyStreams) -> None:
        """Reads the runs on the coordinator and sends them to all ranks, which must all call this.

        Raises the errors of reading, and CheckpointCorruptError (checksum) for bytes that were damaged since.
        """
        if not self._starts:
            return
        if ranks.rank == COORDINATOR:
            wanted = Fetch(0, 0, 0, (), is_direct=False, wanted_by=lambda *_: "what all ranks want")
            reads = [
                wanted._replace(file=file, byte_offset=start, byte_length=len(content), target=partial(_open, content))
                for (file, start), content in zip(self._starts, self._contents, strict=True)
            ]
            source.run(reads, lanes)
        self.content[:] = ranks.broadcast(bytes(self.content))
        if source.options.verify:
            self._verify(source.manifest.files)

    def _verify(self, files: Sequence[DataFile]) -> None:
        """Compares each extent with the manifest, which finds bytes that changed in the coordinator's memory, too."""
        for run, content in zip(self._runs, self._contents, strict=True):
            file, bounds = files[run.file], self._extents.bounds(run.file)
            for number in range(run.first, run.end) if file.extent_lengths else ():
                start, end = (bounds[each] - bounds[run.first] for each in (number, number + 1))
                if xxhash.xxh3_64_intdigest(content[start:end]) != file.extent_digests[number]:
                    what = f"bytes {bounds[number]} to {bounds[number + 1]} of {file.name}"
                    raise damaged(f"{what}, which rank 0 had read for all ranks, were")

    def place(self, fetches: Iterable[Fetch], receiver: Receiver) -> None:
        """Puts what this rank wants of the runs into its tensors; each fetch lies in one of them."""
        for fetch in fetches:
            number = bisect_right(self._starts, (fetch.file, fetch.byte_offset)) - 1
            first = fetch.byte_offset - self._starts[number][1]
            content = self._contents[number][first : first + fetch.byte_length]
            receiver.place((*fetch.parts, *fetch.frames), fetch.byte_offset, content)


def _open(content: memoryview) -> AbstractContextManager[memoryview]:
    return nullcontext(content)
