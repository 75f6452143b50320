"""Cuts data files into pieces that are sent from memory to memory, and checks the pieces that arrive."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

import xxhash

from bytecheckpoint.distributed.transfer import SentPiece
from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile

PIECE_BYTES = 4 << 20
"""Extents are sent together up to this length."""


def pieces_of(number: int, file: DataFile) -> Iterator[SentPiece]:
    """Yields all of a file in pieces of whole extents, `number` being the index of the file in each."""
    first = end = 0
    for length in file.extent_lengths:
        if end > first and end + length - first > PIECE_BYTES:
            yield SentPiece(number, first, end - first)
            first = end
        end += length
    if end > first:
        yield SentPiece(number, first, end - first)


class ExtentCheck:
    """Compares bytes of one data file that have arrived with the checksums of its extents. Methods may be called from
    any thread.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._bounds = [*accumulate(file.extent_lengths, initial=0)]
        """Where each extent begins, and the end of the last."""

    def check(self, byte_offset: int, content: memoryview, *, owner: int | None) -> None:
        """Raises CheckpointCorruptError (checksum) if an extent that lies completely in `content`, the bytes from
        `byte_offset` on, does not match its checksum. `owner` is the global rank that the bytes came from, or None if
        they were rebuilt from parity.
        """
        # A file may have more than 30,000 extents, and thousands of pieces.
        first = bisect_left(self._bounds, byte_offset)
        end = bisect_right(self._bounds, byte_offset + content.nbytes) - 1
        for extent in range(first, end):
            start, stop = self._bounds[extent], self._bounds[extent + 1]
            found = xxhash.xxh3_64_intdigest(content[start - byte_offset : stop - byte_offset])
            if found != self._file.extent_digests[extent]:
                raise self._damage(start, stop, owner)

    def _damage(self, start: int, end: int, owner: int | None) -> CheckpointCorruptError:
        is_rebuilt = owner is None
        came = "were rebuilt from parity" if is_rebuilt else f"came from the memory of rank {owner}"
        return CheckpointCorruptError(
            f"bytes {start} to {end} of {self._file.name} {came} with another checksum than when they were staged: "
            f"look at the memory of {'the hosts that are left' if is_rebuilt else 'that host'}",
            kind="checksum",
            ranks=() if owner is None else (owner,),
        )
