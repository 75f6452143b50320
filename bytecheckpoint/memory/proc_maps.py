"""Read-only memory of this process, from /proc. Knows addresses only."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np

_READ_ONLY = re.compile(r"^(\w+)-(\w+) .-", re.MULTILINE)


def are_read_only(addresses: np.ndarray) -> np.ndarray:
    """Returns for each address True if its memory is known not to be writable; False for all without /proc."""
    maps = ""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
    areas = _READ_ONLY.findall(maps)  # in ascending order
    bounds = [(0, 0), *((int(start, 16), int(end, 16)) for start, end in areas)]
    starts, ends = np.array(bounds, np.uint64).T
    places = addresses.astype(np.uint64)
    are_inside: np.ndarray = places < ends[np.searchsorted(starts, places, side="right") - 1]
    return are_inside
