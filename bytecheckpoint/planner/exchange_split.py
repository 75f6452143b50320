"""Divides a rank's load plan into what it reads and what others read for it. Both are cut into units, which the reader
rank and its peers derive alike from what was agreed on. It reads nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import boxes_in_run, item_bytes_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare


class ReadUnit(NamedTuple):
    """A range of a file, of whole extents, that is read at once and of which pieces are passed on."""

    file: int
    byte_offset: int
    end: int


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
    """The coordinator reads and broadcasts them."""


def can_share(fetch: Fetch, extents: Extents) -> bool:
    """Returns True if what the fetch is for can be cut where extents end: no element of a box lies across an end."""
    bounds = extents.bounds(fetch.file)
    for part in fetch.parts:
        if isinstance(part, BoxPart):
            inside = bounds[
                bisect_right(bounds, part.byte_offset) : bisect_left(bounds, part.byte_offset + part.byte_length)
            ]
            if any((bound - part.chunk.byte_offset) % item_bytes_of(part) for bound in inside):
                return False
    return True


def wanted_runs(fetches: Iterable[Fetch], extents: Extents) -> list[ExtentRun]:
    """Returns the extents that hold something that the fetches are for, in file order, in runs that do not touch."""
    touched = sorted(
        ExtentRun(
            fetch.file,
            bisect_right(extents.bounds(fetch.file), item.byte_offset) - 1,
            bisect_left(extents.bounds(fetch.file), item.byte_offset + item.byte_length),
        )
        for fetch in fetches
        for item in (*fetch.parts, *fetch.frames)
        if item.byte_length
    )
    united: list[ExtentRun] = []
    for run in touched:
        if united and united[-1].file == run.file and run.first <= united[-1].end:
            united[-1] = united[-1]._replace(end=max(united[-1].end, run.end))
        else:
            united.append(run)
    return united


def divide_plan(fetches: Iterable[Fetch], share: ReaderShare, extents: Extents, *, unit_bytes: int) -> DividedPlan:
    """Divides the fetches, all of which `can_share`, into what this rank reads and what others read for it.

    Units are of at most `unit_bytes`, or of one extent; all ranks must pass the same number.
    """
    assigned = sorted([*share.reads, *(run for _, run in share.received), *share.common])
    mixed: list[Fetch] = []
    alone: list[Fetch] = []
    for fetch in fetches:
        runs = wanted_runs([fetch], extents)
        (mixed if _without(runs, assigned) != runs else alone).append(fetch)
    left = _without(wanted_runs(mixed, extents), assigned)
    wanted = _cut_all(mixed, [unit for run in sorted([*assigned, *left]) for unit in _units(run, extents, unit_bytes)])

    def fetches_of(runs: Iterable[ExtentRun], *, is_reader: bool) -> list[Fetch]:
        units = [unit for run in runs for unit in _units(run, extents, unit_bytes)]
        return [_fetch(unit, wanted[unit]) for unit in units if is_reader or wanted[unit]]

    received: dict[int, list[Fetch]] = {}
    for reader, run in share.received:
        received.setdefault(reader, []).extend(fetches_of([run], is_reader=False))
    return DividedPlan(
        shared=fetches_of(share.reads, is_reader=True),
        alone=[*fetches_of(left, is_reader=True), *alone],
        received=received,
        common=fetches_of(share.common, is_reader=False),
    )


def _without(runs: Iterable[ExtentRun], taken: Sequence[ExtentRun]) -> list[ExtentRun]:
    """Returns the runs without those that are taken, which are in order and do not overlap."""
    left = []
    for run in runs:
        first = run.first
        number = bisect_right(taken, (run.file, first), key=lambda other: (other.file, other.end))
        while number < len(taken) and (taken[number].file, taken[number].first) < (run.file, run.end):
            if first < taken[number].first:
                left.append(ExtentRun(run.file, first, taken[number].first))
            first = taken[number].end
            number += 1
        if first < run.end:
            left.append(ExtentRun(run.file, first, run.end))
    return left


def _units(run: ExtentRun, extents: Extents, unit_bytes: int) -> Iterator[ReadUnit]:
    bounds = extents.bounds(run.file)
    first = run.first
    while first < run.end:
        end = bisect_right(bounds, bounds[first] + unit_bytes, first + 1, run.end + 1) - 1
        end = max(end, first + 1)
        yield ReadUnit(run.file, bounds[first], bounds[end])
        first = end


def _cut_all(fetches: Iterable[Fetch], units: Sequence[ReadUnit]) -> dict[ReadUnit, list[Part | Frame]]:
    """Returns the bytes that the fetches want of each unit, in file order. The units are in order and hold all that is
    wanted.
    """
    wanted: dict[ReadUnit, list[Part | Frame]] = {unit: [] for unit in units}
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


def _cut(item: Part | Frame, unit: ReadUnit) -> Iterable[Part | Frame]:
    """Returns the parts of the item that lie in the unit."""
    if isinstance(item, Frame):
        return [item]  # a frame is one extent
    if isinstance(item, BoxPart):
        chunk, item_bytes = item.chunk, item_bytes_of(item)
        first = max(unit.byte_offset - chunk.byte_offset, 0) // item_bytes
        end = min(unit.end - chunk.byte_offset, chunk.byte_length) // item_bytes
        return boxes_in_run(
            item.want, chunk, item.region, range(first, end), byte_offset=chunk.byte_offset, item_bytes=item_bytes
        )
    start, end = max(item.byte_offset, unit.byte_offset), min(item.byte_offset + item.byte_length, unit.end)
    target = item.target_byte_offset + start - item.byte_offset
    return [FlatPart(item.want, start, end - start, target)]


def _fetch(unit: ReadUnit, items: Sequence[Part | Frame]) -> Fetch:
    frames = tuple(item for item in items if isinstance(item, Frame))
    parts = tuple(item for item in items if not isinstance(item, Frame))
    byte_length = unit.end - unit.byte_offset
    is_direct = len(items) == len(parts) == 1 and isinstance(parts[0], FlatPart) and parts[0].byte_length == byte_length
    return Fetch(unit.file, unit.byte_offset, byte_length, parts, is_direct=is_direct, frames=frames)


def packed(item: Part | Frame, byte_offset: int) -> Part | Frame:
    """Returns the item for bytes that begin there and lack the gaps between rows."""
    if not isinstance(item, BoxPart):
        return item._replace(byte_offset=byte_offset)
    byte_length = item.region.numel * item_bytes_of(item)
    chunk = item.chunk._replace(region=item.region, byte_offset=0, byte_length=byte_length)
    return BoxPart(item.want, byte_offset, byte_length, item.region, chunk)
