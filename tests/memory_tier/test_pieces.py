"""Pieces of data files that arrive from the memory of other hosts: which extents of them are compared."""

from __future__ import annotations

import pytest
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory_tier.pieces import ExtentCheck

CONTENT = bytes(range(40))
LENGTHS = (10, 4, 6, 20)
STARTS = (0, 10, 14, 20)


class Digests(tuple[int, ...]):
    """Notes which of the digests were looked at."""

    __slots__ = ()
    seen: list[object] = []  # noqa: RUF012 - cleared by each test

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("a file has tens of thousands of digests, and a piece a few")


def file() -> DataFile:
    digests = Digests(
        xxhash.xxh3_64_intdigest(CONTENT[start : start + length]) for start, length in zip(STARTS, LENGTHS, strict=True)
    )
    digests.seen.clear()
    return DataFile("data/f", len(CONTENT), LENGTHS, digests)


@pytest.mark.parametrize(
    ("start", "end", "compared"),
    [(0, 40, [0, 1, 2, 3]), (0, 9, []), (1, 14, [1]), (10, 14, [1]), (11, 39, [2]), (20, 40, [3])],
)
def test_only_the_extents_inside_a_piece_are_looked_at(start: int, end: int, compared: list[int]) -> None:
    checked = file()
    ExtentCheck(checked).check(start, memoryview(CONTENT)[start:end], owner=3)
    assert Digests.seen == compared


def test_damage_in_an_extent_of_a_piece_names_its_bytes_in_the_file_and_the_rank() -> None:
    content = bytearray(CONTENT)
    content[15] ^= 1
    check = ExtentCheck(file())
    with pytest.raises(CheckpointCorruptError, match=r"bytes 14 to 20 of data/f came from .* rank 3") as raised:
        check.check(5, memoryview(content)[5:25], owner=3)
    assert raised.value.ranks == (3,)
    with pytest.raises(CheckpointCorruptError, match="were rebuilt from parity"):
        check.check(0, memoryview(content), owner=None)
    check.check(15, memoryview(content)[15:], owner=3)  # of which the damaged extent is only in part
