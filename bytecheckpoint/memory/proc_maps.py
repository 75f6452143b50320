"""What the kernel tells of the memory of this process. It knows addresses only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Area(NamedTuple):
    """Addresses that are alike in what may be done with them."""

    start: int
    end: int
    """One past the last."""
    is_writable: bool


def memory_areas() -> list[Area]:
    """All of them, rising; none where the kernel does not tell."""
    maps = ""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
    areas = []
    for line in maps.splitlines():
        addresses, flags = line.split(maxsplit=2)[:2]
        start, end = addresses.split("-")
        areas.append(Area(int(start, 16), int(end, 16), flags[1] == "w"))
    return areas


def are_read_only(addresses: np.ndarray) -> np.ndarray:
    """Of each address, whether it is known that it cannot be written to."""
    locked = [area for area in memory_areas() if not area.is_writable]
    starts, ends = (np.array([0, *(area[side] for area in locked)], np.uint64) for side in (0, 1))
    places = addresses.astype(np.uint64)
    is_locked: np.ndarray = places < ends[np.searchsorted(starts, places, side="right") - 1]
    return is_locked
