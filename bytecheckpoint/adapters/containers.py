"""Tensors and plain data in nested dicts, lists and tuples: filled in place, down to the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bytecheckpoint.adapters.plain_data import TensorRef, encode_plain, fits_inline, join_fqn, leaves, with_leaves
from bytecheckpoint.adapters.stateful import TreeTarget
from bytecheckpoint.adapters.stored import (
    PER_RANK_NAME,
    Contents,
    Expectation,
    Problem,
    RankMissing,
    Scope,
    Stored,
    not_stored,
    rank_missing,
)
from bytecheckpoint.adapters.tensors import LocalShard, dtype_name, local_shards


class PlainEntry:
    """Tensors and plain data in nested dicts, lists and tuples."""

    def __init__(self, fqn: str, value: Any, assign: Callable[[Any], None]) -> None:
        self.fqn = fqn
        self._value = value
        self._assign = assign
        self._adopted = TreeTarget()
        self._may_differ = fqn.partition(".")[0] == PER_RANK_NAME

    def collect(self) -> Contents:
        shards: list[LocalShard] = []

        def on_tensor(fqn: str, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
            if self._is_inline(tensor):
                return tensor
            shards.extend(local_shards(fqn, tensor))
            return TensorRef(fqn)

        plain = encode_plain(self._value, self.fqn, on_tensor)
        is_bare_tensor = isinstance(self._value, torch.Tensor) and bool(shards)
        names = set(leaves(self._value, self.fqn))
        scope: Scope = "either" if self._may_differ else "shared"
        return Contents(shards, names, {} if is_bare_tensor else {self.fqn: (scope, plain)})

    def _is_inline(self, tensor: torch.Tensor) -> bool:
        """Small tensors that may differ between ranks travel with the plain data, so that each rank's is kept."""
        return self._may_differ and fits_inline(tensor)

    def expect(self, stored: Stored) -> Expectation:
        expectation = Expectation([], set(), [])
        for fqn, value in leaves(self._value, self.fqn).items():
            if stored.skips(fqn):
                continue
            found = stored.plain.get(fqn)
            is_inline = isinstance(found, torch.Tensor | RankMissing)
            if self._adopts(value, fqn, stored):
                expectation.shards.extend(self._adopted.shards(stored.tree_at(fqn), fqn, {}, stored))
                expectation.claims.update(map(stored.rename, leaves(stored.tree_at(fqn), fqn)))
            elif isinstance(value, torch.Tensor) and not is_inline:
                expectation.shards.extend(local_shards(fqn, value))
            else:
                expectation.problems.extend(_problems(fqn, value, stored))
            expectation.claims.add(fqn)
        return expectation

    def _adopts(self, value: Any, fqn: str, stored: Stored) -> bool:
        """An empty dict takes whatever the checkpoint has in its place."""
        return type(value) is dict and isinstance(stored.tree_at(fqn), dict)

    def prepare(self, stored: Stored) -> None:
        for fqn, value in leaves(self._value, self.fqn).items():
            if self._adopts(value, fqn, stored):
                self._adopted.prepare(stored.tree_at(fqn), fqn, {}, stored)

    def finish(self, stored: Stored) -> None:
        new: dict[str, Any] = {}
        for fqn, value in leaves(self._value, self.fqn).items():
            if stored.skips(fqn):
                continue
            if self._adopts(value, fqn, stored):
                value.update(_taken(self._adopted.filled(stored.tree_at(fqn), fqn, {}, stored), fqn, stored))
            elif not _problems(fqn, value, stored) and not _filled_in_place(value, stored.plain[fqn]):
                new[fqn] = stored.plain[fqn]
        if new:
            self._assign(with_leaves(self._value, self.fqn, new))


def _problems(fqn: str, value: Any, stored: Stored) -> list[Problem]:
    """Why the plain data of this FQN, small tensors included, cannot take the place of a value."""
    found = stored.plain.get(fqn)
    if isinstance(found, RankMissing):
        return [rank_missing(fqn, found.num_saved)]
    if fqn in stored.tensors or isinstance(found, TensorRef):
        return [Problem("missing_key", fqn, f"{fqn}: a tensor in the checkpoint, plain data in the state")]
    if fqn not in stored.plain:
        return [not_stored(fqn)]
    if not isinstance(found, torch.Tensor) or not isinstance(value, torch.Tensor):
        return []
    if value.shape != found.shape:
        text = f"{fqn}: shape {list(found.shape)} in the checkpoint, {list(value.shape)} in the state"
        return [Problem("shape", fqn, text)]
    if value.dtype != found.dtype:
        name, own_name = dtype_name(found.dtype), dtype_name(value.dtype)
        text = f"{fqn}: dtype {name} in the checkpoint, {own_name} in the state (small tensors here are not cast)"
        return [Problem("dtype", fqn, text)]
    return []


def _taken(tree: dict[Any, Any], fqn: str, stored: Stored) -> dict[Any, Any]:
    """The dict without what include and exclude leave out."""
    taken = {}
    for key, item in tree.items():
        child = join_fqn(fqn, key)
        if any(map(stored.takes, leaves(item, child))):
            taken[key] = _taken(item, child, stored) if type(item) is dict else item
    return taken


def _filled_in_place(value: Any, found: Any) -> bool:
    """Whether what was found could be put into the object that the state holds, which others may hold as well."""
    if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
        _copy_bits(found, value.detach())
    elif isinstance(value, np.ndarray) and _takes_array(value, found):
        value[...] = found
    elif type(value) is list and type(found) is list:
        value[:] = found
    else:
        return False
    return True


def _copy_bits(source: torch.Tensor, target: torch.Tensor) -> None:
    if target.element_size() == 1:  # torch cannot copy its sub-byte integers
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.copy_(source)


def _takes_array(value: np.ndarray, found: Any) -> bool:
    is_array = isinstance(found, np.ndarray) and value.flags.writeable
    return is_array and (value.shape, value.dtype) == (found.shape, found.dtype)
