"""Chooses the reader rank of every extent that several ranks want. It knows extents of files and ranks, and neither
tensors nor connections.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from bytecheckpoint.manifest import DataFile

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
_UNCHECKED_BYTES = 1 << 20
"""Length of an extent in a file that has no checksums."""


class ExtentRun(NamedTuple):
    """Consecutive extents of a file."""

    file: int
    first: int
    end: int
    """One past the last."""


class ReaderShare(NamedTuple):
    """The part of one rank in reading the runs that several ranks want."""

    reads: Sequence[ExtentRun]
    """Runs that this rank reads for itself and for other ranks."""
    peers: Sequence[int]
    """The ranks that this rank sends bytes to, rising."""
    received: Sequence[tuple[int, ExtentRun]]
    """The reader rank of each run that this rank wants and does not read, in the order of the files."""
    common: Sequence[ExtentRun] = ()
    """Runs that the coordinator reads and broadcasts. They are the same for every rank, whether it wants them or not.
    """


class Extents:
    """The bounds of the extents of each file, computed when first asked for."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = files
        self._bounds: dict[int, Sequence[int]] = {}

    def bounds(self, file: int) -> Sequence[int]:
        """Returns the byte offset of each extent of the file, and the length of the file."""
        if file not in self._bounds:
            lengths, byte_length = self._files[file].extent_lengths, self._files[file].byte_length
            unchecked = [*range(0, byte_length, _UNCHECKED_BYTES), byte_length]
            self._bounds[file] = [0, *accumulate(lengths)] if lengths else unchecked
        return self._bounds[file]

    def num_bytes(self, run: ExtentRun) -> int:
        bounds = self.bounds(run.file)
        return bounds[run.end] - bounds[run.first]


def max_common_bytes(num_ranks: int) -> int:
    """Returns the largest number of bytes that a load broadcasts."""
    return min(_COMMON_BYTES, _COMMON_BYTES_OF_ALL // max(num_ranks, 1))


def assign_readers(wanted: Sequence[Sequence[ExtentRun]], extents: Extents, *, common_bytes: int) -> list[ReaderShare]:
    """Assigns a reader rank to every extent that two ranks or more want, such that all read about as many bytes.

    `wanted` has the runs of each rank, which do not overlap and do not touch one another. The reader rank is one of
    those that want the extent; it gets few, long runs. What more than FEW_RANKS want is common, up to `common_bytes`
    in all. The same input always gives the same shares.
    """
    by_ranks = _runs_by_ranks(wanted)
    common = _take_common(by_ranks, extents, common_bytes)
    reads: list[list[ExtentRun]] = [[] for _ in wanted]
    received: list[list[tuple[int, ExtentRun]]] = [[] for _ in wanted]
    peers: list[set[int]] = [set() for _ in wanted]
    read_bytes = [0] * len(wanted)
    for together, runs in _runs_by_group(by_ranks):
        if len(together) == 1:
            read_bytes[together[0]] += sum(map(extents.num_bytes, runs))
            continue
        quotas = _level([read_bytes[rank] for rank in together], sum(map(extents.num_bytes, runs)))
        parts = _cut(runs, quotas, extents)
        for reader, part in zip(together, parts, strict=True):
            others = [rank for rank in together if rank != reader and part]
            read_bytes[reader] += sum(map(extents.num_bytes, part))
            reads[reader] += part
            peers[reader].update(others)
            for peer in others:
                received[peer] += [(reader, run) for run in part]
    return [
        ReaderShare(own, sorted(of_own), sorted(others, key=lambda item: item[1]), common)
        for own, of_own, others in zip(reads, peers, received, strict=True)
    ]


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


def _runs_by_ranks(wanted: Sequence[Sequence[ExtentRun]]) -> dict[tuple[int, ...], list[ExtentRun]]:
    """Returns every wanted extent once, under exactly those ranks that want it; runs are in the order of the files."""
    # A set of ranks is a number with a bit for each while files are swept: it changes at every begin and end.
    changes: dict[tuple[int, int], int] = {}
    for rank, runs in enumerate(wanted):
        for file, first, end in runs:
            for place in ((file, first), (file, end)):
                changes[place] = changes.get(place, 0) ^ (1 << rank)
    by_bits: dict[int, list[ExtentRun]] = {}
    bits = 0
    for (file, first), (_, end) in pairwise(sorted(changes)):
        bits ^= changes[file, first]
        if bits:
            by_bits.setdefault(bits, []).append(ExtentRun(file, first, end))
    return {_ranks_in(bits): runs for bits, runs in by_bits.items()}


def _ranks_in(bits: int) -> tuple[int, ...]:
    ranks = []
    while bits:
        lowest = bits & -bits
        ranks.append(lowest.bit_length() - 1)
        bits ^= lowest
    return tuple(ranks)


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """Returns the amount to add to each load so that the highest changed load is as low as can be."""
    rising = sorted(loads)
    level = filled = 0
    for count, load in enumerate(rising, start=1):
        filled += load
        level = -(-(amount + filled) // count)
        if count == len(rising) or level <= rising[count]:
            break
    return [max(0, level - load) for load in loads]


def _cut(runs: Sequence[ExtentRun], quotas: Sequence[int], extents: Extents) -> list[list[ExtentRun]]:
    """Divides the runs, in their order, into one part for each quota of bytes. A part ends with the extent in which its
    quota is full; the last one takes what is left.
    """
    parts: list[list[ExtentRun]] = [[] for _ in quotas]
    ends = list(accumulate(quotas))
    number = position = 0
    for run in runs:
        bounds, first = extents.bounds(run.file), run.first
        while first < run.end:
            is_last = number == len(parts) - 1
            quota_end = bounds[first] + ends[number] - position
            stop = run.end if is_last else bisect_left(bounds, quota_end, first, run.end)
            if first < stop:
                parts[number].append(ExtentRun(run.file, first, stop))
                position += bounds[stop] - bounds[first]
                first = stop
            number += not is_last and position >= ends[number]
    return parts
