"""The blocks of an object that is being written: what they add up to, and their bytes. It knows no backend."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.storage.store import Block


def count_bytes(blocks: Sequence[Block]) -> int:
    """The length of the object. Raises CheckpointSaveError (storage) unless each block starts where the last ended."""
    end = 0
    for block in blocks:
        if block.byte_offset != end or block.byte_length < 0:
            raise CheckpointSaveError(
                f"a block of {block.byte_length} bytes starts at byte {block.byte_offset}, the blocks before it end at "
                f"byte {end}; nothing was written: this is a bug, please report it",
                kind="storage",
            )
        end += block.byte_length
    return end


def load_pieces(block: Block) -> list[memoryview]:
    """The block's bytes as flat views of bytes, none of them empty. What `load` raises passes through.

    Raises CheckpointSaveError (storage) where the block has another length than it said.
    """
    pieces = [piece if _is_flat(piece) else piece.cast("B") for piece in block.load() if piece.nbytes]
    num_bytes = sum(piece.nbytes for piece in pieces)
    if num_bytes != block.byte_length:
        raise CheckpointSaveError(
            f"the block at byte {block.byte_offset} gave {num_bytes} bytes, not {block.byte_length}; nothing was "
            "published: this is a bug, please report it",
            kind="storage",
        )
    return pieces


def _is_flat(piece: memoryview) -> bool:
    return piece.ndim == 1 and piece.itemsize == 1
