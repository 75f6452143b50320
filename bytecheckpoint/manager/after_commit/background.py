"""Work of rank 0 after each commit, on a thread of its own: the record beside the manifest, what earlier managers left,
retention, and copies to a second root. A failure is retried and never reaches a save.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.after_commit.known_steps import KnownSteps, StepChange
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.after_commit.second_root import SecondRoot
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.restore import end_attempts
from bytecheckpoint.manager.retention import decide, delete_steps, finish_deletions, held_by_leases
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_FAILING_S = 30.0
"""Time that `wait` and `close` give copies and deletions that fail; the next manager finishes them."""


class Commit(NamedTuple):
    """A save that was committed."""

    info: StepInfo
    on_save: Callable[[], object] | None
    """Callback of the user."""


class Background:
    """The thread of the root, and the one that copies to a second root if there is one."""

    def __init__(self, generation: Generation, keep: KeepPolicy, clock: StorageClock) -> None:
        self._generation = generation
        self._store = generation.store
        self._keep = keep
        self._clock = clock
        self._commits: deque[Commit] = deque()
        self._is_first = True
        self._newest: int | None = None
        """Step that this manager committed last."""
        self._work = RetriedWork("bcp-manager", self._catch_up, what=f"the work after a commit to {self._store}")
        self._second: SecondRoot | None = None
        self.steps = KnownSteps(self._store)
        """Committed steps."""
        self._held: dict[int, str] = {}
        """Steps that stay as long as this manager is open, each with the reason."""

    def cool_down(self, target: Store, keep: KeepPolicy) -> None:
        """Copies the steps to a second root from now on, those of earlier managers first."""
        self._second = SecondRoot(
            target, self._generation, self.steps, keep, self._clock, on_copied=self._delete_after_copy
        )
        self._second.work.ask()

    def hold_restored(self, step: int, passed_over: Collection[int]) -> None:
        """Keeps the step that was restored, and newer ones that could not be: they may be good."""
        self._held = {**dict.fromkeys(passed_over, "passed over by restore"), step: "restored"}

    def _delete_after_copy(self) -> None:
        if not self._is_first:  # nothing is deleted before this manager has committed
            self._work.ask()

    def add(self, commit: Commit) -> None:
        """Hands over a commit. Never blocks."""
        self.steps.add(commit.info)
        self._newest = commit.info.step
        self._commits.append(commit)
        self._work.ask()

    def note(self, change: StepChange) -> None:
        """Notes a change that was written beside a step."""
        self.steps.change(change)
        if change.metrics and self._second is not None:
            self._second.renew(change.step)

    def wait(self, hanging_s: float) -> None:
        """Returns when copies are made and due deletions are done. Deletions that fail, or hang for so long, are named
        in a warning. Raises the error of a copy that fails, and StorageError for one that hangs.
        """
        copy_failure = self._finish(hanging_s)
        if copy_failure is not None:
            raise self._copy_error(copy_failure)

    def _finish(self, hanging_s: float) -> Exception | None:
        """Waits and warns as `wait` does; returns the failure of copies. Both threads work side by side, so the limits
        of both count from the same moment.
        """
        failing_s, began = min(_FAILING_S, hanging_s), time.monotonic()
        failure = self._work.wait(began=began, failing_s=failing_s, hanging_s=hanging_s)
        copy_failure = None
        if self._second is not None:
            copy_failure = self._second.work.wait(began=began, failing_s=failing_s, hanging_s=hanging_s)
            if not isinstance(copy_failure, TimeoutError):
                began = time.monotonic()  # the last copy may have made deletions due just now
            failure = failure or self._work.wait(began=began, failing_s=failing_s, hanging_s=hanging_s)
        if failure is not None:
            logger.warning(
                "deletions in %s are not finished (%s): the next manager finishes them", self._store, failure
            )
        return copy_failure

    def _copy_error(self, failure: Exception) -> CheckpointError:
        if isinstance(failure, CheckpointError):
            return failure
        error = StorageError(
            f"checkpoints in {self._store} are not copied to the second root ({type(failure).__name__}: {failure}); "
            "they stay where they are, and the next manager copies them",
            kind="unavailable",
            path=str(self._store),
        )
        error.__cause__ = failure
        return error

    def close(self, hanging_s: float) -> None:
        """Does what `wait` does, and ends the threads. A copy that hangs is named in a warning."""
        copy_failure = self._finish(hanging_s)
        self._work.close()
        if self._second is not None:
            self._second.work.close()
        if isinstance(copy_failure, TimeoutError):
            logger.warning("%s", self._copy_error(copy_failure))
        elif copy_failure is not None:
            raise self._copy_error(copy_failure)

    def _catch_up(self) -> None:
        while self._commits:
            commit = self._commits[0]
            self._record(commit)
            self._commits.popleft()
            _call_back(commit.on_save)
            if self._second is not None:
                self._second.may_delete = True
                self._second.work.ask()
        if self._is_first:
            finish_deletions(self._store)
            self._generation.clear_earlier()
            end_attempts(self._store, None)
            self._record_earlier()
            self._is_first = False
        self._delete_due()

    def _record(self, commit: Commit) -> None:
        step_records.write_record(self._store, step_folder(commit.info.step), commit.info)

    def _record_earlier(self) -> None:
        """Writes the records of saves whose processes ended right after the commit."""
        for step in self.steps.all():
            if not step.has_record:
                step_records.write_record(self._store, step_folder(step.info.step), step.info)

    def _delete_due(self) -> None:
        now = self._clock.now()
        self.steps.drop_deleted()
        steps = self.steps.all()
        held = held_by_leases(steps, now=now) | self._held
        if self._newest is not None:
            held[self._newest] = "newest commit"
        if self._second is not None:
            held |= self._second.waiting()
        infos = [step.info for step in steps]
        decisions = decide(self._keep, infos, now=now, held=held)
        due = [info for info, decision in zip(infos, decisions, strict=True) if not decision.is_kept]
        for info in due:
            if not self._generation.is_newest():
                return
            if not delete_steps(self._store, [info], now=now):
                self.steps.remove(info)
            self._work.note_progress()


def _call_back(on_save: Callable[[], object] | None) -> None:
    try:
        if on_save is not None:
            on_save()
    except Exception:
        logger.exception("on_save of the manager failed; the save is committed")
