"""Guards against re-entrant saves: a signal handler that interrupts a thread which a save waits for must not wait for a
save itself, because neither would ever end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.errors import CheckpointSaveError

_REFUSAL = (
    "this thread is inside a save, which waits for it, and was interrupted to wait for a save, as by a signal handler "
    "that calls save, load or a handle: neither would ever end. Nothing was begun here; the handle or error of the "
    "interrupted save says whether that is committed. Let the handler set a flag, and save between two steps"
)


class AwaitedThreads:
    """The threads that a save waits for now."""

    def __init__(self) -> None:
        self._threads: dict[object, int] = {}
        """Threads by context: one may be awaited for several reasons."""
        self._is_registered = False

    @contextmanager
    def here(self) -> Iterator[None]:
        """Notes this thread as awaited until `leave`, or until the context ends, which may be on another thread."""
        if not self._is_registered:  # here, because an import registers nothing
            self._is_registered = True
            os.register_at_fork(after_in_child=self._forget)
        entry = object()
        self._threads[entry] = threading.get_ident()
        try:
            yield
        finally:
            self._threads.pop(entry, None)

    def leave(self) -> None:
        """Notes that no save waits for this thread any longer, whatever contexts of `here` it is in."""
        for entry, thread in list(self._threads.items()):
            if thread == threading.get_ident():
                self._threads.pop(entry, None)

    def raise_if_awaited(self) -> None:
        """Raises CheckpointSaveError if a save waits for this thread."""
        if threading.get_ident() in list(self._threads.values()):
            raise CheckpointSaveError(_REFUSAL, kind="rank_failed")

    def _forget(self) -> None:
        """Forgets the saves, which a forked child does not have."""
        self._threads = {}


def is_refusal(error: BaseException) -> bool:
    """Returns True for an error of `raise_if_awaited` in this process; other ranks get it with another message."""
    return isinstance(error, CheckpointSaveError) and error.message == _REFUSAL


_AWAITED: dict[str, AwaitedThreads] = {}
"""Empty until the first save. A dict, because `setdefault` is one step for all threads."""


def awaited_threads() -> AwaitedThreads:
    """Returns the threads that saves of this process wait for: one object, because saves take turns in a process."""
    return _AWAITED.get("threads") or _AWAITED.setdefault("threads", AwaitedThreads())
