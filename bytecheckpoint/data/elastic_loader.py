"""Loaders whose state is a set of logical streams, which any number of data-parallel ranks can share out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ElasticLoader(Protocol):
    """A loader whose state does not depend on the number of ranks.

    A *stream* is a fixed sequence of samples with an id of its own. Each stream is owned by one data-parallel rank at a
    time, and its state counts what the trainer took, not what was read ahead. Trees are plain data and tensors.

    A loader with one position for all ranks has no streams, and keeps that position in its shared state.

    Optional methods: `all_stream_ids()`, the ids that all ranks own together, by which a save finds a stream without an
    owner; `assign(ids, size)`, see `assign_streams`; `refuse_inexact()`, which returns why the state is not exact, or
    None; `check_streams(streams, shared)`, which raises the CheckpointMismatchError that `load_streams` would, before a
    load changes anything (tensors that lie in data files are not there yet: references stand for them);
    `joining_state(id, others)`, the state in which a stream that the checkpoint lacks joins others with these states;
    `start_states()`, the states by id in which this rank's streams begin, for a load that restarts the loader;
    `stream_position(id)`, a few values of the stream's state, which a manager's data log stores: an earlier state of
    the same stream in which these values are replaced is the state of now; `prepare_state()`, called in the step before
    a save, so that state that is slow to gather is there by then.
    """

    def stream_ids(self) -> Sequence[str]:
        """Returns the ids of the streams that this rank owns now."""

    def stream_state(self, stream_id: str) -> Any:
        """Returns the state of a stream that this rank owns."""

    def shared_state(self) -> Any:
        """Returns the part of the state that all ranks have in common."""

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Continues with these streams instead of those that the loader reads now. `streams` has their states by id,
        `shared` is the shared state.
        """


def assign_streams(loader: object, ids: Sequence[str], size: int) -> list[list[str]]:
    """Returns the ids that each of `size` ranks owns: by the loader's own `assign(ids, size)`; without
    it, rank r gets each `size`-th of the sorted ids, from number r on.

    Raises ValueError if the loader's own method leaves out an id, gives it to two ranks, or makes another number of
    parts.
    """
    ordered = sorted(ids)
    assign = getattr(loader, "assign", None)
    if assign is None:
        return [ordered[rank::size] for rank in range(size)]
    parts = [list(part) for part in assign(ordered, size)]
    if len(parts) != size or sorted(stream_id for part in parts for stream_id in part) != ordered:
        raise ValueError(
            f"{type(loader).__name__}.assign must give each of {len(ordered)} streams to one of {size} ranks; it "
            f"returned {len(parts)} parts with {sum(map(len, parts))} streams"
        )
    return parts
