"""Finds the bytes that need no copy, because ranks of other failure domains hold replicas: as many of these ranks as
there should be further copies stage the same data file as the owner, under the same name. So no byte is sent, and
replicas that differ are found by their digests. This module knows what ranks hold and where they are, and stages
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from bytecheckpoint.planner.memory_tier.placement import Domain, LeastFilled, RankPlace, place_copies
from bytecheckpoint.planner.write_items import ItemRegion
from bytecheckpoint.region import Region

_SAME_MIRROR_BYTES = 1 << 20
"""A rank that already mirrors bytes of the same owner is preferred to ranks with up to so many bytes less to stage: few
bytes should not make a file of their own.
"""


class Mirroring(NamedTuple):
    """The places of all ranks, and how many domains are to hold each byte: what mirrors are planned for."""

    places: Sequence[RankPlace]
    """By rank."""
    copies: int
    """Number of domains that are to hold each byte, including the domain of its owner."""
    max_file_bytes: int
    frozen: Sequence[Collection[int]]
    """By rank: numbers of the items whose tensors are expected not to change. Files with one hold nothing else."""


class ReplicaGroup(NamedTuple):
    """Bytes that several ranks hold."""

    owner: int
    """The rank that writes them."""
    ranks: Sequence[int]
    """All ranks that hold them, including the owner."""
    num_bytes: int


class ReplicatedChunk(NamedTuple):
    """A chunk that several ranks hold."""

    owner: int
    slot: int
    """The slot among the owner's writes; see SavePlan."""
    ranks: tuple[int, ...]
    items: Sequence[int]
    """By holder: index of the chunk's item among the write items of that rank."""
    part: Region | None
    """The chunk's part of the items' region; None if it is all of that region."""
    num_bytes: int
    is_grouped: bool
    """True if the chunk belongs to a group of the owner's, see SavePlan."""


class MirroredFile(NamedTuple):
    """A data file that other ranks stage as well. Its position in the owner's list is the number in its name."""

    mirrors: tuple[int, ...]
    """The ranks that stage it beside the owner."""
    slots: Sequence[int]
    """Slots among the owner's writes."""
    is_frozen: bool


class Mirror(NamedTuple):
    """A data file of another rank that this one stages as well."""

    owner: int
    number: int
    """Number in the file's name."""
    owner_bytes: int
    """Number of bytes that the owner writes in all files; the extents depend on it."""
    items: Sequence[int]
    """Write items of this rank that are in the file as a whole."""
    parts: Sequence[ItemRegion]
    """Parts of write items of this rank that are in the file."""
    together: Sequence[Sequence[int]]
    """Groups of items, the same as those of the owner."""


class MirrorPlan(NamedTuple):
    """By rank: its own files that other ranks stage, and files of other ranks that it stages."""

    mirrored: Sequence[Sequence[MirroredFile]]
    mirrors: Sequence[Sequence[Mirror]]


def plan_mirrors(chunks: Sequence[ReplicatedChunk], num_bytes: Sequence[int], wanted: Mirroring) -> MirrorPlan:
    """Plans the mirrors of these chunks; `num_bytes` has the bytes that each rank writes."""
    pairs: dict[tuple[int, tuple[int, ...]], list[ReplicatedChunk]] = {}
    for chunk in chunks:
        pairs.setdefault((chunk.owner, chunk.ranks), []).append(chunk)
    groups = [
        ReplicaGroup(owner, ranks, sum(chunk.num_bytes for chunk in alike_chunks))
        for (owner, ranks), alike_chunks in pairs.items()
    ]
    chosen = choose_mirrors(groups, wanted.places, num_bytes, wanted.copies)
    files: dict[tuple[int, tuple[int, ...], bool], list[ReplicatedChunk]] = {}
    for mirrors, alike_chunks in zip(chosen, pairs.values(), strict=True):
        for chunk in alike_chunks if mirrors else ():
            owned = chunk.items[chunk.ranks.index(chunk.owner)]
            is_frozen = owned in wanted.frozen[chunk.owner]
            files.setdefault((chunk.owner, mirrors, is_frozen), []).append(chunk)
    mirrored: list[list[MirroredFile]] = [[] for _ in num_bytes]
    of_mirrors: list[list[Mirror]] = [[] for _ in num_bytes]
    for (owner, mirrors, is_frozen), alike_chunks in sorted(files.items(), key=lambda file: file[0]):
        for file_chunks in _cut_into_files(alike_chunks, wanted.max_file_bytes):
            number = len(mirrored[owner])
            mirrored[owner].append(MirroredFile(mirrors, [chunk.slot for chunk in file_chunks], is_frozen))
            for rank in mirrors:
                of_mirrors[rank].append(_mirror_at(rank, file_chunks, number, num_bytes[owner]))
    return MirrorPlan(mirrored, of_mirrors)


def choose_mirrors(
    groups: Sequence[ReplicaGroup], places: Sequence[RankPlace], loads: Sequence[int], copies: int
) -> list[tuple[int, ...]]:
    """Chooses, for each group, up to `copies - 1` of its holders to stage it beside its owner: those that stage the
    fewest bytes, preferably mirrors of that owner already, all in different domains and none in the owner's. `loads`
    has the bytes that each rank writes.
    """
    staged = list(loads)
    mirrors_of: dict[int, set[int]] = {}
    chosen: list[tuple[int, ...]] = [()] * len(groups)
    for number in sorted(range(len(groups)), key=lambda number: (len(groups[number].ranks), -groups[number].num_bytes)):
        owner, ranks, num_bytes = groups[number]
        known = mirrors_of.setdefault(owner, set())
        used: set[Domain] = {places[owner].failure_domain}
        mirrors: list[int] = []
        for rank in sorted(ranks, key=lambda rank: (staged[rank] - _SAME_MIRROR_BYTES * (rank in known), rank)):
            if len(mirrors) < copies - 1 and places[rank].failure_domain not in used:
                mirrors.append(rank)
                used.add(places[rank].failure_domain)
                staged[rank] += num_bytes
        known.update(mirrors)
        chosen[number] = tuple(sorted(mirrors))
    return chosen


class MissingCopies(NamedTuple):
    """The data files that have to be sent."""

    sent: Mapping[tuple[int, int], Sequence[int]]
    """Owner, and the rank that gets copies -> numbers of the owner's files."""
    short: Sequence[int]
    """Owners of files for which there are not enough domains."""


def place_missing(
    places: Sequence[RankPlace],
    lengths: Sequence[Sequence[int]],
    mirrors: Mapping[tuple[int, int], Collection[int]],
    copies: int,
) -> MissingCopies:
    """Chooses ranks to hold copies of the files that are in fewer than `copies` domains. `lengths` has, by rank, the
    bytes of each of its files, `mirrors` the ranks that have staged a file (owner, number) as well.
    """
    alone = [[n for n in range(len(of_rank)) if (rank, n) not in mirrors] for rank, of_rank in enumerate(lengths)]
    num_bytes = [sum(lengths[rank][number] for number in numbers) for rank, numbers in enumerate(alone)]
    plan = place_copies(places, num_bytes, copies)
    sent: dict[tuple[int, int], list[int]] = {}
    least = LeastFilled({rank: place.failure_domain for rank, place in enumerate(places)})
    for owner, targets in enumerate(plan.targets):
        for target in targets if alone[owner] else ():
            sent[owner, target] = list(alone[owner])
            least.held[target] += num_bytes[owner]
    short = {rank for rank in plan.short if alone[rank]}
    for owner, number in sorted(mirrors):
        used = {places[rank].failure_domain for rank in (owner, *mirrors[owner, number])}
        while len(used) < copies:
            found = least.find(used)
            if found is None:
                short.add(owner)
                break
            used.add(places[found].failure_domain)
            least.held[found] += lengths[owner][number]
            sent.setdefault((owner, found), []).append(number)
    return MissingCopies(sent, sorted(short))


def _cut_into_files(chunks: Sequence[ReplicatedChunk], max_bytes: int) -> Iterator[list[ReplicatedChunk]]:
    file: list[ReplicatedChunk] = []
    num_bytes = 0
    for chunk in chunks:
        if file and num_bytes + chunk.num_bytes > max_bytes:
            yield file
            file, num_bytes = [], 0
        file.append(chunk)
        num_bytes += chunk.num_bytes
    if file:
        yield file


def _mirror_at(rank: int, chunks: Sequence[ReplicatedChunk], number: int, owner_bytes: int) -> Mirror:
    """Returns the file of these chunks in terms of the items of `rank`, which mirrors it."""
    items: list[int] = []
    parts: list[ItemRegion] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for chunk in chunks:
        item = chunk.items[chunk.ranks.index(rank)]
        if chunk.part is None:
            items.append(item)
        else:
            parts.append(ItemRegion(item, chunk.part))
        if chunk.is_grouped:
            groups.setdefault(chunk.ranks, []).append(item)
    together = [groups[ranks] for ranks in in_order(groups)]
    return Mirror(chunks[0].owner, number, owner_bytes, items, parts, together)


def in_order(holders: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the holders of groups of small chunks in the order of the groups: most holders first."""
    return sorted(holders, key=lambda ranks: (-len(ranks), ranks))


def differing_extents(expected: Sequence[int], found: Sequence[int]) -> list[int]:
    """Returns the numbers of extents whose digests differ between owner and mirror, or that only one of them has."""
    return [number for number, pair in enumerate(zip_longest(expected, found)) if pair[0] != pair[1]]
