"""The train loader inside the Trainer. Of a loader that saves its own position: its state, and its first pass after
a load, which already begins at that position, so that the Trainer must skip no batches of it. Of any other loader: the
random states from which a pass over it was drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard
from accelerate.state import PartialState
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
    """The random states that decide what a pass over the train loader gives. The state in which the pass began: from
    it, samplers without a generator of their own draw the order. And the state before the newest batch was read: from
    it, datasets and collators draw. A rank that the save did not have gets the states of the save's first rank, because
    all ranks draw the same order.
    """

    def __init__(self) -> None:
        super().__init__(at={})
        self._replaced: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        """Empty if no batch was read, or if another process reads them."""
        self._num_taken = 0
        """Batches of the resumed pass that were trained on before; 0 once the pass has begun."""
        self._restore_rng: Callable[[], object] | None = None
        self.note()

    def note(self) -> None:
        """Takes the present random state as that of the pass."""
        self._noted, self._read = super().state_dict(), {}

    def restore(self, num_taken: int = 0, restore_rng: Callable[[], object] | None = None) -> None:
        """Sets the generators to the state in which the pass began.

        Args:
            num_taken: Number of its batches that were trained on before the save.
            restore_rng: Sets the random state that was saved with the weights; None if there was none.
        """
        self._replaced, self._num_taken, self._restore_rng = super().state_dict(), num_taken, restore_rng
        super().load_state_dict(self._noted)

    def put_back(self) -> None:
        """Sets the generators to the state that `restore` has replaced, then to the one that was saved. Does nothing
        the second time, or without a `restore` before.
        """
        super().load_state_dict(self._replaced)
        if self._restore_rng is not None:
            self._restore_rng()
        self._replaced, self._num_taken, self._restore_rng = {}, 0, None

    def watch(self, loader: Any) -> None:
        """Makes a prepared loader that reads samples by index call `begin_read` before each batch that it reads in this
        process, and skip the first `num_not_skipped` batches of each pass. Does nothing to any other loader.
        """
        kinds = DataLoaderShard | DataLoaderDispatcher
        if not isinstance(loader, kinds) or is_stateful(loader.base_dataloader):
            return
        batches = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset) or batches is None:
            return
        batches = batches.batches if isinstance(batches, _ReadBatches) else batches
        # DataLoader refuses to set this attribute, from which `skip_first_batches` makes the loader of a resumed pass.
        vars(loader.base_dataloader)["batch_sampler"] = _ReadBatches(batches, self, loader)

    def begin_read(self, number: int) -> None:
        """Notes the random state before the batch for step `number` of the pass is read; where rank 0 reads for all,
        before the first batch for that step.

        In a resumed pass, does nothing for batches that were trained on before the save. The next batch was read ahead
        of the save: its random state of that time is set first. For the one after it, the state of the save is set.
        """
        if number < self._num_taken:
            return
        if self._num_taken and number > self._num_taken:
            self.put_back()
        elif self._num_taken and self._read:
            super().load_state_dict(self._read)
        self._read = super().state_dict()

    def num_not_skipped(self, num_ranks: int) -> int:
        """Returns how many batches too few the Trainer skips where rank 0 reads those of `num_ranks` ranks: it skips
        one for each step. 0 unless the pass is a resumed one.
        """
        return self._num_taken * (num_ranks - 1)

    def state_dict(self) -> dict[str, Any]:
        # Nested: nothing else takes them for the present random state.
        return {"at": self.at, "begun": self._noted, "read": self._read}

    def has_saved(self, tree: Any) -> bool:
        return isinstance(tree, dict) and {"begun"} <= tree.keys() <= {"at", "begun", "read"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noted, self._read = state["begun"], state.get("read", {})


class _ReadBatches:
    """The indices of the batches of a loader, in place of its batch sampler: tells a `PassOrder` of each batch before
    its samples are read.
    """

    batches: Any = ()

    def __init__(self, batches: Any, order: PassOrder, loader: Any) -> None:
        self.batches = batches
        self._order = order
        self._reads_for_all = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
        self._draws_here = not loader.num_workers

    def __iter__(self) -> Iterator[Any]:
        num_at_once = PartialState().num_processes if self._reads_for_all else 1
        num_not_skipped = self._order.num_not_skipped(num_at_once)
        for number, batch in enumerate(itertools.islice(self.batches, num_not_skipped, None), num_not_skipped):
            if self._draws_here and number % num_at_once == 0:
                self._order.begin_read(number // num_at_once)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


class RestOfPass(IterableDataset[Any]):
    """The rest of a pass, for a Trainer that skips batches although the loader already stands at the saved position:
    yields `num_to_skip` times None, then the batches of the loader. It is the dataset of an object that accelerate's
    `skip_first_batches` accepts as a loader.
    """

    def __init__(self, state: DataLoaderState, *, num_to_skip: int) -> None:
        self._state = state
        self._num_to_skip = num_to_skip
        self._has_begun_next = False

    def as_loader(self) -> Any:
        """Returns the rest of the pass as an object that the Trainer reads like a loader. May read its first batch."""
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
