"""The train loaders of a Trainer: their state in a checkpoint, and its load before the first pass over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

from bytecheckpoint import api
from bytecheckpoint.adapters.data.loader_state import DataLoaderState, Elastic
from bytecheckpoint.adapters.stateful import is_stateful
from bytecheckpoint.data.known_loaders import elastic_loader_of
from bytecheckpoint.data.streams import Streams
from bytecheckpoint.data.tracked_loader import TrackedLoader
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.lightning.paths import ChosenCheckpoint
from bytecheckpoint.options import LoadOptions

logger = logging.getLogger("bytecheckpoint")


def count_batches_anew(trainer: Any) -> None:
    """Sets the count of batches in the epoch to 0 if the checkpoint was saved after the last batch of an epoch. Does
    nothing if the loader has a length: Lightning does it then. Call it before the first epoch.
    """
    loop = trainer.fit_loop.epoch_loop
    has_length = trainer.num_training_batches != float("inf")
    if not has_length and loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.batch_progress.current.completed = -1  # the loop will add the batch in whose hook the save was made


class LoadLater(NamedTuple):
    """A checkpoint with states of loaders, to load once this run has its loaders."""

    path: str
    num_loaders: int
    storage_options: Mapping[str, Any] | None
    timeout_s: float


class TrainLoaders:
    """The train loaders of one strategy, in the order in which Lightning sets them up."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        self._waiting: LoadLater | None = None
        self._once_loaded: list[Callable[[], None]] = []
        self._restore_random: Callable[[], object] = lambda: None
        self._was_loaded = False
        self._round: object = None
        self._ended: list[bool] = []
        self.states: list[DataLoaderState] = []

    def load_later(
        self,
        found: ChosenCheckpoint,
        storage_options: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        restore_random: Callable[[], object],
    ) -> None:
        """Notes the checkpoint, from which `add` then loads the state of each loader. Forgets an earlier one.
        `restore_random` puts the random state of the checkpoint back.
        """
        self._restore_random = restore_random
        num_loaders = int(found.metadata.get("num_loaders", 0))
        self._ended = found.metadata.get("ended_loaders", [])
        self._stop_waiting()
        self._waiting = LoadLater(found.path, num_loaders, storage_options, timeout_s) if num_loaders else None

    def when_loaded(self, path: str, remove: Callable[[], None]) -> None:
        """Calls `remove`, which removes the checkpoint at the path: now, or, if loaders are to be filled from it, once
        `add` has filled them or training does not need it any more.
        """
        if self._waiting is not None and self._waiting.path == path:
            self._once_loaded.append(remove)  # a search for the learning rate removes it before its loaders are made
        else:
            remove()

    def _stop_waiting(self) -> None:
        self._waiting = None
        removals, self._once_loaded = self._once_loaded, []
        for remove in removals:
            remove()

    def add(self, loader: object, loop: Any, *, rank: int, size: int) -> None:
        """Adds a train loader of Lightning's fit loop, and loads its state from the checkpoint of `load_later`, if any.
        Ignores a loader that has no state. All ranks call it.
        """
        if loop._data_fetcher is not self._round:  # made anew whenever Lightning sets up all of its train loaders
            self._round, self.states = loop._data_fetcher, []
        if elastic_loader_of(loader) is None and not is_stateful(loader):
            return
        if rank == 0:
            _warn_of_wrapped_sampler(loader, number=len(self.states))
        state = DataLoaderState(loader, rank=rank, size=size, elastic=self._elastic)
        self.states.append(state)
        if self._waiting is None:
            return
        # Lightning sets it after the first pass has begun, which asks the sampler for the batches to skip.
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        path, num_loaders, storage_options, timeout_s = self._waiting
        name = "data" if num_loaders == 1 else str(len(self.states) - 1)
        entries = {"data": state} if num_loaders == 1 else {"data": {name: state}}
        api.load(
            path,
            entries,
            step=None,
            strict=num_loaders == 1,  # the other loaders of the checkpoint come after this one
            storage_options=storage_options,
            options=LoadOptions(timeout_s=timeout_s),
        )
        self._was_loaded = True
        if len(self.states) == num_loaders:
            self._stop_waiting()

    def entries(self, fetcher: Any) -> dict[str, Any]:
        """Returns the entries of a state to save: none, `data`, or one below `data` for each loader. At the end of an
        epoch, counts the batches that Lightning's `fetcher` had read ahead as trained.
        """
        if fetcher is not None and fetcher.done:  # all that was read ahead is trained on: the next epoch comes
            for state in self.states:
                if isinstance(state.streams, TrackedLoader):
                    state.streams._settle()
        if len(self.states) == 1:
            return {"data": self.states[0]}
        return {"data": {str(number): state for number, state in enumerate(self.states)}} if self.states else {}

    def ended(self, fetcher: Any) -> list[bool]:
        """Returns for each loader of a CombinedLoader whether it has ended a pass in this epoch and begun another; an
        empty list between epochs, or if its loaders make only one pass in an epoch.
        """
        if fetcher is None or fetcher.done or fetcher._combined_loader is None:
            return []
        return list(getattr(fetcher._combined_loader._iterator, "_consumed", []))

    def go_on_from_ended(self, fetcher: Any) -> None:
        """Tells a CombinedLoader which loaders had ended a pass when the checkpoint was saved: the epoch ends once all
        have.
        """
        iterator: Any = getattr(fetcher._combined_loader, "_iterator", None)
        now = getattr(iterator, "_consumed", [])
        if len(now) == len(self._ended) > 0:
            iterator._consumed = [before or since for before, since in zip(self._ended, now, strict=True)]
        self._ended = []

    def begin_next_epoch(self, loop: Any) -> None:
        """Begins the passes over the loaders of Lightning's fit loop once more where the checkpoint was saved after the
        last batch of an epoch: loaders of torchdata go on with the rest of that epoch, which is empty, and Lightning
        would take it for the next one.
        """
        is_at_end, self._was_loaded = self._was_loaded and loop.epoch_loop.batch_progress.is_last_batch, False
        if is_at_end and any(hasattr(state.loader, "next_iter_state") for state in self.states):
            for loader in loop._combined_loader.flattened:
                _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
            self._restore_random()
            iter(loop._data_fetcher)

    def check_read_ahead(self, fetcher: Any) -> None:
        """Raises CheckpointMismatchError (conflict) if Lightning reads another number of batches ahead of the step than
        the `read_ahead` of the streams. Warns if the checkpoint has more loaders than this run; their states stay
        unread.
        """
        if self._waiting is not None:
            logger.warning("the checkpoint has more train loaders than this run with a state (%d)", len(self.states))
            self._stop_waiting()
        ahead = getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0
        for state in self.states:
            streams = getattr(state.loader, "dataset", None)
            if isinstance(streams, Streams) and streams.read_ahead != ahead:
                raise CheckpointMismatchError(
                    f"Lightning takes {ahead} batches of this loader ahead of the step, and its Streams count on "
                    f"{streams.read_ahead}, so a resumed run would lose or repeat samples; nothing was trained: pass "
                    f"Streams(..., read_ahead={ahead})",
                    kind="conflict",
                )

    def clear(self) -> None:
        """Forgets the loaders, when training has ended."""
        self._stop_waiting()
        self._round, self.states = None, []


def _warn_of_wrapped_sampler(loader: object, *, number: int) -> None:
    """Warns of a random sampler that Lightning divides between ranks: a loader's state lacks what is in the wrapper."""
    # Not the sampler of the loader, which is another one beside a batch sampler of torchdata's.
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSamplerWrapper) and hasattr(sampler.dataset._sampler, "generator"):
        logger.warning(
            "the order of train loader %d is in no checkpoint, because Lightning has wrapped its %s for several ranks: "
            "a run that resumes within an epoch would skip samples and repeat others. Make the loader with "
            "sampler=DistributedSampler(dataset) in place of it",
            number,
            type(sampler.dataset._sampler).__name__,
        )
