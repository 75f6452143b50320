"""Finds the names under which the parts of a state are in a checkpoint. Mostly they are the names in the state that was
saved; but files of one model have no name for the model, nor has a checkpoint that was converted or saved without one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.collect import Entry, entries_of, plain_names_of
from bytecheckpoint.adapters.containers import roots_of
from bytecheckpoint.adapters.data.loader_entry import DataLoaderEntry
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry
from bytecheckpoint.adapters.key_map import KeyMap, Renamer
from bytecheckpoint.adapters.native.module_parts import EXTRA_STATE
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.adapters.optimizers.forms import Reshaping, forms_of
from bytecheckpoint.adapters.rank_values.rank_local import RankLocalEntry
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.formats.torch_optimizer import as_saved_here
from bytecheckpoint.loading.file_checks import bad_sums, plan_together
from bytecheckpoint.loading.match import Match, match_state
from bytecheckpoint.loading.mismatches import MergedFindings, merge_findings
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import is_at_or_below
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.name_maps.fused_experts import has_experts_to_fuse, with_fused_experts


class NameScope(NamedTuple):
    """A checkpoint under the names that the caller asks for."""

    manifest: Manifest
    rank: int
    num_ranks: int
    key_map: KeyMap | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None

    def view(self, entries: Sequence[Entry], below: str, beside: Collection[str]) -> CheckpointView:
        """Returns the checkpoint as these entries see it. `below`, an FQN or "", is put in front of each name of the
        checkpoint, except for names at or below the state FQNs in `beside`.
        """
        forms = forms_of(entries)
        return CheckpointView(
            self.manifest,
            rank=self.rank,
            num_ranks=self.num_ranks,
            key_map=self.key_map,
            include=self.include,
            exclude=self.exclude,
            below=below,
            beside=beside,
            plain_names=plain_names_of(entries),
            reshape=Reshaping(forms, as_saved_here).reshaped if forms else None,
            trees_at=roots_of(entry for entry in entries if not isinstance(entry, DataLoaderEntry)),
        )

    def other_name(self, names: Sequence[str], entries: Sequence[Entry]) -> str:
        """Returns the one of `names`, those of the state, below which all tensors of the checkpoint may belong: the
        only name; or the only one without plain data in the checkpoint; or, of several without, the only model. Returns
        "" if there is no such name, or the state has only data loaders.
        """
        if all(isinstance(entry, DataLoaderEntry) for entry in entries):  # whose state is never a whole checkpoint
            return ""
        if len(names) < 2:
            return names[0] if names else ""
        rename = Renamer(self.key_map, "")
        stored = set(map(rename, [*self.manifest.objects, *self.manifest.rank_objects]))
        not_stored = [name for name in names if name not in stored]
        if len(not_stored) > 1:
            models = (entry.fqn.split(".") for entry in entries if isinstance(entry, ModuleEntry | MegatronEntry))
            at_or_above = {".".join(parts[:count]) for parts in models for count in range(1, len(parts) + 1)}
            not_stored = [name for name in not_stored if name in at_or_above]
        return not_stored[0] if len(not_stored) == 1 else ""


class WantedState(NamedTuple):
    """The state to load, and the caller's options for it."""

    state: Mapping[str, Any]
    framework: str
    cast: bool
    strict: bool
    ignored: Collection[str] = ()
    """Kinds of problems that are no error with `strict` either."""


class Matched(NamedTuple):
    """A state compared with a checkpoint."""

    entries: list[Entry]
    stored: CheckpointView
    match: Match
    manifest: Manifest
    """The checkpoint as it was compared: with stacks of experts, or unchanged."""


class Fitted(NamedTuple):
    """The comparison that all ranks have chosen, and the plan to load it."""

    matched: Matched
    fetches: list[Fetch]
    findings: MergedFindings


def match_named(scope: NameScope, wanted: WantedState, *, below: str = "", beside: Collection[str] = ()) -> Matched:
    """Compares the state with the checkpoint. With `below`, a name of the state, the checkpoint counts as that entry of
    the state, except for its entries whose state FQNs are in `beside`.
    """
    entries = entries_of(wanted.state, wanted.framework)  # they serve for one comparison
    stored = scope.view(entries, below, beside)
    return Matched(entries, stored, match_state(entries, stored, cast=wanted.cast), scope.manifest)


def fit_state(ranks: Ranks, source: Source, scope: NameScope, wanted: WantedState) -> Fitted:
    """Compares the state with the checkpoint as it is. If the checkpoint lacks something, also compares with all of it
    below `NameScope.other_name`, and with its separate tensors of experts stacked. Takes the comparison that fits best
    on all ranks together. Every rank must call this.

    The integers that are summed over ranks are read last: a sum that is out of range, or that rank 0 does not get, is a
    conflict and fills nothing.

    Raises the errors of `plan_together`, `bad_sums` and `merge_findings`: with `strict`, CheckpointMismatchError on
    every rank if something does not fit on one of them.
    """
    as_it_is = match_named(scope, wanted)
    names = list(map(str, wanted.state))

    def agree(matched: Matched, *, other_name: str = "", has_experts: bool = False) -> Fitted:
        fetches = plan_together(ranks, source.showing(matched.manifest), matched.match)
        # Nothing else is refused after this: a rank that receives the findings knows that all have come this far.
        findings = merge_findings(
            ranks,
            matched.match,
            matched.stored,
            names,
            strict=wanted.strict,
            ignored=wanted.ignored,
            other_name=other_name,
            has_experts=has_experts,
            sums=[entry.fqn for entry in _rank_local(matched) if entry.is_summed],
            sums_in_files=any(entry.sums_in_files for entry in _rank_local(matched)),
            foreign_format=matched.manifest.foreign_format,
        )
        return Fitted(matched, fetches, findings)

    other_name = scope.other_name(names, as_it_is.entries)
    chosen, fitted = as_it_is, agree(as_it_is, other_name=other_name, has_experts=has_experts_to_fuse(scope.manifest))
    if fitted.findings.is_open:
        other_name, fused = fitted.findings.other_name, with_fused_experts(scope.manifest)
        scopes = [scope] if fused is None else [scope, scope._replace(manifest=fused)]
        candidates = [(each, "") for each in [as_it_is, *(match_named(each, wanted) for each in scopes[1:])]]
        if other_name:
            beside = {*names, *_entries(as_it_is.stored)} - {other_name}
            candidates += [(match_named(each, wanted, below=other_name, beside=beside), other_name) for each in scopes]
        chosen = _best_of(ranks, candidates)
        fitted = agree(chosen)
    conflicts = {**fitted.findings.lost_sums}
    if fitted.findings.sums_in_files:
        entries, stored, match, manifest = chosen
        conflicts |= bad_sums(ranks, source.showing(manifest), entries, stored, match)
    return agree(_without_sums(chosen, conflicts, wanted)) if conflicts else fitted


def _rank_local(matched: Matched) -> list[RankLocalEntry]:
    return [entry for entry in matched.entries if isinstance(entry, RankLocalEntry)]


def _without_sums(matched: Matched, conflicts: Mapping[str, str], wanted: WantedState) -> Matched:
    """Refuses the sums of the entries in `conflicts`, texts by the FQN of the entry, so that these fill nothing;
    returns the comparison made again.
    """
    for entry in _rank_local(matched):
        entry.refuse_sum(conflicts.get(entry.fqn, ""))
    return matched._replace(match=match_state(matched.entries, matched.stored, cast=wanted.cast))


def _entries(stored: CheckpointView) -> set[str]:
    """Returns the state FQNs of a checkpoint's entries, which keep their names when its other tensors are put below a
    name; an empty set if there are no other tensors: then the entries may belong below that name.
    """
    found = {
        fqn
        for fqn, tree in stored.trees.items()
        if fqn and isinstance(tree, dict) and fqn.split(".")[-1] != EXTRA_STATE
    }
    return set() if all(is_at_or_below(fqn, found) for fqn in stored.saved) else set(map(stored.rename, found))


def _best_of(ranks: Ranks, candidates: Sequence[tuple[Matched, str]]) -> Matched:
    """Returns the comparison with the most shards minus problems on all ranks together, the first of equal ones, and
    the same on all ranks. Each comes with the name below which it puts the names of the checkpoint, or "". One without
    shards comes after all that have some, because `include` may have left out everything, and one that fills nothing
    below its name comes last.
    """

    def score(num_shards: int, num_problems: int, num_named: int) -> tuple[bool, bool, int]:
        return num_named > 0, num_named > 0 and num_shards > 0, num_shards - num_problems

    def choose(payloads: Sequence[bytes]) -> Sequence[bytes]:
        of_ranks = [msgspec.msgpack.decode(payload, type=list[tuple[int, int, int]]) for payload in payloads]
        sums = [tuple(map(sum, zip(*counts, strict=True))) for counts in zip(*of_ranks, strict=True)]
        scores = [score(*counts) for counts in sums]
        return [msgspec.msgpack.encode(scores.index(max(scores)))] * len(payloads)

    payload = msgspec.msgpack.encode([_counts(*each) for each in candidates])
    return candidates[msgspec.msgpack.decode(ranks.reduce_scatter(payload, choose), type=int)][0]


def _counts(matched: Matched, below: str) -> tuple[int, int, int]:
    """Returns three numbers: of shards, of problems (a missing key counts twice: a tensor of another dtype is nearer),
    and of the shards and plain data that are filled at or below a name. The last is 1 for the name "".
    """
    match, plain = matched.match, matched.stored.tree_leaves
    fqns = TargetShards.of(match.shards).fqns
    filled = [*fqns, *filter(plain.__contains__, match.claims)] if below else ()
    num_named = sum(is_at_or_below(fqn, {below}) for fqn in filled) if below else 1
    num_missing = sum(problem.kind == "missing_key" for problem in match.problems)
    return len(fqns), len(match.problems) + num_missing, num_named
