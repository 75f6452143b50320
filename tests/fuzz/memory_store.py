"""A folder of files that is one value: what a reader of folders is fed, and what a change of it is made to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.paths import check_name
from bytecheckpoint.storage.store import Access

Files = dict[str, bytes]
_decoder = msgspec.msgpack.Decoder(Files)


def pack(files: Files) -> bytes:
    return msgspec.msgpack.encode(files)


def unpack(content: bytes) -> Files | None:
    """None where the bytes are no folder."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class MemoryStore:
    """A store of a few small files that nobody writes to."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def __str__(self) -> str:
        return "memory"

    @property
    def access(self) -> Access:
        return Access(1e-4, 1e9)

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        raise AssertionError(f"{name} is to be written, in {len(blocks)} blocks, {replace=}")

    def delete(self, name: str) -> None:
        raise AssertionError(f"{name} is to be removed")

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
        content = self._files.get(check_name(name))
        if content is None:
            raise CheckpointNotFoundError(f"{name} is not there", kind="missing_file", path=name)
        found = content[byte_offset : byte_offset + len(buffer)]
        if len(found) < len(buffer):
            raise CheckpointCorruptError(f"{name} ends too early", kind="truncated", path=name)
        buffer[:] = found
        if on_filled is not None:
            on_filled(len(buffer))

    def list(self, folder: str) -> dict[str, int | None]:
        prefix = f"{check_name(folder)}/" if folder else ""
        found: dict[str, int | None] = {}
        for name, content in self._files.items():
            if name.startswith(prefix):
                first, separator, _ = name[len(prefix) :].partition("/")
                found[first] = None if separator else len(content)
        return found
