"""Memory through which blocks go: what it costs, and when."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from bytecheckpoint.runtime.buffers import BufferPool

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
