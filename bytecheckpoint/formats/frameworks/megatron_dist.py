"""A folder of DCP that Megatron wrote (`torch_dist`): the values beside its tensors (a marker, arguments, counters,
schedules and random state), which releases put in different places and which have Megatron's names here; and the
optimizer state of releases up to 0.14.

In that optimizer state a tensor of shape (X, Y), cut into a grid of (X/x, Y/y) parts of shape (x, y), is stored with
the shape (X/x, Y/y, x * y), its last axis cut where the ranks' ranges end. The true shape stands in the metadata, under
`mcore_data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any

from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import damaged, missing_file, not_readable
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.megatron_globals import find_megatron_value
from bytecheckpoint.formats.plain_values import SizeValue
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import shifted, split_flat_range

MARKER_NAME, _COMMON_FILE = "metadata.json", "common.pt"
_COMMON_KEY = "common_state/shard_0_1"
_SHARDED_OBJECT = re.compile(r"/shard_[\d.]+_[\d.]+\Z")
_BACKEND, _READ_BACKEND = "sharded_backend", "torch_dist"
_MCORE, _SHAPE = "mcore_data", "nd_reformulated_orig_global_shape"
_MAX_MARKER_BYTES = 1 << 16
_OF_COMMON_STATE = frozenset({"args", "checkpoint_version", "content_metadata", "iteration"})
"""Keys of which Megatron's common state has at least one."""


def read_backend(source: SourceFolder) -> str | None:
    """Returns the backend with which Megatron has written the folder, as its marker says; None if it has no marker, or
    none that can be read.
    """
    if not 0 < (source.listing.get(MARKER_NAME) or 0) <= _MAX_MARKER_BYTES:
        return None
    try:
        marker = json.loads(source.reader(MARKER_NAME).read_all())
    except (ValueError, RecursionError):
        return None
    backend = marker.get(_BACKEND) if isinstance(marker, dict) else None
    return backend if isinstance(backend, str) else None


def has_common_state(source: SourceFolder) -> bool:
    """Returns True if the folder has a file of Megatron's common state, by what is in it. A marker is written last, so
    a folder may have this file alone; one of another program may have its name.
    """
    if _COMMON_FILE not in source.files:
        return False
    with suppress(CheckpointCorruptError, UnsafeCheckpointError):
        value = source.beside().open(_COMMON_FILE, find_megatron_value).value
        return isinstance(value, dict) and not _OF_COMMON_STATE.isdisjoint(value)
    return False


def refuse_other_backends(backend: str | None, path: str, *, has_metadata: bool) -> None:
    """Refuses a folder of `zarr` or the like (unsupported_version), and one without `.metadata` (missing_file)."""
    if backend is not None and backend != _READ_BACKEND:
        advice = "load it with Megatron and save it with --ckpt-format torch_dist"
        raise not_readable(path, f"Megatron wrote it as {backend!r:.80}", advice)
    if not has_metadata:
        raise missing_file(path, f"has no .metadata, and Megatron saved it as {backend}: its save did not finish")


def with_common_state(root: dict[Any, Any], source: SourceFolder) -> dict[Any, Any]:
    """Returns the state as Megatron has it: with each object taken out of the list of one in which files have it, and
    with the common state. Sets the builder's step from the common state.
    """
    state = {
        key: value[0] if _SHARDED_OBJECT.search(str(key)) and type(value) is list and len(value) == 1 else value
        for key, value in root.items()
    }
    common = state.pop(_COMMON_KEY, None)
    if _COMMON_FILE not in source.files and common is None:
        raise missing_file(
            source.path, f"has no {_COMMON_FILE}, in which are Megatron's arguments and its iteration", "it"
        )
    if not common and _COMMON_FILE in source.files:
        saved = source.open(_COMMON_FILE, find_megatron_value)
        common = saved.plain(saved.value, "")
    if not isinstance(common, dict):
        raise damaged(source.path, f"the common state of Megatron is not a dict but a {type(common).__name__}")
    for key, value in common.items():
        state.setdefault(key if key not in state else f"{_COMMON_KEY}.{key}", value)
    source.builder.set_step(common.get("iteration"))
    return state


def unstacked_shape(
    attributes: Mapping[str, Any], fqn: str, stored: Sequence[int], path: str
) -> tuple[int, ...] | None:
    """Returns the true shape of a tensor of optimizer state that is stored in parts; None for every other tensor.

    Raises CheckpointCorruptError (bad_manifest) where the stored shape cannot belong to it.
    """
    by_fqn = attributes.get(_MCORE)
    of_tensor = by_fqn.get(fqn) if isinstance(by_fqn, dict) else None
    shape = of_tensor.get(_SHAPE) if isinstance(of_tensor, dict) else None
    if shape is None:
        return None
    shape = shape.lengths if isinstance(shape, SizeValue) else shape
    is_shape = isinstance(shape, tuple | list) and all(type(length) is int and length >= 0 for length in shape)
    is_grid = is_shape and len(stored) == len(shape) + 1 and 0 not in stored
    if not is_grid or any(map(int.__mod__, shape, stored)) or prod(shape) != prod(stored):
        raise damaged(path, f"{fqn!r:.200} is said to be of shape {shape!r:.80}, and is stored as {list(stored)}")
    return tuple(shape)


def unstacked(chunk: Chunk, stored: Sequence[int], shape: Sequence[int], item_bytes: int) -> Iterator[Chunk]:
    """Yields the bytes of a chunk of the stored tensor as chunks of the true one. The last dimension of the stored one
    is the elements of a part of the true one, the others number the parts.
    """
    part = tuple(map(int.__floordiv__, shape, stored))
    *counts, length = chunk.region.lengths
    *firsts, start = chunk.region.offsets
    at = chunk.byte_offset
    for indices in product(*(range(first, first + count) for first, count in zip(firsts, counts, strict=True))):
        corner = tuple(map(int.__mul__, indices, part))
        for region in split_flat_range(part, start, length):
            num_bytes = region.numel * item_bytes
            yield Chunk(shifted(region, corner), chunk.file, at, num_bytes)
            at += num_bytes
