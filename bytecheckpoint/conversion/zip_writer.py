"""Zip archives as torch.save writes them, as runs of bytes: without compression, tensors streamed. The checksum of a
tensor stands behind it and in the directory at the end, so nothing is read twice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.conversion.stream import FileRun, Late, TensorSpan, run_bytes

ALIGNMENT = 64
"""Alignment of a member's bytes from the start of the archive, as torch aligns them: so they can be mapped into
memory."""

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_PADDING = struct.Struct("<2sH")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_CHECKSUM_FOLLOWS, _UTF_8 = 8, 1 << 11
_VERSION_64 = 45
_DATE = 33
"""1980-01-01, the first there is: the same content gives the same archive."""


class ZipMember(NamedTuple):
    """A file of an archive."""

    name: str
    content: bytes | TensorSpan


class _PlacedMember(NamedTuple):
    name: bytes
    byte_offset: int
    """Offset of its header from the start of the archive."""
    byte_length: int
    checksum: int | None
    """Its CRC-32; None if it is the checksum of the run `number`."""
    number: int


def archive_runs(members: Sequence[ZipMember], *, first_run: int) -> list[FileRun]:
    """Returns the runs of an archive, which has to be placed at a multiple of ALIGNMENT in its file. `first_run` is the
    number of its first run among those of the file.
    """
    runs: list[FileRun] = []
    placed: list[_PlacedMember] = []
    position = 0
    for member in members:
        header, descriptor = _header_and_trailer(member, position, number=first_run + len(runs) + 1)
        length = run_bytes(member.content)
        checksum = zlib.crc32(member.content) if isinstance(member.content, bytes) else None
        placed.append(_PlacedMember(member.name.encode(), position, length, checksum, first_run + len(runs) + 1))
        of_member: list[FileRun] = [header, member.content, descriptor]
        runs += of_member
        position += sum(map(run_bytes, of_member))
    directory_bytes = sum(len(_entry(each, 0)) for each in placed)
    end = _end(len(placed), position, directory_bytes)

    def directory(checksums: Mapping[int, int]) -> bytes:
        entries = (
            _entry(each, checksums.get(each.number, 0) if each.checksum is None else each.checksum) for each in placed
        )
        return b"".join(entries) + end

    return [*runs, Late(directory_bytes + len(end), directory)]


def _header_and_trailer(member: ZipMember, position: int, *, number: int) -> tuple[bytes, FileRun]:
    """Returns the runs before and after a member's data: its local header, and for a tensor its checksum, else nothing.
    The data is run `number` of the file.
    """
    name, length = member.name.encode(), run_bytes(member.content)
    is_long = length >= _FULL_32
    flags, checksum = _UTF_8, 0
    extra = b""
    if isinstance(member.content, TensorSpan):
        flags |= _CHECKSUM_FOLLOWS
        extra = struct.pack("<2H2Q", 1, 16, 0, 0) if is_long else b""
    else:
        checksum = zlib.crc32(member.content)
    sizes = (0, 0) if isinstance(member.content, TensorSpan) else (length, length)
    sizes = (_FULL_32, _FULL_32) if is_long else sizes
    start = position + _LOCAL.size + len(name) + len(extra) + _PADDING.size
    padding = -start % ALIGNMENT
    extra += _PADDING.pack(b"FB", padding) + b"Z" * padding
    version = _VERSION_64 if is_long else 0
    header = _LOCAL.pack(b"PK\x03\x04", version, flags, 0, 0, _DATE, checksum, *sizes, len(name), len(extra))
    return header + name + extra, _descriptor(length, number, is_long=is_long) if flags & _CHECKSUM_FOLLOWS else b""


def _descriptor(length: int, number: int, *, is_long: bool) -> Late:
    layout = struct.Struct("<4sL2Q" if is_long else "<4s3L")
    return Late(layout.size, lambda checksums: layout.pack(b"PK\x07\x08", checksums.get(number, 0), length, length))


def _entry(placed: _PlacedMember, checksum: int) -> bytes:
    is_long = placed.byte_length >= _FULL_32
    is_far = placed.byte_offset >= _FULL_32
    wide = ([placed.byte_length] * 2 if is_long else []) + ([placed.byte_offset] if is_far else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    length = _FULL_32 if is_long else placed.byte_length
    flags = _UTF_8 | (0 if placed.checksum is not None else _CHECKSUM_FOLLOWS)
    version = _VERSION_64 if wide else 0
    fields = (b"PK\x01\x02", version, version, flags, 0, 0, _DATE, checksum, length, length)
    lengths = (len(placed.name), len(extra), 0, 0, 0, 0, _FULL_32 if is_far else placed.byte_offset)
    return _ENTRY.pack(*fields, *lengths) + placed.name + extra


def _end(num_members: int, directory_offset: int, directory_bytes: int) -> bytes:
    """Returns the bytes behind the directory."""
    wide = b""
    if num_members >= _FULL_16 or max(directory_offset, directory_bytes) >= _FULL_32:
        counts = (num_members, num_members, directory_bytes, directory_offset)
        wide = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, *counts)
        wide += _LOCATOR_64.pack(b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
    count = min(num_members, _FULL_16)
    at = min(directory_bytes, _FULL_32), min(directory_offset, _FULL_32)
    return wide + _END.pack(b"PK\x05\x06", 0, 0, count, count, *at, 0)
