"""Pieces of memory of this process copied between one buffer and where each belongs, many in one call of the kernel,
because a state may have 100,000 small tensors. It knows addresses only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

_MAX_PIECES = 1024
"""In one call: the kernel takes no more."""
_MAX_BYTES = 1 << 30
"""In one call, which the kernel cuts off below 2 GiB."""
FEW_PIECES = 32
"""Fewer are copied one by one at least as fast."""
_MAX_GATHERED_BYTES = 32 << 10
"""Of a piece: longer ones are gathered one by one at least as fast, because the kernel looks up every page of the
buffer."""

_Call = Callable[[int, int, int, int, int, int], int]


def _of_libc(name: str) -> _Call | None:
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


# Linux's calls that copy between many places of the caller and many places of a process, which is the same one here.
_FROM_PROCESS, _TO_PROCESS = _of_libc("process_vm_readv"), _of_libc("process_vm_writev")


def scatter_pieces(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    """Copies `lengths` bytes each from the addresses `sources`, which lie in one buffer, to the addresses `targets`.
    Other threads go on meanwhile.
    """
    for some in _batches(len(lengths)):
        source, target, length = sources[some], targets[some], lengths[some]
        if not _in_one_call(_FROM_PROCESS, target, source, length):
            _one_by_one(source, target, length)


def gather_pieces(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> None:
    """The same, where it is the targets that lie in one buffer."""
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
    """Whether all of it was copied. Where not, this kernel or sandbox has no such call, or cannot do it with what a
    driver has mapped. `together` are the addresses in the buffer.
    """
    total = int(lengths.sum())
    if call is None or len(lengths) < FEW_PIECES or total > _MAX_BYTES:
        return False
    # The kernel looks up the pages of each piece of the buffer: what follows one another there is one piece.
    firsts = np.flatnonzero(np.append(True, together[1:] != (together + lengths)[:-1]))
    buffer = np.stack([together[firsts], np.add.reduceat(lengths, firsts)], axis=1)
    pieces = np.stack([apart, lengths], axis=1)
    return call(os.getpid(), pieces.ctypes.data, len(pieces), buffer.ctypes.data, len(buffer), 0) == total
