"""Work on a thread of its own that is tried again, with growing pauses, until it succeeds. Knows no store."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from bytecheckpoint.runtime.thread_priority import lower_priority

logger = logging.getLogger("bytecheckpoint")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
_LOOK_S = 0.5


class RetriedWork:
    """The work and its thread, which starts when the work is first asked for. Methods may be called from any thread."""

    def __init__(self, name: str, do: Callable[[], object], *, what: str) -> None:
        """`do` does all the work there is. If it raises, it is called again after a pause; the first of several errors
        in a row is logged as a failure of `what`. `name` is the name of the thread.
        """
        self._name = name
        self._do = do
        self._what = what
        self._changed = threading.Condition()
        self._num_asked = self._num_done = 0
        self._progress_at = time.monotonic()
        self._failure: Exception | None = None
        self._failed_at = 0.0
        self._is_hurried = False
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        """Process of the thread: a forked child has none."""

    @property
    def _is_of_parent(self) -> bool:
        """True in a child that was forked since the thread was started: its copy of the lock may be held for ever."""
        return self._thread is not None and os.getpid() != self._pid

    def ask(self) -> None:
        """Asks for the work to be done once more. Never blocks. Raises RuntimeError, with nothing asked for, if the
        thread cannot start.
        """
        with self._changed:
            if self._thread is None:
                # A thread of its own: it lives as long as the manager, with a lower priority.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread, self._pid = thread, os.getpid()
            self._num_asked += 1
            self._changed.notify_all()

    def note_progress(self) -> None:
        """Notes that a part of the work is done, so that the work does not count as hanging."""
        self._progress_at = time.monotonic()

    def wait(self, *, began: float, failing_s: float, hanging_s: float) -> Exception | None:
        """Waits until all is done, and returns None. Returns the error of an attempt that failed `failing_s` or more
        after `began`, or of the last one before `close`; returns TimeoutError if there was no progress for `hanging_s`,
        counted from `began` at the earliest. Raises neither. `began` is a time of `time.monotonic`; the others are
        seconds. In a child that was forked since the thread was started, returns TimeoutError at once if not all was
        done.
        """
        if self._is_of_parent:
            is_done = self._num_done >= self._num_asked
            return None if is_done else TimeoutError("it goes on in the process that this one was forked from")
        with self._changed:
            self._is_hurried = True  # the next attempt is made now, not after a long pause
            self._changed.notify_all()
            while self._num_done < self._num_asked:
                now = time.monotonic()
                if self._failure is not None and (self._is_closing or self._failed_at - began >= failing_s):
                    return self._failure
                if now - max(began, self._progress_at) >= hanging_s:
                    return TimeoutError(f"no progress for {hanging_s:g} s")
                self._changed.wait(min(_LOOK_S, hanging_s))  # a failure wakes it
        return None

    def close(self) -> None:
        """Ends the thread after what it does now, without waiting for it."""
        if self._is_of_parent:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        lower_priority()
        pause_s = _SHORTEST_PAUSE_S
        while (asked := self._wait_for_work()) is not None:
            self.note_progress()
            try:
                self._do()
            except Exception as error:  # noqa: BLE001  a user's policy or a store; neither may stop saves
                if self._failure is None:
                    logger.warning("%s failed, and is tried again: %s", self._what, error)
                pause_s = self._pause(error, pause_s)
            else:
                if self._failure is not None:
                    logger.info("%s has caught up", self._what)
                pause_s = _SHORTEST_PAUSE_S
                with self._changed:
                    self._failure, self._num_done, self._is_hurried = None, asked, False
                    self._changed.notify_all()

    def _wait_for_work(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_done < self._num_asked or self._is_closing)
            return None if self._is_closing else self._num_asked

    def _pause(self, error: Exception, pause_s: float) -> float:
        """Waits before the next attempt; returns the pause to make if that attempt fails too."""
        with self._changed:
            self._failure, self._failed_at = error, time.monotonic()
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._is_closing or self._is_hurried, pause_s):
                self._is_hurried = False
                self._changed.wait_for(lambda: self._is_closing, _SHORTEST_PAUSE_S)
                return _SHORTEST_PAUSE_S
        return min(pause_s * 2, _LONGEST_PAUSE_S)
