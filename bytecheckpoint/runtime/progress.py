"""Counts the bytes of a save or a load on one rank, and reports them to `on_progress`. Knows no file and no store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

logger = logging.getLogger("bytecheckpoint")

_REPORT_S = 0.1
"""Least time between two reports of bytes; the begin and the end of a phase are always reported."""
_ORDER = ("plan", "stage", "write", "upload", "read", "commit", "done", "failed")
"""Order of the phases. They overlap: a phase that begins late does not hide a later phase of this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a save or a load on one rank."""

    path: str
    """Path or URL of the checkpoint."""
    rank: int
    """Global rank of this process."""
    phase: str
    """`plan`, `stage`, `write`, `upload` (with a local stage), `commit`; of a load `plan` and `read`. At the end `done`
    or `failed`."""
    bytes_done: int = 0
    """Bytes that this rank has written (before compression), uploaded or read (as stored) in this phase."""
    bytes_total: int = 0
    """Bytes of this rank in this phase; 0 in phases that count none. Bytes that other ranks pass on do not count."""
    seconds: float = 0.0
    """Seconds since this phase began; 0.0 at the end."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second in this phase; 0.0 before the first ones."""
        return self.bytes_done / self.seconds if self.seconds else 0.0

    @property
    def is_finished(self) -> bool:
        """True at the end, with or without an error."""
        return self.phase in {"done", "failed"}


OnProgress = Callable[[Progress], object]


class ProgressMeter:
    """The progress of one save or load on this rank. Methods may be called from any thread."""

    def __init__(self, path: str, rank: int, doing: str, on_progress: OnProgress | None) -> None:
        """`doing` is `save` or `load`, for the log. `on_progress` gets one report at a time."""
        self._on_progress = on_progress
        self._doing = doing
        self._state = threading.RLock()  # a signal handler may ask while this thread does
        self._reporting = threading.Lock()
        self._started = self._phase_started = time.monotonic()
        self._reported_at = 0.0
        self._now = Progress(path=path, rank=rank, phase="plan")
        self._report(is_due=True)

    @property
    def is_watched(self) -> bool:
        """True if there is an `on_progress` that gets reports; False once it has failed."""
        return self._on_progress is not None

    def now(self) -> Progress:
        """Returns the state of this moment. Its `seconds` are 0.0 once the save or load has ended."""
        with self._state:
            seconds = 0.0 if self._now.is_finished else time.monotonic() - self._phase_started
            return replace(self._now, seconds=seconds)

    def begin(self, phase: str, bytes_total: int = 0) -> None:
        """Begins a phase and reports it; does nothing if this one or a later one has begun."""
        with self._state:
            if self._now.is_finished or _ORDER.index(phase) <= _ORDER.index(self._now.phase):
                return
            earlier, started = self._now, time.monotonic()
            seconds, self._phase_started = started - self._phase_started, started
            self._now = replace(self._now, phase=phase, bytes_done=0, bytes_total=bytes_total)
        about = (self._doing, earlier.path, earlier.rank, earlier.phase, seconds, phase, bytes_total)
        with suppress(Exception):  # a filter of the log may raise
            logger.debug("%s of %s on rank %d: %s took %.3f s, then %s (%d bytes)", *about)
        self._report(is_due=True)

    def expect(self, phase: str, num_bytes: int) -> None:
        """Begins a phase of so many bytes, as `begin` does; if it is under way, adds them to its `bytes_total`."""
        with self._state:
            is_under_way = self._now.phase == phase
            if is_under_way:
                self._now = replace(self._now, bytes_total=self._now.bytes_total + num_bytes)
        if not is_under_way:
            self.begin(phase, num_bytes)

    @contextmanager
    def reports_failure(self) -> Iterator[None]:
        """Surrounds a part of the save or load; if that raises, begins the phase `failed`, and raises the error."""
        try:
            yield
        except BaseException:
            self.begin("failed")
            raise

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Surrounds the rest of the save or load, and begins the phase `done` or `failed` at its end."""
        with self.reports_failure():
            yield
        self.begin("done")

    def add(self, num_bytes: int) -> None:
        """Counts bytes of the phase that is under way, and reports them unless there was a report just now."""
        with self._state:
            self._now = replace(self._now, bytes_done=self._now.bytes_done + num_bytes)
        self._report(is_due=False)

    def _report(self, *, is_due: bool) -> None:
        """Calls `on_progress`. Unless it `is_due`, the report is left out while another is under way or was made just
        now. An error of `on_progress` is logged and ends the reports; only an interrupt of the main thread is raised.
        """
        if not self.is_watched or not self._reporting.acquire(blocking=is_due):
            return
        try:
            on_progress = self._on_progress  # None if it failed while this thread waited
            if on_progress is not None and (is_due or time.monotonic() - self._reported_at >= _REPORT_S):
                self._reported_at = time.monotonic()
                on_progress(self.now())
        except BaseException as error:
            self._on_progress = None
            # On the main thread it may come from Ctrl-C or a signal handler, which must not be lost.
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            with suppress(Exception):
                logger.exception("on_progress failed, and is not called again; the %s goes on", self._doing)
        finally:
            self._reporting.release()
