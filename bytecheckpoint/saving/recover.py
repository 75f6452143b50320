"""`recover`: what earlier processes have left in the local stages of the hosts, finished by all ranks together where
every part is there. What is to become of each save is decided in planner/recovery_plan.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, get_args

import msgspec
import torch.distributed as dist

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, check_same, join_ranks, together
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.info import Outcome, RecoveredSave
from bytecheckpoint.manifest import decode_manifest
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.recovery_plan import RecoveryPlan, RecoveryVerdict, StagedPart, Task, There, plan_recovery
from bytecheckpoint.saving.in_flight import IN_FLIGHT
from bytecheckpoint.saving.local_stage import upload_files
from bytecheckpoint.storage import deletion, layout, stage_folder
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.inventory import checkpoint_in_the_way
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import FoundStage, Journal, StagedFolder
from bytecheckpoint.storage.store import Block, Store, endpoint_of, full_location

logger = logging.getLogger("bytecheckpoint")


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to do, and what becomes of each save."""

    tasks: list[Task]
    verdicts: list[RecoveryVerdict]


def recover(
    path: str | os.PathLike[str],
    *,
    options: SaveOptions,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[RecoveredSave]:
    """Finishes what saves to `path`, or below it, left in the local stage when their processes died or their upload
    failed. To be called by all ranks, before the checkpoint to go on from is loaded.

    A save whose every part is on a disk that one of the ranks sees, or at the path already, is uploaded and committed;
    it does not matter which rank is on which host now, nor how many there are. One that was cut short before every
    rank's data was durable is removed. One of which parts are missing here, or damaged by the disk, is kept, and the
    report says which. What belongs to a living process is left alone.

    Args:
        path: What was given to `save`.
        options: Those of the saves: `local_stage`, and `writer_threads` and `timeout_s` for the upload.
        process_group: As for `save`.
        storage_options: As for `save`.

    Returns:
        What has become of each save, the same on every rank; oldest first, and empty where nothing was left.

    Raises:
        CheckpointMismatchError: There is no `options.local_stage`, or ranks were given different paths.
        CheckpointSaveError, StorageError: As for `save`. Nothing is lost by it: call it again.
    """
    IN_FLIGHT.wait_until_entered()
    about = Subject(showable_url(str(path)), None, is_save=True, call="recover")
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, f"looking for what saves to {about.path} left in the local stage", about=about):
        stage = _stage_of(options)
        threads, timeout_s = options.writer_threads, options.timeout_s
        store = open_store(path, storage_options=storage_options, writer_threads=threads, timeout_s=timeout_s)
        order = _agree(ranks, store, stage)

    with together(ranks, f"finishing saves to {about.path}", about=about), ExitStack() as held:
        folders = [(task, held.enter_context(_taken_over(stage, task, options))) for task in order.tasks]
        damage = _upload_all(ranks, store, folders, options)  # all data is there before any manifest
        verdicts = [_with_damage(verdict, damage) for verdict in order.verdicts]
        kept = {verdict.save_id for verdict in verdicts if verdict.outcome == "kept"}
        whole = [(task, folder) for task, folder in folders if task.save_id not in kept]
        replaced = [(task, _commit(store, task, folder)) for task, folder in whole if task.commits]
        ranks.barrier()
        for _, folder in whole:
            folder.remove()
    ranks.close()
    # After the other ranks know: there may be thousands of files.
    for task, names in replaced:
        deletion.discard(store, task.folder, names)
    if ranks.rank == COORDINATOR:
        _clean_up(store, verdicts)
    saves = [_describe(store, verdict) for verdict in verdicts]
    if ranks.rank == COORDINATOR:
        for save in saves:
            logger.info("recovery of %s (save %s): %s, %s", save.path, save.save_id, save.outcome, save.what)
    return saves


def _stage_of(options: SaveOptions) -> str:
    if options.local_stage is None:
        raise CheckpointMismatchError(
            "recover was given no local stage to look into; nothing was changed: pass the options of the saves, with "
            "local_stage",
            kind="conflict",
        )
    return os.fspath(options.local_stage)


def _agree(ranks: Ranks, store: Store, stage: str) -> _Order:
    """This rank's part of the plan that the coordinator makes of what all see."""
    found = [(folder, _folder_in(store, folder.journal)) for folder in stage_folder.scan(stage)]
    parts = [_part(stage, folder, inside) for folder, inside in found if inside is not None]

    def decide(payloads: Sequence[bytes]) -> Sequence[bytes]:
        told = [msgspec.msgpack.decode(payload, type=tuple[str, list[StagedPart]]) for payload in payloads]
        check_same("recover saves to", [target for target, _ in told], ranks.global_ranks)
        seen = [of_rank for _, of_rank in told]
        folders = {part.folder: part.step is not None for of_rank in seen for part in of_rank}
        plan = _plan(store, seen, folders)
        if _say_alive(store, plan.verdicts):
            plan = _plan(store, seen, folders)  # what a clean-up has removed until now is seen to be gone
        return [msgspec.msgpack.encode(_Order(list(tasks), list(plan.verdicts))) for tasks in plan.tasks]

    told = ranks.reduce_scatter(msgspec.msgpack.encode((full_location(store, ""), parts)), decide)
    return msgspec.msgpack.decode(told, type=_Order)


def _folder_in(store: Store, journal: Journal | None) -> str | None:
    """Where a save goes to, inside the store; None where that is elsewhere."""
    if journal is None or journal.endpoint != endpoint_of(store):
        return None
    root = str(store)
    if journal.path == root:
        return ""
    prefix = join_name(root, "x")[:-1]
    return journal.path.removeprefix(prefix) if journal.path.startswith(prefix) else None


def _part(stage: str, found: FoundStage, folder: str) -> StagedPart:
    journal = found.journal
    if journal is None:
        raise TypeError("what has no journal belongs to no save")
    lengths = {file.name: file.byte_length for file in journal.files or () if file.name not in journal.direct}
    needed, damage = _needed(stage, found)
    return StagedPart(
        name=found.name,
        save_id=journal.save_id,
        rank=journal.rank,
        num_ranks=journal.num_ranks,
        folder=folder,
        step=journal.step,
        overwrite=journal.overwrite,
        replaces=list(journal.replaces),
        host=journal.host,
        started_at=journal.started_at,
        is_alive=found.is_alive,
        here={name: length for name, length in lengths.items() if found.sizes.get(name) == length},
        needed=needed,
        is_complete=journal.files is not None,
        damage=damage,
    )


def _needed(stage: str, found: FoundStage) -> tuple[dict[str, int] | None, str]:
    """The lengths of all data files, where the manifest is here; else why it cannot be read."""
    if found.is_alive or not found.has_manifest:
        return None, ""
    try:
        manifest = decode_manifest(stage_folder.read_manifest(stage_folder.store_of(stage, found.name)) or b"")
    except CheckpointError as error:
        path = join_name(stage, found.name, stage_folder.PENDING_NAME)
        return None, (
            f"{path} cannot be read: {error.message}; `bcp gc ROOT --local-stage FOLDER --save-id ID --delete` removes "
            "the save where that stays so"
        )
    return {file.name: file.byte_length for file in manifest.files}, ""


def _plan(store: Store, seen: Sequence[Sequence[StagedPart]], folders: Mapping[str, bool]) -> RecoveryPlan:
    return plan_recovery(seen, {folder: _there(store, folder, is_step=is_step) for folder, is_step in folders.items()})


def _there(store: Store, folder: str, *, is_step: bool) -> There:
    listing = store.list(join_name(folder, layout.DATA_FOLDER))
    sizes = {f"{layout.DATA_FOLDER}/{name}": size for name, size in listing.items() if size is not None}
    in_the_way = checkpoint_in_the_way(store, folder, is_step=is_step)
    try:
        return There(layout.committed_save_id(store, folder), sizes, in_the_way)
    except (CheckpointCorruptError, UnsafeCheckpointError):
        return There(None, sizes, in_the_way)


def _say_alive(store: Store, verdicts: Sequence[RecoveryVerdict]) -> bool:
    """Puts something new beside old data that is going to be used, so that no clean-up takes it for dead."""
    finished = [verdict for verdict in verdicts if verdict.outcome == "committed"]
    for verdict in finished:
        name = join_name(verdict.folder, layout.recovery_name(verdict.save_id))
        store.delete(name)  # of an attempt that failed: not every store can replace it
        store.write(name, [Block(0, 1, lambda: nullcontext(memoryview(b"\n")))], replace=True)
    return bool(finished)


@contextmanager
def _taken_over(stage: str, task: Task, options: SaveOptions) -> Iterator[StagedFolder]:
    folder = stage_folder.take_over(stage, task.name, writer_threads=options.writer_threads)
    if folder is None:
        raise CheckpointSaveError(
            f"{os.path.join(stage, task.name)} has been taken by another process since it was found, or removed; "  # noqa: PTH118
            "nothing was committed: recover saves from one job at a time, then call it again",
            kind="storage",
        )
    try:
        yield folder
    finally:
        folder.close()


def _upload_all(
    ranks: Ranks, store: Store, folders: Sequence[tuple[Task, StagedFolder]], options: SaveOptions
) -> Mapping[str, str]:
    """Uploads what all ranks are to; returns, when all have, which saves a disk has damaged, and what it did."""
    damage = {}
    for task, folder in folders:
        try:
            _upload(store, task, folder, options)
        except CheckpointError as error:
            if not isinstance(error, CheckpointCorruptError) and not _is_of(folder, error.path):
                raise
            damage[task.save_id] = error.message

    def merge(payloads: Sequence[bytes]) -> Sequence[bytes]:
        told = [msgspec.msgpack.decode(payload, type=dict[str, str]) for payload in payloads]
        return [msgspec.msgpack.encode({key: what for of_rank in told for key, what in of_rank.items()})] * len(told)

    return msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(damage), merge), type=dict[str, str])


def _is_of(folder: StagedFolder, path: str | None) -> bool:
    return path is not None and path.startswith(os.path.realpath(folder.path))  # errors name files without links


def _with_damage(verdict: RecoveryVerdict, damage: Mapping[str, str]) -> RecoveryVerdict:
    if verdict.save_id in damage:
        return msgspec.structs.replace(verdict, outcome="kept", what=damage[verdict.save_id])
    if verdict.instead_of_by not in damage:
        return verdict
    what = (
        f"save {verdict.instead_of_by}, which was to be finished instead, is damaged: remove that with `bcp gc ROOT "
        f"--local-stage FOLDER --save-id {verdict.instead_of_by} --delete`, then call recover again"
    )
    return msgspec.structs.replace(verdict, outcome="kept", what=what)


def _upload(store: Store, task: Task, folder: StagedFolder, options: SaveOptions) -> None:
    journal = stage_folder.read_journal(folder.store)
    files = [file for file in (journal.files if journal else None) or () if file.name in task.uploads]
    upload_files(folder, store, task.folder, files, writer_threads=options.writer_threads)


def _commit(store: Store, task: Task, folder: StagedFolder) -> Sequence[str]:
    """Creates the manifest; returns the files of the checkpoint that it replaces."""
    content = folder.manifest() or b""
    manifest = decode_manifest(content)
    layout.check_files(store, task.folder, manifest, range(len(manifest.files)))
    if task.overwrite:
        _refuse_replacing_another(store, task)
    replaced = deletion.files_of_checkpoint(store, task.folder) if task.overwrite else []
    layout.commit(store, task.folder, content, replace=task.overwrite)
    return replaced


def _refuse_replacing_another(store: Store, task: Task) -> None:
    stands = layout.committed_save_id(store, task.folder)
    if stands != task.stands:
        path = join_name(str(store), task.folder)
        raise CheckpointSaveError(
            f"another checkpoint (save {stands}) was committed at {path} while save {task.save_id} was being finished; "
            "nothing was replaced, and both are kept: call recover again",
            kind="storage",
            path=path,
        )


def _clean_up(store: Store, verdicts: Sequence[RecoveryVerdict]) -> None:
    """Removes from the path what is of no use any more."""
    for verdict in verdicts:
        if verdict.outcome != "under_way":
            deletion.discard(store, verdict.folder, [layout.recovery_name(verdict.save_id)])
        # Hazard: a manifest may be on its way still that got no answer, and stand when its data is gone.
        if verdict.outcome == "removed" and not verdict.may_arrive:
            with suppress(CheckpointError):
                deletion.discard(store, verdict.folder, _uncommitted(store, verdict))


def _uncommitted(store: Store, verdict: RecoveryVerdict) -> list[str]:
    """What the save has brought to the path already, unless it is committed there."""
    if layout.committed_save_id(store, verdict.folder) == verdict.save_id:
        return []
    data = layout.data_files_of(store, verdict.folder, verdict.save_id)
    return data + layout.telemetry_of(store, verdict.folder, verdict.save_id)


def _describe(store: Store, verdict: RecoveryVerdict) -> RecoveredSave:
    outcome: Outcome = next(known for known in get_args(Outcome) if known == verdict.outcome)
    return RecoveredSave(
        path=join_name(str(store), verdict.folder),
        step=verdict.step,
        save_id=verdict.save_id,
        outcome=outcome,
        what=verdict.what,
    )
