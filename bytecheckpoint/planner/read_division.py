"""Chooses the reader rank of every extent that several ranks want, or that a rank wants and cannot read, and the path
of the bytes from the reader rank to the others: once to each other host, and within a host through shared memory. This
module knows extents of files, ranks and hosts; how a rank carries out its share is in exchange_plan.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from operator import itemgetter
from typing import NamedTuple

from bytecheckpoint.planner.deduplicate import fill_level
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare, runs_by_ranks

HOSTS_TOGETHER = 5
"""Hosts that share the reading of the same bytes; more are divided, and each part reads them once. A host exchanges
bytes with one less, and a rank with one rank of each: it connects to four others at most, and four to it."""
FEW_RANKS = 4
"""Most ranks that connect to one reader rank for a few bytes. What more ranks want is broadcast as a message."""
_COMMON_BYTES = 256 << 10
"""Limit for the bytes that are broadcast to one rank."""
_COMMON_BYTES_OF_ALL = 256 << 20
"""Limit for the broadcast to all ranks together: one key-value store of the process group sends it."""
COMMON_READER = 0
"""The rank that reads common bytes, if all can read them: the coordinator."""


class Hosts:
    """The ranks of each host. A rank that shares no memory with others is a host of its own."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.ranks = ranks
        self.of_rank = {rank: number for number, of_host in enumerate(ranks) for rank in of_host}
        self.lanes = {rank: lane for of_host in ranks for lane, rank in enumerate(of_host)}
        """The place of each rank on its host. A rank connects to those in the same place on other hosts."""

    def relay(self, reader: int, host: int) -> int:
        """Returns the rank through which a host gets what `reader` reads: `reader` itself on its own host."""
        of_host = self.ranks[host]
        return reader if host == self.of_rank[reader] else of_host[self.lanes[reader] % len(of_host)]

    def readers_among(self, ranks: Sequence[int]) -> Sequence[int]:
        """Returns those of the ranks that may read for all of them: all if on one host; else those among the first
        ranks of their host, as many as the smallest of the hosts has. With more readers than that on a larger host, a
        rank of the smallest host would receive from several of them.
        """
        hosts = {self.of_rank[rank] for rank in ranks}
        num_lanes = min(len(self.ranks[host]) for host in hosts)
        return ranks if len(hosts) == 1 else [rank for rank in ranks if self.lanes[rank] < num_lanes]


class ReadPath(NamedTuple):
    """The way of a reader rank's runs to one host: its relay receives them, and the takers copy them from there."""

    reader: int
    relay: int
    """The rank of the host in whose memory they are; the reader on its own host."""
    takers: Sequence[int]
    """The other ranks of the host that want them."""
    runs: Sequence[ExtentRun]


class ReadGroup(NamedTuple):
    """Ranks that want the same runs and share reading them. The last one may want none of them, and read all."""

    ranks: Sequence[int]
    parts: Sequence[Sequence[ExtentRun]]
    """The runs that each of them reads for all, in the order of the files. Equal for groups alike, so that what
    thousands of ranks do takes little memory."""

    def paths(self, hosts: Hosts) -> Iterator[ReadPath]:
        """Yields the path of each reader rank's runs to each host that has ranks of the group."""
        readers = {rank: part for rank, part in zip(self.ranks, self.parts, strict=True) if part}
        by_host: dict[int, list[int]] = {}
        for rank in self.ranks:
            by_host.setdefault(hosts.of_rank[rank], []).append(rank)
        for reader, part in readers.items():
            for host, of_host in by_host.items():
                relay = hosts.relay(reader, host)
                yield ReadPath(reader, relay, [rank for rank in of_host if rank != relay], part)


class ReadDivision(NamedTuple):
    """The division of reading among all ranks."""

    groups: Sequence[ReadGroup]
    common: Sequence[tuple[int, ExtentRun]]
    """Each run that is broadcast, after its reader rank."""
    hosts: Hosts

    def groups_of_rank(self) -> list[list[int]]:
        """Returns the numbers of the groups that each rank is in, or relays for."""
        numbers: list[list[int]] = [[] for _ in self.hosts.of_rank]
        for number, group in enumerate(self.groups):
            for rank in sorted({*group.ranks, *(path.relay for path in group.paths(self.hosts))}):
                numbers[rank].append(number)
        return numbers


def divide_reading(
    wanted: Sequence[Sequence[ExtentRun]],
    extents: Extents,
    held: Sequence[Collection[int]],
    hosts: Hosts,
) -> ReadDivision:
    """Assigns a reader rank to every extent that two ranks or more want, or that the one rank that wants it cannot
    read, such that all ranks read about the same number of bytes.

    `wanted` has the runs of each rank, which do not overlap and do not touch one another; ranks that want the same
    should have the same list, which is then looked at once. `held` has for each rank the files that it can read and
    others may not: a file that is in no rank's `held` can be read by all.

    Runs of few bytes that more than FEW_RANKS want are common. The reader rank of other runs is one of those that want
    them, if one of these can read the file, else the holder of the file that reads the least so far; it gets few, long
    runs. If all can read the file, ranks on more than HOSTS_TOGETHER hosts are divided into parts, each with readers of
    its own. The same input always gives the same groups.
    """
    holders = _holders_by_file(held)
    by_ranks = runs_by_ranks(wanted)
    common = _take_common(by_ranks, extents, min(_COMMON_BYTES, _COMMON_BYTES_OF_ALL // len(wanted)))
    division = _Division(len(wanted), extents, hosts)
    for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):  # small ones have the least choice
        for file_holders, runs in _runs_by_holders(by_ranks[ranks], holders):
            # A file that few ranks can read is read once for all: on some hosts no rank might be able to.
            for together in [ranks] if file_holders is not None else division.parts_of(ranks):
                division.add(together, file_holders, runs)
    return ReadDivision(division.groups, [(min(holders.get(run.file, (COMMON_READER,))), run) for run in common], hosts)


def share_of(
    rank: int, groups: Iterable[ReadGroup], common: Sequence[tuple[int, ExtentRun]], hosts: Hosts
) -> ReaderShare:
    """Returns what a rank reads, receives and relays in all groups, and the `common` runs, each after its reader."""
    reads: list[ExtentRun] = []
    received: list[tuple[int, ExtentRun]] = []
    relayed: list[tuple[int, ExtentRun]] = []
    peers: set[int] = set()
    takers: set[int] = set()
    for path in (path for group in groups for path in group.paths(hosts)):
        if path.relay == rank:
            reads += path.runs if path.reader == rank else ()
            relayed += [(path.reader, run) for run in path.runs if path.reader != rank]
            takers.update(path.takers)
        elif path.reader == rank:
            peers.add(path.relay)
        elif rank in path.takers:
            received += [(path.relay, run) for run in path.runs]
    return ReaderShare(
        reads=reads,
        peers=sorted(peers),
        received=sorted(received, key=itemgetter(1)),
        relayed=sorted(relayed, key=itemgetter(1)),
        takers=sorted(takers),
        common=common,
    )


def _holders_by_file(held: Sequence[Collection[int]]) -> dict[int, list[int]]:
    """Returns, for each file that not every rank can read, the ranks that can, in ascending order."""
    holders: dict[int, list[int]] = {}
    for rank, files in enumerate(held):
        for file in files:
            holders.setdefault(file, []).append(rank)
    return holders


def _runs_by_holders(
    runs: Sequence[ExtentRun], holders: Mapping[int, Sequence[int]]
) -> Iterator[tuple[Sequence[int] | None, Sequence[ExtentRun]]]:
    """Groups the runs by the ranks that can read their file; yields these ranks with the runs. None is all ranks."""
    if not holders:
        yield None, runs
        return
    by_holders: dict[tuple[int, ...] | None, list[ExtentRun]] = {}
    for run in runs:
        file_holders = holders.get(run.file)
        by_holders.setdefault(None if file_holders is None else tuple(file_holders), []).append(run)
    yield from by_holders.items()


class _Division:
    """The groups of ranks that share reading, while runs are assigned to them."""

    def __init__(self, num_ranks: int, extents: Extents, hosts: Hosts) -> None:
        self.groups: list[ReadGroup] = []
        self._hosts = hosts
        self._partners: list[set[int]] = [set() for _ in hosts.ranks]
        """By host: the other hosts with which it exchanges bytes."""
        self._extents = extents
        self._read_bytes = [0] * num_ranks
        self._runs: Sequence[ExtentRun] = ()
        """The runs that were divided last."""
        self._divided: dict[tuple[int, ...], tuple[list[list[ExtentRun]], list[int]]] = {}
        """Parts of these runs and the bytes of each, by the loads: replicas mostly have equal ones."""

    def parts_of(self, ranks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Divides the ranks into parts that share reading. A part has all of the ranks on a few hosts; hosts that
        exchange bytes already are put together where possible. Notes which hosts exchange bytes from now on.
        """
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts.of_rank[rank], []).append(rank)
        left = dict.fromkeys(by_host)
        while left:
            max_hosts = -(-len(left) // -(-len(left) // HOSTS_TOGETHER))
            first = next(iter(left))
            part: list[int] = []
            for host in [first, *sorted(self._partners[first] & left.keys()), *islice(left, 1, max_hosts)]:
                if host not in part and len(part) < max_hosts and self._can_join(host, part):
                    part.append(host)
            for host in part:
                self._partners[host].update(set(part) - {host})
                del left[host]
            yield sorted(rank for host in part for rank in by_host[host])

    def _can_join(self, host: int, part: Sequence[int]) -> bool:
        """Returns True if no host would exchange bytes with more than HOSTS_TOGETHER - 1 others if `host` joined
        `part`, a list of hosts.
        """
        known = self._partners
        joined = [len(known[other] | {host, *part} - {other}) < HOSTS_TOGETHER for other in part]
        return all(joined) and len(known[host] | {*part}) < HOSTS_TOGETHER

    def add(self, together: Sequence[int], holders: Sequence[int] | None, runs: Sequence[ExtentRun]) -> None:
        """Divides the runs that all of `together` want among those of these ranks that can read them or, if none of
        them can, among `holders`, the ranks that can. `holders` is None if all ranks can.
        """
        readers = self._hosts.readers_among(together) if holders is None else sorted({*together} & {*holders})
        if not readers and holders is not None:
            self._add_of_others(together, holders, runs)
            return
        parts, amounts = self._divide(runs, readers)
        for rank, num_bytes in zip(readers, amounts, strict=True):
            self._read_bytes[rank] += num_bytes
        if len(together) > 1:
            if len(readers) < len(together):
                of_reader = dict(zip(readers, parts, strict=True))
                parts = [of_reader.get(rank, []) for rank in together]
            self.groups.append(ReadGroup(together, parts))

    def _add_of_others(self, together: Sequence[int], holders: Sequence[int], runs: Sequence[ExtentRun]) -> None:
        """Adds groups in which some of the holders read the runs for the ranks `together`, which cannot."""
        by_reader: dict[int, list[ExtentRun]] = {}
        for run in runs:  # each whole, by one rank: a peer connects to no more ranks than it must
            reader = min(holders, key=lambda rank: (self._read_bytes[rank], rank))
            self._read_bytes[reader] += self._extents.num_bytes(run)
            by_reader.setdefault(reader, []).append(run)
        for reader, part in by_reader.items():
            self.groups.append(ReadGroup([*together, reader], [*([] for _ in together), part]))

    def _divide(self, runs: Sequence[ExtentRun], readers: Sequence[int]) -> tuple[list[list[ExtentRun]], list[int]]:
        """Returns the part of each reader rank, and the bytes of each part."""
        if runs is not self._runs:
            self._runs, self._divided = runs, {}
        least = min(self._read_bytes[rank] for rank in readers)
        loads = tuple(self._read_bytes[rank] - least for rank in readers)
        if loads not in self._divided:
            parts = _divide_runs(runs, loads, self._extents)
            self._divided[loads] = parts, [sum(map(self._extents.num_bytes, part)) for part in parts]
        return self._divided[loads]


def _take_common(by_ranks: dict[tuple[int, ...], list[ExtentRun]], extents: Extents, max_bytes: int) -> list[ExtentRun]:
    """Removes from `by_ranks`, and returns in file order, runs that more than FEW_RANKS want: up to `max_bytes`, those
    of the most ranks first. A set of ranks whose runs do not all fit keeps them.
    """
    common: list[ExtentRun] = []
    many = [ranks for ranks in by_ranks if len(ranks) > FEW_RANKS]
    for ranks in sorted(many, key=lambda ranks: (-len(ranks), ranks)):
        num_bytes = sum(map(extents.num_bytes, by_ranks[ranks]))
        if num_bytes <= max_bytes:
            max_bytes -= num_bytes
            common += by_ranks.pop(ranks)
    return sorted(common)


def _divide_runs(runs: Sequence[ExtentRun], loads: Sequence[int], extents: Extents) -> list[list[ExtentRun]]:
    """Divides the runs, in their order, into one part for each of the loads, which are bytes, so that the highest load
    with its part is as low as can be. A part ends with the extent in which it is full.
    """
    level = fill_level(loads, sum(map(extents.num_bytes, runs)))
    parts: list[list[ExtentRun]] = []
    left = [*reversed(runs)]
    position = 0
    for quota_end in accumulate(max(0, level - load) for load in loads):
        parts.append([])
        while left and position < quota_end:
            file, first, end = left.pop()
            bounds = extents.bounds(file)
            stop = bisect_left(bounds, bounds[first] + quota_end - position, first + 1, end)
            parts[-1].append(ExtentRun(file, first, stop))
            position += bounds[stop] - bounds[first]
            if stop < end:
                left.append(ExtentRun(file, stop, end))
    parts[-1] += reversed(left)  # extents without bytes
    return parts
