"""The committed steps of a root, as its owner knows them: read from the store once, when they are first asked for, and
kept up to date from then on. A root may hold thousands, and training must not wait for their records.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.store import Store

_LOOKED_AT = 16
"""Newest steps that are looked at before each round of deletions."""


class StepChange(NamedTuple):
    """A change that this process made to a committed step."""

    step: int
    metrics: Mapping[str, float] = {}
    """Metrics that were reported."""
    pinned: bool | None = None
    """None leaves the pin as it is."""
    leased_until: float = 0.0
    """End of a new lease, in seconds since 1970 by the clock of the storage. A known lease that ends later stays; 0.0
    adds none."""


class KnownSteps:
    """The committed steps of one root. Methods may be called from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._steps: dict[int, StoredStep] = {}
        self._abandoned: set[int] | None = None
        self._is_read = False
        self._early: list[StepChange] = []
        """Changes made before the steps were read; the records that are read may have them or not."""

    def all(self) -> list[StoredStep]:
        """Returns the steps, oldest first, abandoned ones before all others. Raises the errors of the store."""
        self._read()
        with self._lock:
            return step_records.ordered(self._steps.values())

    def _read(self) -> None:
        """Reads the steps of the root, at the first call only."""
        with self._reading:
            if self._is_read:
                return
            found = step_records.list_steps(self._store)
            with self._lock:
                self._steps = {**{step.info.step: step for step in found}, **self._steps}
                for change in self._early:
                    self._apply(change)
                if self._abandoned is not None:
                    self._mark(self._abandoned)
                self._is_read = True

    def note_commit(self, info: StepInfo) -> None:
        """Notes that a step was committed, in place of any earlier checkpoint of it: without a lease, not abandoned."""
        with self._lock:
            self._steps[info.step] = StoredStep(info, False, 0.0, False)
            self._early = [change for change in self._early if change.step != info.step]
            if self._abandoned is not None:
                self._abandoned.discard(info.step)

    def drop_deleted(self) -> None:
        """Forgets the steps that other programs have deleted: all whose folders are gone, and those without a manifest
        that are newer than the oldest of the `_LOOKED_AT` newest committed steps. Costs one listing, and a look for the
        manifest of each of the newest.
        """
        with self._lock:
            known = dict(self._steps)
        listing = self._store.list("")
        committed = list(itertools.islice(layout.steps_below(self._store, "", listing), _LOOKED_AT))
        oldest = committed[-1] if len(committed) == _LOOKED_AT else -1
        with self._lock:
            for step, stored in known.items():
                is_gone = layout.step_folder(step) not in listing or (step > oldest and step not in committed)
                if is_gone and self._steps.get(step) is stored:  # it may have been saved again meanwhile
                    del self._steps[step]

    def read_again(self, step: int) -> None:
        """Reads a known step again, whose checkpoint another program has replaced; forgets it if that is gone. Raises
        the errors of the store.
        """
        found = step_records.read_step(self._store, step, reads_manifest=True)
        with self._lock:
            if step not in self._steps:
                return
            if found is None:
                del self._steps[step]
            else:
                self._steps[step] = found

    def note_deleted(self, info: StepInfo) -> None:
        """Notes that a checkpoint was deleted, unless its step has another checkpoint now."""
        with self._lock:
            known = self._steps.get(info.step)
            if known is not None and known.info.save_id == info.save_id:
                del self._steps[info.step]

    def note_change(self, change: StepChange) -> None:
        """Notes a change that was already written to the store."""
        with self._lock:
            self._apply(change)
            if not self._is_read:
                self._early.append(change)

    def _apply(self, change: StepChange) -> None:
        if (known := self._steps.get(change.step)) is not None:
            info = replace(known.info, metrics={**known.info.metrics, **change.metrics})
            info = info if change.pinned is None else replace(info, pinned=change.pinned)
            until = max(known.leased_until, change.leased_until)
            self._steps[change.step] = known._replace(info=info, leased_until=until)

    def set_abandoned(self, abandoned: Collection[int]) -> None:
        """Marks these steps as abandoned by training, and all others as not abandoned."""
        with self._lock:
            self._abandoned = set(abandoned)
            self._mark(self._abandoned)

    def _mark(self, abandoned: Collection[int]) -> None:
        for number, step in self._steps.items():
            self._steps[number] = step._replace(is_abandoned=number in abandoned)
