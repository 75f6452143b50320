"""Which elements of which tensor a run of flat memory is, against counting them one by one."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamPart, part_of_whole
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.region import Region, whole


class Case(NamedTuple):
    """A part, and how large the flat memory is that it lies in."""

    part: FlatParamPart
    num_elements: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A box of a tensor, a run of its elements in any order of dimensions, and where that lies in flat memory."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = whole(shape)
    if draw(st.booleans()):
        offsets = tuple(draw(st.integers(0, length - 1)) for length in shape)
        lengths = tuple(draw(st.integers(1, length - offset)) for length, offset in zip(shape, offsets, strict=True))
        box = Region(offsets, lengths)
    start = draw(st.integers(0, box.numel))
    numel = draw(st.integers(0, box.numel - start))
    position = draw(st.integers(0, 9))
    order = draw(st.one_of(st.none(), st.permutations(range(len(shape))).map(tuple)))
    num_elements = position + numel + draw(st.integers(0, 9))
    return Case(FlatParamPart(shape, box, start, numel, position, order), num_elements)


def counted(case: Case) -> torch.Tensor:
    """Of each element of the tensor, which element of the flat memory it is; -1 where none is."""
    part = case.part
    order = part.order or tuple(range(len(part.shape)))
    whole_tensor = torch.full(part.shape, -1.0)
    lengths = [part.box.lengths[dim] for dim in order]
    for number in range(part.numel):
        rest, index = part.start + number, {}
        for dim, length in zip(reversed(order), reversed(lengths), strict=True):
            rest, index[dim] = divmod(rest, length)
        place = tuple(part.box.offsets[dim] + index[dim] for dim in range(len(order)))
        whole_tensor[place] = part.position + number
    return whole_tensor


@given(cases())
def test_shards_are_the_elements_counted_one_by_one(case: Case) -> None:
    memory = torch.arange(case.num_elements, dtype=torch.float32)
    found = torch.full(case.part.shape, -1.0)
    shards = case.part.shards("w", memory)
    for shard in shards:
        assert (shard.fqn, shard.dtype, shard.global_shape) == ("w", "float32", case.part.shape)
        assert tuple(shard.tensor.shape) == shard.region.lengths
        place = found[tuple(map(slice, shard.region.offsets, shard.region.ends))]
        assert torch.equal(place, torch.full_like(place, -1.0))
        place.copy_(shard.tensor)
        shard.tensor.fill_(-2)
    assert torch.equal(found, counted(case))
    # What a load writes lands in the part, and nowhere else.
    own = slice(case.part.position, case.part.position + case.part.numel)
    assert bool((memory[own] == -2).all())
    assert int((memory == -2).sum()) == case.part.numel
    assert len(shards) <= max(1, 2 * len(case.part.shape) - 1)


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 9), st.data()
)
def test_ranks_hold_every_element_once_whatever_the_alignment(
    shapes: list[list[int]], num_ranks: int, data: st.DataObject
) -> None:
    """Parameters one after the other at multiples of an alignment, cut into equal chunks, as all frameworks do it."""
    alignment = data.draw(st.sampled_from([1, 4, 8, 64]))
    starts, end = [], 0
    for shape in shapes:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + prod(shape)
    chunk = -(-end // num_ranks)
    counts = [torch.zeros(shape) for shape in shapes]
    for rank in range(num_ranks):
        memory = torch.arange(rank * chunk, (rank + 1) * chunk, dtype=torch.float32)
        for shape, at, count in zip(shapes, starts, counts, strict=True):
            first = min(max(rank * chunk - at, 0), prod(shape))
            last = min(max((rank + 1) * chunk - at, first), prod(shape))
            part = part_of_whole(shape, first, last - first, max(at - rank * chunk, 0))
            for shard in part.shards("w", memory):
                within = tuple(map(slice, shard.region.offsets, shard.region.ends))
                count[within] += 1
                numbers = torch.arange(prod(shape), dtype=torch.float32).view(shape)[within]
                assert torch.equal(shard.tensor, numbers + at)
    assert all(bool((count == 1).all()) for count in counts)


def test_a_part_of_no_elements_is_told_by_one_empty_shard() -> None:
    [shard] = part_of_whole((3, 4), 0, 0, 0).shards("w", torch.zeros(5))
    assert shard.region == Region((0, 0), (0, 0))
    assert shard.tensor.numel() == 0
    assert part_of_whole((), 0, 0, 0).shards("w", torch.zeros(5)) == []


def test_memory_of_the_boxs_own_shape_is_the_box() -> None:
    memory = torch.zeros(4, 3).t()
    [shard] = part_of_whole((3, 4), 0, 12, 0).shards("w", memory)
    assert shard.region == whole((3, 4))
    assert shard.tensor.data_ptr() == memory.data_ptr()


def test_memory_that_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(CheckpointSaveError, match=r"^w is a sparse_coo tensor"):
        part_of_whole((2,), 0, 2, 0).shards("w", torch.zeros(2).to_sparse())
