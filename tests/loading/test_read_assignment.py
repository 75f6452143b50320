"""The messages by which the coordinator tells each rank what it reads: what a rank makes of its answer is its share."""

from __future__ import annotations

import msgspec
from read_shares import assign_readers

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.loading.between_ranks.assignment import LocalReadPlan, assign, decode_assignment
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents
from bytecheckpoint.planner.read_division import Hosts

NUM_RANKS, SHARDS, RANKS_OF_HOST = 256, 8, 4


def address_of(rank: int) -> Address:
    return Address([f"host-{rank}"], 4000 + rank, bytes(32))


def replicated(num_ranks: int) -> tuple[Extents, list[list[ExtentRun]]]:
    """Each of 8 shards is replicated; all ranks want the end of the first file."""
    files = [DataFile(str(rank), 8 << 20, [1 << 20] * 8) for rank in range(num_ranks)]
    wanted = [[ExtentRun(file, 0, 4) for file in range(rank % SHARDS, num_ranks, SHARDS)] for rank in range(num_ranks)]
    return Extents(files), [sorted([*runs, ExtentRun(0, 5, 8)]) for runs in wanted]


def encoded(runs: list[ExtentRun]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(runs))


def answers_of(extents: Extents, wanted: list[list[ExtentRun]]) -> list[bytes]:
    plans = [
        LocalReadPlan(address_of(rank), encoded(runs), 8 << 20, 60.0 + rank, [], rank - rank % RANKS_OF_HOST)
        for rank, runs in enumerate(wanted)
    ]
    return assign([msgspec.msgpack.encode(plan) for plan in plans], extents)


def test_each_rank_decodes_its_own_share_and_the_addresses_of_its_readers() -> None:
    extents, wanted = replicated(NUM_RANKS)
    answers = answers_of(extents, wanted)
    hosts = Hosts([[*range(first, first + RANKS_OF_HOST)] for first in range(0, NUM_RANKS, RANKS_OF_HOST)])
    for rank, share in enumerate(assign_readers(wanted, extents, (), hosts)):
        assigned = decode_assignment(answers[rank], rank)
        assert assigned.share == share
        assert assigned.addresses == {reader: address_of(reader) for reader, _ in share.relayed}
        assert (assigned.unit_bytes, assigned.heartbeat_s) == (8 << 20, 15.0)


def test_ranks_of_the_same_groups_get_one_answer_however_many_they_are() -> None:
    extents, wanted = replicated(NUM_RANKS)
    answers = answers_of(extents, wanted)
    assert len({id(answer) for answer in answers}) <= SHARDS * (NUM_RANKS // RANKS_OF_HOST)
    alone = answers_of(extents, [[ExtentRun(rank, 0, 8)] for rank in range(NUM_RANKS)])
    assert len({id(answer) for answer in alone}) == 1


def test_ranks_that_share_no_memory_are_hosts_of_their_own() -> None:
    extents = Extents([DataFile("f", 80 << 20, [1 << 20] * 80)])
    hosts = [0, 0, -1, -1]
    runs = encoded([ExtentRun(0, 0, 80)])
    plans = [LocalReadPlan(address_of(rank), runs, 1, 60.0, [], host) for rank, host in enumerate(hosts)]
    answers = assign([msgspec.msgpack.encode(plan) for plan in plans], extents)
    shares = [decode_assignment(answer, rank).share for rank, answer in enumerate(answers)]
    assert [list(share.takers) for share in shares] == [[1], [], [], []]
    assert [list(share.peers) for share in shares] == [[2, 3], [], [0, 3], [0, 2]]
    assert [{reader for reader, _ in share.relayed} for share in shares] == [{2, 3}, set(), {0, 3}, {0, 2}]
    assert [{rank for rank, _ in share.received} for share in shares] == [set(), {0}, set(), set()]
