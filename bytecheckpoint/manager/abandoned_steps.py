"""The steps of branches that training left when it went back to an earlier step, and the steps on no such branch."""

from __future__ import annotations

import itertools
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
_DAMAGED = "damaged"
"""Stands for the save id of a checkpoint whose manifest is damaged."""


class Branch(msgspec.Struct, frozen=True):
    """Steps that training left behind when it went back to an earlier one."""

    abandoned: dict[str, str] = {}
    """Save id by step."""


def read_abandoned(store: Store) -> dict[int, str]:
    """Returns by step the save ids of the steps that training left behind when it went back to an earlier one. Raises
    CheckpointCorruptError (bad_manifest) if their record is damaged; UnsafeCheckpointError if it is too long
    (limits_exceeded), or a link out of the root (path_escape).
    """
    try:
        branch = msgspec.json.decode(read_whole(store, BRANCH_NAME, max_bytes=MAX_RECORD_BYTES), type=Branch)
        return {int(step): save_id for step, save_id in branch.abandoned.items() if step.isdecimal()}
    except CheckpointNotFoundError:
        return {}
    except UnsafeCheckpointError:
        raise
    except (
        ValueError,
        RecursionError,
    ) as error:  # without it, steps that were left would be restored, and good ones deleted
        raise CheckpointCorruptError(
            f"{join_name(str(store), BRANCH_NAME)}, which lists the steps that training left when it went back to an "
            f"earlier one, is damaged ({error}); no step was restored or deleted: delete the steps of that list that "
            "are still there (`bcp ls` shows when each was saved), then this file",
            kind="bad_manifest",
            path=str(store),
        ) from error


def present_abandoned(store: Store, abandoned: Mapping[int, str] | None = None) -> dict[int, str]:
    """Returns the save ids of the abandoned steps by step, without steps that were deleted or replaced since.
    `abandoned` is as for `newest_steps`.
    """
    abandoned_ids = read_abandoned(store) if abandoned is None else abandoned
    found = save_ids_of(store, list(abandoned_ids))
    return {step: save_id for step, save_id in abandoned_ids.items() if found.get(step) == save_id}


def steps_left_behind(store: Store, step: int, *, held: str = "") -> dict[int, str]:
    """Returns by step the save ids of all steps that are abandoned if training goes on from `step`: the later ones, and
    those that were abandoned before and still exist. `step` itself is among them only if training goes on from the save
    with the id `held`, which memory may hold alone, and storage has another one.
    """
    later = list(itertools.takewhile(lambda newer: newer > step, layout.newest_steps(store)))
    abandoned = present_abandoned(store) | save_ids_of(store, [*later, step] if held else later)
    own_id = held or abandoned.get(step)
    return {number: save_id for number, save_id in abandoned.items() if (number, save_id) != (step, own_id)}


def save_ids_of(store: Store, steps: Sequence[int]) -> dict[int, str]:
    """Returns by step the save ids of those of `steps` that are committed; for a damaged manifest, `damaged`."""
    found = map_jobs(lambda step: _save_id_or_damaged(store, step), steps, num_threads=_IN_FLIGHT)
    return {step: save_id for step, save_id in zip(steps, found, strict=True) if save_id}


def _save_id_or_damaged(store: Store, step: int) -> str:
    try:
        return layout.committed_save_id(store, layout.step_folder(step))
    except (CheckpointCorruptError, UnsafeCheckpointError):
        return _DAMAGED


def newest_steps(store: Store, abandoned: Mapping[int, str] | None = None) -> Iterator[int]:
    """Yields the committed steps that are not abandoned, newest first. Costs one listing of the root, a look for the
    manifest of each step, and a read of the manifest only for steps in `abandoned`, which has save ids by step; None
    reads them with `read_abandoned`.
    """
    abandoned_ids = read_abandoned(store) if abandoned is None else abandoned
    for step in layout.newest_steps(store):
        if step not in abandoned_ids or _save_id_or_damaged(store, step) != abandoned_ids[step]:
            yield step


def write_abandoned(store: Store, abandoned: Mapping[int, str]) -> None:
    """Writes the abandoned steps, save ids by step, and replaces all that were written before."""
    store.write(BRANCH_NAME, one_block(_encode(abandoned)), replace=True)


def unwritten_abandoned(store: Store, abandoned: Mapping[int, str] | None) -> list[RootObject]:
    """Returns what `write_abandoned` would write, for a recovery that commits the save; nothing for None."""
    return [] if abandoned is None else [root_object(store, BRANCH_NAME, _encode(abandoned))]


def _encode(abandoned: Mapping[int, str]) -> bytes:
    return msgspec.json.encode(Branch({str(step): save_id for step, save_id in abandoned.items()}))
