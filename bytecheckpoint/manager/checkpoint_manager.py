"""CheckpointManager, the checkpoints of a training run: when to save, which to keep, where to resume, when to stop.
Rank 0 decides, and sends its decisions to all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, Literal, Self

import torch.distributed as dist

from bytecheckpoint.adapters.frameworks.detect import Framework
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import CheckpointInfo, LoadReport, LoggedData
from bytecheckpoint.manager import abandoned_steps, keep_policies, save_policies, step_records
from bytecheckpoint.manager.after_commit.background import Background
from bytecheckpoint.manager.after_commit.second_root import open_second
from bytecheckpoint.manager.after_commit.step_marks import StepMarks, end_pins_ahead, refuse_read_only
from bytecheckpoint.manager.agreement.decisions import Decisions, StorageClock, offset_of
from bytecheckpoint.manager.agreement.due_steps import DueSteps
from bytecheckpoint.manager.agreement.memory_steps import MemorySteps, with_memory
from bytecheckpoint.manager.agreement.stopping import StopRequests, check_deadline, join_stop, rank_in
from bytecheckpoint.manager.data.log_writer import log_of
from bytecheckpoint.manager.data.managed_data import ManagedData
from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.manager.managed_saves import ManagedRun, ManagedSaves, OwnedRoot
from bytecheckpoint.manager.options import ManagerOptions, check_policies, checked_options
from bytecheckpoint.manager.ownership import OpenedRoot, claim, look_at
from bytecheckpoint.manager.restore import (
    RestoreChoice,
    check_load_arguments,
    choose_step,
    given_step,
    log_fresh_start,
    raise_unless_older_may_load,
    try_to_forget_restores,
    warn_of_ignored,
)
from bytecheckpoint.manager.save_policies import SavePolicy
from bytecheckpoint.manager.stats import Goodput, ManagerStats
from bytecheckpoint.options import Memory
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import absolute_path, open_store

logger = logging.getLogger("bytecheckpoint")

_SAVE_OFTEN = save_policies.EverySteps(500) | save_policies.EverySeconds(900) | save_policies.Preempted()
_KEEP_ALL = keep_policies.All()


class CheckpointManager:
    """The checkpoints of a training run below one root. All ranks make the same calls in order, except where noted.
    `report`, `pin` and `lease` raise CheckpointNotFoundError (not_committed) for a step that is not committed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: SavePolicy = _SAVE_OFTEN,
        keep: KeepPolicy = _KEEP_ALL,
        framework: Framework = "auto",
        process_group: dist.ProcessGroup | None = None,
        role: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: ManagerOptions | None = None,
        memory: Memory | None = None,
        memory_every: int | SavePolicy = 1,
    ) -> None:
        """Claims the root, unless `options.read_only`: from now on saves of an earlier manager are refused. With
        `memory`, memory holds each save as well, and between saves the steps that `memory_every` asks for.

        Raises TypeError for what is no policy or no ManagerOptions, ValueError for a `memory_every` below 1, or one
        other than 1 without memory, and what opening the root raises.
        """
        check_policies(save=save, keep=keep)
        self._options, memory_policy = with_memory(checked_options(options), memory, memory_every)
        self._root, self._role = absolute_path(layout.root_of(root, role)), role
        self._policy, self._keep = save, keep
        self._goodput = Goodput()
        timeout_s = self._options.save.timeout_s
        self._decisions = Decisions(process_group, showable_url(str(self._root)), timeout_s=timeout_s)
        self._rank = rank_in(process_group)
        self._owned: OwnedRoot | None = None
        """None on ranks other than rank 0, and if the manager only reads."""
        self._last_step: int | None = None
        """Step of the newest call of `save` since a stop was agreed."""
        self._is_closed = False
        self.next_step = 0
        """First step to train: the restored step + 1, or 0 if none was restored."""
        find = partial(self._find_store, storage_options)
        opened = self._decisions.decide_alike("opening the root", find, self._open, OpenedRoot)
        self._run = ManagedRun(self._root, self._store, framework, process_group, storage_options)
        log = log_of(self._store, opened.generation, process_group, timeout_s=timeout_s)
        self._saves = ManagedSaves(
            self._run, self._options, decisions=self._decisions, goodput=self._goodput, owned=self._owned, log=log
        )
        self._data = ManagedData(self._run, self._saves, decisions=self._decisions, log=log, options=self._options.load)
        self._memory = MemorySteps(memory_policy, self._saves, self._run, self._options, decisions=self._decisions)
        self._due = DueSteps(save, self._saves, decisions=self._decisions, goodput=self._goodput, owned=self._owned)
        self._goodput.earlier_save_s = opened.save_s
        self._saves.note_start(opened.newest, opened.abandoned)
        deadlines = save_policies.deadlines_of(save)
        self._requests = StopRequests(
            self._options.signals,
            deadlines=[deadline.at_s - deadline.margin_s for deadline in deadlines] if self._rank == 0 else [],
            needed_s=self._goodput.needed_to_stop_s,
        )
        self._stop = join_stop(self._requests, process_group, token=opened.token, timeout_s=timeout_s)

    def _find_store(self, storage_options: Mapping[str, Any] | None) -> str:
        """Opens the store of the root, on each rank; returns a text that has to be the same on all ranks."""
        self._store = open_store(self._root, storage_options=storage_options, writer_threads=1)
        return f"{showable_url(self._root)}{' (read_only)' if self._options.read_only else ''}"

    def _open(self) -> OpenedRoot:
        """Claims the root, on rank 0, and begins the work in the background; only looks at it with `read_only`."""
        if self._options.read_only:
            return look_at(self._store, None, 0)
        options = self._options
        target = open_second(options, self._role)  # before the claim: it may refuse what it is given
        abandoned_steps.read_branch(self._store)  # likewise: a damaged list must not end a run that goes on
        clock = StorageClock(offset_of(self._store))
        generation = claim(self._store, time=clock.now())
        end_pins_ahead(self._store)
        # After the claim: later commits of others are not seen here.
        opened = look_at(self._store, clock, generation.number)
        background = Background(generation, self._keep, clock, reads_steps=not save_policies.is_step_only(self._policy))
        self._owned = OwnedRoot(generation, background, clock)
        if target is not None:
            background.cool_down(target, options.cool_down_keep or _KEEP_ALL, overwrites=options.save.overwrite)
        background.begin()
        return opened

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | Literal["latest"] = "latest",
        initial: str | os.PathLike[str] | None = None,
        strict: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        **as_load: Any,
    ) -> LoadReport | None:
        """Loads the newest step that training has not left, or a given step. Returns None if nothing was loaded.

        `initial` is a path that is loaded only if the root has no checkpoint, with these `storage_options`, by default
        those of the manager. Other arguments are those of `load`. Sets `next_step` to the restored step + 1;
        `initial` leaves it. Raises what `load` raises; CheckpointNotFoundError if a given step is absent or all fail.
        """
        self._refuse_closed()
        check_load_arguments(as_load, initial=initial, storage_options=storage_options)
        as_load = {"options": self._options.load, "strict": strict, **as_load}
        self._saves.settle()  # a save in flight would commit a step of the branch that training leaves
        if self._memory.resumes(step):
            report = self._memory.resume(state, **as_load)
            if report is None:
                return self._start_fresh(state, initial, storage_options, **as_load)
            self._continue_from(report, report.step or 0, {}, was_resumed=True)
            self._saves.note_resumed(report.step or 0, report.save_id)
            self._data.leave_branch(state)
            return report
        passed_over: dict[int, str] = {}
        while True:
            choice = self._decisions.decide_together(
                "choosing what to restore", partial(self._choose, step, passed_over), RestoreChoice
            )
            passed_over.update(choice.passed_over)
            if choice.step is None:
                return self._start_fresh(state, initial, storage_options, **as_load)
            has_crashed = False
            try:
                report = self._run.load(self._root, state, choice.step, **as_load)
            except CheckpointError as error:
                has_crashed = error.kind == "rank_missing"
                raise_unless_older_may_load(error, step, may_walk_back=self._options.walk_back)
                passed_over[choice.step] = error.message
                logger.error("step %d does not load, so the one before: %s", choice.step, error.message)  # noqa: TRY400
            else:
                self._continue_from(report, choice.step, passed_over, was_resumed=False)
                self._data.leave_branch(state)
                return replace(report, passed_over=passed_over)
            finally:
                if not has_crashed and self._owned is not None:  # an error that all ranks raise ends the restore
                    try_to_forget_restores(self._store, choice.step)

    def _choose(self, step: int | Literal["latest"], failed: Mapping[int, str]) -> RestoreChoice:
        """Chooses what to restore, and notes in the store that this begins."""
        candidates = abandoned_steps.newest_steps(self._store, self._saves.new_branch)
        choice = choose_step(self._store, step, candidates, failed=failed)
        for number, why in choice.passed_over.items():
            logger.error("step %d is passed over: %s", number, why)
        if choice.step is not None and self._owned is not None:
            self._owned.background.note_restore(choice.step, timeout_s=self._options.save.timeout_s)
        return choice

    def _start_fresh(
        self,
        state: Mapping[str, Any],
        initial: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
        **as_load: Any,
    ) -> LoadReport | None:
        self._data.leave_branch(state)
        if initial is not None:
            run = self._run if storage_options is None else self._run._replace(storage_options=storage_options)
            return run.load(initial, state, "latest", **as_load)
        if self._rank == 0:
            log_fresh_start(self._store)
        return None

    def _continue_from(self, report: LoadReport, step: int, passed_over: Collection[int], *, was_resumed: bool) -> None:
        """Makes the restored step the newest: later ones become abandoned. `was_resumed`: memory was looked at."""
        warn_of_ignored(report, rank=self._rank)
        prefix = "" if self._owned is None else self._owned.generation.save_id_prefix
        start = abandoned_steps.BranchStart(step, report.save_id)
        begin = partial(abandoned_steps.begin_branch, self._store, start, prefix=prefix, has_memory=self._memory.is_on)
        branch = self._decisions.decide_together("leaving later steps", begin, abandoned_steps.Branch)
        self._saves.go_on_from(step, branch, was_resumed=was_resumed)
        self.next_step = step + 1
        if self._owned is not None:
            self._owned.background.go_on_from(step, branch, passed_over)

    def due(self, step: int) -> bool:
        """Returns True if `save` of this step, without `force`, would save to storage. All ranks call it together."""
        self._refuse_closed()
        step, is_stopping = given_step(step), self._stop.pass_boundary()
        return not self._options.read_only and self._due.is_due(step, is_forced=False, is_stopping=is_stopping)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        pin: bool = False,
    ) -> SaveHandle | None:
        """Saves the state if the step is due, after the save in flight has ended. Returns None if no save began, or a
        failure was only logged. A save before a stop returns when the checkpoint is durable. `metrics` are for policies
        and `best`, `metadata` is as for `bcp.save`, `force` saves a step that is not due, and `pin` keeps it whatever
        the policies say. Of `metrics` and `metadata` those of rank 0 count.

        Raises what `bcp.save` raises, for this save or, by `on_failed_save`, for the one before; CheckpointSaveError
        (superseded) if another manager owns the root.
        """
        self._refuse_closed()
        step, began = given_step(step), self._goodput.begin_call()
        is_stopping = self._stop.pass_boundary()
        self._last_step = step if is_stopping else None
        try:
            if self._options.read_only:
                return None
            if not self._due.is_due(step, is_forced=force, is_stopping=is_stopping):
                if self._due.is_known_due(step + 1):
                    self._saves.prepared.prepare(step + 1, state)
                is_due = step != self._due.newest and self._memory.is_due(step)
                return self._memory.save(step, state, metadata) if is_due else None
            self._saves.settle()
            return self._saves.begin(step, state, metrics, metadata=metadata, pin=pin, is_stopping=is_stopping)
        finally:
            self._goodput.end_call(began)

    def should_stop(self) -> bool:
        """Returns True on all ranks once they agreed to stop and the newest step passed to `save` since is durable.
        Once they agreed, waits for the save in flight.
        """
        self._refuse_closed()
        if not self._stop.pass_boundary():
            return False
        self._saves.settle()
        stored = self._saves.stored_step
        return self._options.read_only or (stored is not None and stored == self._last_step)

    def request_stop(self, reason: str, deadline_s: float | None = None) -> None:
        """Requests that all ranks stop at the same step: now, or so that the last save is durable before `deadline_s`
        seconds from now have passed. One rank may call it.
        """
        check_deadline(deadline_s)
        self._requests.request(reason, deadline_s=deadline_s)

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending. Reads the store on the calling rank, as `latest` and `best` do."""
        return layout.steps_of_root(self._store)

    def latest(self) -> int | None:
        """Returns the newest committed step that is on no branch which training left, or None without such a step."""
        return next(abandoned_steps.newest_steps(self._store, self._saves.new_branch), None)

    def best(self, metric: str | None = None) -> CheckpointInfo | None:
        """Returns the checkpoint with the best value of a metric, of steps that training has not left; None if none has
        it. Without `metric`, takes that of the only `Best` policy, or raises ValueError. Without a policy, low is best.
        """
        choose = partial(keep_policies.kept_by, keep_policies.best_of(self._keep, metric), now=0.0)
        return step_records.find_checkpoint(self._store, choose, self._saves.new_branch)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a committed checkpoint. All ranks call it together, and those of rank 0 count."""
        self._mark("reporting metrics of", step, partial(StepMarks.report, metrics=metrics))

    def pin(self, step: int) -> None:
        """Keeps a committed checkpoint until it is unpinned. All ranks call this together."""
        self._mark("pinning", step, self._saves.pin)

    def unpin(self, step: int) -> None:
        """Removes the pin of a checkpoint. All ranks call this together."""
        self._mark("unpinning", step, StepMarks.unpin)

    def lease(self, step: int, seconds: float) -> None:
        """Keeps a committed checkpoint for at least a number of seconds from now. All ranks call this together."""
        self._mark("leasing", step, partial(StepMarks.lease, seconds=seconds))

    def _mark(self, doing: str, step: int, mark: Callable[[StepMarks, int], None]) -> None:
        """Has rank 0 write beside a step; waits first if the step is still being saved. All ranks call it together."""
        self._refuse_closed()
        if self._options.read_only:
            refuse_read_only(self._root)
        self._saves.wait_until_noted(step)
        self._decisions.decide_together(f"{doing} step {step}", partial(self._write_mark, step, mark), NoneType)

    def _write_mark(self, step: int, mark: Callable[[StepMarks, int], None]) -> None:
        if self._owned is not None:
            mark(StepMarks(self._store, self._owned.background, self._owned.clock), given_step(step))

    def log_data(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Logs how far the trainer is in its data after this step, in the background and with no message between ranks.

        For a loader process that dies while the trainer lives on, and for audits; never for weights that go back to a
        checkpoint, because data goes back with them: `restore` removes all that was logged, and a commit the steps
        up to its own. `state` has the DataLoaderStates; None takes those of the last state logged or restored.

        Raises CheckpointSaveError (unsupported_value) for a state that is no small position: see docs/data.md.
        """
        self._refuse_closed()
        self._data.log(given_step(step), state)

    def data_log(self) -> list[LoggedData]:
        """Returns the logged positions since the newest commit or restore, oldest first: steps that all ranks have
        logged. Reads the store on the rank that calls it, as `steps` does.
        """
        return self._data.entries()

    def restore_data(self, state: Mapping[str, Any] | None = None, *, step: int | None = None) -> int | None:
        """Loads the data loaders of the state alone, for loaders that were made anew while the weights stay. They go on
        after `step`, by default the newest that is logged or committed. Returns that step; None, with the loaders left
        as they are, if `step` is None and there is none. All ranks call it together.

        Raises what `load` raises; CheckpointNotFoundError if `step` is neither logged nor committed.
        """
        self._refuse_closed()
        return self._data.restore(state, None if step is None else given_step(step))

    def stats(self) -> ManagerStats:
        """Returns the goodput so far, on this rank."""
        return self._goodput.stats()

    def wait(self) -> None:
        """Waits until saves, the log of data, and on rank 0 copies and due deletions, have ended. Raises, or logs as
        `on_failed_save` says, a save's error that its handle has not raised. On rank 0, raises the error of a copy.
        """
        self._saves.settle(is_end=True)
        self._data.wait()
        if self._owned is not None:
            self._owned.background.wait(self._options.save.timeout_s)

    def close(self) -> None:
        """Waits and raises as `wait` does, and puts signal handlers back. May be called again. Background work
        (deletions, copies) without progress for `SaveOptions.timeout_s` is left unfinished, with a warning.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as later:  # each of these is done whatever those before it raise
            later.callback(self._requests.close)
            later.callback(self._stop.close)
            later.callback(self._data.close)
            if self._owned is not None:
                later.callback(self._owned.background.close, self._options.save.timeout_s)
            self._saves.settle(is_end=True)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the manager of {self._root} is closed: make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
