"""Divides each rank's load plan into what it reads and what others read for it, by the reader ranks that
read_division.py has chosen. Both are cut into units, which the reader rank and its peers derive alike from what was
agreed on. This module knows extents of files and ranks, and no connections; it reads nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import boxes_in_run, item_bytes_of
from bytecheckpoint.planner.coalesce import cut_flat, fetch_of

_FEW_BITS = 64
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
    """The ranks of other hosts to which this rank sends bytes, in ascending order."""
    received: Sequence[tuple[int, ExtentRun]]
    """Each run that this rank wants but neither reads nor relays, after the rank of this host in whose memory it is; in
    the order of the files."""
    relayed: Sequence[tuple[int, ExtentRun]] = ()
    """Each run that this rank receives for all of its host, after its reader rank; in the order of the files."""
    takers: Sequence[int] = ()
    """The ranks of this host that take what this rank reads or relays, in ascending order."""
    common: Sequence[tuple[int, ExtentRun]] = ()
    """Each run that the coordinator broadcasts, after its reader rank; in the order of the files. They are the same for
    every rank, whether it wants them or not."""


class DividedPlan(NamedTuple):
    """A load plan carried out with other ranks. The parts of a fetch are the bytes of a unit that this rank wants."""

    shared: Sequence[Fetch]
    """Fetches that this rank reads and of which other ranks want pieces."""
    alone: Sequence[Fetch]
    """Fetches that this rank reads for itself alone."""
    received: Mapping[int, Sequence[Fetch]]
    """Units that this rank takes from the memory of each other rank of its host, in file order. Units of which it wants
    nothing, such as those between the rows of a box, are left out; the list may be empty."""
    relayed: Mapping[int, Sequence[Fetch]]
    """Units that each reader rank on another host may send to this one, for all of its host."""
    common: Mapping[int, Sequence[Fetch]]
    """Fetches of the whole runs that the coordinator broadcasts and of which this rank wants anything, by the rank that
    reads them."""


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

    def longest_unit(self, unit_bytes: int) -> int:
        """Returns the length of the longest unit that there may be, of any file."""
        longest = ((max(file.extent_lengths, default=_UNCHECKED_BYTES), file.byte_length) for file in self._files)
        return max((min(max(extent, unit_bytes), length) for extent, length in longest), default=0)

    def span(self, run: ExtentRun) -> tuple[int, int]:
        """Returns the byte offsets in the file at which the run begins and ends."""
        bounds = self.bounds(run.file)
        return bounds[run.first], bounds[run.end]

    def num_bytes(self, run: ExtentRun) -> int:
        start, end = self.span(run)
        return end - start


def runs_by_ranks(wanted: Sequence[Sequence[ExtentRun]]) -> dict[tuple[int, ...], list[ExtentRun]]:
    """Returns every wanted extent once, under exactly the ranks that want it; runs are in file order. The runs of one
    rank, in `wanted`, do not overlap.
    """
    # A set of ranks is a number with a bit for each while files are swept: it changes at every begin and end.
    ranks_of_list: dict[int, int] = {}
    for rank, runs in enumerate(wanted):
        ranks_of_list[id(runs)] = ranks_of_list.get(id(runs), 0) | 1 << rank
    changes: dict[tuple[int, int], int] = {}
    for runs in wanted:
        ranks = ranks_of_list.pop(id(runs), 0)
        for file, first, end in runs if ranks else ():
            for place in ((file, first), (file, end)):
                changes[place] = changes.get(place, 0) ^ ranks
    by_bits: dict[int, list[ExtentRun]] = {}
    bits = 0
    for (file, first), (_, end) in pairwise(sorted(changes)):
        bits ^= changes[file, first]
        if bits:
            by_bits.setdefault(bits, []).append(ExtentRun(file, first, end))
    return {tuple(_numbers_in(bits)): runs for bits, runs in by_bits.items()}


def _numbers_in(bits: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, in ascending order."""
    if bits.bit_count() > _FEW_BITS:
        yield from (bit.start() for bit in re.finditer("1", f"{bits:b}"[::-1]))
        return
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def can_share(fetch: Fetch, extents: Extents) -> bool:
    """Returns True if the fetch can be cut at every end of an extent: no element of its boxes lies across an end."""
    bounds = extents.bounds(fetch.file)
    for part in fetch.parts:
        if isinstance(part, BoxPart):
            _, first, end = _run_of(fetch.file, part, extents)
            if any((bound - part.chunk.byte_offset) % item_bytes_of(part) for bound in bounds[first + 1 : end]):
                return False
    return True


def wanted_runs(fetches: Iterable[Fetch], extents: Extents) -> list[ExtentRun]:
    """Returns the extents from which sharable fetches want bytes, in file order, as runs that do not touch."""
    sharable = [fetch for fetch in fetches if can_share(fetch, extents)]
    items = [(fetch.file, item) for fetch in sharable for item in (*fetch.parts, *fetch.frames) if item.byte_length]
    united: list[ExtentRun] = []
    for run in sorted(_run_of(file, item, extents) for file, item in items):
        if united and united[-1].file == run.file and run.first <= united[-1].end:
            united[-1] = united[-1]._replace(end=max(united[-1].end, run.end))
        else:
            united.append(run)
    return united


def _run_of(file: int, item: Part | Frame, extents: Extents) -> ExtentRun:
    """Returns the extents that hold the bytes of an item."""
    bounds = extents.bounds(file)
    first = bisect_right(bounds, item.byte_offset) - 1
    return ExtentRun(file, first, bisect_left(bounds, item.byte_offset + item.byte_length))


def divide_plan(fetches: Iterable[Fetch], share: ReaderShare, extents: Extents, *, unit_bytes: int) -> DividedPlan:
    """Divides the fetches into what this rank reads and what others read for it.

    Units are of at most `unit_bytes`, or of one extent; all ranks must pass the same number.
    """
    common = [run for _, run in share.common]
    from_others = [run for _, run in (*share.received, *share.relayed)]
    assigned = sorted([*share.reads, *from_others, *common])
    mixed: list[Fetch] = []
    alone: list[Fetch] = []
    for fetch in fetches:
        is_assigned = any(any(_overlapping(assigned, run)) for run in wanted_runs([fetch], extents))
        (mixed if is_assigned else alone).append(fetch)
    unassigned = runs_by_ranks([wanted_runs(mixed, extents), assigned]).get((0,), [])
    units = {run: [*_units(run, extents, unit_bytes)] for run in (*assigned, *unassigned)}
    units |= {run: [run] for run in common}
    by_unit = _cut_all(mixed, sorted(chain.from_iterable(units.values())), extents)

    def units_of(run: ExtentRun) -> list[Fetch]:
        return [by_unit[unit] for unit in units[run]]

    def wanted_of(run: ExtentRun) -> list[Fetch]:
        return [fetch for fetch in units_of(run) if fetch.all_parts]

    return DividedPlan(
        shared=[*chain.from_iterable(map(units_of, share.reads))],
        alone=[*chain.from_iterable(map(units_of, unassigned)), *alone],
        received=_by_rank(share.received, wanted_of),
        relayed=_by_rank(share.relayed, units_of),
        common=_by_rank(share.common, wanted_of),
    )


def _by_rank(
    runs: Iterable[tuple[int, ExtentRun]], fetches_of: Callable[[ExtentRun], Iterable[Fetch]]
) -> dict[int, list[Fetch]]:
    """Returns the fetches of these runs, by the rank that comes with each run."""
    found: dict[int, list[Fetch]] = {}
    for rank, run in runs:
        found.setdefault(rank, []).extend(fetches_of(run))
    return found


def _overlapping(runs: Sequence[ExtentRun], run: ExtentRun) -> Iterator[ExtentRun]:
    """Yields the members of `runs` that have an extent in common with `run`. `runs` are in order and do not overlap."""
    number = bisect_right(runs, (run.file, run.first), key=lambda other: (other.file, other.end))
    while number < len(runs) and (runs[number].file, runs[number].first) < (run.file, run.end):
        yield runs[number]
        number += 1


def _units(run: ExtentRun, extents: Extents, unit_bytes: int) -> Iterator[ExtentRun]:
    """Cuts a run into units: runs of extents that a reader rank reads in one piece and passes on in pieces."""
    bounds, first = extents.bounds(run.file), run.first
    while first < run.end:
        end = bisect_right(bounds, bounds[first] + unit_bytes, first + 2, run.end + 1) - 1
        yield ExtentRun(run.file, first, end)
        first = end


def _cut_all(fetches: Iterable[Fetch], units: Sequence[ExtentRun], extents: Extents) -> dict[ExtentRun, Fetch]:
    """Returns a fetch of each unit, with all that the fetches want of it; units are in order and cover all of that."""
    wanted: dict[ExtentRun, list[Part | Frame]] = {unit: [] for unit in units}
    for fetch in fetches:
        bounds = extents.bounds(fetch.file)
        for item in (*fetch.parts, *fetch.frames):
            for unit in _overlapping(units, _run_of(fetch.file, item, extents)):
                wanted[unit] += _cut(item, bounds[unit.first], bounds[unit.end])
    by_unit = {}
    for unit, items in wanted.items():
        items.sort(key=attrgetter("byte_offset"))
        whole = fetch_of(unit.file, *extents.span(unit), items)
        only = items[0] if len(items) == 1 else None
        by_unit[unit] = whole._replace(is_direct=isinstance(only, FlatPart) and only.byte_length == whole.byte_length)
    return by_unit


def _cut(item: Part | Frame, start: int, end: int) -> Iterable[Part | Frame]:
    """Returns the parts of the item that lie between two places of the file."""
    if isinstance(item, Frame):
        return [item]  # a frame is one extent
    if isinstance(item, FlatPart):
        return [cut_flat(item, max(item.byte_offset, start), min(item.byte_offset + item.byte_length, end))]
    chunk, item_bytes = item.chunk, item_bytes_of(item)
    elements = range(
        max(start - chunk.byte_offset, 0) // item_bytes, min(end - chunk.byte_offset, chunk.byte_length) // item_bytes
    )
    return boxes_in_run(item.want, chunk, item.region, elements, byte_offset=chunk.byte_offset, item_bytes=item_bytes)
