"""The places of segments and parity, for groups of any size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planner.memory_tier.parity_plan import (
    Segment,
    form_groups,
    holder_of,
    num_bytes,
    pieces_of,
    plan_rebuild,
    segment_bytes,
    segments_at,
)
from bytecheckpoint.planner.memory_tier.resume_plan import ParityMember

GROUPS = range(2, 13)


@pytest.mark.parametrize("num_members", GROUPS)
def test_every_segment_is_on_another_member_and_each_has_one_of_every_other(num_members: int) -> None:
    held = [segments_at(holder, num_members) for holder in range(num_members)]
    segments = [segment for of_holder in held for segment in of_holder]
    assert sorted(segments) == [Segment(o, n) for o in range(num_members) for n in range(num_members - 1)]
    for holder, of_holder in enumerate(held):
        assert sorted(segment.owner for segment in of_holder) == [o for o in range(num_members) if o != holder]
        assert all(holder_of(segment, num_members) == holder for segment in of_holder)


@pytest.mark.parametrize("num_members", GROUPS)
def test_a_rebuild_takes_nothing_from_the_lost_member_and_each_segment_of_the_others_once(num_members: int) -> None:
    for lost in range(num_members):
        steps = plan_rebuild(lost, num_members)
        assert [step.number for step in steps] == [*range(num_members - 1)]
        assert sorted(step.holder for step in steps) == [other for other in range(num_members) if other != lost]
        taken = Counter(segment for step in steps for segment in step.others)
        assert {*taken.values()} <= {1}
        assert all(segment.owner not in {lost, step.holder} for step in steps for segment in step.others)
        # k - 1 images in all: as many segments as the survivors have among them, but for those that parity stands for.
        assert len(taken) == (num_members - 1) * (num_members - 2)


members = st.lists(st.integers(0, 5000), max_size=5).map(
    lambda lengths: ParityMember("h", [(f"x{number}", length) for number, length in enumerate(lengths)])
)


@given(st.lists(members, min_size=2, max_size=12))
def test_segments_hold_every_byte_of_every_file_once(group: list[ParityMember]) -> None:
    length = segment_bytes(group)
    assert length % 8 == 0
    for member in group:
        pieces = [piece for number in range(len(group) - 1) for piece in pieces_of(member, number, length)]
        assert [(p.file, b) for p in pieces for b in range(p.byte_offset, p.byte_offset + p.byte_length)] == [
            (name, byte) for name, byte_length in member.files for byte in range(byte_length)
        ]
        for number in range(len(group) - 1):
            assert sum(piece.byte_length for piece in pieces_of(member, number, length)) <= length
    assert length <= max(map(num_bytes, group)) / (len(group) - 1) + 64


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(2, 12))
def test_groups_are_of_different_domains_and_about_as_large(labels: list[int], max_members: int) -> None:
    domains = {f"h{number:02d}": (f"rack{label}", False) for number, label in enumerate(labels)}
    groups = form_groups(domains, max_members)
    assert sorted(host for group in groups for host in group) == sorted(domains)
    for group in groups:
        assert len({domains[host] for host in group}) == len(group) <= max_members
    sizes = [*map(len, groups)]
    assert not sizes or max(sizes) - min(sizes) <= 1
    # No more groups than there have to be.
    assert len(groups) == max([-(-len(labels) // max_members), *Counter(labels).values()], default=0)


def test_thousands_of_hosts_are_grouped() -> None:
    groups = form_groups({f"h{number:05d}": (f"h{number:05d}", True) for number in range(8191)}, 8)
    assert Counter(map(len, groups)) == {8: 1023, 7: 1}
