"""The choice of the step to restore, and the notes that lie in the store while a restore is under way: a step whose
restore never ended several times is passed over. Knows no ranks.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Literal

import msgspec

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StorageError,
    and_more,
)
from bytecheckpoint.info import LoadReport
from bytecheckpoint.storage.inventory import refuse_beginning_anew
from bytecheckpoint.storage.layout import checked_step, find_checkpoint
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, one_block

logger = logging.getLogger("bytecheckpoint")

RESTORES_FOLDER = "manager/restores"
MAX_RESTORES = 3
"""Restores in a row that never ended, after which a step is passed over."""

_OF_MANAGER = ("framework", "process_group", "role")
_ENDED = ".ended"
"""Suffix of the name of a note that a restore has ended; written if the note that it began cannot be deleted."""
_NOTE = re.compile(rf"([0-9]{{8,}})-[0-9a-f]{{8}}\.json(?:{re.escape(_ENDED)})?")
"""Name of a note, which begins with the step."""


class RestoreChoice(msgspec.Struct, frozen=True):
    """The choice of rank 0."""

    step: int | None
    """None for a fresh start."""
    passed_over: dict[int, str]
    """Steps that were passed over because their restores never ended, each with the reason."""


def choose_step(
    store: Store, step: int | Literal["latest"], candidates: Iterable[int], *, failed: Mapping[int, str]
) -> RestoreChoice:
    """Returns the step to restore. `candidates` are the steps that are not abandoned, newest first; `failed` are those
    that did not load, or were passed over, earlier in this call of `restore`, each with the reason.

    The choice has no step if the store has no checkpoint. Raises CheckpointNotFoundError if a given step is not there,
    or if every candidate failed or was passed over; CheckpointMismatchError (conflict) if `step` is no step number, or
    if there are checkpoints but no candidates: all are abandoned, or the root itself is a checkpoint.
    """
    if not is_latest(step):
        given = given_step(step, takes='restore takes "latest" or the number of a step')
        find_checkpoint(store, given, location=str(store))
        return RestoreChoice(given, {})
    open_restores = count_open_restores(store)
    passed_over: dict[int, str] = {}
    for candidate in candidates:
        if candidate in failed:
            continue
        if open_restores.get(candidate, 0) < MAX_RESTORES:
            return RestoreChoice(candidate, passed_over)
        passed_over[candidate] = f"{open_restores[candidate]} restores of it in a row never ended"
    if not passed_over and not failed:
        refuse_beginning_anew(store)
        return RestoreChoice(None, {})
    named = "; ".join(f"step {number}: {why}" for number, why in {**failed, **passed_over}.items())
    raise CheckpointNotFoundError(
        f"no checkpoint in {store} can be restored: {named}. Nothing was deleted, and training does not begin anew "
        f"by itself: restore one with step=..., or delete {join_name(str(store), RESTORES_FOLDER)} to try again",
        kind="not_found",
        path=str(store),
    )


def log_fresh_start(store: Store) -> None:
    """Logs that training begins at step 0: as a warning if the root has steps that other programs have saved."""
    from bytecheckpoint.formats.unfinished import step_folders  # noqa: PLC0415 - few runs need readers of other formats

    with suppress(CheckpointError):  # one rank calls this
        if names := step_folders(store.list("")):
            logger.warning(
                "%s has no checkpoint that restore goes on from, and training starts at step 0; the folders %s may be "
                "steps of another program: to go on from one, pass its path as restore(initial=...)",
                store,
                and_more(names, 4),
            )
            return
    logger.info("%s has no checkpoint: training starts at step 0", store)


def check_load_arguments(as_load: Mapping[str, object], *, initial: object, storage_options: object) -> None:
    """Raises TypeError, which says where they belong, for arguments of `load` that a manager has from its creation, and
    for `storage_options` without `initial`.
    """
    if own := [name for name in _OF_MANAGER if name in as_load]:
        raise TypeError(
            f"restore takes no {own[0]}: it is that of the manager, which takes {own[0]}= when it is made; nothing was "
            "loaded"
        )
    if storage_options is not None and initial is None:
        raise TypeError(
            "storage_options of restore are those of initial, which was not given; nothing was loaded: those of the "
            "root go to CheckpointManager(storage_options=...)"
        )


def is_latest(step: object) -> bool:
    return isinstance(step, str) and step == "latest"


def given_step(step: object, *, takes: str = "the manager takes the number of a step") -> int:
    """Returns a step as a plain int; numpy's integers are accepted. `takes` begins the message of the error.

    Raises CheckpointMismatchError (conflict), a ValueError, for anything else than an integer from 0 to 2^63 - 1.
    """
    try:
        checked = checked_step(step)
    except CheckpointMismatchError:
        checked = None
    if checked is None:
        raise CheckpointMismatchError(
            f"{takes}, an integer from 0 to 2^63 - 1, and not {step!r:.100}; nothing was changed", kind="conflict"
        )
    return checked


def count_open_restores(store: Store) -> dict[int, int]:
    """Returns, by step, the number of restores of which the store has a note that they began, and none of their end."""
    return Counter(_open_notes(store).values())


def note_restore(store: Store, step: int, *, time: float) -> None:
    """Writes a note to the store that a restore of the step begins."""
    name = f"{RESTORES_FOLDER}/{step:08d}-{secrets.token_hex(4)}.json"
    store.write(name, one_block(msgspec.json.encode({"version": 1, "step": step, "time": time})), replace=False)


def forget_restores(store: Store, step: int | None) -> None:
    """Deletes the notes of all restores of a step, or of all steps for None."""
    for name, number in _notes(store).items():
        if step is None or number == step:
            store.delete(join_name(RESTORES_FOLDER, name))


def try_to_forget_restores(store: Store, step: int) -> None:
    """Deletes the notes of all restores of a step. Where the store does not permit that, writes notes of their end. An
    error is logged, not raised: the first commit of a manager deletes all notes.
    """
    try:
        try:
            forget_restores(store, step)
        except StorageError as error:
            if error.kind != "permission":
                raise
            _note_ends(store, step)
    except CheckpointError as error:
        logger.warning("the note that step %d was restored cannot be written yet, and is tried again: %s", step, error)


def _note_ends(store: Store, step: int) -> None:
    for name, number in _open_notes(store).items():
        if number == step:
            store.write(join_name(RESTORES_FOLDER, f"{name}{_ENDED}"), one_block(b"\n"), replace=False)


def _open_notes(store: Store) -> dict[str, int]:
    """Returns the names of the notes of restores that have not ended, each with its step."""
    notes = _notes(store)
    return {name: step for name, step in notes.items() if not name.endswith(_ENDED) and f"{name}{_ENDED}" not in notes}


def _notes(store: Store) -> dict[str, int]:
    """Returns the names of all notes, each with its step. Other objects may lie beside them."""
    found = ((name, _NOTE.fullmatch(name)) for name in store.list(RESTORES_FOLDER))
    return {name: int(match[1]) for name, match in found if match}


def raise_unless_older_may_load(error: CheckpointError, step: int | Literal["latest"], *, may_walk_back: bool) -> None:
    """Raises the error of a load, unless the newest step was asked for, the error is about damage of its bytes, and
    `may_walk_back` lets the caller load the step before.
    """
    if not (is_latest(step) and is_damage(error)):
        raise error
    if not may_walk_back:
        what = f"{error.message}. ManagerOptions(walk_back=True) restores the newest step before it that loads"
        raise type(error)(what, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks) from error


def warn_of_ignored(report: LoadReport, *, rank: int) -> None:
    """Warns, on rank 0, of what the checkpoint has and the state does not: the next save would not have it either."""
    if report.ignored and rank == 0:
        logger.warning(
            "step %s also has %s, which the state does not: not restored, and no save of this state will have it. Add "
            "it to the state to go on with it, or pass exclude= to leave it out without this warning",
            report.step,
            and_more(list(map(repr, report.ignored)), 10),
        )


def is_damage(error: CheckpointError) -> bool:
    """Returns True if the error is about the bytes of the checkpoint, so that an older one may load."""
    is_corrupt = isinstance(error, CheckpointCorruptError) and error.kind != "unsupported_version"
    return is_corrupt or error.kind == "missing_file"
