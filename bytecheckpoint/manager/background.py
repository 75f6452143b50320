"""Work of rank 0 after each commit, on a thread of its own: the record beside the manifest, a pin, what earlier
managers left, and retention. A failure is retried with growing pauses and never reaches a save.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.restore import end_attempts
from bytecheckpoint.manager.retention import decide, delete_steps, finish_deletions, held_by_leases
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.runtime.thread_priority import lower_priority
from bytecheckpoint.storage.layout import step_folder

logger = logging.getLogger("bytecheckpoint")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
_CLOSE_S = 30.0
"""Time that `close` gives deletions that fail; the next manager finishes them."""


class Commit(NamedTuple):
    """A save that was committed."""

    info: StepInfo
    is_pinned: bool
    on_save: Callable[[], object] | None
    """Callback of the user."""


class Background:
    """The thread, and the committed steps as it knows them."""

    def __init__(
        self, generation: Generation, keep: KeepPolicy, clock: StorageClock, steps: Sequence[StoredStep]
    ) -> None:
        self._generation = generation
        self._store = generation.store
        self._keep = keep
        self._clock = clock
        self._changed = threading.Condition()
        self._commits: deque[Commit] = deque()
        self._steps = {step.info.step: step for step in steps}
        self._has_work = False
        self._is_closing = False
        self._is_first = True
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self.restored: int | None = None
        """Step that was restored, which stays."""

    def steps(self) -> list[StepInfo]:
        """Returns the committed steps, oldest first, abandoned ones before all others."""
        with self._changed:
            return [step.info for step in self._ordered()]

    def _ordered(self) -> list[StoredStep]:
        return sorted(self._steps.values(), key=lambda step: (not step.is_abandoned, step.info.step))

    def set_abandoned(self, abandoned: Collection[int]) -> None:
        """Notes the steps that training left behind."""
        with self._changed:
            for number, step in self._steps.items():
                self._steps[number] = step._replace(is_abandoned=number in abandoned)

    def change_info(self, step: int, *, metrics: Mapping[str, float] | None = None, pinned: bool | None = None) -> None:
        """Notes metrics that were reported, or a pin that was set or taken away."""
        with self._changed:
            if (known := self._steps.get(step)) is not None:
                info = replace(known.info, metrics={**known.info.metrics, **(metrics or {})})
                info = info if pinned is None else replace(info, pinned=pinned)
                self._steps[step] = known._replace(info=info)

    def extend_lease(self, step: int, until: float) -> None:
        """Notes a lease."""
        with self._changed:
            if (known := self._steps.get(step)) is not None:
                self._steps[step] = known._replace(leased_until=max(known.leased_until, until))

    def add(self, commit: Commit) -> None:
        """Hands over a commit. Never blocks."""
        with self._changed:
            self._steps[commit.info.step] = StoredStep(commit.info, False, 0.0, False)
            self._commits.append(commit)
            self._has_work = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bcp-manager", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> Exception | None:
        """Returns when nothing is left to do, or the error of the last attempt after this time."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._has_work, timeout_s):
                return self._failure or TimeoutError(f"deletions take longer than {timeout_s:g} s")
        return None

    def close(self) -> None:
        """Waits as long as work goes on, and a bounded time if it fails."""
        failure = self.wait(_CLOSE_S)
        while isinstance(failure, TimeoutError):
            failure = self.wait(_CLOSE_S)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if failure is not None:
            logger.warning(
                "deletions in %s are not finished (%s): the next manager finishes them", self._store, failure
            )

    def _run(self) -> None:
        lower_priority()
        pause_s = _SHORTEST_PAUSE_S
        while self._wait_for_work():
            try:
                self._work()
            except Exception as error:  # noqa: BLE001  a user's policy or the store; neither may stop saves
                if self._failure is None:
                    logger.warning("the work after a commit to %s failed and is tried again: %s", self._store, error)
                with self._changed:
                    self._failure = error
                    self._changed.wait_for(lambda: self._is_closing, pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            else:
                if self._failure is not None:
                    logger.info("the work after commits to %s has caught up", self._store)
                self._failure, pause_s = None, _SHORTEST_PAUSE_S

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._has_work or self._is_closing)
            return not self._is_closing

    def _work(self) -> None:
        while self._commits:
            commit = self._commits[0]
            self._record(commit)
            self._commits.popleft()
            _call_back(commit.on_save)
        if self._is_first:
            finish_deletions(self._store)
            self._generation.clear_earlier()
            end_attempts(self._store, None)
            self._record_earlier()
            self._is_first = False
        self._delete_due()
        with self._changed:
            self._has_work = bool(self._commits)
            self._changed.notify_all()

    def _record(self, commit: Commit) -> None:
        folder = step_folder(commit.info.step)
        step_records.write_record(self._store, folder, commit.info)
        if commit.is_pinned:
            step_records.pin(self._store, folder, time=commit.info.time)

    def _record_earlier(self) -> None:
        """Writes the records of saves whose processes ended right after the commit."""
        with self._changed:
            steps = [step.info for step in self._steps.values() if not step.has_record]
        for info in steps:
            step_records.write_record(self._store, step_folder(info.step), info)

    def _delete_due(self) -> None:
        now = self._clock.now()
        with self._changed:
            steps = self._ordered()
        held = held_by_leases(steps, now=now)
        if self.restored is not None:
            held[self.restored] = "restored"
        infos = [step.info for step in steps]
        decisions = decide(self._keep, infos, now=now, held=held)
        due = [info for info, decision in zip(infos, decisions, strict=True) if not decision.is_kept]
        for info in due:
            stays = delete_steps(self._store, [info], now=now)
            if not stays:
                with self._changed:
                    self._steps.pop(info.step, None)


def _call_back(on_save: Callable[[], object] | None) -> None:
    try:
        if on_save is not None:
            on_save()
    except Exception:
        logger.exception("on_save of the manager failed; the save is committed")
