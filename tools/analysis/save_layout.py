"""Sums up how a save has cut and spread a checkpoint: parts of tensors, chunks of files, bytes of ranks. A million
chunks stay columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from statistics import median
from typing import NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.manifest import Manifest, TensorRecord
from bytecheckpoint.region import grid_counts

_WHOLE = "whole"
_RANK = re.compile(r"-([0-9]{1,9})-[0-9]+\.safetensors\Z")


class CutTotals(NamedTuple):
    """Sums over tensors that are cut alike."""

    name: str
    """`whole`, parts along each dimension (`4 x 1`), or `irregular`."""
    num_tensors: int
    num_chunks: int
    num_bytes: int


class WriterBytes(NamedTuple):
    """Bytes that the ranks of a save have written."""

    num_ranks: int
    """Number of ranks that have written anything."""
    min_num_bytes: int
    median_num_bytes: float
    max_num_bytes: int


class CompressedBytes(NamedTuple):
    """Bytes that compression has saved."""

    num_chunks: int
    """Number of compressed chunks."""
    num_bytes: int
    """Bytes of all chunks, as stored."""
    raw_num_bytes: int
    """Bytes of all elements."""


def chunk_counts(manifest: Manifest) -> dict[str, int]:
    """Counts the chunks of each tensor."""
    return dict(zip(manifest.tensors, manifest.table.columns.num_chunks.tolist(), strict=True))


def chunks_by_file(manifest: Manifest) -> list[int]:
    """Counts the chunks of each file."""
    files = manifest.table.columns.files.astype(np.int64)
    counts: list[int] = np.bincount(files, minlength=len(manifest.files)).tolist()
    return counts


def cuts_of(manifest: Manifest) -> list[CutTotals]:
    """Sums up tensors by the way they are cut, most bytes first."""
    cuts: dict[str, CutTotals] = {}
    counts = chunk_counts(manifest)
    for fqn, part in _parts(manifest):
        dtype, shape = manifest.describe(fqn)
        name = _name_of(shape, part, counts[fqn])
        _, num_tensors, num_chunks, num_bytes = cuts.get(name, (name, 0, 0, 0))
        more_bytes = prod(shape) * itemsize(dtype)
        cuts[name] = CutTotals(name, num_tensors + 1, num_chunks + counts[fqn], num_bytes + more_bytes)
    return sorted(cuts.values(), key=lambda cut: (-cut.num_bytes, cut.name))


def _parts(manifest: Manifest) -> Iterator[tuple[str, Sequence[int] | None]]:
    """Yields each tensor with the lengths of a part if its chunks are a regular grid, else None."""
    columns = manifest.table.columns
    lengths = columns.grid_parts.tolist()
    bounds = pairwise([0, *np.cumsum(columns.num_dims * columns.is_grid).tolist()])
    for fqn, is_grid, (start, stop) in zip(manifest.tensors, columns.is_grid.tolist(), bounds, strict=True):
        yield fqn, lengths[start:stop] if is_grid else None


def _name_of(shape: Sequence[int], part: Sequence[int] | None, num_chunks: int) -> str:
    if num_chunks <= 1:
        return _WHOLE
    return "irregular" if part is None else " x ".join(map(str, grid_counts(shape, part)))


def writers_of(manifest: Manifest) -> WriterBytes | None:
    """Sums bytes by the ranks in the names of data files; None if a name has no rank, as in foreign formats."""
    by_rank: Counter[int] = Counter()
    for file in manifest.files:
        found = _RANK.search(file.name)
        if found is None or not file.name.rpartition("/")[2].startswith(f"{manifest.save_id}-"):
            return None
        by_rank[int(found.group(1))] += file.byte_length
    if not by_rank:
        return None
    of_ranks = list(by_rank.values())
    return WriterBytes(len(of_ranks), min(of_ranks), median(of_ranks), max(of_ranks))


def compressed(manifest: Manifest) -> CompressedBytes | None:
    """Returns None if no chunk is compressed."""
    columns = manifest.table.columns
    packed = [index for index, name in enumerate(columns.codec_names) if name != "none"]
    num_chunks = int(np.isin(columns.codecs, packed).sum())
    num_bytes = int(columns.byte_lengths.sum())
    described = manifest.describe_all().values()
    raw_num_bytes = sum(prod(shape) * itemsize(dtype) for dtype, shape in described)
    return CompressedBytes(num_chunks, num_bytes, raw_num_bytes) if num_chunks else None


def first_chunks(record: TensorRecord, count: int) -> TensorRecord:
    """Returns the record with at most so many of its chunks (0 for all), without making the others."""
    if not count or record.num_chunks <= count:
        return record
    return record._replace(
        coordinates=record.coordinates[: 2 * len(record.shape) * count],
        files=record.files[:count],
        byte_offsets=record.byte_offsets[:count],
        byte_lengths=record.byte_lengths[:count],
        codecs=record.codecs[:count],
    )
