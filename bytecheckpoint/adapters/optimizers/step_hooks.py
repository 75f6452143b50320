"""Checks that a lazy snapshot is safe with the optimizers of a state: that each of them runs torch's step hooks, in
which a step waits until the snapshot is staged. Registering the hook is the job of in_flight.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.optimizers.inner_optimizers import optimizers_at
from bytecheckpoint.manifest.plain_wire import unsupported

_ADVICE = 'save with snapshot="copy", which needs no optimizer to wait'


def check_steps_wait(fqn: str, optimizers: Iterable[torch.optim.Optimizer], wrapped: Iterable[FlatOptimizer]) -> None:
    """Raises CheckpointSaveError (unsupported_value) where a step of one of these may change its parameters or its
    state without running torch's step hooks.
    """
    for optimizer in optimizers:
        if not _waits(optimizer, ()):
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            what = f"an optimizer, {name}, whose step does not run torch's step hooks (torch.optim.Optimizer.__init__ "
            what += "sets them up), so it would not wait for a lazy snapshot"
            raise unsupported(fqn, what, f"call super().__init__() in its __init__, or {_ADVICE}")
    for flat in wrapped:
        if any(group.get("use_muon") for group in flat.optimizer.param_groups):
            what = "DeepSpeed's Muon, which changes its momentum outside of the optimizer's step, so it would not wait"
            raise unsupported(fqn, f"{what} for a lazy snapshot", _ADVICE)


def _waits(optimizer: torch.optim.Optimizer, outer: Sequence[object]) -> bool:
    """True if a step of this optimizer waits: by its own hooks, or because all of its parameters are stepped by
    optimizers inside it that wait.
    """
    # Not by the class alone: schedulers and trainers replace `step` on the instance.
    if getattr(optimizer.step, "hooked", False):
        return True
    inside = list(_optimizers_inside(optimizer, (*outer, optimizer)))
    if not all(_waits(each, (*outer, optimizer)) for each in inside):
        return False
    return bool(inside) and _parameters(optimizer) <= set().union(*map(_parameters, inside))


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _optimizers_inside(owner: Any, outer: Sequence[object]) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers in the attributes of an object."""
    for name, value in vars(owner).items():
        for item in optimizers_at(name, value):
            if any(item is each for each in outer):
                continue
            if isinstance(item, torch.optim.Optimizer):
                yield item
            else:
                yield from _optimizers_inside(item, (*outer, item))
