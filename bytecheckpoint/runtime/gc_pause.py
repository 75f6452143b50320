"""Pauses Python's cyclic garbage collector, which would look through a million short-lived records without a cycle."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses automatic collection: planning makes tuples by the hundred thousand, and each generation of them would be
    walked again and again. Reference counting goes on.

    This holds for all threads of the process, so nothing inside may wait for another rank while training goes on.
    """
    pause = _PAUSES.get("gc") or _PAUSES.setdefault("gc", _Pause())
    pause.begin()
    try:
        yield
    finally:
        pause.end()


class _Pause:
    """A pause from when the first of several threads enters until the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may import, too
        self._inside: list[int] = []
        """Threads, as often as they have entered."""
        self._was_enabled = False
        """True while the end of the pause has to enable the collector."""
        self._is_registered = False

    def begin(self) -> None:
        with self._lock:
            if not self._is_registered:  # here, because an import registers nothing
                os.register_at_fork(after_in_child=self._forget_others)
                self._is_registered = True
            # Hazard: between any two steps a signal handler may pause and end, or another thread may fork.
            self._inside.append(threading.get_ident())
            if gc.isenabled():
                self._was_enabled = True
            gc.disable()

    def end(self) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            self._end_if_empty()

    def _end_if_empty(self) -> None:
        if not self._inside and self._was_enabled:
            gc.enable()
            self._was_enabled = False

    def _forget_others(self) -> None:
        """Keeps, in a forked child, only the thread that forked."""
        self._lock = threading.RLock()
        self._inside = [thread for thread in self._inside if thread == threading.get_ident()]
        self._end_if_empty()


_PAUSES: dict[str, _Pause] = {}
"""Empty until the first pause. A dict, because `setdefault` is one step for all threads."""
