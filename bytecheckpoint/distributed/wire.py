"""The wire format between a reader rank and its peers: the request of a peer, and for each unit that the reader rank
reads a header with the pieces that the peer asked for. Nothing here knows sockets or tensors.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.planner.byte_ranges import ByteRange

_HEADER = struct.Struct("<QQQQ")
DISCONNECT = _HEADER.pack((1 << 64) - 1, 0, 0, 0)
"""Sent instead of a header by a reader rank whose load has failed."""
HEARTBEAT = _HEADER.pack((1 << 64) - 2, 0, 0, 0)
"""Sent between units by a reader rank that makes progress, though not with what the peer waits for."""

UnitRequests = Mapping[tuple[int, int], tuple[ByteRange, ...]]
"""The pieces that a peer asks for, by the file number and the byte offset of their unit."""


class WireHeader(NamedTuple):
    """Precedes the pieces of a unit."""

    file: int
    byte_offset: int
    """Of the unit."""
    byte_length: int
    """Of all pieces together."""
    digest: int = 0
    """The xxh3-64 of the rest of the header and of all pieces; 0 if nothing is verified."""

    def encode(self) -> bytes:
        return _HEADER.pack(*self)


def decode_header(content: bytes) -> WireHeader:
    return WireHeader(*_HEADER.unpack(content))


def encode_request(request: UnitRequests) -> bytes:
    """Encodes it with a digest: a damaged request would bring intact bytes that were not asked for."""
    content = msgspec.msgpack.encode(list(request.items()))
    return xxhash.xxh3_64_digest(content) + content


def decode_request(message: bytes, *, peer: int) -> UnitRequests:
    """Decodes the request of the peer with this global rank. Raises CheckpointCorruptError (checksum)."""
    digest, content = message[:8], message[8:]
    if digest != xxhash.xxh3_64_digest(content):
        raise damaged(f"what rank {peer} asked for ({len(message)} bytes) was")
    return dict(msgspec.msgpack.decode(content, type=list[tuple[tuple[int, int], tuple[ByteRange, ...]]]))


def view_pieces(content: memoryview, byte_offset: int, pieces: Sequence[ByteRange]) -> list[np.ndarray]:
    """Returns the pieces of a unit as views into its content, which begins at this byte of the file; one-dimensional
    where a piece is a single row. Raises ValueError if a piece is not inside of the unit.
    """
    source = np.frombuffer(content, np.uint8)
    views = []
    for piece in pieces:
        first = piece.byte_offset - byte_offset
        if first < 0 or piece.end > byte_offset + len(source):
            raise ValueError(f"{piece} is not in the {len(source)} bytes from {byte_offset}")
        is_row = len(piece.lengths) == 1
        rows = source[first : first + piece.byte_length] if is_row else source[first:]
        views.append(rows if is_row else np.lib.stride_tricks.as_strided(rows, piece.lengths, piece.strides))
    return views


def pack(views: Sequence[np.ndarray]) -> memoryview:
    """Copies the pieces into memory of their own, one after the other."""
    packed = np.empty(sum(view.size for view in views), np.uint8)
    position = 0
    for view in views:
        packed[position : position + view.size].reshape(view.shape)[...] = view
        position += view.size
    return packed.data


def seal(header: WireHeader, buffers: Sequence[memoryview]) -> WireHeader:
    """Returns the header with the digest of its fields and of the pieces."""
    digest = xxhash.xxh3_64(header._replace(digest=0).encode())
    for buffer in buffers:
        digest.update(buffer)
    return header._replace(digest=digest.intdigest())


def check_digest(header: WireHeader, buffers: Sequence[memoryview], *, reader: int, wanted_by: str) -> None:
    """Raises CheckpointCorruptError (checksum) if the pieces are not those that the reader rank sent."""
    found = seal(header, buffers).digest
    if found != header.digest:
        raise damaged(
            f"{header.byte_length} bytes of {wanted_by} that rank {reader} had read and passed on (checksum "
            f"{header.digest:016x} sent, {found:016x} arrived) were"
        )


class OutgoingUnit:
    """A header with its pieces, on the way to all peers that asked for the same pieces of a unit."""

    def __init__(self, buffers: Sequence[memoryview | bytes], num_peers: int, release: Callable[[], None]) -> None:
        """`release` is called when all peers have it."""
        self.buffers = buffers
        self._num_left = num_peers
        self._lock = threading.Lock()
        self._release = release

    def sent(self) -> None:
        """Counts another peer that has it."""
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._release()


def damaged(what: str) -> CheckpointCorruptError:
    """Returns the error about bytes that are not those that another rank sent."""
    return CheckpointCorruptError(
        f"{what} damaged on the way. The checkpoint is as it was: look at the network and the memory of both hosts, or "
        'load with LoadOptions(exchange="off")',
        kind="checksum",
    )
