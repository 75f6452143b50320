"""The state of the loader that a framework's trainer reads, for a save and a load."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.adapters.data.loader_state import DataLoaderState, Elastic


def loader_state(loader: Any, *, rank: int, size: int, elastic: Elastic | None) -> DataLoaderState:
    """Returns the state of a loader. With `elastic` None, the state of a loader of streams is exact on any number of
    data-parallel ranks; the state of any other loader is saved, but a load on another number of ranks refuses it.

    Raises like `DataLoaderState`.
    """
    state = DataLoaderState(loader, rank=rank, size=size, elastic=elastic or "exact")
    if elastic is None and state.keyed_by == "rank":
        return DataLoaderState(loader, rank=rank, size=size, elastic="same")
    return state
