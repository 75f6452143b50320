"""What a conversion writes, before any byte moves: the tensors of the target, and for each from which regions of which
stored tensors its elements come. Whoever names the tensors makes these records out of a manifest alone, and whoever
writes a format takes them; neither knows the other. No file is touched here, and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bytecheckpoint.region import Region


class Piece(NamedTuple):
    """A region of a target's tensor, and where its elements come from."""

    region: Region
    """In the coordinates of the target's tensor."""
    fqn: str | None
    """Of the stored tensor, as it is stored: aliases are resolved. None where the elements are zeros, which stand
    nowhere, as those that pad a vocabulary."""
    source_region: Region
    """In the global coordinates of the stored tensor: as many elements as `region`. The elements of the one in
    row-major order are those of the other in row-major order, whatever their dimensions. Equal to `region` where `fqn`
    is None."""


class Wanted(NamedTuple):
    """A tensor as the target is to hold it."""

    fqn: str
    """Its name in the target."""
    dtype: str
    """torch's name without `torch.`. Elements of another dtype are converted, as `Tensor.to` does it."""
    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    """In any order. Their regions cover every element of the shape exactly once."""
