"""The plain data of all ranks made one: what is the same is stored once, dicts are united, and what differs is either
meant to (and kept for each rank) or an error that says how to mean it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.adapters.plain_data import decode_plain, encode_plain, join_fqn
from bytecheckpoint.adapters.stored import Scope
from bytecheckpoint.errors import CheckpointMismatchError


def merge_plain(
    plain: Sequence[Mapping[str, tuple[Scope, bytes]]],
) -> tuple[dict[str, bytes], dict[str, dict[int, bytes]]]:
    """What is common to all ranks, and what is kept for each, by FQN; `plain[r]` comes from rank r.

    Raises CheckpointMismatchError (conflict) with all FQNs whose values differ without being allowed to.
    """
    shared: dict[str, bytes] = {}
    by_rank: dict[str, dict[int, bytes]] = {}
    conflicts: list[str] = []
    for fqn in dict.fromkeys(fqn for of_rank in plain for fqn in of_rank):
        values = {rank: of_rank[fqn][1] for rank, of_rank in enumerate(plain) if fqn in of_rank}
        scope = next(of_rank[fqn][0] for of_rank in plain if fqn in of_rank)
        is_same = len(set(values.values())) == 1
        if scope == "rank" or (scope == "either" and not is_same):
            by_rank[fqn] = values
        elif is_same:
            shared[fqn] = next(iter(values.values()))
        else:
            shared[fqn] = _united(fqn, values, conflicts)
    if conflicts:
        raise CheckpointMismatchError(
            f"{len(conflicts)} values of plain data differ between ranks; nothing was written. Wrap what is meant to "
            "differ in bcp.RankLocal(value), or give every rank the same:\n  " + "\n  ".join(conflicts[:10]),
            kind="conflict",
        )
    return shared, by_rank


def _united(fqn: str, values: Mapping[int, bytes], conflicts: list[str]) -> bytes:
    trees = [(rank, decode_plain(data)) for rank, data in values.items()]
    first_rank, tree = trees[0]
    for rank, other in trees[1:]:
        tree = _unite(tree, other, fqn, (first_rank, rank), conflicts)
    return _encoded(tree, fqn)


def _unite(a: Any, b: Any, fqn: str, ranks: tuple[int, int], conflicts: list[str]) -> Any:
    if type(a) is dict and type(b) is dict:
        united = dict(a)
        for key, value in b.items():
            united[key] = _unite(a[key], value, join_fqn(fqn, key), ranks, conflicts) if key in a else value
        return united
    if _encoded(a, fqn) != _encoded(b, fqn):
        conflicts.append(f"{fqn}: {_shown(a)} on rank {ranks[0]}, {_shown(b)} on rank {ranks[1]}")
    return a


def _encoded(tree: Any, fqn: str) -> bytes:
    return encode_plain(tree, fqn, lambda _, tensor: tensor)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
