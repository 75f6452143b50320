"""The saves of a manager: one in flight, its outcome by `on_failed_save`, and what rank 0 does before and after each
commit. When to save is not decided here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from bytecheckpoint import api, phases
from bytecheckpoint.adapters.frameworks.detect import Framework
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
)
from bytecheckpoint.info import CheckpointInfo, LoadReport
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.abandoned_steps import Branch, write_branch
from bytecheckpoint.manager.after_commit.background import Background, Commit
from bytecheckpoint.manager.after_commit.step_marks import StepMarks, end_pin_ahead, pin_ahead
from bytecheckpoint.manager.agreement.decisions import Decisions, StorageClock
from bytecheckpoint.manager.agreement.failed_save import FailuresInARow, failed_save
from bytecheckpoint.manager.data.log_writer import LogWriter
from bytecheckpoint.manager.data.prepared_state import PreparedState
from bytecheckpoint.manager.options import ManagerOptions
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.retention import PINNED, protection_of
from bytecheckpoint.manager.stats import Goodput
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.target import SaveOwner
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import LEASES_FOLDER
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_NOTED_S = 60.0
"""Longest wait for the end of a save to be counted, and for its commit to be handed to the background."""


class ManagedRun(NamedTuple):
    """The root of a training run, and how this process reaches it."""

    root: str
    """Path or URL, with the role."""
    store: Store
    framework: Framework
    group: dist.ProcessGroup | None
    storage_options: Mapping[str, Any] | None

    def load(
        self, path: str | os.PathLike[str], state: Mapping[str, Any], step: int | Literal["latest"], **as_load: Any
    ) -> LoadReport:
        """Loads a checkpoint of this run, or of another path that is reached in the same way."""
        group, storage_options = self.group, self.storage_options
        return api.load(
            path, state, self.framework, step=step, process_group=group, storage_options=storage_options, **as_load
        )


class OwnedRoot(NamedTuple):
    """The objects with which rank 0 owns the root for all ranks."""

    generation: Generation
    background: Background
    clock: StorageClock


class BegunSave(NamedTuple):
    """The newest save that the manager began."""

    step: int
    time: float
    """Time of the call, by the clock of the storage; 0.0 on ranks other than rank 0."""
    handle: SaveHandle
    is_noted: threading.Event
    """Set when the end of the save is counted, and the work that follows a commit is handed to the background."""

    @property
    def has_failed(self) -> bool:
        return self.handle.done() and self.handle._progress.error is not None


class ManagedSaves:
    """The saves of one manager."""

    def __init__(
        self,
        run: ManagedRun,
        options: ManagerOptions,
        *,
        decisions: Decisions,
        goodput: Goodput,
        owned: OwnedRoot | None,
        log: LogWriter | None,
    ) -> None:
        """`owned` is None on ranks other than rank 0, and `log` if the manager only reads."""
        self._run = run
        self._log = log
        self._options = options
        self._decisions = decisions
        self._goodput = goodput
        self._owned = owned
        self._failures = FailuresInARow(options)
        self.has_steps = False
        """True if the root has a checkpoint."""
        self.begun: BegunSave | None = None
        self.durable_step: int | None = None
        """Step that was restored, or the newest whose save is known to be committed."""
        self.memory_step: int | None = None
        """Step that was restored, if memory alone holds it."""
        self.abandoned: set[int] = set()
        """Steps of branches that training left, without those that this manager has saved anew."""
        self.new_branch: Branch | None = None
        """The branch that the last restore has begun. The next commit writes it to the store: rank 0 then has None
        here, and the others keep it, which stays true until the next restore. None too before a restore, and if the
        manager only reads: the store has it."""
        self.has_left_memory = False
        """True from a restore that did not look at memory until a save succeeds: memory may hold later steps, which
        training has left."""
        self.newest_seen = -1
        """Step that was restored, or the newest one when the root was claimed; -1 for an empty root. A later step that
        an earlier manager has committed, and that is not abandoned, was committed after the claim."""
        self._pinned_ahead: set[int] = set()
        """Steps that were pinned for a commit which has not come."""
        self.settle_memory: Callable[[], object] = lambda: None
        """Waits for the save that goes to memory alone."""
        self.prepared = PreparedState()
        """State that was gathered ahead of the next save."""

    def note_start(self, step: int | None, abandoned: Collection[int]) -> None:
        """Notes the restored step, or before a restore the newest committed one (None if there is none), and the steps
        of branches that training left.
        """
        self.has_steps, self.abandoned = step is not None, set(abandoned)
        self.newest_seen = -1 if step is None else step

    @property
    def stored_step(self) -> int | None:
        """The `durable_step`, or None if memory alone holds it: what dies with a host is not durable."""
        return None if self.durable_step == self.memory_step else self.durable_step

    def note_resumed(self, step: int, save_id: str) -> None:
        """Notes this restored step as `memory_step` unless storage has this save of it. All ranks call it together."""
        is_stored = self._decisions.decide_together(
            f"looking for step {step} in storage", lambda: self._save_id_at(step) == save_id, bool
        )
        self.memory_step = None if is_stored else step

    def go_on_from(self, step: int, branch: Branch, *, was_resumed: bool) -> None:
        """Notes the restored step, and the branch that begins there; `was_resumed`: the restore looked at memory."""
        self.note_start(step, branch.abandoned)
        self.durable_step, self.memory_step, self.has_left_memory = step, None, not was_resumed
        self.new_branch = None if self._options.read_only else branch

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        *,
        metadata: Mapping[str, Any] | None,
        pin: bool,
        is_stopping: bool,
    ) -> SaveHandle | None:
        """Begins the save of a step, and returns its handle. If it fails at once and `on_failed_save` lets training go
        on, returns None for a synchronous save, which fails on all ranks, else a handle that has failed: other ranks
        may have a handle by now.
        """
        options, is_async = self._options.save, self._options.async_save and not is_stopping
        checked: dict[str, float] = {}
        if step in self.abandoned:
            options = replace(options, overwrite=True)
        began = self._owned.clock.now() if self._owned is not None else 0.0
        with ExitStack() as undo:
            if self._owned is not None:
                undo.callback(self._owned.background.end_save, step)
            try:
                handle = phases.run_save(
                    self._run.root,
                    state,
                    self._run.framework,
                    step=step,
                    async_save=is_async,
                    process_group=self._run.group,
                    make_metadata=partial(self._make_metadata, step, metadata, metrics, checked),
                    storage_options=self._run.storage_options,
                    options=options,
                    owner=self._owner(step, pin=pin),
                )
            except CheckpointError as error:
                if not is_async or self._failures.is_raised(error):
                    self._goodput.failed()
                    self._failures.add(error)
                    return None
                handle = failed_save(error, options)
            undo.pop_all()
        self.begun = BegunSave(step, began, handle, threading.Event())
        note = partial(self._note_outcome, step=step, metrics=checked, pin=pin)
        handle.add_done_callback(partial(self._note_end, self.begun, note))
        return handle

    def _make_metadata(
        self,
        step: int,
        metadata: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        checked: dict[str, float],
    ) -> Mapping[str, Any] | None:
        """Returns the metadata. On rank 0, first notes that the save begins, and adds the metrics, which it also puts
        into `checked`. All ranks raise what one raises here: what Background.begin_save raises, an error of the
        preparation, or CheckpointMismatchError (conflict) if `metadata` has metrics.
        """
        if self._owned is not None:
            self._owned.background.begin_save(step, timeout_s=self._options.save.timeout_s)
        self.prepared.raise_failure(step)
        if isinstance(metadata, Mapping) and "metrics" in metadata:
            raise CheckpointMismatchError(
                'metadata["metrics"] is the place of metrics: pass metrics=...; nothing was saved', kind="conflict"
            )
        if self._owned is None or metrics is None:
            return metadata
        checked.update(step_records.checked_metrics(metrics))
        return {**(metadata or {}), "metrics": checked} if checked else metadata

    def _owner(self, step: int, *, pin: bool) -> SaveOwner | None:
        """Returns the owner that rank 0 asks before it commits; None on the other ranks, which never ask."""
        if self._owned is None:
            return None
        generation, clock = self._owned.generation, self._owned.clock
        check, pinned = partial(generation.check, outcome=""), step if pin else None
        return SaveOwner(
            generation.save_id_prefix,
            may_replace=partial(self._may_replace, self._owned, step),
            before_commit=partial(self._before_commit, self._owned, step, pin=pin),
            check=check,
            root_objects=partial(step_records.unwritten, self._run.store, self.new_branch, pinned, clock.now),
            after_failure=check,
        )

    def _before_commit(self, owned: OwnedRoot, step: int, *, pin: bool) -> None:
        """Writes the branch and the pin, which must be there before the manifest. Without `pin`, removes the pin of an
        earlier save of the step that failed. Raises CheckpointSaveError (superseded) if another manager owns the root.
        """
        owned.generation.check(outcome="Nothing of this save was committed. ")
        # Before the pin, so that the next manager knows which checkpoint was pinned ahead of its replacement.
        if self.new_branch is not None:
            write_branch(self._run.store, self.new_branch)
            self.new_branch = None
        if pin:
            self._pinned_ahead.add(step)
            pin_ahead(self._run.store, step, time=owned.clock.now())
        elif step in self._pinned_ahead:  # pinned for a save that failed
            end_pin_ahead(self._run.store, step, is_committed=False)
            self._pinned_ahead.discard(step)

    def _may_replace(self, owned: OwnedRoot, step: int) -> bool:
        """Returns True if the existing checkpoint of a step may be replaced: `overwrite` is set, or training has left
        its branch, or an earlier manager committed it after this one had claimed the root. If so, adds its save id to
        `background.replaced`, or raises CheckpointExistsError if it is pinned or leased.
        """
        is_left, is_overwritten = step in self.abandoned, self._options.save.overwrite
        may_be_late = step > self.newest_seen and bool(owned.generation.earlier_prefixes)
        if not (is_left or is_overwritten or may_be_late):
            return False
        save_id = self._save_id_at(step)
        is_late = may_be_late and save_id.startswith(owned.generation.earlier_prefixes)
        if not (is_left or is_overwritten or is_late):
            return False
        self._refuse_protected(owned, step)
        if save_id and save_id not in owned.background.replaced:
            owned.background.replaced.add(save_id)
            origin = ", which an earlier manager committed late," if is_late else ""
            origin = " of the branch that training left" if is_left else origin
            logger.info("step %d%s is replaced", step, origin)
        return True

    def pin(self, marks: StepMarks, step: int) -> None:
        """Pins a committed checkpoint, also one that a failed save has pinned for itself."""
        marks.pin(step)
        self._pinned_ahead.discard(step)

    def _save_id_at(self, step: int) -> str:
        """Returns the save id of the committed checkpoint of a step; empty if there is none, or if it is damaged."""
        try:
            return layout.committed_save_id(self._run.store, layout.step_folder(step))
        except (CheckpointCorruptError, UnsafeCheckpointError):
            return ""

    def _refuse_protected(self, owned: OwnedRoot, step: int) -> None:
        """Raises CheckpointExistsError if a step is pinned, other than ahead of its own save, or leased."""
        store, folder = self._run.store, layout.step_folder(step)
        if not layout.has_manifest(store.list(folder)):
            return
        why = protection_of(store, folder, now=owned.clock.now())
        if not why or (why == PINNED and step in self._pinned_ahead):
            return
        path = join_name(str(store), folder)
        lease_advice = f"wait until then, or delete {join_name(path, LEASES_FOLDER)} if its readers have ended"
        raise CheckpointExistsError(
            f"step {step} is {why}, and was left as it is; nothing was saved: "
            f"{'unpin it' if why == PINNED else lease_advice}, then save again",
            kind="exists",
            path=path,
            step=step,
        )

    def _note_end(self, begun: BegunSave, note: Callable[[SaveHandle], object], handle: SaveHandle) -> None:
        try:
            note(handle)
        finally:
            if self._owned is not None:
                self._owned.background.end_save(begun.step)
            begun.is_noted.set()

    def _note_outcome(self, handle: SaveHandle, *, step: int, metrics: Mapping[str, float], pin: bool) -> None:
        if (info := _committed(handle)) is None:
            self._goodput.failed()
            self._failures.log_unless_raised(handle._progress.error)
            return
        line = self._goodput.committed(info)
        if step in self._pinned_ahead:
            self._pinned_ahead.discard(step)
            with suppress(CheckpointError):  # the next manager deletes the note
                end_pin_ahead(self._run.store, step, is_committed=True)
        if self._log is not None:
            self._log.drop_through(step)
        if self._owned is not None:
            logger.info("%s", line)
            seconds = {name: info.seconds[name] for name in ("stall", "total") if name in info.seconds}
            now = self._owned.clock.now()
            step_info = StepInfo(step, now, metrics, seconds, pin, True, save_id=info.save_id, num_bytes=info.num_bytes)
            on_save = self._options.on_save and partial(self._options.on_save, self._goodput.stats())
            self._owned.background.add(Commit(step_info, on_save))

    def wait_until_noted(self, step: int) -> None:
        """If the save of this step is in flight, waits for its end, and until the background knows the commit, which
        overwrites a mark that was noted before. Raises the error of the save.
        """
        if self.begun is not None and self.begun.step == step:
            self.begun.handle.result()
            self.begun.is_noted.wait(_NOTED_S)

    def settle(self, *, is_end: bool = False) -> None:
        """Waits for the saves in flight, that to memory alone included. Their errors are raised or logged, as
        `on_failed_save` says. With `is_end`, an error that the handle has raised is not raised again; without, all
        ranks raise it, because all go on together.
        """
        self.settle_memory()
        if self.begun is None:
            return
        step, _, handle, is_noted = self.begun
        was_seen = is_end and handle.done() and handle._progress.was_seen
        error = handle.exception()
        # A future wakes its waiters before it calls back, in the process of the save alone.
        is_noted.wait(0.0 if handle._progress.is_of_parent else _NOTED_S)
        self.begun = None
        if error is None:
            self.durable_step, self.has_steps, self._failures.number = step, True, 0
            self.memory_step = None
            self.abandoned.discard(step)
            self.has_left_memory = False
        elif was_seen:
            self._failures.number += 1
        elif isinstance(error, CheckpointError):
            self._failures.add(error)
        else:
            raise error


def _committed(handle: SaveHandle) -> CheckpointInfo | None:
    """Returns the checkpoint of a save that has ended, None if it failed, without marking its error as seen."""
    progress = handle._progress
    return None if progress.error is not None else progress.outcome.result()
