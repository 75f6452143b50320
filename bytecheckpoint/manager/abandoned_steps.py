"""The steps of branches that training left when it went back to an earlier step, and the steps on no such branch; also
those of a second root, which has copies of steps that the first one has deleted.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import RootObject, root_object
from bytecheckpoint.storage.store import Store, one_block, read_whole

BRANCH_NAME = "manager/branch.json"
MAX_RECORD_BYTES = 1 << 25
"""Limit of an object. A record has the metrics of a manifest again, which take up to six times the bytes as JSON."""
_IN_FLIGHT = 16
_MAX_STARTS = 1000
"""Starts of branches that are remembered, of which each restart of a run makes one."""
_PREFIX_CHARACTERS = 8
_DAMAGED = "damaged"
"""Stands for the save id of a checkpoint whose manifest is damaged."""


class BranchStart(msgspec.Struct, frozen=True):
    """The checkpoint from which training went on."""

    step: int
    save_id: str

    def abandons(self, step: int, save_id: str) -> bool:
        """Returns True if an existing checkpoint becomes abandoned when training goes on from here: one of a later
        step, or another one of the same step.
        """
        return step > self.step or (step == self.step and save_id != self.save_id)


class Branch(msgspec.Struct, frozen=True):
    """The branch that training is on."""

    abandoned: dict[int, str] = {}
    """By step, the save ids of the steps that training left behind when it went back to an earlier one."""
    starts: dict[str, BranchStart] = {}
    """The starts of this branch and of those before it, the newest last. A name begins with the prefix of the save ids
    that follow. The record of a second root has those of all runs that its `abandoned` takes into account."""


def read_branch(store: Store) -> Branch:
    """Returns the branch that training is on, an empty one if the root has no record of it. Raises
    CheckpointCorruptError (bad_manifest) if the record is damaged; UnsafeCheckpointError if it is too long
    (limits_exceeded), or a link out of the root (path_escape).
    """
    try:
        return msgspec.json.decode(read_whole(store, BRANCH_NAME, max_bytes=MAX_RECORD_BYTES), type=Branch)
    except CheckpointNotFoundError:
        return Branch()
    except UnsafeCheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        # Without the record, steps that were left would be restored, and good ones deleted.
        raise CheckpointCorruptError(
            f"{join_name(str(store), BRANCH_NAME)}, which lists the steps that training left when it went back to an "
            f"earlier one, is damaged ({error}); no step was restored or deleted: delete the steps of that list that "
            "are still there (`bcp ls` shows when each was saved), then this file",
            kind="bad_manifest",
            path=str(store),
        ) from error


def present_abandoned(store: Store, branch: Branch | None = None) -> dict[int, str]:
    """Returns the save ids of the abandoned steps by step, without steps that were deleted or replaced since. `branch`
    is as for `newest_steps`.
    """
    abandoned_ids = (read_branch(store) if branch is None else branch).abandoned
    found = save_ids_of(store, list(abandoned_ids))
    return {step: save_id for step, save_id in abandoned_ids.items() if found.get(step) == save_id}


def begin_branch(store: Store, start: BranchStart, *, prefix: str, has_memory: bool) -> Branch:
    """Returns the branch that begins at `start`, and writes nothing; `prefix` begins the save ids of this manager.

    Abandoned are the later steps, and those that were abandoned before and still exist. The step of `start` itself is
    among them only if memory may hold it alone (`has_memory`), and storage has another checkpoint of that step.
    """
    step, known = start.step, read_branch(store)
    later = list(itertools.takewhile(lambda newer: newer > step, layout.newest_steps(store)))
    abandoned = present_abandoned(store, known) | save_ids_of(store, [*later, step] if has_memory else later)
    own_id = start.save_id if has_memory else abandoned.get(step)
    left = {number: save_id for number, save_id in abandoned.items() if (number, save_id) != (step, own_id)}
    earlier = list(known.starts.items())[1 - _MAX_STARTS :]
    return Branch(left, dict([*earlier, (f"{prefix}-{secrets.token_hex(4)}", start)]))


def save_ids_of(store: Store, steps: Sequence[int]) -> dict[int, str]:
    """Returns by step the save ids of those of `steps` that are committed; for a damaged manifest, `damaged`."""
    found = map_jobs(lambda step: _save_id_or_damaged(store, step), steps, num_threads=_IN_FLIGHT)
    return {step: save_id for step, save_id in zip(steps, found, strict=True) if save_id}


def _save_id_or_damaged(store: Store, step: int) -> str:
    try:
        return layout.committed_save_id(store, layout.step_folder(step))
    except (CheckpointCorruptError, UnsafeCheckpointError):
        return _DAMAGED


def newest_steps(store: Store, branch: Branch | None = None) -> Iterator[int]:
    """Yields the committed steps that are not abandoned, newest first. Costs one listing of the root, a look for the
    manifest of each step, and a read of the manifest only for steps that `branch` has as abandoned; None reads it with
    `read_branch`.
    """
    abandoned_ids = (read_branch(store) if branch is None else branch).abandoned
    for step in layout.newest_steps(store):
        # Without a save id it has been deleted since the look.
        if step not in abandoned_ids or _save_id_or_damaged(store, step) not in {"", abandoned_ids[step]}:
            yield step


def branch_of_copies(source: Branch, known: Branch, copies: Mapping[int, str], *, kept: Mapping[int, str]) -> Branch:
    """Returns the new branch of a second root: `source` is the branch of the first root, `known` that of the second
    until now. `copies` are the save ids in the second root by step, `kept` those of the steps of the first root that
    are not abandoned.

    The first root may have deleted abandoned steps whose copies stay. A copy is therefore abandoned too if it was in
    `known`, or if a start that is not in `known` abandons it: this is called before each copy is made, so that all
    copies are older than such a start. No start abandons copies of other runs, whose save ids have other prefixes.
    """
    starts = source.starts.values()
    save_ids = [*kept.values(), *source.abandoned.values(), *(start.save_id for start in starts), *source.starts]
    prefixes = {save_id[:_PREFIX_CHARACTERS] for save_id in save_ids}
    new = [start for name, start in source.starts.items() if name not in known.starts]

    def is_left(step: int, save_id: str) -> bool:
        is_newly_left = save_id[:_PREFIX_CHARACTERS] in prefixes and any(start.abandons(step, save_id) for start in new)
        return kept.get(step) != save_id and (is_newly_left or known.abandoned.get(step) == save_id)

    left = {step: save_id for step, save_id in copies.items() if is_left(step, save_id)}
    # Of other runs too: one that comes back would take its starts for new.
    of_others = {name: start for name, start in known.starts.items() if name not in source.starts}
    return Branch({**source.abandoned, **left}, dict([*of_others.items(), *source.starts.items()][-_MAX_STARTS:]))


def write_branch(store: Store, branch: Branch) -> None:
    store.write(BRANCH_NAME, one_block(msgspec.json.encode(branch)), replace=True)


def unwritten_branch(store: Store, branch: Branch | None) -> list[RootObject]:
    """Returns what `write_branch` would write, for a recovery that commits the save; nothing for None."""
    return [] if branch is None else [root_object(store, BRANCH_NAME, msgspec.json.encode(branch))]
