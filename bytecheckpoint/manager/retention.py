"""Retention: which checkpoints of a root go, why each other one stays, and their deletion. `decide` returns a value and
knows no store. A deletion writes a journal first, so that the next process finishes what a crash has left.

Only files that a save of this library wrote are deleted, and the small objects beside its manifest.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.keep_policies import Best, KeepPolicy, kept_by, parts_of
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER, PIN_NAME, side_objects, written_files
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import RemoteStore, Store, SupportsDeleteMany, one_block, read_whole

logger = logging.getLogger("bytecheckpoint")

JOURNAL_FOLDER = "manager/deleting"

PINNED = "pinned"
REPLACED = "replaced meanwhile"
"""Reasons why a checkpoint stays; the second one is that its folder has another checkpoint now."""

_NUM_THREADS = 4
_OBJECTS_PER_S = 500
_OBJECTS_PER_REQUEST = 250
_MAX_JOURNAL_BYTES = 2 * layout.MAX_MANIFEST_BYTES
_NO_POLICY = "no policy keeps it"
_OWN_FOLDERS = f"{layout.DATA_FOLDER}|{layout.TELEMETRY_FOLDER}|{METRICS_FOLDER}"


class StepDecision(NamedTuple):
    """The decision about one step."""

    step: int
    is_kept: bool
    why: str
    """Everything that keeps it: `newest, Latest(3)`; or `no policy keeps it`."""


class DeletionJournal(msgspec.Struct, frozen=True):
    """A deletion that has begun."""

    folder: str
    save_id: str
    names: list[str]
    """Objects to delete after the manifest, inside the folder."""
    manifest: bytes = b""
    """The manifest, which comes back if the checkpoint was pinned or leased just before it went; empty for a forced
    deletion, which neither stops."""


def decide(
    policy: KeepPolicy, saved: Sequence[StepInfo], *, num_abandoned: int, now: float, held: Mapping[int, str]
) -> list[StepDecision]:
    """Returns a decision for each committed step, in their order: oldest first, the abandoned ones before all others.

    A policy cannot delete the newest one, a pinned one, or one that is `held` for a reason, such as a lease. `Best`
    keeps the best of all steps, and those of the steps that are not abandoned.
    Raises ValueError if a policy of a user does not answer for every step, and what that policy raises.
    """
    reasons: list[list[str]] = [[] for _ in saved]
    for position, info in enumerate(saved):
        if position == len(saved) - 1:
            reasons[position].append("newest")
        if info.pinned:
            reasons[position].append(PINNED)
        if info.step in held:
            reasons[position].append(held[info.step])
    for part in parts_of(policy):
        kept = kept_by(part, saved, now)
        if isinstance(part, Best):
            later = [False] * num_abandoned + kept_by(part, saved[num_abandoned:], now)
            kept = [of_all or of_branch for of_all, of_branch in zip(kept, later, strict=True)]
        for position, is_kept in enumerate(kept):
            if is_kept:
                reasons[position].append(repr(part))
    return [
        StepDecision(info.step, bool(why), ", ".join(why) or _NO_POLICY)
        for info, why in zip(saved, reasons, strict=True)
    ]


def held_by_leases(steps: Sequence[StoredStep], *, now: float) -> dict[int, str]:
    """Returns the steps with a lease that has not ended, each with the reason for `decide`."""
    return {step.info.step: _lease_text(step.leased_until) for step in steps if step.leased_until > now}


def _lease_text(until: float) -> str:
    return f"leased until {datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _warn_of_damaged(step: int, error: CheckpointError) -> None:
    logger.warning("step %d is not deleted, because its manifest cannot be read: %s", step, error.message)


class DeletionPace:
    """Limits the number of objects deleted per second, and lets deletions pause. For one deletion at a time."""

    def __init__(self, before_request: Callable[[], object] = lambda: None) -> None:
        """`before_request` is called before each request of a deletion, and may wait."""
        self._before_request = before_request
        self._next_s = time.monotonic()

    def wait(self, num_objects: int) -> None:
        """Waits until the next request may begin, which deletes this number of objects."""
        pause_s = self._next_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        self._before_request()
        self._next_s = max(self._next_s, time.monotonic()) + num_objects / _OBJECTS_PER_S


def delete_steps(
    store: Store,
    steps: Sequence[StepInfo],
    *,
    now: float,
    pace: DeletionPace | None = None,
    on_damaged: Callable[[int, CheckpointError], object] = _warn_of_damaged,
) -> dict[int, str]:
    """Deletes committed steps, one after the other; returns those that stay, each with the reason: pinned, leased or
    replaced since the decision, or damaged. `on_damaged` is called for a step whose manifest cannot be read: which
    files are its own is not known.

    Raises what the store raises. A deletion that had begun is then finished by `finish_deletions`.
    """
    stay = {}
    pace = pace or DeletionPace()
    for info in steps:
        folder = layout.step_folder(info.step)
        try:
            why = delete_one(store, folder, save_id=info.save_id, now=now, force=False, pace=pace)
        except (CheckpointCorruptError, UnsafeCheckpointError) as error:
            on_damaged(info.step, error)
            why = "damaged"
        if why:
            stay[info.step] = why
    return stay


def delete_one(
    store: Store, folder: str, *, save_id: str, now: float, force: bool, pace: DeletionPace | None = None
) -> str:
    """Deletes the checkpoint with this save id: its journal is written, then the manifest goes, then all else that its
    save and this library wrote, last the journal. Returns the reason if it stays, else an empty text; `force` deletes
    in spite of a pin and leases. If there is no manifest, finishes all deletions that have begun in the store.

    Raises what the store raises, and for a manifest that cannot be read CheckpointCorruptError or
    UnsafeCheckpointError.
    """
    try:
        content = layout.read_manifest_bytes(store, folder)
    except CheckpointNotFoundError:
        finish_deletions(store, now=now, pace=pace)  # left by an attempt that failed after the manifest was gone
        is_back = layout.committed_save_id(store, folder) == save_id
        return protection_of(store, folder, now=now) if is_back else ""
    if not force and (why := protection_of(store, folder, now=now)):
        return why
    path = join_name(str(store), folder, layout.MANIFEST_NAME)
    manifest = layout.parse_manifest(content, path=path, check_all=True)
    if manifest.save_id != save_id:
        return REPLACED
    names = [*written_files(store, folder, manifest), *side_objects(store, folder)]
    journal = DeletionJournal(folder, save_id, [*names, PIN_NAME] if force else names, b"" if force else content)
    name = f"{JOURNAL_FOLDER}/{folder or 'root'}-{save_id}.json"
    _write_journal(store, name, journal)
    store.delete(join_name(folder, layout.MANIFEST_NAME))
    # Hazard: a pin or a lease that was written until now has told its caller that the checkpoint stays.
    if not force and (why := protection_of(store, folder, now=now)):
        layout.commit(store, folder, content, replace=False)
        store.delete(name)
        return why
    _delete_all(store, folder, journal.names, pace or DeletionPace())
    store.delete(name)
    return ""


def _write_journal(store: Store, name: str, journal: DeletionJournal) -> None:
    """Writes the journal, unless there is no space: the deletion makes some, and what it leaves if it is interrupted is
    garbage, which `bcp gc` finds.
    """
    try:
        with suppress(CheckpointExistsError):  # left by an attempt that failed before the manifest was gone
            store.write(name, one_block(msgspec.json.encode(journal)), replace=False)
    except CheckpointSaveError as error:
        if error.kind != "no_space":
            raise


def protection_of(store: Store, folder: str, *, now: float) -> str:
    """Returns the reason why no policy may delete a checkpoint, and no save replace it: a pin, or a lease that has not
    ended; empty if there is none.
    """
    listing = store.list(folder)
    if PIN_NAME in listing:
        return PINNED
    until = step_records.leased_until(store, folder) if LEASES_FOLDER in listing else 0.0
    return _lease_text(until) if until > now else ""


def finish_deletions(store: Store, *, now: float, pace: DeletionPace | None = None) -> int:
    """Finishes the deletions that have begun and were interrupted; returns how many checkpoints it deleted.

    A checkpoint whose manifest is still there stays: its journal is deleted, and the policy decides again. One that is
    pinned or leased, and whole but for its manifest, gets the manifest back. One whose manifest cannot be read stays
    with its journal, and is named in a warning. Raises what the store raises.
    """
    num_finished = 0
    pace = pace or DeletionPace()
    for last in sorted(store.list(JOURNAL_FOLDER)):
        name = join_name(JOURNAL_FOLDER, last)
        journal = _read_journal(store, name)
        if journal is None:
            continue
        try:
            committed = layout.committed_save_id(store, journal.folder)
        except (CheckpointCorruptError, UnsafeCheckpointError) as error:
            logger.warning("a deletion in %s is not finished: %s", store, error.message)
            continue
        if committed != journal.save_id and not (not committed and _bring_back(store, journal, now=now)):
            _delete_all(store, journal.folder, _names_to_finish(journal, is_replaced=bool(committed)), pace)
            num_finished += 1
        store.delete(name)
    return num_finished


def _bring_back(store: Store, journal: DeletionJournal, *, now: float) -> bool:
    """Commits a pinned or leased checkpoint again if all its files are there; else returns False: it is to be deleted.
    If files are missing, it was not pinned or leased when they were deleted; a later pin or lease raises an error.
    """
    if not journal.manifest or not (why := protection_of(store, journal.folder, now=now)):
        return False
    path = join_name(str(store), journal.folder)
    try:
        manifest = layout.parse_manifest(journal.manifest, path=path, check_all=True)
        own = [number for number, file in enumerate(manifest.files) if file.name in journal.names]
        layout.check_files(store, journal.folder, manifest, own)
    except (CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError):
        return False
    if manifest.save_id != journal.save_id:
        return False
    layout.commit(store, journal.folder, journal.manifest, replace=False)
    logger.info("%s is %s, so its interrupted deletion is undone", path, why)
    return True


def _names_to_finish(journal: DeletionJournal, *, is_replaced: bool) -> list[str]:
    # Hazard: these are deleted, and may stand beside files of others, and of a checkpoint that was saved there since.
    # The save id in a name says whose it is. A lease and a pin have none: they are the newer checkpoint's.
    own = re.compile(rf"(?:{_OWN_FOLDERS})/{re.escape(journal.save_id)}[-.][^/]+")
    beside = re.compile(rf"{re.escape(PIN_NAME)}|{LEASES_FOLDER}/[0-9]+-[0-9a-f]+")
    return [name for name in journal.names if own.fullmatch(name) or (not is_replaced and beside.fullmatch(name))]


def _read_journal(store: Store, name: str) -> DeletionJournal | None:
    """Returns a journal; None if it is gone or damaged, or if its folder or save id cannot be those of a checkpoint."""
    try:
        journal = msgspec.json.decode(read_whole(store, name, max_bytes=_MAX_JOURNAL_BYTES), type=DeletionJournal)
    except CheckpointNotFoundError:
        return None  # finished by another process
    except (msgspec.DecodeError, RecursionError) as error:
        logger.warning("%s is damaged (%s) and counts as absent", join_name(str(store), name), error)
        return None
    is_possible = journal.save_id and (not journal.folder or layout.parse_step(journal.folder) is not None)
    return journal if is_possible else None


def _delete_all(store: Store, folder: str, names: Sequence[str], pace: DeletionPace) -> None:
    """Deletes objects, many with one request if the store is remote and can, and a bounded number per second: a store
    that limits requests must not slow down a save. Before each request, `pace` may wait for a save in flight.
    """
    paths = [join_name(folder, name) for name in names]
    if isinstance(store, SupportsDeleteMany) and isinstance(store, RemoteStore):
        for start in range(0, len(paths), _OBJECTS_PER_REQUEST):
            request = paths[start : start + _OBJECTS_PER_REQUEST]
            pace.wait(len(request))
            store.delete_many(request)
        return

    def paced() -> Iterator[str]:  # taken by one thread at a time
        for path in paths:
            pace.wait(1)
            yield path

    run_jobs(store.delete, paced(), num_threads=min(len(paths), _NUM_THREADS))
