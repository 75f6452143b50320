"""Draws a small map of the files that hold the parts of a tensor: fields for a terminal and for a page. A tensor of
more than two dimensions is drawn along the two that are cut most.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bytecheckpoint.manifest import TensorRecord

MAX_ROWS, MAX_COLUMNS = 8, 48
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
NUM_LETTERS = len(_LETTERS)
_HOLE = "."


class Axes(NamedTuple):
    """Dimensions of a tensor that a map shows."""

    down: int | None
    """The dimension from top to bottom; None for a tensor of one dimension."""
    across: int
    """The dimension from left to right."""


class ChunkMap(NamedTuple):
    """A map of a tensor's chunks."""

    axes: Axes
    fields: np.ndarray
    """Rows of fields: position in `files` of the file with the element in the middle of the field; -1 for none. If the
    map leaves dimensions out, the file of one of the chunks that lie behind one another."""
    files: Sequence[int]
    """Files that hold the tensor, as ascending indices into `Manifest.files`."""


def letter_of(position: int) -> str:
    """Returns the letter of a file by its position among the files of a tensor; letters repeat after NUM_LETTERS."""
    return _LETTERS[position % NUM_LETTERS]


def map_chunks(record: TensorRecord, *, max_rows: int, max_columns: int) -> ChunkMap | None:
    """Returns a map of at most `max_rows` times `max_columns` fields; None for a tensor without dimensions or elements,
    or with fewer than two chunks.
    """
    if not record.shape or 0 in record.shape or record.num_chunks < 2:
        return None
    boxes = np.array(record.coordinates, np.int64).reshape(record.num_chunks, 2, len(record.shape))
    axes = _pick_axes(boxes[:, 0])
    files, positions = np.unique(np.array(record.files, np.int64), return_inverse=True)
    rows = 1 if axes.down is None else record.shape[axes.down]
    fields = np.full((min(rows, max_rows), min(record.shape[axes.across], max_columns)), -1, np.int64)
    top, bottom = (
        (np.zeros(len(boxes), np.int64), np.ones(len(boxes), np.int64))
        if axes.down is None
        else _fields(boxes[:, :, axes.down], rows, fields.shape[0])
    )
    left, right = _fields(boxes[:, :, axes.across], record.shape[axes.across], fields.shape[1])
    # Of a million chunks few have the middle of a field.
    for chunk in np.flatnonzero((top < bottom) & (left < right)).tolist():
        fields[top[chunk] : bottom[chunk], left[chunk] : right[chunk]] = positions[chunk]
    return ChunkMap(axes, fields, files.tolist())


def _pick_axes(offsets: np.ndarray) -> Axes:
    """Returns the two dimensions with the most cuts, the lower one as `down`; the lowest ones on a tie. A single
    dimension is `across`.
    """
    num_dims = offsets.shape[1]
    if num_dims == 1:
        return Axes(None, 0)
    num_cuts = [len(np.unique(offsets[:, dim])) for dim in range(num_dims)]
    down, across = sorted(sorted(range(num_dims), key=lambda dim: -num_cuts[dim])[:2])
    return Axes(down, across)


def _fields(boxes: np.ndarray, length: int, num_fields: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each box its first field and the one after its last, along a dimension of `length` elements: the
    fields whose middle the box holds. A row of `boxes` is start and length along that dimension. The middle of field f
    is element (2f + 1) * length // (2 * num_fields).
    """
    starts, ends = boxes[:, 0], boxes[:, 0] + boxes[:, 1]
    # In float64, because the product of two lengths may not fit an int64; a field more or less does not matter there.
    bounds = [np.ceil((2.0 * num_fields * at - length) / (2.0 * length)) for at in (starts, ends)]
    first, stop = (np.clip(bound, 0, num_fields).astype(np.int64) for bound in bounds)
    return first, stop


def axes_text(axes: Axes) -> str:
    """Describes the rows and columns of a map."""
    if axes.down is None:
        return "from the first element to the last"
    return f"dimension {axes.down} down, dimension {axes.across} across"


def lines_of(drawn: ChunkMap) -> list[str]:
    """Returns a line of text for each row of the map: a letter of a file for each field, `.` where no chunk lies."""
    return ["".join(_HOLE if file < 0 else letter_of(file) for file in row) for row in drawn.fields.tolist()]
