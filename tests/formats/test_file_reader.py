"""Reads of ranges of a foreign file: the bytes that are there, with few requests and a cache that stays small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bytecheckpoint.formats.file_reader import BLOCK_BYTES, FileReader
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import open_store

NUM_BLOCKS = 400


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    content = random.Random(0).randbytes(NUM_BLOCKS * BLOCK_BYTES - 100)
    (tmp_path / "file").write_bytes(content)
    return content


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of each request to the store."""
    seen: list[tuple[int, int]] = []
    read_into = LocalStore.read_into

    def counted(store: LocalStore, name: str, byte_offset: int, buffer: memoryview) -> None:
        seen.append((byte_offset, len(buffer)))
        read_into(store, name, byte_offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", counted)
    return seen


def reader_of(folder: Path, content: bytes) -> FileReader:
    return FileReader(open_store(str(folder), storage_options=None, writer_threads=1), "file", len(content))


def test_a_read_of_many_blocks_is_one_request(tmp_path: Path, content: bytes, requests: list[tuple[int, int]]) -> None:
    reader = reader_of(tmp_path, content)
    assert reader.read(5 * BLOCK_BYTES + 7, 10) == content[5 * BLOCK_BYTES + 7 :][:10]
    assert reader.read(3, 100 * BLOCK_BYTES) == content[3:][: 100 * BLOCK_BYTES]
    assert reader.read(0, 101 * BLOCK_BYTES) == content[: 101 * BLOCK_BYTES]  # from the cache
    assert requests == [(5 * BLOCK_BYTES, BLOCK_BYTES), (0, 101 * BLOCK_BYTES)]


def test_small_reads_one_after_the_other_are_few_requests(
    tmp_path: Path, content: bytes, requests: list[tuple[int, int]]
) -> None:
    reader = reader_of(tmp_path, content)
    for byte_offset in range(0, len(content), 1000):
        assert reader.read(byte_offset, 60) == content[byte_offset:][:60]
    assert len(requests) <= 2 + NUM_BLOCKS // 32


def test_random_reads_give_the_bytes_of_the_file(
    tmp_path: Path, content: bytes, requests: list[tuple[int, int]]
) -> None:
    reader, rng = reader_of(tmp_path, content), random.Random(1)
    for _ in range(500):
        byte_offset = rng.randrange(len(content))
        byte_length = min(len(content) - byte_offset, rng.choice([0, 1, 30, BLOCK_BYTES, rng.randrange(len(content))]))
        before = len(requests)
        assert reader.read(byte_offset, byte_length) == content[byte_offset:][:byte_length]
        assert len(requests) <= before + 1
        assert sum(map(len, reader._blocks.values())) <= 256 * BLOCK_BYTES
