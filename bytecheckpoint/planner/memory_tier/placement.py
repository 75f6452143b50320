"""Decides which ranks hold copies of what a rank staged: never on its host and never in its failure domain, with about
the same number of bytes on each host. This module knows ranks, hosts and labels, and moves nothing. mirrors.py has the
bytes that need no copy.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Holder = TypeVar("Holder", int, str)

Domain = tuple[str, bool]
"""Label of a failure domain, or the id of a host that is its own, and True for the latter."""


class RankPlace(NamedTuple):
    """The host and the failure domain of a rank. Compare domains by `failure_domain`: `domain` may be None."""

    host: str
    """Id of the memory root, which all ranks of a host share."""
    domain: str | None
    """Label of the failure domain; None where each host is its own."""

    @property
    def failure_domain(self) -> Domain:
        return (self.host, True) if self.domain is None else (self.domain, False)


class CopyPlan(NamedTuple):
    """The ranks that hold copies."""

    targets: Sequence[Sequence[int]]
    """By rank: the ranks that hold a copy of what this rank staged, each in a domain of its own."""
    short: Sequence[int]
    """Ranks for which there are not enough domains."""


def place_copies(places: Sequence[RankPlace], staged_bytes: Sequence[int], copies: int) -> CopyPlan:
    """Chooses the ranks that hold `copies - 1` copies of what each rank staged, or fewer where there are not enough
    domains.

    The copies of one host's ranks go to as few hosts as an even spread allows: the fewer pairs of hosts there are, the
    fewer losses of two hosts matter. Equal hosts form a ring, sorted by domain, and each step is as many hosts as the
    largest domain has. Where a ring is uneven or impossible, the ranks with the least choice come first, and the copies
    of one host's ranks go to one host until it has its share or they need another domain: then to the host that holds
    the fewest bytes.
    """
    candidates = [_place_greedily(places, staged_bytes, copies)]
    ring = _place_on_a_ring(places, copies)
    if ring is not None:
        candidates.append(ring)
    hosts = min(candidates, key=lambda of_ranks: _unevenness(of_ranks, places, staged_bytes))
    ranks = _RanksOfHosts(places, staged_bytes)
    targets = [[ranks.take(host, rank) for host in of_rank] for rank, of_rank in enumerate(hosts)]
    return CopyPlan(targets, [rank for rank, of_rank in enumerate(targets) if len(of_rank) < copies - 1])


def _unevenness(
    hosts: Sequence[Sequence[str]], places: Sequence[RankPlace], staged_bytes: Sequence[int]
) -> tuple[int, int, int]:
    """Returns the key by which plans are compared, the better first: the number of copies, negated; the bytes of the
    fullest host; the number of pairs of hosts.
    """
    held: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    for place, of_rank, num_bytes in zip(places, hosts, staged_bytes, strict=True):
        pairs.update((place.host, host) for host in of_rank)
        held.update(dict.fromkeys(of_rank, num_bytes))
    return -sum(map(len, hosts)), max(held.values(), default=0), len(pairs)


class _RanksOfHosts:
    """Divides the copies that a host holds among its ranks, evenly by bytes."""

    def __init__(self, places: Sequence[RankPlace], staged_bytes: Sequence[int]) -> None:
        self._bytes = staged_bytes
        self._held = [0] * len(places)
        self._ranks: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            self._ranks.setdefault(place.host, []).append(rank)

    def take(self, host: str, rank: int) -> int:
        """Returns the rank on the given host that is to hold a copy of what `rank` staged: the one that holds the
        fewest bytes so far. Counts the copy as held by it.
        """
        target = min(self._ranks[host], key=lambda other: (self._held[other], other))
        self._held[target] += self._bytes[rank]
        return target


def _place_on_a_ring(places: Sequence[RankPlace], copies: int) -> list[list[str]] | None:
    """Returns, by rank, the `copies - 1` hosts of its copies; None if one domain has so many hosts that `copies` steps
    over it go more than once around the ring.
    """
    domains = {place.host: place.failure_domain for place in places}
    hosts = sorted(domains, key=lambda host: (domains[host], host))
    step = max(Counter(domains.values()).values(), default=0)
    if copies * step > len(hosts):
        return None
    numbers = {host: number for number, host in enumerate(hosts)}
    return [[hosts[(numbers[place.host] + turn * step) % len(hosts)] for turn in range(1, copies)] for place in places]


def _place_greedily(places: Sequence[RankPlace], staged_bytes: Sequence[int], copies: int) -> list[list[str]]:
    """Returns, by rank, the hosts of its copies: fewer than `copies - 1` where there are not enough domains."""
    domains = {place.host: place.failure_domain for place in places}
    bytes_of: Counter[Domain] = Counter()
    for place, num_bytes in zip(places, staged_bytes, strict=True):
        bytes_of[place.failure_domain] += num_bytes
    num_hosts = Counter(domains.values())
    pressure = {domain: bytes_of[domain] / max(len(domains) - num_hosts[domain], 1) for domain in num_hosts}
    level = max([sum(staged_bytes) / max(len(domains), 1), *pressure.values()])
    order = sorted(
        range(len(places)),
        key=lambda rank: (-pressure[places[rank].failure_domain], places[rank].failure_domain, places[rank].host, rank),
    )
    chosen: list[list[str]] = [[] for _ in places]
    least = LeastFilled(domains)
    for turn in range(1, copies):
        partners: dict[str, str] = {}
        for rank in order:
            place, num_bytes = places[rank], staged_bytes[rank]
            used = {domains[host] for host in (place.host, *chosen[rank])}
            partner = partners.get(place.host)
            if partner is None or domains[partner] in used or least.held[partner] + num_bytes > turn * level:
                partner = least.find(used)
            if partner is not None:
                partners[place.host] = partner
                least.held[partner] += num_bytes
                chosen[rank].append(partner)
    return chosen


class LeastFilled(Generic[Holder]):
    """Finds the host or rank that holds the least outside of a few domains, without a look at all of them."""

    def __init__(self, domains: Mapping[Holder, Domain]) -> None:
        self.held: dict[Holder, int] = dict.fromkeys(sorted(domains), 0)
        """Bytes, by holder. They may rise at any time."""
        self._holders: dict[Domain, list[tuple[int, Holder]]] = {}
        for holder in self.held:
            self._holders.setdefault(domains[holder], []).append((0, holder))
        tops = ((of_domain[0], domain) for domain, of_domain in self._holders.items())
        self._domains: list[tuple[tuple[int, Holder], Domain]] = sorted(tops)

    def find(self, used: Collection[Domain]) -> Holder | None:
        """Returns the least filled holder outside of these domains; None if there is none."""
        skipped: list[tuple[tuple[int, Holder], Domain]] = []
        found = None
        while self._domains and found is None:
            top, domain = heapq.heappop(self._domains)
            current = self._top(domain)
            if current != top:
                heapq.heappush(self._domains, (current, domain))
                continue
            skipped.append((top, domain))
            if domain not in used:
                found = top[1]
        for item in skipped:
            heapq.heappush(self._domains, item)
        return found

    def _top(self, domain: Domain) -> tuple[int, Holder]:
        """Returns the bytes of the least filled holder of a domain, and the holder. Corrects entries of the domain's
        heap, which may be too low.
        """
        heap = self._holders[domain]
        while heap[0][0] != self.held[heap[0][1]]:
            heapq.heapreplace(heap, (self.held[heap[0][1]], heap[0][1]))
        return heap[0]
