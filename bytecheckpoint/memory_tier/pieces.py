"""Cuts data files into pieces that are sent from memory to memory, and checks the pieces that arrive."""

from __future__ import annotations

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


def check_extents(file: DataFile, piece: SentPiece, content: memoryview, *, owner: int | None) -> None:
    """Raises CheckpointCorruptError (checksum) if an extent that lies completely in the piece does not match its
    checksum. `owner` is the global rank that the bytes came from, or None if they were rebuilt from parity.
    """
    starts = accumulate(file.extent_lengths, initial=0)
    for start, length, digest in zip(starts, file.extent_lengths, file.extent_digests, strict=False):
        first = start - piece.byte_offset
        is_inside = 0 <= first <= content.nbytes - length
        if is_inside and xxhash.xxh3_64_intdigest(content[first : first + length]) != digest:
            is_rebuilt = owner is None
            came = "were rebuilt from parity" if is_rebuilt else f"came from the memory of rank {owner}"
            raise CheckpointCorruptError(
                f"bytes {start} to {start + length} of {file.name} {came} with another checksum than when they were "
                f"staged: look at the memory of {'the hosts that are left' if is_rebuilt else 'that host'}",
                kind="checksum",
                ranks=() if owner is None else (owner,),
            )
