"""Files that nobody waits for to reach the disk, which takes longer than all else in a small save. Tests see which
files are synced and in which order all the same. What outlives a power cut is shown by programs of tests/faults, and
tests of local files ask for the fixture `synced`: they wait.
"""

from __future__ import annotations

import os

real_fsync = os.fsync


def _fsync(fd: int) -> None:
    os.fstat(fd)  # one that is not open is still an error


def install() -> None:
    """Once in a process. Children that are forked from it have it as well."""
    os.fsync = _fsync
