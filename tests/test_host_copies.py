"""Pieces of a buffer put where each belongs, in one call of the kernel or one by one."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import host_copies
from bytecheckpoint.host_copies import scatter


def no_such_call(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def forbidden(*_: int) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


@pytest.fixture(params=["in one call", "not in libc", "not in the kernel", "forbidden"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    others: dict[str, Callable[..., int] | None] = {
        "not in libc": None,
        "not in the kernel": no_such_call,
        "forbidden": forbidden,
    }
    if request.param in others:
        monkeypatch.setattr(host_copies, "_read_memory", lambda: others[request.param])
    elif host_copies._read_memory() is None:
        pytest.skip("this C library has no process_vm_readv")
    else:
        monkeypatch.setattr(host_copies, "_one_by_one", pytest.fail)
    return str(request.param)


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_pieces_are_put_where_they_belong(way: str, num_pieces: int) -> None:
    rng = random.Random(num_pieces)
    lengths = [rng.choice([0, 1, 7, 4096, 5000]) for _ in range(num_pieces)]
    gaps = [rng.choice([0, 0, 0, 1, 300]) for _ in range(num_pieces)]
    starts = np.cumsum([0, *map(int.__add__, lengths, gaps)])[:num_pieces]
    source = np.frombuffer(rng.randbytes(sum(lengths) + sum(gaps) + 1), np.uint8).copy()
    targets = [np.full(length + 2, 255, np.uint8) for length in lengths]
    order = rng.sample(range(num_pieces), num_pieces)  # the plan is in the order of the file, memory is not
    addresses = np.array([targets[order[number]].ctypes.data + 1 for number in range(num_pieces)], np.int64)
    targets_at = {number: targets[order[number]] for number in range(num_pieces)}
    lengths_at = np.array([min(lengths[number], len(targets_at[number]) - 2) for number in range(num_pieces)], np.int64)
    scatter(source.ctypes.data + starts, addresses, lengths_at)
    for number, target in targets_at.items():
        length = int(lengths_at[number])
        assert target[1 : 1 + length].tobytes() == source[starts[number] : starts[number] + length].tobytes()
        assert target[0] == 255
        assert (target[1 + length :] == 255).all()


def read_only_tensor(folder: Path, numel: int) -> torch.Tensor:
    with (folder / "mapped").open("wb+") as file:
        file.truncate(numel * 4)
        mapped = mmap.mmap(file.fileno(), numel * 4, prot=mmap.PROT_READ)
    return torch.frombuffer(mapped, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")  # torch's, about memory that cannot be written to
@pytest.mark.parametrize("numel", [100, 3_000_000], ids=["small", "large"])
def test_memory_that_cannot_be_written_to_is_an_error_that_names_the_tensor(tmp_path: Path, numel: int) -> None:
    """It was a crash of the whole program for small tensors, and the store's fault for large ones."""
    if host_copies._read_memory() is None:
        pytest.skip("this C library has no process_vm_readv")
    bcp.save(tmp_path / "saved", {"model": {"w": torch.ones(numel)}})
    state = {"model": {"w": read_only_tensor(tmp_path, numel)}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.w; load into a copy") as raised:
        bcp.load(tmp_path / "saved", state)
    assert raised.value.kind == "conflict"
    assert (state["model"]["w"] == 0).all()
