"""What is contiguous in the memory of a target is read right there, and not through memory that is copied from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_like import sharded
from sample_tensors import random_bits, same_bits
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends.local_store import LocalStore

MiB = 1 << 20
ROWS, ROW_BYTES = 2048, 4096
TENSOR_BYTES = ROWS * ROW_BYTES
END_BYTES = TENSOR_BYTES // 16
"""Of an extent, of which each end of a part may lie in one that it shares."""


@contextmanager
def noted_reads() -> Iterator[list[tuple[int, int]]]:
    """Address and length of each buffer that is read into meanwhile."""
    read_into = LocalStore.read_into
    buffers: list[tuple[int, int]] = []

    def noting(self: LocalStore, name: str, byte_offset: int, buffer: memoryview, **options: Any) -> None:
        buffers.append((np.frombuffer(buffer, np.uint8).ctypes.data, buffer.nbytes))
        read_into(self, name, byte_offset, buffer, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read_into", noting)
        yield buffers


def num_bytes_inside(buffers: list[tuple[int, int]], tensor: torch.Tensor) -> int:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(num_bytes for address, num_bytes in buffers if start <= address and address + num_bytes <= end)


@pytest.fixture
def saved(tmp_path: Path) -> torch.Tensor:
    tensor = random_bits(torch.float32, (ROWS, ROW_BYTES // 4), 1)
    bcp.save(tmp_path, {"m": {"w": tensor, "small": torch.ones(3)}})
    return tensor


def test_a_large_tensor_is_read_into_its_memory(tmp_path: Path, saved: torch.Tensor) -> None:
    target = torch.zeros_like(saved)
    with noted_reads() as buffers:
        bcp.load(tmp_path, {"m": {"w": target, "small": torch.zeros(3)}})
    assert same_bits(target, saved)
    assert num_bytes_inside(buffers, target) == target.nbytes


def test_rows_of_a_tensor_are_read_into_the_memory_of_their_shard(tmp_path: Path, saved: torch.Tensor) -> None:
    target, first = torch.zeros(1000, ROW_BYTES // 4), 777
    with noted_reads() as buffers:
        state = {"m": {"w": sharded("w", target, global_shape=tuple(saved.shape), global_offset=(first, 0))}}
        bcp.load(tmp_path, state, exclude="m.small")
    assert same_bits(target, saved[first : first + 1000])
    assert num_bytes_inside(buffers, target) > target.nbytes - 2 * END_BYTES


def test_rows_that_are_asked_for_are_read_into_what_is_returned(tmp_path: Path, saved: torch.Tensor) -> None:
    with noted_reads() as buffers:
        found = bcp.open(tmp_path)["m.w"][777:1777]
    assert same_bits(found, saved[777:1777])
    assert num_bytes_inside(buffers, found) > found.nbytes - 2 * END_BYTES


def test_a_module_on_the_meta_device_is_read_into_the_memory_that_it_gets(tmp_path: Path) -> None:
    source = nn.Linear(2048, 1024)
    bcp.save(tmp_path, {"model": source})
    with torch.device("meta"):
        target = nn.Linear(2048, 1024)
    with noted_reads() as buffers:
        bcp.load(tmp_path, {"model": target})
    assert same_bits(target.weight.detach(), source.weight.detach())
    assert num_bytes_inside(buffers, target.weight) == target.weight.nbytes == TENSOR_BYTES
