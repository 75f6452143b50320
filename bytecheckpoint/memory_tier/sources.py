"""The tiers that the data files of a resume were read from, counted as the whole job used them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from bytecheckpoint.planner.memory_tier.resume_plan import FileHolder, VersionPlan

SOURCES = ("memory", "peer", "parity", "local", "storage")


class Use(msgspec.Struct, frozen=True, array_like=True):
    """The data files that one rank wanted."""

    host: str
    wanted: list[str]


def count_sources(
    version: VersionPlan, rebuilt: Collection[str], payloads: Sequence[bytes], *, is_stored_only: bool
) -> Sequence[bytes]:
    """Returns the answer to every rank: the number of files by tier, each file that any rank wanted counted once; with
    `is_stored_only`, where only the path has files of the version, all of its files. `rebuilt` names those that were
    rebuilt from parity. A payload is the encoded Use of a rank.
    """
    uses = [msgspec.msgpack.decode(payload, type=Use) for payload in payloads]
    wanted: dict[str, set[str]] = {}
    for use in uses:
        for name in use.wanted:
            wanted.setdefault(name, set()).add(use.host)
    if is_stored_only:
        wanted = {name: set() for name in version.files}
    counts = dict.fromkeys(SOURCES, 0)
    for name, hosts in wanted.items():
        if name in version.files:
            counts["parity" if name in rebuilt else _source_of(version.files[name], hosts)] += 1
    return [msgspec.msgpack.encode(counts)] * len(payloads)


def _source_of(holders: Sequence[FileHolder], hosts: set[str]) -> str:
    """Returns the tier that a file was read from, for ranks on these hosts."""
    cheapest = holders[0]
    if cheapest.kind in {"memory", "peer"}:
        is_own = any(holder.kind in {"memory", "peer"} and holder.host in hosts for holder in holders)
        return "memory" if is_own else "peer"
    return cheapest.kind
