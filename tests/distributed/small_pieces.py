"""Small checkpoints that are cut like large ones: the state of a test has to have many extents, reads and units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bytecheckpoint import options
from bytecheckpoint.planner import coalesce, file_layout


@contextmanager
def small_pieces(*, extent_bytes: int = 512) -> Iterator[None]:
    """Within the block what is saved has extents of so many bytes, what is loaded is read straight into place from
    half of that on, and `scratch_bytes` may be as small as one likes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_layout, "EXTENT_BYTES", extent_bytes)
        patch.setattr(coalesce, "MIN_DIRECT_BYTES", extent_bytes // 2)
        patch.setattr(options, "MIN_SCRATCH_BYTES", 1)
        yield
