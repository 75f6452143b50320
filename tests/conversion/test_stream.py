"""What `bcp convert` hands to a store, which may ask for more of it at once than its memory holds."""

from __future__ import annotations

import json
import threading
import time
from functools import partial

import pytest

from bytecheckpoint.conversion.stream import NUM_WINDOWS, ReadAhead, Stream
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage.object_io import take_blocks

MiB = 1 << 20
WINDOW_BYTES = 4096
CONTENT = bytes(range(256)) * 256


class NoElements:
    """The file has no tensors."""

    def read(self, jobs) -> None:
        assert not jobs


@pytest.fixture
def ahead():
    scratch = BufferPool(WINDOW_BYTES, NUM_WINDOWS)
    reading = ReadAhead(Stream([CONTENT]), NoElements(), scratch, WINDOW_BYTES)
    yield reading
    reading.close()


def blocks_of(ahead: ReadAhead) -> list[Block]:
    length = WINDOW_BYTES // 2
    blocks = [Block(start, length) for start in range(0, len(CONTENT), length)]
    return [block._replace(content=partial(ahead.content, block)) for block in blocks]


def test_a_store_that_wants_all_blocks_at_once_waits_for_windows(ahead) -> None:
    """Six blocks are there for the asking; every thread but those that have one waits."""
    taken: dict[int, bytes] = {}
    all_six = threading.Barrier(6)

    def take(content: memoryview, byte_offset: int) -> None:
        if byte_offset < 3 * WINDOW_BYTES:
            all_six.wait(timeout=60)
        taken[byte_offset] = bytes(content)

    take_blocks(blocks_of(ahead), take, num_threads=32)
    assert b"".join(taken[start] for start in sorted(taken)) == CONTENT


def test_whoever_waits_for_a_window_hears_that_a_block_was_not_written(ahead) -> None:
    all_six = threading.Barrier(6)

    def take(_content: memoryview, byte_offset: int) -> None:
        all_six.wait(timeout=60)
        if byte_offset == 0:
            raise OSError("the disk is gone")
        time.sleep(0.05)

    with pytest.raises(OSError, match="the disk is gone"):
        take_blocks(blocks_of(ahead), take, num_threads=32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries
def test_a_slow_bucket_takes_more_parts_at_once_than_memory_holds(call, s3, s3_faults, s3_prefix, tmp_path) -> None:
    """Nine parts of 16 MiB, of which 64 MiB of memory hold three."""
    source = tmp_path / "model.safetensors"
    num_bytes = 8 * 16 * MiB + 4
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    with source.open("wb") as file:  # zeros that take no space
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    begun: list[str] = []

    def slow(line: str, _environ) -> None:
        if "partNumber" in line:
            begun.append(line)
            time.sleep(0.2)

    s3_faults.choose = slow
    target = f"s3://{s3.bucket}/{s3_prefix}/hf"
    options = [f"--storage-option={key}={json.dumps(value)}" for key, value in s3.options.items()]
    options.append("--storage-option=max_concurrency=40")
    ended = call("convert", source, target, "--to", "hf", "--memory", "64MiB", "--json", *options)
    assert ended.code == 0, ended.err
    assert len(begun) == 9
    assert call("verify", target, *options).code == 5  # without checksums
