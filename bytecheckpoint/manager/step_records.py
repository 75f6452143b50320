"""Small objects beside a manifest: the record of its save, metrics that were reported later, a pin and leases. They are
all that a restart, another job or the command line knows about a step. Knows no policy and no torch.

A `folder` is that of a step inside a store. Times are seconds since 1970 by the clock of the storage; those taken
from a manifest are by the clock of the host that saved it.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.manager.abandoned_steps import MAX_RECORD_BYTES, Branch, read_branch, unwritten_branch
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER, PIN_NAME, save_id_of_record
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import RootObject, root_object
from bytecheckpoint.storage.store import Store, one_block, read_whole

logger = logging.getLogger("bytecheckpoint")

PINS_AHEAD_FOLDER = "manager/pins_ahead"
"""Notes of pins that were written for commits to come."""

_VERSION = 1
MAX_TIME = 250_000_000_000.0
"""The year 9892: later times have no date in Python."""
_IN_FLIGHT = 16
_ATTEMPTS = 10
"""Attempts to read the checkpoint that was found while others delete and replace steps."""
_NOT_IN_JSON = {"nan", "inf", "-inf"}

T = TypeVar("T")
Metrics = Mapping[str, float]
Choose = Callable[[Sequence[StepInfo]], Sequence[bool]]


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a save, or a report of metrics after it."""

    version: int = _VERSION
    save_id: str
    time: float
    """Time of the commit, or of the report."""
    seconds: dict[str, float] = {}
    """Seconds of the save: `stall`, `total`."""
    num_bytes: int = 0
    metrics: dict[str, float | str] = {}
    """NaN and infinities, which JSON does not have, are text."""


class StoredStep(NamedTuple):
    """A committed step as it lies in a store."""

    info: StepInfo
    has_record: bool
    """False if no record was read: the process ended between the commit and the record, had no manager, or is this one,
    which has just committed."""
    leased_until: float
    """End of the longest lease, past or not; 0.0 without one."""
    is_abandoned: bool


def checked_metrics(metrics: Mapping[Any, Any] | None) -> dict[str, float]:
    """Returns the metrics as plain floats; scalars of numpy and torch are accepted.

    Raises CheckpointMismatchError (conflict) for what is no mapping; and one that names the metric for a value that is
    no number, or a name that is no text or is empty.
    """
    checked: dict[str, float] = {}
    try:
        items = (metrics or {}).items()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # an array or tensor has no truth value
        raise CheckpointMismatchError(f"metrics are a mapping, not {metrics!r:.100}", kind="conflict") from error
    for name, value in items:
        try:
            if not isinstance(name, str) or not name or isinstance(value, str | bytes):
                raise TypeError
            checked[name] = float(value.detach() if hasattr(value, "detach") else value)  # float() of a loss warns
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises RuntimeError
            what = f"metrics are numbers by name, such as {{'val_loss': 0.25}}, not {name!r}: {value!r:.100}"
            raise CheckpointMismatchError(f"{what}; nothing was saved", kind="conflict") from error
    return checked


def write_record(store: Store, folder: str, info: StepInfo) -> None:
    """Writes the record of a committed save. A record that is there already stays, and none is left of a checkpoint
    that another program deletes meanwhile.
    """
    record = SaveRecord(
        save_id=info.save_id,
        time=info.time,
        seconds=dict(info.seconds),
        num_bytes=info.num_bytes,
        metrics=_as_json(info.metrics),
    )
    name = join_name(folder, METRICS_FOLDER, f"{info.save_id}.json")
    _write(store, name, record)
    if layout.committed_save_id(store, folder) != info.save_id:
        store.delete(name)


def report(store: Store, folder: str, metrics: Metrics, *, time: float) -> dict[str, float]:
    """Adds metrics to a committed checkpoint, and returns them as plain floats. The newest report of a metric counts.

    Raises CheckpointNotFoundError (not_committed), and what `checked_metrics` raises.
    """
    checked = checked_metrics(metrics)
    save_id = _check_committed(store, folder)
    record = SaveRecord(save_id=save_id, time=time, metrics=_as_json(checked))
    name = join_name(folder, METRICS_FOLDER, f"{save_id}-{secrets.token_hex(4)}.json")
    _write(store, name, record)
    _withdraw_if_deleted(store, folder, name)
    return checked


def pin(store: Store, folder: str, *, time: float) -> None:
    """Pins a committed checkpoint: no policy deletes it until it is unpinned.

    Raises CheckpointNotFoundError (not_committed).
    """
    _check_committed(store, folder)
    write_pin(store, folder, time=time)
    _withdraw_if_deleted(store, folder, join_name(folder, PIN_NAME))
    step = layout.parse_step(folder)
    if step is not None and (note := note_of_pin(step)).rpartition("/")[2] in store.list(PINS_AHEAD_FOLDER):
        store.delete(note)  # from now on the pin is that of the checkpoint which stands there


def note_of_pin(step: int) -> str:
    """Returns the name of the note that a step is pinned ahead of its commit."""
    return f"{PINS_AHEAD_FOLDER}/{step:08d}.json"


def write_pin(store: Store, folder: str, *, time: float) -> None:
    """Writes a pin for a checkpoint, which need not be committed."""
    _write(store, join_name(folder, PIN_NAME), _pin(time))


def _pin(time: float) -> dict[str, float]:
    return {"version": _VERSION, "time": time}


def unwritten(store: Store, branch: Branch | None, pinned: int | None, clock: Callable[[], float]) -> list[RootObject]:
    """Returns the objects that a recovery which commits the save has to write: those of the branch, and the pin of the
    step `pinned`; either may be None.
    """
    objects = unwritten_branch(store, branch)
    if pinned is not None:
        name = join_name(layout.step_folder(pinned), PIN_NAME)
        objects.append(root_object(store, name, msgspec.json.encode(_pin(clock()))))
    return objects


def unpin(store: Store, folder: str) -> None:
    """Removes the pin, if there is one."""
    store.delete(join_name(folder, PIN_NAME))


def lease(store: Store, folder: str, *, until: float) -> str:
    """Protects a committed checkpoint until a time, in seconds since 1970. Returns the name of the lease inside the
    store: deleting that object ends the lease.

    Raises CheckpointNotFoundError (not_committed).
    """
    _check_committed(store, folder)
    name = join_name(folder, LEASES_FOLDER, f"{math.ceil(until)}-{secrets.token_hex(4)}")
    store.write(name, one_block(b"\n"), replace=False)
    _withdraw_if_deleted(store, folder, name)
    return name


def leased_until(store: Store, folder: str) -> float:
    """Returns the end of the longest lease of a checkpoint, past or not; 0.0 without one."""
    ends = (name.partition("-")[0] for name in store.list(join_name(folder, LEASES_FOLDER)))
    return max((min(float(end), MAX_TIME) for end in ends if end.isdecimal()), default=0.0)


def is_pinned(store: Store, folder: str) -> bool:
    return PIN_NAME in store.list(folder)


def find_checkpoint(store: Store, choose: Choose, branch: Branch | None) -> CheckpointInfo | None:
    """Returns the checkpoint of the first step that is not abandoned, `branch` being as for `list_steps`, and for which
    `choose` returns True; None if there is none. One that is deleted or replaced meanwhile is no candidate any more.
    Raises StorageError (unavailable) if that happens `_ATTEMPTS` times in a row.
    """
    for _ in range(_ATTEMPTS):
        found = _find_step(store, choose, branch)
        if found is None:
            return None
        folder = layout.step_folder(found.step)
        with suppress(CheckpointNotFoundError):
            manifest = layout.read_manifest(store, folder)
            if manifest.save_id == found.save_id:
                info = describe_checkpoint(manifest, path=join_name(str(store), folder))
                return replace(info, metrics=found.metrics)
    raise StorageError(
        f"{_ATTEMPTS} times the checkpoint that was looked for in {store} was deleted or replaced before it was read; "
        "nothing was changed: ask again when the other programs are done",
        kind="unavailable",
        path=str(store),
    )


def _find_step(store: Store, choose: Choose, branch: Branch | None) -> StepInfo | None:
    """Returns the first chosen step. If its checkpoint was replaced after its record, reads all manifests."""
    found = _first_chosen(list_steps(store, branch=branch), choose)
    if found is not None and layout.committed_save_id(store, layout.step_folder(found.step)) != found.save_id:
        return _first_chosen(list_steps(store, branch=branch, reads_manifests=True), choose)
    return found


def _first_chosen(steps: Sequence[StoredStep], choose: Choose) -> StepInfo | None:
    infos = [step.info for step in steps if not step.is_abandoned]
    return next((info for info, is_chosen in zip(infos, choose(infos), strict=True) if is_chosen), None)


def _warn_of_damaged(step: int, error: CheckpointError) -> None:
    logger.warning("step %d is left out of the steps: %s", step, error.message)


def list_steps(
    store: Store,
    *,
    branch: Branch | None = None,
    reads_manifests: bool = False,
    on_damaged: Callable[[int, CheckpointError], object] = _warn_of_damaged,
) -> list[StoredStep]:
    """Returns the committed steps of a root, those that `branch` (None: of the root) has as abandoned before all
    others, both ascending. A step whose manifest is gone meanwhile or damaged is left out; `on_damaged` is called for a
    damaged one, on any thread.

    Without `reads_manifests`, a step with a record is read from that, not from its manifest: damage is not seen then,
    nor that a program without a manager has replaced the checkpoint.
    """
    abandoned = (read_branch(store) if branch is None else branch).abandoned

    def read(step: int) -> StoredStep | None:
        return read_step(store, step, abandoned.get(step), reads_manifest=reads_manifests, on_damaged=on_damaged)

    return ordered(filter(None, map_jobs(read, layout.steps_of_root(store), num_threads=_IN_FLIGHT)))


def ordered(steps: Iterable[StoredStep]) -> list[StoredStep]:
    """Returns the steps in the order for policies: oldest first, abandoned ones before all others."""
    return sorted(steps, key=lambda step: (not step.is_abandoned, step.info.step))


def read_step(
    store: Store,
    step: int,
    abandoned_save_id: str | None = None,
    *,
    reads_manifest: bool = False,
    on_damaged: Callable[[int, CheckpointError], object] = _warn_of_damaged,
) -> StoredStep | None:
    """Returns a committed step, marked as abandoned if its save id is `abandoned_save_id`; None if it was deleted or is
    damaged. The other arguments are those of `list_steps`.
    """
    folder = layout.step_folder(step)
    listing = store.list(folder)
    reports = _read_reports(store, folder) if METRICS_FOLDER in listing else []
    record = next((record for record in reports if _is_of_save(record)), None)
    try:
        if reads_manifest or record is None or len({report.save_id for report in reports}) > 1:
            found = _record_of(describe_checkpoint(layout.read_manifest(store, folder), path=folder))
            record = next((item for item in reports if item.save_id == found.save_id and _is_of_save(item)), None)
        else:
            found = record
    except CheckpointNotFoundError:
        return None  # deleted since it was listed
    except StorageError:
        raise  # the step may be good
    except CheckpointError as error:
        on_damaged(step, error)
        return None
    basis = record or found
    info = StepInfo(
        step,
        basis.time,
        _merge_metrics(found, reports),
        basis.seconds,
        pinned=PIN_NAME in listing,
        committed=True,
        save_id=found.save_id,
        num_bytes=basis.num_bytes,
    )
    until = leased_until(store, folder) if LEASES_FOLDER in listing else 0.0
    return StoredStep(info, record is not None, until, found.save_id == abandoned_save_id)


def metrics_of(store: Store, folder: str, info: CheckpointInfo, *, has_records: bool) -> dict[str, float]:
    """Returns the metrics of a committed checkpoint: those of its save, then those that were reported later.
    `has_records` is False if its folder is known to have no records, which saves a listing.
    """
    if not has_records and not info.metadata.get("metrics"):  # as for most steps of a root, which may have ten thousand
        return {}
    return _merge_metrics(_record_of(info), _read_reports(store, folder) if has_records else [])


def _read_reports(store: Store, folder: str) -> list[SaveRecord]:
    names = [name for name in store.list(join_name(folder, METRICS_FOLDER)) if save_id_of_record(name)]
    read = (_read(store, join_name(folder, METRICS_FOLDER, name), SaveRecord) for name in names)
    return [record for record in read if record is not None]


def _merge_metrics(found: SaveRecord, reports: Sequence[SaveRecord]) -> dict[str, float]:
    """Returns the newest value of each metric that was given for the save of `found`."""
    metrics: dict[str, float] = {}
    own = [item for item in reports if item.save_id == found.save_id]
    # Hazard: the manifest tells the time of a host, whose clock may be ahead of the storage's.
    for item in (found, *sorted(own, key=lambda item: (not _is_of_save(item), item.time))):
        metrics.update(_from_json(item.metrics))
    return metrics


def _is_of_save(record: SaveRecord) -> bool:
    """Returns True for the record of a save, False for a report of metrics after it."""
    return bool(record.num_bytes or record.seconds)


def _record_of(info: CheckpointInfo) -> SaveRecord:
    """Makes the record of a checkpoint from its manifest."""
    metrics: dict[str, float] = {}
    with suppress(ValueError):  # metadata of a program without a manager may hold anything
        metrics = checked_metrics(info.metadata.get("metrics"))
    time = info.created_at.timestamp() if info.created_at else 0.0
    return SaveRecord(save_id=info.save_id, time=time, num_bytes=info.num_bytes, metrics=_as_json(metrics))


def _check_committed(store: Store, folder: str) -> str:
    """Returns the save id of a checkpoint. Raises CheckpointNotFoundError (not_committed)."""
    save_id = layout.committed_save_id(store, folder)
    if not save_id:
        path = join_name(str(store), folder)
        raise CheckpointNotFoundError(
            f"no checkpoint is committed at {path}; nothing was changed: `bcp ls` shows the committed ones",
            kind="not_committed",
            path=path,
        )
    return save_id


def _withdraw_if_deleted(store: Store, folder: str, name: str) -> None:
    """Deletes an object and raises like `_check_committed` if the checkpoint beside it was deleted meanwhile."""
    try:
        _check_committed(store, folder)
    except CheckpointNotFoundError:
        store.delete(name)
        raise


def _as_json(metrics: Metrics) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(float(value)) for name, value in metrics.items()}


def _from_json(metrics: Mapping[str, float | str]) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if not isinstance(value, str) or value in _NOT_IN_JSON
    }


def _write(store: Store, name: str, content: object) -> None:
    with suppress(CheckpointExistsError):  # written before, by a process that did not learn of it
        store.write(name, one_block(msgspec.json.encode(content)), replace=False)


def _read(store: Store, name: str, kind: type[T]) -> T | None:
    """Returns a decoded object; None if there is none, and with a warning if it is damaged or too long. Raises
    UnsafeCheckpointError for a link out of the root (path_escape).
    """
    try:
        return msgspec.json.decode(read_whole(store, name, max_bytes=MAX_RECORD_BYTES), type=kind)
    except CheckpointNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError, UnsafeCheckpointError) as error:
        if isinstance(error, UnsafeCheckpointError) and error.kind != "limits_exceeded":
            raise
        logger.warning("%s is damaged (%s) and counts as absent", join_name(str(store), name), error)
        return None
