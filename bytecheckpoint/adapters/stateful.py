"""Objects that bring their own state_dict and load_state_dict (schedulers, data loaders, wrappers), and `RankLocal`.

Their state is a tree of plain data and tensors whose structure the checkpoint defines: a fresh object may not have
any of it yet. Tensors that the object shows are loaded in place, others are created on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from bytecheckpoint.adapters.plain_data import TensorRef, content_fqn, encode_plain, fits_inline, leaves, with_leaves
from bytecheckpoint.adapters.stored import (
    PER_RANK_NAME,
    Contents,
    Expectation,
    Problem,
    RankMissing,
    Stored,
    StoredTensor,
    StoredTree,
    not_stored,
    placeholder,
    rank_missing,
    shares_elements,
)
from bytecheckpoint.adapters.stored_subclasses import partly_taken, refusals, unbuildable
from bytecheckpoint.adapters.subclass_facts import FACTS
from bytecheckpoint.adapters.subclasses import around, is_facts, outer_fqn, restored, subclasses_in
from bytecheckpoint.adapters.tensors import LocalShard, LocalShards, dtype_name, unsupported


class Stateful(Protocol):
    """Anything that gives out its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def is_stateful(value: Any) -> bool:
    """Whether an object, which is no tensor or container, brings its own state_dict and load_state_dict."""
    if isinstance(value, type | dict | torch.Tensor):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class RankLocal:
    """Marks state that differs from rank to rank, as that of random number generators and data loaders does.

    `value` is plain data, tensors, or an object with state_dict() and load_state_dict(); every rank's is kept. `load`
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


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor | ShardedTensor)


def keep_for_rank(shards: LocalShards, fqn: str, tensor: torch.Tensor) -> str | torch.Tensor:
    """What stands in the tree for a tensor that may differ from rank to rank.

    Small ones travel in the tree. Large ones are added to the shards, named by their content, so that equal tensors of
    several ranks are replicas of one and different ones do not meet; those that are spread over ranks keep their name.
    """
    if fits_inline(tensor):
        return tensor
    name = fqn if is_sharded(tensor) else content_fqn(fqn, tensor)
    shards.add(name, tensor)
    return name


class TreeTarget:
    """The tensors of a stored tree on their way to an object: the object's own where they fit, else new ones."""

    def __init__(self) -> None:
        self._new: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        """The object's own tensor subclasses whose inner tensors are among its tensors, by FQN."""
        self.kept: dict[str, torch.Tensor] = {}
        """Those of them that stay as they are."""

    def shards(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> list[LocalShard]:
        """Where the tensors of the tree go; new ones are on the meta device before `prepare`."""
        shards = LocalShards()
        for name, found in self._refs(tree, fqn, stored):
            own = current.get(name)
            target = own if _fits(own, found) else self._new.get(name)
            shards.add(name, placeholder(found) if target is None else target)
        return shards.found

    def prepare(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> None:
        for name, found in self._refs(tree, fqn, stored):
            own = current.get(name)
            if not _fits(own, found):
                device = own.device if isinstance(own, torch.Tensor) and not own.is_meta else "cpu"
                self._new[name] = torch.empty_like(placeholder(found), device=device)

    def filled(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> Any:
        """The tree with tensors in place of references; what include and exclude leave out is as in `current`."""
        new = {}
        values = leaves(tree, fqn)
        for name, value in values.items():
            state_name = stored.rename(name)
            if isinstance(value, TensorRef):
                new[name] = self._new.get(state_name, current.get(state_name))
            elif not stored.takes(name) or isinstance(value, RankMissing):
                new[name] = current.get(state_name)
        filled = with_leaves(tree, fqn, new)
        if not any(map(is_facts, values)):
            return filled
        live = {**dict.fromkeys(self.left_out(tree, fqn, stored)), **self.live}
        return restored(filled, fqn, live, left=self._unbuildable(values, stored).keys())

    def left_out(self, tree: Any, fqn: str, stored: Stored) -> set[str]:
        """The subclasses, by checkpoint FQN, that would have to be built without what include and exclude leave out."""
        return {name for name in partly_taken(leaves(tree, fqn), stored) if _state_fqn(name, stored) not in self.live}

    def problems(self, tree: Any, fqn: str, stored: Stored) -> list[Problem]:
        """Which subclasses in the tree cannot be built."""
        return list(self._unbuildable(leaves(tree, fqn), stored).values())

    def _unbuildable(self, values: Mapping[str, Any], stored: Stored) -> dict[str, Problem]:
        not_built = partly_taken(values, stored)
        found = unbuildable(values, stored)
        return {
            name: problem
            for name, problem in found.items()
            if name not in not_built and _state_fqn(name, stored) not in self.live
        }

    def _refs(self, tree: Any, fqn: str, stored: Stored) -> list[tuple[str, StoredTensor]]:
        """State FQN and stored tensor of every reference in the tree that the load takes."""
        values = leaves(tree, fqn)
        left = self.left_out(tree, fqn, stored)
        sources = [name for name, value in values.items() if isinstance(value, TensorRef) and not around(name, left)]
        names = [name for name in map(stored.rename, sources) if not around(name, self.kept)]
        return [(name, stored.tensors[name]) for name in names if name in stored.tensors]


def _state_fqn(fqn: str, stored: Stored) -> str:
    """What a subclass of this checkpoint FQN is called in the state: what its facts are called says so."""
    return outer_fqn(stored.rename(f"{fqn}.{FACTS}"))


def _fits(own: Any, found: StoredTensor) -> TypeGuard[torch.Tensor]:
    """Whether what an object shows can be filled: the checkpoint, not a fresh object, says what tensors are like."""
    if not isinstance(own, torch.Tensor) or is_sharded(own):
        return isinstance(own, torch.Tensor)
    is_same = (tuple(own.shape), dtype_name(own.dtype)) == (found.shape, found.dtype)
    return is_same and not own.is_meta and own.layout is torch.strided and not shares_elements(own)


class StatefulEntry:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, fqn: str, value: Stateful) -> None:
        self.fqn = fqn
        self._value = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None
        self._current: dict[str, Any] = {}

    def collect(self) -> Contents:
        state = self._value.state_dict()
        shards = LocalShards()
        may_differ = self.fqn.partition(".")[0] == PER_RANK_NAME
        plain = encode_plain(state, self.fqn, partial(keep_for_rank, shards) if may_differ else shards.add)
        names = set(leaves(state, self.fqn))
        if may_differ:
            names.update(shard.fqn for shard in shards.found)
        return Contents(shards.found, names, {self.fqn: ("either" if may_differ else "whole", plain)})

    def expect(self, stored: Stored) -> Expectation:
        if not self._current:
            state = self._value.state_dict()
            self._current, self._target.live = leaves(state, self.fqn), subclasses_in(state, self.fqn)
        found = stored.entry_tree(self.fqn)
        self._found = None
        if found is None:
            text = f"{self.fqn}: the state of this {type(self._value).__name__} is not in the checkpoint"
            return Expectation([], set(), [Problem("missing_key", self.fqn, text)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = {stored.rename(name): value for name, value in leaves(found.tree, found.fqn).items()}
        missing = [rank_missing(name, value.num_saved) for name, value in values.items() if _is_missing(value)]
        if missing:
            return Expectation([], set(values), missing)
        self._found = found
        problems = self._settle_subclasses(values, stored)
        own = {name: value for name, value in self._current.items() if isinstance(value, torch.Tensor)}
        own = {name: value for name, value in own.items() if not around(name, self._target.kept)}
        problems += [not_stored(name) for name in own if not isinstance(values.get(name), TensorRef | torch.Tensor)]
        problems += self._target.problems(found.tree, found.fqn, stored)
        return Expectation(self._target.shards(found.tree, found.fqn, self._current, stored), set(values), problems)

    def _settle_subclasses(self, values: Mapping[str, Any], stored: Stored) -> list[Problem]:
        """Of the object's own tensor subclasses, those that do not fit are made anew. One that is spread over ranks, or
        of which nothing else is there to make, stays as it is: why is returned.
        """
        live = self._target.live
        own = {name: value for name, value in self._current.items() if around(name, live)}
        refused = refusals(own, stored)
        problems: list[Problem] = []
        for name, tensor in list(live.items()):
            if not refused.has(f"{name}.") and all(
                _can_fill(own[part], values.get(part)) for part in own if around(part, {name})
            ):
                continue
            is_there = name in values or any(around(part, {name}) for part in values)
            parts = [part for part in {*own, *values} if around(part, {name})]
            if not is_sharded(tensor) and is_there and not any(map(stored.skips, parts)):
                del live[name]
                self._current = {key: value for key, value in self._current.items() if not around(key, {name})}
                continue
            self._target.kept[name] = tensor
            problems += [problem for problem in refused.problems if around(problem.fqn, {name})]
        return problems

    def prepare(self, stored: Stored) -> None:
        if self._found is not None:
            self._target.prepare(self._found.tree, self._found.fqn, self._current, stored)

    def finish(self, stored: Stored) -> None:
        if self._found is not None:
            state = self._target.filled(self._found.tree, self._found.fqn, self._current, stored)
            self._value.load_state_dict(state)


def _can_fill(own: Any, value: Any) -> bool:
    """Whether what is inside of a live subclass takes what the tree has: what the tree holds itself is built anew."""
    return not isinstance(own, torch.Tensor) or not (own.is_meta or isinstance(value, torch.Tensor))


def _is_missing(value: Any) -> TypeGuard[RankMissing]:
    return isinstance(value, RankMissing)


class RankLocalEntry:
    """A `RankLocal`: small tensors travel with its plain data, large ones as tensors named by their content."""

    def __init__(self, fqn: str, value: RankLocal) -> None:
        self.fqn = fqn
        self._holder = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None

    def collect(self) -> Contents:
        shards = LocalShards()

        def on_tensor(fqn: str, tensor: torch.Tensor) -> str | torch.Tensor:
            if is_sharded(tensor):
                advice = "put it into the state outside of RankLocal, or its to_local() into RankLocal"
                raise unsupported(fqn, f"a {type(tensor).__name__}, which is no value of one rank's own", advice)
            return keep_for_rank(shards, fqn, tensor)

        value = self._holder.value
        state = value.state_dict() if is_stateful(value) else value
        plain = encode_plain(state, self.fqn, on_tensor)
        names = {self.fqn, *leaves(state, self.fqn), *(shard.fqn for shard in shards.found)}
        return Contents(shards.found, names, {self.fqn: ("rank", plain)})

    def expect(self, stored: Stored) -> Expectation:
        found = stored.entry_tree(self.fqn)
        self._found = None
        if found is None:
            return Expectation([], set(), [not_stored(self.fqn)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = leaves(found.tree, found.fqn)
        claims = set(map(stored.rename, values))
        missing = [value for value in values.values() if _is_missing(value)]
        if missing and self._holder.missing == "keep":
            return Expectation([], claims, [])
        if missing:
            return Expectation([], claims, [rank_missing(self.fqn, missing[0].num_saved)])
        self._found = found
        return Expectation(
            self._target.shards(found.tree, found.fqn, {}, stored),
            claims,
            self._target.problems(found.tree, found.fqn, stored),
        )

    def prepare(self, stored: Stored) -> None:
        if self._found is not None:
            self._target.prepare(self._found.tree, self._found.fqn, {}, stored)

    def finish(self, stored: Stored) -> None:
        if self._found is None:
            return
        value = self._target.filled(self._found.tree, self._found.fqn, {}, stored)
        if is_stateful(self._holder.value):
            self._holder.value.load_state_dict(value)
        else:
            self._holder.value = value
