"""What differs between two checkpoints, as records: what `bcp diff` finds, prints and gives as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from .value_difference import Difference


class TensorDifference(NamedTuple):
    """A tensor that both checkpoints have, and that is not the same."""

    fqn: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    values: Difference | None
    """None where the values cannot be compared."""
    problems: Sequence[str]
    """Of `shape`, `dtype`, `values`; none where all is within the tolerance."""

    @property
    def num_elements(self) -> int:
        """Of the first one."""
        return prod(self.shapes[0])

    @property
    def first_index(self) -> list[int] | None:
        """Of the first element that differs."""
        first = self.values.first if self.values else None
        return index_of(first.position, self.shapes[0]) if first else None


class ObjectDifference(NamedTuple):
    """A plain value that is not the same, or that only one checkpoint has."""

    fqn: str
    rank: int | None
    only_in: str | None
    """`a`, `b`, or None where both have it."""
    values: tuple[Any, Any]
    """As JSON has them."""
    texts: tuple[str, str]


class Result(NamedTuple):
    """All that differs."""

    only_in_a: Sequence[str]
    """Tensors by name."""
    only_in_b: Sequence[str]
    num_tensors: int
    """That both have."""
    tensors: Sequence[TensorDifference]
    objects: Sequence[ObjectDifference]
    num_objects: int
    """That either has."""
    num_bytes_read: int
    """Of both."""
    num_bytes_same: int
    """Of the first one, not read: both manifests have the same checksums for them."""
    seconds: float

    @property
    def is_same(self) -> bool:
        differing = any(tensor.problems for tensor in self.tensors)
        return not (self.only_in_a or self.only_in_b or differing or self.objects)


def flat_position(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number, row-major, of the element at an index."""
    position = 0
    for at, length in zip(index, shape, strict=True):
        position = position * length + at
    return position


def index_of(position: int, shape: Sequence[int]) -> list[int]:
    """The index of an element by its number, row-major."""
    index = []
    for length in reversed(shape):
        position, at = divmod(position, length)
        index.append(at)
    return index[::-1]
