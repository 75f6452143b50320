"""Digests in the place of plain data that ranks have in common: the coordinator finds most values in
its own state, the others in the previous save. It knows no rank and no message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import xxhash

from bytecheckpoint.adapters.expectation import Scope

PlainData = Mapping[str, tuple[Scope, bytes]]
"""Scope and encoded value by FQN."""

_SHORT_BYTES = 32
"""Values up to this length stay as they are."""
_COMMON: Collection[Scope] = {"shared", "whole"}
"""Scopes of values that ranks have in common."""


def digested(plain: PlainData) -> tuple[dict[str, tuple[Scope, bytes]], list[str]]:
    """Returns the data with digests instead of long values that ranks have in common, and the FQNs of such values."""
    fqns = [fqn for fqn, (scope, value) in plain.items() if scope in _COMMON and len(value) > _SHORT_BYTES]
    changed = {fqn: (plain[fqn][0], xxhash.xxh3_128_digest(plain[fqn][1])) for fqn in fqns}
    return {**plain, **changed}, fqns


def restored(
    sent: Sequence[tuple[PlainData, Collection[str]]], known: Mapping[bytes, bytes]
) -> tuple[list[PlainData] | None, dict[bytes, bytes]]:
    """Returns the data of each rank with values in place of digests, or None if a digest is not known, and the values
    by digest for the next save. `sent` has the data and the digested FQNs of each rank.
    """
    values = {
        xxhash.xxh3_128_digest(value): value
        for plain, fqns in sent
        for fqn, (scope, value) in plain.items()
        if scope in _COMMON and fqn not in fqns and len(value) > _SHORT_BYTES
    }
    for plain, fqns in sent:
        values.update((digest, known[digest]) for digest in (plain[fqn][1] for fqn in fqns) if digest in known)
        if any(plain[fqn][1] not in values for fqn in fqns):
            return None, dict(known)
    return [
        {**plain, **{fqn: (plain[fqn][0], values[plain[fqn][1]]) for fqn in fqns}} if fqns else plain
        for plain, fqns in sent
    ], values
