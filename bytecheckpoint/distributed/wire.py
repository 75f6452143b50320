"""What a reader passes on to a taker: the pieces that it asked for of one unit, one after the other, behind a header
with their digest. Packing and unpacking; nothing here knows of connections or of tensors.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.distributed.connection import PeerLeftError
from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.planner.byte_ranges import ByteRange
from bytecheckpoint.planner.exchange_split import Unit

_DIGEST = struct.Struct("<Q")
_HEADER = struct.Struct("<QQQQ")
HEADER_BYTES = _HEADER.size
_BROKEN_OFF, _GETTING_ON = (1 << 64) - 1, (1 << 64) - 2
"""What stands in place of the number of a file where no parcel follows."""

Request = dict[Unit, tuple[ByteRange, ...]]
"""What a taker wants of the units of a reader."""


class Header(NamedTuple):
    """What stands before the pieces of a parcel."""

    file: int
    unit_byte_offset: int
    byte_length: int
    digest: int
    """The xxh3-64 of the rest of the header and of all pieces; 0 where nothing is verified."""


FAREWELL = _HEADER.pack(_BROKEN_OFF, 0, 0, 0)
"""Sent instead of a header by a reader that breaks off."""
SIGN_OF_LIFE = _HEADER.pack(_GETTING_ON, 0, 0, 0)
"""Sent between parcels by a reader that gets on, though not with what the taker waits for."""


def encode_request(request: Request) -> bytes:
    """With a digest: from a damaged request would come other bytes than are wanted, and they would be intact."""
    content = msgspec.msgpack.encode([(unit, pieces) for unit, pieces in request.items()])
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(content)) + content


def decode_request(sent: bytes, *, taker: int) -> Request:
    """Raises CheckpointCorruptError (checksum) where it is not what the taker has sent."""
    content = sent[_DIGEST.size :]
    if sent[: _DIGEST.size] != _DIGEST.pack(xxhash.xxh3_64_intdigest(content)):
        raise damaged(f"what rank {taker} asked for ({len(sent)} bytes) was")
    return dict(msgspec.msgpack.decode(content, type=list[tuple[Unit, tuple[ByteRange, ...]]]))


def encode_header(header: Header) -> bytes:
    return _HEADER.pack(*header)


def decode_header(content: bytes) -> Header | None:
    """None for a sign of life. Raises PeerLeftError where it is a farewell."""
    header = Header(*_HEADER.unpack(content))
    if header.file == _BROKEN_OFF:
        raise PeerLeftError
    return header if header.file != _GETTING_ON else None


def slices(content: memoryview, unit: Unit, pieces: Sequence[ByteRange]) -> list[memoryview] | None:
    """The pieces as parts of the unit's bytes, where each is a single row."""
    if any(len(piece.lengths) > 1 for piece in pieces):
        return None
    return [content[piece.byte_offset - unit.byte_offset :][: piece.byte_length] for piece in pieces]


def pack(content: memoryview, unit: Unit, pieces: Sequence[ByteRange], into: memoryview) -> None:
    """Copies the pieces out of the unit's bytes, one after the other."""
    source, target = np.frombuffer(content, np.uint8), np.frombuffer(into, np.uint8)
    position = 0
    for piece in pieces:
        if piece.byte_offset < unit.byte_offset or piece.end > unit.end:
            raise ValueError(f"{piece} is not in {unit}")
        rows = source[piece.byte_offset - unit.byte_offset :]
        target[position : position + piece.byte_length].reshape(piece.lengths)[...] = np.lib.stride_tricks.as_strided(
            rows, piece.lengths, piece.strides
        )
        position += piece.byte_length


def sealed(header: Header, buffers: Sequence[memoryview]) -> Header:
    """The header with the digest of what it says and of the pieces behind it."""
    digest = xxhash.xxh3_64(encode_header(header._replace(digest=0)))
    for buffer in buffers:
        digest.update(buffer)
    return header._replace(digest=digest.intdigest())


class Parcel:
    """A unit's pieces on their way to those takers that want the same of it."""

    def __init__(
        self, header: Header, buffers: Sequence[memoryview], num_takers: int, done: Callable[[], None]
    ) -> None:
        self.content: Sequence[memoryview | bytes] = [encode_header(header), *buffers]
        self._num_left = num_takers
        self._lock = threading.Lock()
        self._done = done

    def sent(self) -> None:
        """Another taker has it; after the last one its memory is free."""
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._done()


def check_digest(header: Header, buffers: Sequence[memoryview], *, reader: int, wanted_by: str) -> None:
    """Raises CheckpointCorruptError (checksum) where what came is not what was sent."""
    found = sealed(header, buffers).digest
    if found != header.digest:
        raise damaged(
            f"{header.byte_length} bytes of {wanted_by} that rank {reader} had read and passed on (checksum "
            f"{header.digest:016x} sent, {found:016x} arrived) were"
        )


def not_asked_for(header: Header, reader: int) -> CheckpointCorruptError:
    """Of a parcel that nobody waits for."""
    return damaged(
        f"a parcel of {header.byte_length} bytes from rank {reader}, which was not asked for (file {header.file}, byte "
        f"{header.unit_byte_offset}), was"
    )


def damaged(what: str) -> CheckpointCorruptError:
    """Of bytes that are not what another rank has sent."""
    return CheckpointCorruptError(
        f"{what} damaged on the way. The checkpoint is as it was: look at the network and the memory of both hosts, or "
        'load with LoadOptions(exchange="off")',
        kind="checksum",
    )
