"""Which rank reads what several ranks want. It knows extents of files and who wants them, and nothing of tensors or of
how bytes travel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from bytecheckpoint.manifest import DataFile

MAX_TOGETHER = 64
"""Ranks that share the reading of the same bytes: more are divided into groups that each read them once, so that no
rank is connected to all others."""
FEW_RANKS = 4
"""So many ranks at most connect with one that reads something small for them. What more of them want travels with the
messages that all ranks get anyway."""
_COMMON_BYTES = 256 << 10
_COMMON_BYTES_OF_ALL = 256 << 20
"""Of such messages to all ranks together: they come from one store."""
_UNCHECKED_BYTES = 1 << 20
"""What counts as an extent of a file that has no checksums."""


class Run(NamedTuple):
    """Consecutive extents of a file."""

    file: int
    first: int
    end: int
    """One past the last."""


class Share(NamedTuple):
    """What one rank does for others, and they for it."""

    reads: Sequence[Run]
    """To be read by this rank, which wants them too, and passed on."""
    takers: Sequence[int]
    """The ranks to which it passes something on, rising."""
    received: Sequence[tuple[int, Run]]
    """Who reads what this rank wants and does not read; in the order of the files."""
    common: Sequence[Run] = ()
    """Read by the coordinator and sent to all; the same for every rank, whether it wants these runs or not."""


class Extents:
    """Where the extents of each file begin; computed when first asked for."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = files
        self._bounds: dict[int, Sequence[int]] = {}

    def bounds(self, file: int) -> Sequence[int]:
        """The byte offset of each extent of the file, and its length."""
        if file not in self._bounds:
            lengths, byte_length = self._files[file].extent_lengths, self._files[file].byte_length
            unchecked = [*range(0, byte_length, _UNCHECKED_BYTES), byte_length]
            self._bounds[file] = [0, *accumulate(lengths)] if lengths else unchecked
        return self._bounds[file]

    def num_bytes(self, run: Run) -> int:
        bounds = self.bounds(run.file)
        return bounds[run.end] - bounds[run.first]


def max_common_bytes(num_ranks: int) -> int:
    """The most that travels with the messages of a load."""
    return min(_COMMON_BYTES, _COMMON_BYTES_OF_ALL // max(num_ranks, 1))


def share_out(wanted: Sequence[Sequence[Run]], extents: Extents, *, common_bytes: int) -> list[Share]:
    """One reader for every extent that two ranks or more want, such that all ranks read about as many bytes.

    `wanted` has the runs of each rank, which do not overlap and do not touch one another. Who reads is one of those
    who want it; it gets few, long runs. But what more than FEW_RANKS want is common, up to so many bytes in all. The
    same input always gives the same shares.
    """
    by_ranks = _runs_by_ranks(wanted)
    common = _take_common(by_ranks, extents, common_bytes)
    reads: list[list[Run]] = [[] for _ in wanted]
    received: list[list[tuple[int, Run]]] = [[] for _ in wanted]
    takers: list[set[int]] = [set() for _ in wanted]
    read_bytes = [0] * len(wanted)
    for together, runs in _runs_by_group(by_ranks):
        if len(together) == 1:
            read_bytes[together[0]] += sum(map(extents.num_bytes, runs))
            continue
        parts = _divide(runs, [read_bytes[rank] for rank in together], extents)
        for reader, part in zip(together, parts, strict=True):
            others = [rank for rank in together if rank != reader and part]
            read_bytes[reader] += sum(map(extents.num_bytes, part))
            reads[reader] += part
            takers[reader].update(others)
            for taker in others:
                received[taker] += [(reader, run) for run in part]
    return [
        Share(own, sorted(of_own), sorted(others, key=lambda item: item[1]), common)
        for own, of_own, others in zip(reads, takers, received, strict=True)
    ]


def _take_common(by_ranks: dict[tuple[int, ...], list[Run]], extents: Extents, max_bytes: int) -> list[Run]:
    """The runs that many ranks want and that are small in all, which are then taken out; those of most ranks first."""
    common: list[Run] = []
    many = [ranks for ranks in by_ranks if len(ranks) > FEW_RANKS]
    for ranks in sorted(many, key=lambda ranks: (-len(ranks), ranks)):
        num_bytes = sum(map(extents.num_bytes, by_ranks[ranks]))
        if num_bytes <= max_bytes:
            max_bytes -= num_bytes
            common += by_ranks.pop(ranks)
    return sorted(common)


def _runs_by_group(by_ranks: Mapping[tuple[int, ...], list[Run]]) -> Iterator[tuple[Sequence[int], list[Run]]]:
    """The ranks that share the reading of some runs. First those of few: they have the least choice."""
    for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
        num_groups = -(-len(ranks) // MAX_TOGETHER)
        ends = [len(ranks) * number // num_groups for number in range(num_groups + 1)]
        for first, end in pairwise(ends):
            yield ranks[first:end], by_ranks[ranks]


def _runs_by_ranks(wanted: Sequence[Sequence[Run]]) -> dict[tuple[int, ...], list[Run]]:
    """Every wanted extent once, under exactly those ranks that want it; runs are in the order of the files."""
    # A set of ranks is a number with a bit for each while files are swept: it changes at every begin and end.
    changes: dict[tuple[int, int], int] = {}
    for rank, runs in enumerate(wanted):
        for file, first, end in runs:
            for place in ((file, first), (file, end)):
                changes[place] = changes.get(place, 0) ^ (1 << rank)
    by_bits: dict[int, list[Run]] = {}
    bits = 0
    for (file, first), (_, end) in pairwise(sorted(changes)):
        bits ^= changes[file, first]
        if bits:
            by_bits.setdefault(bits, []).append(Run(file, first, end))
    return {_ranks_in(bits): runs for bits, runs in by_bits.items()}


def _ranks_in(bits: int) -> tuple[int, ...]:
    ranks = []
    while bits:
        lowest = bits & -bits
        ranks.append(lowest.bit_length() - 1)
        bits ^= lowest
    return tuple(ranks)


def _divide(runs: Sequence[Run], loads: Sequence[int], extents: Extents) -> list[list[Run]]:
    """The runs in a part for each load, such that those that are low so far get most."""
    return _cut(runs, _level(loads, sum(map(extents.num_bytes, runs))), extents)


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """How much to add to each load so that the highest that is added to is as low as can be."""
    rising = sorted(loads)
    level = filled = 0
    for count, load in enumerate(rising, start=1):
        filled += load
        level = -(-(amount + filled) // count)
        if count == len(rising) or level <= rising[count]:
            break
    return [max(0, level - load) for load in loads]


def _cut(runs: Sequence[Run], quotas: Sequence[int], extents: Extents) -> list[list[Run]]:
    """The runs, in their order, in one part for each quota, cut at the extent where the quotas before it are full."""
    starts = [0, *accumulate(map(extents.num_bytes, runs))]
    parts: list[list[Run]] = []
    begin = (0, 0)  # a run, and how many of its extents are given away
    for quota_end in accumulate(quotas):
        end = _place_of(min(quota_end, starts[-1]), runs, starts, extents)
        end = max(begin, end)
        parts.append(_between(runs, begin, end))
        begin = end
    parts[-1] += _between(runs, begin, (len(runs), 0))
    return parts


def _place_of(position: int, runs: Sequence[Run], starts: Sequence[int], extents: Extents) -> tuple[int, int]:
    """The first extent that begins at this byte of the runs or behind it."""
    number = max(bisect_left(starts, position) - 1, 0)
    if position == 0 or number >= len(runs):
        return (0, 0) if position == 0 else (len(runs), 0)
    run = runs[number]
    bounds = extents.bounds(run.file)
    extent = bisect_left(bounds, bounds[run.first] + position - starts[number], run.first, run.end)
    return (number, extent - run.first) if extent < run.end else (number + 1, 0)


def _between(runs: Sequence[Run], begin: tuple[int, int], end: tuple[int, int]) -> list[Run]:
    parts = []
    for number in range(begin[0], min(end[0] + 1, len(runs))):
        run = runs[number]
        first = run.first + (begin[1] if number == begin[0] else 0)
        stop = run.first + end[1] if number == end[0] else run.end
        if first < stop:
            parts.append(Run(run.file, first, stop))
    return parts
