"""Compares a state with a checkpoint on one rank, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, is_at_or_below
from bytecheckpoint.adapters.collect import Entry
from bytecheckpoint.adapters.expectation import Problem, not_stored
from bytecheckpoint.adapters.shards import LocalShard, has_all_memory, shares_elements, torch_dtype
from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.memory.overlap import find_shared
from bytecheckpoint.memory.proc_maps import are_read_only

_NUM_SHOWN = 10
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Match(NamedTuple):
    """The shards that this rank loads, and the problems."""

    shards: list[LocalShard]
    stored_fqns: list[str]
    """The stored tensor that fills each shard."""
    problems: list[Problem]
    claims: set[str]
    """Every state FQN that this rank has a place for."""
    cast: set[str]
    """State FQNs that are loaded into another dtype."""
    skipped: set[str]
    """State FQNs that include or exclude keep from being loaded."""
    padding: list[torch.Tensor]
    """Memory of loaded tensors beyond the elements that the checkpoint has."""

    def zero_padding(self) -> None:
        with torch.no_grad():
            for memory in self.padding:
                memory.zero_()

    def count_changes(self) -> None:
        """Raises the version counters of the filled tensors, so that a backward pass over the old values fails as after
        any other change in place: bytes are put there behind torch's back.
        """
        changed = [shard.tensor for shard in self.shards]
        changed += [shard.owner for shard in self.shards if shard.owner is not None]
        with suppress(TypeError, RuntimeError):  # not every torch that is supported takes many, or knows the latter
            increment_version(changed)
            return
        for tensor in changed:
            if not tensor.is_inference():  # which has no counter
                increment_version(tensor)


def match_state(entries: Collection[Entry], stored: CheckpointView, *, cast: bool) -> Match:
    """Compares a state with a checkpoint. A shard that does not fit is among the problems and not among the shards."""
    match = Match([], [], [], set(), set(), set(), [])
    names = {entry.fqn for entry in entries}
    match.skipped.update(fqn for fqn in stored.skipped if is_at_or_below(fqn, names))
    padding: list[LocalShard] = []
    for entry in entries:
        expectation = entry.expect(stored)
        padding += expectation.padding
        match.problems.extend(problem for problem in expectation.problems if not stored.skips(problem.fqn))
        match.claims.update(expectation.claims)
        _match_shards(match, expectation.shards, stored, cast=cast)
        # Filled alone, a copy would differ from the original, and the next step would overwrite it.
        copies = _not_refused(match, expectation.copies)
        _match_shards(match._replace(cast=set()), copies, stored, cast=True)
    _leave_out_shared(match)
    _leave_out_read_only(match)
    match.padding.extend(shard.tensor for shard in _not_refused(match, padding))
    return match


def _match_shards(match: Match, shards: Sequence[LocalShard], stored: CheckpointView, *, cast: bool) -> None:
    """Adds the stored tensors that fill these shards, or the problems."""
    tensors = stored.tensors
    if shards and _fit_as_they_are(shards, tensors):
        match.shards.extend(shards)
        fqns = [shard.fqn for shard in shards]
        match.stored_fqns.extend([tensors[fqn].fqn for fqn in fqns])
        match.claims.update(fqns)
        return
    for shard in shards:
        fqn = shard.fqn
        match.claims.add(fqn)
        found = tensors.get(fqn) or stored.of_other_ranks.get(fqn)
        if found is None and stored.skips(fqn):
            match.skipped.add(fqn)
            continue
        if found is None:
            is_plain = fqn in stored.plain
            text = f"{fqn}: plain data in the checkpoint, a tensor in the state"
            match.problems.append(Problem("missing_key", fqn, text) if is_plain else not_stored(fqn))
            continue
        problem = _problem(shard, found, cast=cast)
        if problem is not None:
            match.problems.append(problem)
            continue
        match.shards.append(shard)
        match.stored_fqns.append(found.fqn)
        if found.dtype != shard.dtype:
            match.cast.add(fqn)


def _fit_as_they_are(shards: Sequence[LocalShard], tensors: Mapping[str, StoredTensor]) -> bool:
    """Returns True if all can be filled without another look: mostly so, and 100,000 are compared in a few calls."""
    fqns, dtypes, shapes, _, _, addresses, _ = zip(*shards, strict=True)
    found = list(map(tensors.get, fqns))
    if not all(addresses) or None in found:
        return False
    return [*map(_DTYPE, found)] == [*dtypes] and [*map(_SHAPE, found)] == [*shapes]


def _not_refused(match: Match, shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Returns the shards of tensors that have no problem so far."""
    refused = {problem.fqn for problem in match.problems} if shards else set()
    return [shard for shard in shards if shard.fqn not in refused]


def _leave_out_shared(match: Match) -> None:
    """Fills memory once: tied tensors, and views of a part, take the value of the tensor that contains them. One that
    only overlaps with another would hold a mixture, and could not be verified.
    """
    shared = find_shared(match.shards)
    for first, second in shared.clashing:
        fqn = match.shards[second].fqn
        text = (
            f"{fqn}: shares memory with {match.shards[first].fqn} in the state, in part or in another dtype, and they "
            "are different tensors in the checkpoint; give each memory of its own, or leave one out"
        )
        match.problems.append(Problem("conflict", fqn, text))
    for second in sorted((second for _, second in shared.within + shared.clashing), reverse=True):
        del match.shards[second], match.stored_fqns[second]


def _leave_out_read_only(match: Match) -> None:
    """Leaves out tensors whose memory is read only, as that of a mapped file: a write would kill the process."""
    addresses = [shard.address or (shard.tensor.data_ptr() if shard.tensor.is_cpu else 0) for shard in match.shards]
    for number in np.flatnonzero(are_read_only(np.array(addresses, np.uint64))).tolist()[::-1]:
        fqn = match.shards[number].fqn
        text = (
            f"{fqn}: the memory of the state's tensor is read only, as that of a file that is mapped so; give it a copy"
        )
        match.problems.append(Problem("conflict", fqn, text))
        del match.shards[number], match.stored_fqns[number]


def _problem(shard: LocalShard, found: StoredTensor, *, cast: bool) -> Problem | None:
    """Returns why the shard cannot be filled from the stored tensor, if so."""
    fqn, dtype, shape, _, tensor, address, _ = shard
    if address and found.shape == shape and found.dtype == dtype:  # most of a state
        return None
    kind = text = ""
    if found.shape != shape:
        kind, text = "shape", f"shape {list(found.shape)} in the checkpoint, {list(shape)} in the state"
    elif found.dtype != dtype and not cast:
        kind, text = "dtype", f"dtype {found.dtype} in the checkpoint, {dtype} in the state (cast=True converts)"
    elif found.dtype != dtype and not _can_convert(found.dtype, dtype):
        kind, text = "dtype", f"torch cannot convert {found.dtype} in the checkpoint to {dtype} in the state"
    elif shares_elements(tensor):
        text = "elements of the state's tensor share memory (it is expanded, or a sliding window); give it a copy"
    elif not has_all_memory(tensor):
        text = "the memory of the state's tensor has been freed; load where it has memory again"
    return Problem(kind or "conflict", fqn, f"{fqn}: {text}") if text else None


def _can_convert(stored: str, wanted: str) -> bool:
    try:
        source = torch.empty(1, dtype=torch_dtype(stored), device="cpu")
        torch.empty(1, dtype=torch_dtype(wanted), device="cpu").copy_(source)
    except (RuntimeError, NotImplementedError):  # there is no other way to ask
        return False
    return True


def match_again(entries: Collection[Entry], stored: CheckpointView, before: Match, *, cast: bool) -> Match:
    """Matches a state again that was given the memory that it lacked.

    Raises CheckpointMismatchError (conflict) if a tensor still has none, or cannot be filled now.
    """
    match = match_state(entries, stored, cast=cast)
    fqns = sorted({shard.fqn for shard in match.shards if shard.tensor.is_meta})
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
