"""Elements that would become infinite because a target's dtype has a smaller range than theirs. It writes nothing."""

from __future__ import annotations

import torch

from bytecheckpoint.conversion.selecting import FLOAT_DTYPES
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.planner.convert_plan import Wanted

CHECKED_NUMEL = 1 << 18
"""Elements that are looked at in one go: they stay in the processor's cache."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_narrowed(wanted: Wanted, manifest: Manifest) -> bool:
    """Whether a finite element of what it is made of may be infinite in it."""
    if wanted.dtype not in FLOAT_DTYPES:
        return False
    fqns = {piece.fqn for piece in wanted.pieces if piece.fqn is not None}
    stored = {manifest.describe(fqn)[0] for fqn in fqns}
    return any(dtype in FLOAT_DTYPES and _largest(dtype) > _largest(wanted.dtype) for dtype in stored)


def has_non_finite(tensor: torch.Tensor) -> bool:
    """Whether any element is infinite or a NaN: several times as fast as `isfinite`, for dtypes of FLOAT_DTYPES."""
    if not tensor.numel():
        return False
    bits = tensor.view(_BITS[tensor.element_size()])
    infinite = torch.tensor(float("inf"), dtype=tensor.dtype).view(bits.dtype)
    return bool((bits & torch.iinfo(bits.dtype).max).amax() >= infinite)


def first_lost(stored: torch.Tensor, converted: torch.Tensor) -> int | None:
    """The number of the first element that is finite as stored and infinite as converted."""
    lost = (torch.isfinite(stored) & torch.isinf(converted)).nonzero()
    return int(lost[0]) if lost.numel() else None


def largest_text(dtype: str) -> str:
    return f"{_largest(dtype):.6g}"


def _largest(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).max)
