"""Accelerate's data loaders as a checkpoint sees them: what the trainer took of a pass, the order of that pass, and the
random state that is set once the first batch after a load is there.

Importing this wraps `__iter__` of accelerate's loader classes, and `__init__` of their base, for the whole process:
nothing else tells when a pass begins, and the generators of that moment decide its order. It wraps what reads batches
for all ranks too. Batches and random numbers stay the same.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipDataLoader,
)
from accelerate.state import PartialState
from torch.utils.data import BatchSampler, RandomSampler

from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.data.known_loaders import elastic_loader_of
from bytecheckpoint.integrations.accelerate.loader_facts import (
    batches_per_skip,
    core_of,
    generator_of,
    has_first_iterator,
    is_of_torchdata,
    order_of,
    sampler_of,
)

_LOADERS = (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader)
_turns = itertools.count()


@dataclass
class LoaderPass:
    """A pass over a prepared loader, or over one that `skip_first_batches` has made of it."""

    loader: Callable[[], Any]
    """Weak reference to the loader that is iterated over."""
    epoch: int
    order: dict[str, Any]
    """Generators as they were when it began."""
    num_taken: int = 0
    """Batches that the trainer took, those that were skipped included."""
    turn: int = 0
    """Number of the last batch of this pass, counted over the batches of all loaders."""
    is_over: bool = False
    is_left: bool = False
    """True if the trainer left the loop before its end."""

    def has_ended(self) -> bool:
        """Returns True if no batch will follow; already in the loop at the last batch, as accelerate reads ahead."""
        return self.is_over or bool(getattr(self.loader(), "end_of_dataloader", False))


@dataclass
class ResumedPass:
    """Loaded state that the next pass over a loader begins with."""

    prepared: Callable[[], Any]
    """Weak reference to the prepared loader."""
    shared: Mapping[str, Any]
    restore_rng: Callable[[], object] | None
    """Sets the random state; only for the loader that was being read when the save was made."""
    stream: Mapping[str, Any] | None = None
    """State of this rank; None if the checkpoint is of another number of ranks."""
    order: dict[str, Any] | None = None
    """Generators as they were when the saved pass began; None if the save was made between passes."""
    num_to_skip: int = 0
    """Batches that the loader itself is to leave out."""


PASSES: MutableMapping[Any, LoaderPass] = weakref.WeakKeyDictionary()
RESUMES: MutableMapping[Any, ResumedPass] = weakref.WeakKeyDictionary()
"""PASSES and RESUMES have as keys an object that a loader shares with the one that `skip_first_batches` makes of it."""


class _SamplingNoted:
    """Replaces the sampler of a loader while a pass begins. The first iteration over a sampler draws the order of the
    pass; this notes the generators at that time. For a resumed pass it draws with the noted generators instead, and
    then puts the random state of the process back.

    The states at the call of the loader's `__iter__` may be others: torchdata's loader makes its first iterator, and
    draws, before that.
    """

    def __init__(self, loader: Any, order: dict[str, Any], *, replays: bool) -> None:
        self._order, self._replays = order, replays
        self._sampler, self._generator, self._batches = sampler_of(loader), generator_of(loader), None
        is_drawn = not isinstance(self._sampler, SeedableRandomSampler) or (replays and "sampler_rng" in order)
        if self._sampler is not None and is_drawn and type(core_of(loader)) is BatchSampler:
            self._batches = core_of(loader)
            self._batches.sampler = self

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)  # such as set_epoch, which accelerate calls meanwhile

    def __iter__(self) -> Iterator[Any]:
        order, generator, now = self._order, self._generator, RngState().state_dict()
        if not self._replays:
            order |= {"sampler_rng": now, "generator": None if generator is None else generator.get_state()}
            yield from self._sampler
            return
        RngState().load_state_dict(order.get("sampler_rng", now))
        if generator is not None and order["generator"] is not None:
            generator.set_state(order["generator"])
        samples = iter(self._replayed())
        first = list(itertools.islice(samples, 1))
        RngState().load_state_dict(now)
        yield from itertools.chain(first, samples)

    def _replayed(self) -> Any:
        """Returns a sampler that draws like that of the saved pass: a RandomSampler in place of a seedable one, because
        accelerate sets the seedable one when workers of torchdata's loader have already begun the first pass.
        """
        sampler = self._sampler
        if not isinstance(sampler, SeedableRandomSampler):
            return sampler
        generator = None
        if self._order["generator"] is not None:
            generator = torch.Generator().set_state(self._order["generator"])
        return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.sampler = self._sampler
            self._batches = None


def _wrap_init(cls: Any) -> None:
    original = cls.__init__

    def note_order(loader: Any, dataset: Any, *arguments: Any, batch_sampler: Any = None, **keywords: Any) -> None:
        given = SimpleNamespace(dataset=dataset, sampler=None, batch_sampler=batch_sampler)
        if batch_sampler is None or not keywords.get("num_workers") or type(core_of(given)) is not BatchSampler:
            original(loader, dataset, *arguments, batch_sampler=batch_sampler, **keywords)
            return
        order = order_of(given)
        sampling = _SamplingNoted(given, order, replays=False)
        try:
            original(loader, dataset, *arguments, batch_sampler=batch_sampler, **keywords)
        finally:
            sampling.close()
        if has_first_iterator(loader):
            loader.order_of_first_pass = order

    cls.__init__ = note_order


def _wrap_iter(cls: Any) -> None:
    original = cls.__iter__

    def begin_pass(loader: Any) -> Iterator[Any]:
        kind = type(loader)
        elastic_loader_of(loader)  # gives a loader of bcp.data.Streams a class that counts from the first pass on
        return _iterated(loader, original) if type(loader) is kind else iter(loader)

    cls.__iter__ = begin_pass


def _wrap_fetch(cls: Any) -> None:
    original = cls._fetch_batches

    def note_state(loader: Any, iterator: Any) -> Any:
        """Fetches the batches of all ranks, and sets `dl_state_dict` to the state of torchdata's loader before them.
        accelerate takes the state before the last of them, and subtracts the others from its counts: too many if a
        batch is split, and nothing from the states of workers and datasets.
        """
        if loader.state.process_index != 0 or not is_of_torchdata(loader):
            return original(loader, iterator)
        state = loader.base_dataloader.state_dict()
        fetched = original(loader, iterator)
        loader.dl_state_dict = state
        return fetched

    cls._fetch_batches = note_state


def _iterated(loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yields the batches of a pass, which begins as RESUMES says, and notes in PASSES how far the trainer is."""
    core = core_of(loader)
    resume = RESUMES.pop(core, None)
    restore = _begin_resumed(loader, resume) if resume is not None else None
    prepared = resume.prepared() if resume is not None else None
    skipped_by_sampler = int(getattr(loader.batch_sampler, "skip_batches", 0))
    num_ranks = PartialState().num_processes
    skipped = max(int(getattr(loader, "skip_batches", 0)), skipped_by_sampler // batches_per_skip(loader, num_ranks))
    if resume is not None and resume.stream is not None and prepared is loader and is_of_torchdata(loader):
        skipped = resume.shared["batches"]
    going_on = resume.order if resume is not None else None
    order = going_on or order_of(loader)
    if has_first_iterator(loader) and "order_of_first_pass" in vars(loader):
        order = {**loader.order_of_first_pass, "seed": order["seed"]}  # its workers have begun that pass already
    this = LoaderPass(weakref.ref(loader), int(getattr(loader, "iteration", 0)), order, skipped)
    PASSES[core] = this
    sampling = _SamplingNoted(loader, order, replays=going_on is not None)
    try:
        for batch in original(loader):
            sampling.close()
            if restore is not None:
                restore()
                restore = None
            this.num_taken, this.turn = this.num_taken + 1, next(_turns)
            yield batch
    except GeneratorExit:
        this.is_left = True
        raise
    finally:
        sampling.close()
    this.is_over = True
    if prepared is not None and prepared is not loader:  # accelerate counts the epochs of each by itself
        prepared.iteration = this.epoch + 1


def _begin_resumed(loader: Any, resume: ResumedPass) -> Callable[[], None]:
    """Makes the next pass begin as the saved pass did. Returns a function to call when its first batch is there."""
    is_own = resume.prepared() is loader
    before = RngState().state_dict()
    if resume.order is not None:
        RngState().load_state_dict(resume.order.get("rng", before))
    if is_own and resume.num_to_skip:
        loader.skip_batches = resume.num_to_skip

    def on_first_batch() -> None:
        """Ends the skipping, which is for one pass. Then calls `restore_rng` if there is one; else puts back the random
        state that the saved order has replaced, if it has.
        """
        if is_own and resume.num_to_skip:
            loader.skip_batches = 0
        if resume.restore_rng is not None:
            resume.restore_rng()
        elif resume.order is not None:
            RngState().load_state_dict(before)

    return on_first_batch


_wrap_init(DataLoaderAdapter)
for _cls in _LOADERS:
    _wrap_iter(_cls)
_wrap_fetch(DataLoaderDispatcher)
