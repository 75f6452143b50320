"""Under which names a state finds what a checkpoint holds. This library's own checkpoints have the names of the state
that was saved; a foreign one may hold the tensors of a single model, without a name for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.adapters.optimizer_forms import Reshaping, forms_of
from bytecheckpoint.adapters.renaming import KeyMap
from bytecheckpoint.adapters.state import Entry
from bytecheckpoint.adapters.stored import Stored
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.matching import Match, match_state
from bytecheckpoint.ranks import Ranks
from bytecheckpoint.storage.foreign.optimizers import as_saved_here

_Fit = tuple[int, int]
"""How many shards were found, and that number less the problems."""


class View(NamedTuple):
    """What the caller wants to see of a checkpoint."""

    manifest: Manifest
    rank: int
    key_map: KeyMap | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None

    def stored(self, below: str, entries: Sequence[Entry]) -> Stored:
        """The checkpoint as these entries see it, with all of its names below this one; as they are below ""."""
        manifest, rank, key_map, include, exclude = self
        forms = forms_of(entries)
        reshape = Reshaping(forms, as_saved_here).reshaped if forms else None
        filters = {"include": include, "exclude": exclude}
        return Stored(manifest, rank=rank, key_map=key_map, below=below, reshape=reshape, **filters)


class Matched(NamedTuple):
    """A state compared with a checkpoint."""

    entries: list[Entry]
    stored: Stored
    match: Match

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
    """The state compared with the checkpoint as it is, or, where that is foreign and the state has one name only, with
    the whole checkpoint below that name: whichever fits better, on all ranks together.

    `take_apart` makes the entries of the state, which serve for one comparison.
    """

    def below(name: str) -> Matched:
        entries = take_apart()
        stored = view.stored(name, entries)
        return Matched(entries, stored, match_state(entries, stored, cast=cast))

    as_it_is = below("")
    if not view.manifest.foreign_format:
        return as_it_is
    named = below(str(*state)) if len(state) == 1 else None
    fits = (as_it_is.fit, (named or as_it_is).fit)

    def choose(payloads: Sequence[bytes]) -> Sequence[bytes]:
        found = [msgspec.msgpack.decode(payload, type=tuple[_Fit, _Fit]) for payload in payloads]
        is_better = _total(second for _, second in found) > _total(first for first, _ in found)
        return [msgspec.msgpack.encode(is_better)] * len(payloads)

    is_better = msgspec.msgpack.decode(ranks.consult(msgspec.msgpack.encode(fits), choose), type=bool)
    return named if is_better and named is not None else as_it_is
