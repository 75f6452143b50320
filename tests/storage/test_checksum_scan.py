"""The scan reads what it is asked to, finds every difference, and holds no more than its buffers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import xxhash

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.storage import checksum_scan as scanning
from bytecheckpoint.storage.checksum_scan import (
    ScanFault,
    ScanRange,
    find_files,
    ranges_of,
    sample_extents,
    scan,
    size_faults,
)


class Bytes:
    """A store of which only reading and listing are asked."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, name, byte_offset, buffer) -> None:
        self.reads.append((name, byte_offset, buffer.nbytes))
        if name not in self.contents:
            raise CheckpointNotFoundError("gone", kind="missing_file")
        buffer[:] = self.contents[name][byte_offset : byte_offset + buffer.nbytes]

    def list(self, folder):
        lead = f"{folder}/" if folder else ""
        return {name.removeprefix(lead): len(content) for name, content in self.contents.items()}


def file_of(content: bytes, lengths: Sequence[int]) -> DataFile:
    digests, position = [], 0
    for length in lengths:
        digests.append(xxhash.xxh3_64_intdigest(content[position : position + length]))
        position += length
    return DataFile("f", len(content), lengths, digests)


def all_pieces(file: DataFile, *, end: int, percent: float = 100.0) -> list[ScanRange]:
    return list(ranges_of(0, file, end=end, chosen=sample_extents(file, percent, random.Random(0))))


def faults_of(store: Bytes, pieces: list[ScanRange], threads: int = 2) -> list[ScanFault]:
    found: list[ScanFault] = []
    scan(store, ["f"], pieces, threads=threads, on_done=lambda _, faults: found.extend(faults))
    return sorted(found)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch) -> None:
    monkeypatch.setattr(scanning, "READ_BYTES", 64)


@pytest.mark.parametrize("lengths", [[1000], [10] * 100, [64] * 15 + [40], [300, 1, 63, 64, 65, 507]])
def test_every_flipped_byte_is_found_in_its_extent(lengths) -> None:
    content = random.Random(1).randbytes(1000)
    file = file_of(content, lengths)
    pieces = all_pieces(file, end=1000)
    assert faults_of(Bytes({"f": content}), pieces) == []
    for position in range(0, 1000, 7):
        damaged = bytearray(content)
        damaged[position] ^= 1
        store = Bytes({"f": bytes(damaged)})
        (fault,) = faults_of(store, pieces)
        assert fault.byte_offset <= position < fault.byte_offset + fault.byte_length
        assert fault.byte_length in lengths
        assert max(num_bytes for _, _, num_bytes in store.reads) <= 64


def test_pieces_are_the_file_in_order() -> None:
    file = file_of(bytes(1000), [300, 1, 63, 64, 65, 507])
    pieces = all_pieces(file, end=1000)
    assert [(piece.byte_offset, piece.byte_length) for piece in pieces] == [
        (0, 300), (300, 64), (364, 64), (428, 65), (493, 507),
    ]  # fmt: skip


def test_of_a_file_that_is_too_short_only_whole_extents_are_read() -> None:
    file = file_of(bytes(1000), [10] * 100)
    assert sum(piece.byte_length for piece in all_pieces(file, end=555)) == 550


@pytest.mark.parametrize(("percent", "num_extents"), [(0.001, 1), (10, 10), (50, 50), (99.9, 100), (100, 100)])
def test_a_sample_has_its_size_and_at_least_one_extent(percent, num_extents) -> None:
    pieces = all_pieces(file_of(bytes(1000), [10] * 100), end=1000, percent=percent)
    assert sum(len(piece.extent_lengths) for piece in pieces) == num_extents


def test_a_file_without_checksums_gives_no_piece() -> None:
    assert all_pieces(DataFile("f", 1000), end=1000) == []


def test_a_file_that_cannot_be_read_is_given_up() -> None:
    store = Bytes({})
    (fault,) = faults_of(store, all_pieces(file_of(bytes(1000), [10] * 100), end=1000), threads=1)
    assert (fault.kind, fault.byte_offset) == ("missing_file", 0)
    assert len(store.reads) == 1


def test_an_error_of_another_kind_stops_the_scan() -> None:
    class Broken(Bytes):
        def read_into(self, name, byte_offset, buffer) -> None:
            raise ZeroDivisionError(name, byte_offset, buffer)

    with pytest.raises(ZeroDivisionError):
        faults_of(Broken({}), all_pieces(file_of(bytes(1000), [10] * 100), end=1000))


def test_sizes_are_compared() -> None:
    files = [DataFile("a", 10), DataFile("b", 10), DataFile("c", 10), DataFile("d", 10)]
    sizes = find_files(Bytes({"a": bytes(10), "b": bytes(4), "c": bytes(12)}), "", files)
    assert sizes == [10, 4, 12, None]
    assert [(fault.kind, fault.file, fault.byte_offset, fault.byte_length) for fault in size_faults(files, sizes)] == [
        ("truncated", 1, 4, 6),
        ("truncated", 2, 10, 2),
        ("missing_file", 3, 0, 10),
    ]
