"""Which names of tied tensors are aliases for all ranks, and where ranks contradict one another about that. It knows no
memory: what is tied on a rank is what that rank says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bytecheckpoint.planner.holders import disagreement
from bytecheckpoint.planner.offers import AlikeRanks

Aliases = Mapping[str, str]
"""What one rank says: alias FQN -> FQN under which it offers the tensor."""


def agree_on_aliases(alike: Sequence[AlikeRanks], aliases: Sequence[Aliases], names: Sequence[int]) -> dict[str, str]:
    """An FQN is an alias unless some rank holds it with memory of its own (as pipeline stages hold tied weights).

    Raises CheckpointMismatchError (conflict) where ranks tie a name to tensors that no rank ties to one another, or
    where what it is tied to on one rank has another dtype or shape than what another one holds under the name.
    """
    first_ranks: dict[tuple[tuple[str, str], ...], int] = {}
    for rank, of_rank in enumerate(aliases):
        first_ranks.setdefault(tuple(of_rank.items()), rank)
    said = {rank: dict(items) for items, rank in first_ranks.items() if items}
    if not said:
        return {}
    merged = {alias: fqn for of_rank in said.values() for alias, fqn in of_rank.items()}
    real = _real(alike, merged)
    _refuse_contradictions(said, _described(alike, {*merged, *merged.values()}), real, names)
    return {alias: fqn for alias, fqn in merged.items() if alias not in real}


def _real(alike: Sequence[AlikeRanks], fqns: Collection[str]) -> set[str]:
    """Those of which some rank holds elements."""
    return {
        fqn
        for of_ranks in alike
        for offer, fqn in enumerate(of_ranks.fqns)
        if fqn in fqns and of_ranks.boxes(offer)[:, 1].all(axis=1).any()
    }


def _described(alike: Sequence[AlikeRanks], fqns: Collection[str]) -> dict[str, tuple[str, int]]:
    """Of these tensors: dtype and shape, as people write them, and the first rank that offers it."""
    found: dict[str, tuple[str, int]] = {}
    for of_ranks in alike:
        for fqn, dtype, shape in zip(of_ranks.fqns, of_ranks.dtypes, of_ranks.shapes, strict=True):
            if fqn in fqns:
                found.setdefault(fqn, (f"{dtype}{list(shape)}", int(of_ranks.ranks[0])))
    return found


def _refuse_contradictions(
    said: Mapping[int, Aliases], described: Mapping[str, tuple[str, int]], real: Collection[str], names: Sequence[int]
) -> None:
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    first_said: dict[str, tuple[int, str]] = {}
    for rank, of_rank in said.items():
        for alias, fqn in of_rank.items():
            other_rank, other = first_said.setdefault(alias, (rank, fqn))
            what, holder = described.get(alias, ("", rank)) if alias in real else ("", rank)
            tied_to = described[fqn][0] if fqn in described else ""
            if what and tied_to and what != tied_to:
                text = f"{alias}: {what} on rank {names[holder]}, tied to {fqn}, {tied_to}, on rank {names[rank]}"
                conflicts[alias] = text, (names[holder], names[rank])
            elif other != fqn and not any(_are_tied(each, other, fqn) for each in said.values()):
                text = f"{alias}: tied to {other} on rank {names[other_rank]}, to {fqn} on rank {names[rank]}"
                conflicts[alias] = text, (names[other_rank], names[rank])
    if conflicts:
        raise disagreement(conflicts)


def _are_tied(of_rank: Aliases, first: str, second: str) -> bool:
    return of_rank.get(first, first) == of_rank.get(second, second)
