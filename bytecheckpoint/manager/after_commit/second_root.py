"""The second root of a manager: which steps are copied there, and which copies stay. One copy is made by cool_down.py.

A step that waits for its copy is not deleted from the first root. A step that the policy of the second root does
not keep is not copied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.abandoned_steps import Branch, branch_of_copies, read_branch, write_branch
from bytecheckpoint.manager.after_commit.known_steps import KnownSteps
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.after_commit.save_pauses import OngoingSaves, SavePauses
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.manager.cool_down import clear_cut_off, copy_step
from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.manager.options import ManagerOptions
from bytecheckpoint.manager.ownership import Generation, claim
from bytecheckpoint.manager.retention import (
    DeletionPace,
    decide,
    delete_steps,
    finish_deletions,
    held_by_leases,
    protection_of,
)
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_WAITS = "waits for its copy"


def open_second(options: ManagerOptions, role: str | None) -> Store | None:
    """Returns the store at the second root of these options, with nothing read or written yet; None without one."""
    if options.cool_down is None:
        return None
    root = layout.root_of(options.cool_down, role)
    return open_store(root, storage_options=options.cool_down_options, writer_threads=1)


class SecondRoot:
    """The second root, and the thread that copies to it."""

    def __init__(
        self,
        target: Store,
        generation: Generation,
        steps: KnownSteps,
        *,
        keep: KeepPolicy,
        clock: StorageClock,
        saves: OngoingSaves,
        replaced: Collection[str],
        overwrites: bool,
        on_fewer_waiting: Callable[[], object],
    ) -> None:
        """`steps` are those of the first root, `saves` those of the manager. `replaced` are the save ids of checkpoints
        that these saves replace, whose copies are replaced too; with `overwrites` any copy may be. `on_fewer_waiting`
        is called when fewer steps of the first root may have to wait: after each attempt to copy a step, and when the
        branch changes.
        """
        self._source, self._target = generation.store, target
        self._generation = generation
        self._target_generation: Generation | None = None
        self._steps = steps
        self._keep = keep
        self._clock = clock
        self.work = RetriedWork("bcp-cool-down", self._catch_up, what=f"copying from {self._source} to {target}")
        self._pauses = SavePauses(saves, meanwhile=self.work.note_progress)
        self._pace = DeletionPace(self._let_saves_go_first)
        self._replaced = replaced
        self._overwrites = overwrites
        self._on_fewer_waiting = on_fewer_waiting
        self._lock = threading.Lock()
        self._copies: dict[int, StoredStep] | None = None
        """Steps of the second root; None until they are known."""
        self._branch: Branch | None = None
        """Branch whose record the second root has; None until it is known."""
        self._awaited: frozenset[str] = frozenset()
        """Starts of the branch that training is on. Until the copies that it leaves are marked, all steps wait."""
        self._in_copy: int | None = None
        self._renewed: set[int] = set()
        """Steps whose metrics were reported since the last round began."""
        self._to_renew: set[int] = set()
        """Steps that this round copies for their new metrics; one whose copy fails stays for the next round."""
        self._is_refused = False
        """True if the second root has refused to delete."""
        self.may_delete = False
        """True once this manager has committed a checkpoint."""

    def waiting(self) -> dict[int, str]:
        """Returns the steps of the first root that must not be deleted now, each with the reason."""
        source_steps = self._steps.all()
        with self._lock:
            copies, in_copy, branch = self._copies, self._in_copy, self._branch
        if copies is None or branch is None or not self._awaited <= branch.starts.keys():
            return {step.info.step: _WAITS for step in source_steps}
        held = {info.step: _WAITS for info in self._missing(source_steps, copies)}
        return held if in_copy is None else {**held, in_copy: "is copied"}

    def await_branch(self, branch: Branch) -> None:
        """Makes `waiting` return all steps until a commit has written this branch, and the copies that it abandons are
        marked.
        """
        self._awaited = frozenset(branch.starts)

    def renew(self, step: int) -> None:
        """Asks the thread to copy the metrics that were reported for a step since its copy."""
        with self._lock:
            self._renewed.add(step)
        self.work.ask()

    def _missing(self, source_steps: Sequence[StoredStep], copies: Mapping[int, StoredStep]) -> list[StepInfo]:
        """Returns the steps that the policy wants in the second root and that are not there, or have new metrics."""
        wanted = self._wanted(source_steps, copies)
        infos = [step.info for step in source_steps if step.info.step in wanted]
        return [info for info in infos if not self._is_copied(info, copies.get(info.step))]

    def _is_copied(self, info: StepInfo, copy: StoredStep | None) -> bool:
        return copy is not None and copy.info.save_id == info.save_id and info.step not in self._to_renew

    def _wanted(self, source_steps: Sequence[StoredStep], copies: Mapping[int, StoredStep]) -> set[int]:
        """Returns those steps of both roots that the policy of the second root keeps."""
        both = step_records.ordered([*{**copies, **{step.info.step: step for step in source_steps}}.values()])
        num_abandoned, now = sum(step.is_abandoned for step in both), self._clock.now()
        decisions = decide(self._keep, [step.info for step in both], num_abandoned=num_abandoned, now=now, held={})
        return {decision.step for decision in decisions if decision.is_kept}

    def _catch_up(self) -> None:
        """Makes the copies that are missing, then deletes the copies that are not to stay. Raises the first failure of
        a copy after all else is done.
        """
        if not self._generation.is_newest():
            return  # the newest manager makes the copies, and the next save here raises the error
        self._own_target()
        copies = self._begin_round()
        failure: CheckpointError | None = None
        tried: set[str] = set()
        while infos := [info for info in self._missing(self._sources(copies), copies) if info.save_id not in tried]:
            tried.add(infos[0].save_id)
            try:
                self._copy(infos[0], copies)
            except CheckpointError as error:  # of one step; the others are copied all the same
                failure = failure or error
            self._on_fewer_waiting()
        if self.may_delete:
            self._unless_refused(partial(self._delete_copies, copies))
        if failure is not None:
            raise failure
        self._pauses.note_caught_up()

    def _unless_refused(self, change: Callable[[], object]) -> None:
        """Calls `change`, which deletes or replaces. Logs once, and ignores, that the second root does not permit it,
        as a backup may not.
        """
        try:
            change()
        except StorageError as error:
            if error.kind != "permission":
                raise
            if not self._is_refused:
                logger.warning("the manager may not delete in %s, so that all copies stay: %s", self._target, error)
            self._is_refused = True

    def _let_saves_go_first(self) -> None:
        self.work.note_progress()
        self._pauses.pause()

    def _own_target(self) -> None:
        """Claims the second root, so that no other run deletes there, or checks the claim.

        Raises StorageError if it is the first root; CheckpointSaveError (superseded) if another manager claimed it.
        """
        if self._target_generation is not None:
            self._target_generation.check(outcome="Nothing was copied there since. ")
            return
        if self._generation.is_claimed_in(self._target):
            raise StorageError(
                f"{self._target}, to which checkpoints are to be copied, is the root of the manager itself; nothing "
                "was changed there: give ManagerOptions.cool_down another root",
                kind="unsupported",
                path=str(self._target),
            )
        generation = claim(self._target, time=self._clock.now())
        self._target_generation = generation
        self._unless_refused(partial(generation.clear_earlier, before_folder=self._let_saves_go_first))

    def _begin_round(self) -> dict[int, StoredStep]:
        """Returns the steps of the second root, and moves `_renewed` to `_to_renew`. In the first round, finishes
        deletions that were interrupted there, then lists the root; later rounds know its steps.
        """
        if self._copies is None:
            finish = partial(finish_deletions, self._target, now=self._clock.now(), pace=self._pace)
            self._unless_refused(finish)
            found = step_records.list_steps(self._target)
        else:
            found = list(self._copies.values())
        with self._lock:
            self._to_renew |= self._renewed
            self._renewed = set()
            self._copies = copies = {step.info.step: step for step in found}
        return copies

    def _sources(self, copies: dict[int, StoredStep]) -> Sequence[StoredStep]:
        """Returns the steps of the first root. Marks the abandoned steps in `copies`, and writes them as the branch of
        the second root, where a run may go on. The branch that is read for this is no older than the steps.
        """
        source_steps = self._steps.all()
        source = read_branch(self._source)  # after the steps: a branch is written before its first commit
        known = read_branch(self._target) if self._branch is None else self._branch
        steps = {step.info.step: step.info.save_id for step in source_steps}
        kept = {step: save_id for step, save_id in steps.items() if source.abandoned.get(step) != save_id}
        save_ids = {step: copy.info.save_id for step, copy in copies.items()}
        branch = branch_of_copies(source, known, save_ids, kept=kept)
        if branch != known:
            self._unless_refused(partial(write_branch, self._target, branch))
        with self._lock:
            is_new, self._branch = branch != self._branch, branch
            for step, copy in copies.items():
                copies[step] = copy._replace(is_abandoned=branch.abandoned.get(step) == copy.info.save_id)
        if is_new:
            self._on_fewer_waiting()
        return source_steps

    def _copy(self, info: StepInfo, copies: dict[int, StoredStep]) -> None:
        """Copies a step to the second root, and adds it to `copies`. If another program has deleted the step from the
        first root, forgets it as a step of that root instead. Raises the other errors of `copy_step`.
        """
        folder = layout.step_folder(info.step)
        may_replace = self._replaceable(copies.get(info.step))
        self._let_saves_go_first()
        if not info.save_id.startswith(self._generation.save_id_prefix):
            self._unless_refused(partial(clear_cut_off, self._target, folder, info.save_id))
        with self._lock:
            self._in_copy = info.step
        try:
            copy_step(
                self._source,
                folder,
                self._target,
                folder,
                may_replace=may_replace,
                on_file=self._let_saves_go_first,
            )
        except CheckpointNotFoundError:
            if layout.committed_save_id(self._source, folder) == info.save_id:
                raise
            self._steps.note_deleted(info)  # another program deleted it
            return
        finally:
            with self._lock:
                self._in_copy = None
        with self._lock:
            copies[info.step] = StoredStep(info, True, 0.0, False)
            self._to_renew.discard(info.step)
        logger.info("step %d was copied to %s", info.step, self._target)

    def _replaceable(self, copy: StoredStep | None) -> list[str]:
        """Returns a list with the save id of `copy` if another checkpoint may be copied over it, else an empty one."""
        if copy is None:
            return []
        save_id, folder = copy.info.save_id, layout.step_folder(copy.info.step)
        if not (copy.is_abandoned or self._overwrites or save_id in self._replaced):
            return []
        return [] if protection_of(self._target, folder, now=self._clock.now()) else [save_id]

    def _delete_copies(self, copies: dict[int, StoredStep]) -> None:
        """Deletes the copies that neither the policy, a pin nor a lease keeps, also from `copies`. The newest stays."""
        now = self._clock.now()
        stays = self._wanted(self._sources(copies), copies) | held_by_leases([*copies.values()], now=now).keys()
        for step in step_records.ordered([*copies.values()])[:-1]:  # the newest copy always stays
            if step.info.step in stays:
                continue
            self._let_saves_go_first()
            if not delete_steps(self._target, [step.info], now=now, pace=self._pace):
                self.work.note_progress()
                with self._lock:
                    del copies[step.info.step]
