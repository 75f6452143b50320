"""The saves of a Trainer's run, one after the other by all ranks together, and what follows a commit: the files beside
it, and the deletion of old checkpoints, in the background of rank 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint import api
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.integrations.transformers.folders import (
    CONFIG,
    TRAINER_STATE,
    CommittedFolder,
    TrainerRecord,
    committed_folders,
    delete_folder,
    finish_folders,
    is_committed,
    put_trainer_state,
    write_text,
)
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.agreement.stopping import rank_in
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving.handle import SaveHandle

logger = logging.getLogger("bytecheckpoint")


class BesideFiles(NamedTuple):
    """Texts that rank 0 writes beside a checkpoint."""

    trainer_state: str
    config: str
    """Empty for a model without a configuration."""


class Limit(NamedTuple):
    """The checkpoints that stay."""

    num_kept: int | None
    """Number of committed ones to keep; None or 0 for all."""
    best: str | None
    """The folder of the best one, which stays in any case."""


class TrainerSaves:
    """The saves into the folders of one run. All ranks make the same calls in the same order."""

    def __init__(self, run_dir: str, *, resumed: str, timeout_s: float) -> None:
        """`resumed` is the checkpoint that training goes on from; those that were committed after it are the first to
        be deleted. Empty for a fresh start.
        """
        self.newest_path = ""
        """The folder that was saved last, committed or not."""
        self._decisions = Decisions(None, run_dir, timeout_s=timeout_s)
        self._is_first_rank = rank_in(None) == 0
        self._handle: SaveHandle | None = None
        self._committed: list[CommittedFolder] = []
        """On rank 0: the checkpoints in the order in which they are to go."""
        self._next_sequence = 0
        self._cleaner: ThreadPoolExecutor | None = None
        self._cleanings: list[Future[None]] = []
        self._decisions.hear(f"looking at the checkpoints in {run_dir}", lambda: self._look(run_dir, resumed), bool)

    def _look(self, run_dir: str, resumed: str) -> bool:
        finish_folders(run_dir)
        found = committed_folders(run_dir, passes_damaged=True)
        self._next_sequence = max((folder.record.sequence for folder in found), default=-1) + 1
        resumed = os.path.realpath(resumed) if resumed else ""
        paths = [os.path.realpath(folder.path) for folder in found]
        if resumed in paths:
            kept = paths.index(resumed) + 1
            found = [*found[kept:], *found[:kept]]
        self._committed = found
        return True

    def is_committed(self, path: str) -> bool:
        """Returns True on all ranks if rank 0 finds a committed checkpoint there, or one is being saved there."""
        if path == self.newest_path:
            return True
        return self._decisions.hear(f"looking at {path}", lambda: is_committed(path), bool)

    def settle(self) -> None:
        """Waits until the save in flight is committed, and raises its error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()

    def finish(self) -> None:
        """Waits for the save in flight and all deletions that are due, and raises the error of the save."""
        try:
            self.settle()
        finally:
            for cleaning in self._cleanings:
                cleaning.result()
            self._cleanings.clear()
            if self._cleaner is not None:
                self._cleaner.shutdown()
                self._cleaner = None

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
        """Saves the state into a folder, after `settle`. A checkpoint that is there is replaced in one step.

        `files` is called on rank 0. After the commit the oldest checkpoints beyond the limit are deleted.
        Raises what `bytecheckpoint.save` raises.
        """
        self.newest_path = path
        records: list[TrainerRecord] = []

        def write_beside() -> bool:
            self._wait_for_cleaning(path)
            beside = files()
            Path(path).mkdir(parents=True, exist_ok=True)
            if beside.config:
                write_text(Path(path, CONFIG), beside.config)
            if is_committed(path):
                logger.info("%s is saved again, and replaces the checkpoint that is there", path)
            else:  # one that is replaced keeps its own until the commit
                write_text(Path(path, TRAINER_STATE), beside.trainer_state)
            records.append(
                TrainerRecord(
                    sequence=self._next_sequence,
                    entries=sorted(state),
                    trainer_state=beside.trainer_state,
                    adapters_only=adapters_only,
                )
            )
            self._next_sequence += 1
            return True

        self._decisions.hear(f"preparing {path}", write_beside, bool)
        metadata = records[0].as_metadata() if records else None  # rank 0's counts
        options = replace(options, overwrite=True)
        handle = api.save(path, state, async_save=async_save, metadata=metadata, options=options)
        self._handle = handle
        if records:
            self._cleaner = self._cleaner or ThreadPoolExecutor(1, "bcp-trainer")
            self._cleanings.append(self._cleaner.submit(self._clean_after, handle, path, records[0], limit))

    def _clean_after(self, handle: SaveHandle, path: str, record: TrainerRecord, limit: Limit) -> None:
        # Not by the handle's methods: these would note that the caller has seen the error.
        outcome = handle._progress.outcome
        if outcome.exception() is None:
            with suppress(OSError):  # resuming puts it there as well
                put_trainer_state(path, record)
            self._clean(CommittedFolder(path, outcome.result().save_id, record.without_state()), limit)

    def _wait_for_cleaning(self, path: str) -> None:
        """Waits until no checkpoint at this path may be under deletion: its manifest could be mistaken for the new."""
        if any(old.path == path for old in tuple(self._committed)):
            for cleaning in self._cleanings:
                cleaning.result()
        self._cleanings = [cleaning for cleaning in self._cleanings if not cleaning.done()]

    def _clean(self, folder: CommittedFolder, limit: Limit) -> None:
        self._committed = [other for other in self._committed if other.path != folder.path] + [folder]
        if limit.num_kept is None or limit.num_kept <= 0:
            return
        held = {os.path.realpath(path) for path in (folder.path, limit.best) if path}
        num_kept = max(limit.num_kept, len(held))
        for old in self._committed[:]:
            if len(self._committed) <= num_kept:
                break
            if os.path.realpath(old.path) not in held:
                self._delete(old)

    def keep_only(self, path: str) -> None:
        """Deletes every checkpoint of the run but this one, after `finish`; none if this one is not of the run, as
        where its folder was copied with the Trainer's state that names it.
        """
        if not self._is_first_rank:
            return
        others = [old for old in self._committed if os.path.realpath(old.path) != os.path.realpath(path)]
        if len(others) == len(self._committed):
            logger.warning("no checkpoint is deleted, because the best one, %s, is not committed in this run", path)
            return
        for old in others:
            self._delete(old)

    def _delete(self, old: CommittedFolder) -> None:
        """Deletes a checkpoint. One that cannot be deleted is named and tried again after the next commit."""
        try:
            why = delete_folder(old)
        except (CheckpointError, OSError) as error:
            logger.warning("%s could not be deleted, and is tried again after the next commit: %s", old.path, error)
            return
        if why:
            logger.info("%s stays: %s", old.path, why)
        else:
            self._committed.remove(old)
