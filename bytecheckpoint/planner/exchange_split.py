"""Divides a rank's load plan into what it reads and what others read for it. Both are cut into units, which the reader
rank and its peers derive alike from what was agreed on. It reads nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import boxes_in_run, item_bytes_of
from bytecheckpoint.planner.coalesce import cut_flat, fetch_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare


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
    items = [(fetch.file, item) for fetch in fetches for item in (*fetch.parts, *fetch.frames) if item.byte_length]
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
    """Divides the fetches, all of which `can_share`, into what this rank reads and what others read for it.

    Units are of at most `unit_bytes`, or of one extent; all ranks must pass the same number.
    """
    assigned = sorted([*share.reads, *(run for _, run in share.received), *share.common])
    mixed: list[Fetch] = []
    alone: list[Fetch] = []
    for fetch in fetches:
        is_assigned = any(any(_overlapping(assigned, run)) for run in wanted_runs([fetch], extents))
        (mixed if is_assigned else alone).append(fetch)
    left = _without(wanted_runs(mixed, extents), assigned)
    units = [unit for run in sorted([*assigned, *left]) for unit in _units(run, extents, unit_bytes)]
    wanted = _cut_all(mixed, units, extents)

    def fetches_of(runs: Iterable[ExtentRun], *, is_reader: bool) -> list[Fetch]:
        of_runs = [unit for run in runs for unit in _units(run, extents, unit_bytes)]
        return [_fetch(unit, wanted[unit], extents) for unit in of_runs if is_reader or wanted[unit]]

    received: dict[int, list[Fetch]] = {}
    for reader, run in share.received:
        received.setdefault(reader, []).extend(fetches_of([run], is_reader=False))
    return DividedPlan(
        shared=fetches_of(share.reads, is_reader=True),
        alone=[*fetches_of(left, is_reader=True), *alone],
        received=received,
        common=fetches_of(share.common, is_reader=False),
    )


def _overlapping(runs: Sequence[ExtentRun], run: ExtentRun) -> Iterator[ExtentRun]:
    """Yields those of the runs that have an extent in common with this one. They are in order and do not overlap."""
    number = bisect_right(runs, (run.file, run.first), key=lambda other: (other.file, other.end))
    while number < len(runs) and (runs[number].file, runs[number].first) < (run.file, run.end):
        yield runs[number]
        number += 1


def _without(runs: Iterable[ExtentRun], taken: Sequence[ExtentRun]) -> list[ExtentRun]:
    """Returns the runs without those that are taken, which are in order and do not overlap."""
    left = []
    for file, first, end in runs:
        between = first
        for other in _overlapping(taken, ExtentRun(file, first, end)):
            left.append(ExtentRun(file, between, other.first))
            between = other.end
        left.append(ExtentRun(file, between, end))
    return [run for run in left if run.first < run.end]


def _units(run: ExtentRun, extents: Extents, unit_bytes: int) -> Iterator[ExtentRun]:
    """Cuts a run into units: extents that are read at once, of which pieces are passed on."""
    bounds, first = extents.bounds(run.file), run.first
    while first < run.end:
        end = bisect_right(bounds, bounds[first] + unit_bytes, first + 2, run.end + 1) - 1
        yield ExtentRun(run.file, first, end)
        first = end


def _cut_all(
    fetches: Iterable[Fetch], units: Sequence[ExtentRun], extents: Extents
) -> dict[ExtentRun, list[Part | Frame]]:
    """Returns the bytes that the fetches want of each unit, in file order. The units are in order and hold all that is
    wanted.
    """
    wanted: dict[ExtentRun, list[Part | Frame]] = {unit: [] for unit in units}
    for fetch in fetches:
        bounds = extents.bounds(fetch.file)
        for item in (*fetch.parts, *fetch.frames):
            for unit in _overlapping(units, _run_of(fetch.file, item, extents)):
                wanted[unit] += _cut(item, bounds[unit.first], bounds[unit.end])
    for items in wanted.values():
        items.sort(key=lambda item: item.byte_offset)
    return wanted


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


def _fetch(unit: ExtentRun, items: Sequence[Part | Frame], extents: Extents) -> Fetch:
    bounds = extents.bounds(unit.file)
    fetch = fetch_of(unit.file, bounds[unit.first], bounds[unit.end], items)
    only = items[0] if len(items) == 1 else None
    return fetch._replace(is_direct=isinstance(only, FlatPart) and only.byte_length == fetch.byte_length)


def packed(item: Part | Frame, byte_offset: int) -> Part | Frame:
    """Returns the item for bytes that begin there and lack the gaps between rows."""
    if not isinstance(item, BoxPart):
        return item._replace(byte_offset=byte_offset)
    byte_length = item.region.numel * item_bytes_of(item)
    chunk = item.chunk._replace(region=item.region, byte_offset=0, byte_length=byte_length)
    return BoxPart(item.want, byte_offset, byte_length, item.region, chunk)
