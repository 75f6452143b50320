"""Who stages what ranks hold alike, for any number of hosts, ranks a host and labels; and the files that are left to be
sent.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from counted_looks import CountedList
from hypothesis import given
from hypothesis import strategies as st
from planner.memory_tier.test_placement import clusters, equal_hosts

from bytecheckpoint.planner.memory_tier.mirrors import (
    Mirroring,
    ReplicaGroup,
    choose_mirrors,
    differing_extents,
    place_missing,
)
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.planner.save_plan import SavePlan, plan_save
from bytecheckpoint.planner.write_items import WriteItem, pack_items


@given(clusters(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_replicas_are_staged_in_different_domains(
    cluster: tuple[list[RankPlace], list[int]], copies: int, draw: random.Random
) -> None:
    places, sizes = cluster
    groups = []
    for _ in range(draw.randrange(8)):
        ranks = sorted(draw.sample(range(len(places)), draw.randint(1, len(places))))
        groups.append(ReplicaGroup(draw.choice(ranks), ranks, draw.randrange(100)))
    for group, mirrors in zip(groups, choose_mirrors(groups, places, sizes, copies), strict=True):
        domains = [places[rank].failure_domain for rank in (group.owner, *mirrors)]
        assert {*mirrors} <= {*group.ranks} - {group.owner}
        assert len({*domains}) == len(domains)
        assert len(domains) == min(copies, len({places[rank].failure_domain for rank in group.ranks}))


def test_replicas_of_a_hybrid_sharded_run_are_staged_twice_and_evenly() -> None:
    """Eight hosts, on each of which eight ranks shard a model: replica groups of eight ranks, one a host."""
    places = equal_hosts(8, 8)
    groups = [
        ReplicaGroup(shard + 8 * owner, [shard + 8 * host for host in range(8)], 100)
        for shard in range(8)
        for owner in range(8)
    ]
    chosen = choose_mirrors(groups, places, [100] * 64, 2)
    staged = Counter(rank for mirrors in chosen for rank in mirrors)
    assert {len(mirrors) for mirrors in chosen} == {1}
    assert {staged[rank] for rank in range(64)} == {1}


def test_replicas_on_all_ranks_are_staged_evenly_by_ranks_of_other_hosts() -> None:
    places = equal_hosts(4, 8)
    groups = [ReplicaGroup(owner, list(range(32)), 10 << 20) for owner in range(32)]
    staged = Counter(rank for mirrors in choose_mirrors(groups, places, [10 << 20] * 32, 2) for rank in mirrors)
    assert {staged[rank] for rank in range(32)} == {1}


def plan_of(items: Sequence[Sequence[WriteItem]], places: Sequence[RankPlace], copies: int, max_bytes: int) -> SavePlan:
    mirroring = Mirroring(places, copies, max_bytes, [frozenset[int]() for _ in places])
    return plan_save(
        list(map(pack_items, items)), [{}] * len(items), global_ranks=range(len(items)), mirroring=mirroring
    )


@st.composite
def replicated(draw: st.DrawFn) -> list[list[WriteItem]]:
    """Tensors that a few ranks hold alike, in columns that they share or as a whole."""
    num_ranks = draw(st.integers(1, 6))
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 6))):
        shape = (draw(st.integers(0, 9)), draw(st.sampled_from([1, 3, 300_000])))
        num_shards = draw(st.integers(1, num_ranks))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        for rank in range(num_ranks):
            first, end = (shape[0] * (rank % num_shards + step) // num_shards for step in (0, 1))
            item = WriteItem(f"t{number}", dtype, shape, (first, 0), (end - first, shape[1]))
            items[rank].append(item)
    return items


@given(replicated(), st.integers(2, 3), st.sampled_from([1 << 20, 8 << 30]), st.randoms(use_true_random=False))
def test_a_mirror_has_the_chunks_of_the_file_that_it_mirrors(
    items: list[list[WriteItem]], copies: int, max_bytes: int, draw: random.Random
) -> None:
    places = [RankPlace(f"h{draw.randrange(4)}", None) for _ in items]
    plan = plan_of(items, places, copies, max_bytes)
    assert plan.whole_items  # the plan of storage is the same
    seen = []
    for rank, mirrors in enumerate(plan.memory.mirrors):
        for mirror in mirrors:
            file = plan.memory.mirrored[mirror.owner][mirror.number]
            assert rank in file.mirrors
            assert places[rank].failure_domain != places[mirror.owner].failure_domain
            own = [*range(len(items[mirror.owner]))]
            parts = [*plan.item_parts[mirror.owner]]
            owned = [
                (items[mirror.owner][slot].fqn, items[mirror.owner][slot].region)
                if slot < len(own)
                else (items[mirror.owner][parts[slot - len(own)].item].fqn, parts[slot - len(own)].region)
                for slot in file.slots
            ]
            here = [(items[rank][item].fqn, items[rank][item].region) for item in mirror.items]
            here += [(items[rank][item].fqn, region) for item, region in mirror.parts]
            assert sorted(here) == sorted(owned)
            seen.append((mirror.owner, mirror.number))
    expected = [
        (owner, number)
        for owner, files in enumerate(plan.memory.mirrored)
        for number, file in enumerate(files)
        for _ in file.mirrors
    ]
    assert sorted(seen) == expected
    for owner, files in enumerate(plan.memory.mirrored):
        slots = [slot for file in files for slot in file.slots]
        assert len(slots) == len({*slots})
        written = [*plan.whole_items[owner], *(True for _ in plan.item_parts[owner])]
        assert all(written[slot] for slot in slots)


@given(clusters(), st.integers(2, 4), st.randoms(use_true_random=False))
def test_with_what_is_sent_every_file_is_in_enough_domains(
    cluster: tuple[list[RankPlace], list[int]], copies: int, draw: random.Random
) -> None:
    places, _ = cluster
    lengths = [[draw.randrange(1000) for _ in range(draw.randrange(3))] for _ in places]
    mirrors = {}
    for owner, of_rank in enumerate(lengths):
        for number in range(len(of_rank)):
            others = [rank for rank in range(len(places)) if places[rank].host != places[owner].host]
            chosen = draw.sample(others, draw.randint(0, min(2, len(others))))
            if chosen:
                mirrors[owner, number] = chosen
    plan = place_missing(places, lengths, mirrors, copies)
    num_domains = len({place.failure_domain for place in places})
    for owner, of_rank in enumerate(lengths):
        for number in range(len(of_rank)):
            sent = [target for (rank, target), numbers in plan.sent.items() if rank == owner and number in numbers]
            held = {places[rank].failure_domain for rank in (owner, *mirrors.get((owner, number), ()), *sent)}
            assert len(held) >= min(copies, num_domains)
            assert owner in plan.short or len(held) >= copies
    assert place_missing(places, [[5] for _ in places], {(r, 0): [] for r in range(len(places))}, 1).sent == {}


def test_the_places_are_not_walked_for_each_file_that_lacks_a_copy() -> None:
    num_walks = []
    for num_hosts in (4, 40):
        places = CountedList(RankPlace(f"host{rank}", None) for rank in range(num_hosts))
        mirrors = {(rank, 0): [(rank + 1) % num_hosts] for rank in range(num_hosts)}
        assert len(place_missing(places, [[5]] * num_hosts, mirrors, 3).sent) == num_hosts
        num_walks.append(places.num_walks)
    assert num_walks[0] == num_walks[1]


def test_digests_that_differ_are_found_by_extent() -> None:
    assert differing_extents([1, 2, 3], [1, 2, 3]) == []
    assert differing_extents([1, 2, 3], [1, 7]) == [1, 2]
