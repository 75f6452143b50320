"""A read-only store of one checkpoint whose data files are on this host: inside slots of a memory root, or in a local
stage. What this host does not hold may be at another store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends.posix_errors import describe, missing_file, read_error, too_long, truncated
from bytecheckpoint.storage.backends.posix_files import read_fully
from bytecheckpoint.storage.layout import DATA_FOLDER, MANIFEST_NAME
from bytecheckpoint.storage.memory_root.slot_file import FilePlace
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Access, FillHook, Store, SupportsByteLength, read_whole

_ACCESS = Access(latency_s=20e-6, bytes_per_s=3e9)


class StoredAt(NamedTuple):
    """A committed or unfinished checkpoint at its path."""

    store: Store
    folder: str


class HeldStore:
    """The objects of one checkpoint, by their names in it. `str()` gives its name for messages."""

    def __init__(
        self,
        places: Mapping[str, FilePlace],
        manifest: bytes,
        *,
        shown: str,
        elsewhere: Mapping[str, int],
        stored: StoredAt | None = None,
    ) -> None:
        """`places` says where this host holds data files, by name. `elsewhere` has the lengths, in bytes, of files that
        other ranks read, for `byte_length` only. Files without a place are read from `stored`; without it, they are
        missing.
        """
        self.wanted: set[str] = set()
        """Names of the data files whose lengths were asked for."""
        self._places = places
        self._elsewhere = elsewhere
        self._manifest = manifest
        self._shown = shown
        self._stored = stored
        self._listings: dict[str, Mapping[str, int | None]] = {}
        """Listings of folders of `stored`, for `byte_length` only."""

    def __str__(self) -> str:
        return self._shown

    @property
    def access(self) -> Access:
        return _ACCESS

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        place = self._places.get(name)
        if place is None:
            stored = self._outside_memory(name)
            stored.store.read_into(join_name(stored.folder, name), byte_offset, buffer, on_filled=on_filled)
            return
        flat = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        end = byte_offset + flat.nbytes
        if end > place.byte_length:
            raise truncated(f"{self._shown}/{name}", wanted_end=end, found_end=place.byte_length)
        try:
            fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise missing_file(f"{self._shown}/{name}") from error
        except OSError as error:
            raise read_error(error, place.path, reason=describe(error), doing="read") from error
        try:
            filled = read_fully(fd, place.byte_offset + byte_offset, flat, on_filled)
        except OSError as error:
            raise read_error(error, place.path, reason=describe(error), doing="read") from error
        finally:
            os.close(fd)
        if filled < flat.nbytes:
            raise truncated(f"{self._shown}/{name}", wanted_end=end, found_end=byte_offset + filled)

    def byte_length(self, name: str) -> int | None:
        """Implements `SupportsByteLength`, and adds the name to `wanted`."""
        self.wanted.add(name)
        if name in self._places:
            return self._places[name].byte_length
        if name in self._elsewhere:
            return self._elsewhere[name]
        stored = self._stored
        if stored is None:
            return None
        if isinstance(stored.store, SupportsByteLength):
            return stored.store.byte_length(join_name(stored.folder, name))
        parent, _, last = name.rpartition("/")
        if parent not in self._listings:  # not for each file: a listing shows all of them
            self._listings[parent] = stored.store.list(join_name(stored.folder, parent))
        return self._listings[parent].get(last)

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """Implements `SupportsReadWhole`, but returns the manifest even if it is longer than `max_bytes`."""
        if name == MANIFEST_NAME:
            return self._manifest
        if name not in self._places:
            stored = self._outside_memory(name)
            return read_whole(stored.store, join_name(stored.folder, name), max_bytes=max_bytes)
        place = self._places[name]
        if place.byte_length > max_bytes:
            raise too_long(f"{place.path} ({name})", place.byte_length, max_bytes)
        content = bytearray(place.byte_length)
        self.read_into(name, 0, memoryview(content))
        return bytes(content)

    def list(self, folder: str) -> Mapping[str, int | None]:
        if not folder:
            return {MANIFEST_NAME: len(self._manifest), DATA_FOLDER: None}
        stored: dict[str, int | None] = {}
        if self._stored is not None:
            stored.update(self._stored.store.list(join_name(self._stored.folder, folder)))
        prefix = f"{folder}/"
        own: dict[str, int | None] = {
            name.removeprefix(prefix): place.byte_length
            for name, place in self._places.items()
            if name.startswith(prefix)
        }
        return {**stored, **own}

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> NoReturn:
        """Raises StorageError (unsupported): the store is read-only."""
        del blocks, replace
        raise self._read_only(name)

    def delete(self, name: str) -> NoReturn:
        """Raises StorageError (unsupported): the store is read-only."""
        raise self._read_only(name)

    def _read_only(self, name: str) -> StorageError:
        return StorageError(f"{self._shown}/{name} is only read, never changed", kind="unsupported", path=self._shown)

    def _outside_memory(self, name: str) -> StoredAt:
        """Returns the place where files that this host does not hold are stored. Raises CheckpointNotFoundError
        (missing_file) if there is none.
        """
        if self._stored is None:
            raise missing_file(f"{self._shown}/{name}")
        return self._stored
