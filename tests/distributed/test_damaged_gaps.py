"""Damage in what ranks read for one another: where nobody wants it, it fails no load; where only another rank wants it,
the rank that reads it finds it and does not pass it on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seen, seen
from megatron_like import sharded

import bytecheckpoint as bcp
from bytecheckpoint.loading import exchange as exchange_module
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool

WORLD_SIZE = 3
ROWS, COLUMNS, WANTED = 40, 9000, 1000
"""Each rank wants so many columns, from 0, 3,000 and 6,000 on."""
SIZES = {"a": 50_000, "b": 30_000, "c": 50_000}


def columns(rank: int, whole: torch.Tensor) -> dict[str, Any]:
    """What a rank wants, zeroed; the rest of the columns nobody does."""
    part = torch.zeros(ROWS, WANTED, dtype=whole.dtype)
    first = rank * COLUMNS // WORLD_SIZE
    return {"m": {"t": sharded("t", part, global_shape=(ROWS, COLUMNS), global_offset=(0, first))}}


def flip(path: str, tensor: str, byte: int) -> None:
    """Another bit in that byte of a tensor, on rank 0 for all."""
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = bcp.open(path)._source.manifest
        chunk = manifest.tensors[tensor].chunks[0]
        file = Path(path) / manifest.files[chunk.file].name
        content = bytearray(file.read_bytes())
        content[chunk.byte_offset + byte] ^= 4
        file.write_bytes(content)
    dist.barrier()


def load_columns(rank: int, path: str, whole: torch.Tensor, options: bcp.LoadOptions) -> Seen | None:
    state = columns(rank, whole)
    error = seen(lambda: bcp.load(path, state, options=options))
    first = rank * COLUMNS // WORLD_SIZE
    assert error is not None or torch.equal(state["m"]["t"].data, whole[:, first : first + WANTED])
    return error


def between_columns(rank: int, world_size: int, path: str, exchange: Any, gap: int | None) -> list[Seen | None]:
    """Damage in columns that nobody wants, then in columns of each rank, which is mended again."""
    whole = torch.arange(ROWS * COLUMNS).remainder(251).to(torch.uint8).reshape(ROWS, COLUMNS)
    options = bcp.LoadOptions(exchange=exchange, max_gap_bytes=gap, timeout_s=60)
    with small_pieces(extent_bytes=256), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "GRACE_S", 0.3)
        bcp.save(path, {"m": {"t": whole}})
        for row in range(0, ROWS, 5):
            flip(path, "m.t", row * COLUMNS + 2000)
        errors = [load_columns(rank, path, whole, options)]
        for of_rank in range(WORLD_SIZE):
            place = 17 * COLUMNS + of_rank * COLUMNS // WORLD_SIZE + 500
            flip(path, "m.t", place)
            errors.append(load_columns(rank, path, whole, options))
            flip(path, "m.t", place)
    return errors


@pytest.mark.parametrize("gap", [0, None, 1 << 21])
@pytest.mark.parametrize("exchange", ["on", "off"])
def test_damage_in_columns_counts_for_those_who_want_them(
    workers: WorkerPool, tmp_path: Path, exchange: str, gap: int | None
) -> None:
    by_rank = workers.run(between_columns, str(tmp_path), exchange, gap, world_size=WORLD_SIZE)
    assert by_rank == [by_rank[0]] * WORLD_SIZE
    in_gap, *wanted = by_rank[0]
    assert in_gap is None
    for error in wanted:
        assert error is not None
        assert (error.cls, error.kind) == ("CheckpointCorruptError", "checksum"), error
        assert "are damaged" in error.message


def beside_tensors(rank: int, world_size: int, path: str, exchange: Any, gap: int | None) -> list[Seen | None]:
    """Damage in a tensor that is left out, and then in one that is wanted."""
    whole = {name: torch.arange(numel).float() for name, numel in SIZES.items()}
    options = bcp.LoadOptions(exchange=exchange, max_gap_bytes=gap, timeout_s=60)
    errors: list[Seen | None] = []
    with small_pieces(extent_bytes=16384), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "GRACE_S", 0.3)
        bcp.save(path, whole)
        for damaged in ("b", "c"):
            flip(path, damaged, 60_000)
            state = {name: torch.zeros(SIZES[name]) for name in ("a", "c")}
            errors.append(seen(lambda state=state: bcp.load(path, state, exclude="b", options=options)))
            assert errors[-1] is not None or all(torch.equal(state[name], whole[name]) for name in state)
    return errors


@pytest.mark.parametrize("gap", [0, None, 1 << 21])
@pytest.mark.parametrize("exchange", ["on", "off"])
def test_a_tensor_that_no_rank_wants_may_be_damaged(
    workers: WorkerPool, tmp_path: Path, exchange: str, gap: int | None
) -> None:
    by_rank = workers.run(beside_tensors, str(tmp_path), exchange, gap, world_size=WORLD_SIZE)
    assert by_rank == [by_rank[0]] * WORLD_SIZE
    beside, wanted = by_rank[0]
    assert beside is None
    assert wanted is not None
    assert "they are part of c. Copy" in wanted.message
