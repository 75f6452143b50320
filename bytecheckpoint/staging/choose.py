"""Which kind of snapshot a save takes, and what has to be done before it is safe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch

from bytecheckpoint.adapters.collect import Entry, buffers_in, check_can_be_lazy
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.memory.tensor_bytes import to_host
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.staging.snapshots import LiveState, Snapshot, StagedState, WavesState, staged_bytes

SnapshotKind = Literal["none", "copy", "lazy"]

_MAX_COPY_THREADS = 4


def kind_of_snapshot(wanted: str, *, async_save: bool) -> SnapshotKind:
    """The kind that an option comes to. `auto` is `copy`, because a lazy snapshot is only safe where nothing but steps
    of torch optimizers changes the state.
    """
    if not async_save:
        return "none"
    return "lazy" if wanted == "lazy" else "copy"


def take_snapshot(
    kind: SnapshotKind, files: Sequence[LiveFile], buffers: HostBuffers, *, staging_bytes: int | None
) -> Snapshot:
    """The snapshot of these files; after `stage()` the state may change."""
    if kind == "none":
        return LiveState(files, buffers.scratch)
    num_bytes = staged_bytes([file.planned for file in files])
    if staging_bytes is not None and num_bytes > staging_bytes:
        return WavesState(files, buffers.staging.take(staging_bytes))
    threads = min(torch.get_num_threads(), _MAX_COPY_THREADS)
    if kind == "lazy":  # half of them beside training, and the others when it waits: see SaveHandle.staged
        threads = max(threads // 2, 1)
    return StagedState(files, buffers.staging.take(num_bytes), threads=threads)


def allocate(planned: Sequence[PlannedFile], buffers: HostBuffers, *, staging_bytes: int | None) -> None:
    """Makes the memory exist that a snapshot of these files will take."""
    num_bytes = staged_bytes(planned)
    buffers.staging.take(num_bytes if staging_bytes is None else min(num_bytes, staging_bytes))


def hold_shards(entries: Sequence[Entry], shards: Sequence[LocalShard]) -> list[LocalShard]:
    """The shards for a lazy snapshot: buffers of modules, and what shares memory with one, copied, because a forward
    pass changes those and waits for nobody; of all others the memory that they have now, whatever memory their tensors
    are given meanwhile.

    Raises CheckpointSaveError (unsupported_value) where an optimizer of the state would not wait for the snapshot.
    """
    check_can_be_lazy(entries)
    changing = {_storage_of(buffer) for buffer in buffers_in(entries)}
    # `_replace` costs more than all the rest of it.
    return [LocalShard(*shard[:4], _held(shard.tensor, changing)) for shard in shards]


def _held(tensor: torch.Tensor, changing: Collection[int]) -> torch.Tensor:
    return to_host(tensor) if changing and _storage_of(tensor) in changing else tensor.detach()


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
