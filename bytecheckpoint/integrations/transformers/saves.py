"""The saves of a Trainer's run, one after the other by all ranks together, and what rank 0 does for each: it adds files
to the folder, and after the commit it deletes old checkpoints in the background.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer_callback import ExportableState

from bytecheckpoint import api
from bytecheckpoint.integrations.shared.agreed_folders import on_rank_0
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolder, NumberedFolders
from bytecheckpoint.integrations.shared.text_file import write_text
from bytecheckpoint.integrations.transformers.folders import (
    CONFIG,
    TRAINER_STATE,
    TrainerRecord,
    folders_of,
    is_committed,
    put_trainer_state,
)
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving.handle import SaveHandle, has_failed

logger = logging.getLogger("bytecheckpoint")


class BesideFiles(NamedTuple):
    """Contents of the files that rank 0 adds to the folder of a checkpoint, and the position for its record."""

    trainer_state: str
    config: str
    """Empty for a model without a configuration."""
    position: tuple[int, int] | None
    """As in TrainerRecord."""


class Limit(NamedTuple):
    """The checkpoints that stay."""

    num_kept: int | None
    """Number of committed ones to keep; None or 0 for all."""
    best: str | None
    """The folder of the best one, which stays in any case."""


class TrainerSaves:
    """The saves into the folders of one run. All ranks make the same calls in the same order."""

    def __init__(self, run_dir: str, *, resumed: str, timeout_s: float) -> None:
        """`resumed` is the path of the checkpoint that training goes on from, empty for a fresh start. Checkpoints that
        were saved after that one are the first to be deleted.
        """
        self.newest_path = ""
        """The folder that was saved last, committed or not."""
        self._decisions = Decisions(None, run_dir, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._handle: SaveHandle | None = None
        self._folders = on_rank_0(self._decisions, partial(_begun, run_dir, resumed))
        """None on other ranks."""

    def has_saved(self, path: str) -> bool:
        """Returns True on all ranks if rank 0 finds a committed checkpoint at the path, or if the newest save is there,
        even if it is not committed yet.
        """
        if path == self.newest_path:
            return True
        return self._decisions.decide_together("looking at a checkpoint", lambda: is_committed(path), bool)

    def settle(self) -> None:
        """Waits until the save in flight has ended, and raises its error if it failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()

    def finish(self) -> None:
        """Waits for the save in flight and, on rank 0, all deletions that are due. Raises the error of the save if it
        failed.
        """
        try:
            self.settle()
        finally:
            if self._folders is not None:
                self._folders.wait(self._timeout_s)

    def close(self) -> None:
        """Ends the thread that deletes; call `finish` before."""
        if self._folders is not None:
            self._folders.close(self._timeout_s)

    def begin(
        self,
        path: str,
        state: Mapping[str, Any],
        *,
        files: Callable[[], BesideFiles],
        adapters_only: bool,
        limit: Limit,
        async_save: bool,
        options: SaveOptions,
    ) -> None:
        """Saves the state into a folder; call `settle` before. Replaces a checkpoint that is there atomically.

        Rank 0 calls `files`, and writes what it returns, before the save begins. After the commit it deletes the oldest
        checkpoints beyond the limit, in the background. Raises what `bytecheckpoint.save` raises.
        """
        self.newest_path = path
        number = int(Path(path).name.rpartition("-")[2])

        def write_beside() -> TrainerRecord:
            if self._folders is None:
                raise RuntimeError("rank 0 writes")
            sequence = self._folders.record(number).sequence
            beside = files()
            Path(path).mkdir(parents=True, exist_ok=True)
            if beside.config:
                write_text(Path(path, CONFIG), beside.config)
            if is_committed(path):
                logger.info("%s is saved again, and replaces the checkpoint that is there", path)
            else:  # a checkpoint that is replaced keeps its state of the Trainer until the commit
                write_text(Path(path, TRAINER_STATE), beside.trainer_state)
            return TrainerRecord(
                sequence=sequence,
                entries=sorted(state),
                trainer_state=beside.trainer_state,
                adapters_only=adapters_only,
                position=beside.position,
            )

        record = on_rank_0(self._decisions, write_beside, doing="preparing a checkpoint")
        metadata = marked("transformers", None if record is None else record.as_metadata())  # that of rank 0 counts
        options = dataclasses.replace(options, overwrite=True)
        handle = api.save(path, state, async_save=async_save, metadata=metadata, options=options)
        self._handle = handle
        if record is not None and self._folders is not None:
            handle.add_done_callback(lambda ended: _put_beside(ended, path, record))
            is_limited = limit.num_kept is not None and limit.num_kept > 0
            self._folders.retire_after(handle, number, partial(self._beyond, limit, path) if is_limited else None)

    def _beyond(self, limit: Limit, path: str) -> list[NumberedFolder]:
        """Returns the oldest checkpoints beyond `limit.num_kept`, which must be above 0, on rank 0. Never returns the
        one at `path`, the newest or the best.
        """
        committed = self._folders.committed() if self._folders is not None else []
        newest = committed[-1].path if committed else ""  # may be newer than `path`, where deletions are late
        held = {os.path.realpath(each) for each in (path, newest, limit.best) if each}
        num_too_many = len(committed) - max(limit.num_kept or 0, len(held))
        others = [folder for folder in committed if os.path.realpath(folder.path) not in held]
        return others[: max(num_too_many, 0)]

    def keep_only(self, path: str) -> None:
        """Deletes every checkpoint of the run except the one at `path`; call `finish` before. Deletes none, with a
        warning, if that one is not committed in this run, as where the Trainer's state names a folder of another run.
        """
        if self._folders is not None:
            self._folders.retire(partial(self._all_but, path))
            self._folders.wait(self._timeout_s)

    def _all_but(self, path: str) -> list[NumberedFolder]:
        committed = self._folders.committed() if self._folders is not None else []
        others = [folder for folder in committed if os.path.realpath(folder.path) != os.path.realpath(path)]
        if len(others) == len(committed):
            logger.warning("no checkpoint is deleted, because the best one, %s, is not committed in this run", path)
            return []
        return others


def beside_files(trainer: Any, *, steps_in_pass: int) -> BesideFiles:
    """Returns the files and the position for a save at this step. First puts the states of the callbacks into the
    Trainer's state.

    `steps_in_pass` is the number of batches that the Trainer takes for one pass over a loader without a length; 0 if
    the loader has one.
    """
    exported: dict[str, list[Any]] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            exported.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {
        name: states[0] if len(states) == 1 else states for name, states in exported.items()
    }
    text = json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"
    as_json = getattr(getattr(trainer.model, "config", None), "to_json_string", None)
    passes, part = divmod(trainer.state.epoch or 0.0, 1)
    position = (int(passes), round(part * steps_in_pass)) if steps_in_pass else None
    return BesideFiles(text, as_json() if as_json is not None else "", position)


def _begun(run_dir: str, resumed: str) -> NumberedFolders:
    folders = folders_of(run_dir)
    folders.begin(resumed=resumed)
    return folders


def _put_beside(ended: SaveHandle, path: str, record: TrainerRecord) -> None:
    if not has_failed(ended):
        with suppress(OSError):  # resuming puts it there as well
            put_trainer_state(path, record)
