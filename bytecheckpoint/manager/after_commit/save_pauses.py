"""Pauses of background work while a save is in flight: both want the same disk, or requests of the same store. Knows no
store.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_LONGEST_S = 30.0
"""Longest sum of pauses until work has caught up; after it, work goes on during saves, however many follow."""
_QUIET_S = 0.05
"""Time without a save after which work that was held up goes on: the next save may begin at once."""


class OngoingSaves:
    """The saves of one manager that are under way. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num = 0
        self._ended_at = -math.inf

    def begin(self) -> None:
        with self._changed:
            self._num += 1

    def end(self) -> None:
        """Notes that a save has ended, with or without an error."""
        with self._changed:
            self._num -= 1
            self._ended_at = time.monotonic()
            self._changed.notify_all()

    @property
    def is_any(self) -> bool:
        return self._num > 0

    @property
    def is_quiet(self) -> bool:
        """True if no save is in flight, and none has ended in the last `_QUIET_S` seconds."""
        return not self._num and time.monotonic() - self._ended_at >= _QUIET_S

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until a save ends, at most `timeout_s`; if none is in flight, only until `is_quiet` is true."""
        with self._changed:
            quiet_s = max(0.0, self._ended_at + _QUIET_S - time.monotonic())
            self._changed.wait(timeout_s if self._num else min(timeout_s, quiet_s))


class SavePauses:
    """The pauses of one kind of background work."""

    def __init__(self, saves: OngoingSaves, *, meanwhile: Callable[[], object]) -> None:
        """`meanwhile` is called during a pause, each time that a save has ended. `pause` raises what it raises."""
        self._saves = saves
        self._meanwhile = meanwhile
        self._left_s = _LONGEST_S

    def pause(self) -> None:
        """Waits until no save is in flight and none has followed at once, or until the pauses since the work last
        caught up add up to `_LONGEST_S`. At most one thread may call this at a time.
        """
        if not self._saves.is_any:
            return
        while self._left_s > 0 and not self._saves.is_quiet:
            began = time.monotonic()
            self._saves.wait_for_end(self._left_s)
            self._left_s -= time.monotonic() - began
            self._meanwhile()

    def note_caught_up(self) -> None:
        """Notes that all work is done: later work may again be held up for `_LONGEST_S`."""
        self._left_s = _LONGEST_S
