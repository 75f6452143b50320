"""A training run that is killed and goes on with other numbers of ranks and workers, played in one process.

Each rank has streams and a data loader of its own. A journal holds what the trainer was given at each step; it keeps
the steps up to the last commit and forgets the others, as a run does that is killed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from data.sample_sources import KINDS, passes, plain
from torch.utils.data import DataLoader

from bytecheckpoint.data import Streams
from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.data.known_loaders import elastic_loader_of

SIZES = (1, 2, 3, 4, 6, 8)
Sample = tuple[str, Any]
Batch = list[Sample]
"""Pairs of a stream's id and a sample."""
Saved = dict[str, Any]
"""States of all streams by id."""
Storage = Callable[["Ranks"], Callable[["Ranks"], None]]
"""Saves the state of all ranks; what it returns loads it into others."""


class OneAhead:
    """Hands out a batch once it has the next one, as accelerate's loaders do."""

    def __init__(self, loader: DataLoader) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.base_dataloader)
        try:
            current = next(iterator)
        except StopIteration:
            return
        while True:
            try:
                following = next(iterator)
            except StopIteration:
                yield current
                return
            yield current
            current = following


@dataclass(frozen=True)
class Layout:
    """The ranks of one generation of processes."""

    size: int
    batch_size: int
    """Samples of one rank's batch."""
    num_workers: int = 0
    persistent_workers: bool = False
    one_ahead: bool = False
    endless: bool = False
    snapshot_every: int = 256


class Ranks:
    """One generation of processes."""

    def __init__(self, layout: Layout, make_sources: Callable[[], Mapping[str, Any]]) -> None:
        self.layout = layout
        self.loaders = [self._loader(make_sources(), rank) for rank in range(layout.size)]
        self.tracked: list[Any] = [elastic_loader_of(loader) for loader in self.loaders]
        self.iterators: list[Iterator[Any]] = []

    def _loader(self, sources: Mapping[str, Any], rank: int) -> Any:
        layout = self.layout
        streams = Streams(
            sources,
            rank=rank,
            size=layout.size,
            with_ids=True,
            endless=layout.endless,
            snapshot_every=layout.snapshot_every,
        )
        loader = DataLoader(
            streams,
            batch_size=layout.batch_size,
            collate_fn=list,
            num_workers=layout.num_workers,
            persistent_workers=layout.persistent_workers,
        )
        return OneAhead(loader) if layout.one_ahead else loader

    def begin_pass(self) -> None:
        """With the next step: workers take long to start."""
        self.iterators = []

    def step(self) -> list[Batch]:
        """The batch of each rank; an empty one where it has no samples."""
        if not self.iterators:
            self.iterators = [iter(loader) for loader in self.loaders]
        return [[(each, plain(sample)) for each, sample in self._batch(rank)] for rank in range(self.layout.size)]

    def _batch(self, rank: int) -> Batch:
        try:
            return next(self.iterators[rank])
        except StopIteration:
            self.iterators[rank] = iter(self.loaders[rank])
            return next(self.iterators[rank], [])

    def state(self) -> Saved:
        states: Saved = {}
        for loader in self.tracked:
            assert loader.refuse_inexact() is None
            for stream_id in loader.stream_ids():
                assert stream_id not in states
                states[stream_id] = copy.deepcopy(loader.stream_state(stream_id))
        assert sorted(states) == self.tracked[0].all_stream_ids()
        return states

    def load(self, states: Saved) -> None:
        parts = assign_streams(self.tracked[0], sorted(states), self.layout.size)
        for loader, ids in zip(self.tracked, parts, strict=True):
            loader.load_streams({each: copy.deepcopy(states[each]) for each in ids}, loader.shared_state())
        self.begin_pass()


def in_memory(ranks: Ranks) -> Callable[[Ranks], None]:
    """Keeps states as they are."""
    states = ranks.state()
    return lambda others: others.load(states)


@dataclass
class Run:
    """A run so far."""

    make_sources: Callable[[], Mapping[str, Any]]
    storage: Storage
    committed: list[list[Batch]] = field(default_factory=list)
    """The ranks' batches of each step up to the last commit."""
    load: Callable[[Ranks], None] | None = None
    """Loads the last commit."""
    ranks: Ranks | None = None
    sizes: set[int] = field(default_factory=set)

    def play(self, layout: Layout, random: Random) -> None:
        """One generation, from the last commit to its kill."""
        if self.ranks is None or self.ranks.layout != layout or random.random() < 0.5:
            self.ranks = Ranks(layout, self.make_sources)
        if self.load is not None:
            self.load(self.ranks)
        elif self.committed == []:
            self.ranks = Ranks(layout, self.make_sources)
        pending: list[list[Batch]] = []
        for _ in range(random.randint(4, 20)):
            if random.random() < 0.05:
                self.ranks.begin_pass()
            pending.append(self.ranks.step())
            if random.random() < 0.1:
                for loader in self.ranks.tracked:
                    loader.prepare_state()
            event = random.choice([*["train"] * 5, *["save"] * 3, "killed before the commit", "killed in a save"])
            if event == "save":
                self.load = self.storage(self.ranks)
                self.committed += pending
                self.sizes.add(layout.size)
                pending = []
            elif event == "killed before the commit":
                self.storage(self.ranks)
                return
            elif event == "killed in a save":
                loader = random.choice(self.ranks.tracked)
                for stream_id in loader.stream_ids()[:2]:
                    loader.stream_state(stream_id)
                return

    def num_samples(self) -> int:
        return sum(len(batch) for step in self.committed for batch in step)


def by_stream(steps: Sequence[Sequence[Batch]]) -> dict[str, list[Any]]:
    """The samples of each stream in the order in which they were taken."""
    found: dict[str, list[Any]] = {}
    for step in steps:
        for batch in step:
            for stream_id, sample in batch:
                found.setdefault(stream_id, []).append(sample)
    return found


def play_freely(seed: int, storage: Storage, kind: str | None = None) -> None:
    """A history in which everything changes: nothing is lost and nothing repeated in any stream, and in order."""
    random = Random(seed)
    kind = kind or random.choice(list(KINDS))
    lengths = {f"s{each:02d}": random.randint(0, 12) for each in range(random.randint(8, 20))}

    def make_sources() -> dict[str, Any]:
        return {
            stream_id: KINDS[kind](list(range(100 * number, 100 * number + length)))
            for number, (stream_id, length) in enumerate(lengths.items())
        }

    run = Run(make_sources, storage)
    endless = random.random() < 0.3
    snapshot_every = random.choice([1, 3, 256])
    per_epoch = sum(len(passes(source, 1)) for source in make_sources().values())
    while run.num_samples() < 2.5 * per_epoch:
        num_workers = random.choice([0, 0, 0, 2])
        layout = Layout(
            size=random.choice(SIZES[:4] if num_workers else SIZES),
            batch_size=random.randint(1, 6),
            num_workers=num_workers,
            persistent_workers=bool(num_workers) and random.random() < 0.5,
            one_ahead=random.random() < 0.3,
            endless=endless,
            snapshot_every=snapshot_every,
        )
        run.play(layout, random)
    assert run.load is not None
    assert run.ranks is not None
    run.load(run.ranks)
    found = by_stream(run.committed)
    counts = {each: state["samples"] for each, state in run.ranks.state().items()}
    assert {each: len(samples) for each, samples in found.items()} == {each: num for each, num in counts.items() if num}
    for stream_id, source in make_sources().items():
        samples = found.get(stream_id, [])
        # Rows that fill slowly may need many passes.
        uninterrupted = passes(source, 2 + max(counts.values()) * 6)[: len(samples)] if samples else []
        assert samples == uninterrupted, stream_id


def play_in_step(seed: int, storage: Storage, kind: str | None = None) -> None:
    """A history of one global batch on any number of ranks: each is the uninterrupted run's as a set."""
    random = Random(seed)
    kind = kind or random.choice(list(KINDS))
    num_workers = 2 if seed % 3 == 0 else 0
    num_streams = 24 * max(num_workers, 1)
    # With workers many short steps: that a pass goes on with the right worker shows after an odd number of them.
    global_batch = 24 if num_workers else random.choice([24, 48])
    length = random.randint(5, 9)

    def make_sources() -> dict[str, Any]:
        return {
            f"s{each:02d}": KINDS[kind](list(range(100 * each, 100 * each + length))) for each in range(num_streams)
        }

    def layout(size: int) -> Layout:
        is_alone = num_workers and random.random() < 0.5
        return Layout(
            size=size,
            batch_size=global_batch // size,
            num_workers=num_workers,
            persistent_workers=bool(is_alone),
            one_ahead=random.random() < 0.3,
            snapshot_every=random.choice([2, 256]),
        )

    per_epoch = max(1, sum(len(passes(source, 1)) for source in make_sources().values()))
    run = Run(make_sources, storage)
    # Each worker is a process of its own, and so many take long to start.
    sizes = random.sample(SIZES[:4] if num_workers else SIZES, 3)
    while run.num_samples() < 2.5 * per_epoch:
        run.play(layout(random.choice(sizes)), random)
    whole = Ranks(Layout(1, global_batch, num_workers), make_sources)
    for number, step in enumerate(run.committed):
        uninterrupted = sorted(sample for batch in whole.step() for sample in batch)
        assert sorted(sample for batch in step for sample in batch) == uninterrupted, f"step {number}"
