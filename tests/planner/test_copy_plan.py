"""Pieces of stored tensors that make up the tensors of a target, element by element."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest import Chunk, Manifest, tensor_record
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor, check_wanted, copies_of, same_tensor
from bytecheckpoint.region import Region, whole


def elements_of(wanted: WantedTensor, sources: dict[str, np.ndarray], first: int, numel: int) -> np.ndarray:
    """The range as `copies_of` says it is put together."""
    memory = np.full(numel, -1)
    for copy in copies_of(wanted, first, numel):
        block = memory[copy.first : copy.first + copy.block.numel].reshape(copy.block.lengths)
        part = tuple(
            slice(at - start, at - start + length)
            for at, start, length in zip(copy.region.offsets, copy.block.offsets, copy.region.lengths, strict=True)
        )
        if copy.fqn is None:
            block[part] = 0
            continue
        box = tuple(
            slice(start, end) for start, end in zip(copy.source_region.offsets, copy.source_region.ends, strict=True)
        )
        block[part] = sources[copy.fqn][box].reshape(copy.region.lengths)
    return memory


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_any_range_of_a_whole_tensor(shape, data) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - first))
    source = np.arange(total).reshape(shape)
    wanted = same_tensor("w", "int64", tuple(shape), stored_fqn="s")
    assert elements_of(wanted, {"s": source}, first, numel).tolist() == list(range(first, first + numel))


@given(st.data())
def test_pieces_of_other_dimensions_and_zeros(data) -> None:
    """Rows of a stacked tensor, a part that is shaped otherwise, and padding, in any range."""
    stacked, flat = np.arange(2 * 6 * 4).reshape(2, 6, 4) + 1, np.arange(24) + 1000
    pieces = [
        CopySource(Region((0, 0), (3, 4)), "stacked", Region((1, 2, 0), (1, 3, 4))),
        CopySource(Region((3, 0), (6, 4)), "flat", Region((0,), (24,))),
        CopySource(Region((9, 0), (2, 4)), None, Region((9, 0), (2, 4))),
        CopySource(Region((11, 0), (2, 2)), "stacked", Region((0, 1, 2), (1, 2, 2))),
        CopySource(Region((11, 2), (2, 2)), "flat", Region((7,), (4,))),
    ]
    wanted = WantedTensor("w", "int64", (13, 4), data.draw(st.permutations(pieces)))
    expected = np.zeros((13, 4), np.int64)
    expected[:3], expected[3:9] = stacked[1, 2:5], flat.reshape(6, 4)
    expected[11:, :2], expected[11:, 2:] = stacked[0, 1:3, 2:], flat[7:11].reshape(2, 2)
    first = data.draw(st.integers(0, 52))
    numel = data.draw(st.integers(0, 52 - first))
    found = elements_of(wanted, {"stacked": stacked, "flat": flat}, first, numel)
    assert found.tolist() == expected.reshape(-1)[first : first + numel].tolist()


MANIFEST = Manifest(save_id="s", tensors={"w": tensor_record("int64", (4, 2), [Chunk(whole((4, 2)), 0, 0, 64)])})


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([CopySource(Region((0,), (4,)), "w", Region((0, 0), (2, 2)))], "there is nothing for"),
        (
            [CopySource(whole((8,)), "w", whole((4, 2))), CopySource(Region((0,), (1,)), "w", Region((0, 0), (1, 1)))],
            "two parts",
        ),
        ([CopySource(whole((8,)), "v", whole((4, 2)))], "has no 'v'"),
        ([CopySource(whole((8,)), "w", Region((1, 0), (4, 2)))], "is not in 'w'"),
        ([CopySource(whole((8,)), "w", Region((0, 0), (2, 2)))], "is to fill"),
    ],
)
def test_what_makes_no_tensor_is_refused_with_the_reason(pieces, expected) -> None:
    with pytest.raises(CheckpointMismatchError, match=expected) as caught:
        check_wanted([WantedTensor("x", "int64", (8,), pieces)], MANIFEST)
    assert caught.value.kind == "coverage"


def test_what_makes_a_tensor_passes() -> None:
    check_wanted([WantedTensor("x", "int64", (8,), [CopySource(whole((8,)), "w", whole((4, 2)))])], MANIFEST)
