"""A store around any other that fails on demand, for tests of everything above stores: for each k, the k-th operation
fails in each of the ways in which storage fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.store import Access, Store


class Fault(Enum):
    """How the chosen operation fails."""

    BEFORE = "nothing happens"
    AFTER = "it is carried out, but the answer is lost"
    CUT = "a write enters half of its blocks and publishes nothing; for the other operations as BEFORE"


def unavailable() -> StorageError:
    return StorageError("the storage was made to fail", kind="unavailable", path="faulty")


class FaultyStore:
    """Passes every operation on, but for number `fail_at` (the first is 1; 0 never fails).

    Every operation of every thread counts, in the order in which they begin; `operations` says which they were.
    """

    def __init__(
        self,
        store: Store,
        *,
        fail_at: int = 0,
        fault: Fault = Fault.BEFORE,
        make_error: Callable[[], Exception] = unavailable,
        counts: Callable[[str, str], bool] = lambda _operation, _name: True,
        broken_from_then_on: bool = False,
    ) -> None:
        self.store = store
        self.operations: list[str] = []
        """`write step_00000001/manifest.bcp`, ..., those that count."""
        self.failed = False
        self._fail_at = fail_at
        self._fault = fault
        self._make_error = make_error
        self._counts = counts
        self._broken_from_then_on = broken_from_then_on
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.store)

    @property
    def access(self) -> Access:
        return self.store.access

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        with self._operation("write", name) as fails:
            if fails and self._fault is Fault.CUT:
                for block in blocks[: max(1, len(blocks) // 2)]:
                    with block.content():
                        pass
            else:
                self.store.write(name, blocks, replace=replace)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
        with self._operation("read_into", name):
            self.store.read_into(name, byte_offset, buffer, on_filled=on_filled)

    def list(self, folder: str) -> Mapping[str, int | None]:
        with self._operation("list", folder):
            return self.store.list(folder)

    def delete(self, name: str) -> None:
        with self._operation("delete", name):
            self.store.delete(name)

    @contextmanager
    def _operation(self, operation: str, name: str) -> Iterator[bool]:
        fails = self._count(operation, name)
        acts = self._fault is Fault.AFTER or (self._fault is Fault.CUT and operation == "write")
        if fails and not acts:
            raise self._make_error()
        yield fails
        if fails:
            raise self._make_error()

    def _count(self, operation: str, name: str) -> bool:
        """Whether this operation is to fail."""
        with self._lock:
            if not self._counts(operation, name):
                return False
            self.operations.append(f"{operation} {name}")
            number = len(self.operations)
            fails = number == self._fail_at or (self._broken_from_then_on and 0 < self._fail_at <= number)
            self.failed = self.failed or fails
            return fails
