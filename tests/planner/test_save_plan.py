"""The save plan: every element is written exactly once, by a rank that holds it, and no rank writes much more than
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.planner import save_plan, shard_owners
from bytecheckpoint.planner.deduplicate import MIN_SPLIT_BYTES
from bytecheckpoint.planner.file_layout import EXTENT_BYTES, LARGE_CHUNK_BYTES, PlacedChunk, cut_extents, lay_out_files
from bytecheckpoint.planner.grid_shards import GridShards, find_grid_shards
from bytecheckpoint.planner.save_plan import PlannedTensor, SavePlan, plan_save
from bytecheckpoint.planner.shard_owners import collect_items
from bytecheckpoint.planner.write_items import ItemRegion, WriteItem, pack_items, unpack_items
from bytecheckpoint.region import Region, find_tiling_fault, grid_regions, intersect, split_flat_range, whole

MiB = 1 << 20


def item(
    fqn: str, shape: Sequence[int], region: Region | None = None, *, dtype: str = "float32", digest: int | None = None
) -> WriteItem:
    region = region or whole(tuple(shape))
    return WriteItem(fqn, dtype, tuple(shape), region.offsets, region.lengths, digest)


class Planned(NamedTuple):
    """A plan, and what each rank writes by it."""

    plan: SavePlan
    writes: list[list[ItemRegion]]

    @property
    def aliases(self) -> Mapping[str, str]:
        return self.plan.aliases


def plan(items: Sequence[Sequence[WriteItem]], aliases: Sequence[dict[str, str]] | None = None) -> Planned:
    """Of items that travel as they do between ranks. What ranks write is what the plan says of the tensors."""
    found = plan_save(list(map(pack_items, items)), aliases or [{}] * len(items), global_ranks=range(len(items)))
    writes = [
        [*(ItemRegion(index, of_rank[index].region) for index in np.flatnonzero(kept).tolist()), *parts]
        for of_rank, kept, parts in zip(items, found.whole_items, found.item_parts, strict=True)
    ]
    slots = [[*map(ItemRegion, range(len(of_rank)), [each.region for each in of_rank])] for of_rank in items]
    written = [
        (rank, (slots[rank] + list(found.item_parts[rank]))[slot], tensor.fqn, region)
        for tensor in found.tensors
        for rank, slot, region in zip(tensor.ranks, tensor.slots, regions_of(tensor), strict=True)
    ]
    assert sorted((rank, write) for rank, write, _, _ in written) == sorted(
        (rank, write) for rank, of_rank in enumerate(writes) for write in of_rank
    )
    assert all(write.region == region and items[rank][write.item].fqn == fqn for rank, write, fqn, region in written)
    planned = Planned(found, writes)
    assert found.num_bytes == bytes_by_rank(planned, items)
    return planned


def regions_of(tensor: PlannedTensor) -> list[Region]:
    """Of its chunks, in their order, which is that of their offsets."""
    if tensor.part is not None:
        return grid_regions(tensor.shape, tensor.part)
    numbers, num_dims = list(map(int, tensor.coordinates)), len(tensor.shape)
    regions = [
        Region(tuple(numbers[at : at + num_dims]), tuple(numbers[at + num_dims : at + 2 * num_dims]))
        for at in range(0, len(numbers), 2 * num_dims)
    ]
    assert regions == sorted(regions)
    return regions


def bytes_by_rank(found: Planned, items: Sequence[Sequence[WriteItem]]) -> list[int]:
    return [
        sum(write.region.numel * itemsize(of_rank[write.item].dtype) for write in writes)
        for writes, of_rank in zip(found.writes, items, strict=True)
    ]


def check_whole(found: Planned, items: Sequence[Sequence[WriteItem]]) -> None:
    """Every tensor is tiled by what is written, and a rank writes only what it offered."""
    written: dict[str, list[Region]] = {}
    shapes = {each.fqn: each.shape for of_rank in items for each in of_rank}
    for writes, of_rank in zip(found.writes, items, strict=True):
        for write in writes:
            own = of_rank[write.item]
            written.setdefault(own.fqn, []).append(write.region)
            assert not write.region.numel or intersect(write.region, own.region) == write.region
    assert written.keys() == shapes.keys() - found.aliases.keys()
    for fqn, regions in written.items():
        assert find_tiling_fault(shapes[fqn], regions) is None, fqn


shapes = st.lists(st.integers(0, 3000), min_size=0, max_size=3).map(tuple).filter(lambda shape: np.prod(shape) < 1e8)
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "complex128"])


@given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_replicas_are_written_once_and_evenly(tensors: list[tuple[tuple[int, ...], str]], num_ranks: int) -> None:
    items = [[item(f"t{index}", shape, dtype=dtype) for index, (shape, dtype) in enumerate(tensors)]] * num_ranks
    found = plan(items)
    check_whole(found, items)
    loads = bytes_by_rank(found, items)
    row_bytes = max((np.prod(shape[1:]) * itemsize(dtype) for shape, dtype in tensors if len(shape)), default=0)
    assert max(loads) - sum(loads) / num_ranks <= 2 * MIN_SPLIT_BYTES + row_bytes


def gpt_shapes() -> list[tuple[int, ...]]:
    layer = [(2048, 2048)] * 4 + [(8192, 2048), (2048, 8192), (2048,), (2048,)]
    return [(32000, 2048), *layer * 12, (2048,)]


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 16, 64])
def test_data_parallel_ranks_each_write_an_equal_part(num_ranks: int) -> None:
    items = [[item(f"t{index:03d}", shape) for index, shape in enumerate(gpt_shapes())]] * num_ranks
    found = plan(items)
    loads = bytes_by_rank(found, items)
    assert max(loads) <= 1.02 * sum(loads) / num_ranks
    check_whole(found, items)


def test_one_large_tensor_is_split_by_rows_over_its_holders() -> None:
    items = [[item("t", (4096, 4096))]] * 4
    found = plan(items)
    assert [write.region for writes in found.writes for write in writes] == [
        Region((1024 * rank, 0), (1024, 4096)) for rank in range(4)
    ]


def test_replicas_even_out_what_only_one_rank_holds() -> None:
    own = [[item("own", (4 * MiB,))], [], []]
    replicas = [item(f"r{index}", (MiB,)) for index in range(8)]
    items = [[*of_rank, *replicas] for of_rank in own]
    assert bytes_by_rank(plan(items), items) == [16 * MiB] * 3


def test_shards_of_a_hybrid_mesh_are_written_by_one_replica_each() -> None:
    """HSDP 2 x 2: two shards, each on two ranks."""
    items = [
        [item(f"t{index}", (512, 256), Region((256 * (rank % 2), 0), (256, 256))) for index in range(40)]
        for rank in range(4)
    ]
    found = plan(items)
    check_whole(found, items)
    assert bytes_by_rank(found, items) == [40 * 512 * 256 * 4 // 4] * 4


@given(st.integers(0, 7), st.integers(1, 6))
def test_uneven_shards_with_empty_ones(length: int, num_ranks: int) -> None:
    part = -(-length // num_ranks)
    starts = [min(rank * part, length) for rank in range(num_ranks)]
    lengths = [min(part, length - start) for start in starts]
    items = [
        [item("t", (length, 3), Region((start, 0), (count, 3)))] for start, count in zip(starts, lengths, strict=True)
    ]
    check_whole(plan(items), items)


def test_scalars_and_empty_tensors_are_written_once() -> None:
    items = [[item("scalar", ()), item("empty", (0, 5)), item("empty too", (5, 0))]] * 3
    found = plan(items)
    check_whole(found, items)
    assert sum(map(len, found.writes)) == 3


def test_an_offset_below_zero_is_shown_as_it_was_offered() -> None:
    offered = [item("t", (8,), Region((-1,), (4,))), item("u", (8,))]
    (table,) = unpack_items([pack_items(offered)] * 3)
    assert table.boxes(0)[1].tolist() == [[-1], [4]]
    with pytest.raises(CheckpointMismatchError, match=r"\[-1:3\]"):
        plan([offered] * 3)


def test_the_plan_is_the_same_each_time_and_whatever_the_order_of_offers() -> None:
    items = [[item(f"t{index}", (500 + index, 700)) for index in range(20)]] * 3
    turned = [list(reversed(of_rank)) for of_rank in items]
    by_name = [
        [
            sorted((of_rank[write.item].fqn, write.region) for write in writes)
            for writes, of_rank in zip(plan(these).writes, these, strict=True)
        ]
        for these in (items, items, turned)
    ]
    assert by_name[0] == by_name[1] == by_name[2]


def test_differing_small_replicas_are_told_and_the_lowest_rank_writes() -> None:
    items = [[item("x", (4,), digest=rank), item("same", (4,), digest=7)] for rank in (5, 1, 1)]
    found = plan(items)
    assert list(found.plan.differing_replicas) == ["x"]
    assert ItemRegion(0, whole((4,))) in found.writes[0]


def test_aliases_are_not_written_but_where_a_rank_holds_the_tensor_alone() -> None:
    tied = [[item("a", (4,))]] * 2
    found = plan(tied, [{"b": "a"}] * 2)
    assert found.aliases == {"b": "a"}
    stages = [[item("a", (4,))], [item("b", (4,))]]
    found = plan(stages, [{"b": "a"}, {}])
    assert found.aliases == {}
    check_whole(found, stages)


@pytest.mark.parametrize(
    ("items", "aliases", "text"),
    [
        pytest.param(
            [["a", "c"], ["a", "c"]],
            [{"b": "a"}, {"b": "c"}],
            "b: tied to a on rank 0, to c on rank 1",
            id="to different tensors",
        ),
        pytest.param(
            [["a"], ["a", "b"], ["c"]],
            [{"b": "a"}, {}, {"b": "c"}],
            "b: tied to a on rank 0, to c on rank 2",
            id="to different tensors, while a third rank has its own",
        ),
        pytest.param(
            [["wide"], ["b"]],
            [{"b": "wide"}, {}],
            "b: float32[4] on rank 1, tied to wide, float32[9], on rank 0",
            id="to one of another shape than another rank has",
        ),
    ],
)
def test_ranks_that_tie_a_name_to_what_cannot_be_the_same_are_refused(
    items: list[list[str]], aliases: list[dict[str, str]], text: str
) -> None:
    with pytest.raises(CheckpointMismatchError, match="ranks disagree about 1 tensors; nothing was written") as error:
        plan([[item(fqn, (9,) if fqn == "wide" else (4,)) for fqn in of_rank] for of_rank in items], aliases)
    assert text in str(error.value)
    assert error.value.kind == "conflict"
    assert error.value.ranks is not None
    assert len(error.value.ranks) == 2


@pytest.mark.parametrize(
    ("items", "aliases", "expected"),
    [
        pytest.param([["a"], ["b"]], [{"b": "a", "c": "a"}, {"c": "b"}], {"c": "b"}, id="the second of three names"),
        pytest.param([["a"], ["b"]], [{"b": "a"}, {"a": "b"}], {}, id="each the other's first"),
        pytest.param([["a"], ["a"]], [{"b": "a"}, {}], {"b": "a"}, id="on one rank only"),
        pytest.param([["a"], ["c"]], [{"b": "a", "c": "a"}, {"b": "c"}], {"b": "c"}, id="another name is the first"),
    ],
)
def test_ranks_may_hold_different_names_of_one_tied_tensor(
    items: list[list[str]], aliases: list[dict[str, str]], expected: dict[str, str]
) -> None:
    assert plan([[item(fqn, (4,)) for fqn in of_rank] for of_rank in items], aliases).aliases == expected


def test_a_tied_tensor_without_elements_is_written_where_ranks_name_it_differently() -> None:
    items = [[item("a", (0, 4))], [item("b", (0, 4))]]
    found = plan(items, [{"b": "a"}, {"a": "b"}])
    assert found.aliases == {}
    assert [tensor.fqn for tensor in found.plan.tensors] == ["a", "b"]


def refused(items: Sequence[Sequence[WriteItem]], kind: str) -> str:
    with pytest.raises(CheckpointMismatchError) as error:
        plan(items)
    assert error.value.kind == kind
    return str(error.value)


def test_ranks_that_disagree_about_a_tensor() -> None:
    text = refused([[item("s", (4,)), item("d", (4,))], [item("s", (5,)), item("d", (4,), dtype="int8")]], "conflict")
    assert "s: float32[4] on rank 0, float32[5] on rank 1" in text
    assert "d: float32[4] on rank 0, int8[4] on rank 1" in text


def test_shards_that_overlap() -> None:
    parts = [[item("t", (4, 4), Region((0, 0), (3, 4)))], [item("t", (4, 4), Region((2, 0), (2, 4)))]]
    assert "[2:3, 0:4]" in refused(parts, "conflict")


@pytest.mark.parametrize("region", [Region((0,), (6,)), Region((-1,), (5,))])
def test_a_shard_that_reaches_out_of_the_tensor_is_not_said_to_be_on_several_ranks(region: Region) -> None:
    text = refused([[item("t", (4,), region)]], "conflict")
    assert "reach out of the tensor" in text
    assert f"t[4]: a rank's shard holds [{region.offsets[0]}:{region.ends[0]}]" in text


def test_a_part_that_no_rank_holds() -> None:
    parts = [[item("t", (4, 4), Region((0, 0), (1, 4)))], [item("t", (4, 4), Region((3, 0), (1, 4)))]]
    assert "no rank holds [1:3, 0:4]" in refused(parts, "coverage")


def test_the_first_ten_are_listed() -> None:
    text = refused([[item(f"t{index:02d}", (4,), Region((0,), (2,))) for index in range(15)]], "coverage")
    assert "t09" in text
    assert "t10" not in text
    assert "and 5 more" in text


def adamw_items(num_ranks: int, *, num_tensors: int, own_bytes: int, num_replicas: int = 1) -> list[list[WriteItem]]:
    """Shards of so many bytes, in HSDP where there are replicas of them, with a step and a norm for each tensor."""
    num_parts, rows = num_ranks // num_replicas, own_bytes // 4
    return [
        [
            each
            for index in range(num_tensors)
            for each in (
                item(f"w{index:03d}", (num_parts * rows,), Region((rank % num_parts * rows,), (rows,))),
                item(f"s{index:03d}", ()),
                item(f"n{index:03d}", (64,), dtype="bfloat16"),
            )
        ]
        for rank in range(num_ranks)
    ]


def files_of(found: Planned, items: Sequence[Sequence[WriteItem]]) -> list[list[tuple[PlacedChunk, ...]]]:
    """Of each rank."""
    return [
        lay_out_files(of_rank, writes, groups=groups, max_file_bytes=1 << 40)
        for of_rank, writes, groups in zip(items, found.writes, found.plan.groups, strict=True)
    ]


def bytes_read(file: Sequence[PlacedChunk], wanted: set[tuple[str, Region]]) -> tuple[int, int]:
    """Of the extents that hold what is wanted, and in how many runs they lie."""
    header_bytes = 4096
    lengths, groups = [chunk.byte_length for chunk in file], [chunk.group for chunk in file]
    extents = cut_extents(header_bytes, lengths, block_bytes=1 << 40, state_bytes=0, groups=groups)
    bounds = np.cumsum([0, *extents])
    is_read = np.zeros(len(extents) + 2, bool)
    for chunk in file:
        if (chunk.fqn, chunk.region) in wanted:
            start = header_bytes + chunk.data_offset
            first, last = np.searchsorted(bounds, [start, start + chunk.byte_length - 1], side="right") - 1
            is_read[first + 1 : last + 2] = True
    return int(np.array(extents)[is_read[1:-1]].sum()), int(np.count_nonzero(np.diff(is_read.astype(int)) == 1))


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("own_bytes", [1700, 100 << 10, 600 << 10])
def test_a_load_of_small_replicas_reads_nothing_else_and_opens_one_file_more(own_bytes: int, num_replicas: int) -> None:
    items = adamw_items(16, num_tensors=30, own_bytes=own_bytes, num_replicas=num_replicas)
    found = plan(items)
    check_whole(found, items)
    files = files_of(found, items)
    for of_rank in items:
        wanted = {(each.fqn, each.region) for each in of_rank}
        read = [bytes_read(file, wanted) for of_writer in files for file in of_writer]
        wanted_bytes = sum(each.region.numel * itemsize(each.dtype) for each in of_rank)
        assert sum(num_bytes for num_bytes, _ in read) == wanted_bytes
        assert sum(num_bytes > 0 for num_bytes, _ in read) <= num_replicas + 1
        # Where the writer's own shards are not wanted: both dtypes side by side.
        assert all(num_runs == 1 for num_bytes, num_runs in read if 0 < num_bytes < own_bytes)


def test_more_small_replicas_than_one_rank_should_write_are_spread_in_long_runs() -> None:
    items = [[item(f"t{index:03d}", (25 << 10,)) for index in range(400)]] * 4
    found = plan(items)
    loads = bytes_by_rank(found, items)
    assert max(loads) - min(loads) <= 4 * (100 << 10)
    by_name = [sorted(items[0][write.item].fqn for write in writes) for writes in found.writes]
    assert [names[-1] < following[0] for names, following in pairwise(by_name)] == [True] * 3


def test_a_rank_with_more_than_its_share_still_takes_a_run_of_small_replicas() -> None:
    replicas = [item(f"r{index}", (1000,)) for index in range(50)]
    items = [[item("own", (MiB,)), *replicas], replicas, replicas]
    found = plan(items)
    assert [len(writes) for writes in found.writes] == [51, 0, 0]
    assert [len(group) for group in found.plan.groups[0]] == [50]


def test_small_tensors_that_differ_between_ranks_lie_beside_small_replicas() -> None:
    items = [
        [item("own", (4, 8), Region((rank, 0), (1, 8))), item("same", (4,), digest=7), item("x", (), digest=rank)]
        for rank in range(4)
    ]
    found = plan(items)
    assert list(found.plan.differing_replicas) == ["x"]
    assert [sorted(items[0][index].fqn for index in group) for group in found.plan.groups[0]] == [["same", "x"]]


@given(st.lists(st.tuples(shapes, dtypes), max_size=12), st.integers(MiB, 8 * MiB))
@settings(max_examples=50, deadline=None)
def test_files_hold_all_chunks_without_gaps_each_aligned(
    tensors: list[tuple[tuple[int, ...], str]], max_file_bytes: int
) -> None:
    items = [item(f"t{index}", shape, dtype=dtype) for index, (shape, dtype) in enumerate(tensors)]
    writes = [ItemRegion(index, each.region) for index, each in enumerate(items)]
    files = lay_out_files(items, reversed(writes), groups=(), max_file_bytes=max_file_bytes)
    assert sorted(chunk.item for file in files for chunk in file) == list(range(len(items)))
    order = [(-itemsize(chunk.dtype), chunk.fqn, chunk.region) for file in files for chunk in file]
    assert order == sorted(order)
    for file in files:
        ends = np.cumsum([chunk.byte_length for chunk in file]).tolist()
        assert [chunk.data_offset for chunk in file] == [0, *ends[:-1]]
        assert all(chunk.data_offset % itemsize(chunk.dtype) == 0 for chunk in file)
        assert ends[-1] <= max_file_bytes or len(file) == 1


@given(
    st.integers(1, 3 * MiB),
    st.lists(st.integers(0, 3 * MiB) | st.sampled_from([0, MiB - 1, MiB, MiB + 1]), max_size=20),
    st.sampled_from([4096, MiB, 3 * MiB, 16 * MiB]),
)
@example(2 * MiB - 1, [], 16 * MiB)  # the second half is 15 bytes longer than the limit
def test_extents_add_up_and_large_chunks_and_blocks_start_their_own(
    header_bytes: int, chunk_bytes: list[int], block_bytes: int
) -> None:
    extents = cut_extents(header_bytes, chunk_bytes, block_bytes=block_bytes, state_bytes=0)
    assert sum(extents) == header_bytes + sum(chunk_bytes)
    assert all(0 < length < EXTENT_BYTES + 16 for length in extents)
    starts = {0, *np.cumsum(extents).tolist()}
    assert starts >= set(range(0, sum(extents), block_bytes))
    position = header_bytes
    for num_bytes in chunk_bytes:
        assert num_bytes < EXTENT_BYTES or {position, position + num_bytes // 2 // 16 * 16} <= starts
        position += num_bytes


@pytest.mark.parametrize(
    ("chunk_bytes", "extents"),
    [
        ([100] * 5, [500]),
        ([MiB // 2 + 2], [MiB // 16] * 7 + [MiB // 16 + 2]),
        ([10, 2 * MiB, 20, 30], [10] + [MiB // 8] * 16 + [50]),
        ([15 * MiB], [15 * MiB // 16] * 16),
        ([64 * MiB], [MiB // 4] * 256),
    ],
)
def test_a_chunk_is_cut_where_twice_as_many_ranks_would_cut_it(chunk_bytes: list[int], extents: list[int]) -> None:
    found = cut_extents(4096, chunk_bytes, block_bytes=1 << 40, state_bytes=0)
    assert found == [4096, *extents]


def test_files_of_many_chunks_have_extents_in_proportion_to_their_bytes() -> None:
    """So that the manifest of many ranks stays short: it has a checksum for each."""
    assert len(cut_extents(4096, [300 << 10] * 4000, block_bytes=16 * MiB, state_bytes=0)) <= 4000 + 4000 // 50
    assert len(cut_extents(4096, [114 << 10] * 1000, block_bytes=16 * MiB, state_bytes=0)) < 150


@pytest.mark.parametrize(("state_bytes", "num_extents"), [(0, 256), (1 << 38, 256), (1 << 39, 128), (1 << 40, 64)])
def test_checksums_cover_more_where_a_checkpoint_is_so_large_that_its_manifest_would_be(
    state_bytes: int, num_extents: int
) -> None:
    assert len(cut_extents(4096, [64 * MiB], block_bytes=1 << 40, state_bytes=state_bytes)) == 1 + num_extents
    assert len(cut_extents(4096, [64 * MiB], block_bytes=1 << 40, state_bytes=100 * state_bytes)) >= 1 + 16


@pytest.mark.parametrize(
    ("chunk_bytes", "num_chunks"), [(128 << 10, 2000), (384 << 10, 700), (5 * MiB, 50), (64 * MiB, 4)]
)
def test_a_checkpoint_of_many_terabytes_has_a_checksum_for_mebibytes(chunk_bytes: int, num_chunks: int) -> None:
    """Its manifest, which all ranks get from one, would be mostly checksums: 33 million on 32,768 ranks."""
    lengths = [chunk_bytes] * num_chunks
    extents = cut_extents(4096, lengths, block_bytes=16 * MiB, state_bytes=32_768 * sum(lengths))
    assert sum(extents) == 4096 + sum(lengths)
    assert max(extents) <= 4 * MiB
    assert len(extents) <= 2 + sum(lengths) / (2 * MiB)


@pytest.mark.parametrize("num_ranks", [8, 64, 512, 1024, 2048])
def test_the_files_of_many_ranks_have_few_extents_and_none_across_the_middle_of_a_large_chunk(num_ranks: int) -> None:
    layer = [bytes_of // num_ranks for bytes_of in (768 * MiB, 32 << 10, 32 << 10, 768 * MiB, 256 * MiB, 256 * MiB)]
    chunk_bytes = layer * 80
    extents = cut_extents(4096, chunk_bytes, block_bytes=1 << 40, state_bytes=0)
    large_bytes = sum(num_bytes for num_bytes in chunk_bytes if num_bytes >= LARGE_CHUNK_BYTES)
    others_bytes = sum(chunk_bytes) - large_bytes
    assert len(extents) <= large_bytes // (MiB // 8) + max(900, others_bytes // (MiB // 2))
    starts, ends = {0, *np.cumsum(extents).tolist()}, np.cumsum([4096, *chunk_bytes]).tolist()
    for end, num_bytes in zip(ends[1:], chunk_bytes, strict=True):
        assert num_bytes < MiB // 4 or end - num_bytes // 2 in starts


def test_two_tensors_of_one_name_on_one_rank_are_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="rank 0 has two tensors of this name") as error:
        plan([[item("w", (4,)), item("w", (4,))], []])
    assert error.value.kind == "conflict"
    assert error.value.ranks == (0,)


@st.composite
def layouts(draw: st.DrawFn) -> list[list[WriteItem]]:
    """A few tensors on up to 12 ranks: cut along two dimensions, or as runs of the flat tensor, by groups of replicas,
    now and then with something wrong.
    """
    num_ranks, num_replicas = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks * num_replicas)]
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        regions = draw(st.sampled_from([by_rows, by_runs, by_both]))(shape, num_ranks)
        if draw(st.integers(0, 9)) == 0:
            regions[-1:] = [draw(st.sampled_from([[], [whole(shape)], regions[0]]))]
        for rank, of_rank in enumerate(items):
            of_rank += [item(f"t{index}", shape, region) for region in regions[rank % num_ranks]]
    return items


def by_rows(shape: tuple[int, ...], num_ranks: int) -> list[list[Region]]:
    if not shape:
        return [[whole(shape)]] * num_ranks
    part = -(-shape[0] // num_ranks)
    starts = [min(rank * part, shape[0]) for rank in range(num_ranks)]
    return [[Region((at, *[0] * len(shape[1:])), (min(part, shape[0] - at), *shape[1:]))] for at in starts]


def by_runs(shape: tuple[int, ...], num_ranks: int) -> list[list[Region]]:
    numel = int(np.prod(shape))
    cuts = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
    return [split_flat_range(shape, start, end - start) for start, end in pairwise(cuts)]


def by_both(shape: tuple[int, ...], num_ranks: int) -> list[list[Region]]:
    if len(shape) < 2 or num_ranks % 2:
        return by_rows(shape, num_ranks)
    halves = by_rows(shape[1:], 2)
    return [
        [Region((row.offsets[0], *column.offsets), (row.lengths[0], *column.lengths))]
        for (row,) in by_rows(shape, num_ranks // 2)
        for (column,) in halves
    ]


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_at_once_or_region_by_region_the_plan_is_the_same(items: list[list[WriteItem]]) -> None:
    outcomes = []
    for least, takes_splits in ((1, False), (1000, False), (1000, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_owners, "MIN_ARRAY_ITEMS", least)
            if not takes_splits:
                patch.setattr(save_plan, "find_grid_shards", no_splits)
            try:
                found = plan(items)
            except CheckpointMismatchError as error:
                outcomes.append((error.kind, str(error), error.ranks))
            else:
                check_whole(found, items)
                tensors = {tensor.fqn: (tensor.part, regions_of(tensor)) for tensor in found.plan.tensors}
                outcomes.append((tensors, [sorted(of_rank) for of_rank in found.writes], found.plan.aliases))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def no_splits(_: object) -> Iterator[GridShards]:
    return iter(())


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4)), max_size=3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_every_grid_and_its_replicas_are_seen_at_once_whichever_rank_holds_which_part(
    dims: list[tuple[int, int]], num_replicas: int, rng: Random
) -> None:
    shape, part = tuple(length for length, _ in dims), tuple(min(dim) for dim in dims)
    regions = grid_regions(shape, part) * num_replicas
    nothing = [Region(shape, (0,) * len(shape))] * (2 if shape else 0)
    regions += nothing
    rng.shuffle(regions)
    items = [[item("t", shape, region), item("u", shape, region)] for region in regions]
    (splits,) = find_grid_shards(collect_items(unpack_items(list(map(pack_items, items))), {}, range(len(items))))
    assert splits.fqns == ["t", "u"]
    assert splits.num_replicas.tolist() == [num_replicas] * 2
    assert splits.num_parts.tolist() == [len(grid_regions(shape, part))] * 2
    held = [regions[rank] for rank in splits.ranks[0].tolist()]
    assert held == [each for each in grid_regions(shape, part) for _ in range(num_replicas)] + nothing


def test_what_only_looks_like_a_grid_is_none() -> None:
    """Numbers so large that products of them wrap around."""
    wrong = [
        Region((0, 0), (1 << 32, 1 << 32)),
        Region((0, 0), (-1, 2)),
        Region((0, 3), (2, 2)),
        Region((0, 0), (3, 2)),
    ]
    for region in wrong:
        packed = [pack_items([item("t", (2, 2)), item("u", (2, 2), region)])]
        (splits,) = find_grid_shards(collect_items(unpack_items(packed), {}, [0]))
        assert splits.fqns == ["t"], region


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_many_ranks_are_planned_as_grids(num_replicas: int) -> None:
    regions = by_rows((1000, 3), 64) * num_replicas
    items = [[item("t", (1000, 3), region), item("s", (), digest=5)] for (region,) in regions]
    found = plan(items)
    check_whole(found, items)
    parts = {tensor.fqn: tensor.part for tensor in found.plan.tensors}
    assert parts == {"t": (16, 3), "s": ()}
    assert found.plan.compared == {tuple(range(64 * num_replicas)): [[1]] * 64 * num_replicas}


def test_one_of_many_replicas_that_differs_is_told() -> None:
    found = plan([[item("x", (4,), digest=7 + (rank == 31))] for rank in range(64)])
    assert found.plan.differing_replicas == ["x"]
    assert found.plan.compared == {}
    assert [len(of_rank) for of_rank in found.writes] == [1, *[0] * 63]


def test_ranks_that_hold_the_same_tensors_send_the_same_description() -> None:
    packed = [pack_items([item("t", (64, 3), region)]) for (region,) in by_rows((64, 3), 64)]
    assert len({of_rank.described for of_rank in packed}) == 1
    assert len({of_rank.coordinates for of_rank in packed}) == 64
