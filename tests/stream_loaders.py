"""A loader of streams that keeps what it is given, for tests of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

BUFFER_LENGTH = 20_000
"""Elements of a token buffer: too large for the manifest."""


class StreamLoader:
    """An ElasticLoader."""

    def __init__(self, streams: Mapping[str, Any] | None = None, shared: Any = None) -> None:
        self.streams = dict(streams or {})
        self.shared = shared
        self.num_loads = 0

    def stream_ids(self) -> Sequence[str]:
        return list(self.streams)

    def stream_state(self, stream_id: str) -> Any:
        return self.streams[stream_id]

    def shared_state(self) -> Any:
        return self.shared

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        self.streams, self.shared = dict(streams), shared
        self.num_loads += 1


class ListingLoader(StreamLoader):
    """One that knows the streams of all ranks."""

    def __init__(self, every: Iterable[str], streams: Mapping[str, Any] | None = None, shared: Any = None) -> None:
        super().__init__(streams, shared)
        self.every = list(every)

    def all_stream_ids(self) -> Sequence[str]:
        return self.every


class BlockLoader(StreamLoader):
    """One that deals its streams out in blocks."""

    def assign(self, ids: Sequence[str], size: int) -> list[list[str]]:
        bounds = [len(ids) * rank // size for rank in range(size + 1)]
        return [list(ids[begin:end]) for begin, end in pairwise(bounds)]


def stream_names(count: int) -> list[str]:
    return [f"web-{number:03d}" for number in range(count)]


def state_of(stream_id: str, position: int = 3, *, with_buffer: bool = False) -> dict[str, Any]:
    """The state of a stream: plain data, and a token buffer in a tensor of its own where asked for."""
    state = {"epoch": 1, "position": position, "samples": 100 + position, "source": "web", "id": stream_id}
    if not with_buffer:
        return state
    first = sum(map(ord, stream_id)) * 100_000
    return {**state, "buffer": {"tail": torch.arange(first, first + BUFFER_LENGTH), "length": torch.tensor(position)}}


def share(ids: Sequence[str], rank: int, size: int) -> list[str]:
    """The streams that a rank owns, unless its loader says otherwise."""
    return sorted(ids)[rank::size]
