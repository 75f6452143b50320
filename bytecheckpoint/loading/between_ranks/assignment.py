"""Messages in which ranks tell the coordinator which extents they want, and it assigns a reader rank to each extent.
Knows no sockets and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare
from bytecheckpoint.planner.read_division import Hosts, ReadGroup, divide_reading, share_of

_HEARTBEATS_IN_TIMEOUT = 4
_MAX_HEARTBEAT_S = 30.0


class LocalReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank to the coordinator."""

    address: Address
    runs: msgspec.Raw
    """The extents that it wants, as an encoded list of ExtentRun: equal ones are decoded once."""
    unit_bytes: int
    """Longest unit that the rank takes. The smallest number of any rank counts."""
    timeout_s: float
    held: list[int] = []
    """The files that it can read and not all ranks can."""
    host: int = -1
    """Number of the host: equal for ranks that share memory; -1 for a rank that shares none."""


class _Reply(NamedTuple):
    """The coordinator's answer to all ranks that are in the same groups."""

    groups: list[ReadGroup]
    common: list[tuple[int, ExtentRun]]
    hosts: list[list[int]]
    """The ranks of each host of the groups."""
    addresses: dict[int, Address]
    """Addresses of all reader ranks in the groups, if the groups are on several hosts."""
    unit_bytes: int
    heartbeat_s: float


class ReadAssignment(NamedTuple):
    """The part of one rank in the load, as the coordinator has assigned it."""

    share: ReaderShare
    addresses: dict[int, Address]
    """Addresses of the reader ranks on other hosts from which it receives."""
    unit_bytes: int
    """Longest unit, the same for all ranks."""
    heartbeat_s: float
    """Time between heartbeats: a fraction of the shortest timeout of any rank."""


def assign(payloads: Sequence[bytes], extents: Extents) -> list[bytes]:
    """Returns the encoded reply to each rank's local plan. Equal plans and replies are decoded and encoded once."""
    plans = [msgspec.msgpack.decode(content, type=LocalReadPlan) for content in payloads]
    distinct = {bytes(plan.runs) for plan in plans}
    runs = {encoded: msgspec.msgpack.decode(encoded, type=list[ExtentRun]) for encoded in distinct}
    hosts = _hosts_of(plans)
    division = divide_reading([runs[bytes(plan.runs)] for plan in plans], extents, [plan.held for plan in plans], hosts)
    unit_bytes, timeout_s = min(plan.unit_bytes for plan in plans), min(plan.timeout_s for plan in plans)
    heartbeat_s = min(timeout_s / _HEARTBEATS_IN_TIMEOUT, _MAX_HEARTBEAT_S)
    parts: dict[int, msgspec.Raw] = {}
    replies: dict[tuple[int, ...], bytes] = {}
    numbers_of_rank = [*map(tuple, division.groups_of_rank())]
    for numbers in numbers_of_rank:
        if numbers in replies:
            continue
        groups = [division.groups[number] for number in numbers]
        for group in groups:
            if id(group.parts) not in parts:
                parts[id(group.parts)] = msgspec.Raw(msgspec.msgpack.encode(group.parts))
        host_numbers = sorted({hosts.of_rank[rank] for group in groups for rank in group.ranks})
        readers = {rank for group in groups for rank, part in zip(group.ranks, group.parts, strict=True) if part}
        addresses = {rank: plans[rank].address for rank in sorted(readers)} if len(host_numbers) > 1 else {}
        encoded = [(group.ranks, parts[id(group.parts)]) for group in groups]
        host_ranks = [hosts.ranks[number] for number in host_numbers]
        reply = (encoded, division.common, host_ranks, addresses, unit_bytes, heartbeat_s)
        replies[numbers] = msgspec.msgpack.encode(reply)
    return [replies[numbers] for numbers in numbers_of_rank]


def _hosts_of(plans: Sequence[LocalReadPlan]) -> Hosts:
    by_host: dict[int, list[int]] = {}
    for rank, plan in enumerate(plans):
        by_host.setdefault(~rank if plan.host < 0 else plan.host, []).append(rank)
    return Hosts([*by_host.values()])


def decode_assignment(reply: bytes, rank: int) -> ReadAssignment:
    """Returns what the coordinator has assigned to a rank."""
    groups, common, hosts, addresses, unit_bytes, heartbeat_s = msgspec.msgpack.decode(reply, type=_Reply)
    share = share_of(rank, groups, common, Hosts(hosts))
    of_readers = {reader: addresses[reader] for reader, _ in share.relayed}
    return ReadAssignment(share, of_readers, unit_bytes, heartbeat_s)
