"""Loads of torchsnapshot and the open-source ByteCheckpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from loads.candidate import LoadFunctions, StoredAt
from shared.peers import oss_load, oss_save, replicated, snapshot_state, torchsnapshot
from shared.states import HeldState


def candidates() -> dict[str, LoadFunctions]:
    save = partial(oss_save, fast_saving=False)
    return {
        "torchsnapshot": LoadFunctions(snapshot_save, snapshot_load),
        "oss": LoadFunctions(save, lambda stored, held: oss_load(stored.folder, held, fast_loading=False)),
        "oss-fast": LoadFunctions(save, lambda stored, held: oss_load(stored.folder, held, fast_loading=True)),
    }


def snapshot_save(folder: Path, held: HeldState) -> None:
    torchsnapshot().Snapshot.take(str(folder), snapshot_state(held), replicated=replicated(held))


def snapshot_load(stored: StoredAt, held: HeldState) -> None:
    snapshot = torchsnapshot().Snapshot(str(stored.folder))
    if held.layout.kind == "slice":  # it reads whole objects
        held.tensors["tensor"].copy_(snapshot.read_object("0/state/tensor")[held.part])
        return
    snapshot.restore(snapshot_state(held))
