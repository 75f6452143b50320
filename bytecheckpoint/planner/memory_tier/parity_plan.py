"""Places parity over groups of hosts: the bytes of a host are cut into one segment less than the group has members, and
segment j of member i goes into the XOR on member i + j + 1, modulo the number of members. Any one member can be rebuilt
from the others. This module computes no XOR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.planner.memory_tier.placement import Domain
from bytecheckpoint.planner.memory_tier.resume_plan import ParityMember

_SEGMENT_UNIT = 64
"""Segment lengths are multiples of this number of bytes, so that words are XORed."""


class Segment(NamedTuple):
    """One of the equal segments of a member's bytes, by its number."""

    owner: int
    """Number of the member in its group."""
    number: int


class FilePiece(NamedTuple):
    """Consecutive bytes of a data file."""

    file: str
    byte_offset: int
    byte_length: int


class PlacedPiece(NamedTuple):
    """A piece that is XORed into a block of parity, or into the bytes of a lost member."""

    piece: FilePiece
    byte_offset: int
    """Place in that block, or in those bytes."""


class RebuildStep(NamedTuple):
    """One segment of a lost member, and the parts of its XOR."""

    number: int
    """Number of the lost segment."""
    holder: int
    """The member that has the parity."""
    others: Sequence[Segment]
    """The other segments in that parity. XORed with it, they give the lost segment."""


def form_groups(domains: Mapping[str, Domain], max_members: int) -> list[list[str]]:
    """Divides the hosts into groups of at most `max_members`, each with hosts of different domains, and as equal as can
    be. A group of one has no parity. With a `max_members` of 3 or more there is one only if some domain has more than
    half of the hosts.
    """
    hosts = sorted(domains, key=lambda host: (domains[host], host))
    largest = max(Counter(domains.values()).values(), default=0)
    num_groups = max(-(-len(hosts) // max_members), largest)
    # Hosts of one domain follow one another, and are not more than there are groups.
    return [hosts[first::num_groups] for first in range(num_groups)]


def segment_bytes(members: Sequence[ParityMember]) -> int:
    """Returns the length of a segment in bytes, a multiple of _SEGMENT_UNIT: just enough for the longest member. Where
    a member's bytes end before its last segment does, the rest is padded with zeros.
    """
    longest = max(num_bytes(member) for member in members)
    return -(-longest // max(len(members) - 1, 1) // _SEGMENT_UNIT) * _SEGMENT_UNIT


def num_bytes(member: ParityMember) -> int:
    """Returns the number of bytes of all files of a member."""
    return sum(byte_length for _, byte_length in member.files)


def holder_of(segment: Segment, num_members: int) -> int:
    """Returns the number of the member into whose parity the segment goes."""
    return (segment.owner + segment.number + 1) % num_members


def segments_at(holder: int, num_members: int) -> list[Segment]:
    """Returns the segments that are XORed into the parity of a member: one of each other member."""
    owners = (owner for owner in range(num_members) if owner != holder)
    return [Segment(owner, (holder - owner - 1) % num_members) for owner in owners]


def pieces_of(member: ParityMember, number: int, length: int) -> list[FilePiece]:
    """Returns the pieces of the member's files that make up segment `number`. A segment has `length` bytes; where it is
    padded, the pieces are shorter together.
    """
    start, end, position = number * length, (number + 1) * length, 0
    pieces = []
    for name, byte_length in member.files:
        first, last = max(start - position, 0), min(end - position, byte_length)
        if first < last:
            pieces.append(FilePiece(name, first, last - first))
        position += byte_length
    return pieces


def plan_rebuild(lost: int, num_members: int) -> list[RebuildStep]:
    """Returns a step for each segment of the member `lost`: the segment is made from the parity on one other member,
    the holder, and a segment of each of the remaining ones.
    """
    return [
        RebuildStep(
            number,
            holder,
            [segment for segment in segments_at(holder, num_members) if segment.owner != lost],
        )
        for number in range(num_members - 1)
        for holder in [holder_of(Segment(lost, number), num_members)]
    ]


def pieces_at(holder: int, members: Sequence[ParityMember]) -> list[PlacedPiece]:
    """Returns the pieces of all other members that are XORed into the parity of the member `holder`."""
    length = segment_bytes(members)
    return [
        placed
        for owner, number in segments_at(holder, len(members))
        for placed in _placed(members[owner], number, length, start=0)
    ]


def pieces_without(lost: int, members: Sequence[ParityMember]) -> list[PlacedPiece]:
    """Returns the pieces of the other members' files that, XORed together with all parity, make the bytes of the lost
    member; each with its place in the lost member's padded bytes.
    """
    length = segment_bytes(members)
    return [
        placed
        for step in plan_rebuild(lost, len(members))
        for owner, number in step.others
        for placed in _placed(members[owner], number, length, start=step.number * length)
    ]


def _placed(member: ParityMember, number: int, length: int, *, start: int) -> list[PlacedPiece]:
    placed = []
    for piece in pieces_of(member, number, length):
        placed.append(PlacedPiece(piece, start))
        start += piece.byte_length
    return placed
