"""Descriptors that a store leaves open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Returns the files of a folder, and itself, that this process has open. Hazard: the descriptors of the whole
    process are no measure, because servers and clients of earlier tests close theirs when they please.
    """
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of this listing, and those of other threads
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    place = str(folder.resolve())
    return [path for path in found if path == place or path.startswith(f"{place}/")]
