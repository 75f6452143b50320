"""Pauses of background work while a save is in flight: both want the same disk, or requests of the same store. Knows no
store.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_LONGEST_S = 30.0
"""Time that work pauses in all until it has caught up: after it, saves that follow one another hold nothing up."""
_QUIET_S = 0.05
"""Time without a save after which work that was held up goes on: the next save may begin at once."""


class OngoingSaves:
    """The saves of one manager that are under way. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num = 0
        self._ended_at = -math.inf

    def begin(self) -> None:
        """Notes that a save begins."""
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
        """True while a save is in flight."""
        return self._num > 0

    @property
    def is_quiet(self) -> bool:
        """True if no save is in flight, and none was a moment ago."""
        return not self._num and time.monotonic() - self._ended_at >= _QUIET_S

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns when a save ends, or without one after the moment that `is_quiet` asks for."""
        with self._changed:
            quiet_s = max(0.0, self._ended_at + _QUIET_S - time.monotonic())
            self._changed.wait(timeout_s if self._num else min(timeout_s, quiet_s))


class SavePauses:
    """The pauses of one background work."""

    def __init__(self, saves: OngoingSaves, *, meanwhile: Callable[[], object]) -> None:
        """`meanwhile` is called in a pause when a save has ended. It raises what `pause` is to raise."""
        self._saves = saves
        self._meanwhile = meanwhile
        self._left_s = _LONGEST_S

    def pause(self) -> None:
        """Returns when no save is in flight and none follows at once, or when the pauses have lasted `_LONGEST_S` since
        the work had caught up. One thread calls it at a time.
        """
        if not self._saves.is_any:
            return
        while self._left_s > 0 and not self._saves.is_quiet:
            began = time.monotonic()
            self._saves.wait_for_end(self._left_s)
            self._left_s -= time.monotonic() - began
            self._meanwhile()

    def catch_up(self) -> None:
        """Notes that all work is done: what comes from now on may be held up again."""
        self._left_s = _LONGEST_S
