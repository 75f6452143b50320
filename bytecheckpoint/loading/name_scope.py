"""Names under which a state finds what a checkpoint holds. A checkpoint has the names of the state that was saved. But
files of one model have no name for the model, and neither has what was converted or saved without one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, is_at_or_below
from bytecheckpoint.adapters.collect import Entry, entries_of, plain_names_of
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry
from bytecheckpoint.adapters.key_map import KeyMap, Renamer
from bytecheckpoint.adapters.native.module_parts import EXTRA_STATE
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.adapters.optimizers.forms import Reshaping, forms_of
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.formats.torch_optimizer import as_saved_here
from bytecheckpoint.loading.match import Match, match_state
from bytecheckpoint.loading.mismatches import MatchVerdict, share_findings
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.name_maps.fused_experts import has_separate_experts, with_fused_experts
from bytecheckpoint.planner.coalesce import Fetch

_Fit = tuple[int, int]
"""How many shards were found, and that number less the problems."""


class View(NamedTuple):
    """What the caller wants to see of a checkpoint."""

    manifest: Manifest
    rank: int
    key_map: KeyMap | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None

    def stored(self, entries: Sequence[Entry], below: str, beside: Collection[str]) -> CheckpointView:
        """The checkpoint as these entries see it, with all of its names below this one, but for those at and below the
        names beside it; as they are below "".
        """
        forms = forms_of(entries)
        return CheckpointView(
            self.manifest,
            rank=self.rank,
            key_map=self.key_map,
            include=self.include,
            exclude=self.exclude,
            below=below,
            beside=beside,
            plain_names=plain_names_of(entries),
            reshape=Reshaping(forms, as_saved_here).reshaped if forms else None,
        )

    def other_name(self, names: Sequence[str], entries: Sequence[Entry]) -> str:
        """The name of the state, of these, below which the checkpoint can stand; "" where there is none, or several.

        A checkpoint holds an entry of its own for each of the others: plain data, as optimizers and schedulers have.
        Where it lacks several of them, the name is that of the only one that is a model.
        """
        if len(names) < 2:
            return names[0] if names else ""
        rename = Renamer(self.key_map, "")
        stored = set(map(rename, [*self.manifest.objects, *self.manifest.rank_objects]))
        others = [name for name in names if name not in stored]
        if len(others) > 1:
            models = [entry.fqn for entry in entries if isinstance(entry, ModuleEntry | MegatronEntry)]
            others = [name for name in others if any(is_at_or_below(fqn, {name}) for fqn in models)]
        return others[0] if len(others) == 1 else ""


class WantedState(NamedTuple):
    """The state to load, and how the caller wants that."""

    state: Mapping[str, Any]
    framework: str
    cast: bool
    strict: bool

    @property
    def names(self) -> list[str]:
        """Names of the state's entries."""
        return list(map(str, self.state))


class Matched(NamedTuple):
    """A state compared with a checkpoint."""

    entries: list[Entry]
    stored: CheckpointView
    match: Match
    manifest: Manifest
    """Of the checkpoint as it was compared: with stacks of experts, or as it is."""

    @property
    def fit(self) -> _Fit:
        """How well they fit: what would be loaded, and that without what is in the way of loading."""
        num_found = len(self.match.shards)
        return num_found, num_found - len(self.match.problems)


class Fitted(NamedTuple):
    """What all ranks have agreed to load."""

    entries: list[Entry]
    stored: CheckpointView
    match: Match
    manifest: Manifest
    """As in Matched."""
    fetches: list[Fetch]
    verdict: MatchVerdict


def match_named(view: View, wanted: WantedState, *, below: str = "", beside: Collection[str] = ()) -> Matched:
    """The state compared with the checkpoint as it is, or with the checkpoint below one of the state's names, but for
    entries that stay beside it.
    """
    entries = entries_of(wanted.state, wanted.framework)  # they serve for one comparison
    stored = view.stored(entries, below, beside)
    return Matched(entries, stored, match_state(entries, stored, cast=wanted.cast), view.manifest)


def fit_state(ranks: Ranks, view: View, wanted: WantedState, plan: Callable[[Matched], list[Fetch]]) -> Fitted:
    """The state compared with the checkpoint as it is, and, where that lacks something, in other ways: below a name of
    the state that is no entry of the checkpoint, and with stacks of the experts that it has in separate tensors.
    Whichever fits best counts, on all ranks together.

    Raises what `plan` raises, and CheckpointMismatchError on every rank for what does not fit on any.
    """

    def judged(matched: Matched, *, other_name: str = "", has_experts: bool = False) -> Fitted:
        fetches = plan(matched)
        # The last of what can be refused: who receives the verdict knows that every rank has come this far.
        verdict = share_findings(
            ranks,
            matched.match,
            matched.stored,
            wanted.names,
            strict=wanted.strict,
            other_name=other_name,
            has_experts=has_experts,
        )
        return Fitted(*matched, fetches, verdict)

    as_it_is = match_named(view, wanted)
    other_name = view.other_name(wanted.names, as_it_is.entries)
    found = judged(as_it_is, other_name=other_name, has_experts=has_separate_experts(view.manifest))
    if not found.verdict.is_open:
        return found
    other_name, fused = found.verdict.other_name, with_fused_experts(view.manifest)
    views = [view] if fused is None else [view, view._replace(manifest=fused)]
    others = [match_named(each, wanted) for each in views[1:]]
    if other_name:
        beside = {*wanted.names, *_entries(as_it_is.stored)} - {other_name}
        others += [match_named(each, wanted, below=other_name, beside=beside) for each in views]
    return judged(_best_of(ranks, [as_it_is, *others]))


def _entries(stored: CheckpointView) -> set[str]:
    """State FQNs of the entries of a checkpoint, where it also has tensors that stand in none."""
    found = {
        fqn
        for fqn, tree in stored.trees.items()
        if fqn and isinstance(tree, dict) and fqn.split(".")[-1] != EXTRA_STATE
    }
    return set() if all(is_at_or_below(fqn, found) for fqn in stored.saved) else set(map(stored.rename, found))


def _best_of(ranks: Ranks, found: Sequence[Matched]) -> Matched:
    """The comparison that fits best on all ranks together, the first where several do."""

    def choose(payloads: Sequence[bytes]) -> Sequence[bytes]:
        of_ranks = [msgspec.msgpack.decode(payload, type=list[_Fit]) for payload in payloads]
        totals = [_total(fits) for fits in zip(*of_ranks, strict=True)]
        return [msgspec.msgpack.encode(totals.index(max(totals)))] * len(payloads)

    payload = msgspec.msgpack.encode([matched.fit for matched in found])
    return found[msgspec.msgpack.decode(ranks.reduce_scatter(payload, choose), type=int)]


def _total(fits: Iterable[_Fit]) -> tuple[bool, int]:
    """Of all ranks. Where include leaves out all that could be found nothing is in the way, and that is no fit."""
    num_found, balance = map(sum, zip(*fits, strict=True))
    return num_found > 0, balance
