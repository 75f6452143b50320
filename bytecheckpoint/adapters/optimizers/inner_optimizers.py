"""Optimizers that hold other optimizers, or keep their state elsewhere than in `.state`: what is inside of them, and
which tensors their state_dict() has. Knows nothing of names and of checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.frameworks.zero_partitions import is_wrapper
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH

_MAX_NESTING = 4
"""Containers of containers of optimizers in one attribute."""
_OF_TORCH = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every torch optimizer."""
_STATE, _GROUPS = "state", "param_groups"

Shapes = Counter[tuple[int, ...]]
"""Shapes of state tensors, and the number of tensors that have each."""


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizers in the attributes of this one, also in lists and dicts there, down to those that hold none.

    Optimizers of torch, and those of DeepSpeed that wrap one.
    """
    found: dict[int, Any] = {}
    _add_inner(optimizer, found, {id(optimizer)})
    return list(found.values())


def _add_inner(optimizer: Any, found: dict[int, Any], seen: set[int]) -> None:
    for name, value in getattr(optimizer, "__dict__", {}).items():
        for inner in optimizers_at(name, value):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            before = len(found)
            if isinstance(inner, torch.optim.Optimizer):
                _add_inner(inner, found, seen)
            if len(found) == before:
                found[id(inner)] = inner


def optimizers_at(name: str, value: Any) -> Iterator[Any]:
    """The optimizers in an attribute of an optimizer, also in lists and dicts there."""
    return _optimizers_in(value, _MAX_NESTING) if name not in _OF_TORCH else iter(())


def _optimizers_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.optim.Optimizer) or is_wrapper(value):
        yield value
    elif isinstance(value, dict | list | tuple) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, depth - 1)


def is_usual(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer gives out `.state` as torch's base class does, and `.state` is an attribute of its own."""
    has_usual_dict = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    return has_usual_dict and "state_dict" not in vars(optimizer) and keeps_state(optimizer)


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if what is put into `.state` stays there: a property may give a new dict each time."""
    return _STATE in vars(optimizer) or optimizer.state is optimizer.state


class ShownState(NamedTuple):
    """The state that an optimizer's state_dict() gives out."""

    shapes: Shapes
    """Of its tensors, without hyperparameters."""
    has_own_data: bool
    """True if there is plain data in it that is neither state of a parameter nor a hyperparameter."""


def shown_by(optimizer: torch.optim.Optimizer, inner: Sequence[Any]) -> ShownState:
    """What state_dict() has. State that it makes for inner optimizers that had none is not counted and is removed
    again: torchtitan's takes a step to make it, and a save changes nothing.
    """
    empty = [each for each in (optimizer, *inner) if isinstance(each, torch.optim.Optimizer) and not each.state]
    shapes: Shapes = Counter()
    own_data = _look(optimizer.state_dict(), shapes, depth=MAX_DEPTH, is_known=False)
    made = [each for each in empty if each.state]
    shapes -= held_by(made)
    for each in made:
        each.state.clear()
    return ShownState(shapes, own_data)


def _look(value: Any, shapes: Shapes, *, depth: int, is_known: bool) -> bool:
    """Counts the tensors; returns whether there is any plain data that is not `is_known` to be of a parameter."""
    if isinstance(value, torch.Tensor):
        shapes[tuple(value.shape)] += 1
        return False
    if not isinstance(value, Mapping | list | tuple):
        return not is_known and value is not None
    if not depth:
        return True
    is_found = False
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if not _is_groups(key, item):
            is_state = is_known or key == _STATE or (type(key) is str and key.startswith(f"{_STATE}."))
            is_found |= _look(item, shapes, depth=depth - 1, is_known=is_state)
    return is_found


def _is_groups(key: object, item: Any) -> bool:
    return (key == _GROUPS and isinstance(item, list)) or (type(key) is str and key.startswith(f"{_GROUPS}."))


def held_by(optimizers: Iterable[Any], *, without: Iterable[Any] = ()) -> Shapes:
    """The state tensors of these optimizers, but for those that others hold as well."""
    elsewhere = {id(tensor) for tensor in _state_tensors(without)}
    return Counter(tuple(tensor.shape) for tensor in _state_tensors(optimizers) if id(tensor) not in elsewhere)


def _state_tensors(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        state = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}
        for of_parameter in state.values():
            yield from _tensors_in(of_parameter, MAX_DEPTH)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth - 1)
