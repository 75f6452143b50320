"""Pieces of memory copied between one buffer and where each belongs, in one call of the kernel or one by one."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import host_copies
from bytecheckpoint.host_copies import gather_pieces, scatter_pieces

HAS_CALLS = host_copies._FROM_PROCESS is not None and host_copies._TO_PROCESS is not None
NEEDS_CALLS = pytest.mark.skipif(not HAS_CALLS, reason="this C library has no process_vm_readv")


def no_such_call(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def forbidden(*_: int) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


@pytest.fixture(params=[pytest.param("in one call", marks=NEEDS_CALLS), None, no_such_call, forbidden])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How pieces are copied: as usual, or as where that cannot be done."""
    if request.param == "in one call":
        monkeypatch.setattr(host_copies, "_one_by_one", pytest.fail)
        return
    for name in ("_FROM_PROCESS", "_TO_PROCESS"):
        monkeypatch.setattr(host_copies, name, request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_pieces_come_where_they_belong_and_nothing_else_changes(num_pieces: int) -> None:
    rng = random.Random(num_pieces)
    lengths = [rng.choice([0, 1, 7, 4096, 5000]) for _ in range(num_pieces)]
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


@NEEDS_CALLS
@pytest.mark.filterwarnings("ignore")  # torch's, about memory that cannot be written to
@pytest.mark.parametrize("numel", [100, 3_000_000], ids=["small", "large"])
def test_memory_that_cannot_be_written_to_is_an_error_that_names_the_tensor(tmp_path: Path, numel: int) -> None:
    """It was a crash of the whole program for small tensors, and the store's fault for large ones."""
    bcp.save(tmp_path / "saved", {"model": {"w": torch.ones(numel)}})
    state = {"model": {"w": read_only_tensor(tmp_path, numel)}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.w; load into a copy") as raised:
        bcp.load(tmp_path / "saved", state)
    assert raised.value.kind == "conflict"
    assert (state["model"]["w"] == 0).all()
