"""Saves of bytecheckpoint: synchronous, and asynchronous with each kind of snapshot."""

from __future__ import annotations

from pathlib import Path

import bytecheckpoint as bcp
from saves.timing import Pending, Save
from saves.training import Job


def candidates() -> dict[str, Save]:
    return {"bcp": save, "bcp-copy": asynchronous("copy"), "bcp-lazy": asynchronous("lazy")}


def save(folder: Path, job: Job) -> dict[str, float]:
    return dict(bcp.save(folder, job.held.state).result().seconds)


def asynchronous(snapshot: str) -> Save:
    def begin(folder: Path, job: Job) -> Pending:
        handle = bcp.save(folder, job.held.state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot))
        return Pending(lambda: dict(handle.result().seconds), handle.staged)

    return begin
