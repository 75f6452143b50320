"""Integers that a user passes."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import SupportsIndex, cast


def integer_of(value: object) -> int | None:
    """Returns an integer of Python, numpy or a one-element tensor as an int; None for a bool and any other value."""
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        with suppress(TypeError, RuntimeError):  # of arrays, which all have __index__; RuntimeError is of meta tensors
            return index(cast("SupportsIndex", value))
    return None
