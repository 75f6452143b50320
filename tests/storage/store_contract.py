"""What every store promises, as tests: a class of tests for a store inherits this one and provides the fixture."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.storage.store import Block, Store


def blocks_of(data: bytes, *, block_bytes: int = 1 << 30, piece_bytes: int = 1 << 30) -> list[Block]:
    def load(start: int) -> Sequence[memoryview]:
        block = memoryview(data)[start : start + block_bytes]
        return [block[at : at + piece_bytes] for at in range(0, block.nbytes, piece_bytes)]

    starts = range(0, len(data), block_bytes)
    return [Block(start, min(block_bytes, len(data) - start), lambda start=start: load(start)) for start in starts]


def put(store: Store, name: str, data: bytes, *, replace: bool = False) -> None:
    store.write(name, blocks_of(data), replace=replace)


def get(store: Store, name: str, num_bytes: int, byte_offset: int = 0) -> bytes:
    buffer = bytearray(num_bytes)
    store.read_into(name, byte_offset, memoryview(buffer))
    return bytes(buffer)


def pattern(num_bytes: int) -> bytes:
    """Bytes of which no two runs of four are alike, so that anything out of place shows."""
    return np.arange(-(-num_bytes // 4), dtype="<u4").tobytes()[:num_bytes]


class _SourceError(OSError):
    """An error of what is to be saved; an OSError, because those are what stores translate."""


class StoreContract:
    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.mark.parametrize("block_bytes", [1 << 30, 4096, 1000])
    def test_blocks_and_pieces_land_in_order(self, store, block_bytes):
        data = pattern(100_003)
        store.write("a/b.bin", blocks_of(data, block_bytes=block_bytes, piece_bytes=333), replace=False)
        assert get(store, "a/b.bin", len(data)) == data

    def test_more_pieces_than_one_system_call_takes(self, store):
        data = pattern(5_000)
        store.write("many", blocks_of(data, piece_bytes=2), replace=False)
        assert get(store, "many", len(data)) == data

    def test_ranges_are_exact(self, store):
        data = pattern(10_000)
        put(store, "x", data)
        for start, length in [(0, 1), (1, 4095), (4096, 100), (9_999, 1)]:
            assert get(store, "x", length, start) == data[start : start + length]

    def test_an_object_may_be_empty(self, store):
        put(store, "empty", b"")
        assert store.list("") == {"empty": 0}

    def test_views_of_wider_items_are_bytes_too(self, store):
        wide = memoryview(pattern(64)).cast("Q")
        store.write("wide", [Block(0, 64, lambda: [memoryview(b""), wide])], replace=False)
        assert get(store, "wide", 64) == pattern(64)

    @pytest.mark.parametrize("start", [5, 10, 11, 1000])
    def test_reading_past_the_end_is_truncated(self, store, start):
        put(store, "x", b"0123456789")
        with pytest.raises(CheckpointCorruptError) as caught:
            get(store, "x", 6, start)
        assert caught.value.kind == "truncated"
        assert str(store) in str(caught.value.path)

    def test_reading_what_is_not_there(self, store):
        with pytest.raises(CheckpointNotFoundError) as caught:
            get(store, "folder/nothing", 1)
        assert caught.value.kind == "missing_file"
        assert "folder/nothing" in caught.value.path

    def test_a_taken_name_is_refused_and_left_alone(self, store):
        put(store, "m", b"first")
        with pytest.raises(CheckpointExistsError) as caught:
            put(store, "m", b"other")
        assert caught.value.kind == "exists"
        with pytest.raises(CheckpointExistsError):
            put(store, "m", b"first")
        assert get(store, "m", 5) == b"first"

    def test_replacing(self, store):
        put(store, "m", b"first one", replace=True)
        put(store, "m", b"2nd", replace=True)
        assert store.list("") == {"m": 3}
        assert get(store, "m", 3) == b"2nd"

    @pytest.mark.parametrize("replace", [False, True])
    @pytest.mark.parametrize("block_bytes", [1 << 30, 1000])
    def test_a_block_that_cannot_be_loaded_publishes_nothing(self, store, block_bytes, replace):
        blocks = blocks_of(pattern(5_000), block_bytes=block_bytes)
        error = _SourceError(28, "the source's own trouble")

        def fail() -> Sequence[memoryview]:
            raise error

        blocks[-1] = blocks[-1]._replace(load=fail)
        if replace:
            put(store, "x", b"old")
        with pytest.raises(_SourceError) as caught:
            store.write("x", blocks, replace=replace)
        assert caught.value is error
        assert store.list("") == ({"x": 3} if replace else {})

    def test_a_block_of_another_length_publishes_nothing(self, store):
        with pytest.raises(Exception, match="gave 3 bytes, not 4"):
            store.write("x", [Block(0, 4, lambda: [memoryview(b"abc")])], replace=False)
        assert store.list("") == {}

    def test_blocks_with_a_gap_are_refused(self, store):
        piece = [memoryview(b"ab")]
        with pytest.raises(Exception, match="starts at byte 3"):
            store.write("x", [Block(0, 2, lambda: piece), Block(3, 2, lambda: piece)], replace=False)
        assert store.list("") == {}

    def test_listing(self, store):
        assert store.list("") == {}
        assert store.list("nowhere/at/all") == {}
        put(store, "a", b"1")
        put(store, "step_1/manifest", b"22")
        put(store, "step_1/data/x", b"333")
        assert store.list("") == {"a": 1, "step_1": None}
        assert store.list("step_1") == {"manifest": 2, "data": None}
        assert store.list("step_1/data") == {"x": 3}

    def test_listing_is_fresh(self, store):
        for count in range(1, 4):
            put(store, f"folder/{count}", b"")
            assert len(store.list("folder")) == count
        store.delete("folder/1")
        assert set(store.list("folder")) == {"2", "3"}

    def test_a_file_cannot_be_listed(self, store):
        put(store, "file", b"1")
        with pytest.raises(CheckpointNotFoundError) as caught:
            store.list("file")
        assert caught.value.kind == "not_found"
        assert "is a file" in str(caught.value)

    def test_deleting(self, store):
        put(store, "a/b/c", b"1")
        put(store, "a/d", b"1")
        store.delete("a/b/c")
        store.delete("a/b/c")
        store.delete("never/was")
        assert store.list("a") == {"d": 1}
        store.delete("a/d")
        assert store.list("") == {}
        put(store, "a/d", b"again")
        assert get(store, "a/d", 5) == b"again"

    @pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "a//b", "./x", "a/", "C:\\x", "s3://b/x", "a\0b"])
    def test_names_that_could_leave_the_root(self, store, name):
        for call in (
            lambda: get(store, name, 1),
            lambda: put(store, name, b"x"),
            lambda: store.delete(name),
            lambda: store.list(name or "/"),
        ):
            with pytest.raises(UnsafeCheckpointError) as caught:
                call()
            assert caught.value.kind == "path_escape"

    def test_of_many_writers_of_a_name_one_wins(self, store):
        contents = [pattern(64 + number) for number in range(8)]
        barrier = threading.Barrier(len(contents))
        won: list[int] = []
        lost: list[str] = []

        def write(number: int) -> None:
            block = Block(0, len(contents[number]), lambda: barrier.wait() * 0 or [memoryview(contents[number])])
            try:
                store.write("manifest", [block], replace=False)
                won.append(number)
            except CheckpointExistsError as error:
                lost.append(error.kind)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(len(contents))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert lost == ["exists"] * 7
        assert get(store, "manifest", len(contents[won[0]])) == contents[won[0]]
        assert store.list("") == {"manifest": len(contents[won[0]])}
