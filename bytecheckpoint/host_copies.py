"""Pieces of a buffer copied to where each belongs in the memory of this process, many in one call, because a state may
have 100,000 small tensors. It knows addresses only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

import numpy as np

_MAX_PIECES = 1024
"""In one call: the kernel takes no more."""
_MAX_BYTES = 1 << 30
"""In one call, which the kernel cuts off below 2 GiB."""
_REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES}
"""By a kernel that has no such call, or a sandbox that forbids it."""

_ReadMemory = Callable[[int, int, int, int, int, int], int]


def scatter(sources: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
    """Copies `lengths` bytes each from the addresses `sources` to `addresses`. Other threads go on meanwhile.

    Raises OSError (EFAULT) where memory cannot be written to.
    """
    for first in range(0, len(sources), _MAX_PIECES):
        some = slice(first, first + _MAX_PIECES)
        if not _in_one_call(sources[some], addresses[some], lengths[some]):
            _one_by_one(sources[some], addresses[some], lengths[some])


def _one_by_one(sources: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
    for address, source, length in zip(addresses.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(address, source, length)


def _in_one_call(sources: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> bool:
    """False where nothing was copied, because that cannot be done here."""
    total, read_memory = int(lengths.sum()), _read_memory()
    if read_memory is None or total > _MAX_BYTES:
        return False
    # What follows one another in the buffer is one run of it: the kernel looks up the pages of each.
    begins_run = np.append(True, sources[1:] != (sources + lengths)[:-1])
    firsts = np.flatnonzero(begins_run)
    runs = np.stack([sources[firsts], np.add.reduceat(lengths, firsts)], axis=1)
    targets = np.stack([addresses, lengths], axis=1)
    copied = read_memory(os.getpid(), targets.ctypes.data, len(targets), runs.ctypes.data, len(runs), 0)
    if copied == total:
        return True
    number = ctypes.get_errno() if copied < 0 else errno.EFAULT
    if number in _REFUSED:
        return False
    raise OSError(number, os.strerror(number))


@cache
def _read_memory() -> _ReadMemory | None:
    """Linux's process_vm_readv, which copies from many places of a process to many places of the caller: here of the
    same process.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    function.restype = ctypes.c_ssize_t
    return function
