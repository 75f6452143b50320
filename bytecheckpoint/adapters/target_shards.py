"""The shards that a load fills, with their columns: each step asks for one thing of perhaps 100,000 of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.region import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


class TargetShards(Sequence[LocalShard]):
    """Shards that do not change."""

    def __init__(self, records: Sequence[LocalShard]) -> None:
        self._records = records
        columns = zip(*records, strict=True) if records else ((),) * len(LocalShard._fields)
        self.fqns: Sequence[str]
        self.dtypes: Sequence[str]
        self.global_shapes: Sequence[tuple[int, ...]]
        self.regions: Sequence[Region]
        self.tensors: Sequence[torch.Tensor]
        self._owners: Sequence[torch.Tensor | None]
        self.fqns, self.dtypes, self.global_shapes, self.regions, self.tensors, *others = columns
        addresses, self._owners, lengths = others
        self.addresses: Int64s = np.array(addresses, np.int64)
        self.byte_lengths: Int64s = np.array(lengths, np.int64)
        """Bytes of each shard that has an address."""

    @classmethod
    def of(cls, shards: Sequence[LocalShard]) -> TargetShards:
        """Returns the shards with their columns: themselves, if they have them already."""
        return shards if isinstance(shards, TargetShards) else cls(shards)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[LocalShard]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> LocalShard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalShard]: ...
    def __getitem__(self, index: int | slice) -> LocalShard | Sequence[LocalShard]:
        return self._records[index]

    @cached_property
    def without_address(self) -> list[int]:
        """Indices of the shards without an address."""
        return np.flatnonzero(self.addresses == 0).tolist()

    @cached_property
    def tensors_without_address(self) -> list[torch.Tensor]:
        """The tensors of the shards without an address."""
        return [self.tensors[number] for number in self.without_address]

    @cached_property
    def owners(self) -> list[torch.Tensor]:
        """The state's own tensors, such as DTensors, whose version counters are not those of the filled memory."""
        return [owner for owner in self._owners if owner is not None]
