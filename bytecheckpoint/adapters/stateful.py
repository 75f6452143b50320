"""Objects that bring their own state_dict and load_state_dict (schedulers, data loaders, wrappers), and `RankLocal`.

Their state is a tree of plain data and tensors whose structure the checkpoint defines: a fresh object may not have
any of it yet. Tensors that the object shows are loaded in place, others are created on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

from bytecheckpoint.adapters.plain_data import TensorRef, encode_plain, fits_inline, leaves, with_leaves
from bytecheckpoint.adapters.stored import (
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
)
from bytecheckpoint.adapters.tensors import LocalShard, local_shards


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


class TreeTarget:
    """The tensors of a stored tree on their way to an object: the object's own where it has them, else new ones."""

    def __init__(self) -> None:
        self._new: dict[str, torch.Tensor] = {}

    def shards(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> list[LocalShard]:
        """Where the tensors of the tree go; new ones are on the meta device before `prepare`."""
        shards: list[LocalShard] = []
        for name, found in _refs(tree, fqn, stored):
            own = current.get(name)
            target = own if isinstance(own, torch.Tensor) else self._new.get(name)
            shards += local_shards(name, placeholder(found) if target is None else target)
        return shards

    def prepare(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> None:
        for name, found in _refs(tree, fqn, stored):
            if not isinstance(current.get(name), torch.Tensor):
                self._new[name] = torch.empty_like(placeholder(found), device="cpu")

    def filled(self, tree: Any, fqn: str, current: Mapping[str, Any], stored: Stored) -> Any:
        """The tree with tensors in place of references; what include and exclude leave out is as in `current`."""
        new = {}
        for name, value in leaves(tree, fqn).items():
            state_name = stored.rename(value.fqn if isinstance(value, TensorRef) else name)
            if isinstance(value, TensorRef):
                new[name] = self._new.get(state_name, current.get(state_name))
            elif not stored.takes(name) or isinstance(value, RankMissing):
                new[name] = current.get(state_name)
        return with_leaves(tree, fqn, new)


def _refs(tree: Any, fqn: str, stored: Stored) -> list[tuple[str, StoredTensor]]:
    """State FQN and stored tensor of every reference in the tree that the load takes."""
    names = [stored.rename(value.fqn) for value in leaves(tree, fqn).values() if isinstance(value, TensorRef)]
    return [(name, stored.tensors[name]) for name in names if name in stored.tensors]


class StatefulEntry:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, fqn: str, value: Stateful) -> None:
        self.fqn = fqn
        self._value = value
        self._target = TreeTarget()
        self._current: dict[str, Any] = {}

    def collect(self) -> Contents:
        state = self._value.state_dict()
        shards: list[LocalShard] = []

        def on_tensor(fqn: str, tensor: torch.Tensor) -> TensorRef:
            shards.extend(local_shards(fqn, tensor))
            return TensorRef(fqn)

        plain = encode_plain(state, self.fqn, on_tensor)
        return Contents(shards, set(leaves(state, self.fqn)), {self.fqn: ("shared", plain)})

    def expect(self, stored: Stored) -> Expectation:
        if not self._current:
            self._current = leaves(self._value.state_dict(), self.fqn)
        found = stored.entry_tree(self.fqn)
        if found is None:
            text = f"{self.fqn}: the state of this {type(self._value).__name__} is not in the checkpoint"
            return Expectation([], set(), [Problem("missing_key", self.fqn, text)])
        if not found.is_taken:
            return Expectation([], set(), [])
        shards = self._target.shards(found.tree, found.fqn, self._current, stored)
        known = {shard.fqn for shard in shards}
        own = {name: value for name, value in self._current.items() if isinstance(value, torch.Tensor)}
        problems = [not_stored(name) for name in own if name not in known]
        return Expectation(shards, set(map(stored.rename, leaves(found.tree, found.fqn))), problems)

    def prepare(self, stored: Stored) -> None:
        found = stored.entry_tree(self.fqn)
        if found is not None and found.is_taken:
            self._target.prepare(found.tree, found.fqn, self._current, stored)

    def finish(self, stored: Stored) -> None:
        found = stored.entry_tree(self.fqn)
        if found is not None and found.is_taken:
            self._value.load_state_dict(self._target.filled(found.tree, found.fqn, self._current, stored))


class RankLocalEntry:
    """A `RankLocal`: small tensors travel with its plain data, large ones as tensors with the rank in their FQN."""

    def __init__(self, fqn: str, value: RankLocal) -> None:
        self.fqn = fqn
        self._holder = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None

    def collect(self) -> Contents:
        shards: list[LocalShard] = []

        def on_tensor(fqn: str, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
            if fits_inline(tensor):
                return tensor
            name = f"{fqn}@{self._rank()}"
            shards.extend(local_shards(name, tensor))
            return TensorRef(name)

        value = self._holder.value
        state = value.state_dict() if is_stateful(value) else value
        plain = encode_plain(state, self.fqn, on_tensor)
        return Contents(shards, {self.fqn}, {self.fqn: ("rank", plain)})

    @staticmethod
    def _rank() -> int:
        is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if is_group else 0

    def expect(self, stored: Stored) -> Expectation:
        found = stored.entry_tree(self.fqn)
        self._found = None
        if found is None:
            return Expectation([], set(), [not_stored(self.fqn)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = leaves(found.tree, found.fqn)
        # The large tensors of other ranks are nobody's here where there are fewer ranks than there were.
        of_any_rank = (name for name in stored.tensors if name.startswith((f"{self.fqn}.", f"{self.fqn}@")))
        claims = {*map(stored.rename, values), *of_any_rank}
        missing = [value for value in values.values() if isinstance(value, RankMissing)]
        if missing and self._holder.missing == "keep":
            return Expectation([], claims, [])
        if missing:
            return Expectation([], claims, [rank_missing(self.fqn, missing[0].num_saved)])
        self._found = found
        return Expectation(self._target.shards(found.tree, found.fqn, {}, stored), claims, [])

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
