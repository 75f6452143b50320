"""What a reader passed on, received and put into tensors: straight into their memory where it is contiguous there, else
through scratch memory that all connections share. It knows nothing of who else takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np

from bytecheckpoint.distributed.connection import Connection, PeerLeftError
from bytecheckpoint.distributed.wire import Header, check_digest
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.loading.read import frame_with_target
from bytecheckpoint.loading.scatter import Targets, memory_of, place_all
from bytecheckpoint.manifest.ranges import Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import piece_of
from bytecheckpoint.planner.exchange_split import Arrival, packed
from bytecheckpoint.runtime.buffers import ByteBudget
from bytecheckpoint.storage.compression import decode_frame

_MIN_DIRECT_BYTES = 1 << 16
"""What is smaller goes through scratch memory, where it shares a system call with its neighbours."""


class Arrivals:
    """Where what is received goes. Used by one thread for each connection."""

    def __init__(
        self,
        targets: Targets,
        stored_fqns: Sequence[str],
        *,
        scratch_bytes: int,
        verify: bool,
        changes: StateChanges,
    ) -> None:
        self._targets = targets
        self._stored_fqns = stored_fqns
        self._scratch = ByteBudget(scratch_bytes)
        self._verify = verify
        self._changes = changes

    def take_in(self, connection: Connection, header: Header, arrival: Arrival) -> None:
        """Receives what follows the header, and puts it where it belongs.

        Raises CheckpointCorruptError (checksum) where it is not what was sent.
        """
        memory = [self._memory(item) for item in arrival.items]
        lengths = [piece_of(item).byte_length for item in arrival.items]
        if header.byte_length != sum(lengths):
            raise CheckpointError(
                f"rank {connection.peer.name} passed on {header.byte_length} bytes of {self._names(arrival)}, and "
                f"{sum(lengths)} were asked for: they were damaged on the way, or the ranks have different releases of "
                "bytecheckpoint",
                kind="rank_failed",
            )
        scratch_bytes = sum(length for length, into in zip(lengths, memory, strict=True) if into is None)
        decoding_bytes = max(map(_decoding_bytes, arrival.items), default=0)
        with self._scratch.taken(scratch_bytes + decoding_bytes):
            scratch = np.empty(scratch_bytes, np.uint8).data
            buffers = list(_buffers(memory, lengths, scratch))
            is_direct = any(into is not None for into in memory)
            with self._changes.overwriting() if is_direct else nullcontext():
                for buffer in buffers:
                    connection.receive_into(buffer)
            if self._verify:
                check_digest(header, buffers, reader=connection.peer.name, wanted_by=self._names(arrival))
            position = 0
            parts: list[Part] = []
            for item, into, length in zip(arrival.items, memory, lengths, strict=True):
                if into is not None:
                    continue
                if isinstance(item, Frame):
                    self._place_frame(item, scratch[position : position + length])
                else:
                    parts.append(packed(item, position))
                position += length
            with self._changes.overwriting() if parts else nullcontext():
                place_all(parts, 0, self._targets, scratch)

    def put(self, fetch: Fetch, content: memoryview) -> None:
        """Puts what a fetch is for where it belongs. `content` is what it would read, is verified and is writable."""
        for frame in fetch.frames:
            self._place_frame(frame, content[frame.byte_offset - fetch.byte_offset :][: frame.byte_length])
        with self._changes.overwriting() if fetch.parts else nullcontext():
            place_all(fetch.parts, fetch.byte_offset, self._targets, content)

    def break_off(self) -> None:
        """Nobody waits for scratch memory any longer."""
        self._scratch.break_off(PeerLeftError)

    def _memory(self, item: Part | Frame) -> memoryview | None:
        """The tensor memory that the bytes of an item are for, where that is worth while."""
        if not isinstance(item, FlatPart) or item.byte_length < _MIN_DIRECT_BYTES:
            return None
        return memory_of(item, self._targets)

    def _place_frame(self, item: Frame, content: memoryview) -> None:
        frame = frame_with_target(item, self._targets, self._changes)
        raw = np.empty(frame.raw_bytes, np.uint8).data if frame.target is None else frame.target
        decode_frame(frame.codec, content, frame.item_bytes, raw)
        frame.place(raw)

    def _names(self, arrival: Arrival) -> str:
        parts = [part for item in arrival.items for part in (item.parts if isinstance(item, Frame) else (item,))]
        return ", ".join(sorted({self._stored_fqns[part.want] for part in parts})[:3])


def _decoding_bytes(item: Part | Frame) -> int:
    """A frame is there twice while it is undone: as the codec gives it, and in its order."""
    return 2 * item.raw_bytes if isinstance(item, Frame) else 0


def _buffers(memory: Sequence[memoryview | None], lengths: Sequence[int], scratch: memoryview) -> Iterator[memoryview]:
    """Where the bytes of a parcel go, in order; neighbours in scratch memory as one."""
    start = end = 0
    for into, length in zip(memory, lengths, strict=True):
        if into is None:
            end += length
            continue
        if start < end:
            yield scratch[start:end]
        start = end
        yield into
    if start < end:
        yield scratch[start:end]
