"""What every store promises, as tests: a class of tests for a store inherits this one and provides the fixture."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.inventory import HasInventory
from bytecheckpoint.storage.store import (
    Store,
    SupportsDuplicate,
    SupportsInFolders,
    SupportsReadPieces,
    delete_many,
    list_many,
    read_whole,
)


def blocks_of(data: bytes, *, block_bytes: int = 1 << 30, shift: int = 0) -> list[Block]:
    """Blocks whose memory starts `shift` bytes behind the start of a page, and is wiped when it is given back."""

    @contextmanager
    def content(start: int) -> Iterator[memoryview]:
        part = data[start : start + block_bytes]
        memory = memoryview(mmap.mmap(-1, shift + len(part)))[shift:]
        memory[:] = part
        yield memory
        memory[:] = bytes(len(part))

    starts = range(0, len(data), block_bytes)
    return [Block(start, min(block_bytes, len(data) - start), partial(content, start)) for start in starts]


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


def _failing(
    content: Callable[[], AbstractContextManager[memoryview]], moment: str, error: Exception
) -> Callable[[], AbstractContextManager[memoryview]]:
    @contextmanager
    def entered() -> Iterator[memoryview]:
        with content() as view:
            if moment == "entered":
                raise error
            yield view
        raise error

    def called() -> AbstractContextManager[memoryview]:
        if moment == "called":
            raise error
        return entered()

    return called


class StoreContract:
    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.mark.parametrize("shift", [0, 1, 512])
    @pytest.mark.parametrize(
        ("num_bytes", "block_bytes"),
        [
            (1, 1 << 30),
            (4096, 4096),
            (100_003, 4096),
            (100_003, 1000),
            ((1 << 20) - 1, 1 << 30),
            (1 << 20, 1 << 30),
            (1 << 20, 1 << 18),
            ((1 << 20) + 1, 1 << 20),
            ((1 << 20) + 4096, 1 << 20),
            ((2 << 20) + 5, 1 << 19),
            ((2 << 20) + 5, 100_001),
            ((1 << 20) + 77, 4608),
        ],
    )
    def test_blocks_land_in_order(self, store, num_bytes, block_bytes, shift):
        data = pattern(num_bytes)
        store.write("a/b.bin", blocks_of(data, block_bytes=block_bytes, shift=shift), replace=False)
        assert store.list("a") == {"b.bin": num_bytes}
        assert get(store, "a/b.bin", num_bytes) == data

    def test_blocks_are_entered_one_at_a_time_in_rising_order_and_all_left(self, store):
        data = pattern(3 << 20)
        entering, entered, left = threading.Lock(), [], []

        @contextmanager
        def watched(number: int, block: Block) -> Iterator[memoryview]:
            assert entering.acquire(blocking=False)
            with block.content() as content:
                entered.append(number)
                entering.release()
                yield content
            left.append(number)

        blocks = [
            block._replace(content=partial(watched, number, block))
            for number, block in enumerate(blocks_of(data, block_bytes=1 << 16))
        ]
        store.write("x", blocks, replace=False)
        assert entered == list(range(48))
        assert sorted(left) == entered
        assert get(store, "x", len(data)) == data

    def test_memory_that_cannot_be_written_to_is_no_trouble(self, store):
        data = pattern(2 << 20)
        store.write("x", [Block(0, len(data), lambda: nullcontext(memoryview(data)))], replace=False)
        assert get(store, "x", len(data)) == data

    def test_ranges_are_exact(self, store):
        data = pattern(10_000)
        put(store, "x", data)
        for start, length in [(0, 1), (1, 4095), (4096, 100), (9_999, 1)]:
            assert get(store, "x", length, start) == data[start : start + length]

    def test_an_object_may_be_empty(self, store):
        put(store, "empty", b"")
        assert store.list("") == {"empty": 0}

    @pytest.mark.parametrize("start", [5, 10, 11, 1000])
    def test_reading_past_the_end_is_truncated(self, store, start):
        put(store, "x", b"0123456789")
        with pytest.raises(CheckpointCorruptError) as caught:
            get(store, "x", 6, start)
        assert caught.value.kind == "truncated"
        assert str(store) in str(caught.value.path)

    def test_bytes_are_read_into_many_places(self, store):
        if not isinstance(store, SupportsReadPieces):
            pytest.skip("this store reads into one place at a time")
        data, lengths = pattern(3 << 20), [1, 5000, 2 << 20, *[7] * 3000]
        put(store, "x", data)
        places = [memoryview(bytearray(length)) for length in lengths]
        filled: list[memoryview] = []
        store.read_pieces("x", 3, places, on_filled=filled.extend)
        assert b"".join(places) == data[3 : 3 + sum(lengths)]
        assert list(map(id, filled)) == list(map(id, places))
        with pytest.raises(CheckpointCorruptError) as caught:
            store.read_pieces(
                "x", len(data) - 10, [memoryview(bytearray(6)) for _ in range(2)], on_filled=lambda _: None
            )
        assert caught.value.kind == "truncated"
        with pytest.raises(CheckpointNotFoundError):
            store.read_pieces("y", 0, places, on_filled=lambda _: None)

    @pytest.mark.parametrize("num_bytes", [0, 1, 700_001])
    def test_reading_all_of_an_object(self, store, num_bytes):
        put(store, "a/x", pattern(num_bytes))
        assert read_whole(store, "a/x", max_bytes=num_bytes) == pattern(num_bytes)
        put(store, "a/x", b"another one", replace=True)
        assert read_whole(store, "a/x", max_bytes=11) == b"another one"
        with pytest.raises(UnsafeCheckpointError) as caught:
            read_whole(store, "a/x", max_bytes=10)
        assert caught.value.kind == "limits_exceeded"
        for name in ("a/y", "a"):
            with pytest.raises(CheckpointNotFoundError) as missing:
                read_whole(store, name, max_bytes=10)
            assert missing.value.kind == "missing_file"

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
    @pytest.mark.parametrize(("num_bytes", "block_bytes"), [(5_000, 1 << 30), (5_000, 1000), (2 << 20, 1 << 18)])
    @pytest.mark.parametrize("moment", ["called", "entered", "left"])
    def test_a_block_that_fails_publishes_nothing(self, store, num_bytes, block_bytes, replace, moment):
        blocks = blocks_of(pattern(num_bytes), block_bytes=block_bytes)
        error = _SourceError(28, "the source's own trouble")
        blocks[-1] = blocks[-1]._replace(content=_failing(blocks[-1].content, moment, error))
        if replace:
            put(store, "x", b"old")
        with pytest.raises(_SourceError) as caught:
            store.write("x", blocks, replace=replace)
        assert caught.value is error
        assert store.list("") == ({"x": 3} if replace else {})

    def test_blocks_behind_one_that_cannot_be_entered_are_not_entered(self, store):
        blocks = blocks_of(pattern(64_000), block_bytes=1000)
        entered = []

        def content(number: int) -> AbstractContextManager[memoryview]:
            entered.append(number)
            if number == 20:
                raise KeyError(number)
            return blocks_of(pattern(1000))[0].content()

        watched = [block._replace(content=partial(content, number)) for number, block in enumerate(blocks)]
        with pytest.raises(KeyError):
            store.write("x", watched, replace=False)
        assert entered == list(range(21))

    @pytest.mark.parametrize("content", [memoryview(b"abc"), memoryview(b"abcd").cast("H"), memoryview(bytes(8))[::2]])
    def test_a_block_of_another_shape_publishes_nothing(self, store, content):
        with pytest.raises(CheckpointSaveError, match="the block at byte 0 gave") as caught:
            store.write("x", [Block(0, 4, lambda: nullcontext(content))], replace=False)
        assert caught.value.kind == "storage"
        assert store.list("") == {}

    def test_blocks_with_a_gap_are_refused(self, store):
        def content() -> AbstractContextManager[memoryview]:
            return nullcontext(memoryview(b"ab"))

        with pytest.raises(CheckpointSaveError, match="starts at byte 3"):
            store.write("x", [Block(0, 2, content), Block(3, 2, content)], replace=False)
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

    def test_a_look_into_many_folders_tells_which_hold_an_object(self, store):
        if not isinstance(store, SupportsInFolders):
            pytest.skip("looks into one folder at a time")
        for folder in ("r/b", "r/d", "r/a", "r/e"):
            put(store, f"{folder}/manifest.bcp", b"1")
        put(store, "r/c/data/x", b"1")
        put(store, "r/f/manifest.bcp/x", b"1")
        put(store, "r/g/manifest.bcpx", b"1")
        put(store, "r/h", b"1")
        folders = [f"r/{name}" for name in "hbdagecfx"]
        found = store.in_folders(folders, "manifest.bcp")
        assert len(found) == len(folders)
        told = dict(zip("hbdagecfx", found, strict=True))
        assert {name for name, is_there in told.items() if is_there} <= set("bdae")
        assert {name for name, is_there in told.items() if is_there is False} <= set("gchfx")
        assert store.in_folders([], "manifest.bcp") == []

    def test_a_listing_of_many_folders_is_that_of_each(self, store):
        for name in ("b/x", "b/c/y", "b/.tmp-1", "b-1/x", "b0", "d/e/f/g", "a", "zz/x"):
            put(store, f"r/{name}", b"12")
        folders = [f"r/{name}" for name in ("zz", "b", "nothing", "b-1", "d", "d/e", "b/c")]
        found = list_many(store, folders)
        assert [listing or {} for listing in found] in (
            [store.list(folder) for folder in folders],
            [{}] * len(folders),  # one at a time, then
        )
        assert list_many(store, []) == []

    def test_an_object_that_has_the_name_of_a_folder_is_an_object_in_every_listing(self, store):
        put(store, "r/b/x", b"1")
        try:
            put(store, "r/b/x/y", b"12")
        except CheckpointError:
            pytest.skip("a name is that of an object or that of a folder")
        assert store.list("r/b") == {"x": 1}
        assert list_many(store, ["r/a", "r/b", "r/c", "r/d"])[1] in ({"x": 1}, None)

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

    def test_deleting_many(self, store):
        names = [f"a/{number:02d}" for number in range(40)]
        for name in names:
            put(store, name, b"1")
        delete_many(store, [*names[1:], "a/never", "never/was"])
        assert store.list("a") == {"00": 1}
        delete_many(store, [])
        delete_many(store, names[:2])
        assert store.list("a") == {}

    @pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "a//b", "./x", "a/", "C:\\x", "s3://b/x", "a\0b"])
    def test_names_that_could_leave_the_root(self, store, name):
        for call in (
            lambda: get(store, name, 1),
            lambda: put(store, name, b"x"),
            lambda: store.delete(name),
            lambda: delete_many(store, ["a", name]),
            lambda: store.list(name or "/"),
            lambda: list(store.inventory(name or "/")) if isinstance(store, HasInventory) else store.list(name or "/"),
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
            def content() -> AbstractContextManager[memoryview]:
                barrier.wait()
                return nullcontext(memoryview(contents[number]))

            block = Block(0, len(contents[number]), content)
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

    def test_a_duplicate_is_an_object_of_its_own(self, store):
        if not isinstance(store, SupportsDuplicate):
            pytest.skip("this store makes no duplicates")
        data = pattern(300_000)
        put(store, "step_1/data/a", data)
        with self._unless_unsupported():
            store.duplicate("step_1/data/a", "step_2/data/b", num_bytes=len(data))
            assert store.list("step_2/data") == {"b": len(data)}
            store.delete("step_1/data/a")
            assert get(store, "step_2/data/b", len(data)) == data

    def test_a_duplicate_replaces_nothing_and_has_a_whole_source(self, store):
        if not isinstance(store, SupportsDuplicate):
            pytest.skip("this store makes no duplicates")
        put(store, "a", pattern(10_000))
        put(store, "taken", b"mine")
        with self._unless_unsupported():
            with pytest.raises(CheckpointExistsError):
                store.duplicate("a", "taken", num_bytes=10_000)
            assert get(store, "taken", 4) == b"mine"
            for source, num_bytes in [("a", 9_999), ("none", 10_000), ("none/at/all", 1)]:
                with pytest.raises(CheckpointNotFoundError):
                    store.duplicate(source, "new", num_bytes=num_bytes)
        assert set(store.list("")) == {"a", "taken"}

    @contextmanager
    def _unless_unsupported(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            assert error.kind == "unsupported"  # noqa: PT017 - any other kind fails the test
