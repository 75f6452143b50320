"""Calls of all ranks about the folders of a run, which rank 0 manages: what fails there is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import TypeVar

from bytecheckpoint.integrations.shared.numbered_folders import FolderRecord, NumberedFolders
from bytecheckpoint.manager.agreement.decisions import Decisions

T = TypeVar("T")


def on_rank_0(
    decisions: Decisions, act: Callable[[], T], *, doing: str = "looking at the checkpoints of the run"
) -> T | None:
    """Calls `act` on rank 0, and returns its result there; returns None on other ranks. If it fails, all ranks raise
    its error.
    """
    made: list[T] = []
    decisions.decide_together(doing, lambda: made.append(act()), NoneType)
    return made[0] if made else None


def record_together(
    decisions: Decisions,
    folders: NumberedFolders | None,
    number: int,
    *,
    model_only: bool = False,
    then: Callable[[], object] | None = None,
) -> FolderRecord:
    """Calls `folders.record`, then `then`, on rank 0; `folders` is None on other ranks. Returns the record on every
    rank. If either call fails, all ranks raise its error: else the others would wait in the save for rank 0.
    """

    def record() -> FolderRecord:
        if folders is None:
            raise RuntimeError("rank 0 has the folders")
        recorded = folders.record(number, model_only=model_only)
        if then is not None:  # not before: a deletion at this number would remove a folder that is made
            then()
        return recorded

    return decisions.decide_together("preparing a checkpoint", record, FolderRecord)
