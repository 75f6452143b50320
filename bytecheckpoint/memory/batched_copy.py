"""Batched copies between one buffer and many places in the memory of this process, up to 1,024 in one system call: a
state may have 100,000 small tensors, and a call for each costs more than its bytes. Knows addresses only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

_MAX_PIECES = 1024
"""Limit of the kernel for one call (UIO_MAXIOV)."""
_MAX_BYTES = 1 << 30
"""Limit for one call, which the kernel cuts off below 2 GiB."""
FEW_PIECES = 32
"""Fewer copies are at least as fast one by one."""
_MAX_GATHERED_BYTES = 32 << 10
"""Longer copies are gathered one by one at least as fast, because the kernel looks up every page of the buffer."""

_ALL_MEMORY = ctypes.c_char * (1 << 62)
"""Any address from which a process has memory, and all that lie behind it."""

_Call = Callable[[int, int, int, int, int, int], int]


def _libc_call(name: str) -> _Call | None:
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    if ctypes.sizeof(pointer) != np.int64().itemsize:
        return None
    function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    function.restype = ctypes.c_ssize_t
    call: _Call = function
    return call


# Linux's calls for vectored copies between two processes, here with this one on both sides: they are the only vectored
# memcpy there is. 100,000 pieces of 256 bytes take 14 ms, one by one 64 ms.
_FROM_PROCESS, _TO_PROCESS = _libc_call("process_vm_readv"), _libc_call("process_vm_writev")


def scatter_pieces(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    """Copies `lengths` bytes each from the addresses `sources`, which lie in one buffer, to the addresses `targets`.
    Other threads run meanwhile.
    """
    for some in _batches(len(lengths)):
        source, target, length = sources[some], targets[some], lengths[some]
        if not _in_one_call(_FROM_PROCESS, target, source, length):
            _one_by_one(source, target, length)


def memory_at(addresses: np.ndarray, lengths: np.ndarray) -> list[memoryview]:
    """Returns views of `lengths` bytes each at the addresses. The caller keeps the memory alive."""
    if not len(addresses):
        return []
    # One view, and slices of it: a ctypes object for each piece takes ten times as long.
    first = int(addresses.min())
    memory = memoryview(_ALL_MEMORY.from_address(first)).cast("B")
    starts = addresses - first
    return [memory[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]


def gather_pieces(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    """Copies like `scatter_pieces`, but the addresses `targets` lie in one buffer."""
    is_small = lengths <= _MAX_GATHERED_BYTES
    _one_by_one(sources[~is_small], targets[~is_small], lengths[~is_small])
    sources, targets, lengths = sources[is_small], targets[is_small], lengths[is_small]
    for some in _batches(len(lengths)):
        source, target, length = sources[some], targets[some], lengths[some]
        if not _in_one_call(_TO_PROCESS, source, target, length):
            _one_by_one(source, target, length)


def _batches(num_pieces: int) -> list[slice]:
    return [slice(first, first + _MAX_PIECES) for first in range(0, num_pieces, _MAX_PIECES)]


def _one_by_one(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    for source, target, length in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


def _in_one_call(call: _Call | None, apart: np.ndarray, together: np.ndarray, lengths: np.ndarray) -> bool:
    """Returns True if everything was copied. On False, nothing or a part was: the pieces are too few or too long, or
    this kernel or sandbox has no such call, or it does not work with memory that a driver has mapped. `together` are
    the addresses in the buffer.
    """
    total = int(lengths.sum())
    if call is None or len(lengths) < FEW_PIECES or total > _MAX_BYTES:
        return False
    # The kernel looks up the pages of each piece of the buffer, so adjacent ones are joined.
    firsts = np.flatnonzero(np.append(True, together[1:] != (together + lengths)[:-1]))
    buffer = np.stack([together[firsts], np.add.reduceat(lengths, firsts)], axis=1)
    pieces = np.stack([apart, lengths], axis=1)
    return call(os.getpid(), pieces.ctypes.data, len(pieces), buffer.ctypes.data, len(buffer), 0) == total
