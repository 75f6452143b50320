"""The plain data of all ranks made one: what is the same is stored once, dicts are united, and what differs is either
meant to differ (and stored for each rank) or an error that says how to declare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytecheckpoint.adapters.data.merge_streams import StreamProblem, conflict_of_streams, merge_streams
from bytecheckpoint.adapters.expectation import Scope
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn

_NUM_SHOWN = 10


class _Conflict(NamedTuple):
    """A value that differs between two ranks."""

    fqn: str
    values: tuple[Any, Any]
    ranks: tuple[int, int]
    """Their numbers in the `plain` of `merge_plain`."""


def merge_plain(
    plain: Sequence[Mapping[str, tuple[Scope, bytes]]], global_ranks: Sequence[int]
) -> tuple[dict[str, bytes], dict[str, dict[int, bytes]]]:
    """Returns the values that are stored once, with dicts of ranks united, and the values that are stored for each rank
    by its number in `plain`, both by FQN. An FQN may be on some ranks only. `plain[r]` comes from rank r, whose global
    number is `global_ranks[r]`.

    A value that any rank wraps in RankLocal is one of each rank. Raises one CheckpointMismatchError (conflict) for all
    FQNs whose values differ and must not; if there are none, one for all data loaders whose parts do not fit together.
    """
    shared: dict[str, bytes] = {}
    by_rank: dict[str, dict[int, bytes]] = {}
    conflicts: list[_Conflict] = []
    stream_problems: list[StreamProblem] = []
    for fqn in dict.fromkeys(fqn for of_rank in plain for fqn in of_rank):
        scopes = {rank: of_rank[fqn][0] for rank, of_rank in enumerate(plain) if fqn in of_rank}
        values = {rank: plain[rank][fqn][1] for rank in scopes}
        if "streams" in scopes.values():
            shared[fqn], problems = merge_streams(
                fqn, {global_ranks[rank]: (scopes[rank], values[rank]) for rank in scopes}
            )
            stream_problems += problems
            continue
        scope = "rank" if "rank" in scopes.values() else next(iter(scopes.values()))
        is_same = len(set(values.values())) == 1
        if scope == "rank" or (scope == "either" and not is_same):
            by_rank[fqn] = values
        elif is_same:
            shared[fqn] = next(iter(values.values()))
        else:
            trees = {rank: decode_plain(data) for rank, data in values.items()}
            shared[fqn] = encode_plain(_unite(trees, fqn, conflicts, is_whole=scope == "whole"), fqn)
    if conflicts:
        raise _conflict_error(conflicts, global_ranks)
    if stream_problems:
        raise conflict_of_streams(stream_problems)
    return shared, by_rank


def _conflict_error(conflicts: Sequence[_Conflict], global_ranks: Sequence[int]) -> CheckpointMismatchError:
    lines = [
        f"{fqn}: {a!r:.60} on rank {global_ranks[first]}, {b!r:.60} on rank {global_ranks[second]}"
        for fqn, (a, b), (first, second) in conflicts
    ]
    return CheckpointMismatchError(
        f"{len(conflicts)} values of plain data differ between ranks; nothing was written. Wrap what is meant to "
        "differ in bcp.RankLocal(value), or give every rank the same:\n  " + and_more(lines, _NUM_SHOWN, "\n  "),
        kind="conflict",
        ranks=tuple(sorted({global_ranks[rank] for conflict in conflicts for rank in conflict.ranks})),
    )


def refuse_tensors(
    plain: Sequence[Mapping[str, tuple[Scope, bytes]]], writers: Mapping[str, int], global_ranks: Sequence[int]
) -> None:
    """Raises CheckpointMismatchError (conflict) where a rank has plain data under the FQN of another rank's tensor: a
    load would find the tensor alone. `writers` has, by FQN, the number in `plain` of a rank that holds the tensor;
    `plain` and `global_ranks` are as in `merge_plain`.
    """
    lines: list[str] = []
    ranks: set[int] = set()
    for rank, of_rank in enumerate(plain):
        for fqn in of_rank.keys() & writers.keys():
            scope, data = of_rank[fqn]
            value = leaves(decode_plain(data), fqn).get(fqn, TensorRef(fqn))
            if scope == "rank" or not isinstance(value, TensorRef):
                holders = global_ranks[writers[fqn]], global_ranks[rank]
                other = "a RankLocal" if isinstance(value, TensorRef) else f"{value!r:.60}"
                lines.append(f"{fqn}: a tensor on rank {holders[0]}, {other} on rank {holders[1]}")
                ranks.update(holders)
    if lines:
        raise CheckpointMismatchError(
            f"{len(lines)} values are tensors on some ranks and plain data on others; nothing was written. Give every "
            "rank the same, or wrap what is meant to differ in bcp.RankLocal(value) on every rank:\n  "
            + and_more(sorted(lines), _NUM_SHOWN, "\n  "),
            kind="conflict",
            ranks=tuple(sorted(ranks)),
        )


def _unite(values: Mapping[int, Any], fqn: str, conflicts: list[_Conflict], *, is_whole: bool) -> Any:
    """Returns the values of ranks made one: dicts united by key (if `is_whole`, only those with the same keys), else
    the first value. Appends to `conflicts` where another differs from it.
    """
    (first, value), *others = values.items()
    kind: Any = type(value)
    are_dicts = kind in (dict, OrderedDict) and all(type(other) is kind for _, other in others)
    if are_dicts and not (is_whole and any(other.keys() != value.keys() for _, other in others)):
        keys = dict.fromkeys(key for of_rank in values.values() for key in of_rank)
        return kind(
            {
                key: _unite(
                    {rank: of_rank[key] for rank, of_rank in values.items() if key in of_rank},
                    join_fqn(fqn, key),
                    conflicts,
                    is_whole=is_whole,
                )
                for key in keys
            }
        )
    encoded = encode_plain(value, fqn) if others else b""
    odd = next(((rank, other) for rank, other in others if encode_plain(other, fqn) != encoded), None)
    if odd is not None:
        conflicts.append(_Conflict(fqn, (value, odd[1]), (first, odd[0])))
    return value
