"""Integers that a user passes."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import SupportsIndex, cast


def integer_of(value: object) -> int | None:
    """Returns an integer, also one of numpy, as a plain int; None for a bool and for any other value."""
    if not isinstance(value, bool):
        with suppress(TypeError):  # arrays have __index__, and raise from it unless they are one integer
            return index(cast("SupportsIndex", value))
    return None
