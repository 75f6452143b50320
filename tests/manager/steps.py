"""StepInfo for tests, with plain defaults."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.manager.step_info import StepInfo


def step_info(step: int, *, time: float = 0.0, committed: bool = True, **fields: Any) -> StepInfo:
    fields = {"metrics": {}, "seconds": {}, "pinned": False, **fields}
    return StepInfo(step, time, committed=committed, **fields)


def now_at(step: int, *, time: float = 0.0, **fields: Any) -> StepInfo:
    return step_info(step, time=time, committed=False, **fields)
