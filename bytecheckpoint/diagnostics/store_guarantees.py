"""Checks of the guarantees that this library needs from a store. The checks write objects of their own, and touch no
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
)
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.garbage import pending_uploads
from bytecheckpoint.storage.inventory import HasPendingUploads
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Access, FillHook, Store, one_block

_MiB = 1 << 20
_LARGE_BLOCKS = 3
_LARGE_BLOCK_BYTES = 16 * _MiB
"""Three of them are more than any store sends in one request."""
_ROUNDS = 5
_WRITERS = 4


class GuaranteeCheck(NamedTuple):
    """The verdict on one guarantee."""

    name: str
    is_needed: bool
    """True if checkpoints are not safe without it."""
    is_kept: bool
    what: str
    """The observation."""


class ProbeStore:
    """A folder of another store. Notes the names that are written, so that `clear` can delete them."""

    def __init__(self, store: Store, folder: str, names: set[str] | None = None) -> None:
        """`names` are those of another ProbeStore of the same folder, for one `clear` of what both have written."""
        self.store = store
        self.folder = folder
        self.names = set[str]() if names is None else names

    def __str__(self) -> str:
        return join_name(str(self.store), self.folder)

    @property
    def access(self) -> Access:
        return self.store.access

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        self.names.add(name)
        self.store.write(join_name(self.folder, name), blocks, replace=replace)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        self.store.read_into(join_name(self.folder, name), byte_offset, buffer, on_filled=on_filled)

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self.store.list(join_name(self.folder, folder))

    def delete(self, name: str) -> None:
        self.store.delete(join_name(self.folder, name))
        self.names.discard(name)

    def clear(self) -> None:
        """Tries to delete everything that was written, then aborts all unfinished uploads in the folder, if the store
        lists them. At the end raises the first error of `delete`; an error of the uploads at once.
        """
        errors = []
        for name in sorted(self.names):
            try:
                self.delete(name)
            except CheckpointError as error:
                errors.append(error)
        for upload in pending_uploads(self.store, self.folder)[0]:
            if isinstance(self.store, HasPendingUploads):
                self.store.abort_upload(upload)
        if errors:
            raise errors[0]


def put(store: Store, name: str, content: bytes, *, replace: bool = False) -> None:
    """Writes an object of one block."""
    store.write(name, one_block(content), replace=replace)


def get(store: Store, name: str, byte_offset: int, byte_length: int) -> bytes:
    """Reads a range of an object."""
    buffer = bytearray(byte_length)
    store.read_into(name, byte_offset, memoryview(buffer))
    return bytes(buffer)


def check_guarantees(store: ProbeStore) -> Iterator[GuaranteeCheck]:
    """Yields the verdict on each guarantee; not kept if the store raises an error in its check. Raises the store's
    error if not even a small object can be written and read. Leaves objects, which `store.clear` deletes.
    """
    content = _pattern(100_003)
    put(store, "small", content)
    is_same = get(store, "small", 0, len(content)) == content
    yield GuaranteeCheck("read_back", True, is_same, "what was written is read" if is_same else "other bytes are read")
    for name, is_needed, probe in _PROBES:
        try:
            is_kept, what = probe(store)
        except CheckpointError as error:
            is_kept, what = False, error.message
        yield GuaranteeCheck(name, is_needed, is_kept, what)


_Found = tuple[bool, str]


def _check_ranges(store: ProbeStore) -> _Found:
    content = _pattern(100_003)
    for start, end in ((0, 1), (1, 2), (4095, 4097), (50_000, 100_003), (100_002, 100_003)):
        if get(store, "small", start, end - start) != content[start:end]:
            return False, f"bytes {start} to {end} are not those that were written"
    with suppress(CheckpointCorruptError):
        get(store, "small", 100_000, 10)
        return False, "a range past the end is read without an error"
    return True, "exact, and none past the end"


def _check_missing(store: ProbeStore) -> _Found:
    with suppress(CheckpointNotFoundError):
        get(store, "missing", 0, 1)
        return False, "an object that does not exist is read without an error"
    store.delete("missing")
    return True, "a missing object is reported as missing, and can be deleted"


def _check_create_only(store: ProbeStore) -> _Found:
    put(store, "created", b"first")
    with suppress(CheckpointExistsError):
        put(store, "created", b"other")
        return False, "a name that was taken was written again: a committed checkpoint could be replaced"
    is_same = get(store, "created", 0, 5) == b"first"
    return is_same, "a name that is taken is refused" + ("" if is_same else ", and yet its bytes are others now")


def _check_race(store: ProbeStore) -> _Found:
    for number in range(_ROUNDS):
        name = f"race-{number}"

        def create(writer: int, name: str = name) -> int | None:
            with suppress(CheckpointExistsError):
                put(store, name, b"%d" % writer)
                return writer
            return None

        created = map_jobs(create, range(_WRITERS), num_threads=_WRITERS)
        winners = [winner for winner in created if winner is not None]
        if len(winners) != 1:
            return False, (
                f"{len(winners)} of {_WRITERS} writers of one name at the same time were told that they had created "
                "it: let only one job save to a path"
            )
        if get(store, name, 0, 1) != b"%d" % winners[0]:
            return False, "the writer that was told that it had created a name is not the one whose bytes are there"
    return True, f"of {_WRITERS} writers of one name at the same time one wins, {_ROUNDS} times"


def _check_replace(store: ProbeStore) -> _Found:
    put(store, "replaced", b"first")
    put(store, "replaced", b"other", replace=True)  # as long, so that old bytes are read without an error
    is_new = get(store, "replaced", 0, 5) == b"other"
    return is_new, "the new bytes are read at once" if is_new else "the old bytes are read after they were replaced"


def _check_listing(store: ProbeStore) -> _Found:
    for number in range(_ROUNDS):
        name, size = f"listed/{number}", 10 + number
        put(store, name, bytes(size))
        listed = store.list("listed").get(str(number))
        if listed != size:
            return False, f"an object of {size} bytes is listed as {listed} after it was written: `latest` could be old"
        store.delete(name)
        if str(number) in store.list("listed"):
            return False, "an object is still listed after it was deleted"
    return True, f"what is written or deleted is seen at once, {_ROUNDS} times"


class _StoppedError(Exception):
    """Raised by a block in the middle of a write."""


def _check_whole_or_nothing(store: ProbeStore) -> _Found:
    def stop() -> None:
        raise _StoppedError

    with suppress(_StoppedError):
        _write_large(store, "stopped", before_last=stop)
    if "stopped" in store.list(""):
        return False, "an object whose writing was stopped is there, cut short"
    pending, not_looked_for = pending_uploads(store.store, store.folder)
    if pending:
        return False, f"{len(pending)} unfinished uploads are left, and cost space until someone aborts them"
    if not_looked_for:
        return True, f"an object whose writing was stopped is not there; uploads were not looked for: {not_looked_for}"
    return True, "an object whose writing was stopped leaves nothing"


def _check_large(store: ProbeStore) -> _Found:
    early: list[bool] = []
    _write_large(store, "large", before_last=lambda: early.append("large" in store.list("")))
    size = _LARGE_BLOCKS * _LARGE_BLOCK_BYTES
    if early[0]:
        return False, "an object is seen before it is complete"
    if store.list("").get("large") != size:
        return False, f"an object of {size} bytes is listed as {store.list('').get('large')}"
    expected = _pattern(_LARGE_BLOCK_BYTES)
    for number in range(_LARGE_BLOCKS):
        start = number * _LARGE_BLOCK_BYTES
        if get(store, "large", start + _LARGE_BLOCK_BYTES - 1000, 1000) != expected[-1000:]:
            return False, f"the bytes before byte {start + _LARGE_BLOCK_BYTES} are not those that were written"
    store.delete("large")
    return True, f"{size >> 20} MiB in {_LARGE_BLOCKS} parts, seen when it was complete"


def _write_large(store: ProbeStore, name: str, *, before_last: Callable[[], object]) -> None:
    content = memoryview(_pattern(_LARGE_BLOCK_BYTES))

    @contextmanager
    def block(number: int) -> Iterator[memoryview]:
        if number == _LARGE_BLOCKS - 1:
            before_last()
        yield content

    starts = range(0, _LARGE_BLOCKS * _LARGE_BLOCK_BYTES, _LARGE_BLOCK_BYTES)
    blocks = [Block(start, _LARGE_BLOCK_BYTES, partial(block, number)) for number, start in enumerate(starts)]
    store.write(name, blocks, replace=False)


def _pattern(num_bytes: int) -> bytes:
    """Returns bytes whose values depend on their positions."""
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


_PROBES: Sequence[tuple[str, bool, Callable[[ProbeStore], _Found]]] = (
    ("exact_ranges", True, _check_ranges),
    ("missing_objects", True, _check_missing),
    ("create_only", True, _check_create_only),
    ("create_race", False, _check_race),
    ("replace", True, _check_replace),
    ("fresh_listing", True, _check_listing),
    ("large_objects", True, _check_large),
    ("whole_or_nothing", True, _check_whole_or_nothing),
)
