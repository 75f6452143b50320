"""Under which names a state finds what a checkpoint holds. This library's own checkpoints have the names of the state
that was saved; a foreign one may hold the tensors of a single model, without a name for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.adapters.renaming import KeyMap
from bytecheckpoint.adapters.state import Entry
from bytecheckpoint.adapters.stored import Stored
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.matching import Match, match_state
from bytecheckpoint.planner.fused_experts import with_fused_experts
from bytecheckpoint.ranks import Ranks

_Fit = tuple[int, int]
"""How many shards were found, and that number less the problems."""


class View(NamedTuple):
    """What the caller wants to see of a checkpoint."""

    manifest: Manifest
    rank: int
    key_map: KeyMap | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None

    def stored(self, below: str) -> Stored:
        """The checkpoint with all of its names below this one; as they are below ""."""
        manifest, rank, key_map, include, exclude = self
        return Stored(manifest, rank=rank, key_map=key_map, include=include, exclude=exclude, below=below)


class Matched(NamedTuple):
    """A state compared with a checkpoint."""

    entries: list[Entry]
    stored: Stored
    match: Match
    manifest: Manifest
    """Of the checkpoint as it was compared: with stacks of experts, or as it is."""

    @property
    def fit(self) -> _Fit:
        """How well they fit: what would be loaded, and that without what is in the way of loading."""
        num_found = len(self.match.shards)
        return num_found, num_found - len(self.match.problems)


def _total(fits: Iterable[_Fit]) -> tuple[bool, int]:
    """Of all ranks. Where include leaves out all that could be found nothing is in the way, and that is no fit."""
    num_found, balance = map(sum, zip(*fits, strict=True))
    return num_found > 0, balance


def match_named(
    ranks: Ranks, view: View, state: Mapping[str, Any], take_apart: Callable[[], list[Entry]], *, cast: bool
) -> Matched:
    """Compares the state with the checkpoint as it is, or, where that is foreign and the state has one name only, with
    the whole checkpoint below that name: whichever fits better, on all ranks together. Where neither fits whole, and
    the checkpoint has experts in separate tensors, they are compared as stacks, too.

    `take_apart` makes the entries of the state, which serve for one comparison.
    """

    def compare(shown: View) -> list[Matched]:
        names = ["", str(*state)] if shown.manifest.foreign_format and len(state) == 1 else [""]
        return [_matched(shown, take_apart(), below=name, cast=cast) for name in names]

    found = compare(view)
    fused = with_fused_experts(view.manifest)
    if fused is None and not view.manifest.foreign_format:
        return found[0]
    best = _best(ranks, found)
    if fused is None or best.is_whole:
        return found[best.number]
    found = [found[best.number], *compare(view._replace(manifest=fused))]
    return found[_best(ranks, found).number]


def _matched(view: View, entries: list[Entry], *, below: str, cast: bool) -> Matched:
    stored = view.stored(below)
    return Matched(entries, stored, match_state(entries, stored, cast=cast), view.manifest)


class _Best(msgspec.Struct, frozen=True, array_like=True):
    """The comparison that fits best on all ranks together."""

    number: int
    is_whole: bool
    """It has no problem on any rank."""


def _best(ranks: Ranks, found: Sequence[Matched]) -> _Best:
    """The first of the best. A rank whose state has more names than one has fewer to choose from."""

    def choose(payloads: Sequence[bytes]) -> Sequence[bytes]:
        of_ranks = [msgspec.msgpack.decode(payload, type=list[_Fit]) for payload in payloads]
        num_all = max(map(len, of_ranks))
        totals = [_total(fits[min(number, len(fits) - 1)] for fits in of_ranks) for number in range(num_all)]
        number = totals.index(max(totals))
        is_whole = all(found == balance for found, balance in (fits[min(number, len(fits) - 1)] for fits in of_ranks))
        return [msgspec.msgpack.encode(_Best(number, is_whole))] * len(payloads)

    payload = msgspec.msgpack.encode([matched.fit for matched in found])
    best = msgspec.msgpack.decode(ranks.consult(payload, choose), type=_Best)
    return _Best(min(best.number, len(found) - 1), best.is_whole)
