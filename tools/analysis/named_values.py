"""Lists the contents of a checkpoint by the names of the user's state: tensors, tied ones under each name, and plain
values, leaf by leaf. It reads only the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.data.stream_wire import LAYOUT_KEYS, is_loader_state
from bytecheckpoint.adapters.plain.manifest_trees import stored_leaves
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain, is_content_fqn
from bytecheckpoint.adapters.shards import dtype_name
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef

from .value_difference import TensorElements, Tolerance, find_difference


class ValueKey(NamedTuple):
    """Name and rank of a plain value."""

    fqn: str
    rank: int | None
    """The rank that saved it; None where all ranks have it in common."""


class NamedValues(NamedTuple):
    """Contents of a checkpoint by their names in the state."""

    tensors: dict[str, str]
    """FQN under which a tensor is stored, by each of its names."""
    values: dict[ValueKey, Any]
    """Leaves of plain data. A tensor of a single rank that lies in data files is a TensorRef."""


def named_values(manifest: Manifest, is_wanted: Callable[[str], bool]) -> NamedValues:
    """Returns the contents whose names are wanted.

    Tensors that are stored under a hash of their content get their names in the state. Which rank saved a stream of a
    data loader is left out, as it is for tensors. Raises the errors of decoding plain data.
    """
    tensors = {fqn: fqn for fqn in manifest.tensors} | dict(manifest.aliases)
    values: dict[ValueKey, Any] = {}
    for place, value in _leaves(manifest):
        if not isinstance(value, TensorRef) or place.rank is not None:
            values[place] = value
        elif value.fqn in manifest.tensors:
            tensors[place.fqn] = value.fqn
        if isinstance(value, TensorRef) and value.fqn != place.fqn and is_content_fqn(value.fqn):
            tensors.pop(value.fqn, None)
    return NamedValues(
        {fqn: stored for fqn, stored in tensors.items() if is_wanted(fqn)},
        {place: value for place, value in values.items() if is_wanted(place.fqn)},
    )


def _leaves(manifest: Manifest) -> Iterator[tuple[ValueKey, Any]]:
    for fqn, data in manifest.objects.items():
        layout = {f"{fqn}.{key}" for key in LAYOUT_KEYS} if is_loader_state(data) else set()
        for leaf, value in stored_leaves(decode_plain(data), fqn).items():
            if leaf not in layout:
                yield ValueKey(leaf, None), value
    for fqn, by_rank in manifest.rank_objects.items():
        for rank, data in sorted(by_rank.items()):
            for leaf, value in stored_leaves(decode_plain(data), fqn).items():
                yield ValueKey(leaf, rank), value


def is_same(a: Any, b: Any, tolerance: Tolerance | None) -> bool:
    """Returns True if two plain values are the same: of one type, with the same bits and order of keys, or, with a
    tolerance, floats and arrays and tensors of floats within it, also in lists and dicts. Of a TensorRef only the name
    counts: a hash of the content is a part of it.
    """
    if type(a) is not type(b):
        return False
    if encode_plain(a, "") == encode_plain(b, ""):
        return True
    if tolerance is None:
        return False
    if isinstance(a, float):
        return _is_near(_scalar(a), _scalar(b), tolerance)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(is_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(is_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, torch.Tensor | np.ndarray | np.generic):
        return tuple(a.shape) == tuple(b.shape) and _is_near(_elements(a), _elements(b), tolerance)
    return False


def _is_near(a: TensorElements | None, b: TensorElements | None, tolerance: Tolerance) -> bool:
    if a is None or b is None or a.dtype != b.dtype:
        return False
    return not find_difference(a, b, tolerance).num_differing


def _scalar(value: float) -> TensorElements:
    return TensorElements("float64", memoryview(np.float64(value).tobytes()))


def _elements(value: Any) -> TensorElements | None:
    """Returns the elements of a tensor or array of floating point numbers; None for any other value."""
    if isinstance(value, torch.Tensor):
        is_float = value.is_floating_point()
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if is_float else b""
        return TensorElements(dtype_name(value.dtype), memoryview(content)) if is_float else None
    array = np.ascontiguousarray(value)
    name = array.dtype.newbyteorder("<").name if array.dtype.kind == "f" and array.dtype.itemsize <= 8 else None
    return TensorElements(name, memoryview(array.astype(array.dtype.newbyteorder("<")).tobytes())) if name else None
