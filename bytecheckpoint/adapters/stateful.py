"""Objects with their own state_dict and load_state_dict (schedulers, data loaders, wrappers), `RankLocal`, and the
random number generators of a process.

Their state is a tree of plain data and tensors whose structure the checkpoint defines: a fresh object may not have
any of it yet. Tensors that the object shows are loaded in place, others are created on the host.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch

from bytecheckpoint.adapters.checkpoint_view import PER_RANK_NAME, CheckpointView, StoredTree
from bytecheckpoint.adapters.data.stream_wire import ONLY_FOR_LOADERS, is_stream_tree
from bytecheckpoint.adapters.expectation import (
    EntryContents,
    Expectation,
    Problem,
    RankMissing,
    not_stored,
    rank_missing,
)
from bytecheckpoint.adapters.native.subclass_flatten import enclosing, subclasses_in
from bytecheckpoint.adapters.native.subclass_match import refusals
from bytecheckpoint.adapters.optimizers.forms import Form, forms_in
from bytecheckpoint.adapters.optimizers.stored_optimizer import are_groups, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.tree_loader import TreeTarget, contents_of, is_sharded, missing_in
from bytecheckpoint.manifest.plain_wire import TensorRef, unsupported


class Stateful(Protocol):
    """Anything that gives out its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def is_stateful(value: Any) -> bool:
    """Returns True if an object, which is not a tensor or dict, brings its own state_dict and load_state_dict."""
    if isinstance(value, type | dict | torch.Tensor):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class RankLocal:
    """Marks state that differs from rank to rank, as that of random number generators and data loaders does.

    `value` is plain data, tensors, or an object with state_dict() and load_state_dict(); every rank's is saved. `load`
    puts back, as `value` or through load_state_dict(), what the rank of the same number saved. On a larger number of
    ranks some have no saved value: with missing="error" that is an error that says so, because a data loader that
    starts anew repeats data; with missing="keep" they keep what they have, which is right for random numbers. On a
    smaller number the values of the other ranks can be had from `bcp.open(path).rank_values(fqn)`.
    """

    def __init__(self, value: Any, *, missing: Literal["error", "keep"] = "error") -> None:
        if missing not in {"error", "keep"}:
            raise ValueError(f"RankLocal.missing takes 'error' or 'keep', not {missing!r}")
        self.value = value
        self.missing = missing

    def __repr__(self) -> str:
        return f"RankLocal({self.value!r})"


class StatefulEntry:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, fqn: str, value: Stateful) -> None:
        self.fqn = fqn
        self._value = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None
        self._shown: Any = None
        """Result of its state_dict(), once it was asked for to load into."""
        self._current: dict[str, Any] = {}

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns the forms of optimizer state that is nested or flat, as torch.distributed.checkpoint gives it."""
        return forms_in(self._show(), self.fqn)

    def _show(self) -> Any:
        if self._shown is None:
            self._shown = self._value.state_dict()
        return self._shown

    def collect(self) -> EntryContents:
        may_differ = self.fqn.partition(".")[0] == PER_RANK_NAME
        return contents_of(self._value.state_dict(), self.fqn, "either" if may_differ else "whole")

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        shown = self._show()
        if not self._current:
            self._current, self._target.live = leaves(shown, self.fqn), subclasses_in(shown, self.fqn)
        found = checkpoint.object_tree(self.fqn)
        self._found = None
        if found is not None and not found.fqn:  # all of a checkpoint, which may be the state of this object
            own = {name.removeprefix(f"{self.fqn}.").partition(".")[0] for name in self._current}
            found = found if own and own <= found.tree.keys() else None
        kind = type(self._value).__name__
        if found is None:
            text = f"{self.fqn}: the state of this {kind} is not in the checkpoint"
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
        elif isinstance(found.tree, list) and isinstance(shown, dict):
            why = (
                f"a list of {len(found.tree)} in the checkpoint, and this {kind} takes a dict; load it as "
                f"{{{self.fqn!r}: []}}, and give what it holds to load_state_dict()"
            )
        if why is not None:
            claims = {*values, *checkpoint.below(self.fqn)}
            return Expectation([], claims, [Problem("conflict", self.fqn, f"{self.fqn}: {why}")])
        self._found = found
        problems = self._match_subclasses(values, checkpoint)
        own_tensors = [name for name, value in self._current.items() if isinstance(value, torch.Tensor)]
        needed = [name for name in own_tensors if not enclosing(name, self._target.unchanged)]
        problems += [not_stored(name) for name in needed if not isinstance(values.get(name), TensorRef | torch.Tensor)]
        of_tree = self._target.expect(found, self._current, checkpoint)
        return of_tree._replace(problems=problems + of_tree.problems)

    def _match_subclasses(self, values: Mapping[str, Any], checkpoint: CheckpointView) -> list[Problem]:
        """Drops the object's own tensor subclasses that do not fit, which are made anew. One that is spread over ranks,
        or of which the checkpoint has nothing, stays as it is: why is returned.
        """
        live = self._target.live
        own = {name: value for name, value in self._current.items() if enclosing(name, live)}
        refused = refusals(own, checkpoint)
        problems: list[Problem] = []
        for name, tensor in list(live.items()):
            if not refused.has(f"{name}.") and all(
                _can_fill(own[part], values.get(part)) for part in own if enclosing(part, {name})
            ):
                continue
            is_there = name in values or any(enclosing(part, {name}) for part in values)
            parts = [part for part in {*own, *values} if enclosing(part, {name})]
            if not is_sharded(tensor) and is_there and not any(map(checkpoint.skips, parts)):
                del live[name]
                self._current = {key: value for key, value in self._current.items() if not enclosing(key, {name})}
                continue
            self._target.unchanged[name] = tensor
            problems += [problem for problem in refused.problems if enclosing(problem.fqn, {name})]
        return problems

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        if self._found is not None:
            self._target.prepare(self._found, self._current, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        if self._found is not None:
            state = self._target.filled(self._found, self._current, checkpoint)
            self._value.load_state_dict(state)


def _can_fill(own: Any, value: Any) -> bool:
    """Returns True if a part of a live subclass takes the value: a value that is a tensor itself is built anew."""
    return not isinstance(own, torch.Tensor) or not (own.is_meta or isinstance(value, torch.Tensor))


class RankLocalEntry:
    """A `RankLocal`: small tensors travel with its plain data, large ones as tensors named by their content."""

    def __init__(self, fqn: str, value: RankLocal) -> None:
        self.fqn = fqn
        self._holder = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None
        self._current: dict[str, Any] = {}
        """Leaves of the value that stay where something is left out."""

    def collect(self) -> EntryContents:
        state = self._state()
        contents = contents_of(state, self.fqn, "rank")
        for fqn, value in leaves(state, self.fqn).items():
            if is_sharded(value):
                advice = "put it into the state outside of RankLocal, or its to_local() into RankLocal"
                raise unsupported(fqn, f"a {type(value).__name__}, which is not a value of one rank's own", advice)
        return contents._replace(names=contents.names | {self.fqn})

    def _state(self) -> Any:
        value = self._holder.value
        return value.state_dict() if is_stateful(value) else value

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        found = checkpoint.entry_tree(self.fqn)
        self._found = None
        if found is None:
            return Expectation([], set(), [not_stored(self.fqn)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = leaves(found.tree, found.fqn)
        claims = set(map(checkpoint.rename, values))
        if is_stream_tree(found.tree):
            return Expectation([], claims, [Problem("conflict", self.fqn, f"{self.fqn}: {ONLY_FOR_LOADERS}")])
        missing = [value for value in values.values() if isinstance(value, RankMissing)]
        if missing and self._holder.missing == "keep":
            return Expectation([], claims, [])
        if missing:
            return Expectation([], claims, [rank_missing(self.fqn, missing[0].num_saved)])
        self._found = found
        if not all(map(checkpoint.takes, values)) and not self._current:
            state = self._state()
            self._current, self._target.own = leaves(state, self.fqn), subclasses_in(state, self.fqn)
        return self._target.expect(found, {}, checkpoint)

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        if self._found is not None:
            self._target.prepare(self._found, {}, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        if self._found is None:
            return
        value = self._target.filled(self._found, self._current, checkpoint)
        if is_stateful(self._holder.value):
            self._holder.value.load_state_dict(value)
        else:
            self._holder.value = value


class RngState:
    """The random number generators of this process, for the state of a save or a load: `{"rng": bcp.RngState()}`.

    Those that Python's `random`, `numpy.random` and torch use where no other is passed, the latter for the host and,
    where this process has used CUDA, for its devices. It holds nothing: a save reads the generators, a load sets them.

    Every rank's are saved, and a rank gets back those of the rank of the same number. On a larger number of ranks those
    that have none keep what they have, so seed each rank differently before loading; on a smaller number the generators
    of the other ranks are left alone. What was the current CUDA device sets the one that is now, others go by number;
    on a process without them a warning says that they are left out.

    Generators of your own have states of their own: save `generator.get_state()` in a `RankLocal`.
    """

    def __repr__(self) -> str:
        return "RngState(python, numpy, torch, and CUDA where it is used)"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the generators. A save calls this."""
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  it is the old generator that is global
            "torch": torch.get_rng_state(),
        }
        # Asking for the state of a device that was never used would make a context on it, hundreds of megabytes each.
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices = [generator.get_state() for generator in torch.cuda.default_generators]
            state["cuda"] = {"current": torch.cuda.current_device(), "devices": devices}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators. A load calls this."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            _set_cuda(state["cuda"]["current"], state["cuda"]["devices"])


def _set_cuda(current: int, devices: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count()
    for number in range(min(len(devices), num_devices)):
        torch.cuda.set_rng_state(devices[number], number)
    if num_devices:
        torch.cuda.set_rng_state(devices[current])
    if len(devices) > num_devices:
        warnings.warn(
            f"random numbers of {len(devices)} CUDA devices were saved, and this process has {num_devices}: those of "
            "the others are left out",
            stacklevel=2,
        )
