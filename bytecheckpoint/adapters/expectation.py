"""The records between an entry of the state and a save or load: its contents, its expectation, and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from bytecheckpoint.adapters.shards import LocalShard

Scope = Literal["shared", "whole", "either", "rank", "streams"]
"""Plain data is the same on all ranks for keys that they share, or for all keys; it may differ; is one rank's; or is a
part of a data loader's state, which other parts complete."""


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
    """FQN -> stage of a pipeline, where a stage says which it is."""


class Problem(NamedTuple):
    """A reason why a state and a checkpoint do not fit."""

    kind: str
    fqn: str
    text: str


class Expectation(NamedTuple):
    """Targets that an entry of the state has for a checkpoint."""

    shards: list[LocalShard]
    claims: set[str]
    """State FQNs that the entry can fill, besides the FQNs of its shards."""
    problems: list[Problem]
    copies: Sequence[LocalShard] = ()
    """Shards in lower precision of tensors that it loads in full as well: converted whatever `cast` says."""
    padding: Sequence[LocalShard] = ()
    """Memory that lies beyond what the checkpoint has of its tensors: zeroed with a load of these."""


class RankMissing(NamedTuple):
    """Stands for a value that differed between the ranks of the save, none of which has this rank's number."""

    num_saved: int


def not_stored(fqn: str) -> Problem:
    return Problem("missing_key", fqn, f"{fqn}: not in the checkpoint")


def rank_missing(fqn: str, num_saved: int) -> Problem:
    return Problem(
        "missing_key",
        fqn,
        f"{fqn}: differed between the {num_saved} ranks that saved it, and none of them had this rank's number; read "
        "all values with bcp.open(path).rank_values(fqn) and share them out, or keep the state's own with "
        'RankLocal(value, missing="keep")',
    )
