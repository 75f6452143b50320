"""One rank's save until all ranks have agreed: the snapshot can be taken by a cached plan ahead of that, and is taken
again if they agree on another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bytecheckpoint.adapters.collect import Entry
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.saving.global_plan import AgreedPlan, LocalSavePlan, exchange_plans
from bytecheckpoint.saving.plan_cache import PlanCache, RankPlan
from bytecheckpoint.saving.target import SaveCall, SaveTarget
from bytecheckpoint.staging.choose import SnapshotKind, hold_shards, take_snapshot
from bytecheckpoint.staging.file_image import LiveFile
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.staging.snapshots import ProposedState, Snapshot, StagedState


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
        plans: PlanCache,
        buffers: HostBuffers,
        on_numbered: Callable[[], object],
    ) -> None:
        """Calls `on_numbered` when all ranks know which call this is."""
        self.call = call
        self.target = target
        self.buffers = buffers
        self.options = options
        self.is_lazy = kind == "lazy"
        self._kind = kind
        self._local_plan = local_plan
        self._plans = plans
        self._on_numbered = on_numbered
        self._snapshot: Snapshot | None = None
        """Snapshot of the cached plan, until the ranks have agreed; then of the agreed one."""
        self._agreed: AgreedPlan | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Exists before the ranks have agreed only if they may agree later."""
        if self._snapshot is None:
            raise RuntimeError("there is no snapshot before the ranks have agreed")
        return self._snapshot

    def take_snapshot(self, entries: Sequence[Entry]) -> None:
        """Takes the snapshot, and agrees with all ranks unless that can be done in the background.

        It takes the snapshot of a cached plan first. What a rank does only after the agreement would have to wait for a
        core on which another rank trains already.
        """
        with self.call.phase("stage"):
            if self.is_lazy:
                self._local_plan = self._local_plan._replace(shards=hold_shards(entries, self._local_plan.shards))
            self.buffers.scratch.grow(self.options.writer_threads)
            if self._local_plan.cached is not None:
                self._snapshot = self._snapshot_of(self._local_plan.cached)
            if self.is_lazy and isinstance(self._snapshot, StagedState) and self._is_on_host():
                self._snapshot = ProposedState(self._snapshot)
        # Not if the caller waits for staging: the background has a low priority and would delay it.
        if not isinstance(self._snapshot, ProposedState):
            self.agree()

    def agree(self) -> AgreedPlan:
        """Agrees with all ranks on the plan, once, and makes the snapshot the one of that plan."""
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
            self._on_numbered()
            self.target.refuse_existing(ranks)
            agreed = exchange_plans(ranks, self._local_plan, self._plans)
        with self.call.phase("stage"):
            if isinstance(self._snapshot, ProposedState):
                self._snapshot.settle(self._snapshot_of(agreed.rank_plan) if agreed.is_new else None)
            elif self._snapshot is None or agreed.is_new:
                self._snapshot = None  # its memory is freed before new memory is allocated
                self._snapshot = self._snapshot_of(agreed.rank_plan)
        return agreed

    def write_live(self) -> None:
        """Makes the save write the state itself, because there is no thread to write a snapshot later."""
        self._kind, self._snapshot = "none", None

    def close(self) -> None:
        """Drops the state: the error of a failed save keeps the frames of its functions."""
        self._local_plan = self._local_plan._replace(shards=())

    def _snapshot_of(self, plan: RankPlan) -> Snapshot:
        with gc_paused():
            # New files for each snapshot, because a snapshot may change its own.
            files = [LiveFile(planned, self._local_plan.shards) for planned in plan.files]
        return take_snapshot(self._kind, files, self.buffers, staging_bytes=self.options.staging_bytes)

    def _is_on_host(self) -> bool:
        """False if a tensor is on a device: its copy must follow the caller's stream, which a thread does not know."""
        return all(shard.tensor.is_cpu for shard in self._local_plan.shards)
