"""What no load can beat on this machine, for benchmarks/load.py: the bytes of a rank, which lie in a file of their own
in the order of its tensors, read straight into them by several threads; with and without a checksum of every block. And
what ranks need to agree as often as they must: on the checkpoint, on whether it fits all of them, on being done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from agreement_limit import agree
from load_contender import Contender, Place
from load_states import Held
from load_torch import file_of, is_writer
from page_cache import opened

MIB = 1 << 20
READ_BYTES, CHECKED_BYTES = 4 * MIB, MIB
"""Of a block; one that is checked is small enough to be in the processor's cache when it is."""
AGREEMENTS = 3
MAX_BUFFERS = 1024
"""Of one preadv, at most."""


class Block(NamedTuple):
    """Consecutive bytes of the file, and the memory that they are for."""

    byte_offset: int
    buffers: list[np.ndarray]


def contestants() -> dict[str, Contender]:
    return {
        "limit-2": limit(threads=2, block_bytes=READ_BYTES, is_checked=False),
        "limit-8": limit(threads=8, block_bytes=READ_BYTES, is_checked=False),
        "checked-2": limit(threads=2, block_bytes=CHECKED_BYTES, is_checked=True),
        "checked-8": limit(threads=8, block_bytes=CHECKED_BYTES, is_checked=True),
        "agree-3": Contender(save, agree_only, brings_values=False),
    }


def limit(*, threads: int, block_bytes: int, is_checked: bool) -> Contender:
    blocks: list[Block] = []

    def prepare(place: Place, held: Held) -> None:  # noqa: ARG001  a contestant takes both
        blocks[:] = blocks_of([memory(tensor) for tensor in held.local_tensors.values()], block_bytes)

    def load(place: Place, held: Held) -> None:
        with opened(file_of(place.folder, held, "raw")) as fd, ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(reading(fd, is_checked=is_checked), blocks):
                pass

    return Contender(save, load, prepare)


def agree_only(place: Place, held: Held) -> None:  # noqa: ARG001  a contestant takes both
    for _ in range(AGREEMENTS):
        agree()


def save(folder: Path, held: Held) -> None:
    if is_writer(held):
        with file_of(folder, held, "raw").open("wb") as file:
            for tensor in held.local_tensors.values():
                file.write(memory(tensor))
    held.barrier()


def memory(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()


def blocks_of(memories: list[np.ndarray], block_bytes: int) -> list[Block]:
    """The memories as they follow one another in the file, cut and put together to blocks."""
    blocks: list[Block] = []
    offset, start, buffers = 0, 0, []
    for buffer in (part for each in memories for part in parts(each, block_bytes)):
        if offset + buffer.nbytes - start > block_bytes or len(buffers) == MAX_BUFFERS:
            blocks.append(Block(start, buffers))
            start, buffers = offset, []
        buffers.append(buffer)
        offset += buffer.nbytes
    return [*blocks, Block(start, buffers)]


def parts(memory: np.ndarray, part_bytes: int) -> Iterator[np.ndarray]:
    return (memory[start : start + part_bytes] for start in range(0, memory.nbytes, part_bytes))


def reading(fd: int, *, is_checked: bool) -> Callable[[Block], None]:
    def read(block: Block) -> None:
        wanted = sum(buffer.nbytes for buffer in block.buffers)
        found = os.preadv(fd, block.buffers, block.byte_offset)
        if found != wanted:
            raise OSError(f"a read of {wanted} bytes gave {found}")
        if is_checked:
            for buffer in block.buffers:
                xxhash.xxh3_64_intdigest(buffer)

    return read
