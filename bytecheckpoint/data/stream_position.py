"""Positions in streams as records and as the plain trees that checkpoints hold. It knows nothing of sources
or loaders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError

_INT = frozenset({int})


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """The state of a source at one position of its stream; numbers as in StreamPosition."""

    epoch: int
    position: int
    samples: int
    state: Any
    """What the source's `state_dict` returned."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A place between two samples of a stream."""

    epoch: int = 0
    """Passes that are complete. A stream whose last sample was taken is at position 0 of the next epoch, as soon as its
    end is known: for an iterable, once one more sample was asked for."""
    position: int = 0
    """Samples of this epoch that come before."""
    samples: int = 0
    """Samples of all epochs that come before, without the ones that a loader dropped."""
    turn: int = 0
    """The number of the loader's last batch that held a sample of this stream, from 1; 0 before the first. With several
    workers it tells whose batch comes next."""
    snapshot: SourceSnapshot | None = None
    """The newest snapshot that is not past this position. With None the source is read from the start of the epoch, or
    of epoch 0 if it carries something over into later epochs."""

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the position, which order the places of one stream."""
        return self.epoch, self.position

    def next_epoch(self, *, carries_over: bool) -> StreamPosition:
        """Returns the start of the next epoch. A source that carries something over needs its last snapshot for it."""
        snapshot = self.snapshot if carries_over else None
        return replace(self, epoch=self.epoch + 1, position=0, snapshot=snapshot)


def tree_of(position: StreamPosition, source: str) -> dict[str, Any]:
    """Returns the state of a stream as plain data. `source` names what it is read from; a load may refuse another."""
    tree = {
        "epoch": position.epoch,
        "position": position.position,
        "samples": position.samples,
        "turn": position.turn,
        "source": source,
    }
    if (snapshot := position.snapshot) is not None:
        tree["snapshot"] = {
            "epoch": snapshot.epoch,
            "position": snapshot.position,
            "samples": snapshot.samples,
            "state": snapshot.state,
        }
    return tree


def position_of(stream_id: str, tree: Any, source: str) -> StreamPosition:
    """Returns the position for which `tree_of` made the tree. `source` names what the stream is read from now.

    Raises:
        CheckpointMismatchError: the tree is no state of a stream, or one of another kind of source.
    """
    try:
        epoch, position, samples, turn = _counts((tree["epoch"], tree["position"], tree["samples"], tree["turn"]))
        snapshot = _snapshot_of(tree.get("snapshot"))
        saved_source = str(tree["source"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointMismatchError(
            f"the state of stream {stream_id!r} is not one of bcp.data.Streams: {error!r}. Nothing was loaded into the "
            "loader. Load it with the kind of loader that saved it",
            kind="conflict",
        ) from error
    # A buffer gives other samples than the source it reads from, and a snapshot fits one kind of source.
    may_refuse = saved_source != source and (snapshot is not None or "(" in saved_source + source)
    if may_refuse and not _is_same_source(saved_source, source):
        raise CheckpointMismatchError(
            f"stream {stream_id!r} was saved with the source {saved_source}, and the loader reads it from {source}. "
            "Nothing was loaded into the loader. Build the stream as it was when it was saved, or leave the loader out "
            "of the load with exclude: then it begins from its start",
            kind="conflict",
        )
    return StreamPosition(epoch, position, samples, turn, snapshot)


def _is_same_source(saved: str, now: str) -> bool:
    names, own = saved.split("("), now.split("(")
    # States of earlier versions do not say how long rows are, or how a buffer shuffles.
    is_same = (name in {each, re.sub(r"\[.*\]", "", each)} for name, each in zip(names, own, strict=False))
    return len(names) == len(own) and all(is_same)


def _snapshot_of(tree: Mapping[str, Any] | None) -> SourceSnapshot | None:
    if tree is None:
        return None
    epoch, position, samples = _counts((tree["epoch"], tree["position"], tree["samples"]))
    return SourceSnapshot(epoch, position, samples, tree["state"])


def _counts(values: tuple[Any, ...]) -> tuple[int, ...]:
    # Together, because there may be 100,000 streams.
    if not _INT.issuperset(map(type, values)) or min(values) < 0:
        raise ValueError(f"{values!r} are not counts")
    return values
