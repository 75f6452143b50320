"""Compares a state with a checkpoint on one rank, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor
from bytecheckpoint.adapters.collect import Entry
from bytecheckpoint.adapters.containers import PlainEntry, roots_of
from bytecheckpoint.adapters.expectation import Problem, not_stored
from bytecheckpoint.adapters.native.weight_scales import WeightScales, names_beside
from bytecheckpoint.adapters.optimizers.optimizer import OptimizerEntry
from bytecheckpoint.adapters.shards import LocalShard, has_all_memory, shares_elements, torch_dtype
from bytecheckpoint.adapters.stateful import StatefulEntry
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import Ranks, merge_texts
from bytecheckpoint.dtypes import MXFP4
from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.manifest.plain_wire import is_at_or_below
from bytecheckpoint.memory.overlap import find_overlaps
from bytecheckpoint.memory.proc_maps import are_read_only

_NUM_SHOWN = 10


class Match(NamedTuple):
    """The shards that this rank loads, and the problems."""

    shards: Sequence[LocalShard]
    stored_fqns: list[str]
    """The stored tensor that fills each shard."""
    problems: list[Problem]
    claims: set[str]
    """Every state FQN that this rank has a place for."""
    cast: set[str]
    """State FQNs that are loaded into another dtype."""
    skipped: set[str]
    """State FQNs that include or exclude keep from being loaded: by their own name, or by that of another part of the
    same tensor subclass."""
    padding: list[torch.Tensor]
    """Memory of loaded tensors beyond the elements that the checkpoint has."""
    has_ties: bool = False
    """True if tensors that are the same memory are loaded apart."""
    scales: WeightScales | None = None
    """Scales of quantized weights among the shards, if there are any; their memory is the last of the shards."""

    @property
    def num_tensors(self) -> int:
        """Number of the state's tensors of which a part is filled."""
        num_scales = len(self.scales.places) if self.scales else 0
        fqns = TargetShards.of(self.shards).fqns
        return len(set(fqns[: len(fqns) - num_scales]))

    def multiply_scales(self) -> None:
        if self.scales is not None:
            self.scales.multiply()

    def zero_padding(self) -> None:
        with torch.no_grad():
            for memory in self.padding:
                memory.zero_()

    def count_changes(self) -> None:
        """Increments the version counters of the filled tensors, so that a backward pass over the old values fails as
        after any other change in place: torch does not see how the bytes get there.
        """
        targets = TargetShards.of(self.shards)
        changed = [*targets.tensors, *targets.owners]
        with suppress(TypeError, RuntimeError):  # older torch takes one tensor at a time, and no inference tensor
            increment_version(changed)
            return
        for tensor in changed:
            if not tensor.is_inference():  # which has no counter
                increment_version(tensor)


def match_state(entries: Collection[Entry], stored: CheckpointView, *, cast: bool) -> Match:
    """Compares a state with a checkpoint. A shard that does not fit is among the problems and not among the shards.
    Changes no value of the state.
    """
    match = Match([], [], [], set(), set(), set(), [])
    blocks: list[Sequence[LocalShard]] = []
    names = roots_of(entries)
    match.skipped.update(fqn for fqn in stored.skipped if is_at_or_below(fqn, names))
    padding: list[LocalShard] = []
    # Last, what can be put apart: an object may copy what it loads into memory that it shares with plain data.
    for entry in sorted(entries, key=lambda entry: isinstance(entry, PlainEntry)):
        expectation = entry.expect(stored)
        padding += expectation.padding
        match.problems.extend(problem for problem in expectation.problems if not stored.skips(problem.fqn))
        match.claims.update(expectation.claims)
        match.skipped.update(expectation.skipped)
        blocks.append(_match_shards(match, TargetShards(expectation.shards), stored, cast=cast))
        # A copy is not filled without its original: it would differ, and the next optimizer step would overwrite it.
        copies = _not_refused(match, expectation.copies)
        blocks.append(_match_shards(match._replace(cast=set()), TargetShards(copies), stored, cast=True))
    blocks = [block for block in blocks if block]
    match = match._replace(shards=TargetShards.of(blocks[0] if len(blocks) == 1 else [*chain.from_iterable(blocks)]))
    match = _each_once(match, entries, stored)
    match = _without(match, _read_only(match))
    match = _with_scales(match, stored) if match.cast else match
    match.padding.extend(shard.tensor for shard in _not_refused(match, padding))
    return match


def _without(match: Match, numbers: Sequence[int]) -> Match:
    """Returns the match without the shards of these numbers."""
    if not numbers:
        return match
    left_out = set(numbers)
    fqns = [fqn for number, fqn in enumerate(match.stored_fqns) if number not in left_out]
    shards = [shard for number, shard in enumerate(match.shards) if number not in left_out]
    return match._replace(shards=TargetShards(shards), stored_fqns=fqns)


def _with_scales(match: Match, stored: CheckpointView) -> Match:
    """Adds the scales of quantized weights that are converted to full precision, and replaces the shards of packed
    weights by memory for the packed numbers, whatever include and exclude say: without scales the weights would be
    wrong. Where the state has a place for the scales, the weights are not multiplied by them, which is then left to the
    state's user. A weight whose scales do not fit becomes a problem.
    """
    scales = WeightScales(stored.saved, stored.metadata)
    filled, unfit = list[tuple[LocalShard, str]](), list[int]()
    for number, (shard, fqn) in enumerate(zip(match.shards, match.stored_fqns, strict=True)):
        try:
            filled.append(scales.add(shard, fqn, is_kept=lambda name: stored.rename(name) in match.claims))
        except CheckpointMismatchError as error:
            match.problems.append(Problem(error.kind, shard.fqn, f"{shard.fqn}: {error.message}"))
            match.cast.discard(shard.fqn)
            unfit.append(number)
    match.claims.update(map(stored.rename, scales.names))
    if not scales.places:
        return _without(match, unfit)
    filled += [(place, place.fqn) for place in scales.places.values()]
    shards, fqns = zip(*filled, strict=True)
    return match._replace(shards=TargetShards(shards), stored_fqns=[*fqns], scales=scales)


def _match_shards(match: Match, shards: TargetShards, stored: CheckpointView, *, cast: bool) -> Sequence[LocalShard]:
    """Adds what it finds about these shards to `match`: the stored tensors, or problems, and claims. Returns the shards
    that will be filled.
    """
    tensors = stored.tensors
    if shards and (fitting := _fitting_as_they_are(shards, tensors)):
        match.stored_fqns.extend(fitting)
        match.claims.update(shards.fqns)
        return shards
    filled = []
    for shard in shards:
        fqn = shard.fqn
        match.claims.add(fqn)
        found = tensors.get(fqn) or stored.of_other_ranks.get(fqn)
        if found is None and stored.skips(fqn):
            match.skipped.add(fqn)
            continue
        if found is None:
            is_plain = fqn in stored.tree_leaves
            text = f"{fqn}: plain data in the checkpoint, a tensor in the state"
            match.problems.append(Problem("missing_key", fqn, text) if is_plain else not_stored(fqn))
            continue
        problem = _problem(shard, found, cast=cast)
        if problem is not None:
            match.problems.append(problem)
            continue
        filled.append(shard)
        match.stored_fqns.append(found.fqn)
        if found.dtype != shard.dtype:
            match.cast.add(fqn)
    return filled


def _fitting_as_they_are(shards: TargetShards, tensors: Mapping[str, StoredTensor]) -> Sequence[str]:
    """Returns the stored FQNs of all shards if every shard has an address and its dtype and shape are as stored, else
    an empty list. Nearly always they are, and 100,000 shards are compared in a few calls.
    """
    found = [stored for stored in map(tensors.get, shards.fqns) if stored is not None]
    if len(found) < len(shards) or shards.without_address:
        return []
    fqns, dtypes, shapes = zip(*found, strict=True)
    return fqns if (dtypes, shapes) == (shards.dtypes, shards.global_shapes) else []


def _not_refused(match: Match, shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Returns the shards of tensors that have no problem so far."""
    refused = {problem.fqn for problem in match.problems} if shards else set()
    return [shard for shard in shards if shard.fqn not in refused]


def _each_once(match: Match, entries: Collection[Entry], stored: CheckpointView) -> Match:
    """Returns the match with all memory filled once. Tied tensors of modules, and views of a part, take the value of
    the tensor that contains them; tied tensors of other entries are loaded apart where the checkpoint has several. Adds
    a tensor that overlaps with another in part to the problems: it would hold a mixture of both, which could not be
    verified.
    """
    shared = find_overlaps(match.shards)
    for first, second in shared.clashing:
        fqn = match.shards[second].fqn
        text = (
            f"{fqn}: shares memory with {match.shards[first].fqn} in the state, in part or in another dtype, and they "
            "are different tensors in the checkpoint; give each memory of its own, or leave one out"
        )
        match.problems.append(Problem("conflict", fqn, text))
    within = _trained_first(match, shared.within, entries, stored)
    left_out = [second for _, second in within + shared.clashing]
    apart = _untied(match, within, entries)
    match = _without(match, left_out)
    if not apart:
        return match
    shards, fqns = zip(*apart, strict=True)
    targets = TargetShards([*match.shards, *shards])
    return match._replace(shards=targets, stored_fqns=[*match.stored_fqns, *fqns], has_ties=True)


def _trained_first(
    match: Match, tied: list[tuple[int, int]], entries: Collection[Entry], stored: CheckpointView
) -> list[tuple[int, int]]:
    """Returns the pairs of shards. A first one that is plain data gives way, in all its pairs, to the same elements
    under a name that the checkpoint's optimizer trains: the live optimizer goes on to change the memory that is kept.
    """
    plain = roots_of(entry for entry in entries if isinstance(entry, PlainEntry)) if tied else set()
    optimizers = (entry for entry in entries if isinstance(entry, OptimizerEntry) and plain)
    trained = set().union(*(entry.trained_fqns(stored) for entry in optimizers))
    kept: dict[int, int] = {}
    for first, second in tied if trained else ():
        fqn, other = match.shards[first].fqn, match.shards[second].fqn
        is_trained = fqn not in trained and other in trained and is_at_or_below(fqn, plain)
        if is_trained and _are_same(match.shards, first, second):  # a part would leave the other elements as they were
            kept.setdefault(first, second)
    return [(kept.get(first, first), first if kept.get(first) == second else second) for first, second in tied]


def _untied(
    match: Match, tied: Collection[tuple[int, int]], entries: Collection[Entry]
) -> list[tuple[LocalShard, str]]:
    """Returns a new target in memory of its own, with its stored FQN, for the second shard of each pair in `tied` whose
    shards are the same elements in the state, and two tensors in the checkpoint.
    """
    stored = {
        match.shards[second].fqn: match.stored_fqns[second]
        for first, second in tied
        if match.stored_fqns[first] != match.stored_fqns[second] and _are_same(match.shards, first, second)
    }
    others = [entry for entry in entries if isinstance(entry, PlainEntry | StatefulEntry)] if stored else []
    roots = ((entry, roots_of([entry])) for entry in others)
    by_entry = ((entry, [fqn for fqn in stored if is_at_or_below(fqn, of_entry)]) for entry, of_entry in roots)
    shards = chain.from_iterable(entry.expect_untied(fqns) for entry, fqns in by_entry if fqns)
    return [(shard, stored[shard.fqn]) for shard in shards]


def part_ties(ranks: Ranks, entries: Collection[Entry]) -> None:
    """Makes loaded tensors that were the same memory separate ones on all ranks where they differ on one: else a rank
    with equal parts would go on to change both. All ranks must call it.
    """
    untied = [entry.untied for entry in entries if isinstance(entry, PlainEntry | StatefulEntry)]
    differing = chain.from_iterable(each.differing() for each in untied)
    on_any_rank = merge_texts(ranks, dict.fromkeys(differing, ""))
    for each in untied:
        each.part(on_any_rank)


def _are_same(shards: Sequence[LocalShard], first: int, second: int) -> bool:
    one, other = shards[first].tensor, shards[second].tensor
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _read_only(match: Match) -> list[int]:
    """Returns the numbers of shards in read-only memory, where a write kills the process; adds each to the problems."""
    targets = TargetShards.of(match.shards)
    addresses = targets.addresses.copy()
    for number, tensor in zip(targets.without_address, targets.tensors_without_address, strict=True):
        addresses[number] = tensor.data_ptr() if tensor.is_cpu else 0
    found: list[int] = np.flatnonzero(are_read_only(addresses)).tolist()
    for number in found:
        fqn = match.shards[number].fqn
        text = (
            f"{fqn}: the memory of the state's tensor is read only, as that of a file that is mapped so; give it a copy"
        )
        match.problems.append(Problem("conflict", fqn, text))
    return found


def _problem(shard: LocalShard, stored: StoredTensor, *, cast: bool) -> Problem | None:
    """Returns the problem for which the shard cannot be filled from the stored tensor, or None."""
    fqn, dtype, shape, _, tensor, address, _, _ = shard
    if address and stored.shape == shape and stored.dtype == dtype:  # most of a state
        return None
    kind = text = ""
    if stored.shape != shape:
        kind, text = "shape", f"shape {list(stored.shape)} in the checkpoint, {list(shape)} in the state"
    elif stored.dtype != dtype and not cast:
        kind, text = "dtype", f"dtype {stored.dtype} in the checkpoint, {dtype} in the state (cast=True converts)"
    elif stored.dtype != dtype and not _can_convert(stored, dtype):
        kind, text = "dtype", f"torch cannot convert {stored.dtype} in the checkpoint to {dtype} in the state"
    elif shares_elements(tensor):
        text = "elements of the state's tensor share memory (it is expanded, or a sliding window); give it a copy"
    elif not has_all_memory(tensor):
        text = "the memory of the state's tensor has been freed; load where it has memory again"
    return Problem(kind or "conflict", fqn, f"{fqn}: {text}") if text else None


def _can_convert(stored: StoredTensor, wanted: str) -> bool:
    if stored.dtype == MXFP4:
        return bool(names_beside(stored, wanted, ()))
    try:
        source = torch.empty(1, dtype=torch_dtype(stored.dtype), device="cpu")
        torch.empty(1, dtype=torch_dtype(wanted), device="cpu").copy_(source)
    except (RuntimeError, NotImplementedError):  # there is no other way to ask
        return False
    return True


def match_again(entries: Collection[Entry], stored: CheckpointView, before: Match, *, cast: bool) -> Match:
    """Matches a state again, after it was given the memory that it lacked.

    Raises CheckpointMismatchError (conflict) if a tensor still has none, or cannot be filled now.
    """
    match = match_state(entries, stored, cast=cast)
    targets = TargetShards.of(match.shards)
    fqns = sorted({targets.fqns[number] for number in targets.without_address if targets.tensors[number].is_meta})
    if fqns:
        raise CheckpointMismatchError(
            f"{len(fqns)} tensors of the state are on the meta device and belong to no module that could be given "
            f"memory: {and_more(fqns, _NUM_SHOWN)}; make them real and load again",
            kind="conflict",
        )
    known = {(problem.kind, problem.fqn) for problem in before.problems}
    new = [problem.text for problem in match.problems if (problem.kind, problem.fqn) not in known]
    if new:
        raise CheckpointMismatchError(
            f"{len(new)} tensors of the state cannot be loaded into the memory that they were given:\n"
            + and_more(new, _NUM_SHOWN, "\n"),
            kind="conflict",
        )
    return match
