"""`DataLoaderState`, which marks a data loader in the state of a save or a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from bytecheckpoint.adapters.data.rank_states import RankStates
from bytecheckpoint.adapters.data.stream_wire import KeyedBy
from bytecheckpoint.adapters.stateful import is_stateful
from bytecheckpoint.data.elastic_loader import ElasticLoader
from bytecheckpoint.data.known_loaders import elastic_loader_of
from bytecheckpoint.runtime.integers import integer_of

Elastic = Literal["exact", "same", "at_least_once", "restart"]


class DataLoaderState:
    """A data loader in the state of a save or a load: `{"data": bcp.DataLoaderState(loader, rank=2, size=4)}`.

    Its state is kept by stream and not by rank, so that a load on any number of data-parallel ranks goes on where the
    save was: each stream is stored once, with the state that all ranks share, and a load deals the streams out.
    `loader` is an `ElasticLoader`, as `bcp.data.Streams` is, or a loader that is known to be exact; docs/data.md lists
    them. Of any other object with state_dict() and load_state_dict() the state is one rank's own, which `elastic` has
    to allow.

    Args:
        loader: The loader that this process trains from.
        rank: Data-parallel rank of this process. Its tensor-, pipeline- and context-parallel replicas pass the same.
        size: Number of data-parallel ranks.
        elastic: Says what happens where a state cannot be exact on another number of ranks. `exact` refuses it when
            it is saved. `same` saves it; a load refuses another number of ranks, even if the state were exact there.
            `at_least_once` goes on, on another number of ranks, from the samples that all ranks have passed: it repeats
            some and loses none. Where the state does not tell these samples, the save or the load refuses it. `restart`
            starts the loader anew on another number of ranks, with a warning.

    Raises:
        ValueError: `rank` is none of `size` ranks, one of both is no integer, `elastic` is not one of these, or
            accelerate has split `Streams` once more.
        TypeError: The loader has no state.
    """

    def __init__(self, loader: Any, *, rank: int, size: int, elastic: Elastic = "exact") -> None:
        if elastic not in get_args(Elastic):
            raise ValueError(f"DataLoaderState.elastic takes one of {', '.join(get_args(Elastic))}, not {elastic!r}")
        own_rank, num_ranks = integer_of(rank), integer_of(size)
        if own_rank is None or num_ranks is None or not 0 <= own_rank < num_ranks:
            text = f"DataLoaderState takes a data-parallel rank from 0 to size - 1: rank={rank!r}, size={size!r}"
            raise ValueError(text)
        self.loader = loader
        self.rank = own_rank
        self.size = num_ranks
        self.elastic = elastic
        elastic_loader = elastic_loader_of(loader)
        if elastic_loader is None and not is_stateful(loader):
            raise TypeError(
                f"a {type(loader).__name__} has no state to save: it has no state_dict() and load_state_dict(), is no "
                "loader that is known, and no ElasticLoader. Make a DataLoader's dataset of "
                "bytecheckpoint.data.Streams, with ShuffleBuffer in place of shuffle=True, or take torchdata's "
                "StatefulDataLoader: see docs/data.md"
            )
        self.keyed_by: KeyedBy = "rank" if elastic_loader is None else "stream"
        """States belong to streams, which any rank can take over, or to data-parallel ranks."""
        # Not `or`: a loader of no batches may be falsy.
        of_rank = RankStates(loader, rank=self.rank, size=self.size)
        self.streams: ElasticLoader = of_rank if elastic_loader is None else elastic_loader
        self.loaded_ids: Sequence[str] | None = None
        """Sorted ids of the streams of all ranks, once a load has dealt them out."""
        self.is_in_use = False
        """True once the loader was saved or loaded: it may have been read."""

    def prepare_state(self) -> None:
        """Lets the loader gather its state now, so that the save after the next step need not wait for it.

        A CheckpointManager calls it by itself, see docs/data.md; with `bcp.save` alone, call it after the step before.
        It calls `prepare_state()` of the loader and does nothing where that has none. The save still has the state at
        its own step.

        Raises:
            Exception: What the loader raises, as it is. The loader can be saved without this call.
        """
        prepare = getattr(self.loader if self.keyed_by == "rank" else self.streams, "prepare_state", None)
        if prepare is not None:
            prepare()

    def __repr__(self) -> str:
        return f"DataLoaderState({self.loader!r}, rank={self.rank}, size={self.size}, elastic={self.elastic!r})"
