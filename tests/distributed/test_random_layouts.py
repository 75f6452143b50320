"""Tensors of random shapes, saved in one random layout and loaded in another, with and without exchange, and compared
bit for bit with the plain tensors. What each rank holds is cut from them by torch, or here; never by what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from sample_tensors import random_bits, same_bits
from torch.distributed._shard.sharded_tensor import Shard as LocalPart
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool

MESHES = [(1,), (2,), (3,), (4,), (1, 2), (2, 2), (3, 1), (2, 3), (2, 1, 2), (1, 3, 2), (2, 2, 2)]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]
NUM_EXAMPLES, NUM_LONG_EXAMPLES = 8, 400
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


class Spread(NamedTuple):
    """How a tensor is spread over the ranks of a mesh."""

    kind: str
    """`whole` on each rank, `mesh`, or `flat`: consecutive elements, which several boxes hold."""
    detail: tuple[int, ...]
    """Of a mesh, the sharded dim of each axis, -1 where it is replicated; of flat ranges, where each rank's end."""


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Spread
    target: Spread


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...]) -> Spread:
    kinds = ["whole"] + ["mesh", "mesh"] * bool(shape) + ["flat"] * bool(math.prod(shape) and shape)
    kind = draw(st.sampled_from(kinds))
    if kind == "mesh":
        return Spread(kind, tuple(draw(st.integers(-1, len(shape) - 1)) for _ in mesh))
    if kind == "flat":
        count = math.prod(shape)
        inner = sorted(draw(st.integers(0, count)) for _ in range(math.prod(mesh) - 1))
        return Spread(kind, (*inner, count))
    return Spread(kind, ())


@st.composite
def cases(draw: st.DrawFn, source: tuple[int, ...], target: tuple[int, ...]) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 9) | st.integers(1, 9), max_size=4)))
    return Case(shape, draw(st.sampled_from(DTYPES)), draw(spreads(shape, source)), draw(spreads(shape, target)))


def tensor_of(number: int, case: Case) -> torch.Tensor:
    return random_bits(case.dtype, case.shape, number)


def spread(tensor: torch.Tensor, how: Spread, mesh: DeviceMesh, rank: int) -> Any:
    """What this rank passes for a tensor."""
    if how.kind == "whole":
        return tensor.clone()
    if how.kind == "mesh":
        placements = [Replicate() if dim < 0 else Shard(dim) for dim in how.detail]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return flat_parts(tensor, how.detail, rank)


def flat_parts(tensor: torch.Tensor, ends: Sequence[int], rank: int) -> ShardedTensor:
    shape = tuple(tensor.shape)
    metadata, parts = [], []
    for owner, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        for offsets, lengths in boxes_of(shape, start, end):
            of_box = ShardMetadata(list(offsets), list(lengths), placement=f"rank:{owner}/cpu")
            metadata.append(of_box)
            if owner == rank:
                parts.append(LocalPart(cut(tensor, (offsets, lengths)).clone(), of_box))
    properties = TensorProperties(dtype=tensor.dtype)
    of_tensor = ShardedTensorMetadata(metadata, torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(parts, of_tensor)


def boxes_of(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Boxes that together are these elements of the flat tensor, found row by row, rows joined where they are whole."""
    if start == end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    first, last = -(-start // row), end // row
    if first > last:  # all in one row
        return [((last, *o), (1, *n)) for o, n in boxes_of(shape[1:], start - last * row, end - last * row)]
    if start % row:
        boxes += [((first - 1, *o), (1, *n)) for o, n in boxes_of(shape[1:], start % row, row)]
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if end % row:
        boxes += [((last, *o), (1, *n)) for o, n in boxes_of(shape[1:], 0, end % row)]
    return boxes


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))]


def locals_of(held: Any) -> list[torch.Tensor]:
    if isinstance(held, ShardedTensor):
        return [part.tensor for part in held.local_shards()]
    return [held.to_local() if hasattr(held, "to_local") else held]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Without process groups, which nothing here needs, and which take longer to make than all the rest."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), _init_backend=False)


def save_spread(
    rank: int, world_size: int, path: str, mesh: tuple[int, ...], drawn: list[Case], extent_bytes: int, codec: str
) -> None:
    made = mesh_of(mesh)
    state = {f"t{n}": spread(tensor_of(n, case), case.source, made, rank) for n, case in enumerate(drawn)}
    with small_pieces(extent_bytes=extent_bytes):
        bcp.save(path, {"s": state}, options=bcp.SaveOptions(codec=codec, timeout_s=60))


def load_spread(
    rank: int, world_size: int, path: str, mesh: tuple[int, ...], drawn: list[Case], ways: list[dict[str, Any]]
) -> tuple[list[str], list[int], list[torch.Tensor]]:
    """What is wrong on this rank, how much came from others in each way of reading, and the numbers of the elements
    that it wants of each tensor.
    """
    made = mesh_of(mesh)
    wrong, received = [], []
    for way in ways:
        state = {f"t{n}": spread(torch.zeros_like(tensor_of(n, c)), c.target, made, rank) for n, c in enumerate(drawn)}
        with small_pieces(extent_bytes=64):
            report = bcp.load(path, {"s": state}, options=bcp.LoadOptions(**way, reader_threads=2, timeout_s=60))
        received.append(report.num_bytes_received)
        for number, case in enumerate(drawn):
            right = locals_of(spread(tensor_of(number, case), case.target, made, rank))
            found = locals_of(state[f"t{number}"])
            if len(found) != len(right) or not all(map(same_bits, found, right)):
                wrong.append(f"{way}: {case}")
    return wrong, received, [wanted_elements(case, made, rank) for case in drawn]


def wanted_elements(case: Case, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    numbers = torch.arange(math.prod(case.shape)).reshape(case.shape)
    return torch.cat(
        [held.flatten() for held in locals_of(spread(numbers, case.target, mesh, rank))] or [numbers.flatten()[:0]]
    )


GAPS = st.sampled_from([0, 40, 1 << 20, None])
SCRATCHES = st.sampled_from([100, 1000, 8 << 20])


def so_often(num_examples: int) -> settings:
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=suppressed)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.data())
@so_often(NUM_EXAMPLES)
def test_any_layout_loads_what_any_other_saved(workers: WorkerPool, tmp_path: Path, data: st.DataObject) -> None:
    save_and_load_spread(workers, tmp_path, data)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.data())
@so_often(NUM_LONG_EXAMPLES)
def test_hundreds_of_layouts_load_what_any_other_saved(
    workers: WorkerPool, tmp_path: Path, data: st.DataObject
) -> None:
    save_and_load_spread(workers, tmp_path, data)


def save_and_load_spread(workers: WorkerPool, tmp_path: Path, data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(MESHES))
    drawn = data.draw(st.lists(cases(source, target), min_size=6, max_size=10))
    extent_bytes, codec = (
        data.draw(st.sampled_from([8, 50, 1000])),
        data.draw(st.sampled_from(["none", "none", "zstd"])),
    )
    ways = [
        {"exchange": exchange, "max_gap_bytes": data.draw(GAPS), "scratch_bytes": data.draw(SCRATCHES)}
        for exchange in ("on", "off")
    ]
    with TemporaryDirectory(dir=tmp_path) as path:
        workers.run(save_spread, path, source, drawn, extent_bytes, codec, world_size=math.prod(source))
        outcomes = workers.run(load_spread, path, target, drawn, ways, world_size=math.prod(target))
    for rank, (wrong, (_, num_received), _) in enumerate(outcomes):
        assert not wrong, (rank, source, target, extent_bytes, codec, wrong)
        assert num_received == 0
    by_tensor = zip(*(wanted for _, _, wanted in outcomes), strict=True)
    is_shared = any(torch.cat(wanted).unique().numel() < sum(map(len, wanted)) for wanted in by_tensor)
    is_exchanged = any(received[0] for _, received, _ in outcomes)
    assert is_exchanged or not is_shared, (source, target, extent_bytes, codec, drawn)
    event(f"something is exchanged: {is_exchanged}")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None, database=None)
def test_boxes_are_the_flat_range(lengths: list[int], data: st.DataObject) -> None:
    """What the test above cuts by, against the flat tensor itself."""
    tensor = torch.arange(math.prod(lengths)).reshape(lengths)
    start = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(start, tensor.numel()))
    found = [cut(tensor, box).flatten() for box in boxes_of(tuple(lengths), start, end)]
    assert torch.equal(torch.cat([*found, tensor.new_empty(0)]), torch.arange(start, end))
