"""One rank's save until all ranks have agreed: its local plan and its snapshot. The snapshot can be taken by a cached
plan ahead of the agreement, and is taken again if they agree on another plan.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch

from bytecheckpoint.adapters.collect import Entry, changing_tensors, check_can_be_lazy, frozen_fqns
from bytecheckpoint.adapters.shard_columns import ShardBlocks, ShardColumns
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.distributed.ranks import COORDINATOR
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.memory.device_to_host import has_streams, mark_streams, reading_after
from bytecheckpoint.memory.host_mapping import pin_memory_of
from bytecheckpoint.memory.tensor_bytes import to_host
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.saving.global_plan import AgreedPlan, LocalSavePlan, exchange_plans
from bytecheckpoint.saving.handle import SaveProgress
from bytecheckpoint.saving.plans.rank_plan import RankPlan
from bytecheckpoint.saving.slow_phases import PhaseHistory
from bytecheckpoint.saving.target import SaveCall, SaveTarget
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.staging.memory_slots import TierOfSave
from bytecheckpoint.staging.reuse import RootHistory
from bytecheckpoint.staging.snapshots import (
    LiveState,
    ProposedState,
    Ready,
    Snapshot,
    StagedState,
    StateInWaves,
    staged_bytes,
)

logger = logging.getLogger("bytecheckpoint")

SnapshotKind = Literal["none", "copy", "lazy"]

_MAX_COPY_THREADS = 4


def kind_of_snapshot(options: SaveOptions, *, async_save: bool) -> SnapshotKind:
    """Returns the kind that the options select. `auto` is `copy`, because a lazy snapshot is safe only if nothing but
    steps of torch optimizers changes the state. A synchronous save takes `none`, but `copy` with a memory tier.
    """
    if not async_save:
        return "none" if options.memory is None else "copy"
    return "lazy" if options.snapshot == "lazy" else "copy"


def new_snapshot(
    kind: SnapshotKind,
    files: Sequence[LiveFile],
    buffers: HostBuffers,
    ready: Ready,
    *,
    staging_bytes: int | None,
    memory: TierOfSave | None = None,
) -> Snapshot:
    """Returns a snapshot of these files that has copied nothing yet. It stages into a slot of `memory` if that is
    given, else in waves if the files are larger than `staging_bytes`. The state may change after its `stage()`; with
    the kind `none`, only after everything is written.

    Raises the errors of `TierOfSave.take`.
    """
    if kind == "none":
        return LiveState(files, buffers.scratch, ready)
    num_bytes = staged_bytes([file.planned for file in files])
    image = None
    if memory is not None:
        image = memory.take([file.planned.byte_length for file in files], staging_bytes=staging_bytes)
    elif staging_bytes is not None and num_bytes > staging_bytes:
        return StateInWaves(files, buffers.staging.take(staging_bytes), ready)
    threads = min(torch.get_num_threads(), _MAX_COPY_THREADS)
    if kind == "lazy":  # half of them beside training; when training waits, it begins as many again
        threads = max(threads // 2, 1)
    return StagedState(files, buffers.staging.take(num_bytes) if image is None else image, ready, threads=threads)


def allocate(
    planned: Sequence[PlannedFile],
    buffers: HostBuffers,
    shards: ShardBlocks,
    *,
    staging_bytes: int | None,
    tier_of_save: TierOfSave | None = None,
) -> None:
    """Allocates the memory that a snapshot of these files will take: both slots of `tier_of_save`, or without it at
    most `staging_bytes`, pinned for the devices of the shards. Raises the errors of `JobMemory.reserve`.
    """
    if tier_of_save is not None:
        lengths = [file.byte_length for file in planned]
        tier_of_save.slots.reserve(lengths, max_bytes=tier_of_save.max_bytes)
        return
    num_bytes = staged_bytes(planned)
    memory = buffers.staging.take(num_bytes if staging_bytes is None else min(num_bytes, staging_bytes))
    for device in filter(has_streams, devices_of(shards)):
        pin_memory_of(memory, device)


def devices_of(shards: ShardBlocks) -> set[torch.device]:
    """Returns the devices of these shards except the CPU. Shards in columns are all on the CPU."""
    return {shard.tensor.device for shard in shards.records() if not shard.tensor.is_cpu}


class KeptBetweenSaves(NamedTuple):
    """Objects that a process keeps from one save to the next."""

    buffers: HostBuffers
    history: PhaseHistory
    reuse: RootHistory | None
    """None if the save takes no files of earlier ones."""

    def frozen(self, entries: Sequence[Entry]) -> Collection[str]:
        """Returns the FQNs of tensors that get files of their own, so that later saves may reuse those files; empty if
        the save takes no files of earlier ones.
        """
        return () if self.reuse is None else self.reuse.frozen(frozen_fqns(entries))


class PreparedSave:
    """A local plan and its snapshot. `agree` makes the plan global, in the call or later in the background."""

    def __init__(
        self,
        call: SaveCall,
        target: SaveTarget,
        local_plan: LocalSavePlan,
        *,
        kind: SnapshotKind,
        options: SaveOptions,
        kept: KeptBetweenSaves,
        memory: TierOfSave | None = None,
    ) -> None:
        ranks = call.ranks
        if ranks.rank == COORDINATOR:
            logger.info("saving %s from %d ranks", target.path, ranks.num_ranks)
        self.meter = ProgressMeter(target.path, ranks.global_ranks[ranks.rank], "save", options.on_progress)
        self.progress = SaveProgress(
            target.path, self.meter, has_local_stage=target.stage is not None, has_memory=memory is not None
        )
        self.memory = memory
        self.generation: int | None = None
        """Generation of the memory save; set on the coordinator once memory holds it."""
        self.extent_digests: Sequence[Sequence[int]] = ()
        """Extent digests of each file of this rank, once memory holds the save."""
        if memory is not None:
            memory.slots.begin_save()
        self.history = kept.history
        self.reuse = kept.reuse
        self.call = call
        self.target = target
        self.buffers = kept.buffers
        self.options = options
        self._kind = kind
        self._local_plan = local_plan._replace(save_id_prefix=target.save_id_prefix)
        self._snapshot: Snapshot | None = None
        """Snapshot of the cached plan, until the ranks have agreed; then of the agreed one."""
        self._agreed: AgreedPlan | None = None
        self._ready: Ready = {}

    @property
    def is_lazy(self) -> bool:
        return self._kind == "lazy"

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot. Raises RuntimeError if neither `take_snapshot` nor `agree` has made it yet."""
        if self._snapshot is None:
            raise RuntimeError("there is no snapshot before the ranks have agreed")
        return self._snapshot

    def take_snapshot(self, entries: Sequence[Entry]) -> None:
        """Makes the snapshot, which `stage` fills, and agrees with all ranks. With a cached plan, the snapshot is made
        first, because after the agreement it would wait for a core on which another rank trains already; if that
        snapshot is lazy and not in waves, the agreement is left to the background.
        """
        with self.call.phase("stage"):
            if self.is_lazy:
                self._local_plan = self._local_plan._replace(shards=_held_shards(entries, self._local_plan.shards))
            # In the call, because only this thread knows the streams that training uses.
            self._ready = mark_streams(devices_of(self._local_plan.shards))
            self.buffers.scratch.grow(self.options.writer_threads)
            if self._local_plan.cached is not None:
                self._snapshot = self._snapshot_of(self._local_plan.cached)
            if self.is_lazy and isinstance(self._snapshot, StagedState):
                self._snapshot = ProposedState(self._snapshot)
        # Not if the caller waits for staging: the background has a low priority and would delay it.
        if not isinstance(self._snapshot, ProposedState):
            self.agree()

    def agree(self) -> AgreedPlan:
        """Agrees with all ranks on the plan, in the first call only, and makes the snapshot if there is none, or only
        one of another plan. Returns what they agreed on.
        """
        if self._agreed is None:
            try:
                self._agreed = self._agree()
            except BaseException as error:
                if isinstance(self._snapshot, ProposedState):
                    self._snapshot.fail(error)
                    self._snapshot.close()
                raise
        if self._snapshot is None:
            self._snapshot = self._snapshot_of(self._agreed.rank_plan)
        return self._agreed

    def _agree(self) -> AgreedPlan:
        ranks = self.call.ranks
        with self.call.phase("plan"):
            ranks.enter()
            self.progress.is_numbered.set()
            self._refuse_existing()
            with reading_after(self._ready):
                agreed = exchange_plans(ranks, self._local_plan)
        with self.call.phase("stage"):
            if isinstance(self._snapshot, ProposedState):
                self._snapshot.agree(self._snapshot_of(agreed.rank_plan) if agreed.is_new else None)
            elif self._snapshot is None or agreed.is_new:
                self._snapshot = None  # its memory is freed before new memory is allocated
                self._snapshot = self._snapshot_of(agreed.rank_plan)
        return agreed

    def _refuse_existing(self) -> None:
        memory, target = self.memory, self.target
        if memory is not None and self.call.ranks.rank == COORDINATOR:
            memory.slots.look_at(target.store)
        if memory is None or not memory.is_only:
            target.refuse_existing(self.call.ranks)
        elif self.call.ranks.rank == COORDINATOR and not target.may_replace():
            memory.slots.check_step(target.store, target.step or 0, target.path)

    def _snapshot_of(self, plan: RankPlan) -> Snapshot:
        with gc_paused():
            # New files for each snapshot, because a snapshot may change its own.
            files = [LiveFile(planned, self._local_plan.shards) for planned in plan.staged]
        return new_snapshot(
            self._kind,
            files,
            self.buffers,
            self._ready,
            staging_bytes=self.options.staging_bytes,
            memory=self.memory,
        )

    def stage(self) -> None:
        """Stages the snapshot as `SaveProgress.stage` does; the coordinator logs that."""
        self.meter.begin("stage")
        with self.call.timer.phase("stage"):
            is_staged = self.progress.stage(self.snapshot)
        if is_staged and self.call.ranks.rank == COORDINATOR:
            logger.info("staged %s in %.2f s", self.target.path, self.call.timer.total)

    def interrupt(self, error: BaseException) -> None:
        """Fails the snapshot, so that the writer does not wait for files that will never be staged."""
        message = f"the save was interrupted by {type(error).__name__}; nothing was committed"
        self.snapshot.fail(CheckpointSaveError(message, kind="rank_failed"))

    def prepare_without_thread(self) -> None:
        """Drops the snapshot, which must be closed, because no other thread can begin and the caller runs `finish` next
        on this one: `agree` then makes a snapshot that reads live memory. With a memory tier, agrees with all ranks and
        stages a new copy now instead.
        """
        self._snapshot = None
        if self.memory is None:
            self._kind = "none"
            return
        self.agree()
        self.stage()

    def close(self) -> None:
        """Drops the shards of the local plan, and with them its references to the training state: the error of a failed
        save keeps frames that refer to this object.
        """
        self._local_plan = self._local_plan._replace(shards=ShardBlocks([]))


def _held_shards(entries: Sequence[Entry], shards: ShardBlocks) -> ShardBlocks:
    """Returns the shards for a lazy snapshot. Buffers of modules, tensors of data loaders, and tensors that share
    memory with one of these, are copied, because training changes them without waiting; in blocks of columns, in place.
    All others keep the memory that they have now, even if their tensors are given other memory meanwhile.

    Raises CheckpointSaveError (unsupported_value) if an optimizer of the state would not wait for the snapshot.
    """
    check_can_be_lazy(entries)
    changing_storages = {_storage_of(tensor) for tensor in changing_tensors(entries)}
    return ShardBlocks(_held(block, changing_storages) for block in shards.blocks)


def _held(block: Sequence[LocalShard], changing_storages: Collection[int]) -> Sequence[LocalShard]:
    if isinstance(block, ShardColumns):
        block.copy_changing(changing_storages, to_host)
        return block
    # Not by `_replace`, which costs more than all the rest of this.
    return [
        LocalShard(
            *shard[:4],
            _copied(shard.tensor)
            if changing_storages and _storage_of(shard.tensor) in changing_storages
            else shard.tensor.detach(),
        )
        for shard in block
    ]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # On a device with streams a copy is queued behind the work that it waits for; to the host it would wait here.
    return tensor.detach().clone() if has_streams(tensor.device) and not tensor.is_cpu else to_host(tensor)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
