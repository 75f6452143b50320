"""Compares the phases of a save with those of earlier saves of the same process: what takes much longer than it did is
worth a warning, because storage that gets slow costs training time long before it fails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

_FACTOR = 3.0
_MIN_EXTRA_S = 1.0
"""Shorter delays are noise."""
_MIN_EARLIER = 3
_MAX_EARLIER = 16
_MAX_ROOTS = 64
"""Limit of pairs of root and number of ranks: there is one more for each save that has a path of its own."""
_ALIKE = 1.5
"""Saves whose bytes differ by a greater factor are not compared."""
_COMPARED = ("plan", "stage", "write", "upload", "commit")


class SlowPhase(NamedTuple):
    """A phase that took much longer than in earlier saves."""

    phase: str
    seconds: float
    """Seconds of the slowest rank."""
    usual_s: float
    """Median of the slowest ranks of earlier saves, in seconds."""
    num_earlier: int
    """Number of earlier saves that it was compared with."""
    slowest: int
    """Position of the slowest rank among the ranks of the save."""
    is_of_one: bool
    """True if some ranks report no time of the phase, because only one rank does what it is for."""


class _EarlierSave(NamedTuple):
    num_bytes: int
    seconds: Mapping[str, float]


class PhaseHistory:
    """Phases of the latest saves of a process, by the root that they went to and the number of ranks: of each of the
    last 64 pairs, up to 16 saves.
    """

    def __init__(self) -> None:
        self._saves: dict[tuple[str, int], deque[_EarlierSave]] = {}
        self._lock = threading.Lock()  # one save may upload while another one is written

    def add(self, root: str, num_bytes: int, by_rank: Sequence[Mapping[str, float]]) -> list[SlowPhase]:
        """Adds a save, given the seconds of each rank by phase. Returns its phases that took much longer than the
        median of earlier saves of about as many bytes; none before there are a few of those.
        """
        phases = [phase for phase in _COMPARED if any(phase in seconds for seconds in by_rank)]
        slowest = {phase: max(seconds.get(phase, 0.0) for seconds in by_rank) for phase in phases}
        with self._lock:
            key = root, len(by_rank)
            saves = self._saves[key] = self._saves.pop(key, deque(maxlen=_MAX_EARLIER))
            if len(self._saves) > _MAX_ROOTS:
                del self._saves[next(iter(self._saves))]
            alike = [
                save for save in saves if num_bytes <= _ALIKE * save.num_bytes and save.num_bytes <= _ALIKE * num_bytes
            ]
            saves.append(_EarlierSave(num_bytes, slowest))
        slow = []
        for phase, seconds in slowest.items():
            earlier = [save.seconds[phase] for save in alike if phase in save.seconds]
            usual = median(earlier) if len(earlier) >= _MIN_EARLIER else seconds
            if seconds >= _FACTOR * usual and seconds - usual >= _MIN_EXTRA_S:
                rank = next(number for number, each in enumerate(by_rank) if each.get(phase) == seconds)
                num_reported = sum(phase in each for each in by_rank)
                slow.append(SlowPhase(phase, seconds, usual, len(earlier), rank, num_reported < len(by_rank)))
        return slow


def slow_text(slow: SlowPhase, path: str, global_ranks: Sequence[int]) -> str:
    """Returns the warning about a slow phase."""
    rank = global_ranks[slow.slowest]
    measured = f"measured on rank {rank}, which waits for the other ranks"
    source = measured if slow.is_of_one else f"rank {rank} took longest"
    return (
        f"the save to {path} took {slow.seconds:.1f} s to {slow.phase}, {slow.seconds / max(slow.usual_s, 1e-3):.1f} "
        f"times as long as usual ({slow.usual_s:.1f} s, the median of {slow.num_earlier} earlier saves); {source}"
    )
