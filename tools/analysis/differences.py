"""Records of the differences between two checkpoints, which `bcp diff` prints."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .value_difference import ValueDifference


class TensorDifference(NamedTuple):
    """A tensor that both checkpoints have, and that is not the same."""

    fqn: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    values: ValueDifference | None
    """None if the values cannot be compared."""
    problems: Sequence[str]
    """Some of `shape`, `dtype`, `values`; empty if all is within the tolerance."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the first tensor."""
        return prod(self.shapes[0])

    @property
    def first_index(self) -> list[int] | None:
        """Index of the first element that differs."""
        first = self.values.first if self.values else None
        return [int(at) for at in np.unravel_index(first.position, self.shapes[0])] if first else None


class ObjectDifference(NamedTuple):
    """A plain value that is not the same, or that only one checkpoint has."""

    fqn: str
    rank: int | None
    only_in: str | None
    """`a`, `b`, or None if both have it."""
    values: tuple[Any, Any]
    """Values as JSON can hold them."""
    texts: tuple[str, str]


class CheckpointDiff(NamedTuple):
    """All differences."""

    only_in_a: Sequence[str]
    """Names of tensors."""
    only_in_b: Sequence[str]
    num_tensors: int
    """Number of tensors that both have."""
    tensors: Sequence[TensorDifference]
    objects: Sequence[ObjectDifference]
    num_objects: int
    """Number of plain values that either has."""
    num_bytes_read: int
    """Bytes read of both."""
    num_bytes_same: int
    """Bytes of the first one that were not read: both manifests have the same checksums for them."""
    seconds: float

    @property
    def is_same(self) -> bool:
        differing = any(tensor.problems for tensor in self.tensors)
        return not (self.only_in_a or self.only_in_b or differing or self.objects)
