"""Memory that several threads share, counted in bytes. It allocates nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Bytes that are there for all. Who needs more than there are at all gets all of them, alone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free = num_bytes
        self._broken_by: type[Exception] | None = None
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """Waits until there is room. Raises what `break_off` was given."""
        wanted = min(num_bytes, self._num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._broken_by is not None or self._free >= wanted)
            if self._broken_by is not None:
                raise self._broken_by
            self._free -= wanted

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._free += min(num_bytes, self._num_bytes)
            self._changed.notify_all()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give(num_bytes)

    def break_off(self, error: type[Exception]) -> None:
        """Nobody waits any longer: who does, or comes now, gets this error."""
        with self._changed:
            self._broken_by = error
            self._changed.notify_all()
