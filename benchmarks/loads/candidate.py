"""Functions of a candidate of the load benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.states import HeldState


@dataclass(frozen=True)
class StoredAt:
    """Location of a checkpoint."""

    folder: Path
    url: str | None
    """The same folder in a slow store, if it is to be read from there."""
    options: Mapping[str, float]
    """Options of the slow store."""


@dataclass(frozen=True)
class LoadFunctions:
    """Saves a state once, without syncing it, and loads it, which is timed."""

    save: Callable[[Path, HeldState], object]
    load: Callable[[StoredAt, HeldState], None]
    prepare: Callable[[StoredAt, HeldState], None] = lambda *_: None
    """Work of a limit before the measured time."""
    brings_values: bool = True
