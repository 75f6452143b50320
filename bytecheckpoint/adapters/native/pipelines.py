"""Stages of a pipeline: modules, those of `torch.distributed.pipelining` (told by `submod` and `stage_index`), lists of
both, and schedules, which hold stages. FQNs are those of the whole model, so where a layer was is stored nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.plain.plain_tree import has_attributes


class Stage(NamedTuple):
    """One module of an entry."""

    module: torch.nn.Module
    number: int | None
    """Number of the pipeline stage, where it says it."""


def stages_of(value: Any) -> list[Stage]:
    """Returns the modules that a value of the state stands for; none where it is anything else than modules."""
    if isinstance(value, list | tuple):
        found: list[Stage] = []
        for item in value:
            of_item = _stage(item)
            if of_item is None:
                return []
            found.append(of_item)
        return found
    stage = _stage(value)
    return [stage] if stage is not None else _of_schedule(value)


def _stage(value: Any) -> Stage | None:
    if isinstance(value, torch.nn.Module):
        return Stage(value, None)
    if not has_attributes(value, "submod", "stage_index"):
        return None
    module, number = value.submod, value.stage_index
    return Stage(module, number) if isinstance(module, torch.nn.Module) and type(number) is int else None


def _of_schedule(value: Any) -> list[Stage]:
    """Schedules keep their stages to themselves: `_stage` where a rank has one, `_stages` where it has several."""
    if not has_attributes(value, "step") or not callable(value.step):
        return []
    own = value._stages if has_attributes(value, "_stages") else None
    if not own:
        own = [value._stage if has_attributes(value, "_stage") else None]
    return stages_of(own) if isinstance(own, list) and not isinstance(own[0], torch.nn.Module) else []
