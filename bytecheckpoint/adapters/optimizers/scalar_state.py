"""Values of optimizer state that a parameter has one of, as a count of steps: torch's optimizers keep most of them as
tensors without dimensions, others as numbers. Either is loaded as the other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeGuard

import torch

HOST_SCALARS = frozenset({"step", "mu_product"})
"""State that has no dimensions and is no DTensor, whatever the parameter is."""

_COUNT_IN_NUMBERS = (torch.optim.SparseAdam, torch.optim.LBFGS)


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """True if a piece of state is a number, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else is_number(value)


def holds_more(own: Any) -> bool:
    """True if what the optimizer has is a tensor of several elements, where no single value can go."""
    return isinstance(own, torch.Tensor) and own.numel() != 1


def can_take(own: Any, value: Any) -> bool:
    """True if a loaded value has a place where the optimizer has this: one value in a tensor of one, anything in what
    is no tensor. The rest was refused, and strict=False leaves it out.
    """
    return not isinstance(own, torch.Tensor) or (is_scalar(value) and own.numel() == 1)


def scalar_device(group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where an optimizer itself would have made its scalars for what this group of its param_groups has."""
    is_on_device = group.get("capturable") or group.get("fused")
    return parameter.device if is_on_device else torch.device("cpu")


def put_scalar(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: Any, *, group: Mapping[str, Any]
) -> None:
    """Puts a loaded value in place: what is a tensor stays that tensor, and what is a number stays one. A state that
    lacks it gets a tensor of its own, where the optimizer keeps one. The parameter is in this group.

    Never the value itself: other parts of the parameter, and what was tied to it, get the same, and steps change state
    in place.
    """
    state: MutableMapping[str, Any] = optimizer.state[parameter]
    own = state.get(key)
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
        own.copy_(value.view(own.shape))
    elif isinstance(own, torch.Tensor) and is_number(value):
        own.fill_(value)
    elif isinstance(value, torch.Tensor):
        state[key] = _number(value, like=own) if is_number(own) else value.clone()
    elif is_number(value) and own is None and key in HOST_SCALARS and _keeps_tensors(optimizer):
        state[key] = torch.tensor(float(value), dtype=torch.float32, device=scalar_device(group, parameter))
    else:
        state[key] = copy.deepcopy(value)


def _number(value: torch.Tensor, *, like: float) -> int | float:
    number: int | float = value.item()
    return int(number) if isinstance(like, int) and float(number).is_integer() else number


def _keeps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer without state would make its scalars as tensors: torch's own and what is derived of them."""
    bases = {cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim.")}
    return bool(bases - {torch.optim.Optimizer}) and not isinstance(optimizer, _COUNT_IN_NUMBERS)
