"""The plan of a target in any format: its files, and what makes it exist. Which rank writes which file is decided here
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bytecheckpoint.conversion.stream import FileRun, Stream
from bytecheckpoint.loading.select import LeftOut
from bytecheckpoint.manifest import DataFile


class TargetFile(NamedTuple):
    """A file of the target."""

    name: str
    """Name inside the target's folder."""
    runs: Sequence[FileRun]
    extent_lengths: Sequence[int] = ()
    """Lengths in bytes of the extents that get checksums, if the format has these."""

    @property
    def byte_length(self) -> int:
        return Stream(self.runs).byte_length


class TargetPlan(NamedTuple):
    """A checkpoint in the target's format, planned."""

    files: Sequence[TargetFile]
    by_rank: Sequence[Sequence[int]]
    """Numbers of the files that each rank writes."""
    last_name: str
    """Name of the file that is written last: without it there is no checkpoint."""
    last: Callable[[Sequence[DataFile]], bytes] | None
    """Returns the content of that file, from the written files in the order of `files`. None if it is the only file."""
    left_out: Sequence[LeftOut] = ()


def spread(byte_lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Returns the numbers of the items for each rank: about as many bytes for each, the largest first."""
    loads, numbers = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(byte_lengths)), key=lambda each: -byte_lengths[each]):
        rank = loads.index(min(loads))
        numbers[rank].append(number)
        loads[rank] += byte_lengths[number]
    return [sorted(of_rank) for of_rank in numbers]
