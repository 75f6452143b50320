"""Optimizers that hold other optimizers, or keep their state elsewhere than in `.state`: what is inside of them, and
which tensors their state_dict() has. And whether each runs torch's step hooks, in which a step waits until a lazy
snapshot is staged. Knows nothing of names and of checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.frameworks.zero_partitions import is_wrapper
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, unsupported

_MAX_NESTING = 4
"""Most levels of nested containers in an attribute that are searched for an optimizer."""
_OF_TORCH = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every torch optimizer."""
_STATE, _GROUPS = "state", "param_groups"

Shapes = Counter[tuple[int, ...]]
"""Shapes of state tensors, and the number of tensors that have each."""


class HeldOptimizers(NamedTuple):
    """The optimizers that an optimizer holds in attributes, also in lists and dicts in them, and those inside these."""

    inner: list[Any]
    """The innermost: those that hold no others. Of torch, or DeepSpeed's that wrap one."""
    between: list[torch.optim.Optimizer]
    """All others."""


def held_optimizers(optimizer: torch.optim.Optimizer) -> HeldOptimizers:
    """Returns what an optimizer holds, each once."""
    held = HeldOptimizers([], [])
    _add_held(optimizer, held, set(), {id(optimizer)})
    return held


def _add_held(optimizer: torch.optim.Optimizer, found: HeldOptimizers, seen: set[int], above: set[int]) -> bool:
    """Adds to `found` and `seen` the optimizers inside this one that `seen` lacks. Returns True if it holds any but
    those in `above`, which hold it.
    """
    held = [inner for inner in _held_by_attributes(optimizer) if id(inner) not in above]
    for inner in held:
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        is_outer = isinstance(inner, torch.optim.Optimizer) and _add_held(inner, found, seen, above | {id(inner)})
        (found.between if is_outer else found.inner).append(inner)
    return bool(held)


def _held_by_attributes(owner: Any) -> Iterator[Any]:
    """Yields the optimizers in the attributes of an object, also in lists and dicts there."""
    attributes = getattr(owner, "__dict__", {})
    values = [value for name, value in attributes.items() if name not in _OF_TORCH]
    # The attributes themselves are one level of nesting more.
    return _items_of(values, _MAX_NESTING + 1, lambda item: isinstance(item, torch.optim.Optimizer) or is_wrapper(item))


def _items_of(value: Any, depth: int, matches: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields the values for which `matches` is true, in dicts, lists and tuples nested at most `depth` deep."""
    if matches(value):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items_of(item, depth - 1, matches)


def is_usual(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if an optimizer has a `.state` of its own, and its state_dict() is that of torch's base class."""
    has_usual_dict = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    return has_usual_dict and "state_dict" not in vars(optimizer) and keeps_state(optimizer)


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if values put into `.state` stay there: it may be a property that gives a new dict each time."""
    return _STATE in vars(optimizer) or optimizer.state is optimizer.state


class ShownState(NamedTuple):
    """The state in the result of an optimizer's state_dict()."""

    shapes: Shapes
    """Shapes of its tensors, without hyperparameters."""
    has_own_data: bool
    """True if there is plain data in it that is neither state of a parameter nor a hyperparameter."""


def shown_by(optimizer: torch.optim.Optimizer, inner: Sequence[Any]) -> ShownState:
    """Describes the content of state_dict(). State that this call makes for an optimizer, inner or not, that had none
    is not counted and is removed again: torchtitan's takes a step to make it, and a save must change nothing.
    """
    empty = [each for each in (optimizer, *inner) if isinstance(each, torch.optim.Optimizer) and not each.state]
    shapes: Shapes = Counter()
    own_data = _count_tensors(optimizer.state_dict(), shapes, depth=MAX_DEPTH, is_known=False)
    filled_by_call = [each for each in empty if each.state]
    shapes -= held_by(filled_by_call)
    for each in filled_by_call:
        each.state.clear()
    return ShownState(shapes, own_data)


def _count_tensors(value: Any, shapes: Shapes, *, depth: int, is_known: bool) -> bool:
    """Counts the tensors in a part of a state_dict outside its param_groups, by shape, into `shapes`. Returns True if
    it also has plain data there that belongs to no parameter, or containers `depth` levels below; `is_known` says that
    this part belongs to one.
    """
    if isinstance(value, torch.Tensor):
        shapes[tuple(value.shape)] += 1
        return False
    if not isinstance(value, Mapping | list | tuple):
        return not is_known and value is not None
    if not depth:
        return True
    is_found = False
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        text = key if type(key) is str else ""
        if not (key == _GROUPS and isinstance(item, list)) and not text.startswith(f"{_GROUPS}."):
            is_state = is_known or key == _STATE or text.startswith(f"{_STATE}.")
            is_found |= _count_tensors(item, shapes, depth=depth - 1, is_known=is_state)
    return is_found


def held_by(optimizers: Iterable[Any], *, without: Iterable[Any] = ()) -> Shapes:
    """Counts the state tensors of these optimizers by shape, but for those that the optimizers `without` have, too."""
    elsewhere = {id(tensor) for tensor in _state_tensors(without)}
    return Counter(tuple(tensor.shape) for tensor in _state_tensors(optimizers) if id(tensor) not in elsewhere)


def _state_tensors(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        # One that another holds may never have called super().__init__().
        state = getattr(optimizer, _STATE, {}) if isinstance(optimizer, torch.optim.Optimizer) else {}
        for of_parameter in state.values():
            yield from _items_of(of_parameter, MAX_DEPTH, lambda value: isinstance(value, torch.Tensor))


_LAZY_ADVICE = 'save with snapshot="copy", which needs no optimizer to wait'


def check_steps_wait(fqn: str, optimizers: Iterable[torch.optim.Optimizer], wrapped: Iterable[FlatOptimizer]) -> None:
    """Raises CheckpointSaveError (unsupported_value) where a step may change state without torch's step hooks."""
    for optimizer in optimizers:
        if not _waits(optimizer, ()):
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            what = f"an optimizer, {name}, whose step does not run torch's step hooks (torch.optim.Optimizer.__init__ "
            what += "sets them up), so it would not wait for a lazy snapshot"
            raise unsupported(fqn, what, f"call super().__init__() in its __init__, or {_LAZY_ADVICE}")
        if any(group.get("capturable") for group in optimizer.param_groups):
            what = "an optimizer with capturable=True, whose step may be replayed from a CUDA graph, without hooks, so "
            what += "it would not wait for a lazy snapshot"
            raise unsupported(fqn, what, _LAZY_ADVICE)
    for flat in wrapped:
        if any(group.get("use_muon") for group in flat.optimizer.param_groups):
            what = "DeepSpeed's Muon, which changes its momentum outside of the optimizer's step, so it would not wait"
            raise unsupported(fqn, f"{what} for a lazy snapshot", _LAZY_ADVICE)


def _waits(optimizer: torch.optim.Optimizer, outer: Sequence[object]) -> bool:
    """Returns True if a step waits for a lazy snapshot: `step` runs torch's step hooks, or has optimizers inside that
    all wait and together have all of its parameters.
    """
    # Not by the class alone: schedulers and trainers replace `step` on the instance. torch itself sets `hooked`.
    if getattr(optimizer.step, "hooked", False):
        return True
    inside = list(_optimizers_inside(optimizer, (*outer, optimizer)))
    if not all(_waits(each, (*outer, optimizer)) for each in inside):
        return False
    return bool(inside) and _parameters(optimizer) <= set().union(*map(_parameters, inside))


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _optimizers_inside(owner: Any, outer: Sequence[object]) -> Iterator[torch.optim.Optimizer]:
    for item in _held_by_attributes(owner):
        if any(item is each for each in outer):
            continue
        if isinstance(item, torch.optim.Optimizer):
            yield item
        else:
            yield from _optimizers_inside(item, (*outer, item))
