"""XORs the bytes of hosts into parity, and into the bytes of one of them that was lost. Works on memory;
planner/memory_tier says which bytes go where.
"""

from __future__ import annotations

import numpy as np

_BLOCK_BYTES = 256 << 10
"""Bytes XORed at a time, so that they stay in the processor's cache."""


def xor_into(parity: memoryview | bytearray, byte_offset: int, content: memoryview | bytes | bytearray) -> None:
    """XORs the content into the bytes of the parity from `byte_offset` on, in place."""
    source = np.frombuffer(content, np.uint8)
    target = np.frombuffer(parity, np.uint8)[byte_offset : byte_offset + source.size]
    for first in range(0, source.size, _BLOCK_BYTES):
        block = slice(first, first + _BLOCK_BYTES)
        np.bitwise_xor(_words(target[block]), _words(source[block]), out=_words(target[block]))


def _words(block: np.ndarray) -> np.ndarray:
    """Returns the bytes as words of eight bytes, or as they are if their number is no multiple of eight."""
    return block.view(np.uint64) if block.size % 8 == 0 else block
