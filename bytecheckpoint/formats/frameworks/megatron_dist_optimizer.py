"""Optimizer state as Megatron wrote it up to 0.14. A tensor of shape (X, Y) that is cut into a grid of F = (X/x, Y/y)
parts of shape (x, y) is stored with the shape (X/x, Y/y, x * y), its last axis cut where the ranks' ranges end. The
true shape stands in the metadata, under `mcore_data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.plain_values import SizeValue
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import Region, split_flat_range

_MCORE, _SHAPE = "mcore_data", "nd_reformulated_orig_global_shape"


def unstacked_shape(
    attributes: Mapping[str, Any], fqn: str, stored: Sequence[int], path: str
) -> tuple[int, ...] | None:
    """Returns the true shape of a tensor that is stored in this way; None for every other.

    Raises CheckpointCorruptError (bad_manifest) where the stored shape cannot be one of it.
    """
    all_facts = attributes.get(_MCORE)
    facts = all_facts.get(fqn) if isinstance(all_facts, dict) else None
    found = facts.get(_SHAPE) if isinstance(facts, dict) else None
    if found is None:
        return None
    shape = found.lengths if isinstance(found, SizeValue) else found
    is_shape = isinstance(shape, tuple | list) and all(type(length) is int and length >= 0 for length in shape)
    if not is_shape or len(stored) != len(shape) + 1 or 0 in stored or any(map(int.__mod__, shape, stored)):
        raise damaged(path, f"{fqn!r:.200} is said to be of shape {shape!r:.80}, and is stored as {list(stored)}")
    if prod(shape) != prod(stored):
        raise damaged(path, f"{fqn!r:.200} is said to be of shape {shape!r:.80}, and is stored as {list(stored)}")
    return tuple(shape)


def unstacked(chunk: Chunk, stored: Sequence[int], shape: Sequence[int], item_bytes: int) -> Iterator[Chunk]:
    """Yields the chunk's bytes as chunks of the true tensor: of each part in it, the ranges that it holds."""
    part = tuple(map(int.__floordiv__, shape, stored))
    *counts, length = chunk.region.lengths
    *firsts, start = chunk.region.offsets
    at = chunk.byte_offset
    for indices in product(*(range(first, first + count) for first, count in zip(firsts, counts, strict=True))):
        corner = tuple(map(int.__mul__, indices, part))
        for region in split_flat_range(part, start, length):
            num_bytes = region.numel * item_bytes
            yield Chunk(
                Region(tuple(map(int.__add__, corner, region.offsets)), region.lengths), chunk.file, at, num_bytes
            )
            at += num_bytes
