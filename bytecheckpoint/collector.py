"""Python's cyclic garbage collector, kept from looking through a million short-lived records that hold no cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection inside: planning makes tuples by the hundred thousand, and each generation of them would
    be walked again and again. Reference counting goes on.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
