"""Replicas that differ: ranks that hold the same tensors stage the same data file, but with different bytes. Found by
the digests that each rank has computed anyway, and reported by the names of the tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.planner.memory_tier.mirrors import differing_extents
from bytecheckpoint.saving.plans.rank_plan import MirroredImage
from bytecheckpoint.staging.file_image import PlannedFile

_MAX_SENT = 100
_NUM_SHOWN, _NUM_NAMES = 10, 4


class StagedFile(msgspec.Struct, frozen=True, array_like=True):
    """Data file `number` of the rank `owner` as one rank, the owner or another, has it in memory."""

    owner: int
    number: int
    digest: int
    """One xxh3-64 of the digests of all extents."""


class DivergentFile(msgspec.Struct, frozen=True, array_like=True):
    """Data file `number` of the rank `owner`, of which another rank has other bytes."""

    owner: int
    number: int
    digests: list[int]
    """The owner's digest of each extent."""


class DivergentReplica(msgspec.Struct, frozen=True, array_like=True):
    """Tensors in an extent whose bytes differ between two ranks, the owner and another one."""

    names: str
    owner: int
    rank: int
    owner_digest: int
    digest: int


def staged_file(owner: int, number: int, file: DataFile) -> StagedFile:
    """Returns the record of a staged file, with one digest of all its extents."""
    return StagedFile(owner, number, xxhash.xxh3_64_intdigest(np.array(file.extent_digests, "<u8").tobytes()))


def divergent_files(
    staged: Sequence[Sequence[StagedFile]], files_of: Callable[[int], Sequence[DataFile]]
) -> list[list[DivergentFile]]:
    """Returns, for each rank, the files of other ranks that it has staged with other bytes than their owners.
    `staged` has all files that each rank has staged, and `files_of` returns the files that a rank owns.
    """
    owned = {
        (each.owner, each.number): each.digest
        for rank, files in enumerate(staged)
        for each in files
        if each.owner == rank
    }
    return [
        [
            DivergentFile(each.owner, each.number, list(files_of(each.owner)[each.number].extent_digests))
            for each in of_rank
            if each.digest != owned[each.owner, each.number]
        ]
        for of_rank in staged
    ]


def name_divergent(
    rank: int, mirror: MirroredImage, own_file: DataFile, owned: DivergentFile
) -> Iterator[DivergentReplica]:
    """Yields the first `_MAX_SENT` extents of a mirrored file that differ from the owner's, named by their tensors."""
    for extent in differing_extents(owned.digests, own_file.extent_digests)[:_MAX_SENT]:
        names = _names_in(mirror.planned, extent)
        shown_names = names[0] if len(names) == 1 else f"one of {and_more(names, _NUM_NAMES)}"
        yield DivergentReplica(shown_names, mirror.owner, rank, owned.digests[extent], own_file.extent_digests[extent])


def _names_in(planned: PlannedFile, extent: int) -> list[str]:
    """Returns the FQNs with bytes in an extent; the name of the header where there are none."""
    end = list(accumulate(planned.extent_lengths))[extent]
    start = end - planned.extent_lengths[extent]
    base = len(planned.header)
    inside = [
        chunk.fqn
        for chunk in planned.chunks
        if base + chunk.data_offset < end and base + chunk.data_offset + chunk.byte_length > start
    ]
    return list(dict.fromkeys(inside)) or ["the header of a data file"]


def warn_of_divergence(replicas: Sequence[DivergentReplica], path: str, global_ranks: Sequence[int]) -> None:
    """Warns of replicas that are not alike, if there are any."""
    if not replicas:
        return
    # Of the extents in which the same tensors differ between two ranks, only the first is named.
    first_of_each = {(each.names, each.owner, each.rank): each for each in reversed(replicas)}
    lines = [
        f"{each.names}: xxh3 {each.owner_digest:016x} on rank {global_ranks[each.owner]}, "
        f"{each.digest:016x} on rank {global_ranks[each.rank]}"
        for each in reversed(first_of_each.values())
    ]
    warnings.warn(
        f"in {path}, bytes that ranks hold as replicas are not alike: {and_more(lines, _NUM_SHOWN, '; ')}. The first "
        "rank of each pair is the one that writes them: its bytes are held and sent to another host in place of the "
        "other's. Training goes on from both: if these should be equal, look at the devices and memory of these "
        "ranks, and resume all ranks from one checkpoint; wrap what is meant to differ in bcp.RankLocal",
        stacklevel=2,
    )
