"""A small picture of which file holds which part of a tensor, in letters."""

from __future__ import annotations

import string
from collections.abc import Sequence

from bytecheckpoint.manifest import Chunk

MAX_ROWS, MAX_COLUMNS = 8, 48
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_HOLE = "."


def letter_of(file: int, files: Sequence[int]) -> str:
    """The letter of a file among those that hold a tensor; `#` for what comes after the last letter."""
    position = files.index(file)
    return _LETTERS[position] if position < len(_LETTERS) else "#"


def draw_chunks(shape: Sequence[int], chunks: Sequence[Chunk]) -> list[str]:
    """Lines of letters: the first dimension goes down and the second across, that of a 1-D tensor across.

    None for a tensor of another number of dimensions, without elements, or of one chunk. A letter stands for the
    element in the middle of its field.
    """
    if len(shape) not in {1, 2} or 0 in shape or len(chunks) < 2:
        return []
    rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
    num_rows, num_columns = min(rows, MAX_ROWS), min(columns, MAX_COLUMNS)
    files = sorted({chunk.file for chunk in chunks})
    grid = [[_HOLE] * num_columns for _ in range(num_rows)]
    for chunk in chunks:
        letter = letter_of(chunk.file, files)
        offsets, ends = chunk.region.offsets, chunk.region.ends
        down = range(1) if len(shape) == 1 else _fields(offsets[0], ends[0], rows, num_rows)
        across = _fields(offsets[-1], ends[-1], columns, num_columns)
        for row in down:
            grid[row][across.start : across.stop] = letter * len(across)
    return ["".join(row) for row in grid]


def _fields(start: int, end: int, length: int, num_fields: int) -> range:
    """The fields whose middle lies in start:end. That of field f is element (2f + 1) * length // (2 * num_fields)."""

    def first_from(element: int) -> int:
        return max(0, -(-(2 * num_fields * element - length) // (2 * length)))

    return range(min(first_from(start), num_fields), min(first_from(end), num_fields))
