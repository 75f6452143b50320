"""One input at a time, looked at while it is read: what it raises, the processor time and the memory that it takes."""

from __future__ import annotations

import gc
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Self

from bytecheckpoint import errors
from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError

LONGEST_S = 1.0
"""Of processor time for one input."""
MOST_BYTES = 256 << 20
"""More than at the start, at any time."""
_GIVE_UP_S = 10.0
_ADDRESS_SPACE_BYTES = 3 << 30
"""More than at the start: what asks for that much gets a MemoryError, and does not take the machine along."""


class Hung(BaseException):
    """Raised in the middle of whatever takes so long."""


class Watch:
    """Watches inputs one after the other. Its limits hold for the process while the context lasts."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most_bytes = 0
        """More than at the start."""
        self.num_refused = 0
        self._kinds = documented_kinds()

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # what is there already is not looked through again and again on an input's account
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space_bytes() + _ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._address_space[1]))
        self._handler = signal.signal(signal.SIGPROF, _give_up)
        self._start_bytes = _peak_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._handler)
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)
        gc.unfreeze()

    def attempt(self, read: Callable[[bytes], None], data: bytes) -> str | None:
        """What is wrong with how an input was read; None where nothing is."""
        signal.setitimer(signal.ITIMER_PROF, _GIVE_UP_S)
        started = time.process_time()
        try:
            read(data)
            wrong = None
        except CheckpointError as error:
            wrong = self._wrong_kind(error)
            self.num_refused += 1
        except Hung:
            wrong = f"given up after {_GIVE_UP_S:g} s of processor time"
        except BaseException as error:  # of a reader that is what is looked for
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong = "".join(traceback.format_exception(error, limit=-6)).strip()
        seconds = time.process_time() - started
        signal.setitimer(signal.ITIMER_PROF, 0)
        return wrong or self._took(seconds)

    def _wrong_kind(self, error: CheckpointError) -> str | None:
        name = type(error).__name__
        if error.kind in self._kinds[name] and error.message:
            return None
        return f"{name} of the kind {error.kind!r}, which is not documented: {error.message}"

    def _took(self, seconds: float) -> str | None:
        self.longest_s = max(self.longest_s, seconds)
        num_bytes = _peak_bytes() - self._start_bytes
        grown, self.most_bytes = num_bytes > self.most_bytes, max(self.most_bytes, num_bytes)
        if seconds > LONGEST_S:
            return f"it took {seconds:.2f} s of processor time"
        if grown and num_bytes > MOST_BYTES:
            return f"it took {num_bytes} bytes of memory"
        return None


def documented_kinds() -> dict[str, set[str]]:
    """What stands beside each class at the top of errors.py; of the root, what its own docstring says."""
    kinds: dict[str, set[str]] = {"CheckpointError": {"rank_failed", "rank_missing"}}
    name = ""
    for line in (errors.__doc__ or "").splitlines():
        match = re.search(r"(\w+Error) +\(\w+\) +(.*)|│? {30,}(.*)", line)
        if match:
            name = match.group(1) or name
            kinds.setdefault(name, set()).update(re.findall(r"[a-z_]+", match.group(2) or match.group(3)))
    assert kinds.keys() == ERROR_CLASSES.keys(), kinds
    return kinds


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise Hung


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
