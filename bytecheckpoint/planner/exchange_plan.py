"""Chooses the reader rank of every extent that several ranks want, and divides each rank's load plan into what it reads
and what others read for it. Both are cut into units, which the reader rank and its peers derive alike from what was
agreed on. It knows extents of files and ranks, and no connections; it reads nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import boxes_in_run, item_bytes_of
from bytecheckpoint.planner.coalesce import cut_flat, fetch_of

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
    """Runs that one rank reads and the coordinator broadcasts. They are the same for every rank, whether it wants them
    or not."""
    common_readers: Sequence[int] = ()
    """The rank that reads each of them."""


class DividedPlan(NamedTuple):
    """A load plan that one rank carries out together with others. A fetch holds the bytes that this rank wants of a
    unit.
    """

    shared: Sequence[Fetch]
    """Fetches that this rank reads and of which other ranks want pieces."""
    alone: Sequence[Fetch]
    """Fetches that this rank reads for itself alone."""
    received: Mapping[int, Sequence[Fetch]]
    """Units that each of the reader ranks reads for this one, in file order. Units of which it wants nothing, such as
    those between the rows of a box, are left out; no unit may be left."""
    common: Sequence[Fetch]
    """Fetches of whole runs that the coordinator broadcasts."""


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

    def span(self, run: ExtentRun) -> tuple[int, int]:
        """Returns the byte offsets in the file at which the run begins and ends."""
        bounds = self.bounds(run.file)
        return bounds[run.first], bounds[run.end]

    def num_bytes(self, run: ExtentRun) -> int:
        start, end = self.span(run)
        return end - start


def assign_readers(
    wanted: Sequence[Sequence[ExtentRun]], extents: Extents, held: Sequence[Collection[int]]
) -> list[ReaderShare]:
    """Assigns a reader rank to every extent that two ranks or more want, or that its one rank cannot read, such that
    all read about as many bytes.

    `wanted` has the runs of each rank, which do not overlap and do not touch one another. `held` has for each rank the
    files that it can read and others may not: a file that nobody holds is read by all. The reader rank is one of those
    that want the extent, if one of them can read it, else that holder of the file which reads the least; it gets few,
    long runs. Few bytes that more than FEW_RANKS want are common. The same input always gives the same shares.
    """
    holders = _holders_by_file(held)
    by_ranks = _runs_by_ranks(wanted)
    common = _take_common(by_ranks, extents, min(_COMMON_BYTES, _COMMON_BYTES_OF_ALL // len(wanted)))
    shares = _Shares(len(wanted), extents)
    for together, runs in _runs_by_group(by_ranks):
        for of_file, same_runs in _runs_by_holders(runs, holders):
            shares.add(together, of_file, same_runs)
    readers = [min(holders.get(run.file, (COMMON_READER,))) for run in common]
    return shares.finish(common, readers)


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


class _Shares:
    """The shares of all ranks, while runs are assigned."""

    def __init__(self, num_ranks: int, extents: Extents) -> None:
        self._extents = extents
        self._reads: list[list[ExtentRun]] = [[] for _ in range(num_ranks)]
        self._received: list[list[tuple[int, ExtentRun]]] = [[] for _ in range(num_ranks)]
        self._peers: list[set[int]] = [set() for _ in range(num_ranks)]
        self._read_bytes = [0] * num_ranks

    def add(self, together: Sequence[int], holders: Sequence[int] | None, runs: Sequence[ExtentRun]) -> None:
        """Divides runs that these ranks want among those of them that can read, or among others."""
        readers = together if holders is None else sorted({*together} & {*holders})
        if not readers and holders is not None:
            for run in runs:  # each whole, by one rank: a peer connects to no more ranks than it must
                self._assign(min(holders, key=lambda rank: (self._read_bytes[rank], rank)), together, [run])
            return
        parts = _divide_runs(runs, [self._read_bytes[rank] for rank in readers], self._extents)
        for reader, part in zip(readers, parts, strict=True):
            self._assign(reader, together, part)

    def _assign(self, reader: int, together: Sequence[int], part: Sequence[ExtentRun]) -> None:
        others = [rank for rank in together if rank != reader and part]
        self._read_bytes[reader] += sum(map(self._extents.num_bytes, part))
        self._reads[reader] += part if others else []
        self._peers[reader].update(others)
        for peer in others:
            self._received[peer] += [(reader, run) for run in part]

    def finish(self, common: Sequence[ExtentRun], common_readers: Sequence[int]) -> list[ReaderShare]:
        """Returns the share of each rank."""
        return [
            ReaderShare(own, sorted(peers), sorted(received, key=lambda item: item[1]), common, common_readers)
            for own, peers, received in zip(self._reads, self._peers, self._received, strict=True)
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
    """Returns every wanted extent once, under exactly those ranks that want it; runs are in the order of the files.
    Those of one rank do not overlap.
    """
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
    return {tuple(bit.start() for bit in re.finditer("1", f"{bits:b}"[::-1])): runs for bits, runs in by_bits.items()}


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


def can_share(fetch: Fetch, extents: Extents) -> bool:
    """Returns True if what the fetch is for can be cut where extents end: no element of a box lies across an end."""
    bounds = extents.bounds(fetch.file)
    for part in fetch.parts:
        if isinstance(part, BoxPart):
            _, first, end = _run_of(fetch.file, part, extents)
            if any((bound - part.chunk.byte_offset) % item_bytes_of(part) for bound in bounds[first + 1 : end]):
                return False
    return True


def wanted_runs(fetches: Iterable[Fetch], extents: Extents) -> list[ExtentRun]:
    """Returns the extents that hold something that the fetches are for, in file order, in runs that do not touch.
    Fetches that cannot be shared are left out.
    """
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
    assigned = sorted([*share.reads, *(run for _, run in share.received), *share.common])
    mixed: list[Fetch] = []
    alone: list[Fetch] = []
    for fetch in fetches:
        is_assigned = any(any(_overlapping(assigned, run)) for run in wanted_runs([fetch], extents))
        (mixed if is_assigned else alone).append(fetch)
    left = _runs_by_ranks([wanted_runs(mixed, extents), assigned]).get((0,), [])
    units = {run: [*_units(run, extents, unit_bytes)] for run in (*assigned, *left)}
    units |= {run: [run] for run in share.common}
    cut = _cut_all(mixed, sorted(chain.from_iterable(units.values())), extents)
    received: dict[int, list[Fetch]] = {}
    for reader, run in share.received:
        received.setdefault(reader, []).extend(cut[unit] for unit in units[run] if cut[unit].all_parts)
    return DividedPlan(
        shared=[cut[unit] for run in share.reads for unit in units[run]],
        alone=[*(cut[unit] for run in left for unit in units[run]), *alone],
        received=received,
        common=[cut[run] for run in share.common if cut[run].all_parts],
    )


def _overlapping(runs: Sequence[ExtentRun], run: ExtentRun) -> Iterator[ExtentRun]:
    """Yields those of the runs that have an extent in common with this one. They are in order and do not overlap."""
    number = bisect_right(runs, (run.file, run.first), key=lambda other: (other.file, other.end))
    while number < len(runs) and (runs[number].file, runs[number].first) < (run.file, run.end):
        yield runs[number]
        number += 1


def _units(run: ExtentRun, extents: Extents, unit_bytes: int) -> Iterator[ExtentRun]:
    """Cuts a run into units: extents that are read at once, of which pieces are passed on."""
    bounds, first = extents.bounds(run.file), run.first
    while first < run.end:
        end = bisect_right(bounds, bounds[first] + unit_bytes, first + 2, run.end + 1) - 1
        yield ExtentRun(run.file, first, end)
        first = end


def _cut_all(fetches: Iterable[Fetch], units: Sequence[ExtentRun], extents: Extents) -> dict[ExtentRun, Fetch]:
    """Returns a fetch of each unit, with what the fetches want of it in file order. The units are in order and hold all
    that is wanted.
    """
    wanted: dict[ExtentRun, list[Part | Frame]] = {unit: [] for unit in units}
    for fetch in fetches:
        bounds = extents.bounds(fetch.file)
        for item in (*fetch.parts, *fetch.frames):
            for unit in _overlapping(units, _run_of(fetch.file, item, extents)):
                wanted[unit] += _cut(item, bounds[unit.first], bounds[unit.end])
    cut = {}
    for unit, items in wanted.items():
        items.sort(key=attrgetter("byte_offset"))
        whole = fetch_of(unit.file, *extents.span(unit), items)
        only = items[0] if len(items) == 1 else None
        cut[unit] = whole._replace(is_direct=isinstance(only, FlatPart) and only.byte_length == whole.byte_length)
    return cut


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


def packed(item: Part | Frame, byte_offset: int) -> Part | Frame:
    """Returns the item for bytes that begin there and lack the gaps between rows."""
    if not isinstance(item, BoxPart):
        return item._replace(byte_offset=byte_offset)
    byte_length = item.region.numel * item_bytes_of(item)
    chunk = item.chunk._replace(region=item.region, byte_offset=0, byte_length=byte_length)
    return BoxPart(item.want, byte_offset, byte_length, item.region, chunk)
