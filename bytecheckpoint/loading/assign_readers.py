"""Agreement of the ranks of a load on the readers of what several of them want. It reads nothing and makes no
connection.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import Address
from bytecheckpoint.planner.exchange_plan import Extents, Run, Share, max_common_bytes, share_out

_BEATS_IN_TIMEOUT = 4
_MAX_BEAT_S = 30.0


class LocalPlan(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of the agreement."""

    address: Address
    runs: list[Run]
    """The extents that it wants."""
    unit_bytes: int
    timeout_s: float


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to a rank."""

    share: Share
    addresses: dict[int, Address]
    """Of the readers of what it receives, by rank."""
    unit_bytes: int
    beat_s: float
    """How often a reader tells its takers that it makes progress: several times within what any of them waits."""


def agree_on_reads(ranks: Ranks, plan: LocalPlan, extents: Extents) -> Assignment:
    """This rank's assignment. Must be called by all ranks."""
    payloads = ranks.gather(msgspec.msgpack.encode(plan))
    return msgspec.msgpack.decode(ranks.scatter(assign(payloads, extents)), type=Assignment)


def assign(payloads: Sequence[bytes], extents: Extents) -> list[bytes]:
    """The encoded assignment of each rank, made of the encoded local plans of all."""
    plans = [msgspec.msgpack.decode(content, type=LocalPlan) for content in payloads]
    shares = share_out([plan.runs for plan in plans], extents, common_bytes=max_common_bytes(len(plans)))
    unit_bytes = min((plan.unit_bytes for plan in plans), default=0)
    beat_s = min((plan.timeout_s / _BEATS_IN_TIMEOUT for plan in plans), default=0.0)
    return [
        msgspec.msgpack.encode(
            Assignment(
                share,
                {reader: plans[reader].address for reader, _ in share.received},
                unit_bytes,
                min(beat_s, _MAX_BEAT_S),
            )
        )
        for share in shares
    ]
