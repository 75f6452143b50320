"""`recover`: all ranks together finish the saves that earlier processes left in the local stages of the hosts, if every
part is there. planner/recovery_plan.py decides what becomes of each save.
"""

from __future__ import annotations

# ruff: noqa: PTH118 - paths are text here, as in the stage itself
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, get_args

import msgspec
import torch.distributed as dist

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, check_same, join_ranks, merge_texts, together
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.info import Outcome, RecoveredSave
from bytecheckpoint.manifest import DataFile, decode_manifest
from bytecheckpoint.options import SaveOptions, given_or_default
from bytecheckpoint.planner.recovery_plan import (
    RecoveryPlan,
    RecoveryTask,
    RecoveryVerdict,
    StagedPart,
    TargetFolder,
    plan_recovery,
)
from bytecheckpoint.saving.in_flight import wait_until_numbered
from bytecheckpoint.saving.local_stage import upload_files
from bytecheckpoint.storage import deletion, layout, stage_folder
from bytecheckpoint.storage.checksum_scan import find_files
from bytecheckpoint.storage.credentials import shown_path
from bytecheckpoint.storage.inventory import checkpoint_in_the_way
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import FoundStage, Journal, StagedFolder
from bytecheckpoint.storage.store import Store, endpoint_of, full_location, one_block

logger = logging.getLogger("bytecheckpoint")


def recover(
    path: str | os.PathLike[str],
    *,
    options: SaveOptions,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[RecoveredSave]:
    """Finishes the saves to `path`, or below it, that are in the local stage because their processes died or their
    upload failed. All ranks call it, before they load the checkpoint to resume from.

    A save is uploaded and committed if every part is on a disk that one of the ranks sees, or at the path already; the
    number of ranks and their hosts may have changed. A save is removed if it ended before every rank's data was
    durable, or if a later save or checkpoint takes its place. A save that cannot be finished now, for example because
    parts are missing here or damaged by the disk, is kept, and its outcome says why. A save of a living process is left
    alone.

    Args:
        path: What was given to `save`.
        options: The options of the saves: `local_stage`, and `writer_threads` and `timeout_s` for the upload.
        process_group: As for `save`.
        storage_options: As for `save`.

    Returns:
        The outcome of each save, the same on every rank; oldest first, and empty if nothing was left.

    Raises:
        CheckpointMismatchError: There is no `options.local_stage`, or ranks were given different paths.
        CheckpointSaveError, StorageError: As for `save`. Nothing is lost: call it again.
    """
    options = given_or_default(options, SaveOptions)
    wait_until_numbered()
    about = Subject(shown_path(path), None, is_save=True, call="recover")
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, f"looking for what saves to {about.path} left in the local stage", about=about):
        if options.local_stage is None:
            raise CheckpointMismatchError(
                "recover was given no local stage to look into; nothing was changed: pass the options of the saves, "
                "with local_stage",
                kind="conflict",
            )
        stage, threads = os.fspath(options.local_stage), options.writer_threads
        store = open_store(path, storage_options=storage_options, writer_threads=threads, timeout_s=options.timeout_s)
        assignment = _exchange_plans(ranks, store, stage)

    with together(ranks, f"finishing saves to {about.path}", about=about), ExitStack() as held:
        folders = [
            (task, held.enter_context(closing(_take_over(stage, task, writer_threads=threads))))
            for task in assignment.tasks
        ]
        damage = _upload_all(ranks, store, folders, options)  # all data is there before any manifest
        verdicts = [_with_damage(verdict, damage) for verdict in assignment.verdicts]
        kept = {verdict.save_id for verdict in verdicts if verdict.outcome == "kept"}
        whole = [(task, folder) for task, folder in folders if task.save_id not in kept]
        _write_root_objects(store, whole, verdicts, storage_options)
        ranks.barrier()  # before the first manifest, as in a save
        replaced = [(task, _commit(store, task, folder)) for task, folder in whole if task.commits]
        ranks.barrier()
        for _, folder in whole:
            folder.remove()
    ranks.close()
    # After the other ranks have the outcome, because there may be thousands of files.
    for task, file_names in replaced:
        deletion.discard(store, task.folder, file_names)
    saves = [_recovered_save(store, verdict) for verdict in verdicts]
    if ranks.rank == COORDINATOR:
        _clean_up(store, verdicts)
        for save in saves:
            logger.info("recovery of %s (save %s): %s, %s", save.path, save.save_id, save.outcome, save.what)
    return saves


class _RecoveryAssignment(msgspec.Struct, frozen=True, array_like=True):
    """The tasks of one rank, and the verdict on each save."""

    tasks: list[RecoveryTask]
    verdicts: list[RecoveryVerdict]


def _exchange_plans(ranks: Ranks, store: Store, stage: str) -> _RecoveryAssignment:
    """Returns this rank's part of the recovery plan. The coordinator makes it from what each rank has in its stage, and
    writes a mark for each save to be committed: see `_mark_alive`. All ranks must call it.
    """
    staged = [(found, _folder_in(store, found.journal)) for found in stage_folder.scan(stage)]
    parts = [_part(stage, found, folder) for found, folder in staged if folder is not None]

    def plan_all(payloads: Sequence[bytes]) -> Sequence[bytes]:
        messages = [msgspec.msgpack.decode(payload, type=tuple[str, list[StagedPart]]) for payload in payloads]
        check_same("recover saves to", [place for place, _ in messages], ranks.global_ranks)
        by_rank = [of_rank for _, of_rank in messages]
        plan = _plan(store, by_rank)
        if _mark_alive(store, plan.verdicts):
            plan = _plan(store, by_rank)  # now without the files that garbage collection deleted until the mark
        replies = [_RecoveryAssignment(list(tasks), list(plan.verdicts)) for tasks in plan.tasks]
        return [msgspec.msgpack.encode(reply) for reply in replies]

    reply = ranks.reduce_scatter(msgspec.msgpack.encode((full_location(store, ""), parts)), plan_all)
    return msgspec.msgpack.decode(reply, type=_RecoveryAssignment)


def _folder_in(store: Store, journal: Journal | None) -> str | None:
    """Returns the folder of a save inside the store, or None if the save goes to another place."""
    if journal is None or journal.endpoint != endpoint_of(store):
        return None
    root = str(store)
    if journal.path == root:
        return ""
    prefix = join_name(root, "x")[:-1]
    return journal.path.removeprefix(prefix) if journal.path.startswith(prefix) else None


def _part(stage: str, found: FoundStage, folder: str) -> StagedPart:
    """Returns what the recovery plan has to know of a staged folder."""
    journal = found.journal
    if journal is None:
        raise TypeError("a folder without a journal belongs to no save")
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
    """Returns the lengths of all data files by name, from the manifest in the folder. Returns None instead if there is
    no manifest or the process is alive, and None with the reason if the manifest cannot be read.
    """
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


def _plan(store: Store, by_rank: Sequence[Sequence[StagedPart]]) -> RecoveryPlan:
    is_step = {part.folder: part.step is not None for of_rank in by_rank for part in of_rank}
    return plan_recovery(
        by_rank, {folder: _target_folder(store, folder, is_step=is_step[folder]) for folder in is_step}
    )


def _target_folder(store: Store, folder: str, *, is_step: bool) -> TargetFolder:
    listing = store.list(join_name(folder, layout.DATA_FOLDER))
    sizes = {f"{layout.DATA_FOLDER}/{name}": size for name, size in listing.items() if size is not None}
    save_id = None  # it cannot be read
    with suppress(CheckpointCorruptError, UnsafeCheckpointError):
        save_id = layout.committed_save_id(store, folder)  # empty if none is committed
    is_above_seen = folder != "" or not is_step  # `recover` may be given the path of a step
    in_the_way = checkpoint_in_the_way(store, folder, is_step=is_step) if is_above_seen else ""
    return TargetFolder(save_id, sizes, in_the_way)


def _mark_alive(store: Store, verdicts: Sequence[RecoveryVerdict]) -> bool:
    """Writes a new object beside the data of each save that is to be committed, so that garbage collection spares it
    until then. Returns True if there is such a save.
    """
    to_commit = [verdict for verdict in verdicts if verdict.outcome == "committed"]
    for verdict in to_commit:
        name = join_name(verdict.folder, layout.recovery_name(verdict.save_id))
        store.delete(name)  # left by an attempt that failed; not every store can replace it
        store.write(name, one_block(b"\n"), replace=True)
    return bool(to_commit)


def _take_over(stage: str, task: RecoveryTask, *, writer_threads: int) -> StagedFolder:
    folder = stage_folder.take_over(stage, task.name, writer_threads=writer_threads)
    if folder is None:
        raise CheckpointSaveError(
            f"{os.path.join(stage, task.name)} has been taken by another process since it was found, or removed; "
            "nothing was committed: recover saves from one job at a time, then call it again",
            kind="storage",
        )
    return folder


def _upload_all(
    ranks: Ranks, store: Store, folders: Sequence[tuple[RecoveryTask, StagedFolder]], options: SaveOptions
) -> Mapping[str, str]:
    """Uploads the files of this rank's tasks. Returns, once all ranks have uploaded theirs, the damage of each save
    whose files a disk of any rank has damaged, by save id.
    """
    damage = {}
    for task, folder in folders:
        try:
            journal = stage_folder.read_journal(folder.store)
            files = [file for file in (journal.files if journal else None) or () if file.name in task.uploads]
            _clear_cut_off(store, task.folder, files)
            upload_files(
                folder, store, task.folder, files, writer_threads=options.writer_threads, on_bytes=lambda _: None
            )
        except CheckpointError as error:
            is_here = error.path is not None and error.path.startswith(os.path.realpath(folder.path))
            if not isinstance(error, CheckpointCorruptError) and not is_here:
                raise
            damage[task.save_id] = error.message
    return merge_texts(ranks, damage)


def _clear_cut_off(store: Store, folder: str, files: Sequence[DataFile]) -> None:
    """Deletes what stands at the path, with a wrong length, under the names of files that are to be uploaded."""
    for file, num_bytes in zip(files, find_files(store, folder, files), strict=True):
        if num_bytes not in {None, file.byte_length}:  # nobody else writes under a name that has the id of this save
            store.delete(join_name(folder, file.name))


def _with_damage(verdict: RecoveryVerdict, damage: Mapping[str, str]) -> RecoveryVerdict:
    """Returns the verdict; changed to `kept` if its save is damaged, or if the later save that supersedes it is."""
    if verdict.save_id in damage:
        return msgspec.structs.replace(verdict, outcome="kept", what=damage[verdict.save_id])
    if verdict.superseded_by not in damage:
        return verdict
    what = (
        f"save {verdict.superseded_by}, which was to be finished instead, is damaged: remove that with `bcp gc ROOT "
        f"--local-stage FOLDER --save-id {verdict.superseded_by} --delete`, then call recover again"
    )
    return msgspec.structs.replace(verdict, outcome="kept", what=what)


def _write_root_objects(
    store: Store,
    folders: Sequence[tuple[RecoveryTask, StagedFolder]],
    verdicts: Sequence[RecoveryVerdict],
    storage_options: Mapping[str, Any] | None,
) -> None:
    """For the saves that this rank commits, writes the objects that their journals list, as a save does before its
    commit: all for the newest save of each root, and for the others only those in the folder of the save.
    """
    newest: dict[str, str] = {}
    for verdict in verdicts:  # oldest save first
        if verdict.outcome == "committed":
            newest[verdict.folder if verdict.step is None else verdict.folder.rpartition("/")[0]] = verdict.save_id
    for task, folder in folders:
        journal = stage_folder.read_journal(folder.store) if task.commits else None
        if journal is None or not journal.root_objects:
            continue
        own, is_newest = f"{journal.folder}/", task.save_id in newest.values()
        objects = [each for each in journal.root_objects if is_newest or each.name.startswith(own)]
        if task.folder:
            root = task.folder.removesuffix(journal.folder).removesuffix("/")
            stage_folder.write_root_objects(store, root, objects)
        else:  # `recover` was given the path of the step
            root_store = open_store(journal.root, storage_options=storage_options, writer_threads=1)
            stage_folder.write_root_objects(root_store, "", objects)


def _commit(store: Store, task: RecoveryTask, folder: StagedFolder) -> Sequence[str]:
    """Creates the manifest; returns the files of the checkpoint that it replaces. Raises CheckpointSaveError (storage),
    or CheckpointExistsError for a save that replaces none, if another one was committed since the plan was made.
    """
    content = stage_folder.read_manifest(folder.store) or b""
    manifest = decode_manifest(content)
    layout.check_files(store, task.folder, manifest, range(len(manifest.files)))
    replaced: Sequence[str] = []
    if task.overwrite:
        committed = layout.committed_save_id(store, task.folder)
        if committed != task.committed_save_id:
            path = join_name(str(store), task.folder)
            raise CheckpointSaveError(
                f"another checkpoint (save {committed}) was committed at {path} while save {task.save_id} was being "
                "finished; nothing was replaced, and both are kept: call recover again",
                kind="storage",
                path=path,
            )
        replaced = deletion.files_of_checkpoint(store, task.folder)
    layout.commit(store, task.folder, content, replace=task.overwrite)
    return replaced


def _clean_up(store: Store, verdicts: Sequence[RecoveryVerdict]) -> None:
    """Deletes files at the path that no save needs any more."""
    for verdict in verdicts:
        folder, save_id = verdict.folder, verdict.save_id
        if verdict.outcome != "under_way":
            deletion.discard(store, folder, [layout.recovery_name(save_id)])
        # Hazard: the request for a manifest may have had no answer and still arrive, after its data was deleted.
        if verdict.outcome != "removed" or verdict.manifest_may_arrive:
            continue
        with suppress(CheckpointError):
            is_committed = layout.committed_save_id(store, folder) == save_id
            data = layout.data_files_of(store, folder, save_id) + layout.telemetry_of(store, folder, save_id)
            deletion.discard(store, folder, [] if is_committed else data)


def _recovered_save(store: Store, verdict: RecoveryVerdict) -> RecoveredSave:
    outcome: Outcome = next(known for known in get_args(Outcome) if known == verdict.outcome)
    return RecoveredSave(
        path=join_name(str(store), verdict.folder),
        step=verdict.step,
        save_id=verdict.save_id,
        outcome=outcome,
        what=verdict.what,
    )
