"""A rank's load plan divided between what it reads and what others read for it. Both are cut into units, which reader
and takers derive alike from what was agreed on; nothing here knows who they are or reads a byte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import item_bytes_of
from bytecheckpoint.planner.exchange_plan import Extents, Run, Share
from bytecheckpoint.region import Region, flat_span, intersect, split_flat_range


class Unit(NamedTuple):
    """A range of a file, of whole extents, that is read at once and of which parts are passed on."""

    file: int
    byte_offset: int
    end: int


class Work(NamedTuple):
    """A load plan as one rank carries it out together with others."""

    passed_on: Sequence[Fetch]
    """What it reads of the runs that others want too: a fetch for each unit of them."""
    alone: Sequence[Fetch]
    """What concerns no other rank."""
    received: Sequence[Arrival]
    """What others read for it, in file order. Units between the rows of a box, of which it wants nothing, are left
    out."""
    common: Sequence[Fetch]
    """What the coordinator reads for all: a fetch for each unit of which this rank wants something."""


class Arrival(NamedTuple):
    """What a rank wants of a unit that another one reads."""

    reader: int
    unit: Unit
    items: Sequence[Part | Frame]


def can_share(fetch: Fetch, extents: Extents) -> bool:
    """Whether what the fetch is for can be cut where extents end: no element of a box lies across such a place."""
    bounds = extents.bounds(fetch.file)
    for part in fetch.parts:
        if isinstance(part, BoxPart):
            first, last = (
                bisect_right(bounds, part.byte_offset),
                bisect_left(bounds, part.byte_offset + part.byte_length),
            )
            item_bytes = item_bytes_of(part)
            if any((bound - part.chunk.byte_offset) % item_bytes for bound in bounds[first:last]):
                return False
    return True


def wanted_runs(fetches: Iterable[Fetch], extents: Extents) -> list[Run]:
    """The extents that hold something that the fetches are for, in file order."""
    touched = sorted(
        Run(
            fetch.file,
            bisect_right(extents.bounds(fetch.file), item.byte_offset) - 1,
            bisect_left(extents.bounds(fetch.file), item.byte_offset + item.byte_length),
        )
        for fetch in fetches
        for item in (*fetch.parts, *fetch.frames)
        if item.byte_length
    )
    return _united(touched)


def _united(runs: Iterable[Run]) -> list[Run]:
    """The same extents, in runs that do not overlap and do not touch."""
    united: list[Run] = []
    for run in runs:
        if united and united[-1].file == run.file and run.first <= united[-1].end:
            united[-1] = united[-1]._replace(end=max(united[-1].end, run.end))
        else:
            united.append(run)
    return united


def divide_work(fetches: Iterable[Fetch], share: Share, extents: Extents, *, unit_bytes: int) -> Work:
    """The fetches, which can all be shared, as work for this rank and for others.

    Units are of at most `unit_bytes`, or of one extent; readers and takers have to give the same number.
    """
    shared = sorted([*share.reads, *(run for _, run in share.received), *share.common])
    mixed: list[Fetch] = []
    alone: list[Fetch] = []
    for fetch in fetches:
        runs = wanted_runs([fetch], extents)
        (mixed if _without(runs, shared) != runs else alone).append(fetch)
    left = _without(wanted_runs(mixed, extents), shared)

    def units(runs: Iterable[Run]) -> list[Unit]:
        return [unit for run in runs for unit in _units(run, extents, unit_bytes)]

    wanted = _cut_all(mixed, sorted(units([*shared, *left])))
    return Work(
        [_fetch(unit, wanted[unit]) for unit in units(share.reads)],
        [*(_fetch(unit, wanted[unit]) for unit in units(left)), *alone],
        [
            Arrival(reader, unit, items)
            for reader, run in share.received
            for unit in units([run])
            if (items := wanted[unit])
        ],
        [_fetch(unit, items) for unit in units(share.common) if (items := wanted[unit])],
    )


def _without(runs: Iterable[Run], taken: Sequence[Run]) -> list[Run]:
    """What is left of the runs. Those that are taken are in order and do not overlap."""
    left = []
    for run in runs:
        first = run.first
        number = bisect_right(taken, (run.file, first), key=lambda other: (other.file, other.end))
        while number < len(taken) and (taken[number].file, taken[number].first) < (run.file, run.end):
            if first < taken[number].first:
                left.append(Run(run.file, first, taken[number].first))
            first = taken[number].end
            number += 1
        if first < run.end:
            left.append(Run(run.file, first, run.end))
    return left


def _units(run: Run, extents: Extents, unit_bytes: int) -> Iterator[Unit]:
    bounds = extents.bounds(run.file)
    first = run.first
    while first < run.end:
        end = bisect_right(bounds, bounds[first] + unit_bytes, first + 1, run.end + 1) - 1
        end = max(end, first + 1)
        yield Unit(run.file, bounds[first], bounds[end])
        first = end


def _cut_all(fetches: Iterable[Fetch], units: Sequence[Unit]) -> dict[Unit, list[Part | Frame]]:
    """What the fetches want of each unit, in file order. The units are in order and hold all that is wanted."""
    wanted: dict[Unit, list[Part | Frame]] = {unit: [] for unit in units}
    for fetch in fetches:
        for item in (*fetch.parts, *fetch.frames):
            end = item.byte_offset + item.byte_length
            number = bisect_right(units, (fetch.file, item.byte_offset), key=lambda unit: (unit.file, unit.end))
            while number < len(units) and (units[number].file, units[number].byte_offset) < (fetch.file, end):
                wanted[units[number]] += _cut(item, units[number])
                number += 1
    for items in wanted.values():
        items.sort(key=lambda item: item.byte_offset)
    return wanted


def _cut(item: Part | Frame, unit: Unit) -> Sequence[Part | Frame]:
    """What of the item lies in the unit."""
    if isinstance(item, Frame):
        return [item]  # a frame is one extent
    if isinstance(item, BoxPart):
        return [*_cut_box(item, unit)]
    start, end = max(item.byte_offset, unit.byte_offset), min(item.byte_offset + item.byte_length, unit.end)
    target = item.target_byte_offset + start - item.byte_offset
    return [FlatPart(item.want, start, end - start, target)]


def _cut_box(part: BoxPart, unit: Unit) -> Iterator[BoxPart]:
    chunk, item_bytes = part.chunk, item_bytes_of(part)
    first = max(unit.byte_offset - chunk.byte_offset, 0) // item_bytes
    end = min(unit.end - chunk.byte_offset, chunk.byte_length) // item_bytes
    for box in split_flat_range(chunk.region.lengths, first, end - first):
        offsets = tuple(map(int.__add__, box.offsets, chunk.region.offsets))
        region = intersect(Region(offsets, box.lengths), part.region)
        if region is not None:
            low, high = flat_span(region, chunk.region)
            yield BoxPart(part.want, chunk.byte_offset + low * item_bytes, (high - low) * item_bytes, region, chunk)


def _fetch(unit: Unit, items: Sequence[Part | Frame]) -> Fetch:
    frames = tuple(item for item in items if isinstance(item, Frame))
    parts = tuple(item for item in items if not isinstance(item, Frame))
    byte_length = unit.end - unit.byte_offset
    is_direct = len(items) == len(parts) == 1 and isinstance(parts[0], FlatPart) and parts[0].byte_length == byte_length
    return Fetch(unit.file, unit.byte_offset, byte_length, parts, is_direct=is_direct, frames=frames)


def packed(part: Part, byte_offset: int) -> Part:
    """The part as it is placed where the bytes of its piece begin there, without what lies between rows."""
    if isinstance(part, FlatPart):
        return part._replace(byte_offset=byte_offset)
    byte_length = part.region.numel * item_bytes_of(part)
    chunk = part.chunk._replace(region=part.region, byte_offset=0, byte_length=byte_length)
    return BoxPart(part.want, byte_offset, byte_length, part.region, chunk)
