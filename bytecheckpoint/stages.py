"""Stages of a pipeline that use one FQN: right where it is one tensor that both hold, and an error where each has its
own, of which all but one would be lost. Known of stages that say which ones they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.adapters.tensors import LocalShard
from bytecheckpoint.digests import digest_of
from bytecheckpoint.errors import CheckpointMismatchError

_NUM_SHOWN = 10

_Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""
PartDigests = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]
"""By FQN: offsets, lengths and digest of each part that a rank holds."""


class InStages(NamedTuple):
    """What one rank tells of its stages."""

    stages: Mapping[str, int]
    """By FQN."""
    digests: PartDigests


def in_several_stages(stages: Iterable[Mapping[str, int]]) -> list[str]:
    """The FQNs, sorted, that ranks have in different stages; `stages` are those of each rank, by FQN."""
    first: dict[str, int] = {}
    found: set[str] = set()
    for of_rank in stages:
        for fqn, stage in of_rank.items():
            if first.setdefault(fqn, stage) != stage:
                found.add(fqn)
    return sorted(found)


def digests_of(shards: Sequence[LocalShard], fqns: Iterable[str], aliases: Mapping[str, str]) -> PartDigests:
    """Of the parts of these tensors that this rank holds, however large; a tied one has those of its alias."""
    names: dict[str, list[str]] = {}
    for fqn in fqns:
        names.setdefault(aliases.get(fqn, fqn), []).append(fqn)
    digests = PartDigests()
    for shard in shards:
        if shard.fqn in names:
            part = (*shard.region, digest_of(shard.tensor))
            for fqn in names[shard.fqn]:
                digests.setdefault(fqn, []).append(part)
    return digests


def check_stages(fqns: Iterable[str], ranks: Sequence[InStages], names: Sequence[int]) -> None:
    """Raises one CheckpointMismatchError (conflict) for all of these FQNs that are different tensors in the stages that
    have them; `names` are the global numbers of the ranks.
    """
    lines: list[str] = []
    guilty: set[int] = set()
    for fqn in fqns:
        parts: dict[int, dict[_Part, set[int]]] = {}
        holders: dict[int, int] = {}
        for rank, (stages, digests) in enumerate(ranks):
            if fqn not in stages:
                continue
            holders.setdefault(stages[fqn], names[rank])
            of_stage = parts.setdefault(stages[fqn], {})
            for offsets, lengths, digest in digests.get(fqn, []):
                of_stage.setdefault((offsets, lengths), set()).add(digest)
        (first, expected), *others = parts.items()
        odd = next((stage for stage, found in others if found != expected), None)
        if odd is not None:
            is_laid_out_alike = parts[odd].keys() == expected.keys()
            how = "" if is_laid_out_alike else ", which hold different parts of it: tied tensors need the same layout"
            where = f"in stage {first} on rank {holders[first]}, in stage {odd} on rank {holders[odd]}"
            lines.append(f"{fqn}: {where}{how}")
            guilty.update((holders[first], holders[odd]))
    if lines:
        more = [f"and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else []
        raise CheckpointMismatchError(
            f"stages of a pipeline use {len(lines)} names for different tensors; nothing was written. Give their "
            "layers the names that they have in the whole model:\n  " + "\n  ".join(lines[:_NUM_SHOWN] + more),
            kind="conflict",
            ranks=tuple(sorted(guilty)),
        )
