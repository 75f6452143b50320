"""Saves and loads in which ranks have more to say than a value of the store between them may have: 8 MiB."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.distributed import ranks
from bytecheckpoint.storage.layout import MANIFEST_NAME
from distributed.workers import WorkerPool

MAX_VALUE_BYTES = 8 << 20
PATIENT_S = 100
SAVING = bcp.SaveOptions(timeout_s=PATIENT_S)


def seen_by(rank: int) -> bytes:
    """What cannot be compressed, and is not a tensor: the manifest holds it."""
    return random.Random(rank).randbytes(MAX_VALUE_BYTES + (1 << 20))


def state_of(rank: int, *, seen: bytes, own: bytes) -> dict[str, Any]:
    return {"weight": torch.full((3,), 2.0), "seen": seen, "own": bcp.RankLocal({"seen": own})}


def save_much(rank: int, world_size: int, path: str, block_ranks: int, is_async: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "BLOCK_RANKS", block_ranks)
        state = state_of(rank, seen=seen_by(-1), own=seen_by(rank))
        bcp.save(path, state, async_save=is_async, options=SAVING).result()


def load_much(rank: int, world_size: int, path: str, exchange: Any) -> bool:
    state = state_of(rank, seen=b"", own=b"")
    bcp.load(path, state, options=bcp.LoadOptions(timeout_s=PATIENT_S, exchange=exchange))
    is_own = state["own"].value == {"seen": seen_by(rank)}
    return state["seen"] == seen_by(-1) and is_own and bool((state["weight"] == 2.0).all())


@pytest.mark.parametrize(("world_size", "block_ranks"), [(2, 64), (4, 2)], ids=["two ranks", "blocks"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_state_with_much_plain_data_is_saved_and_loaded(
    workers: WorkerPool, tmp_path: Path, world_size: int, block_ranks: int, is_async: bool
) -> None:
    workers.run(save_much, str(tmp_path / "ckpt"), block_ranks, is_async, world_size=world_size)
    assert all(workers.run(load_much, str(tmp_path / "ckpt"), "auto", world_size=world_size))


def load_shared(rank: int, world_size: int, path: str, exchange: Any) -> bool:
    state: dict[str, Any] = {"weight": torch.zeros(3), "seen": b""}
    bcp.load(path, state, options=bcp.LoadOptions(timeout_s=PATIENT_S, exchange=exchange))
    return state["seen"] == seen_by(-1) and bool((state["weight"] == 2.0).all())


@pytest.mark.parametrize("exchange", ["on", "off"])
def test_a_checkpoint_with_a_long_manifest_is_loaded(workers: WorkerPool, tmp_path: Path, exchange: str) -> None:
    bcp.save(tmp_path, {"weight": torch.full((3,), 2.0), "seen": seen_by(-1)})
    assert (tmp_path / MANIFEST_NAME).stat().st_size > MAX_VALUE_BYTES
    assert workers.run(load_shared, str(tmp_path), exchange, world_size=2) == [True, True]
