"""A save on one rank until the ranks have agreed on it: what can be made ready before they do, and what is made anew
where they agree on something else. Knows neither stores nor what comes of the save afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bytecheckpoint.adapters.collect import Entry
from bytecheckpoint.distributed.ranks import Ranks, Subject, together
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.global_plan import Agreed, Proposal, agree
from bytecheckpoint.saving.kept import Kept
from bytecheckpoint.saving.plan_cache import KnownPlan
from bytecheckpoint.saving.write import warn_of_differing
from bytecheckpoint.staging.choose import Kind, hold_shards, take_snapshot
from bytecheckpoint.staging.file_image import LiveFile
from bytecheckpoint.staging.snapshots import LiveState, ProposedState, Snapshot, StagedState


class Phases(NamedTuple):
    """Of the save, as far as the ranks have to be together."""

    ranks: Ranks
    path: str
    about: Subject
    clock: PhaseTimer


class Draft:
    """What is to be saved, and by which plan as far as this rank knows."""

    def __init__(self, proposal: Proposal, phases: Phases, kept: Kept, *, kind: Kind, options: SaveOptions) -> None:
        self.phases = phases
        self.is_lazy = kind == "lazy"
        self._snapshot: Snapshot | None = None
        """Of the plan that is known, until the ranks have agreed; then the right one."""
        self._agreed: Agreed | None = None
        self._proposal = proposal
        self._kept = kept
        self._kind = kind
        self._options = options

    def prepare(self, entries: Sequence[Entry]) -> None:
        """All that this rank can do by itself. Ranks that hear that they agree can go on at once: what they had to do
        only then would make them wait for a core, which others train on already.
        """
        wish = self._proposal.wish
        if self.is_lazy:
            wish = wish._replace(shards=hold_shards(entries, wish.shards))
            self._proposal = self._proposal._replace(wish=wish)
        self._kept.grow(self._options.writer_threads)
        if self._proposal.known is not None:
            self._snapshot = self._snapshot_of(self._proposal.known)
        if self.is_lazy and isinstance(self._snapshot, StagedState) and self._is_on_host():
            self._snapshot = ProposedState(self._snapshot)

    @property
    def may_settle_later(self) -> bool:
        """Whether the caller may go on before the ranks have agreed, because nothing that they may still need changes
        until it is staged. Not where the caller waits for staging: the background, which steps back, would hold it up.
        """
        return isinstance(self._snapshot, ProposedState)

    @property
    def snapshot(self) -> Snapshot:
        """To be had before the ranks have agreed only where that may happen later."""
        if self._snapshot is None:
            raise RuntimeError("there is no snapshot before the ranks have agreed")
        return self._snapshot

    def settle(self, check: Callable[[], None]) -> Agreed:
        """Agrees with all ranks, unless that is done, and makes the snapshot the one that they agree on. What `check`
        raises before that, on whichever rank, all ranks raise.
        """
        if self._agreed is not None:
            return self._agreed
        ranks, path, about, clock = self.phases
        try:
            with together(ranks, f"planning the save to {path}", about=about), clock.phase("plan"):
                check()
                agreed = agree(ranks, self._proposal, self._kept.plans)
                warn_of_differing(ranks, agreed)
            with together(ranks, f"staging the save to {path}", about=about), clock.phase("stage"):
                self._take(agreed)
        except BaseException as error:
            if isinstance(self._snapshot, ProposedState):
                self._snapshot.fail(error)
                self._snapshot.close()
            raise
        self._agreed = agreed
        return agreed

    def _take(self, agreed: Agreed) -> None:
        if isinstance(self._snapshot, ProposedState):
            self._snapshot.settle(self._snapshot_of(agreed.known) if agreed.is_new else None)
        elif self._snapshot is None or agreed.is_new:
            self._snapshot = None  # its memory goes before new memory comes
            self._snapshot = self._snapshot_of(agreed.known)

    def read_live(self) -> None:
        """Has the state itself written, where there is no thread that could write it later."""
        if self._agreed is not None:  # new files, because a snapshot may have changed its own for its purpose
            self._snapshot = LiveState(self._files_of(self._agreed.known), self._kept.buffers.scratch)

    def close(self) -> None:
        """Lets go of the state: the error of a failed save keeps what its functions knew."""
        wish = self._proposal.wish._replace(shards=(), offers=list)
        self._proposal = self._proposal._replace(wish=wish)

    @gc_paused()
    def _files_of(self, plan: KnownPlan) -> list[LiveFile]:
        """The data files of a plan, with this rank's shards in them."""
        return [LiveFile(planned, self._proposal.wish.shards) for planned in plan.files]

    def _snapshot_of(self, plan: KnownPlan) -> Snapshot:
        return take_snapshot(
            self._kind, self._files_of(plan), self._kept.buffers, staging_bytes=self._options.staging_bytes
        )

    def _is_on_host(self) -> bool:
        """What lies on a device is copied as the caller's stream has left it, which the background could not tell."""
        return all(shard.tensor.is_cpu for shard in self._proposal.wish.shards)
