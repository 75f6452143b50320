"""Memory through which blocks go: what it costs, and when."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bytecheckpoint.runtime.buffers import Arena, BufferPool

BLOCK_BYTES = 64 << 20
SLACK_BYTES = 8 << 20
"""For large pages, and for what else the process does meanwhile."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by /proc")
def test_a_small_save_takes_no_more_memory_than_it_fills() -> None:
    """The first save of a small state waited for 64 MiB to be paged in."""
    scratch = BufferPool(BLOCK_BYTES, 3)
    before = resident_bytes()
    with scratch.lend() as block:
        block[: mmap.PAGESIZE] = b"x" * mmap.PAGESIZE
        assert resident_bytes() - before < SLACK_BYTES
        assert len(block) == BLOCK_BYTES


def arena(num_bytes: int, max_parts: int = 9) -> Arena:
    """Of the second half of a memory."""
    return Arena(memoryview(bytearray(2 * num_bytes)), range(num_bytes, 2 * num_bytes), max_parts=max_parts)


def test_a_part_is_in_the_first_gap_and_comes_back_with_the_last_holder() -> None:
    memory = arena(256)
    first, second = memory.take(60, lead_bytes=4), memory.take(100)
    assert (first.start, len(first.content), second.start) == (260, 60, 320)
    first.hold()
    first.release()
    assert memory.take(10).start == 320 + 128
    first.release()
    assert memory.take(64).start == 256


@pytest.mark.parametrize(("num_bytes", "max_parts"), [(128, 9), (1024, 1)])
def test_taking_a_part_waits_until_there_is_room(num_bytes: int, max_parts: int) -> None:
    memory = arena(num_bytes, max_parts)
    part = memory.take(100)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(memory.take, 100)
        assert not waiting.done()
        part.release()
        taken = waiting.result()
        waiting = pool.submit(memory.take, 100)
        memory.break_off(KeyError)
        with pytest.raises(KeyError):
            waiting.result()
    assert taken.start == num_bytes
