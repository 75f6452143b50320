"""How much memory a group of processes takes, sampled from /proc while something runs. Linux only."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.03
PROC = Path("/proc")


class PeakMemory:
    """Within its block, watches the processes of some sessions; `bytes` is the most that they had at one time."""

    def __init__(self, sessions: Collection[int]) -> None:
        self.bytes = 0
        self._sessions = sessions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

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
            self.bytes = max(self.bytes, memory_of(self._sessions))
            if self._stop.wait(PERIOD_S):
                return


def memory_of(sessions: Collection[int]) -> int:
    """Bytes of anonymous and shared memory of all processes of these sessions, each page once; no page cache."""
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
