"""Pieces of memory copied between one buffer and where each belongs, in one call of the kernel or one by one."""

from __future__ import annotations

import ctypes
import mmap
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.memory import batched_copy
from bytecheckpoint.memory.batched_copy import gather_pieces, scatter_pieces

HAS_CALLS = batched_copy._FROM_PROCESS is not None and batched_copy._TO_PROCESS is not None
SIZES = [0, 1, 7, 4096, 5000, batched_copy._MAX_GATHERED_BYTES, batched_copy._MAX_GATHERED_BYTES + 1]


def refused(*_: int) -> int:
    return -1


def half_done(_pid: int, pieces: int, num_pieces: int, *_: int) -> int:
    """As where memory of one piece cannot be reached: the kernel says how much it copied before."""
    return ctypes.c_int64.from_address(pieces + 8).value if num_pieces else 0


@pytest.fixture(
    params=[
        pytest.param("in one call", marks=pytest.mark.skipif(not HAS_CALLS, reason="no process_vm_readv here")),
        None,
        refused,
        half_done,
        "much",
    ]
)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How pieces are copied: as usual, or as where that cannot be done."""
    if request.param == "much":
        monkeypatch.setattr(batched_copy, "_MAX_BYTES", 10_000)
        return
    if request.param == "in one call":
        monkeypatch.setattr(batched_copy, "FEW_PIECES", 1)
        return
    for name in ("_FROM_PROCESS", "_TO_PROCESS"):
        monkeypatch.setattr(batched_copy, name, request.param)


@pytest.mark.skipif(not HAS_CALLS, reason="no process_vm_readv here")
def test_many_small_pieces_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batched_copy, "_one_by_one", lambda sources, *_: pytest.fail(f"{len(sources)} alone") if len(sources) else None
    )
    buffer, apart = np.arange(32_000, dtype=np.uint8), np.zeros(32_000, np.uint8)
    starts = np.arange(0, 32_000, 100)
    mirrored = apart.ctypes.data + starts[::-1]
    lengths = np.full(320, 100)
    scatter_pieces(buffer.ctypes.data + starts, mirrored, lengths)
    assert (apart.reshape(-1, 100)[::-1] == buffer.reshape(-1, 100)).all()
    buffer[:] = 0
    gather_pieces(mirrored, buffer.ctypes.data + starts, lengths)
    assert (apart.reshape(-1, 100)[::-1] == buffer.reshape(-1, 100)).all()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_pieces_come_where_they_belong_and_nothing_else_changes(num_pieces: int) -> None:
    rng = random.Random(num_pieces)
    lengths = [rng.choice(SIZES) for _ in range(num_pieces)]
    gaps = [rng.choice([0, 0, 0, 1, 300]) for _ in range(num_pieces)]
    starts = [sum(lengths[:number]) + sum(gaps[:number]) for number in range(num_pieces)]
    content = np.frombuffer(rng.randbytes(sum(lengths) + sum(gaps) + 1), np.uint8)
    apart = [np.full(length + 2, 255, np.uint8) for length in lengths]
    in_buffer = content.ctypes.data + np.array(starts, np.int64)
    addresses = np.array([piece.ctypes.data + 1 for piece in apart], np.int64)

    scatter_pieces(in_buffer, addresses, np.array(lengths, np.int64))
    for piece, start, length in zip(apart, starts, lengths, strict=True):
        assert piece.tobytes() == b"\xff" + content[start : start + length].tobytes() + b"\xff"

    gathered = np.full(len(content), 255, np.uint8)
    gather_pieces(addresses, gathered.ctypes.data + np.array(starts, np.int64), np.array(lengths, np.int64))
    expected = np.full(len(content), 255, np.uint8)
    for start, length in zip(starts, lengths, strict=True):
        expected[start : start + length] = content[start : start + length]
    assert gathered.tobytes() == expected.tobytes()


def read_only_tensor(folder: Path, numel: int) -> torch.Tensor:
    with (folder / "mapped").open("wb+") as file:
        file.truncate(numel * 4)
        mapped = mmap.mmap(file.fileno(), numel * 4, prot=mmap.PROT_READ)
    return torch.frombuffer(mapped, dtype=torch.float32)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the kernel does not tell what memory is read only")
@pytest.mark.filterwarnings("ignore")  # torch's, about memory that cannot be written to
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("numel", [100, 3_000_000], ids=["small", "large"])
def test_memory_that_is_read_only_is_found_before_anything_is_changed(tmp_path: Path, numel: int, codec: str) -> None:
    """It was a crash of the whole program, or the store's fault."""
    whole = {"a": torch.ones(numel), "strided": torch.ones(2, numel // 2), "w": torch.ones(numel)}
    bcp.save(tmp_path / "saved", {"model": whole}, options=bcp.SaveOptions(codec=codec))
    mapped = read_only_tensor(tmp_path, numel)
    model = {"a": torch.zeros(numel), "strided": mapped[: numel // 2 * 2].reshape(-1, 2).T, "w": mapped}
    for fqn in ("strided", "w"):
        state = {"a": model["a"], fqn: model[fqn]}
        with pytest.raises(bcp.CheckpointMismatchError, match=rf"model\.{fqn}: the memory .* give it a copy") as raised:
            bcp.load(tmp_path / "saved", {"model": state}, include=["model.a", f"model.{fqn}"])
        assert raised.value.kind == "conflict"
        assert (model["a"] == 0).all()
    bcp.load(tmp_path / "saved", {"model": model | {"strided": torch.zeros(2, numel // 2)}}, strict=False)
    assert (model["a"] == 1).all()


def test_every_one_of_many_small_tensors_is_loaded(tmp_path: Path) -> None:
    whole = {f"t{number}": torch.full((number % 7,), float(number)) for number in range(2_500)}
    bcp.save(tmp_path, {"model": whole})
    model = {name: torch.full_like(value, -1) for name, value in whole.items()}
    bcp.load(tmp_path, {"model": model})
    assert [name for name, value in whole.items() if not torch.equal(model[name], value)] == []
