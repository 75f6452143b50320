"""Work of rank 0 after each commit, on a thread of its own: the record beside the manifest, what earlier managers left,
retention, and copies to a second root. It pauses while a save is in flight. A failure is retried and never reaches a
save.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError, CheckpointSaveError, StorageError
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.abandoned_steps import Branch
from bytecheckpoint.manager.after_commit.known_steps import KnownSteps, StepChange
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.after_commit.save_pauses import OngoingSaves, SavePauses
from bytecheckpoint.manager.after_commit.second_root import SecondRoot
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.manager.data.log_objects import earlier_objects
from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.restore import forget_restores, note_restore
from bytecheckpoint.manager.retention import (
    REPLACED,
    DeletionPace,
    decide,
    delete_steps,
    finish_deletions,
    held_by_leases,
)
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
    """The background work of a manager: a thread for its root and, with a second root, a thread that copies to it."""

    def __init__(self, generation: Generation, keep: KeepPolicy, clock: StorageClock, *, reads_steps: bool) -> None:
        """With `reads_steps` the thread reads the steps of the root when it begins: a policy will ask for them."""
        self._generation = generation
        self._store = generation.store
        self._keep = keep
        self._clock = clock
        self._reads_steps = reads_steps
        self._commits: deque[Commit] = deque()
        self._may_be_half_deleted = True
        """True while a deletion may be half done: one of an earlier manager at first, later one that failed here."""
        self._may_clear = self._may_lack_records = True
        """True until the work after the first commit has cleared what earlier managers left, and written the records
        that they did not."""
        self._newest: int | None = None
        """Step that this manager committed last."""
        self._work = RetriedWork("bcp-manager", self._catch_up, what=f"the background work in {self._store}")
        self._second: SecondRoot | None = None
        self.saves = OngoingSaves()
        self._pauses = SavePauses(self.saves, meanwhile=self._try_to_record)
        self._pace = DeletionPace(self._let_saves_go_first)
        self.steps = KnownSteps(self._store)
        """Committed steps."""
        self._held: dict[int, str] = {}
        """Steps that stay until the next restore of this manager, each with the reason."""
        self.replaced: set[str] = set()
        """Save ids of checkpoints that saves of this manager replace."""
        self._use = threading.Condition()
        """Guards the three below; notified when the deletion of a step has ended."""
        self._deleting: int | None = None
        self._saving: set[int] = set()
        """Steps whose saves are in flight: the deletion of what one replaces would take the new manifest."""
        self._skipped: set[int] = set()
        """Steps among them that were to be deleted, and are if their saves fail."""
        self._restore_notes = threading.Lock()
        """Held while a note is written or all are deleted: the last deletion takes the folder, under a write to it."""
        self._lease_ends_at = math.inf
        """Time at which the next lease ends that has kept a step."""
        self._damaged: set[int] = set()
        """Steps whose damage is logged."""

    def begin(self) -> None:
        """Starts the thread, which first finishes the deletions that earlier managers had begun."""
        self._work.ask()

    def cool_down(self, target: Store, keep: KeepPolicy, *, overwrites: bool) -> None:
        """Copies the steps that `keep` keeps to a second root from now on, first those of earlier managers. With
        `overwrites` a copy replaces any checkpoint in its place that is neither pinned nor leased.
        """
        self._second = SecondRoot(
            target,
            self._generation,
            self.steps,
            keep=keep,
            clock=self._clock,
            saves=self.saves,
            replaced=self.replaced,
            overwrites=overwrites,
            on_fewer_waiting=self._work.ask,
        )
        self._second.work.ask()

    def go_on_from(self, step: int, branch: Branch, passed_over: Collection[int]) -> None:
        """Protects the restored `step`, and the steps that were passed over, which may be good, from deletion until the
        next restore. Marks the steps that are abandoned in `branch`, which begins at `step`.
        """
        self._held = {**dict.fromkeys(passed_over, "passed over by restore"), step: "restored"}
        self.steps.set_abandoned(branch.abandoned)
        if self._second is not None:
            self._second.await_branch(branch)

    def add(self, commit: Commit) -> None:
        """Hands over a commit. Never blocks."""
        self.steps.note_commit(commit.info)
        self._newest = commit.info.step
        self._commits.append(commit)
        self._work.ask()

    def begin_save(self, step: int, *, timeout_s: float) -> None:
        """Notes that a save of the step begins: the step is not deleted before `end_save`. If it is being deleted,
        waits for the end of that; raises StorageError (unavailable) after half of `timeout_s`.
        """
        with self._use:
            self._await_deletion(step, timeout_s)
            self._saving.add(step)
            self.saves.begin()

    def end_save(self, step: int) -> None:
        """Notes that a save has ended, with or without an error, and asks again for the deletion of its step if that
        was skipped. Does nothing if the save was not noted as begun.
        """
        with self._use:
            if step not in self._saving:
                return
            self._saving.remove(step)
            was_skipped = step in self._skipped
            self._skipped.discard(step)
        self.saves.end()
        if was_skipped:
            self._work.ask()

    def note_restore(self, step: int, *, timeout_s: float) -> None:
        """Notes, also in the store, that a restore of the step begins: the step is not deleted before another one is
        restored. If it is being deleted, waits and raises as `begin_save` does; then the step cannot be loaded.
        """
        with self._use:
            self._await_deletion(step, timeout_s)
            self._held = {**self._held, step: "restored"}
        with self._restore_notes:
            note_restore(self._store, step, time=self._clock.now())

    def _await_deletion(self, step: int, timeout_s: float) -> None:
        """Waits until the step is not being deleted. Raises StorageError (unavailable) after half of `timeout_s`: the
        other ranks still wait for this one then, and raise its error. The caller holds `_use`.
        """
        if not self._use.wait_for(lambda: self._deleting != step, timeout_s / 2):
            raise StorageError(
                f"step {step} of {self._store} is being deleted, and was not gone after {timeout_s / 2:g} s; nothing "
                "was saved or loaded: see if the storage answers, then try again",
                kind="unavailable",
                path=str(self._store),
                step=step,
            )

    def note(self, change: StepChange) -> None:
        """Notes a change that was written beside a step: for retention, and if it has metrics, for the second root."""
        self.steps.note_change(change)
        if change.metrics and self._second is not None:
            self._second.renew(change.step)

    def wait(self, hanging_s: float) -> None:
        """Waits until copies are made and due deletions are done. Deletions that fail, or hang for `hanging_s`, are
        named in a warning. Raises the error of a copy that fails, and StorageError for a copy that hangs.
        """
        copy_failure = self._finish(hanging_s)
        if copy_failure is not None:
            raise self._copy_error(copy_failure)

    def _finish(self, hanging_s: float) -> Exception | None:
        """Waits and warns as `wait` does; returns the failure of copies, or None. The time limits of both threads count
        from the call. Those of deletions count again from the end of the copies, which may have made more of them due.
        """
        failing_s, began = min(_FAILING_S, hanging_s), time.monotonic()
        if self._clock.now() > self._lease_ends_at:
            self._work.ask()
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
        """Does what `wait` does, and ends the threads. For a copy that hangs, logs a warning and raises nothing."""
        copy_failure = self._finish(hanging_s)
        self._work.close()
        if self._second is not None:
            self._second.work.close()
        if isinstance(copy_failure, TimeoutError):
            logger.warning("%s", self._copy_error(copy_failure))
        elif copy_failure is not None:
            raise self._copy_error(copy_failure)

    def _catch_up(self) -> None:
        """Records commits, and finishes interrupted deletions. Once this manager has committed, also clears what
        earlier ones left, deletes what the policy does not keep, and writes the records that steps lack.
        """
        self._try_to_record()
        if self._may_be_half_deleted:
            finish_deletions(self._store, now=self._clock.now(), pace=self._pace)  # first: it may bring a step back
            if self._reads_steps:
                self.steps.all()
            self._may_be_half_deleted = False
        if self._newest is None:  # nothing else is deleted before this manager has committed
            return
        if self._may_clear:
            self._generation.clear_earlier(before_folder=self._let_saves_go_first)
            with self._restore_notes:
                forget_restores(self._store, None)
            self._delete_earlier_logs()
            self._may_clear = False
        self._may_be_half_deleted = True
        self._delete_due()
        self._may_be_half_deleted = False
        self._record_commits()
        if self._may_lack_records:
            self._record_earlier()
            self._may_lack_records = False
        self._pauses.note_caught_up()

    def _let_saves_go_first(self) -> None:
        self._work.note_progress()
        self._try_to_record()
        self._pauses.pause()

    def _try_to_record(self) -> None:
        """Records commits. If there is no space, leaves them for after the next deletions, which make some."""
        try:
            self._record_commits()
        except CheckpointSaveError as error:
            if error.kind != "no_space":
                raise

    def _record_commits(self) -> None:
        """Writes the records of new commits, calls their `on_save`, and asks for their copies."""
        while self._commits:
            commit = self._commits[0]
            step_records.write_record(self._store, step_folder(commit.info.step), commit.info)
            self._commits.popleft()
            self._work.note_progress()
            _call_back(commit.on_save)
            if self._second is not None:
                self._second.may_delete = True
                self._second.work.ask()

    def _delete_earlier_logs(self) -> None:
        for name in earlier_objects(self._store, self._generation.number):
            self._pace.wait(1)
            self._store.delete(name)

    def _record_earlier(self) -> None:
        """Writes the records that steps lack: their processes ended right after the commit, or had no manager."""
        for step in self.steps.all():
            if not step.has_record:
                self._let_saves_go_first()
                step_records.write_record(self._store, step_folder(step.info.step), step.info)

    def _delete_due(self) -> None:
        self._let_saves_go_first()
        now = self._clock.now()
        self.steps.drop_deleted()
        steps = self.steps.all()
        self._lease_ends_at = min((step.leased_until for step in steps if step.leased_until > now), default=math.inf)
        held = held_by_leases(steps, now=now) | self._held
        if self._newest is not None:
            held[self._newest] = "newest commit"
        if self._second is not None:
            held |= self._second.waiting()
        infos = [step.info for step in steps]
        num_abandoned = sum(step.is_abandoned for step in steps)
        decisions = decide(self._keep, infos, num_abandoned=num_abandoned, now=now, held=held)
        for info, decision in zip(infos, decisions, strict=True):
            if decision.is_kept:
                continue
            self._let_saves_go_first()
            if not self._generation.is_newest():
                return
            self._delete(info, now)

    def _delete(self, info: StepInfo, now: float) -> None:
        """Deletes a step, unless it has been restored, or its next save begun, since that was decided."""
        with self._use:
            if info.step in self._saving:
                self._skipped.add(info.step)
                return
            if info.step in self._held:
                return
            self._deleting = info.step
        try:
            stays = delete_steps(self._store, [info], now=now, pace=self._pace, on_damaged=self._warn_of_damaged)
            if not stays:
                self.steps.note_deleted(info)
            elif stays[info.step] == REPLACED:
                self.steps.read_again(info.step)
            else:
                until = step_records.leased_until(self._store, step_folder(info.step))
                self._lease_ends_at = min(self._lease_ends_at, until if until > now else math.inf)
        finally:
            with self._use:
                self._deleting = None
                self._use.notify_all()

    def _warn_of_damaged(self, step: int, error: CheckpointError) -> None:
        if step not in self._damaged:
            self._damaged.add(step)
            logger.warning(
                "step %d of %s is not deleted, because its manifest cannot be read: %s. The others are, and this one "
                "is tried again after each commit: look at it with `bcp verify`, or delete its folder",
                step,
                self._store,
                error.message,
            )


def _call_back(on_save: Callable[[], object] | None) -> None:
    try:
        if on_save is not None:
            on_save()
    except Exception:
        logger.exception("on_save of the manager failed; the save is committed")
