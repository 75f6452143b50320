"""Train loaders that save their own position, inside the Trainer: the state of such a loader, and its first pass after
a load, which already begins at that position, so that the Trainer must skip no batches of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from accelerate.data_loader import DataLoaderAdapter
from torch.utils.data import DataLoader, IterableDataset

from bytecheckpoint.adapters.data.loader_state import DataLoaderState, Elastic
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.adapters.stateful import is_stateful
from bytecheckpoint.data.known_loaders import elastic_loader_of
from bytecheckpoint.data.tracked_loader import TrackedLoader
from bytecheckpoint.integrations.shared.loader_state import loader_state

_NO_BATCH = object()


def train_loader_state(loader: Any, *, rank: int, size: int, elastic: Elastic | None) -> DataLoaderState | None:
    """Returns the state of a loader that has a state of its own; None for any other loader, of which the Trainer skips
    batches after a load.

    Raises like `DataLoaderState`.
    """
    is_known = elastic_loader_of(loader) is not None
    # Loaders that accelerate has made have the methods in any case, and the Trainer lets accelerate make them.
    if not is_known and (not is_stateful(loader) or isinstance(loader, DataLoaderAdapter)):
        return None
    return loader_state(loader, rank=rank, size=size, elastic=elastic)


class PassOrder(RngState):
    """The random state in which a pass over the train loader began: samplers without a generator of their own, such as
    the one that groups samples by length, draw the order of the pass from it. A rank that the save did not have gets
    that of the first one, because all draw the same order.
    """

    def __init__(self) -> None:
        super().__init__(at={})
        self._replaced: dict[str, Any] = {}
        self.note()

    def note(self) -> None:
        """Takes the present random state as that of the pass."""
        self._noted = super().state_dict()

    def restore(self) -> None:
        """Sets the generators to the state in which the pass began."""
        self._replaced = super().state_dict()
        super().load_state_dict(self._noted)

    def put_back(self) -> None:
        """Sets the generators to the state that `restore` has replaced, if it has replaced one."""
        super().load_state_dict(self._replaced)
        self._replaced = {}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begun": self._noted}  # nested: nothing else takes it for the present random state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noted = state["begun"]


class RestOfPass(IterableDataset[Any]):
    """The rest of the pass over a loader that already stands at the saved position, although the Trainer will skip
    batches. Yields as many None as the Trainer skips, then the batches of the loader. It is the dataset of an object
    that accelerate's `skip_first_batches` accepts as a loader.
    """

    def __init__(self, state: DataLoaderState, *, num_to_skip: int) -> None:
        self._state = state
        self._num_to_skip = num_to_skip
        self._has_begun_next = False

    def as_loader(self) -> Any:
        """Returns the rest of the pass as an object that the Trainer reads like a loader."""
        if self._num_to_skip:
            options = {"batch_size": None, "drop_last": False, "collate_fn": _as_it_is, "prefetch_factor": None}
            return SimpleNamespace(dataset=self, **options)
        if self._state.keyed_by == "stream":  # a loader whose pass has ended goes on with the next pass
            return self._state.loader
        rest = iter(self._state.loader)
        first = next(rest, _NO_BATCH)
        # After the last batch of a pass, a state says that none is left: the next pass is the one to read.
        return self._state.loader if first is _NO_BATCH else itertools.chain([first], rest)

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.repeat(None, self._num_to_skip)
        streams = self._state.streams
        rest = iter(self._state.loader)
        num_passes = streams._num_passes if isinstance(streams, TrackedLoader) else 0
        first = list(itertools.islice(rest, 1))
        self._has_begun_next = isinstance(streams, TrackedLoader) and streams._num_passes != num_passes
        yield from itertools.chain(first, rest)

    def draw_as_begun(self) -> None:
        """Draws the random numbers that a loader draws when it begins a pass, if the saved pass had no batches left and
        this object therefore began the next one.
        """
        if self._has_begun_next:
            samples: Any = [0]
            iter(DataLoader(samples, generator=self._state.loader.generator))


def _as_it_is(batch: Any) -> Any:
    return batch
