"""The wire format between a reader rank and its peers: the request of a peer, and for each unit that the reader rank
reads a header with the pieces that the peer asked for. Nothing here knows sockets or tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.planner.byte_ranges import ByteRange
from bytecheckpoint.runtime.buffers import ByteBudget

HEADER = struct.Struct("<QQQQ")
"""The layout of a WireHeader."""
DISCONNECT = HEADER.pack((1 << 64) - 1, 0, 0, 0)
"""Sent instead of a header by a reader rank whose load has failed."""
HEARTBEAT = HEADER.pack((1 << 64) - 2, 0, 0, 0)
"""Sent between units by a reader rank that makes progress, though not with what the peer waits for."""

UnitRequests = Mapping[tuple[int, int], tuple[ByteRange, ...]]
"""The pieces that a peer asks for, by the file number and the byte offset of their unit."""


class WireHeader(NamedTuple):
    """Precedes the pieces of a unit, or in `transfer` one piece."""

    file: int
    """Number of the file in the manifest; in `transfer` among the files that the sender offers."""
    byte_offset: int
    """Of the unit, or of that piece."""
    byte_length: int
    """Of all pieces together."""
    digest: int = 0
    """The xxh3-64 of the rest of the header and of all pieces; 0 if nothing is verified."""


def encode_request(request: UnitRequests) -> bytes:
    return with_digest(msgspec.msgpack.encode(list(request.items())))


def decode_request(message: bytes, *, peer: int) -> UnitRequests:
    """Decodes the request of the peer with this global rank. Raises CheckpointCorruptError (checksum)."""
    content = without_digest(message, peer=peer)
    return dict(msgspec.msgpack.decode(content, type=list[tuple[tuple[int, int], tuple[ByteRange, ...]]]))


def with_digest(request: bytes) -> bytes:
    """Returns a request behind its digest: a damaged one would bring intact bytes that were not asked for."""
    return xxhash.xxh3_64_digest(request) + request


def without_digest(message: bytes, *, peer: int) -> bytes:
    """Returns the request of the peer with this global rank. Raises CheckpointCorruptError (checksum)."""
    digest, request = message[:8], message[8:]
    if digest != xxhash.xxh3_64_digest(request):
        raise damaged(f"what rank {peer} asked for ({len(message)} bytes) was")
    return request


def view_pieces(content: memoryview, byte_offset: int, pieces: Sequence[ByteRange]) -> list[np.ndarray]:
    """Returns the pieces of a unit as views into its content, which begins at this byte of the file; one-dimensional
    where a piece is a single row. Raises ValueError if a piece is not inside of the unit.
    """
    return [np.ndarray(lengths, np.uint8, content, first - byte_offset, strides) for first, lengths, strides in pieces]


def seal(header: WireHeader, buffers: Sequence[memoryview]) -> WireHeader:
    """Returns the header with the digest of its fields and of the pieces."""
    digest = xxhash.xxh3_64(HEADER.pack(*header._replace(digest=0)))
    for buffer in buffers:
        digest.update(buffer)
    return header._replace(digest=digest.intdigest())


def check_digest(header: WireHeader, buffers: Sequence[memoryview], *, reader: int, wanted_by: str) -> None:
    """Raises CheckpointCorruptError (checksum) if the header, which must have a digest, or the pieces differ from those
    that the reader rank sent. `wanted_by` names in the error what the bytes are for.
    """
    found = seal(header, buffers).digest
    if found != header.digest:
        raise damaged(
            f"{header.byte_length} bytes of {wanted_by} that rank {reader} had read and passed on (checksum "
            f"{header.digest:016x} sent, {found:016x} arrived) were"
        )


class OutgoingUnit:
    """Pieces of a unit behind their header, on the way to all peers that asked for the same."""

    def __init__(
        self,
        read: Fetch,
        views: list[np.ndarray],
        num_peers: int,
        *,
        budget: ByteBudget,
        verify: bool,
        done: Callable[[], None],
    ) -> None:
        """Makes the `buffers` to send: the pieces where they are if they are single rows, else a copy, for which this
        waits until `budget` has the bytes. `done` is called when all peers have been sent the unit, and the bytes are
        given back to the budget; until then the pieces must not change. With `verify`, the header has the digest for
        `check_digest`.
        """
        num_bytes = sum(view.size for view in views)
        is_copied = any(view.ndim > 1 for view in views)
        self._budget = budget
        self._num_copied = num_bytes if is_copied else 0
        self._done = done
        self._budget.take(self._num_copied)
        buffers = [np.concatenate(views, axis=None).data] if is_copied else [view.data for view in views]
        header = WireHeader(read.file, read.byte_offset, num_bytes)
        self.buffers: list[memoryview | bytes] = [HEADER.pack(*(seal(header, buffers) if verify else header)), *buffers]
        self._peers_left = [*range(num_peers)]

    def sent(self) -> None:
        """Notes that one more peer has been sent the unit."""
        if self._peers_left.pop() == 0:  # one thread alone gets the 0
            self._budget.give(self._num_copied)
            self._done()


def damaged(what: str) -> CheckpointCorruptError:
    """Returns the error about received bytes that differ from those that another rank sent. `what` begins its message
    and has the verb, as in "bytes 0 to 9 of a file were".
    """
    return CheckpointCorruptError(
        f"{what} damaged on the way. The checkpoint is as it was: look at the network and the memory of both hosts, or "
        'load with LoadOptions(exchange="off")',
        kind="checksum",
    )
