"""How bytecheckpoint saves in benchmarks/save.py: synchronously, and asynchronously with each kind of snapshot."""

from __future__ import annotations

from pathlib import Path

from save_timing import Pending, Save
from save_workloads import Job

import bytecheckpoint as bcp


def contestants() -> dict[str, Save]:
    return {
        "bcp": save,
        "bcp-copy": asynchronous("copy"),
        "bcp-lazy": asynchronous("lazy"),
    }


def save(folder: Path, job: Job) -> dict[str, float]:
    return dict(bcp.save(folder, job.state).result().seconds)


def asynchronous(snapshot: str) -> Save:
    def begin(folder: Path, job: Job) -> Pending:
        handle = bcp.save(folder, job.state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot))
        return Pending(lambda: dict(handle.result().seconds), handle.staged)

    return begin
