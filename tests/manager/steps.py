"""StepInfo for tests, with plain defaults, and of the steps of a store."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import list_steps
from bytecheckpoint.storage.store import Store


def step_info(step: int, *, time: float = 0.0, committed: bool = True, **fields: Any) -> StepInfo:
    fields = {"metrics": {}, "seconds": {}, "pinned": False, **fields}
    return StepInfo(step, time, committed=committed, **fields)


def now_at(step: int, *, time: float = 0.0, **fields: Any) -> StepInfo:
    return step_info(step, time=time, committed=False, **fields)


def read_steps(store: Store) -> list[StepInfo]:
    return [step.info for step in list_steps(store)]
