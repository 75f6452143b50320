"""Tensors and plain data in nested dicts, lists and tuples: filled in place, down to the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bytecheckpoint.adapters.plain_data import SMALL_TENSOR_BYTES, TensorRef, encode_plain, leaves, with_leaves
from bytecheckpoint.adapters.stateful import TreeTarget
from bytecheckpoint.adapters.stored import (
    PER_RANK_NAME,
    Contents,
    Expectation,
    Problem,
    RankMissing,
    Scope,
    Stored,
    rank_missing,
)
from bytecheckpoint.adapters.tensors import LocalShard, local_shards


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
        return self._may_differ and type(tensor) is torch.Tensor and tensor.nbytes <= SMALL_TENSOR_BYTES

    def expect(self, stored: Stored) -> Expectation:
        expectation = Expectation([], set(), [])
        for fqn, value in leaves(self._value, self.fqn).items():
            if stored.skips(fqn):
                continue
            found = stored.plain.get(fqn)
            if self._adopts(value, fqn, stored):
                expectation.shards.extend(self._adopted.shards(stored.tree_at(fqn), fqn, {}, stored))
                expectation.claims.update(map(stored.rename, leaves(stored.tree_at(fqn), fqn)))
            elif isinstance(value, torch.Tensor) and not isinstance(found, torch.Tensor):
                expectation.shards.extend(local_shards(fqn, value))
            elif isinstance(found, RankMissing):
                expectation.problems.append(rank_missing(fqn, found.num_saved))
            elif fqn not in stored.plain or isinstance(found, TensorRef):
                where = "a tensor in the checkpoint, plain data in the state" if found else "not in the checkpoint"
                expectation.problems.append(Problem("missing_key", fqn, f"{fqn}: {where}"))
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
            found = stored.plain.get(fqn)
            if self._adopts(value, fqn, stored):
                value.update(self._adopted.filled(stored.tree_at(fqn), fqn, {}, stored))
                continue
            if stored.skips(fqn) or fqn not in stored.plain or isinstance(found, TensorRef | RankMissing):
                continue
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and value.shape == found.shape:
                value.detach().copy_(found)
            else:
                new[fqn] = found
        if new:
            self._assign(with_leaves(self._value, self.fqn, new))
