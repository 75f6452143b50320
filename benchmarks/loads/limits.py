"""Limits that no load can beat on this machine: the bytes of a rank, in a file of their own in the order of its
tensors, read straight into them by several threads, with and without a checksum of every block; and the agreements that
ranks need: on the checkpoint, on whether it fits all of them, on being done.
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

from loads.candidate import LoadFunctions, StoredAt
from shared.agreement import agree
from shared.page_cache import opened
from shared.rank_files import is_writer, rank_file
from shared.states import HeldState

MIB = 1 << 20
READ_BYTES, CHECKED_BYTES = 4 * MIB, MIB
"""Bytes of a block; one that is checked is small enough for the processor's cache."""
AGREEMENTS = 3
MAX_BUFFERS = 1024
"""Largest number of buffers of one preadv."""


class Block(NamedTuple):
    """Consecutive bytes of the file, and the memory that they go to."""

    byte_offset: int
    buffers: list[np.ndarray]


def candidates() -> dict[str, LoadFunctions]:
    return {
        "limit-2": limit(threads=2, block_bytes=READ_BYTES, is_checked=False),
        "limit-8": limit(threads=8, block_bytes=READ_BYTES, is_checked=False),
        "checked-2": limit(threads=2, block_bytes=CHECKED_BYTES, is_checked=True),
        "checked-8": limit(threads=8, block_bytes=CHECKED_BYTES, is_checked=True),
        "agree-3": LoadFunctions(save, agree_only, brings_values=False),
    }


def limit(*, threads: int, block_bytes: int, is_checked: bool) -> LoadFunctions:
    blocks: list[Block] = []

    def prepare(stored: StoredAt, held: HeldState) -> None:  # noqa: ARG001  a candidate takes both
        blocks[:] = blocks_of([memory(tensor) for tensor in held.local_tensors.values()], block_bytes)

    def load(stored: StoredAt, held: HeldState) -> None:
        with opened(rank_file(stored.folder, held, "raw")) as fd, ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(reading(fd, is_checked=is_checked), blocks):
                pass

    return LoadFunctions(save, load, prepare)


def agree_only(stored: StoredAt, held: HeldState) -> None:  # noqa: ARG001  a candidate takes both
    for _ in range(AGREEMENTS):
        agree()


def save(folder: Path, held: HeldState) -> None:
    if is_writer(held):
        with rank_file(folder, held, "raw").open("wb") as file:
            for tensor in held.local_tensors.values():
                file.write(memory(tensor))
    held.barrier()


def memory(tensor: torch.Tensor) -> np.ndarray:
    """Returns the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()


def blocks_of(memories: list[np.ndarray], block_bytes: int) -> list[Block]:
    """Cuts and joins the memories to blocks, in the order of the file."""
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
