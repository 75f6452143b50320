"""An object store whose every operation is in the hands of a test: it fails, is cut, is answered too late, arrives when
nobody waits for it any more, or comes twice. It has a clock of its own, and it lives in the memory of the test, so that
no process that dies takes anything along.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointError, CheckpointSaveError, StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends.posix_errors import already_exists, missing_file, truncated
from bytecheckpoint.storage.inventory import StoredObject
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, check_name, join_name
from bytecheckpoint.storage.store import Access, FillHook

SCHEME = "world://"
_SOME_ID = "0" * 16
_OBJECT_OF_SAVE = re.compile(r"/(?:data|telemetry)/([0-9a-f]{16})-")


class Fault(Enum):
    """What becomes of an operation."""

    FAIL = "nothing happens, and the store cannot be reached"
    LOSE = "it is carried out, and the answer is lost"
    LATE = "the answer is that the store cannot be reached; a write is carried out later all the same"
    CUT = "a write ends half-way: nothing is published, and an unfinished upload is left; for others as FAIL"
    AGAIN = "a manifest that is created is created twice, as by a client that sends again; for others as LOSE"
    REFUSE = "the store says that this may not be done"
    FULL = "a write is told that there is no space; for others as REFUSE"


class Operation(NamedTuple):
    """What a store is asked for."""

    kind: str
    """`write`, `read`, `list`, `delete`, `inventory`, `uploads` or `abort`."""
    name: str
    """From the root of the world on."""
    arguments: tuple[Any, ...] = ()


class Stored(NamedTuple):
    """An object."""

    content: bytes
    changed_s: float
    version: int
    """Unlike that of any other."""


class Upload(NamedTuple):
    """One that was begun and not finished."""

    name: str
    started_s: float
    upload_id: int


class Late(NamedTuple):
    """A write that is still on its way."""

    operation: Operation
    stood: int | None
    """The version of what stood there when it was sent: a store that compares replaces nothing else."""


class World:
    """All objects of all stores, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[int, Upload] = {}
        self.late: list[Late] = []
        self.now_s = 1e9
        self._numbers = itertools.count(1)

    def carry_out(self, operation: Operation) -> Any:
        """The answer. Raises what a store raises."""
        return getattr(self, f"_{operation.kind}")(operation.name, *operation.arguments)

    def break_off(self, operation: Operation, fault: Fault) -> CheckpointError:
        """Does of the operation what the fault lets it, and returns what whoever asked is told."""
        is_write = operation.kind == "write"
        if fault is Fault.AGAIN and is_write and operation.name.endswith("/manifest.bcp"):
            with suppress(CheckpointError):
                self.carry_out(operation)
            return already_exists(operation.name)
        if fault in {Fault.LOSE, Fault.AGAIN}:
            with suppress(CheckpointError):
                self.carry_out(operation)
        if fault is Fault.LATE and is_write:
            self.late.append(Late(operation, self.version(operation.name)))
        if fault is Fault.CUT and is_write:
            self.leave_upload(operation.name)
        if fault is Fault.FULL and is_write:
            return CheckpointSaveError("the store is full", kind="no_space", path=operation.name)
        if fault in {Fault.REFUSE, Fault.FULL}:
            return StorageError("the store refused", kind="permission", path=operation.name)
        return StorageError("the store did not answer", kind="unavailable", path=operation.name)

    def arrive(self, late: Late) -> None:
        """What was on its way arrives. As S3 does, the store carries it out only where all is as it was then."""
        self.late.remove(late)
        if self.version(late.operation.name) == late.stood:
            with suppress(CheckpointError):
                self.carry_out(late.operation)

    def version(self, name: str) -> int | None:
        return self.objects[name].version if name in self.objects else None

    def leave_upload(self, name: str) -> None:
        number = next(self._numbers)
        self.uploads[number] = Upload(name, self.now_s, number)

    def leave_temporary(self, operation: Operation) -> None:
        """What a process that is killed while it writes leaves on a file system."""
        folder, _, last = operation.name.rpartition("/")
        content = operation.arguments[0]
        self._put(f"{folder}/{TEMPORARY_PREFIX}{_SOME_ID}-{last}", content[: len(content) // 2])

    def _put(self, name: str, content: bytes) -> None:
        self.objects[name] = Stored(content, self.now_s, next(self._numbers))

    def _write(self, name: str, content: bytes, replace: bool) -> None:
        if name in self.objects and not replace:
            raise already_exists(name)
        self._put(name, content)

    def _read(self, name: str, byte_offset: int, byte_length: int) -> bytes:
        if name not in self.objects:
            raise missing_file(name)
        content = self.objects[name].content
        if byte_offset + byte_length > len(content):
            raise truncated(name, wanted_end=byte_offset + byte_length, found_end=len(content))
        return content[byte_offset : byte_offset + byte_length]

    def _list(self, name: str) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {}
        for found, stored in self.below(name).items():
            first, _, rest = found[len(name) + 1 :].partition("/")
            if not first.startswith(TEMPORARY_PREFIX):
                sizes[first] = None if rest else len(stored.content)
        return sizes

    def below(self, name: str) -> dict[str, Stored]:
        """The objects in a folder and in those that are in it."""
        return {found: stored for found, stored in self.objects.items() if found.startswith(f"{name}/")}

    def _delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def _inventory(self, name: str) -> list[tuple[str, int, float]]:
        return [(found, len(stored.content), stored.changed_s) for found, stored in self.below(name).items()]

    def _uploads(self, name: str) -> list[Upload]:
        return [upload for upload in self.uploads.values() if upload.name.startswith(f"{name}/")]

    def _abort(self, _name: str, upload_id: int) -> None:
        self.uploads.pop(upload_id, None)


def save_id_in(name: str) -> str:
    """Of the save that has written an object, as far as its name tells; else empty."""
    found = _OBJECT_OF_SAVE.search(name)
    return found[1] if found else ""


class WorldStore:
    """A store at `world://...`. `ask` carries out what it is asked for, here or in another process."""

    def __init__(self, root: str, ask: Callable[[Operation], Any]) -> None:
        self._root = root.rstrip("/")
        self._ask = ask

    def __str__(self) -> str:
        return self._root

    @property
    def access(self) -> Access:
        return Access(latency_s=20e-3, bytes_per_s=100e6)

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        content = bytearray()
        for block in blocks:
            with block.content() as view:
                content += view
        self._ask(Operation("write", self._full(name), (bytes(content), replace)))

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        if buffer.nbytes:
            buffer.cast("B")[:] = self._ask(Operation("read", self._full(name), (byte_offset, buffer.nbytes)))
        if on_filled is not None:
            on_filled(buffer.nbytes)

    def list(self, folder: str) -> Mapping[str, int | None]:
        answer: dict[str, int | None] = self._ask(Operation("list", self._full(folder)))
        return answer

    def delete(self, name: str) -> None:
        self._ask(Operation("delete", self._full(name)))

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        found = self._ask(Operation("inventory", self._full(folder)))
        return iter([StoredObject(self._own(name), num_bytes, changed_s) for name, num_bytes, changed_s in found])

    def pending_uploads(self, folder: str) -> Sequence[Upload]:
        found = self._ask(Operation("uploads", self._full(folder)))
        return [upload._replace(name=self._own(upload.name)) for upload in found]

    def abort_upload(self, upload: Upload) -> None:
        self._ask(Operation("abort", self._full(upload.name), (upload.upload_id,)))

    def _full(self, name: str) -> str:
        return join_name(self._root, check_name(name) if name else "")

    def _own(self, full: str) -> str:
        return full[len(self._root) + 1 :]
