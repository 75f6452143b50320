"""Which rank reads what several want: every extent that is shared has one reader, comes once to each other host, and
reaches there exactly those who want it; and no rank is connected to more than a few others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_shares import assign_readers

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.planner import read_division
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare
from bytecheckpoint.planner.read_division import FEW_RANKS, HOSTS_TOGETHER, Hosts, divide_reading

Wanted = list[list[ExtentRun]]


def file_of(lengths: list[int]) -> DataFile:
    return DataFile("f", sum(lengths), lengths, [0] * len(lengths))


def shares_of(
    wanted: Wanted,
    extents: Extents,
    common_bytes: int = 0,
    held: Sequence[Collection[int]] | None = None,
    hosts: Hosts | None = None,
) -> list[ReaderShare]:
    """The shares where so many bytes may be common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_division, "_COMMON_BYTES", common_bytes)
        return assign_readers(wanted, extents, held or [()] * len(wanted), hosts)


def hosts_of(num_ranks: int, ranks_of_host: int) -> Hosts:
    return Hosts(
        [[*range(first, min(first + ranks_of_host, num_ranks))] for first in range(0, num_ranks, ranks_of_host)]
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Extents, Wanted]:
    files = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=3))
    wanted = [
        [run for number, file in enumerate(files) for run in draw(runs_in(number, len(file)))]
        for _ in range(draw(st.integers(1, 7)))
    ]
    return Extents([file_of(lengths) for lengths in files]), wanted


@st.composite
def runs_in(draw: st.DrawFn, file: int, num_extents: int) -> list[ExtentRun]:
    """Runs that do not touch one another."""
    is_wanted = [*draw(st.lists(st.booleans(), min_size=num_extents, max_size=num_extents)), False]
    starts = [i for i, wants in enumerate(is_wanted) if wants and (i == 0 or not is_wanted[i - 1])]
    ends = [i for i, wants in enumerate(is_wanted) if not wants and i > 0 and is_wanted[i - 1]]
    return [ExtentRun(file, first, end) for first, end in zip(starts, ends, strict=True)]


def extents_in(runs: list[ExtentRun]) -> set[tuple[int, int]]:
    return {(run.file, number) for run in runs for number in range(run.first, run.end)}


def check_shares(wanted: Wanted, shares: list[ReaderShare], hosts: Hosts | None = None, *, max_readers: int) -> None:
    hosts = hosts or hosts_of(len(wanted), 1)
    wants = [extents_in(runs) for runs in wanted]
    counts = Counter(extent for of_rank in wants for extent in of_rank)
    read = [extents_in(list(share.reads)) for share in shares]
    relayed = [[extent for _, run in share.relayed for extent in extents_in([run])] for share in shares]
    has = [{*of_reader, *of_relay} for of_reader, of_relay in zip(read, relayed, strict=True)]
    peers: dict[int, set[int]] = {rank: set() for rank in range(len(wanted))}
    for rank, share in enumerate(shares):
        received = [extent for _, run in share.received for extent in extents_in([run])]
        assert len(received) == len(set(received))
        assert not has[rank] & set(received)
        assert (has[rank] & wants[rank]) | {*received} == {extent for extent in wants[rank] if counts[extent] > 1}
        for taken_from, run in share.received:
            assert extents_in([run]) <= has[taken_from]
            assert hosts.of_rank[taken_from] == hosts.of_rank[rank]
            assert rank in shares[taken_from].takers
        for reader, run in share.relayed:
            assert extents_in([run]) <= read[reader]
            assert hosts.of_rank[reader] != hosts.of_rank[rank]
            peers[reader].add(rank)
        for runs in (share.received, share.relayed):
            assert [run for _, run in runs] == sorted(run for _, run in runs)
    readers = Counter(extent for of_rank in read for extent in of_rank)
    assert all(count <= max_readers for count in readers.values())
    comes = Counter((hosts.of_rank[rank], extent) for rank, of_rank in enumerate(has) for extent in of_rank)
    assert all(count == 1 for count in comes.values())
    assert [list(share.peers) for share in shares] == [sorted(of_reader) for of_reader in peers.values()]
    assert max(map(num_connections, shares)) <= MAX_CONNECTIONS


MAX_CONNECTIONS = 8


def num_connections(share: ReaderShare) -> int:
    return len(share.peers) + len({reader for reader, _ in share.relayed})


@st.composite
def partitions(draw: st.DrawFn, num_ranks: int) -> Hosts:
    """Ranks on hosts of any sizes, in any order."""
    numbers = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks))
    by_host: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        by_host.setdefault(number, []).append(rank)
    return Hosts([*by_host.values()])


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_shared_extent_is_read_once_and_comes_once_to_each_host_that_wants_it(
    case: tuple[Extents, Wanted], data: st.DataObject
) -> None:
    extents, wanted = case
    hosts = data.draw(partitions(len(wanted)))
    shares = shares_of(wanted, extents, hosts=hosts)
    check_shares(wanted, shares, hosts, max_readers=1)
    assert shares_of(wanted, extents, hosts=hosts) == shares


@given(cases(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_where_many_hosts_want_the_same_they_are_divided(case: tuple[Extents, Wanted], ranks_of_host: int) -> None:
    extents, wanted = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_division, "HOSTS_TOGETHER", 2)
        hosts = hosts_of(len(wanted), ranks_of_host)
        check_shares_in_parts(wanted, shares_of(wanted, extents, hosts=hosts))


def check_shares_in_parts(wanted: Wanted, shares: list[ReaderShare]) -> None:
    """A rank that is left over alone reads for itself."""
    wants = [extents_in(runs) for runs in wanted]
    for rank, share in enumerate(shares):
        received = [extent for _, run in share.received for extent in extents_in([run])]
        assert len(received) == len(set(received))
        assert {*received} <= wants[rank]
        assert all(extents_in([run]) <= extents_in(list(shares[reader].reads)) for reader, run in share.relayed)
        assert num_connections(share) <= 2


def read_bytes(wanted: Wanted, shares: list[ReaderShare], extents: Extents) -> list[int]:
    """By each rank, with what it wants alone."""
    return [
        sum(map(extents.num_bytes, runs)) - sum(extents.num_bytes(run) for _, run in (*share.received, *share.relayed))
        for runs, share in zip(wanted, shares, strict=True)
    ]


def test_replicas_read_equal_parts_in_long_runs() -> None:
    extents = Extents([file_of([10] * 100), file_of([10] * 20)])
    wanted = [[ExtentRun(0, 0, 100), ExtentRun(1, 0, 20)] for _ in range(4)]
    shares = shares_of(wanted, extents)
    assert [list(share.reads) for share in shares] == [
        [ExtentRun(0, 0, 30)],
        [ExtentRun(0, 30, 60)],
        [ExtentRun(0, 60, 90)],
        [ExtentRun(0, 90, 100), ExtentRun(1, 0, 20)],
    ]
    assert read_bytes(wanted, shares, extents) == [300] * 4


def test_those_who_have_much_of_their_own_to_read_get_less_of_what_is_shared() -> None:
    extents = Extents([file_of([10] * 100)])
    wanted = [[ExtentRun(0, 0, 60)], [ExtentRun(0, 40, 60), ExtentRun(0, 90, 100)], [ExtentRun(0, 40, 60)]]
    shares = shares_of(wanted, extents)
    assert read_bytes(wanted, shares, extents) == [400, 150, 150]


def test_one_extent_that_all_want_has_one_reader() -> None:
    extents = Extents([file_of([5])])
    shares = shares_of([[ExtentRun(0, 0, 1)]] * 3, extents)
    assert sorted(len(share.reads) for share in shares) == [0, 0, 1]


def test_a_file_without_checksums_is_shared_in_parts() -> None:
    extents = Extents([DataFile("f", (5 << 20) + 7)])
    assert list(extents.bounds(0)) == [*(number << 20 for number in range(6)), (5 << 20) + 7]
    assert Extents([DataFile("f", 0)]).bounds(0)[-1] == 0


def test_the_cost_grows_with_the_runs_and_not_with_pairs_of_ranks() -> None:
    num_ranks = 1024
    extents = Extents([file_of([1] * 4096)])
    wanted = [[ExtentRun(0, 4 * rank, 4 * rank + 4)] for rank in range(num_ranks)]
    assert all(not share.reads and not share.received for share in shares_of(wanted, extents))
    hosts = hosts_of(num_ranks, 8)
    replicas = shares_of([[ExtentRun(0, 0, 4096)]] * num_ranks, extents, hosts=hosts)
    assert max(map(num_connections, replicas)) == MAX_CONNECTIONS
    assert max(sum(map(extents.num_bytes, share.reads)) for share in replicas) <= 4096 // 32


def test_little_that_many_ranks_want_is_common_and_the_rest_is_shared_out() -> None:
    extents = Extents([file_of([100] * 40), file_of([100] * 4)])
    small, large, of_few = ExtentRun(0, 0, 3), ExtentRun(0, 5, 40), ExtentRun(1, 0, 2)
    wanted = [[small, *([of_few] if rank < 2 else [large])] for rank in range(FEW_RANKS + 3)]
    hosts = hosts_of(len(wanted), len(wanted))
    shares = shares_of(wanted, extents, common_bytes=600, hosts=hosts)
    assert all([run for _, run in share.common] == [small] for share in shares)
    assert extents_in([run for share in shares for run in share.reads]) == extents_in([large, of_few])
    check_shares([runs[1:] for runs in wanted], shares, hosts, max_readers=1)


def test_what_few_ranks_want_is_not_common() -> None:
    extents = Extents([file_of([100] * 4)])
    shares = shares_of([[ExtentRun(0, 0, 3)]] * FEW_RANKS, extents, common_bytes=600)
    assert all(not share.common for share in shares)
    check_shares([[ExtentRun(0, 0, 3)]] * FEW_RANKS, shares, max_readers=1)


@given(cases(), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_ranks_that_have_one_list_get_what_those_with_equal_lists_get(case: tuple[Extents, Wanted], times: int) -> None:
    extents, wanted = case
    together = [runs for runs in wanted for _ in range(times)]
    apart = [[*runs] for runs in together]
    hosts = hosts_of(len(together), 5)
    assert shares_of(together, extents, hosts=hosts) == shares_of(apart, extents, hosts=hosts)
    check_shares(together, shares_of(together, extents, hosts=hosts), hosts, max_readers=1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(2, 200))
@settings(max_examples=60, deadline=None)
def test_no_replica_reads_more_than_an_equal_part_and_one_extent(lengths: list[int], num_ranks: int) -> None:
    extents = Extents([file_of(lengths)])
    shares = shares_of([[ExtentRun(0, 0, len(lengths))]] * num_ranks, extents)
    smallest_block = num_ranks // -(-num_ranks // HOSTS_TOGETHER)
    most = -(-sum(lengths) // smallest_block) + max(lengths)
    assert max(sum(map(extents.num_bytes, share.reads)) for share in shares) <= most
    assert all(num_connections(share) <= MAX_CONNECTIONS for share in shares)


class CountedExtents(Extents):
    """Counts looks at runs: the steps that dividing takes."""

    def __init__(self, files: list[DataFile]) -> None:
        super().__init__(files)
        self.num_looks = 0

    def bounds(self, file: int):
        self.num_looks += 1
        return super().bounds(file)


@pytest.mark.parametrize("shards", [1, 8])
def test_dividing_what_replicas_want_takes_steps_in_proportion_to_the_files(shards: int) -> None:
    """A job of twice as many ranks has twice as many files, of which each rank wants twice as many."""
    looks = []
    for num_ranks in (512, 1024, 2048):
        extents = CountedExtents([file_of([1 << 20] * 4)] * num_ranks)
        of_shard = [[ExtentRun(file, 0, 4) for file in range(shard, num_ranks, shards)] for shard in range(shards)]
        division = divide_reading(
            [of_shard[rank % shards] for rank in range(num_ranks)], extents, (), hosts_of(num_ranks, 1)
        )
        looks.append(extents.num_looks)
        assert len({id(group.parts) for group in division.groups}) <= 2 * shards  # parts of two sizes
        assert all(len(group.ranks) <= HOSTS_TOGETHER for group in division.groups)
        assert division.groups_of_rank() == [
            [number for number, group in enumerate(division.groups) if rank in group.ranks] for rank in range(num_ranks)
        ]
    assert looks[2] <= 2.2 * looks[1] <= 2.2 * 2.2 * looks[0]


@st.composite
def held_cases(draw: st.DrawFn) -> tuple[Extents, Wanted, list[set[int]]]:
    """Each file can be read by all, or by some ranks."""
    extents, wanted = draw(cases())
    held: list[set[int]] = [set() for _ in wanted]
    for file in range(3):
        if draw(st.booleans()):
            for rank in draw(st.sets(st.integers(0, len(wanted) - 1), min_size=1)):
                held[rank].add(file)
    return extents, wanted, held


@given(held_cases(), st.sampled_from([0, 20]), st.integers(2, 7))
@settings(max_examples=150, deadline=None)
def test_bytes_that_few_hold_are_read_by_a_holder_and_reach_all_who_want_them(
    case: tuple[Extents, Wanted, list[set[int]]], common_bytes: int, ranks_of_host: int
) -> None:
    extents, wanted, held = case
    hosts = hosts_of(len(wanted), ranks_of_host)
    shares = shares_of(wanted, extents, common_bytes, held, hosts)
    assert shares == shares_of(wanted, extents, common_bytes, held, hosts)
    restricted = set().union(*held)
    common = extents_in([run for _, run in shares[0].common])
    for reader, run in shares[0].common:
        assert run.file in held[reader] or run.file not in restricted
    relays = [extents_in([run for _, run in share.relayed]) for share in shares]
    for rank, share in enumerate(shares):
        own = extents_in(list(share.reads))
        assert {file for file, _ in own} <= held[rank] | {0, 1, 2} - restricted
        received = [extent for _, run in share.received for extent in extents_in([run])]
        assert len(received) == len({*received})
        for taken_from, run in share.received:
            assert extents_in([run]) <= extents_in(list(shares[taken_from].reads)) | relays[taken_from]
            assert rank in shares[taken_from].takers
        for reader, run in share.relayed:
            assert extents_in([run]) <= extents_in(list(shares[reader].reads))
            assert rank in shares[reader].peers
        alone = extents_in(wanted[rank]) - own - {*received} - relays[rank] - common
        assert {file for file, _ in alone} <= held[rank] | {0, 1, 2} - restricted
        assert {*received} <= extents_in(wanted[rank])
    reads = Counter(extent for share in shares for extent in extents_in(list(share.reads)))
    comes = Counter((hosts.of_rank[rank], extent) for rank, of_rank in enumerate(relays) for extent in of_rank)
    assert all(count == 1 for count in (*reads.values(), *comes.values()))


def test_a_lost_hosts_files_are_read_by_the_ranks_that_hold_the_copies_each_by_one() -> None:
    """Ranks 0 to 3 are new; 4 to 7 hold their own files 4 to 7 and the copies of 0 to 3, of which each reads one."""
    extents = Extents([file_of([10] * 10)] * 8)
    wanted = [[ExtentRun(rank, 0, 10)] for rank in range(8)]
    shares = shares_of(wanted, extents, 0, [set() if rank < 4 else {*range(8)} for rank in range(8)])
    assert sorted(len(share.reads) for share in shares[4:]) == [1, 1, 1, 1]
    assert [len(share.relayed) for share in shares] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert all(len(share.peers) == 1 for share in shares[4:])


def test_thousands_of_ranks_that_hold_what_they_want_pass_nothing_on() -> None:
    extents = Extents([file_of([10] * 10)] * 4096)
    wanted = [[ExtentRun(rank, 0, 10)] for rank in range(4096)]
    shares = shares_of(wanted, extents, 0, [range(rank // 8 * 8, rank // 8 * 8 + 8) for rank in range(4096)])
    assert not any(share.reads or share.relayed or share.peers for share in shares)


@pytest.mark.parametrize("ranks_of_host", [1, 2, 4, 8])
@pytest.mark.parametrize("shards", [1, 8, 16])
def test_a_rank_is_connected_to_eight_others_at_most(shards: int, ranks_of_host: int) -> None:
    """DDP and HSDP on any hosts, also where the last one has fewer ranks than the others; all ranks want some more."""
    for num_ranks in (256, 250):
        extents = Extents([file_of([1 << 20] * 4)] * num_ranks)
        of_shard = [[ExtentRun(file, 0, 3) for file in range(shard, num_ranks, shards)] for shard in range(shards)]
        wanted = [sorted([*of_shard[rank % shards], ExtentRun(0, 3, 4)]) for rank in range(num_ranks)]
        shares = assign_readers(wanted, extents, (), hosts_of(num_ranks, ranks_of_host))
        assert max(map(num_connections, shares)) <= MAX_CONNECTIONS


def test_two_hosts_of_four_replicas_send_one_another_half_of_the_state() -> None:
    extents = Extents([file_of([10] * 80)])
    shares = shares_of([[ExtentRun(0, 0, 80)]] * 8, extents, hosts=hosts_of(8, 4))
    crossing = [sum(extents.num_bytes(run) for _, run in share.relayed) for share in shares]
    assert sum(crossing) == 800
    assert crossing == [100] * 8
    assert [list(share.peers) for share in shares] == [[4], [5], [6], [7], [0], [1], [2], [3]]


def test_replicas_on_hosts_far_apart_share_reading() -> None:
    """HSDP of two replicas: each shard is on two hosts, half of all hosts apart."""
    num_ranks, half = 128, 64
    extents = Extents([file_of([1 << 20] * 4)] * half)
    shares = shares_of(
        [[ExtentRun(rank % half, 0, 4)] for rank in range(num_ranks)], extents, hosts=hosts_of(num_ranks, 8)
    )
    assert {sum(map(extents.num_bytes, share.reads)) for share in shares} == {2 << 20}
    assert {num_connections(share) for share in shares} == {2}
