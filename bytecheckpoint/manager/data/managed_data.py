"""The data loaders of a managed run between its saves: their positions are logged, listed, and loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from bytecheckpoint.adapters.collect import data_loaders_in
from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.data.positions import encode_positions, load_positions, merge_positions, position_trees
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.info import LoggedData
from bytecheckpoint.manager import abandoned_steps
from bytecheckpoint.manager.after_commit.step_marks import refuse_read_only
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.data.log_objects import LoggedNames, LogRecord, branches, logged_steps, read_records
from bytecheckpoint.manager.data.log_writer import LogWriter
from bytecheckpoint.manager.managed_saves import ManagedRun, ManagedSaves
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.storage import layout


class _DataChoice(msgspec.Struct, frozen=True):
    """The choice of rank 0: a checkpoint, and the log on top of it."""

    step: int | None
    """Step after which the loaders go on; None if there is none, and they stay as they are."""
    base: int | None
    """Step of the checkpoint; None if there is none before the logged step."""
    loaders: dict[str, bytes] = {}
    """Positions of all ranks by the loader's FQN; empty if the checkpoint alone is loaded."""


class ManagedData:
    """The data loaders of one manager."""

    def __init__(
        self, run: ManagedRun, saves: ManagedSaves, *, decisions: Decisions, log: LogWriter | None, options: LoadOptions
    ) -> None:
        """`log` is None if the manager only reads."""
        self._run = run
        self._saves = saves
        self._decisions = decisions
        self._log = log
        self._options = options
        self._loaders: dict[str, DataLoaderState] = {}
        """Loaders of the last state that was passed here, by FQN."""

    def _take_loaders(self, state: Mapping[str, Any] | None) -> dict[str, DataLoaderState]:
        """Returns the loaders of a state by FQN, and remembers them for the next call; for None, those remembered
        before. Raises CheckpointMismatchError (conflict), and remembers the ones before, if there are none.
        """
        loaders = data_loaders_in(state) if state is not None else self._loaders
        if not loaders:
            raise CheckpointMismatchError(
                f"{'the state has no' if state is not None else 'no state that was passed before has a'} data loader; "
                'nothing was changed: pass the state that has one, as in {"data": bcp.DataLoaderState(loader, ...)}',
                kind="conflict",
            )
        self._loaders = loaders
        return loaders

    def log(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Hands the positions of this rank's loaders in the state over to the log; None takes the loaders of the last
        state that was passed.

        Raises CheckpointMismatchError (conflict) without loaders, StorageError (unsupported) in a manager that only
        reads, and CheckpointSaveError (unsupported_value) as `encode_positions` does.
        """
        if self._log is None:
            refuse_read_only(self._run.root)
            return
        parts = {fqn: encode_positions(fqn, loader) for fqn, loader in self._take_loaders(state).items()}
        self._log.add(LogRecord(step, self._saves.durable_step, parts))

    def entries(self) -> list[LoggedData]:
        """Returns the logged steps of the branch that training is on, oldest first."""
        store, found = self._run.store, []
        for logged in self._logged():
            records = read_records(store, logged)
            if records is not None:
                loaders = {fqn: position_trees(merged) for fqn, merged in _merge(records).items()}
                found.append(LoggedData(step=logged.step, base=records[0].base, loaders=loaders))
        return found[::-1]

    def _logged(self) -> list[LoggedNames]:
        store = self._run.store
        folder = self._log.folder if self._log is not None else next(iter(branches(store)), None)
        return logged_steps(store, folder) if folder is not None else []

    def restore(self, state: Mapping[str, Any] | None, step: int | None) -> int | None:
        """Brings the loaders, and nothing else, to `step`, or without one to the newest step that is logged or
        committed. Returns that step; None, with the loaders unchanged, if `step` is None and there is none.

        Raises CheckpointNotFoundError if `step` is neither logged nor committed, and CheckpointMismatchError (conflict)
        if a manager that only reads gets no `step`, the state has no loader, or a loader's position was not logged.
        """
        if self._log is None and step is None:
            raise CheckpointMismatchError(
                "restore_data of a manager that only reads takes step=..., the step that the trainer made last: it "
                "does not know which branch training is on; nothing was changed",
                kind="conflict",
            )
        self._saves.settle()
        self._decisions.do("bringing the log of data positions up to date", partial(self._catch_up, state))
        loaders = self._loaders
        choice = self._decisions.decide_together("choosing data positions", partial(self._choose, step), _DataChoice)
        if choice.base is not None:
            self._run.load(self._run.root, loaders, choice.base, options=self._options, strict=True)
        if choice.loaders:
            self._decisions.do("loading data positions", partial(_load, loaders, choice.loaders))
        return choice.step

    def _catch_up(self, state: Mapping[str, Any] | None) -> None:
        """Remembers the loaders of the state, and waits until the log of this rank is written."""
        self._take_loaders(state)
        if self._log is not None:
            self._log.finish()

    def _choose(self, step: int | None) -> _DataChoice:
        """Returns the checkpoint, and the log on top of it, for a step, by default the newest. Raises
        CheckpointNotFoundError (not_found) if the step has neither.
        """
        store = self._run.store
        newest = next(abandoned_steps.newest_steps(store, self._saves.new_branch), None)
        for logged in self._logged():
            is_wanted = logged.step == step if step is not None else newest is None or logged.step > newest
            if is_wanted and (records := read_records(store, logged)) is not None:
                return _DataChoice(logged.step, self._base_of(records[0]), _merge(records))
        if step is None:
            return _DataChoice(newest, newest)
        if not layout.committed_save_id(store, layout.step_folder(step)):
            raise CheckpointNotFoundError(
                f"neither a checkpoint of step {step} is in {store}, nor did all ranks log the positions of their data "
                "loaders after it; nothing was changed: call log_data at every step that loaders are to go on from, or "
                "restore a checkpoint, with the weights",
                kind="not_found",
                path=str(store),
                step=step,
            )
        return _DataChoice(step, step)

    def _base_of(self, record: LogRecord) -> int | None:
        """Returns the step of the checkpoint to load before these positions: the record's base, or, without one or if
        retention has deleted it, the newest of the branch at or before the record's step; None if there is none.
        """
        store = self._run.store
        if record.base is not None and layout.committed_save_id(store, layout.step_folder(record.base)):
            return record.base
        steps = abandoned_steps.newest_steps(store, self._saves.new_branch)
        return next((step for step in steps if step <= record.step), None)

    def leave_branch(self, state: Mapping[str, Any]) -> None:
        """Forgets all positions that were logged, and what was prepared for the next save: training goes on from
        another step. Changes no weights and no loader, and remembers the loaders of `state`. All ranks call this
        together, and all raise if the `state` of one is no state, or the positions of rank 0 cannot be deleted.
        """
        self._saves.prepared.forget()
        if self._log is not None:
            self._log.begin_branch()
        # Hazard: a rank does not know if others have logged, so all join this also where none has.
        self._decisions.do("removing data positions that training leaves", partial(self._leave, state))

    def _leave(self, state: Mapping[str, Any]) -> None:
        self._loaders = data_loaders_in(state)
        # Without the part of rank 0 none of the steps is complete, also where other ranks delete theirs later.
        if self._log is not None and self._log.rank == 0:
            self._log.finish()

    def wait(self) -> None:
        """Waits until all that was handed over is written, or has failed."""
        if self._log is not None:
            self._log.wait()

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread of the log."""
        if self._log is not None:
            self._log.close()


def _merge(records: Mapping[int, LogRecord]) -> dict[str, bytes]:
    """Returns the positions of all ranks by the loader's FQN, of the records of one step by rank."""
    names = sorted({fqn for record in records.values() for fqn in record.loaders})
    return {
        fqn: merge_positions(
            fqn, {rank: record.loaders[fqn] for rank, record in records.items() if fqn in record.loaders}
        )
        for fqn in names
    }


def _load(loaders: Mapping[str, DataLoaderState], logged: Mapping[str, bytes]) -> None:
    """Loads the merged positions. If one is missing, changes nothing and raises CheckpointMismatchError (conflict)."""
    absent = [fqn for fqn in loaders if fqn not in logged]
    if absent:
        raise CheckpointMismatchError(
            f"{absent[0]}: its position was not logged; the loaders stand where the checkpoint is: log the state that "
            "has all of them",
            kind="conflict",
        )
    for fqn, loader in loaders.items():
        load_positions(fqn, loader, logged[fqn])
