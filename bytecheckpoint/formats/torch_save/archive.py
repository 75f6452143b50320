"""The directory of a zip archive that torch.save wrote: which member has its bytes where. Nothing is ever unpacked, and
what torch.save never writes (compression, encryption, comments, members that overlap) is refused.

An archive is a part of a file, or all of it: torch's distributed checkpoints hold one archive after the other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import FileReader, not_readable, too_much

MAX_DIRECTORY_BYTES = 1 << 28

_END = struct.Struct("<4s4H2LH")  # signature, disks (2), entries (2), directory bytes and offset, comment bytes
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_CHECKSUM = 14
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _UTF_8 = 1, 1 << 11
_UNPARSABLE = (
    BadZipFile,
    NotImplementedError,
    ValueError,
    LookupError,
    ArithmeticError,
    struct.error,
    OSError,
    Warning,
)
"""Errors of `zipfile` for a directory that nobody wrote."""


def directory_offset(file: FileReader) -> int | None:
    """Returns the byte of a file at which the directory of the archive begins that is all of it; None if it is no
    archive that torch.save writes.
    """
    with suppress(CheckpointCorruptError, UnsafeCheckpointError):
        return ZipArchive(file, 0, file.byte_length).directory_offset
    return None


class ZipArchive:
    """The members of an archive that is bytes `start` to `end` of a file.

    Everything raises CheckpointCorruptError (truncated, bad_manifest, unsupported_version) or UnsafeCheckpointError
    (limits_exceeded, path_escape).
    """

    def __init__(self, file: FileReader, start: int, end: int) -> None:
        self.file = file
        self._start = start
        self._end = end
        archive = self._parsed()
        self.directory_offset = archive.start_dir
        """Offset from the start of the archive, in bytes."""
        self.members: Mapping[str, ZipInfo] = archive.NameToInfo
        self._limits = self._checked(archive.filelist)
        """Header offset of a member -> where it has to end: where the next member, or the directory, begins."""

    def data_offset(self, name: str) -> int:
        """Returns where a member's bytes begin, from the start of the file."""
        member = self.members[name]
        fields = _LOCAL.unpack(self._read(member.header_offset, _LOCAL.size))
        name_bytes, extra_bytes = fields[9:11]
        start = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
        found = self._read(member.header_offset + _LOCAL.size, min(name_bytes, 4096))
        if fields[0] != b"PK\x03\x04" or found != _raw_name(member):
            self.file.damaged(f"its member {name!r:.200} does not begin where the directory says")
        if start + member.file_size > self._limits[member.header_offset]:
            self._refuse_overlap(member)
        return self._start + int(start)

    def checksum_offset(self, name: str) -> int:
        """Returns where the checksum of a member's bytes is that stands before them, from the start of the archive."""
        return self.members[name].header_offset + _LOCAL_CHECKSUM

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the bytes of a member."""
        num_bytes = self.members[name].file_size
        if num_bytes > max_bytes:
            what = f"its member {name!r:.200} has {num_bytes} bytes, at most {max_bytes} are read"
            raise too_much(self.file.path, what)
        return self.file.read(self.data_offset(name), num_bytes)

    def _read(self, byte_offset: int, byte_length: int) -> bytes:
        if byte_offset + byte_length > self._end - self._start:
            self.file.damaged("its directory points behind its end", kind="truncated")
        return self.file.read(self._start + byte_offset, byte_length)

    def _parsed(self) -> ZipFile:
        """Returns the directory as zipfile reads it, which passes over bytes around the archive and over a count of
        members that is wrong. Those are refused.
        """
        end = self._end - self._start - _END.size
        fields = _END.unpack(self._read(end, _END.size)) if end >= 0 else (b"",)
        if fields[0] != b"PK\x05\x06":
            self.file.damaged("it does not end as an archive of torch.save does; it was cut short", kind="truncated")
        if any(fields[1:3]) or fields[3] != fields[4] or fields[7]:
            self.file.damaged("it is an archive in several parts or with a comment, which torch.save does not write")
        num_members, num_bytes, offset = fields[4:7]
        is_large = num_members == _FULL_16 or _FULL_32 in (num_bytes, offset)
        try:
            archive = ZipFile(_ArchiveFile(self.file, self._start, self._end))
        except CheckpointError:
            raise
        except _UNPARSABLE as error:
            self.file.damaged(f"its directory is not one of a zip archive: {error}")
        if not is_large and (len(archive.filelist), archive.start_dir) != (num_members, offset):
            self.file.damaged("its directory is not where its end says, or has other members")
        return archive

    def _checked(self, members: list[ZipInfo]) -> dict[int, int]:
        if len(members) != len(self.members):
            self.file.damaged("it has two members of one name")
        in_order = sorted(members, key=_header_offset)
        limits = [*map(_header_offset, in_order), self.directory_offset][1:]
        for member, limit in zip(in_order, limits, strict=True):
            name = member.filename
            if member.flag_bits & _ENCRYPTED or member.compress_type != ZIP_STORED:
                how = "encrypted" if member.flag_bits & _ENCRYPTED else "compressed"
                advice = "load it with torch.load where it comes from, and save it with torch.save"
                raise not_readable(self.file.path, f"its member {name!r:.200} is {how}", advice)
            if member.file_size != member.compress_size:
                self.file.damaged(f"its member {name!r:.200} is not compressed, and has two lengths")
            num_bytes = _LOCAL.size + len(_raw_name(member)) + member.file_size
            if member.header_offset < 0 or member.header_offset + num_bytes > limit:
                self._refuse_overlap(member)
        return dict(zip(map(_header_offset, in_order), limits, strict=True))

    def _refuse_overlap(self, member: ZipInfo) -> None:
        self.file.damaged(f"its member {member.filename!r:.200} reaches into the one that follows it")


def _header_offset(member: ZipInfo) -> int:
    return member.header_offset


def _raw_name(member: ZipInfo) -> bytes:
    return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")


class _ArchiveFile:
    """An archive as the file that `zipfile` reads: bytes `start` to `end` of another one."""

    def __init__(self, file: FileReader, start: int, end: int) -> None:
        self._file = file
        self._start = start
        self._end = end
        self._position = start

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: self._start, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        if position < self._start:
            raise OSError("a position before the start")
        self._position = position
        return self.tell()

    def read(self, num_bytes: Any = -1) -> bytes:
        left = max(0, self._end - self._position)
        num_bytes = min(left, num_bytes) if num_bytes >= 0 else left
        if num_bytes > MAX_DIRECTORY_BYTES:
            what = f"its directory has {num_bytes} bytes, at most {MAX_DIRECTORY_BYTES} are read"
            raise too_much(self._file.path, what)
        content = self._file.read(self._position, num_bytes)
        self._position += num_bytes
        return content
