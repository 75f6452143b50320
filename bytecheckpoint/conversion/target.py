"""What every target format gives to the conversion: its files, and what makes it exist. Which rank writes which file is
decided here too.
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
    """Inside the target's folder."""
    runs: Sequence[FileRun]
    extent_lengths: Sequence[int] = ()
    """In bytes, of the extents that get checksums, where the format has these."""

    @property
    def byte_length(self) -> int:
        return Stream(self.runs).byte_length


class TargetPlan(NamedTuple):
    """A checkpoint in the target's format, planned."""

    files: Sequence[TargetFile]
    by_rank: Sequence[Sequence[int]]
    """The files that each rank writes, by number."""
    last_name: str
    """Of what is written last: without it there is no checkpoint."""
    last: Callable[[Sequence[DataFile]], bytes] | None
    """Makes its content, from what is known of the files, in the order of `files`. None where it is the only file."""
    left_out: Sequence[LeftOut] = ()


def spread(byte_lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The numbers of the items for each rank: about as many bytes for each, the largest first."""
    loads, numbers = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(byte_lengths)), key=lambda each: -byte_lengths[each]):
        rank = loads.index(min(loads))
        numbers[rank].append(number)
        loads[rank] += byte_lengths[number]
    return [sorted(of_rank) for of_rank in numbers]
