"""Objects with their own state_dict and load_state_dict: schedulers, data loaders, wrappers.

Their state is a tree of plain data and tensors whose structure the checkpoint defines: a fresh object may not have
any of it yet. Tensors in the object's state_dict() are loaded in place if shape and dtype fit; for others the load
creates new ones, on the device of the object's tensor, or on the host if it has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any, Protocol

import torch

from bytecheckpoint.adapters.checkpoint_view import PER_RANK_NAME, CheckpointView, StoredTree
from bytecheckpoint.adapters.data.stateful_loaders import count_once
from bytecheckpoint.adapters.data.stream_wire import ONLY_FOR_LOADERS, is_stream_tree
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Problem, not_stored
from bytecheckpoint.adapters.key_map import SortedNames
from bytecheckpoint.adapters.native.subclass_flatten import enclosing, subclasses_in
from bytecheckpoint.adapters.native.subclass_match import refusals
from bytecheckpoint.adapters.optimizers.forms import Form, forms_in
from bytecheckpoint.adapters.optimizers.stored_optimizer import are_groups, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.adapters.tree_loader import ABSENT, TreeTarget, UntiedTensors, contents_of, is_sharded, missing_in
from bytecheckpoint.manifest.plain_wire import TensorRef

_AS_PLAIN = "load it as plain data, such as {{{!r}: []}} for a list, and give what it holds to load_state_dict()"


class Stateful(Protocol):
    """An object with state_dict() and load_state_dict()."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def is_stateful(value: Any) -> bool:
    """Returns True for an object with methods state_dict and load_state_dict that is no tensor, dict or class."""
    if isinstance(value, type | dict | torch.Tensor):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class StatefulEntry:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, fqn: str, value: Stateful) -> None:
        self.fqn = fqn
        self._value = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None
        self._shown: Any = None
        """The object's `state_dict()`, read once for a load; {} in its place for a Loader of torchdata.nodes that was
        never read; None before that."""
        self._current: dict[str, Any] = {}
        """Leaves of the object's state_dict(), plain data too, by state FQN, without those of tensor subclasses that
        the load replaces; empty before `expect`."""

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns the forms of the optimizer states in the object's state_dict(), as `PlainEntry` does of its value."""
        return forms_in(self._show(), self.fqn)

    def _show(self) -> Any:
        if self._shown is None:
            # state_dict() would begin a pass of such a loader, which draws its order from generators.
            self._shown = {} if _is_unread_loader(self._value) else self._value.state_dict()
        return self._shown

    def collect(self) -> EntryContents:
        may_differ = self.fqn.partition(".")[0] == PER_RANK_NAME
        return contents_of(self._value.state_dict(), self.fqn, "either" if may_differ else "whole")

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        found = checkpoint.object_tree(self.fqn)
        if found is not None and _is_unread_loader(self._value) and _needs_own_state(found, checkpoint):
            self._shown, self._current = self._value.state_dict(), {}
        shown = self._show()
        if not self._current:
            self._current, self._target.live = leaves(shown, self.fqn), subclasses_in(shown, self.fqn)
        self._found = None
        self._target.untied.expect({})
        if found is not None and not found.fqn:  # all of a checkpoint, which may be the state of this object
            shown_names = self._current.keys() - {self.fqn}  # an empty state is one leaf, under the object's own name
            own = {name.removeprefix(f"{self.fqn}.").partition(".")[0] for name in shown_names}
            found = found if own and own <= found.tree.keys() else None
        kind = type(self._value).__name__
        if found is None:
            text = f"{self.fqn}: the state of this {kind} is not in the checkpoint"
            outer = self.fqn.rpartition(".")[0]
            if isinstance(checkpoint.tree_leaves.get(outer), list):
                text += f", which has a list at {outer!r}; {_AS_PLAIN.format(outer)}"
            return Expectation([], set(), [Problem("missing_key", self.fqn, text)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = {checkpoint.rename(name): value for name, value in leaves(found.tree, found.fqn).items()}
        missing = missing_in(values)
        why = None
        if are_groups(found.tree) and not is_optimizer_tree(shown):
            why = (
                f"saved parameter by parameter, as optimizers are, and the state_dict() of this {kind} has another "
                "form; pass the optimizer itself"
            )
        elif missing:
            return Expectation([], set(values), missing)
        elif is_stream_tree(found.tree):
            why = ONLY_FOR_LOADERS
        elif isinstance(shown, dict) and not isinstance(found.tree, dict | NoneType):
            why = (
                f"a {type(found.tree).__name__} in the checkpoint, and this {kind} takes a dict; "
                f"{_AS_PLAIN.format(self.fqn)}"
            )
        elif found.tree is None and isinstance(shown, dict) and _is_of_torch(self._value):
            why = f"None in the checkpoint, and this {kind} takes a dict; leave it out with exclude={self.fqn!r}"
        elif found.tree == {} != shown and isinstance(self._value, torch.amp.GradScaler):
            why = f"disabled when it was saved, and enabled now; start it anew with exclude={self.fqn!r}"
        if why is not None:
            claims = {*values, *checkpoint.tensor_names.below(self.fqn)}
            return Expectation([], claims, [Problem("conflict", self.fqn, f"{self.fqn}: {why}")])
        self._found = found
        problems = self._match_subclasses(values, checkpoint)
        own_tensors = [name for name, value in self._current.items() if isinstance(value, torch.Tensor)]
        needed = [name for name in own_tensors if not enclosing(name, self._target.unchanged)]
        problems += [not_stored(name) for name in needed if not isinstance(values.get(name), TensorRef | torch.Tensor)]
        of_tree = self._target.expect(found, self._current, checkpoint)
        return of_tree._replace(problems=problems + of_tree.problems)

    def _match_subclasses(self, values: Mapping[str, Any], checkpoint: CheckpointView) -> list[Problem]:
        """Drops the object's own tensor subclasses that do not fit: the load makes new ones. One that is spread over
        ranks, of which the checkpoint has nothing, or of which include or exclude leave out a part, is kept, and its
        problems are returned.
        """
        live = self._target.live
        own = {name: value for name, value in self._current.items() if enclosing(name, live)}
        refused = refusals(own, checkpoint)
        own_names, saved_names = SortedNames(own), SortedNames(values)
        problems: list[Problem] = []
        for name, tensor in list(live.items()):
            own_parts, saved_parts = own_names.below(name), saved_names.below(name)
            if not refused.has(f"{name}.") and all(_can_fill(own[part], values.get(part)) for part in own_parts):
                continue
            is_there = name in values or bool(saved_parts)
            if not is_sharded(tensor) and is_there and not any(map(checkpoint.skips, (*own_parts, *saved_parts))):
                del live[name]
                for part in own_parts:
                    self._current.pop(part, None)  # gone already if it is below two of them
                continue
            self._target.unchanged[name] = tensor
            problems += [problem for problem in refused.problems if enclosing(problem.fqn, {name})]
        return problems

    @property
    def untied(self) -> UntiedTensors:
        return self._target.untied

    def expect_untied(self, fqns: Collection[str]) -> list[LocalShard]:
        """Returns targets in new memory for these tensors of the state; see `UntiedTensors`."""
        return self.untied.expect({fqn: self._current[fqn] for fqn in fqns if fqn in self._current})

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        self.untied.prepare()
        if self._found is not None:
            self._target.prepare(self._found, self._current, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        if self._found is not None:
            state = self._target.filled(self._found, self._current, checkpoint)
            if state is not ABSENT:  # a None may be what was saved
                add_metadata(state, self._show)
                give_state(self._value, state)


def give_state(value: Stateful, state: Any) -> None:
    """Gives an object a loaded state. If it is a Loader of torchdata.nodes, or one of its attributes is, the next pass
    of that Loader begins with this state.

    Such a Loader keeps the iterator that its state_dict() has made, and its next iter() would return that one, at the
    start, whatever state was loaded in between.
    """
    loaders = [value, *_attributes_of(value).values()]
    for each in loaders:
        if _attributes_of(each).get("_iter_for_state_dict") is True:
            iter(each)
    value.load_state_dict(state)
    for each in loaders:
        count_once(each)


def _needs_own_state(found: StoredTree, checkpoint: CheckpointView) -> bool:
    """Returns True if the load compares names with the object's own state, or leaves a part of that as it is."""
    is_whole_checkpoint = not found.fqn
    is_all_taken = checkpoint.takes_all or all(map(checkpoint.takes, leaves(found.tree, found.fqn)))
    return is_whole_checkpoint or not is_all_taken


def _is_unread_loader(value: object) -> bool:
    """Returns True for a Loader of torchdata.nodes that has no iterator yet."""
    attributes = _attributes_of(value)
    return "_iter_for_state_dict" in attributes and attributes.get("_it", value) is None


def _attributes_of(value: object) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def add_metadata(state: Any, show: Callable[[], Any]) -> None:
    """Sets the attribute `_metadata` of the OrderedDicts in `state` to that of the OrderedDicts at the same places in
    `show()`: no checkpoint holds it. torch's modules find their versions there, and TensorDict its structure.
    """
    if _holds_ordered(state):
        _copy_metadata(show(), state)


def _holds_ordered(state: Any) -> bool:
    return isinstance(state, OrderedDict) or any(map(_holds_ordered, _items_in(state)))


def _items_in(state: Any) -> Iterable[Any]:
    if isinstance(state, dict):
        return state.values()
    return state if isinstance(state, list | tuple) else ()


def _copy_metadata(source: Any, target: Any) -> None:
    if isinstance(target, OrderedDict) and hasattr(source, "_metadata"):
        target._metadata = source._metadata  # type: ignore[attr-defined]
    if isinstance(target, dict) and isinstance(source, dict):
        for key in target.keys() & source.keys():
            _copy_metadata(source[key], target[key])
    elif isinstance(target, list | tuple) and isinstance(source, list | tuple):
        for own, item in zip(source, target, strict=False):
            _copy_metadata(own, item)


def _is_of_torch(value: object) -> bool:
    """Returns True for an object of torch, or of a class derived from torch's: none of them takes a None as state."""
    return any(cls.__module__.partition(".")[0] == "torch" for cls in type(value).__mro__)


def _can_fill(own: Any, value: Any) -> bool:
    """Returns False for a part of a live subclass that no load can fill: a tensor on the meta device, or one whose
    stored value is a small tensor, in plain data.
    """
    return not isinstance(own, torch.Tensor) or not (own.is_meta or isinstance(value, torch.Tensor))
