"""Compressed tensors that are too large for one file: cut into several, so that no more than two small files are ever
held in memory, and the same tensors again when they are loaded, whole or in part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import before, files_under
from sample_tensors import DTYPES, random_bits
from snapshot_cases import bits_of_all, differing, saved_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.saving import write
from bytecheckpoint.staging import file_image
from bytecheckpoint.staging.compress import CompressedFile
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

LIMIT = 4096
"""Of tensor bytes in a file, so that small tensors are large ones."""
ZSTD = bcp.SaveOptions(codec="zstd")


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", LIMIT)
    monkeypatch.setattr("os.fsync", lambda _: None)  # a disk that others use would take most of the time


def states() -> dict[str, torch.Tensor]:
    """Shapes of which some fit in a file, some are cut by rows, and some within a row."""
    shapes = ((), (0,), (5, 0, 3), (1,), (9001,), (1, 3000), (3, 1500), (2, 1, 3, 700), (2, 3, 700), (4096,), (64, 64))
    state = {f"shape{list(shape)}": torch.zeros(shape) for shape in shapes}
    state |= {f"noise{list(shape)}": random_bits(torch.float32, shape) for shape in shapes}
    state |= {str(dtype): random_bits(dtype, (37, 129), 1) for dtype in DTYPES}
    return state | {
        "transposed": torch.arange(4900.0).reshape(70, 70).T,
        "strided": torch.arange(8100).reshape(90, 90)[::2, 1::3],
        "expanded": torch.arange(50.0).expand(90, 50),
        "conjugated": torch.complex(torch.ones(3000), torch.arange(3000.0)).conj(),
    }


def raw_bytes_by_file(path: Path) -> list[int]:
    """Of the chunks in each file, before they were compressed."""
    manifest = bcp.open(path).manifest
    found = [0] * len(manifest.files)
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            found[chunk.file] += chunk.region.numel * itemsize(tensor.dtype)
    return found


@pytest.mark.parametrize("limit", [16, 1000, LIMIT, 1 << 16])
def test_every_tensor_comes_back_and_no_file_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", limit)
    state = states() if limit > 16 else {"flat": torch.arange(90.0), "row": torch.arange(70.0).double()[None]}
    bcp.save(tmp_path / "c", state, options=ZSTD)
    assert differing(saved_bits(tmp_path / "c"), bits_of_all(state)) == []
    assert max(raw_bytes_by_file(tmp_path / "c")) <= limit


def test_the_users_limit_counts_where_it_is_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", 8 << 20)
    state = {"a": torch.arange(700_000.0), "b": torch.zeros(3, 900_000)}
    bcp.save(tmp_path / "c", state, options=bcp.SaveOptions(codec="zstd", max_file_bytes=1 << 20))
    assert max(raw_bytes_by_file(tmp_path / "c")) <= 1 << 20
    assert differing(saved_bits(tmp_path / "c"), bits_of_all(state)) == []


def test_what_is_not_compressed_is_not_cut(tmp_path: Path) -> None:
    state = {"raw": torch.arange(9 * 1024.0), "packed": torch.arange(9 * 1024.0)}
    bcp.save(tmp_path / "c", state, options=bcp.SaveOptions(codec={"packed": "zstd"}))
    tensors = bcp.open(tmp_path / "c").manifest.tensors
    assert [len(tensors[name].chunks) for name in state] == [1, 9]
    assert {chunk.codec for chunk in tensors["packed"].chunks} == {"zstd"}


@pytest.mark.parametrize("snapshot", ["none", "copy", "waves", "lazy"])
def test_saves_with_a_kept_plan(tmp_path: Path, snapshot: str) -> None:
    """What compresses, and so how long the files are and where chunks lie in them, is new each time."""
    staging_bytes = 32 << 20 if snapshot == "waves" else None
    kind = "lazy" if snapshot == "lazy" else "copy"
    options = bcp.SaveOptions(codec="zstd", snapshot=kind, staging_bytes=staging_bytes)
    state = {"first": torch.zeros(90, 70), "second": torch.zeros(9_000, dtype=torch.bfloat16), "small": torch.ones(3)}
    state |= {"large": torch.zeros(36 << 20, dtype=torch.uint8)} if snapshot == "waves" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", 5 << 20 if snapshot == "waves" else LIMIT)
        for step in range(3):
            state["first"] = random_bits(torch.float32, (90, 70), step) if step % 2 else torch.full((90, 70), step)
            handle = bcp.save(tmp_path, state, step=step, async_save=snapshot != "none", options=options)
            handle.result(60)
            assert differing(saved_bits(tmp_path / f"step_{step:08}"), bits_of_all(state)) == []


def test_a_file_is_compressed_while_the_one_before_is_written_and_no_more_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    started = [threading.Event() for _ in range(11)]
    compress_file, write_image = write.compress_file, write.write_image
    compressed, written = iter(range(10)), iter(range(10))

    def watched_compress(*arguments: Any, **options: Any) -> CompressedFile:
        number = next(compressed)
        events.append(("compress", number))
        started[number].set()
        return compress_file(*arguments, **options)

    def watched_write(*arguments: Any) -> Any:
        number = next(written)
        assert number == 9 or started[number + 1].wait(20)
        file = write_image(*arguments)
        events.append(("written", number))
        return file

    monkeypatch.setattr(write, "compress_file", watched_compress)
    monkeypatch.setattr(write, "write_image", watched_write)
    state = {"w": torch.arange(10 * LIMIT // 4)}
    bcp.save(tmp_path / "c", {"w": state["w"].int()}, options=ZSTD)
    for number in range(2, 10):
        assert events.index(("written", number - 2)) < events.index(("compress", number))
    assert len(events) == 20


def failing_at(call: int, error: BaseException) -> Callable[[], None]:
    calls = iter(range(call))

    def action() -> None:
        if next(calls, None) is None:
            raise error

    return action


@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("where", ["compress_file", "write_image"])
def test_a_file_that_fails_leaves_none_behind(tmp_path: Path, where: str, call: int) -> None:
    state = {"w": torch.arange(10 * LIMIT // 8), "raw": torch.ones(9)}
    options = bcp.SaveOptions(codec={"w": "zstd"})
    failing = before(f"bytecheckpoint.saving.write.{where}", failing_at(call, MemoryError("no more")))
    with failing, pytest.raises(CheckpointSaveError, match="no more"):
        bcp.save(tmp_path / "c", state, options=options)
    assert files_under(tmp_path) == []
    bcp.save(tmp_path / "c", state, options=options)
    assert differing(saved_bits(tmp_path / "c"), bits_of_all(state)) == []


@pytest.mark.parametrize("call", [0, 1, 20])
def test_a_frame_that_fails_leaves_nobody_waiting_and_no_memory_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The frames of a chunk wait for its first one, and each block is entered while another one is in use."""
    monkeypatch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", 40 << 20)
    state = {"w": torch.arange(9 << 20)[: 35 << 17]}
    for _ in range(3):
        failing = before(
            "bytecheckpoint.storage.compression.FrameEncoder.encode", failing_at(call, MemoryError("no more"))
        )
        with failing, pytest.raises(CheckpointSaveError, match="no more"):
            bcp.save(tmp_path / "c", state, options=ZSTD)
    assert files_under(tmp_path) == []
    bcp.save(tmp_path / "c", state, options=ZSTD)
    assert differing(saved_bits(tmp_path / "c"), bits_of_all(state)) == []


def test_a_slice_reads_the_chunks_that_it_touches(tmp_path: Path) -> None:
    tensor = torch.arange(20_000.0).reshape(100, 200)
    bcp.save(tmp_path / "c", {"w": tensor}, options=ZSTD)
    view = bcp.open(tmp_path / "c")["w"]
    for index in ((slice(3, 85), slice(5, 9)), (slice(None), 7), 99, (slice(4, 6), slice(None, None, 3))):
        assert torch.equal(view[index], tensor[index])


def truth() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.arange(8000.0).reshape(20, 400),
        "flat": random_bits(torch.int32, (5001,)),
        "one row": torch.arange(3000.0).reshape(1, 3000).double(),
    }


def placed(rank: int, world_size: int, dim: int | None, *, is_empty: bool) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh("cpu", torch.arange(world_size))
    state: dict[str, torch.Tensor] = {}
    for fqn, tensor in truth().items():
        placement = Replicate() if dim is None else Shard(min(dim, tensor.ndim - 1))
        content = torch.zeros_like(tensor) if is_empty else tensor
        state[fqn] = distribute_tensor(content, mesh, [placement], src_data_rank=None)
    return state


def save_placed(rank: int, world_size: int, path: str, dim: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", LIMIT)
        patch.setattr("os.fsync", lambda _: None)
        state = placed(rank, world_size, dim, is_empty=False)
        for step in range(2):
            bcp.save(path, state, step=step, options=ZSTD)


def load_placed(rank: int, world_size: int, path: str, dim: int | None) -> list[str]:
    """Names of what is not as it was."""
    state = placed(rank, world_size, dim, is_empty=True)
    bcp.load(path, state)
    expected = placed(rank, world_size, dim, is_empty=False)
    return [fqn for fqn in state if not torch.equal(state[fqn].to_local(), expected[fqn].to_local())]


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_other_ranks_in_other_numbers_load_it(workers: WorkerPool, tmp_path: Path, dim: int | None) -> None:
    workers.run(save_placed, str(tmp_path), dim, world_size=2)
    assert differing(saved_bits(tmp_path / "step_00000001"), bits_of_all(truth())) == []
    assert max(raw_bytes_by_file(tmp_path / "step_00000001")) <= LIMIT
    for other in (None, 0, 1):
        assert workers.run(load_placed, str(tmp_path), other, world_size=3) == [[]] * 3


def save_with_another_codec(rank: int, world_size: int, path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_image, "MAX_COMPRESSED_FILE_BYTES", LIMIT)
        options = bcp.SaveOptions(codec="none" if rank else "zstd", timeout_s=60)
        with pytest.raises(bcp.CheckpointMismatchError) as raised:
            bcp.save(path, {"w": torch.ones(3 * LIMIT)}, options=options)
    return str(raised.value)


def test_a_codec_that_differs_from_rank_to_rank_is_refused_and_named(workers: WorkerPool, tmp_path: Path) -> None:
    assert all(
        "options.codec" in message for message in workers.run(save_with_another_codec, str(tmp_path), world_size=2)
    )
