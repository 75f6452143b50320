"""Loaders whose state is that of one process, such as torchdata's: kept by data-parallel rank. On another number of
ranks some of them can go on from the samples that all ranks have passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

from bytecheckpoint.adapters.stateful import give_state

_SAMPLER_KEYS = frozenset({"yielded", "epoch"})
_ONLY_NONE = ("_index_sampler_state", "fetcher_state", "dataset_state")
"""Keys of a StatefulDataLoader's state: a value here other than None says more than a number of samples."""


def rank_id(rank: int) -> str:
    """Returns the id of the only stream that a rank has."""
    return f"rank_{rank}"


class RankStates:
    """A loader with state_dict() and load_state_dict() as an ElasticLoader with one stream for each rank."""

    def __init__(self, loader: Any, *, rank: int, size: int) -> None:
        self._loader = loader
        self._rank = rank
        self._size = size

    def stream_ids(self) -> Sequence[str]:
        return [rank_id(self._rank)]

    def all_stream_ids(self) -> Sequence[str]:
        return [rank_id(rank) for rank in range(self._size)]

    def stream_state(self, _stream_id: str) -> Any:
        return self._loader.state_dict()

    def shared_state(self) -> Any:
        return None

    def assign(self, _ids: Sequence[str], size: int) -> list[list[str]]:
        return [[rank_id(rank)] for rank in range(size)]

    def start_states(self) -> dict[str, Any] | None:
        """Returns by stream id this rank's state before the first sample of its present epoch, and not of epoch 0 as
        `Streams` does; None if the state is more than a count of samples.
        """
        state = self._loader.state_dict()
        is_counted = isinstance(_progress_of(state), _RankPosition)
        return {rank_id(self._rank): _state_after(state, 0, 1)} if is_counted else None

    def load_streams(self, streams: Mapping[str, Any], _shared: Any) -> None:
        for state in streams.values():
            give_state(self._loader, state)


class ConsumedPrefix(NamedTuple):
    """The samples of an epoch that all ranks have passed, in the order in which a sampler deals them out."""

    state: Any
    """State of a rank that goes on there; before any sample if all ranks have finished the epoch, or may have."""
    repeated_at_most: int
    """Samples, over all ranks, that were taken and are taken again."""


class _RankPosition(NamedTuple):
    """The samples that a rank has taken of its part of an epoch."""

    epoch: int
    num_samples: int
    is_finished: bool
    """The rank has passed all of its part."""


def consumed_prefix(states: Sequence[Any], loader: Any, *, size: int) -> ConsumedPrefix | str:
    """Returns where `size` ranks can go on without losing a sample, or the reason why the saved states, one for each
    rank, do not tell it.

    Rank r of n takes the samples r, r + n, r + 2 n, ... of an order that does not depend on n. So what all ranks have
    passed is the first n * min(samples of a rank) samples of that order; ranks that have finished their part do not
    count in the minimum. The state is that after whole batches, or after the epoch if all of it was passed. A sampler
    alone does not tell then whether the trainer has gone on to the next epoch: it deals out a whole one, and none is
    lost.
    """
    sampler = getattr(loader, "sampler", loader)
    if getattr(sampler, "num_replicas", None) != size:
        return f"its samples are not those of a DistributedSampler with num_replicas={size}, dealt out one by one"
    found = [_progress_of(state) for state in states]
    unknown = next((each for each in found if isinstance(each, str)), None)
    if unknown is not None:
        return unknown
    progress = [each for each in found if isinstance(each, _RankPosition)]
    if len({each.epoch for each in progress}) > 1:
        return f"its ranks are in different epochs, {sorted({each.epoch for each in progress})}"
    batch_size = getattr(loader, "batch_size", None) or 1
    unfinished_counts = [each.num_samples for each in progress if not each.is_finished]
    if not unfinished_counts:
        return ConsumedPrefix(_state_after(states[0], 0, batch_size), 0)
    num_taken, num_passed = sum(each.num_samples for each in progress), min(unfinished_counts) * len(states)
    if num_passed >= _epoch_samples(sampler, size):
        if "yielded" in states[0]:
            return ConsumedPrefix(_state_after(states[0], 0, batch_size), num_taken)
        # The trainer has not seen the end yet: its pass ends at once, as on as many ranks, and the next is a new one.
        return ConsumedPrefix(_state_after(states[0], sampler.num_samples, batch_size), 0)
    own = num_passed // size // batch_size * batch_size
    return ConsumedPrefix(_state_after(states[0], own, batch_size), num_taken - own * size)


def _epoch_samples(sampler: Any, size: int) -> float:
    """Returns the number of samples that `size` ranks take in an epoch, without those repeated to make the parts
    equal; infinity for a sampler that does not tell.
    """
    dataset = getattr(sampler, "dataset", None)
    of_all_ranks = size * getattr(sampler, "num_samples", math.inf)
    return min(of_all_ranks, len(dataset)) if isinstance(dataset, Sized) else of_all_ranks


def _progress_of(state: Any) -> _RankPosition | str:
    if not isinstance(state, dict):
        return f"its state is a {type(state).__name__}, which does not count samples"
    if "yielded" in state and state.keys() <= _SAMPLER_KEYS:
        return _RankPosition(state.get("epoch", 0), state["yielded"], is_finished=False)
    if "_snapshot" in state:
        return "its state is that of a number of workers; take num_workers=0, or bcp.data.Streams"
    sampler_state = state.get("_sampler_iter_state")
    if "_num_yielded" not in state or not isinstance(sampler_state, dict) or "samples_yielded" not in sampler_state:
        return "its state does not count the samples that it has taken"
    inside = sampler_state.get("sampler_state", {"yielded": 0})
    is_counted = sampler_state.keys() <= {"samples_yielded", "sampler_state"} and set(inside) <= _SAMPLER_KEYS
    if not is_counted or any(state.get(key) is not None for key in _ONLY_NONE):
        return "its state is more than a number of samples: that of a dataset or of random numbers"
    return _RankPosition(
        inside.get("epoch", 0), sampler_state["samples_yielded"], bool(state.get("_iterator_finished"))
    )


def _state_after(state: Mapping[str, Any], num_samples: int, batch_size: int) -> dict[str, Any]:
    """Returns a state like the given one, of a rank that has taken `num_samples` of the same epoch."""
    num_batches = -(-num_samples // batch_size)
    if "yielded" in state:
        return {**state, "yielded": num_samples}
    of_sampler = {**state["_sampler_iter_state"], "samples_yielded": num_samples}
    if "sampler_state" in of_sampler:
        of_sampler["sampler_state"] = {**of_sampler["sampler_state"], "yielded": num_samples}
    counts = {"_num_yielded": num_batches, "_sampler_iter_yielded": num_batches, "_iterator_finished": False}
    return {**state, **counts, "_sampler_iter_state": of_sampler}
