"""When requests to a service may go on after it has asked for fewer: one decision for all threads of a process and all
processes of a host, because ranks that slow down each for itself come back all at once. It knows no backend.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import stat
import struct
import tempfile
import threading
import time

_STATE = struct.Struct("=dd")
"""On the monotonic clock of the host, in seconds: when requests go on, and how long they were held."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 20.0
_FORGET_S = 60.0
"""After so long without a complaint the next pause is a short one again."""


class Brake:
    """Holds requests to one service for a while. Methods may be called from any thread."""

    def __init__(self, service: str) -> None:
        """`service` names what is asked, in the same words in every process of the host."""
        digest = hashlib.sha256(service.encode()).hexdigest()[:16]
        name = f"bytecheckpoint-brake-{os.getuid()}-{digest}"
        self._path = os.path.join(tempfile.gettempdir(), name)  # noqa: PTH118
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()

    def slow_down(self) -> None:
        """The service has complained: everybody waits, twice as long as the last time. Complaints about requests that
        were sent before everybody waited change nothing.
        """
        now = time.monotonic()
        with self._lock:
            if self._memory is None:
                self._memory = _shared_memory(self._path, os.O_CREAT) or mmap.mmap(-1, _STATE.size)
            go_on, pause_s = self._state(now)
            if now < go_on:
                return
            is_first = pause_s == 0 or now > go_on + _FORGET_S
            longer_s = _FIRST_PAUSE_S if is_first else min(2 * pause_s, _MAX_PAUSE_S)
            _STATE.pack_into(self._memory, 0, now + longer_s, longer_s)

    def hold(self, stop: threading.Event, *, at_most_s: float) -> None:
        """Waits as long as everybody does and a random while longer, or until `stop` is set."""
        if self._memory is None:
            with self._lock:  # another thread may be about to slow everybody down
                if self._memory is None:
                    self._memory = _shared_memory(self._path, 0)
        now = time.monotonic()
        go_on, pause_s = self._state(now)
        if now < go_on:
            late_s = random.uniform(0, pause_s / 2)  # noqa: S311 - spreads requests, keeps no secret
            stop.wait(max(0.0, min(go_on - now + late_s, at_most_s)))

    def _state(self, now: float) -> tuple[float, float]:
        go_on, pause_s = (0.0, 0.0) if self._memory is None else _STATE.unpack_from(self._memory)
        # Hazard: the file may be older than the last start of the host, or damaged: neither may hold anybody for long.
        if not (0 < pause_s <= _MAX_PAUSE_S and go_on <= now + pause_s):
            return 0.0, 0.0
        return go_on, pause_s


def _shared_memory(path: str, flags: int) -> mmap.mmap | None:
    """The same for every process of this user on the host. None where the file is not there, or is not to be had."""
    try:
        # Hazard: anybody may have put a link there, or what is not ours, or a pipe, which would be waited for.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or found.st_nlink != 1 or not stat.S_ISREG(found.st_mode):
            return None
        # Hazard: a page that no disk has room for kills the process that stores into it, without an error.
        if found.st_size < _STATE.size and os.pwrite(fd, bytes(_STATE.size), 0) < _STATE.size:
            return None
        return mmap.mmap(fd, _STATE.size)
    except OSError:
        return None
    finally:
        os.close(fd)
