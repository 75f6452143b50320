"""Compares two checkpoints: names, shapes, dtypes, values, plain data. It needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from bytecheckpoint.checkpoint import read_whole
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest.manifest import Described
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.options import LoadOptions

from ..arguments import Opened
from .named_values import NamedValues, ValueKey, is_same, named_values
from .summary import NaturalOrder, in_natural_order, plain_value
from .tensor_diff import ReadAs, TensorDiff, TensorPair
from .value_difference import Tolerance, ValueDifference, can_compare


class TensorDifference(NamedTuple):
    """A tensor that both checkpoints have and that differs, even if only within the tolerance."""

    fqn: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    values: ValueDifference | None
    """None if the values cannot be compared."""
    problems: Sequence[str]
    """Some of `shape`, `dtype`, `values`; empty if all is within the tolerance."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor in the first checkpoint."""
        return prod(self.shapes[0])

    @property
    def first_index(self) -> list[int] | None:
        """Index of the first element that differs by more than the tolerance; None if none does, or if the values were
        not compared.
        """
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
    """Names of the tensors that only A has."""
    only_in_b: Sequence[str]
    num_tensors: int
    """Number of tensors that both have."""
    tensors: Sequence[TensorDifference]
    objects: Sequence[ObjectDifference]
    num_objects: int
    """Number of plain values; one that both have counts once."""
    num_bytes_read: int
    """Bytes of the elements that were read, of both checkpoints, before compression."""
    num_bytes_same: int
    """Bytes of elements of A, before compression, that were not read: both manifests have the same checksums
    for them."""
    seconds: float

    @property
    def is_same(self) -> bool:
        differing = any(tensor.problems for tensor in self.tensors)
        return not (self.only_in_a or self.only_in_b or differing or self.objects)


def compare_checkpoints(
    a: Opened,
    b: Opened,
    *,
    read_as: ReadAs,
    tolerance: Tolerance | None,
    ignore_dtype: bool,
    is_wanted: Callable[[str], bool],
    threads: int,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> CheckpointDiff:
    """Returns all differences under the wanted names, of tensors also those within the tolerance. Without a tolerance
    every bit counts, but tensors of two dtypes are compared by value. `progress` gets the number of bytes to compare,
    of both checkpoints, and returns a context that counts them.

    Raises the errors of a load.
    """
    started = time.monotonic()
    all_a, all_b = named_values(a.manifest, is_wanted), named_values(b.manifest, is_wanted)
    named_a, named_b = _with_small_tensors(all_a, a, all_b), _with_small_tensors(all_b, b, all_a)
    parts = read_as.parts
    named_a = named_a._replace(tensors={fqn: name for fqn, name in named_a.tensors.items() if name not in parts})
    common = in_natural_order(named_a.tensors.keys() & named_b.tensors.keys())
    pairs = {fqn: TensorPair(named_a.tensors[fqn], named_b.tensors[fqn]) for fqn in common}
    same_shape = [pair for pair in pairs.values() if a.manifest.describe(pair.a)[1] == b.manifest.describe(pair.b)[1]]
    comparison = TensorDiff(a, b, same_shape, read_as=read_as, tolerance=tolerance)
    num_bytes = comparison.num_bytes
    with progress(num_bytes) as on_progress:
        compared = comparison.run(threads=threads, on_progress=on_progress)
    tensors = [
        _difference(fqn, comparison.describe(pair), compared.differences.get(pair), ignore_dtype=ignore_dtype)
        for fqn, pair in pairs.items()
    ]
    return CheckpointDiff(
        only_in_a=in_natural_order(named_a.tensors.keys() - named_b.tensors.keys()),
        only_in_b=in_natural_order(named_b.tensors.keys() - named_a.tensors.keys()),
        num_tensors=len(common),
        tensors=[tensor for tensor in tensors if tensor.problems or (tensor.values and tensor.values.max_abs)],
        objects=_object_differences(named_a, named_b, tolerance),
        num_objects=len(named_a.values.keys() | named_b.values.keys()),
        num_bytes_read=num_bytes,
        num_bytes_same=compared.num_bytes_same,
        seconds=time.monotonic() - started,
    )


def _with_small_tensors(named: NamedValues, opened: Opened, other: NamedValues) -> NamedValues:
    """Reads the tensors that the other checkpoint has among its plain values, under one name and shape. Returns the
    contents with these among the values and no more among the tensors.
    """
    values = {fqn: other.values.get(ValueKey(fqn, None)) for fqn in named.tensors}
    shapes = {fqn: tuple(value.shape) for fqn, value in values.items() if isinstance(value, torch.Tensor)}
    stored = {fqn: named.tensors[fqn] for fqn in shapes}
    small = {fqn: name for fqn, name in stored.items() if opened.manifest.describe(name)[1] == shapes[fqn]}
    if not small:
        return named
    source = Source(opened.store, opened.folder, opened.manifest, LoadOptions(), is_exchanged=False, path=opened.path)
    read = read_whole(source, list(dict.fromkeys(small.values())))
    tensors = {fqn: name for fqn, name in named.tensors.items() if fqn not in small}
    return NamedValues(tensors, named.values | {ValueKey(fqn, None): read[name] for fqn, name in small.items()})


def _difference(
    fqn: str, described: Sequence[Described], values: ValueDifference | None, *, ignore_dtype: bool
) -> TensorDifference:
    """Returns the difference of two tensors; `values` is None if their shapes or dtypes allow no comparison."""
    (dtype_a, shape_a), (dtype_b, shape_b) = described
    problems = []
    if shape_a != shape_b:
        problems.append("shape")
    if dtype_a != dtype_b and not (ignore_dtype and can_compare(dtype_a, dtype_b)):
        problems.append("dtype")
    if values is not None and values.num_differing:
        problems.append("values")
    return TensorDifference(fqn, (dtype_a, dtype_b), (shape_a, shape_b), values, problems)


def _object_differences(a: NamedValues, b: NamedValues, tolerance: Tolerance | None) -> list[ObjectDifference]:
    found = []
    for place in a.values.keys() | b.values.keys():
        only_in = "b" if place not in a.values else "a" if place not in b.values else None
        if only_in is None and is_same(a.values[place], b.values[place], tolerance):
            continue
        (json_a, text_a), (json_b, text_b) = _shown(a, place), _shown(b, place)
        found.append(ObjectDifference(*place, only_in, (json_a, json_b), (text_a, text_b)))
    order = NaturalOrder(item.fqn for item in found)
    return sorted(found, key=lambda item: (order.key(item.fqn), -1 if item.rank is None else item.rank))


def _shown(side: NamedValues, place: ValueKey) -> tuple[Any, str]:
    """Returns a value as JSON can hold it, and as text; None and `-` for a side without it."""
    if place not in side.values:
        return None, "-"
    value = side.values[place]
    return plain_value(value) if not isinstance(value, TensorRef) else (f"tensor {value.fqn}", f"tensor {value.fqn}")
