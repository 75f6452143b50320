"""torchdata's StatefulDataLoader after a load: its count of batches where it has to read an iterable dataset again."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

_MAKE = "_get_iterator"


def count_once(loader: Any) -> None:
    """Lets a StatefulDataLoader that was given a state count its batches once in the pass that begins there. Does
    nothing for any other object.

    To go on with an iterable dataset that has no state, such a loader reads the batches that were given out again when
    it begins, and counts them a second time: the state after that would leave out as many.
    """
    attributes = getattr(loader, "__dict__", {})
    has_state = attributes.get("next_iter_state") is not None and hasattr(loader, _MAKE)
    if has_state and isinstance(getattr(loader, "dataset", None), IterableDataset):
        setattr(loader, _MAKE, partial(_make_iterator, loader))


def _make_iterator(loader: Any) -> Any:
    """Makes the next iterator and takes batches that it read again out of its counts. The class makes later ones."""
    vars(loader).pop(_MAKE, None)
    state = loader.next_iter_state
    iterator = getattr(loader, _MAKE)()
    num_taken = _num_taken(state)
    num_again = 0 if num_taken is None else getattr(iterator, "_num_yielded", 0) - num_taken
    if num_again <= 0:
        return iterator
    iterator._num_yielded -= num_again
    snapshot = getattr(iterator, "_snapshot", None)  # of a loader with workers
    if snapshot is None:
        return iterator
    if snapshot["_snapshot_step"] > num_again:  # else it is the one of the state, which was not counted twice
        snapshot["_snapshot_step"] -= num_again
    # Workers were asked to take part in snapshots at counts that may no longer be those of a snapshot. None is needed:
    # the next loader reads the dataset from its start in any case.
    iterator._snapshot_interval = 0
    return iterator


def _num_taken(state: Any) -> int | None:
    """Returns how many batches of the pass were given out before the state; None if it does not tell."""
    if not isinstance(state, dict):
        return None
    if "_snapshot" not in state:
        return state.get("_num_yielded")
    num_taken: int = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    return num_taken
