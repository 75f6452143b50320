"""Loads into a device that copies as late as it may: what goes where, in which memory, and when that is used again.
What needs a real device is in test_cuda_loads.py.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_lanes import LateEvent, LateLane
from sample_tensors import DTYPES, LAYOUTS, SHAPE, random_bits, same_bits

import bytecheckpoint as bcp
from bytecheckpoint.adapters.shards import LocalShard, LocalShards
from bytecheckpoint.memory.host_to_device import CopyStreams, copied_buffers, streams_to
from bytecheckpoint.region import Region
from bytecheckpoint.storage.backends.local_store import LocalStore

MiB = 1 << 20
TINY = bcp.LoadOptions(scratch_bytes=8 * MiB, reader_threads=2)
ONE_THREAD = bcp.LoadOptions(scratch_bytes=8 * MiB, reader_threads=1)
HOST = torch.device("cpu")
DAMAGED = 9 * MiB
"""A byte of the data file that is part of a large tensor."""


def state_of(seed: int) -> dict[str, torch.Tensor]:
    state = {f"dtype.{dtype}": random_bits(dtype, SHAPE, seed) for dtype in DTYPES}
    state |= {f"layout.{name}": place(random_bits(torch.float32, SHAPE, seed + 1)) for name, place in LAYOUTS.items()}
    state["large"] = random_bits(torch.float32, (5_000_011,), seed)
    state["large.transposed"] = random_bits(torch.float32, (2500, 1000), seed).T
    state["large.strided"] = random_bits(torch.bfloat16, (3000, 2000), seed)[:, ::3]
    state["conjugated"] = random_bits(torch.complex64, (9, 9), seed).conj()
    state |= {f"small.{number}": random_bits(torch.float32, (100,), seed + number) for number in range(300)}
    return state | {"scalar": random_bits(torch.float32, (), seed), "empty": torch.empty(0, 3)}


@pytest.fixture(scope="module", params=["none", "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    bcp.save(path, state_of(0), options=bcp.SaveOptions(codec=request.param))
    return path


def shards_of(state: dict[str, torch.Tensor]) -> list[LocalShard]:
    shards = LocalShards()
    for name, tensor in state.items():
        shards.add(name, tensor)
    return shards.found


def load_through(lanes_by_device: dict[torch.device, LateLane], path: Path, shards: list[LocalShard]) -> None:
    """Loads these shards, which lie on the host, as if that were a device."""
    load_with(TINY, lanes_by_device, path, shards)


def load_with(
    options: bcp.LoadOptions, lanes_by_device: dict[torch.device, LateLane], path: Path, shards: list[LocalShard]
) -> None:
    source = bcp.open(path, options=options)._source
    fqns = [shard.fqn for shard in shards]
    with CopyStreams(lanes_by_device, lanes_by_device.__getitem__) as lanes:
        targets = source.targets(shards, fqns, lanes)
        source.run(source.with_targets(source.plan(shards, fqns), targets, fqns), lanes)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    monkeypatch.setattr("bytecheckpoint.loading.read.has_streams", lambda _: True)  # reads are planned as for a device
    return LateLane(HOST)


@pytest.mark.parametrize("options", [TINY, ONE_THREAD, bcp.LoadOptions(verify=False)], ids=["tiny", "one", "default"])
def test_every_dtype_and_layout_arrives(saved: Path, options: bcp.LoadOptions, lane: LateLane) -> None:
    state = state_of(1)
    load_with(options, {HOST: lane}, saved, shards_of(state))
    assert [name for name, value in state_of(0).items() if not same_bits(state[name], value)] == []
    assert lane.is_closed
    assert lane.num_queued >= len(state) - 1


@pytest.mark.parametrize("options", [TINY, ONE_THREAD], ids=["tiny", "one"])
def test_memory_is_bounded_and_reading_goes_on_while_copies_wait(
    saved: Path, options: bcp.LoadOptions, lane: LateLane
) -> None:
    load_with(options, {HOST: lane}, saved, shards_of(state_of(1)))
    pinned = [1 << (block.nbytes - 1).bit_length() for block in lane.blocks]  # as torch does it
    assert sum(pinned) <= options.scratch_bytes
    assert len(lane.blocks) > 1 or options is ONE_THREAD
    assert lane.most_waiting > 1


def test_a_part_of_a_region_goes_into_a_part_of_the_memory(tmp_path: Path) -> None:
    whole = random_bits(torch.float32, (2000, 1500))
    bcp.save(tmp_path, {"t": whole})
    columns = Region((100, 300), (1800, 700))
    for target in (torch.zeros(1800, 700), torch.zeros(700, 1800).T):
        load_through({HOST: LateLane(HOST)}, tmp_path, [LocalShard("t", "float32", (2000, 1500), columns, target)])
        assert same_bits(target.contiguous(), whole[100:1900, 300:1000].contiguous())


@pytest.mark.parametrize("is_conjugated", [False, True])
def test_dtypes_are_converted(tmp_path: Path, lane: LateLane, is_conjugated: bool) -> None:
    state = {"float": torch.randn(700, 900), "complex": torch.randn(50, 60, dtype=torch.complex64)}
    bcp.save(tmp_path, state)
    half = torch.zeros(900, 700, dtype=torch.bfloat16).T
    wide = torch.zeros(50, 60, dtype=torch.complex128)
    wide = wide.conj() if is_conjugated else wide
    load_through({HOST: lane}, tmp_path, shards_of({"float": half, "complex": wide}))
    assert torch.equal(half, state["float"].bfloat16())
    assert torch.equal(wide.resolve_conj(), state["complex"].to(torch.complex128))


def test_damaged_bytes_are_copied_nowhere_and_nothing_stays_in_flight(tmp_path: Path, lane: LateLane) -> None:
    state = {"large": torch.arange(1.0, 5_000_001)}
    bcp.save(tmp_path, state)
    (file,) = tmp_path.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[DAMAGED] ^= 1
    file.write_bytes(content)
    target = torch.zeros(5_000_000)
    with pytest.raises(bcp.CheckpointCorruptError):
        load_through({HOST: lane}, tmp_path, shards_of({"large": target}))
    assert lane.is_closed
    assert lane.num_done == lane.num_queued
    is_new = target == state["large"]
    assert not is_new[DAMAGED // 4]
    assert bool((target[~is_new] == 0).all())


class _FailingLane(LateLane):
    """A device that is lost after a few copies."""

    def do(self, number: int) -> None:
        super().do(min(number, 3))
        if number > 3:
            raise RuntimeError("device lost")


def test_a_lost_device_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"large": torch.ones(10_000_000)})
    lost, other = _FailingLane(HOST), LateLane(torch.device("meta"))
    shards = shards_of({"large": torch.zeros(10_000_000)})
    with pytest.raises(RuntimeError, match="device lost"):
        load_through({lane.device: lane for lane in (lost, other)}, tmp_path, shards)
    assert other.is_closed


def test_a_read_that_fails_leaves_nothing_in_flight(
    tmp_path: Path, lane: LateLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcp.save(tmp_path, {"large": torch.ones(10_000_000)})
    shards = shards_of({"large": torch.zeros(10_000_000)})
    read_into = LocalStore.read_into

    def refuse_the_end(store: LocalStore, name: str, byte_offset: int, into: memoryview, **more: Any) -> None:
        if byte_offset > 20 * MiB:
            raise bcp.StorageError("gone", kind="unavailable")
        read_into(store, name, byte_offset, into, **more)

    monkeypatch.setattr(LocalStore, "read_into", refuse_the_end)
    with pytest.raises(bcp.StorageError, match="gone"):
        load_through({HOST: lane}, tmp_path, shards)
    assert lane.num_done == lane.num_queued > 0


def test_a_buffer_comes_back_only_when_all_copies_from_it_are_done() -> None:
    lanes = [LateLane(HOST), LateLane(torch.device("meta"))]
    buffers = copied_buffers(lanes, num_buffers=2, byte_length=4)
    target = torch.zeros(4, dtype=torch.uint8)
    first = buffers.take()
    first[:] = b"abcd"
    lanes[1].copy(target, first, None)
    lanes[0].blocks += lanes[1].blocks
    buffers.give(first)
    second = buffers.take()
    assert second is not first  # a new one, because the first is still being copied from
    buffers.give(second)
    assert buffers.take() is first
    assert lanes[1].num_done == 1
    assert buffers.take() is second


def test_a_buffer_that_is_free_is_taken_before_a_new_one() -> None:
    lane = LateLane(HOST)
    buffers = copied_buffers([lane], num_buffers=3, byte_length=4)
    first = buffers.take()
    buffers.give(first)
    assert buffers.take() is first
    assert len(lane.blocks) == 1


def test_whoever_waits_for_a_buffer_gets_one_though_marking_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = LateLane(HOST)
    buffers = copied_buffers([lane], num_buffers=1, byte_length=4)
    only = buffers.take()

    def fail() -> LateEvent:
        raise RuntimeError("device lost")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffers.take)
        monkeypatch.setattr(lane, "mark", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            buffers.give(only)
        assert waiting.result(30) is only


def test_a_load_into_host_memory_takes_no_lane() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, device="meta")]
    with streams_to(tensors) as lanes:
        assert [lanes.to(tensor) for tensor in tensors] == [None, None]


def test_buffers_are_kept_until_every_copy_is_done(saved: Path) -> None:
    """Torch lends pinned memory that nobody holds to others, who would overwrite what is still being copied."""
    freed: list[bool] = []

    class Watched(LateLane):
        def new_block(self, num_bytes: int) -> memoryview:
            block = np.empty(num_bytes, np.uint8)
            weakref.finalize(block, lambda: freed.append(self.is_closed))
            return block.data

    shards = shards_of({"large": torch.zeros(5_000_011)})
    load_through({HOST: Watched(HOST)}, saved, shards)
    gc.collect()
    assert freed
    assert all(freed)
