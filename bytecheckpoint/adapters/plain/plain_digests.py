"""Digests in the place of plain data that ranks have in common: the coordinator finds most values in
its own state, others in the previous save, and one rank has to send what is in neither. It knows no message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import xxhash

from bytecheckpoint.adapters.expectation import Scope

PlainData = Mapping[str, tuple[Scope, bytes]]
"""Scope and encoded value by FQN."""

_SHORT_BYTES = 32
"""Values up to this length stay as they are."""
_COMMON: Collection[Scope] = {"shared", "whole"}
"""Scopes of values that ranks have in common."""


class Restored(NamedTuple):
    """The data of all ranks with values in place of digests."""

    plain: list[PlainData] | None
    """By rank; None if a digest is not known."""
    values: dict[bytes, bytes]
    """Values by digest, for the next save."""
    asked: list[list[str]]
    """FQNs whose values each rank has to send, so that every digest is known: each value is asked of one rank."""


def digested(
    plain: PlainData, sent_whole: Mapping[str, bytes] | None = None
) -> tuple[dict[str, tuple[Scope, bytes]], list[str]]:
    """Returns the data with digests instead of long values that ranks have in common, and the FQNs of such values.

    Values at the FQNs of `sent_whole` are replaced only if they still have the digest that is there.
    """
    digests = digests_of(plain)
    for fqn, before in (sent_whole or {}).items():
        if digests.get(fqn) != before:
            digests.pop(fqn, None)
    return {**plain, **{fqn: (plain[fqn][0], digest) for fqn, digest in digests.items()}}, list(digests)


def digests_of(plain: PlainData) -> dict[str, bytes]:
    """Returns the digests, by FQN, of long values that ranks have in common by their scope."""
    return {
        fqn: xxhash.xxh3_128_digest(value)
        for fqn, (scope, value) in plain.items()
        if scope in _COMMON and len(value) > _SHORT_BYTES
    }


def restored(sent: Sequence[tuple[PlainData, Collection[str]]], known: Mapping[bytes, bytes]) -> Restored:
    """Puts values in place of the digests of `digested`. `sent` has data and digested FQNs of each rank, `known` the
    last save's values by digest. If one is not known, restores nothing, and asks for all such.
    """
    values = {
        xxhash.xxh3_128_digest(value): value
        for plain, fqns in sent
        for fqn, (scope, value) in plain.items()
        if scope in _COMMON and fqn not in fqns and len(value) > _SHORT_BYTES
    }
    asked: list[list[str]] = [[] for _ in sent]
    unknown: set[bytes] = set()
    for (plain, fqns), of_rank in zip(sent, asked, strict=True):
        for fqn in fqns:
            digest = plain[fqn][1]
            if digest in known:
                values[digest] = known[digest]
            elif digest not in values and digest not in unknown:
                unknown.add(digest)
                of_rank.append(fqn)
    if unknown:
        return Restored(None, dict(known), asked)
    whole: list[PlainData] = [
        {**plain, **{fqn: (plain[fqn][0], values[plain[fqn][1]]) for fqn in fqns}} if fqns else plain
        for plain, fqns in sent
    ]
    return Restored(whole, values, asked)
