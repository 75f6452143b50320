"""Merges what the ranks find about a state and a checkpoint, for all: one rank may have the key that another lacks."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, zip_longest

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import Problem
from bytecheckpoint.adapters.key_map import UnusedRule
from bytecheckpoint.adapters.plain.manifest_trees import stored_leaves
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.loading.match import Match
from bytecheckpoint.manifest.plain_wire import is_at_or_below

_NUM_SHOWN = 10
_NUM_MATCHED = 200
_LOST_SUM = (
    'rank 0 gets the sum of a RankLocal(merge="sum"), and its state has none there, so that the sum would be lost; '
    "pass it on all ranks"
)
_RENAMED_BY_TRANSFORMERS = (
    "\nSome models of transformers have other names in their files, and from_pretrained renames or joins tensors while "
    "it loads: load such files with it, then save that model with bcp.save"
)
_KINDS = ("missing_key", "unexpected_key", "shape", "dtype", "coverage", "conflict")


class _RankFindings(msgspec.Struct, frozen=True, array_like=True):
    """The findings of one rank."""

    problems: list[Problem]
    top_level: list[str]
    """The keys of its state."""
    wanted: bytes
    """A bit for each FQN that all ranks see, in order: this rank has a place for it."""
    unexpected: list[str]
    """FQNs that only this rank sees, under a key of its state, and that it has no place for."""
    fqns_digest: int
    """Digest of the FQNs that all ranks should see alike, as this rank sees them."""
    unused: list[UnusedRule]
    """Rules that match nothing in the checkpoint, nor in its state."""
    fills: bool
    """True if something of its state is filled."""
    has_places: bool
    """True if its state is empty, or has a place that something could fill."""
    is_all_skipped: bool
    """True if include and exclude leave out something of its state, and no tensor is filled."""
    other_name: str
    """The name of the state that the names of the checkpoint may belong below; "" if there is none."""
    has_experts: bool
    """True if the checkpoint has experts in separate tensors, which a load can stack."""
    sums: list[str]
    """FQNs of entries whose sum over ranks is loaded, on rank 0, and zero on the others."""
    sums_in_files: bool
    """True if it sums integers that lie in data files."""
    has_ties: bool
    """True if tensors that are the same memory are loaded apart."""


class MergedFindings(msgspec.Struct, frozen=True, array_like=True):
    """The findings of all ranks, without repetitions."""

    problems: list[Problem]
    unexpected: list[str]
    unused: list[UnusedRule]
    """Rules that match nothing on any rank."""
    fills: bool
    """True if something is filled on any rank, or there is nothing to fill."""
    is_open: bool = False
    """True if something is missing that the checkpoint may have under other names, or in separate tensors: then nothing
    is refused, and only `other_name` means something."""
    other_name: str = ""
    """The name of the state that the checkpoint may belong below, if all ranks gave the same; else ""."""
    ignored: list[str] = []
    """Top-level names of the checkpoint that no rank's state has."""
    lost_sums: dict[str, str] = {}
    """Texts of the conflicts where ranks get zero and rank 0 does not get the sum, by the FQN of the entry."""
    sums_in_files: bool = False
    """True if a rank sums integers that lie in data files."""
    has_ties: bool = False
    """True if a rank loads tensors apart that are the same memory."""


def merge_findings(
    ranks: Ranks,
    match: Match,
    stored: CheckpointView,
    state_names: Iterable[str],
    *,
    strict: bool,
    ignored: Collection[str],
    other_name: str,
    has_experts: bool,
    sums: Sequence[str],
    sums_in_files: bool,
    foreign_format: str,
) -> MergedFindings:
    """Returns, on every rank, everything that does not fit on some rank. With `strict`, raises one
    CheckpointMismatchError on every rank instead, if any of it is not of the `ignored` kinds, a rule matches nothing,
    or nothing would be filled; but never if the result `is_open`. Raises CheckpointMismatchError (conflict), also
    without `strict`, if ranks see different names.

    Keys are unexpected if the checkpoint has them under a top-level name of the state and no rank takes them.
    """
    fqns, top_level = stored.common_names, set(map(str, state_names))
    own = _RankFindings(
        problems=match.problems,
        top_level=sorted(top_level),
        wanted=np.packbits(np.fromiter(map(match.claims.__contains__, fqns), bool, len(fqns))).tobytes(),
        unexpected=[fqn for fqn in stored.own_names if fqn not in match.claims and is_at_or_below(fqn, top_level)],
        fqns_digest=xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(fqns)),
        unused=_unused_rules(stored, top_level),
        fills=bool(match.shards) or not (match.claims - match.skipped).isdisjoint(stored.tree_leaves),
        has_places=bool(match.claims or match.skipped or match.problems or not top_level),
        is_all_skipped=bool(match.skipped) and not match.shards,
        other_name=other_name,
        has_experts=has_experts,
        sums=list(sums),
        sums_in_files=sums_in_files,
        has_ties=match.has_ties,
    )

    def merge(payloads: Sequence[bytes]) -> Sequence[bytes]:
        findings = [msgspec.msgpack.decode(payload, type=_RankFindings) for payload in payloads]
        _check_same_fqns(ranks, findings)
        merged = _merge(findings, fqns, stored.own_names)
        other_names = {of_rank.other_name for of_rank in findings}
        common_name = other_names.pop() if len(other_names) == 1 else ""
        is_lacking = any(problem.kind == "missing_key" for of_rank in findings for problem in of_rank.problems)
        is_lacking = is_lacking or all(of_rank.is_all_skipped for of_rank in findings)
        if is_lacking and (common_name or findings[COORDINATOR].has_experts):
            merged = MergedFindings([], [], [], fills=True, is_open=True, other_name=common_name)
        elif strict and _is_refused(merged, ignored):
            top_names = {name for of_rank in findings for name in of_rank.top_level}
            raise _mismatch(merged, stored, top_names, ignored, foreign_format=foreign_format)
        return [msgspec.msgpack.encode(merged)] * ranks.num_ranks

    return msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(own), merge), type=MergedFindings)


def _unused_rules(stored: CheckpointView, top_level: set[str]) -> list[UnusedRule]:
    """Returns the rules that match no name of the checkpoint, and none that the state has asked for. A glob of an
    entry's own name, which takes nothing of what is below it, counts as matching if it changes nothing: if the state
    lacks the entry; of include, also if something of the entry is loaded; of exclude, also if nothing is.
    """
    for fqn in stored.names_of_all_ranks if stored.unmatched_rules else ():
        stored.takes(fqn)
        stored.rename(fqn)
    for fqn, tree in stored.trees.items() if stored.unmatched_rules else ():
        is_in_state = is_at_or_below(stored.rename(fqn), top_level)
        is_loaded = is_in_state and any(map(stored.takes, stored_leaves(tree, fqn)))
        if is_loaded or not is_in_state:
            stored.includes(fqn)
        if not is_loaded:
            stored.excludes(fqn)
    return stored.unmatched_rules


def _is_refused(merged: MergedFindings, ignored: Collection[str]) -> bool:
    is_unexpected = bool(merged.unexpected) and "unexpected_key" not in ignored
    is_problem = any(problem.kind not in ignored for problem in merged.problems)
    return is_problem or is_unexpected or bool(merged.unused) or not merged.fills


def warn_of_unused(merged: MergedFindings, path: str) -> None:
    """Warns once of rules that match nothing and of a load that filled nothing: most often a name is misspelt."""
    texts = [] if merged.fills else ["nothing of the state was filled"]
    texts += [f"{rule} matches nothing in the checkpoint" for rule in merged.unused]
    if texts:
        warnings.warn(f"loading {path}: {and_more(texts, _NUM_SHOWN, '; ')}. Check the names", stacklevel=3)


def _check_same_fqns(ranks: Ranks, findings: Sequence[_RankFindings]) -> None:
    odd = [rank for rank, of_rank in enumerate(findings) if of_rank.fqns_digest != findings[COORDINATOR].fqns_digest]
    if odd:
        raise CheckpointMismatchError(
            f"ranks pass different key_map, include or exclude: rank {ranks.global_ranks[odd[0]]} sees other names in "
            f"the checkpoint than rank {ranks.global_ranks[COORDINATOR]}; nothing was loaded: "
            "pass the same to all ranks",
            kind="conflict",
            ranks=tuple(ranks.global_ranks[rank] for rank in odd),
        )


def _merge(findings: Sequence[_RankFindings], fqns: Sequence[str], own_names: Sequence[str]) -> MergedFindings:
    wanted = np.zeros(len(fqns), bool)
    for of_rank in findings:
        wanted |= np.unpackbits(np.frombuffer(of_rank.wanted, np.uint8), count=len(fqns)).astype(bool)
    top_level = {name for of_rank in findings for name in of_rank.top_level}
    unclaimed = [fqns[number] for number in np.flatnonzero(~wanted).tolist()]
    unexpected = sorted(fqn for fqn in unclaimed if is_at_or_below(fqn, top_level))
    ignored = {fqn.split(".")[0] for fqn in chain(unclaimed, own_names) if not is_at_or_below(fqn, top_level)}
    unexpected += sorted({fqn for of_rank in findings for fqn in of_rank.unexpected})
    problems = {(problem.kind, problem.fqn): problem for of_rank in findings for problem in of_rank.problems}
    lost = {fqn for of_rank in findings for fqn in of_rank.sums}.difference(findings[COORDINATOR].sums)
    lost_sums = {fqn: f"{fqn}: {_LOST_SUM}" for fqn in sorted(lost)}
    problems |= {("conflict", fqn): Problem("conflict", fqn, text) for fqn, text in lost_sums.items()}
    unused = [rule for rule in findings[COORDINATOR].unused if all(rule in of_rank.unused for of_rank in findings)]
    # A state of nothing but modules without tensors has nothing that a load could fill.
    fills = any(of_rank.fills for of_rank in findings) or not any(of_rank.has_places for of_rank in findings)
    return MergedFindings(
        list(problems.values()),
        unexpected,
        unused,
        fills,
        ignored=sorted(ignored),
        lost_sums=lost_sums,
        sums_in_files=any(of_rank.sums_in_files for of_rank in findings),
        has_ties=any(of_rank.has_ties for of_rank in findings),
    )


def _mismatch(
    merged: MergedFindings,
    stored: CheckpointView,
    top_level: set[str],
    ignored: Collection[str],
    *,
    foreign_format: str,
) -> CheckpointMismatchError:
    missing = [fqn for kind, fqn, _ in merged.problems if kind == "missing_key"]
    lines: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for kind, fqn, text in merged.problems:
        near = _near(fqn, merged.unexpected) if kind == "missing_key" and len(lines[kind]) < _NUM_SHOWN else ""
        lines[kind].append(text + near)
    for fqn in merged.unexpected:
        near = _near(fqn, missing) if len(lines["unexpected_key"]) < _NUM_SHOWN else ""
        lines["unexpected_key"].append(f"{fqn}: in the checkpoint, not in the state{near}")
    lines["conflict"] += _unused_texts(merged.unused, stored)
    found = {kind: of_kind for kind, of_kind in lines.items() if of_kind and kind not in ignored}
    if not merged.fills and not found:
        found["conflict"] = [_nothing_text(stored, top_level)]
    counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in found.items())
    advice = "Rename with key_map, choose with include and exclude, or load what fits with strict=False"
    if ignored:  # the caller is no load of this library, and has none of these
        advice = "Ask for what the checkpoint has, or for a partial load"
    return CheckpointMismatchError(
        f"state and checkpoint do not fit ({counts}); nothing was loaded and the state is as it was. {advice}:\n"
        + _listed(found)
        + _entries_text(missing, stored)
        + (_RENAMED_BY_TRANSFORMERS if missing and foreign_format == "safetensors" else ""),
        kind=next(iter(found)),
    )


def refuse_unused_globs(stored: CheckpointView, path: str) -> None:
    """Raises CheckpointMismatchError (conflict) for globs that match no tensor and no leaf of plain data in the
    checkpoint. The name of an entry, as `optimizer`, is such a glob: it takes nothing of what is below the entry.
    """
    for fqn in stored.names_of_all_ranks if stored.unmatched_rules else ():
        stored.takes(fqn)
    unused = stored.unmatched_rules
    if unused:
        texts = and_more(_unused_texts(unused, stored), _NUM_SHOWN, "; ")
        raise CheckpointMismatchError(f"{texts}; nothing was read: check the names", kind="conflict", path=path)


def _unused_texts(rules: Sequence[UnusedRule], stored: CheckpointView) -> list[str]:
    """Returns a text for each rule, that it matches nothing; the first ten, which are shown, come with advice."""
    names = stored.names_of_all_ranks if rules else set()
    parts = (name.split(".") for name in names)
    around = {".".join(of_name[:count]) for of_name in parts for count in range(1, len(of_name))}
    advice = [_advice_on(rule, names, around) for rule in rules[:_NUM_SHOWN]]
    return [f"{rule} matches nothing in the checkpoint{how}" for rule, how in zip_longest(rules, advice, fillvalue="")]


def _advice_on(rule: UnusedRule, names: set[str], around: set[str]) -> str:
    """Returns what may have been meant: names below the rule, or a near name; `around` are names above those."""
    wanted = rule.rule if rule.option != "key_map" else rule.rule.strip("()'\"").split("'")[0]
    above = {wanted} & around
    if not above and rule.option != "key_map":
        above = set(filter(partial(fnmatchcase, pat=wanted), around))
    if above:
        starts = tuple(f"{parent}." for parent in above)
        below = min(name for name in names if name.startswith(starts))
        advised = glob.escape(wanted) if wanted in above else wanted
        advice = "" if rule.option == "key_map" else f": {advised + '.*'!r} matches them"
        return f", which has names below it, as {below}{advice}"
    candidates = sorted(names | around, key=len)[:_NUM_MATCHED]
    near = get_close_matches(wanted.rstrip(".*"), candidates, n=1, cutoff=0.5)
    return f" (near: {near[0]})" if near else ""


def _nothing_text(stored: CheckpointView, top_level: set[str]) -> str:
    if not top_level:
        return "the state names nothing, so that nothing would be filled; pass what is to be filled"
    left_out = "include and exclude leave out all of the state" if stored.skipped else "the state has nothing to fill"
    return f"{left_out}, so that nothing would be loaded; it names {and_more(sorted(top_level), _NUM_SHOWN)}"


def _entries_text(missing: Sequence[str], stored: CheckpointView) -> str:
    """Returns a text that lists the checkpoint's entries if it lacks the entry of a `missing` name; else ""."""
    entries = {name.partition(".")[0] for name in stored.all_names()}
    lost = sorted({name.partition(".")[0] for name in missing} - entries)
    if not lost:
        return ""
    has = f"has the entries {and_more(sorted(entries), _NUM_SHOWN)}" if entries else "holds nothing"
    return f"\nThe checkpoint has no entry {and_more([repr(name) for name in lost], _NUM_SHOWN)}: it {has}"


def _near(fqn: str, others: Sequence[str]) -> str:
    matches = get_close_matches(fqn, [other for other in others[:_NUM_MATCHED] if other != fqn], n=1)
    return f" (near: {matches[0]})" if matches else ""


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    lines = (f"{kind}: " + and_more(texts, _NUM_SHOWN, f"\n  {kind}: ") for kind, texts in found.items())
    return "  " + "\n  ".join(lines)
