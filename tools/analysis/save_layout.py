"""Sums up how a save has cut and spread a checkpoint: parts of tensors, chunks of files, bytes of ranks. It
works on columns of the manifest, because there may be a million chunks.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from statistics import median
from typing import NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.manifest import Manifest, TensorRecord
from bytecheckpoint.region import grid_counts

_RANK = re.compile(r"-([0-9]{1,9})-[0-9]+\.safetensors\Z")


class WriterBytes(NamedTuple):
    """Bytes that the ranks of a save have written."""

    num_ranks: int
    """Number of ranks that have written anything."""
    min_num_bytes: int
    median_num_bytes: float
    max_num_bytes: int


class CompressedBytes(NamedTuple):
    """Bytes before and after compression."""

    num_chunks: int
    """Number of compressed chunks."""
    num_bytes: int
    """Bytes of all chunks, as stored."""
    raw_num_bytes: int
    """Bytes of all elements."""


def chunks_by_file(manifest: Manifest) -> list[int]:
    files = manifest.table.columns.files.astype(np.int64)
    counts: list[int] = np.bincount(files, minlength=len(manifest.files)).tolist()
    return counts


def cut_names(manifest: Manifest) -> list[str]:
    """Returns how each stored tensor is cut, in the order of the manifest: `whole`, the number of parts along each
    dimension (`4 x 1`), or `irregular`.
    """
    columns = manifest.table.columns
    names = np.full(len(manifest.tensors), "irregular", object)
    names[columns.num_chunks <= 1] = "whole"
    cut = np.flatnonzero((columns.num_chunks > 1) & columns.is_grid).tolist()
    starts = (np.cumsum(columns.num_dims * columns.is_grid) - columns.num_dims).tolist() if cut else []
    fqns = list(manifest.tensors) if cut else []
    for tensor in cut:
        shape = manifest.describe(fqns[tensor])[1]
        parts = columns.grid_parts[starts[tensor] : starts[tensor] + len(shape)].tolist()
        names[tensor] = " x ".join(map(str, grid_counts(shape, parts))) or "irregular"
    return names.tolist()


def writers_of(manifest: Manifest) -> WriterBytes | None:
    """Sums bytes by the ranks in the names of data files; None without files, or if one is not named by a rank of this
    save, as in foreign formats.
    """
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


def compression_of(manifest: Manifest) -> CompressedBytes | None:
    """Returns the bytes before and after compression; None if no chunk is compressed."""
    columns = manifest.table.columns
    packed = [index for index, name in enumerate(columns.codec_names) if name != "none"]
    if not packed:  # numpy compares with an empty list at the cost of another import
        return None
    num_chunks = int(np.isin(columns.codecs, packed).sum())
    num_bytes = int(columns.byte_lengths.sum())
    described = manifest.describe_all().values()
    raw_num_bytes = sum(prod(shape) * itemsize(dtype) for dtype, shape in described)
    return CompressedBytes(num_chunks, num_bytes, raw_num_bytes) if num_chunks else None


def first_chunks(record: TensorRecord, count: int) -> TensorRecord:
    """Returns the record of a tensor with its first `count` chunks, or all for 0. The other chunks are not made."""
    if not count or record.num_chunks <= count:
        return record
    return record._replace(
        coordinates=record.coordinates[: 2 * len(record.shape) * count],
        files=record.files[:count],
        byte_offsets=record.byte_offsets[:count],
        byte_lengths=record.byte_lengths[:count],
        codecs=record.codecs[:count],
    )
