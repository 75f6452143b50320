"""The records between an entry of the state and a save or load: its contents, its expectation, and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from bytecheckpoint.adapters.shards import LocalShard

Scope = Literal["shared", "whole", "either", "rank", "streams"]
"""How ranks that have the plain data must agree on it. shared: a key that several have has one value. whole: all have
the same keys and values. either: it may differ. rank: each has its own. streams: part of a data loader's state."""


class EntryContents(NamedTuple):
    """Contents of an entry that a save writes."""

    shards: Sequence[LocalShard]
    names: AbstractSet[str]
    """The FQNs of its tensors and leaves of plain data, aliases included."""
    plain: Mapping[str, tuple[Scope, bytes]] = {}
    """Encoded trees of plain data by FQN, each with its scope: how ranks have to agree on it."""
    aliases: Mapping[str, str] = {}
    """FQN of a tied tensor -> the FQN of the shard that stands for both."""
    stages: Mapping[str, int] = {}
    """FQN -> number of its pipeline stage, where it is known."""


class Problem(NamedTuple):
    """A reason why a state and a checkpoint do not fit."""

    kind: str
    fqn: str
    text: str


class Expectation(NamedTuple):
    """Targets that an entry of the state has for a checkpoint."""

    shards: list[LocalShard]
    claims: set[str]
    """State FQNs, without those of `shards`, that the entry has a place for, even if a problem keeps it unfilled."""
    problems: list[Problem]
    copies: Sequence[LocalShard] = ()
    """Shards in lower precision of tensors that are also loaded in full precision: converted whatever `cast` says."""
    padding: Sequence[LocalShard] = ()
    """Memory of padding, which the checkpoint has no elements for: zeroed when the shards are loaded."""
    skipped: AbstractSet[str] = frozenset()
    """The claims that are not filled: include or exclude leave out what they belong to, or a part of the same value."""


class RankMissing(NamedTuple):
    """Stands for a value that differed between the ranks that saved it, none of which had this rank's number."""

    num_saved: int
    """Number of ranks that saved a value."""


def not_stored(fqn: str) -> Problem:
    return Problem("missing_key", fqn, f"{fqn}: not in the checkpoint")


def rank_missing(fqn: str, num_saved: int) -> Problem:
    return Problem(
        "missing_key",
        fqn,
        f"{fqn}: differed between the {num_saved} ranks that saved it, and none of them had this rank's number; read "
        "all values with bcp.open(path).rank_values(fqn) and distribute them, or keep the state's own with "
        'RankLocal(value, missing="keep")',
    )
