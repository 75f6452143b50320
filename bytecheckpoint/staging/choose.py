"""Chooses the kind of snapshot that a save takes, and checks that a lazy snapshot is safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from bytecheckpoint.adapters.collect import Entry, buffers_in, check_can_be_lazy
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.memory.tensor_bytes import to_host
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.staging.snapshots import LiveState, Snapshot, StagedState, StateInWaves, staged_bytes

SnapshotKind = Literal["none", "copy", "lazy"]

_MAX_COPY_THREADS = 4


def kind_of_snapshot(wanted: str, *, async_save: bool) -> SnapshotKind:
    """Returns the kind that an option selects. `auto` is `copy`, because a lazy snapshot is safe only if nothing but
    steps of torch optimizers changes the state.
    """
    if not async_save:
        return "none"
    return "lazy" if wanted == "lazy" else "copy"


def take_snapshot(
    kind: SnapshotKind, files: Sequence[LiveFile], buffers: HostBuffers, *, staging_bytes: int | None
) -> Snapshot:
    """Returns the snapshot of these files; after its `stage()` the state may change."""
    if kind == "none":
        return LiveState(files, buffers.scratch)
    num_bytes = staged_bytes([file.planned for file in files])
    if staging_bytes is not None and num_bytes > staging_bytes:
        return StateInWaves(files, buffers.staging.take(staging_bytes))
    threads = min(torch.get_num_threads(), _MAX_COPY_THREADS)
    if kind == "lazy":  # half of them beside training; when training waits, its thread brings as many
        threads = max(threads // 2, 1)
    return StagedState(files, buffers.staging.take(num_bytes), threads=threads)


def allocate(planned: Sequence[PlannedFile], buffers: HostBuffers, *, staging_bytes: int | None) -> None:
    """Allocates the memory that a snapshot of these files will take."""
    num_bytes = staged_bytes(planned)
    buffers.staging.take(num_bytes if staging_bytes is None else min(num_bytes, staging_bytes))


def hold_shards(entries: Sequence[Entry], shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Returns the shards for a lazy snapshot. Buffers of modules, and tensors that share memory with one, are copied,
    because a forward pass changes them without waiting. All others keep the memory that they have now, even if their
    tensors are given other memory meanwhile.

    Raises CheckpointSaveError (unsupported_value) if an optimizer of the state would not wait for the snapshot.
    """
    check_can_be_lazy(entries)
    changing = {_storage_of(buffer) for buffer in buffers_in(entries)}
    # Not by `_replace`, which costs more than all the rest of this.
    return [
        LocalShard(
            *shard[:4],
            to_host(shard.tensor) if changing and _storage_of(shard.tensor) in changing else shard.tensor.detach(),
        )
        for shard in shards
    ]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
