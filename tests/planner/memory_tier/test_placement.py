"""Who holds whose copy, for any number of hosts, ranks a host and labels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bytecheckpoint.planner.memory_tier.placement import RankPlace, place_copies


def equal_hosts(num_hosts: int, ranks_each: int, hosts_a_domain: int | None = None) -> list[RankPlace]:
    return [
        RankPlace(f"h{host:05d}", None if hosts_a_domain is None else f"rack{host // hosts_a_domain}")
        for host in range(num_hosts)
        for _ in range(ranks_each)
    ]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[RankPlace], list[int]]:
    places = []
    for host in range(draw(st.integers(1, 12))):
        domain = draw(st.sampled_from([None, "a", "b", "c", "h0"]))
        places += [RankPlace(f"h{host}", domain)] * draw(st.integers(1, 5))
    return places, draw(st.lists(st.integers(0, 1000), min_size=len(places), max_size=len(places)))


def held_by_host(places: Sequence[RankPlace], targets: Sequence[Sequence[int]], sizes: Sequence[int]) -> Counter[str]:
    held: Counter[str] = Counter({place.host: 0 for place in places})
    for of_rank, num_bytes in zip(targets, sizes, strict=True):
        for target in of_rank:
            held[places[target].host] += num_bytes
    return held


@given(clusters(), st.integers(1, 4))
def test_every_copy_is_in_a_domain_of_its_own(cluster: tuple[list[RankPlace], list[int]], copies: int) -> None:
    places, sizes = cluster
    plan = place_copies(places, sizes, copies)
    num_domains = len({place.failure_domain for place in places})
    for rank, targets in enumerate(plan.targets):
        assert len({places[holder].failure_domain for holder in (rank, *targets)}) == 1 + len(targets)
        assert len(targets) == min(copies, num_domains) - 1
    assert list(plan.short) == (list(range(len(places))) if num_domains < copies else [])
    assert plan == place_copies(places, sizes, copies)


RACKS = [(f"{rack}{host}", rack) for rack in "ab" for host in range(5) for _ in range(2)]


@given(clusters(), st.integers(2, 3))
@example(([RankPlace("own", None), *(RankPlace(*place) for place in RACKS)], [0, *[100] * len(RACKS)]), 3)
def test_no_host_holds_much_more_than_it_must(cluster: tuple[list[RankPlace], list[int]], copies: int) -> None:
    places, sizes = cluster
    hosts = {place.host: place.failure_domain for place in places}
    must = [copies * sum(sizes) / len(hosts)]
    for domain in hosts.values():
        others = Counter(other for other in hosts.values() if other != domain)
        own = sum(size for place, size in zip(places, sizes, strict=True) if place.failure_domain == domain)
        must += [copies * own / others.total()] if others else []
        # Another domain, however large, holds one copy at most.
        lefts = [others.total() - num_hosts for num_hosts in others.values()]
        must += [(copies - 2) * own / left for left in lefts if left]
    most = max(held_by_host(places, place_copies(places, sizes, copies).targets, sizes).values())
    assert most <= (copies - 1) * max(must) + max(sizes) * copies


@pytest.mark.parametrize(("num_hosts", "ranks_each"), [(2, 1), (3, 1), (3, 8), (7, 4), (64, 8), (1024, 8), (2047, 4)])
@pytest.mark.parametrize("hosts_a_domain", [None, 1, 16])
@pytest.mark.parametrize("copies", [2, 3])
def test_equal_hosts_hold_the_same(num_hosts: int, ranks_each: int, hosts_a_domain: int | None, copies: int) -> None:
    places = equal_hosts(num_hosts, ranks_each, hosts_a_domain)
    plan = place_copies(places, [5] * len(places), copies)
    if copies * (hosts_a_domain or 1) > num_hosts:
        return  # there are too few domains for an even spread
    assert not plan.short
    assert {*held_by_host(places, plan.targets, [5] * len(places)).values()} == {5 * ranks_each * (copies - 1)}
    holds = Counter(target for of_rank in plan.targets for target in of_rank)
    assert {*holds.values()} == {copies - 1}
    pairs = {(places[rank].host, places[target].host) for rank, of in enumerate(plan.targets) for target in of}
    assert len(pairs) == num_hosts * (copies - 1)


def test_any_one_domain_may_be_lost() -> None:
    for places, sizes in random_clusters():
        plan = place_copies(places, sizes, 2)
        for domain in {place.failure_domain for place in places} if not plan.short else ():
            for rank, of_rank in enumerate(plan.targets):
                assert any(places[holder].failure_domain != domain for holder in (rank, *of_rank))


def random_clusters() -> Iterator[tuple[list[RankPlace], list[int]]]:
    for seed in range(8):
        draw = random.Random(seed)
        hosts = [(f"h{host}", f"rack{draw.randrange(40)}") for host in range(draw.randrange(2, 300))]
        places = [RankPlace(*host) for host in hosts for _ in range(draw.randrange(1, 9))]
        yield places, [draw.randrange(1 << 30) for _ in places]


def test_thousands_of_hosts_are_placed_with_few_looks() -> None:
    places = equal_hosts(8192, 1)
    plan = place_copies(places, [3 + rank % 5 for rank in range(8192)], 2)
    assert not plan.short


def test_a_host_that_is_its_own_domain_is_told_apart_from_a_label_of_that_name() -> None:
    places = [RankPlace("h0", None), RankPlace("h1", "h0")]
    assert place_copies(places, [1, 1], 2).targets == [[1], [0]]
