"""Reads ranges of a file, mostly of a few bytes, for readers of foreign formats. Also the errors of such readers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NoReturn, TypeVar

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.runtime.threads import map_looks
from bytecheckpoint.storage.paths import check_name, join_name
from bytecheckpoint.storage.store import Store

BLOCK_BYTES = 4096
_MAX_BLOCKS = 256
"""Blocks in the cache of a file; together a MiB."""
_READ_AHEAD = 32
_RUN_BYTES = _READ_AHEAD * BLOCK_BYTES
_DENSE_RUN = 4
"""Places in a run from which on one read of the whole run costs less than a read of each."""
REQUESTS_IN_FLIGHT = 32
"""Files, or places in files, that are read at a time where each read waits for a store."""

Place = TypeVar("Place")


class FileReader:
    """Reads ranges of a file of known length, with a cache of blocks. Each read is one request at most.

    Only one thread at a time may use it.
    """

    def __init__(self, store: Store, name: str, byte_length: int) -> None:
        self.store = store
        self.name = name
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        """Blocks by number. The one read first is dropped first, even if it was used since."""
        self.byte_length = byte_length

    @property
    def path(self) -> str:
        """Path for messages."""
        return join_name(str(self.store), self.name)

    def read(self, byte_offset: int, byte_length: int) -> bytes:
        """Returns these bytes. Raises CheckpointCorruptError (truncated) for bytes outside the file, else as
        `Store.read_into`.
        """
        end = byte_offset + byte_length
        if byte_offset < 0 or byte_length < 0 or end > self.byte_length:
            self.raise_damaged(
                f"bytes {byte_offset} to {end} are asked for, and it has {self.byte_length}", kind="truncated"
            )
        first, last = byte_offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if last - first > _MAX_BLOCKS // 2:
            return self._read(byte_offset, byte_length)
        missing = [number for number in range(first, last) if number not in self._blocks]
        if missing:
            self._fetch(missing)
        content = b"".join(self._blocks[number] for number in range(first, last))
        while len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)
        start = byte_offset - first * BLOCK_BYTES
        return content[start : start + byte_length]

    def drop_cache(self) -> None:
        self._blocks.clear()

    def read_all(self) -> bytes:
        return self.read(0, self.byte_length)

    def _fetch(self, missing: list[int]) -> None:
        """Reads the blocks of these numbers into the cache, in one request. Reads ahead if the first follows a block
        that is cached: small archives lie one after the other.
        """
        if missing[0] - 1 in self._blocks:
            ahead = range(missing[-1] + 1, min(missing[-1] + 1 + _READ_AHEAD, -(-self.byte_length // BLOCK_BYTES)))
            missing += [number for number in ahead if number not in self._blocks]
        start, end = missing[0] * BLOCK_BYTES, min((missing[-1] + 1) * BLOCK_BYTES, self.byte_length)
        content = self._read(start, end - start)
        for number in missing:
            at = number * BLOCK_BYTES - start
            self._blocks[number] = content[at : at + BLOCK_BYTES]

    def _read(self, byte_offset: int, byte_length: int) -> bytes:
        content = bytearray(byte_length)
        if byte_length:
            self.store.read_into(self.name, byte_offset, memoryview(content))
        return bytes(content)

    def raise_damaged(self, what: str, *, kind: str = "bad_manifest") -> NoReturn:
        """Raises CheckpointCorruptError of this kind."""
        raise damaged(self.path, what, kind=kind)


def visit_places(places: Iterable[tuple[FileReader, int, Place]], visit: Callable[[FileReader, Place], object]) -> None:
    """Calls `visit` once for each place, perhaps in several threads, each with its own reader. `places` has the file
    and byte offset of each, sorted. CheckpointCorruptError and UnsafeCheckpointError of a visit are not raised: the
    caller visits each place again, in order, so that the same error is raised every time.
    """

    def visit_run(run: list[tuple[FileReader, int, Place]]) -> None:
        shared = run[0][0]
        file = FileReader(shared.store, shared.name, shared.byte_length)  # a cache is of one thread
        start, end = run[0][1], min(run[-1][1] + BLOCK_BYTES, file.byte_length)
        if len(run) >= _DENSE_RUN and start < end:
            file.read(start, end - start)
        for _, _, place in run:
            with suppress(CheckpointCorruptError, UnsafeCheckpointError):
                visit(file, place)
        file.drop_cache()  # what was visited may keep the reader

    map_looks(visit_run, _runs(places), num_threads=REQUESTS_IN_FLIGHT)


def _runs(places: Iterable[tuple[FileReader, int, Place]]) -> Iterator[list[tuple[FileReader, int, Place]]]:
    """Yields lists of consecutive places of one file, each list short enough for one read ahead."""
    run: list[tuple[FileReader, int, Place]] = []
    for place in places:
        if run and (place[0] is not run[0][0] or place[1] - run[0][1] >= _RUN_BYTES):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def damaged(path: str, what: str, *, kind: str = "bad_manifest") -> CheckpointCorruptError:
    """Returns the error for a foreign file that cannot be right."""
    return CheckpointCorruptError(
        f"{path} is damaged: {what}; nothing was loaded: copy the file again from a good replica, or take another "
        "checkpoint",
        kind=kind,
        path=path,
    )


def conflicting(path: str, what: str, advice: str) -> CheckpointMismatchError:
    """Returns the error for a checkpoint that contradicts itself; `what` begins with the verb to the subject `path`."""
    return CheckpointMismatchError(f"{path} {what}; nothing was loaded: {advice}", kind="conflict", path=path)


def missing_file(path: str, what: str, lost: str = "the files of all ranks") -> CheckpointNotFoundError:
    """Returns the error for lost files; `what` has the verb to the subject `path`, `lost` names what to restore."""
    text = f"{path} {what}; nothing was loaded: restore {lost}, or take another checkpoint"
    return CheckpointNotFoundError(text, kind="missing_file", path=path)


def not_readable(path: str, what: str, advice: str, *, kind: str = "unsupported_version") -> CheckpointCorruptError:
    """Returns the error for a file that seems sound, but cannot be read in place."""
    return CheckpointCorruptError(
        f"{path}: {what}, which this release cannot read in place; nothing was loaded and nothing is known to be wrong "
        f"with the file: {advice}",
        kind=kind,
        path=path,
    )


def too_much(path: str, what: str) -> UnsafeCheckpointError:
    """Returns the error for a file that would take more memory than any honest one."""
    return UnsafeCheckpointError(
        f"{path}: {what}; it was not read further and nothing was loaded: do not trust this file",
        kind="limits_exceeded",
        path=path,
    )


def checked_name(name: str, path: str) -> str:
    """Returns `name`, which the file `path` gives. Raises UnsafeCheckpointError (path_escape) if it could leave the
    folder.
    """
    try:
        return check_name(name)
    except UnsafeCheckpointError as error:
        raise with_path(error, path) from error


def with_path(error: CheckpointError, path: str) -> CheckpointError:
    """Returns an error of the same class and kind, with `path` before its message."""
    return type(error)(f"{path}: {error.message}", kind=error.kind, path=path)
