"""Memory map of this process, from /proc. Knows addresses only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np


class MemoryArea(NamedTuple):
    """A range of addresses with the same permissions."""

    start: int
    end: int
    """One past the last."""
    is_writable: bool


def memory_areas() -> list[MemoryArea]:
    """Returns all areas in ascending order; an empty list without /proc."""
    maps = ""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
    areas = []
    for line in maps.splitlines():
        addresses, flags = line.split(maxsplit=2)[:2]
        start, end = addresses.split("-")
        areas.append(MemoryArea(int(start, 16), int(end, 16), flags[1] == "w"))
    return areas


def are_read_only(addresses: np.ndarray) -> np.ndarray:
    """Returns for each address True if it is known to be read-only."""
    read_only_areas = [area for area in memory_areas() if not area.is_writable]
    starts, ends = (np.array([0, *(area[side] for area in read_only_areas)], np.uint64) for side in (0, 1))
    places = addresses.astype(np.uint64)
    are_inside: np.ndarray = places < ends[np.searchsorted(starts, places, side="right") - 1]
    return are_inside
