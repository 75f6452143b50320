"""Memory of processes, sampled from /proc while something runs. Linux only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.03
PROC = Path("/proc")


class PeakMemory:
    """Samples `memory` within its block; `bytes` is the most there was at one time, beyond what there was before."""

    def __init__(self, memory: Callable[[], int], *, period_s: float = PERIOD_S) -> None:
        self.bytes = 0
        self._period_s = period_s
        self._memory = memory
        self._before = memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def most(self) -> int:
        """Bytes at the peak, with what there was before."""
        return self._before + self.bytes

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, self._memory() - self._before)
            if self._stop.wait(self._period_s):
                return


def memory_of(sessions: Collection[int]) -> int:
    """Returns bytes of anonymous and shared memory of all processes of these sessions, each page once."""
    return sum(_proportional_bytes(pid) for pid in _members(sessions))


def _members(sessions: Collection[int]) -> Iterator[int]:
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of the program may hold anything: fields are counted from behind its closing bracket.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) in sessions:
            yield int(folder.name)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # as above
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def own_memory() -> int:
    """Returns bytes of anonymous and shared memory of this process; pages of mapped files do not count."""
    lines = (PROC / "self" / "status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
