"""The end of a save: every rank writes its files and reports them, then the coordinator creates the manifest, which is
the commit. Runs in the call or in the background, and uses messages between the ranks, never their collectives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, RankFailedError, Ranks, together
from bytecheckpoint.distributed.stragglers import report_straggler_rate
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
)
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.manifest import DataFile, open_manifest
from bytecheckpoint.runtime.threads import map_looks
from bytecheckpoint.saving.prepare import PreparedSave
from bytecheckpoint.saving.report import (
    TimedReport,
    encode_manifest_and_info,
    encode_report,
    telemetry_record,
    write_telemetry,
)
from bytecheckpoint.saving.slow_phases import slow_text
from bytecheckpoint.saving.target import SaveCall, SaveTarget
from bytecheckpoint.saving.write import SaveFiles, find_reusable, write_files
from bytecheckpoint.staging.reuse import ReusableFiles, reused_bytes
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.garbage import MIN_AGE_S, sweep
from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import full_location

logger = logging.getLogger("bytecheckpoint")

_MAY_BE_COMMITTED = "All data is written; `bcp ls` tells whether the checkpoint was committed"
_HELD_UP_S = MIN_AGE_S / 2
"""Age from which the commit checks that garbage collection has not deleted the data of the save: half of the least age
at which it takes data for that of a dead save.
"""
_LOOKS_IN_FLIGHT = 16
"""Fewer files are looked at on one thread."""
_VISIBILITY_PAUSES_S = (0.1, 0.4, 1.5)
_CANNOT_BE_COMMITTED = {"no_space", "permission"}
"""Kinds of errors with which a store refused to write anything, and did not merely lose the answer."""


def write_and_commit(prepared: PreparedSave, metadata: Mapping[str, Any]) -> CheckpointInfo:
    """Writes the data of a save and commits it. Raises on every rank what `save` documents."""
    agreed, call, target = prepared.agree(), prepared.call, prepared.target
    ranks, about, timer = call
    prepared.snapshot.wait()
    files = SaveFiles(target, agreed.save_id, ranks.rank, agreed.rank_plan.files, prepared.extent_digests)
    # Other ranks get the error first: files are deleted after `together` has ended.
    doing = f"writing {target.path}"
    with ExitStack() as undo, together(ranks, doing, about=about), raising_superseded(target):
        undo.callback(discard, files)
        with timer.phase("write"), closing(prepared.snapshot):
            reuse = find_reusable(prepared)
            written = write_files(files, prepared, reuse=reuse)
        record = telemetry_record(call, agreed.save_id, [file for file, _ in written])
        timed_report = TimedReport(
            encode_report(agreed, written), timer.seconds, reused_bytes=reused_bytes(reuse), record=record
        )
        report = msgspec.msgpack.encode(timed_report)
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may commit the save, even if this rank fails
        with report_straggler_rate(ranks, agreed.rank_plan.global_plan, timer.seconds["write"]):
            reports = [msgspec.msgpack.decode(each, type=TimedReport) for each in ranks.gather(report)]
        write_telemetry(call, target, agreed.save_id, [each.record for each in reports])
        content = info = b""
        if ranks.rank == COORDINATOR:
            content, info = encode_manifest_and_info(
                agreed, reports, call, target, metadata=metadata, generation=prepared.generation
            )
        undo.pop_all()
    prepared.meter.begin("commit")
    committed = commit_together(call, files, content, info)
    remember_files(prepared, files, [file for file, _ in written])
    warn_of_slow_phases(prepared, reports, committed)
    return committed


@contextmanager
def raising_superseded(target: SaveTarget) -> Iterator[None]:
    """Surrounds work on the files of a save. If that fails, though no rank is missing, and another owner has claimed
    the root, raises CheckpointSaveError (superseded) instead, on the coordinator: that owner deletes what this save
    writes.
    """
    try:
        yield
    except (CheckpointError, RankFailedError) as failure:
        error = failure.error if isinstance(failure, RankFailedError) else failure
        owner = target.owner
        if owner is not None and owner.after_failure is not None and error.kind != "rank_missing":
            with suppress(StorageError):
                owner.after_failure()
        raise


def remember_files(prepared: PreparedSave, files: SaveFiles, written: Sequence[DataFile]) -> None:
    """Keeps, after the commit of a save, the records of this rank's files that later saves may reuse."""
    if prepared.reuse is not None:
        reusable = tuple(file for file in written if file.content_digest)
        newest = ReusableFiles(files.save_id, files.target.folder, reusable)
        prepared.reuse.add(newest, prepared.agree().rank_plan.plan_id, files.planned, written)


def warn_of_slow_phases(prepared: PreparedSave, reports: Sequence[TimedReport], committed: CheckpointInfo) -> None:
    """Adds the times of this save to the history, and warns of phases that took much longer than in earlier saves; on
    the coordinator only. Ranks report before upload and commit, so the times of these two are the coordinator's.
    """
    ranks, store = prepared.call.ranks, prepared.target.store
    if ranks.rank != COORDINATOR:
        return
    by_rank = [
        {**each.seconds, **(committed.seconds if rank == COORDINATOR else {})} for rank, each in enumerate(reports)
    ]
    for slow in prepared.history.add(full_location(store, ""), committed.num_bytes, by_rank):
        logger.warning("%s", slow_text(slow, prepared.target.path, ranks.global_ranks))


def commit_together(call: SaveCall, files: SaveFiles, content: bytes, info: bytes) -> CheckpointInfo:
    """Commits a save whose files every rank has reported: the coordinator creates the manifest of the bytes `content`
    and sends `info` to all ranks, each of which returns it with its own seconds. The other ranks ignore both arguments.
    Then closes `ranks`, and the coordinator deletes the files of a replaced checkpoint, and garbage.
    """
    ranks, about, timer = call
    target, is_coordinator = files.target, ranks.rank == COORDINATOR
    may_be = f"{about.left_behind}. {_MAY_BE_COMMITTED}" if about.left_behind else _MAY_BE_COMMITTED
    after = about._replace(left_behind=about.left_behind if is_coordinator else may_be)
    replaced: Sequence[str] = ()
    with ExitStack() as undo, together(ranks, f"committing {target.path}", about=after), timer.phase("commit"):
        broadcast_or_discard(ranks, files, b"")
        if is_coordinator:
            replaced = _create_manifest(call, files, content, undo)
        committed = msgspec.msgpack.decode(ranks.broadcast(info), type=CheckpointInfo)
    ranks.close()
    timer.end_stall()
    if is_coordinator:
        # After the other ranks have the outcome, because this rank alone deletes what may be thousands of files.
        deletion.discard(target.store, target.folder, replaced)
        sweep(target.store, target.folder, files.save_id)
        logger.info("committed %s in %.2f s", target.path, timer.total)
    return replace(committed, seconds={**timer.seconds, "total": timer.total})


def broadcast_or_discard(ranks: Ranks, files: SaveFiles, payload: bytes) -> bytes:
    """Returns the coordinator's payload. If the coordinator sends that a rank failed instead, discards this rank's
    files and raises RankFailedError.

    Hazard: any other error must leave the files. A slow coordinator may still commit what this rank has reported, also
    if another rank was interrupted after it reported.
    """
    try:
        return ranks.broadcast(payload)
    except RankFailedError:
        discard(files)
        raise


def _create_manifest(call: SaveCall, files: SaveFiles, content: bytes, undo: ExitStack) -> Sequence[str]:
    """Creates the manifest; returns the names of the files of the checkpoint that it replaces. Does not delete those.
    If it raises and is certain that nothing was committed, it has made `undo` discard the data of this save.
    """
    store, folder = files.target.store, files.target.folder
    with ExitStack() as refused:
        refused.callback(undo.callback, discard, files)
        with raising_superseded(files.target):
            if call.timer.age_s > _HELD_UP_S:
                _refuse_if_collected(call, files, content)
            if call.ranks.num_ranks > 1 and not is_remote(store):
                check_is_shared(call, files, content)
        overwrite = files.target.may_replace()
        if files.target.owner is not None:
            files.target.owner.before_commit()
        refused.pop_all()
    replaced = deletion.files_of_checkpoint(store, folder) if overwrite else []
    try:
        layout.commit(store, folder, content, replace=overwrite)
    except CheckpointExistsError:
        undo.callback(discard, files)  # another checkpoint is there, so this one cannot have been committed
        raise
    except (StorageError, CheckpointSaveError) as error:
        if error.kind in _CANNOT_BE_COMMITTED and not _may_be_committed(files):
            undo.callback(discard, files)
            raise
        raise type(error)(f"{error.message}. {_MAY_BE_COMMITTED}", kind=error.kind, path=error.path) from error
    if files.target.owner is not None:
        _check_owner_again(files, content)
    return replaced


def _check_owner_again(files: SaveFiles, manifest_content: bytes) -> None:
    """Raises CheckpointSaveError (superseded) if another owner took the root between the first check and the commit.
    If that owner has deleted data of this save as garbage, first deletes the manifest of this save as well.
    """
    target, manifest = files.target, open_manifest(manifest_content)
    try:
        if target.owner is not None:
            target.owner.check()
    except CheckpointSaveError as error:
        outcome = "This save was committed all the same, and is complete; the other one may replace it"
        try:
            layout.check_files(target.store, target.folder, manifest, range(len(manifest.files)))
        except (CheckpointNotFoundError, CheckpointCorruptError):
            target.store.delete(join_name(target.folder, layout.MANIFEST_NAME))
            outcome = "The data of this save had been cleared already, so it was withdrawn"
        raise CheckpointSaveError(f"{error.message}. {outcome}", kind=error.kind, path=error.path) from error


def _refuse_if_collected(call: SaveCall, files: SaveFiles, manifest_content: bytes) -> None:
    """Raises CheckpointSaveError (storage) if garbage collection has deleted data of this save."""
    target, manifest = files.target, open_manifest(manifest_content)
    try:
        layout.check_files(target.store, target.folder, manifest, range(len(manifest.files)))
    except (CheckpointNotFoundError, CheckpointCorruptError) as error:
        raise CheckpointSaveError(
            f"the save to {target.path} was held up for {call.timer.age_s / 3600:.1f} hours, and what it had written "
            "is not there any more: it was taken for an abandoned save's and cleared away. Nothing was committed, "
            "and the checkpoint that was there is unchanged: save again",
            kind="storage",
            path=target.path,
        ) from error


def check_is_shared(call: SaveCall, files: SaveFiles, manifest_content: bytes) -> None:
    """Raises CheckpointSaveError (storage) if the coordinator cannot read the last byte of each data file that the
    manifest lists: hosts do not share the folder.

    It opens each file by its name: a network file system may list a folder as it was a minute ago.
    """
    target = files.target

    def check(file: DataFile) -> None:
        try:
            _read_last_byte(target, file)
        except (CheckpointNotFoundError, CheckpointCorruptError) as error:
            raise CheckpointSaveError(
                f"{join_name(target.path, file.name)}, which another rank has written, cannot be read by "
                f"rank {call.ranks.global_ranks[COORDINATOR]} ({error.kind}): the path has to be on a file system that "
                "the hosts of all ranks share, and show all of them the same. Nothing was committed, and what stood "
                "there is as it was: save to a shared folder or an object store",
                kind="storage",
                path=target.path,
            ) from error

    written = open_manifest(manifest_content).files  # whose millions of chunks were checked before
    map_looks(check, written, num_threads=_LOOKS_IN_FLIGHT)


def _read_last_byte(target: SaveTarget, file: DataFile) -> None:
    """Reads the last byte of a file. Tries for 2 s before it raises: some file systems show a file to other hosts a
    moment after it was closed.
    """
    for pause_s in (*_VISIBILITY_PAUSES_S, None):
        try:
            target.store.read_into(join_name(target.folder, file.name), file.byte_length - 1, memoryview(bytearray(1)))
        except (CheckpointNotFoundError, CheckpointCorruptError):
            if pause_s is None:
                raise
            time.sleep(pause_s)
        else:
            return


def _may_be_committed(files: SaveFiles) -> bool:
    """Returns False only if the manifest of this save is certainly not in its place."""
    target = files.target
    try:
        if not layout.has_manifest(target.store.list(target.folder)):
            return False
        return layout.read_manifest(target.store, target.folder).save_id == files.save_id
    except CheckpointError:
        return True


def discard(files: SaveFiles) -> None:
    """Deletes the files of a save that will not be committed: the coordinator those of all ranks, the others their own,
    and each rank its folder in the local stage.

    Deletes nothing if recovery can still commit the save. A file that cannot be deleted raises no error.
    """
    target, save_id, rank, planned, _ = files
    store, folder, stage = target.store, target.folder, target.stage
    if stage is not None:
        if stage.is_recoverable:
            return
        stage.remove()
    names = [*map(files.name, range(len(planned)))]
    with suppress(CheckpointError):
        if rank == COORDINATOR:
            names = layout.data_files_of(store, folder, save_id) + layout.telemetry_of(store, folder, save_id)
    deletion.discard(store, folder, names)
