"""Blocks of a file: whole extents, as many as fit, one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.manifest.ranges import Block, cut_blocks
from bytecheckpoint.planner.file_layout import cut_extents
from bytecheckpoint.storage.object_io import open_block


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 40))
def test_blocks_are_whole_extents_and_as_few_as_fit(lengths: list[int], max_bytes: int) -> None:
    blocks = cut_blocks(lengths, max_bytes=max_bytes, file=3)
    assert [number for block in blocks for number in block.extents] == list(range(len(lengths)))
    for number, block in enumerate(blocks):
        of_block = [lengths[extent] for extent in block.extents]
        assert block.file == 3
        assert block.byte_length == sum(of_block)
        assert block.byte_offset == sum(lengths[: block.extents.start])
        assert block.byte_length <= max_bytes or len(of_block) == 1
        assert number == 0 or blocks[number - 1].byte_length + of_block[0] > max_bytes


@given(st.lists(st.integers(1, 9 << 20), max_size=12), st.integers(1, 1 << 12))
def test_blocks_of_planned_extents_begin_at_multiples_of_their_length(chunks: list[int], header_bytes: int) -> None:
    """A store that writes past the page cache needs that."""
    extents = cut_extents(header_bytes, chunks, block_bytes=4 << 20, state_bytes=sum(chunks))
    blocks = cut_blocks(extents, max_bytes=4 << 20)
    assert [block.byte_offset for block in blocks] == list(range(0, header_bytes + sum(chunks), 4 << 20))


def test_a_block_without_content_is_not_written() -> None:
    with pytest.raises(ValueError, match="before its bytes are attached"), open_block(Block(0, 1)):
        pass
