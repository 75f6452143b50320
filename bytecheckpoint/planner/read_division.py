"""Chooses the reader rank of every extent that several ranks want, or that a rank wants and cannot read. It knows
extents of files and ranks; how a rank carries out its share is in exchange_plan.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare, runs_by_ranks

MAX_TOGETHER = 64
"""Ranks that share the reading of the same bytes. More are divided into groups that each read them once, so that no
rank connects to all others."""
FEW_RANKS = 4
"""Largest number of ranks that connect to one reader rank for a few bytes. Bytes that more ranks want are broadcast as
a message.
"""
_COMMON_BYTES = 256 << 10
_COMMON_BYTES_OF_ALL = 256 << 20
"""Limit for these messages to all ranks together: they come from one store."""
COMMON_READER = 0
"""The rank that reads common bytes, if all can read them: the coordinator."""


class ReadGroup(NamedTuple):
    """Ranks that want the same runs, and share the reading of them; or with them, as the last one, a rank that reads
    all for them.
    """

    ranks: Sequence[int]
    parts: Sequence[Sequence[ExtentRun]]
    """The runs that each of them reads for all, in the order of the files. Equal for groups alike, so that what
    thousands of ranks do takes little memory."""


class ReadDivision(NamedTuple):
    """Who reads what, of all ranks."""

    groups: Sequence[ReadGroup]
    common: Sequence[tuple[int, ExtentRun]]
    """The reader rank of each run that is broadcast."""

    def groups_of_rank(self, num_ranks: int) -> list[list[int]]:
        """Returns the numbers of the groups that each rank is in."""
        numbers: list[list[int]] = [[] for _ in range(num_ranks)]
        for number, group in enumerate(self.groups):
            for rank in group.ranks:
                numbers[rank].append(number)
        return numbers


def assign_readers(
    wanted: Sequence[Sequence[ExtentRun]], extents: Extents, held: Sequence[Collection[int]] = ()
) -> list[ReaderShare]:
    """Returns the share of each rank in `divide_reading`."""
    division = divide_reading(wanted, extents, held)
    groups = ([division.groups[number] for number in numbers] for numbers in division.groups_of_rank(len(wanted)))
    return [share_of(rank, of_rank, division.common) for rank, of_rank in enumerate(groups)]


def divide_reading(
    wanted: Sequence[Sequence[ExtentRun]], extents: Extents, held: Sequence[Collection[int]] = ()
) -> ReadDivision:
    """Assigns a reader rank to every extent that two ranks or more want, or that its one rank cannot read, such that
    all read about as many bytes.

    `wanted` has the runs of each rank, which do not overlap and do not touch one another; ranks that want the same
    should have the same list, which is then looked at once. `held` has for each rank the files that it can read and
    others may not: a file that nobody holds is read by all. The reader rank is one of those that want the extent, if
    one of them can read it, else that holder of the file which reads the least; it gets few, long runs. Few bytes that
    more than FEW_RANKS want are common. The same input always gives the same groups.
    """
    holders = _holders_by_file(held)
    by_ranks = runs_by_ranks(wanted)
    common = _take_common(by_ranks, extents, min(_COMMON_BYTES, _COMMON_BYTES_OF_ALL // len(wanted)))
    division = _Division(len(wanted), extents)
    for together, runs in _runs_by_group(by_ranks):
        for of_file, same_runs in _runs_by_holders(runs, holders):
            division.add(together, of_file, same_runs)
    return ReadDivision(division.groups, [(min(holders.get(run.file, (COMMON_READER,))), run) for run in common])


def share_of(rank: int, groups: Iterable[ReadGroup], common: Sequence[tuple[int, ExtentRun]]) -> ReaderShare:
    """Returns the share of a rank, of the groups that it is in."""
    reads: list[ExtentRun] = []
    received: list[tuple[int, ExtentRun]] = []
    peers: set[int] = set()
    for ranks, parts in groups:
        for reader, part in zip(ranks, parts, strict=True):
            if reader != rank:
                received += [(reader, run) for run in part]
            elif part:
                reads += part
                peers.update(ranks)
    of_readers = sorted(received, key=lambda item: item[1])
    runs, readers = [run for _, run in common], [reader for reader, _ in common]
    return ReaderShare(reads, sorted(peers - {rank}), of_readers, runs, readers)


def _holders_by_file(held: Sequence[Collection[int]]) -> dict[int, list[int]]:
    """Returns the ranks, rising, that can read each file that not all can."""
    holders: dict[int, list[int]] = {}
    for rank, files in enumerate(held):
        for file in files:
            holders.setdefault(file, []).append(rank)
    return holders


def _runs_by_holders(
    runs: Sequence[ExtentRun], holders: Mapping[int, Sequence[int]]
) -> Iterator[tuple[Sequence[int] | None, Sequence[ExtentRun]]]:
    """Yields the runs of files that the same ranks can read, with these; None stands for all."""
    if not holders:
        yield None, runs
        return
    by_holders: dict[tuple[int, ...] | None, list[ExtentRun]] = {}
    for run in runs:
        of_file = holders.get(run.file)
        by_holders.setdefault(None if of_file is None else tuple(of_file), []).append(run)
    yield from by_holders.items()


class _Division:
    """The groups, while runs are assigned."""

    def __init__(self, num_ranks: int, extents: Extents) -> None:
        self.groups: list[ReadGroup] = []
        self._extents = extents
        self._read_bytes = [0] * num_ranks
        self._divided: dict[tuple[int, ...], _Divided] = {}
        """By the id of the runs and the loads. Replicas mostly have equal loads, and divide the same runs alike."""

    def add(self, together: Sequence[int], holders: Sequence[int] | None, runs: Sequence[ExtentRun]) -> None:
        """Divides runs that these ranks want among those of them that can read, or among others."""
        readers = together if holders is None else sorted({*together} & {*holders})
        if not readers and holders is not None:
            self._add_of_others(together, holders, runs)
            return
        divided = self._divide(runs, readers)
        for rank, num_bytes in zip(readers, divided.amounts, strict=True):
            self._read_bytes[rank] += num_bytes
        if len(together) > 1:
            parts = divided.parts
            if len(readers) < len(together):
                of_reader = dict(zip(readers, parts, strict=True))
                parts = [of_reader.get(rank, []) for rank in together]
            self.groups.append(ReadGroup(together, parts))

    def _add_of_others(self, together: Sequence[int], holders: Sequence[int], runs: Sequence[ExtentRun]) -> None:
        by_reader: dict[int, list[ExtentRun]] = {}
        for run in runs:  # each whole, by one rank: a peer connects to no more ranks than it must
            reader = min(holders, key=lambda rank: (self._read_bytes[rank], rank))
            self._read_bytes[reader] += self._extents.num_bytes(run)
            by_reader.setdefault(reader, []).append(run)
        for reader, part in by_reader.items():
            self.groups.append(ReadGroup([*together, reader], [*([] for _ in together), part]))

    def _divide(self, runs: Sequence[ExtentRun], readers: Sequence[int]) -> _Divided:
        least = min(self._read_bytes[rank] for rank in readers)
        loads = [self._read_bytes[rank] - least for rank in readers]
        key = (id(runs), *loads)
        if key not in self._divided:
            parts = _divide_runs(runs, loads, self._extents)
            amounts = [sum(map(self._extents.num_bytes, part)) for part in parts]
            self._divided[key] = _Divided(runs, parts, amounts)
        return self._divided[key]


class _Divided(NamedTuple):
    """Runs as some readers divide them."""

    runs: Sequence[ExtentRun]
    """Kept, so that no other runs get their id."""
    parts: Sequence[Sequence[ExtentRun]]
    amounts: Sequence[int]
    """Bytes of each part."""


def _take_common(by_ranks: dict[tuple[int, ...], list[ExtentRun]], extents: Extents, max_bytes: int) -> list[ExtentRun]:
    """Takes out the runs that many ranks want, up to `max_bytes`; runs that the most ranks want come first."""
    common: list[ExtentRun] = []
    many = [ranks for ranks in by_ranks if len(ranks) > FEW_RANKS]
    for ranks in sorted(many, key=lambda ranks: (-len(ranks), ranks)):
        num_bytes = sum(map(extents.num_bytes, by_ranks[ranks]))
        if num_bytes <= max_bytes:
            max_bytes -= num_bytes
            common += by_ranks.pop(ranks)
    return sorted(common)


def _runs_by_group(
    by_ranks: Mapping[tuple[int, ...], list[ExtentRun]],
) -> Iterator[tuple[Sequence[int], list[ExtentRun]]]:
    """Yields groups of ranks that share the reading of some runs; small ones first, which have the least choice."""
    for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
        num_groups = -(-len(ranks) // MAX_TOGETHER)
        ends = [len(ranks) * number // num_groups for number in range(num_groups + 1)]
        for first, end in pairwise(ends):
            yield ranks[first:end], by_ranks[ranks]


def _divide_runs(runs: Sequence[ExtentRun], loads: Sequence[int], extents: Extents) -> list[list[ExtentRun]]:
    """Divides the runs, in their order, into one part for each of the loads, which are bytes, so that the highest load
    with its part is as low as can be. A part ends with the extent in which it is full.
    """
    amount = sum(map(extents.num_bytes, runs))
    level = min(-(-(amount + filled) // count) for count, filled in enumerate(accumulate(sorted(loads)), start=1))
    parts: list[list[ExtentRun]] = []
    left = [*reversed(runs)]
    position = 0
    for quota_end in accumulate(max(0, level - load) for load in loads):
        parts.append([])
        while left and position < quota_end:
            file, first, end = left.pop()
            bounds = extents.bounds(file)
            stop = bisect_left(bounds, bounds[first] + quota_end - position, first + 1, end)
            parts[-1].append(ExtentRun(file, first, stop))
            position += bounds[stop] - bounds[first]
            if stop < end:
                left.append(ExtentRun(file, stop, end))
    parts[-1] += reversed(left)  # extents without bytes
    return parts
