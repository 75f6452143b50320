"""Limits that no save can beat on this machine: the bytes of a rank written past the page cache from aligned memory
that is paged in, and copied into memory that is paged in. Each is the best of several ways or times. Timed as
asynchronous saves are, once and with training beside it: an agreement of the ranks; a millisecond of work; one look at
each tensor; the same copy; the same writes.
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist

from saves.timing import Pending, Save
from saves.training import Job
from shared.agreement import agree

MIB = 1 << 20
WAYS = ((4 * MIB, 2), (8 * MIB, 4), (16 * MIB, 2), (64 * MIB, 1))
"""Bytes of a block, and number of blocks written at the same time."""
COPIES = 3
WORK_S = 0.001
LOOKS, LOOKS_AT_ONCE = attrgetter("dtype", "shape", "is_cpu"), 256
PAGE = mmap.PAGESIZE


def candidates() -> dict[str, Save]:
    return {
        "limit": write_limit,
        "memcpy": copy_limit,
        "agree": agreement_only,
        "work": work_only,
        "looks": looks_only,
        "memcpy-async": copy_only(),
        "write-async": write_only(),
    }


def write_limit(folder: Path, job: Job) -> dict[str, float]:
    """Returns the best of WAYS, where a way takes as long as its slowest rank."""
    memory = random_memory(max(block_bytes for block_bytes, _ in WAYS))
    return {"durable": min(write_times(folder, job, memory).values())}


def write_times(folder: Path, job: Job, memory: mmap.mmap) -> dict[tuple[int, int], float]:
    path = folder / f"{job.held.rank}.raw"
    return {way: timed(job, lambda way=way: write(path, job.share_bytes, memory, way)) for way in WAYS}


def random_memory(num_bytes: int) -> mmap.mmap:
    """Returns memory aligned to a page and paged in; random, so that no file system compresses it."""
    memory = mmap.mmap(-1, num_bytes)
    memory.write(os.urandom(num_bytes))
    return memory


def write(path: Path, num_bytes: int, memory: mmap.mmap, way: tuple[int, int]) -> None:
    """Writes and syncs a new file of this length, rounded up to a page."""
    path.unlink(missing_ok=True)
    block_bytes, num_threads = way
    end = -(-num_bytes // PAGE) * PAGE
    fd = open_direct(path)
    try:
        os.posix_fallocate(fd, 0, end)
        with ThreadPoolExecutor(num_threads) as pool, memoryview(memory) as view:
            offsets = range(0, end, block_bytes)
            for written in pool.map(
                lambda offset: os.pwrite(fd, view[: min(block_bytes, end - offset)], offset), offsets
            ):
                if written % PAGE:
                    raise OSError(f"a write ended after {written} bytes, within a page")
        os.fsync(fd)
    finally:
        os.close(fd)


def open_direct(path: Path) -> int:
    """Opens a file past the page cache where the file system can."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


def copy_limit(folder: Path, job: Job) -> dict[str, float]:  # noqa: ARG001  a candidate takes both
    """Copies with all threads of torch, and with one, tensor by tensor, into one piece of memory that has been written
    before; by all ranks at the same time.
    """
    copy, num_threads = copier(job), torch.get_num_threads()
    times = []
    for threads in {num_threads, 1}:
        torch.set_num_threads(threads)
        times += [timed(job, copy) for _ in range(COPIES)]
    torch.set_num_threads(num_threads)
    return {"durable": min(times)}


def copier(job: Job) -> Callable[[], None]:
    """Returns a function that copies this rank's share into memory of its own that is paged in."""
    sources = list(first_bytes(job.held.local_tensors.values(), job.share_bytes))
    memory = torch.zeros(sum(source.numel() for source in sources), dtype=torch.uint8)
    targets = memory.split([source.numel() for source in sources])
    memory.fill_(1)

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return copy


def copy_only() -> Save:
    copiers: list[Callable[[], None]] = []

    def begin(folder: Path, job: Job) -> Pending:  # noqa: ARG001  a candidate takes both
        """Makes the memory in the first round, which does not count."""
        if not copiers:
            copiers.append(copier(job))
        copiers[0]()
        return Pending(lambda: None)

    return begin


def looks_only(folder: Path, job: Job) -> Pending:  # noqa: ARG001  a candidate takes both
    """Looks at each tensor as a lazy snapshot must before it may return, some at a time, by torch's own attributes:
    what it is, whether its bytes follow in memory as they are, where they are, and what keeps them there.
    """
    tensors, held = list(job.held.tensors.values()), []
    gc.disable()  # as a save does
    for start in range(0, len(tensors), LOOKS_AT_ONCE):
        some = tensors[start : start + LOOKS_AT_ONCE]
        is_flat = all(map(torch.Tensor.is_contiguous, some)) and not any(map(torch.Tensor.is_neg, some))
        looks = list(map(LOOKS, some)), list(map(torch.Tensor.data_ptr, some))
        held.append((is_flat, looks, list(map(torch.Tensor.untyped_storage, some))))
    gc.enable()
    return Pending(lambda: None)


def write_only() -> Save:
    """Writes on threads beside training, from warm memory: without copying, checksums or commit. In the way that was
    the fastest in the first round.
    """
    known: list[tuple[mmap.mmap, tuple[int, int]]] = []
    pool = ThreadPoolExecutor(1)

    def begin(folder: Path, job: Job) -> Pending:
        if not known:
            memory = random_memory(max(block_bytes for block_bytes, _ in WAYS))
            times = write_times(folder, job, memory)
            known.append((memory, min(times, key=times.__getitem__)))
        memory, way = known[0]
        written = pool.submit(write, folder / f"{job.held.rank}.raw", job.share_bytes, memory, way)
        return Pending(written.result)

    return begin


def agreement_only(folder: Path, job: Job) -> Pending:  # noqa: ARG001  a candidate takes both
    agree()
    return Pending(lambda: None)


def work_only(folder: Path, job: Job) -> Pending:  # noqa: ARG001  a candidate takes both
    """Shows what WORK_S of one core become for the slowest rank, where ranks that have returned train on."""
    end = time.thread_time() + WORK_S
    while time.thread_time() < end:
        pass
    return Pending(lambda: None)


def first_bytes(tensors: Iterable[torch.Tensor], num_bytes: int) -> Iterable[torch.Tensor]:
    for tensor in tensors:
        part = tensor.contiguous().reshape(-1).view(torch.uint8)[:num_bytes]
        num_bytes -= part.numel()
        yield part


def timed(job: Job, work: Callable[[], None]) -> float:
    job.held.barrier()
    started = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - started])
    if job.is_group:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
