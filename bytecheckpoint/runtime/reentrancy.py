"""Threads that a save waits for. What interrupts one of them, as the handler of a signal does, must not wait for a save
in its turn: neither would ever end. It knows nothing of what a save does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.errors import CheckpointSaveError

_REFUSAL = (
    "this thread is inside a save, which waits for it, and was interrupted to wait for a save, as by a signal handler "
    "that calls save, load or a handle: neither would ever end. Nothing was begun here; whether the save that was "
    "interrupted is committed, its own handle or error tells. Let the handler set a flag, and save between two steps"
)


class AwaitedThreads:
    """Which threads a save waits for now."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def here(self) -> Iterator[None]:
        """This thread is awaited for as long as the context lasts, which may end on another one, or until it leaves."""
        stay = object()
        self._threads[stay] = threading.get_ident()
        try:
            yield
        finally:
            self._threads.pop(stay, None)

    def leave(self) -> None:
        """This thread is awaited no longer."""
        for stay, thread in list(self._threads.items()):
            if thread == threading.get_ident():
                self._threads.pop(stay, None)

    def refuse(self) -> None:
        """Raises CheckpointSaveError on a thread that a save waits for."""
        if threading.get_ident() in list(self._threads.values()):
            raise CheckpointSaveError(_REFUSAL, kind="rank_failed")

    def _forget(self) -> None:
        """A forked child has none of the saves."""
        self._threads: dict[object, int] = {}
        """By stay: a thread may be awaited for several reasons."""


def is_refusal(error: BaseException) -> bool:
    """Whether this is what `refuse` has raised, on this thread: others hear of it in other words."""
    return isinstance(error, CheckpointSaveError) and error.message == _REFUSAL


AWAITED = AwaitedThreads()
"""One a process, as there is one turn to save."""
