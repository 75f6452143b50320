"""The directory of a zip archive that torch.save wrote: which member has its bytes where. Nothing is ever unpacked, and
what torch.save never writes (compression, encryption, comments, members that overlap) is refused.

An archive is a part of a file, or all of it: torch's distributed checkpoints hold one archive after the other.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import FileReader, not_readable, too_much

MAX_DIRECTORY_BYTES = 1 << 28

_END = struct.Struct("<4s4H2LH")  # signature, disks (2), entries (2), directory bytes and offset, comment bytes
_END_64_LOCATOR = struct.Struct("<4sLQL")  # signature, disk, offset of the following, disks
_END_64 = struct.Struct("<4sQ2H2L4Q")  # signature, size, versions, disks, entries (2), directory bytes and offset
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_CHECKSUM = 14
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ZIP_64_EXTRA = 1
_CODE = re.compile(r"\A[^/]+/code/")
_ENCRYPTED = 1


class ArchiveMember(NamedTuple):
    """A member as the archive's directory describes it."""

    header_offset: int
    """Offset from the start of the archive, in bytes."""
    byte_length: int
    limit: int
    """Offset at which the next member, or the directory, begins."""
    checksum: int
    """CRC-32 of its bytes, as the writer recorded it."""


class _ArchiveDirectory(NamedTuple):
    num_entries: int
    byte_length: int
    byte_offset: int


def torchscript_error(path: str) -> CheckpointCorruptError:
    """Returns the error for an archive of torch.jit.save."""
    advice = "load it with torch.jit.load, and save its state_dict"
    return not_readable(path, "it is a program of TorchScript", advice)


def directory_offset(file: FileReader) -> int | None:
    """Returns the byte offset of the directory in an archive that is the whole file; None for other files."""
    with suppress(CheckpointCorruptError, UnsafeCheckpointError):
        return ZipArchive(file, 0, file.byte_length).directory_offset
    return None


class ZipArchive:
    """The members of an archive that is bytes `start` to `end` of a file.

    The constructor and all methods raise CheckpointCorruptError (truncated, bad_manifest, unsupported_version) or
    UnsafeCheckpointError (limits_exceeded, path_escape); KeyError for a member that is not in `members`.
    """

    def __init__(self, file: FileReader, start: int, end: int) -> None:
        self.file = file
        self._start = start
        self._end = end
        self.members = self._read_members()

    def in_file_order(self) -> list[tuple[int, str]]:
        """Returns the offset of each member's header from the start of the file, and its name, lowest offset first."""
        return sorted((self._start + member.header_offset, name) for name, member in self.members.items())

    def data_offset(self, name: str, file: FileReader) -> int:
        """Returns where a member's bytes begin, after its header, from the start of the file, which `file` reads."""
        member = self.members[name]
        fields = _LOCAL.unpack(self._read(member.header_offset, _LOCAL.size, file))
        name_bytes, extra_bytes = fields[9:11]
        start = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
        found = self._read(member.header_offset + _LOCAL.size, min(name_bytes, 4096), file)
        if fields[0] != b"PK\x03\x04" or found != name.encode():
            self.file.raise_damaged(f"its member {name!r:.200} does not begin where the directory says")
        if start + member.byte_length > member.limit:
            self.file.raise_damaged(f"its member {name!r:.200} reaches into the one that follows it")
        return self._start + int(start)

    def checksum_offset(self, name: str) -> int:
        """Returns where the checksum stands before a member's bytes, from the start of the archive."""
        return self.members[name].header_offset + _LOCAL_CHECKSUM

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the bytes of a member. Refuses one of more than `max_bytes` (limits_exceeded)."""
        num_bytes = self.members[name].byte_length
        if num_bytes > max_bytes:
            what = f"its member {name!r:.200} has {num_bytes} bytes, at most {max_bytes} are read"
            raise too_much(self.file.path, what)
        return self.file.read(self.data_offset(name, self.file), num_bytes)

    def _read(self, byte_offset: int, byte_length: int, file: FileReader) -> bytes:
        if byte_offset + byte_length > self._end - self._start:
            self.file.raise_damaged("its directory points behind its end", kind="truncated")
        return file.read(self._start + byte_offset, byte_length)

    def _read_members(self) -> dict[str, ArchiveMember]:
        directory = self._find_directory()
        self.directory_offset = directory.byte_offset
        """Offset from the start of the archive, in bytes."""
        content = self._read(directory.byte_offset, directory.byte_length, self.file)
        found: dict[str, tuple[int, int, int]] = {}
        position = 0
        for _ in range(directory.num_entries):
            if position + _ENTRY.size > len(content):
                self.file.raise_damaged(f"its directory ends before the last of its {directory.num_entries} members")
            name, where, position = self._read_entry(content, position)
            if name in found:
                self.file.raise_damaged(f"it has two members named {name!r:.200}")
            found[name] = where
        return self._with_limits(found, directory.byte_offset)

    def _with_limits(self, entries: dict[str, tuple[int, int, int]], directory_offset: int) -> dict[str, ArchiveMember]:
        """Returns the members, each with the offset by which it has to end: that of the next, or of the directory."""
        in_order = sorted(entries.items(), key=lambda item: item[1])
        limits = [header_offset for _, (header_offset, *_) in in_order[1:]] + [directory_offset]
        members = {}
        for (name, (header_offset, byte_length, checksum)), limit in zip(in_order, limits, strict=True):
            if header_offset + _LOCAL.size + len(name.encode()) + byte_length > limit:
                self.file.raise_damaged(f"its member {name!r:.200} reaches into the one that follows it")
            members[name] = ArchiveMember(header_offset, byte_length, limit, checksum)
        return members

    def _find_directory(self) -> _ArchiveDirectory:
        end = self._end - self._start - _END.size
        fields = _END.unpack(self._read(end, _END.size, self.file)) if end >= 0 else (b"",)
        if fields[0] != b"PK\x05\x06":
            self.file.raise_damaged(
                "it does not end as an archive of torch.save does; it was cut short", kind="truncated"
            )
        if any(fields[1:3]) or fields[3] != fields[4] or fields[7]:
            self.file.raise_damaged(
                "it is an archive in several parts or with a comment, which torch.save does not write"
            )
        num_entries, num_bytes, offset = fields[4:7]
        if _FULL_32 in (num_bytes, offset) or num_entries == _FULL_16:
            num_entries, num_bytes, offset = self._find_directory_64(end - _END_64_LOCATOR.size)
        if num_bytes > MAX_DIRECTORY_BYTES:
            what = f"its directory has {num_bytes} bytes, at most {MAX_DIRECTORY_BYTES} are read"
            raise too_much(self.file.path, what)
        if offset + num_bytes > end:
            self.file.raise_damaged("its directory reaches behind its end")
        return _ArchiveDirectory(num_entries, num_bytes, offset)

    def _find_directory_64(self, at: int) -> _ArchiveDirectory:
        locator = _END_64_LOCATOR.unpack(self._read(at, _END_64_LOCATOR.size, self.file)) if at >= 0 else (b"",)
        if locator[0] != b"PK\x06\x07":
            self.file.raise_damaged("the end of its directory is not where a large archive has it")
        fields = _END_64.unpack(self._read(locator[2], _END_64.size, self.file))
        if fields[0] != b"PK\x06\x06" or fields[6] != fields[7]:
            self.file.raise_damaged("the end of its directory is not what a large archive has there")
        return _ArchiveDirectory(*fields[7:10])

    def _read_entry(self, content: bytes, position: int) -> tuple[str, tuple[int, int, int], int]:
        """Returns a member's name, its header offset, length and checksum, and the position of the next member."""
        fields = _ENTRY.unpack_from(content, position)
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        start = position + _ENTRY.size
        end = start + name_bytes + extra_bytes + comment_bytes
        if fields[0] != b"PK\x01\x02" or end > len(content):
            self.file.raise_damaged("its directory is not one of a zip archive")
        try:
            name = content[start : start + name_bytes].decode()
        except UnicodeDecodeError:
            self.file.raise_damaged("a member's name is no Unicode")
        if fields[4] and _CODE.search(name):  # the only members that torch compresses
            raise torchscript_error(self.file.path)
        if fields[3] & _ENCRYPTED or fields[4]:
            how = "encrypted" if fields[3] & _ENCRYPTED else "compressed"
            advice = "load it with torch.load where it comes from, and save it with torch.save"
            raise not_readable(self.file.path, f"its member {name!r:.200} is {how}", advice)
        numbers = {"raw": fields[9], "stored": fields[8], "offset": fields[16]}
        self._widen(numbers, content[start + name_bytes : start + name_bytes + extra_bytes])
        if numbers["raw"] != numbers["stored"]:
            self.file.raise_damaged(f"its member {name!r:.200} is not compressed, and has two lengths")
        return name, (numbers["offset"], numbers["stored"], fields[7]), end

    def _widen(self, numbers: dict[str, int], extra: bytes) -> None:
        """Replaces the numbers that do not fit into 32 bits by those of the zip64 record."""
        wide = [key for key, value in numbers.items() if value == _FULL_32]
        position = 0
        while wide and position + 4 <= len(extra):
            kind, num_bytes = struct.unpack_from("<2H", extra, position)
            position += 4
            if kind == _ZIP_64_EXTRA:
                if num_bytes < 8 * len(wide) or position + num_bytes > len(extra):
                    break
                numbers |= dict(zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, position), strict=True))
                return
            position += num_bytes
        if wide:
            self.file.raise_damaged("a member's length or place is missing in its directory")
