"""What a contestant of benchmarks/load.py is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from load_states import Held


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is."""

    folder: Path
    url: str | None
    """Of the same folder in a slow store, where it is to be read from that."""
    options: Mapping[str, float]
    """Of the slow store."""


def nothing(place: Place, held: Held) -> None:
    """Ahead of a load."""


@dataclass(frozen=True)
class Contender:
    """How to save a state once, without syncing it, and how to load it, which is timed."""

    save: Callable[[Path, Held], None]
    load: Callable[[Place, Held], None]
    prepare: Callable[[Place, Held], None] = nothing
    """What a limit may do before the clock starts."""
    brings_values: bool = True
