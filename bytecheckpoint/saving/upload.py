"""The end of a save through a local stage: data made durable on the disks of the hosts, which frees the staging memory,
then uploaded to the path, and the manifest created last as in every save.

Once every rank's data is durable, a save that fails or dies leaves it there for recover.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, together
from bytecheckpoint.distributed.stragglers import report_straggler_rate
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import CheckpointInfo, LocalInfo
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.saving.commit import (
    broadcast_or_discard,
    commit_together,
    discard,
    raising_superseded,
    remember_files,
    warn_of_slow_phases,
)
from bytecheckpoint.saving.local_stage import LocalStage
from bytecheckpoint.saving.prepare import PreparedSave
from bytecheckpoint.saving.report import (
    TimedReport,
    encode_manifest_and_info,
    encode_report,
    telemetry_record,
    write_telemetry,
)
from bytecheckpoint.saving.target import SaveCall, SaveTarget
from bytecheckpoint.saving.write import SaveFiles, find_reusable, write_files
from bytecheckpoint.staging.reuse import reused_bytes
from bytecheckpoint.storage import layout, stage_folder
from bytecheckpoint.storage.inventory import refuse_beside
from bytecheckpoint.storage.stage_folder import Journal
from bytecheckpoint.storage.store import endpoint_of

logger = logging.getLogger("bytecheckpoint")

_IS_RECOVERABLE = (
    "Every rank's data is kept in its local stage: `bcp.recover` finishes the save if that is still possible, and the "
    "next one that is committed removes it"
)


class _StagedSave(msgspec.Struct, frozen=True, array_like=True):
    """Message of the coordinator to all ranks once the data of all is durable."""

    is_recoverable: bool
    """True if the manifest is durable as well."""
    num_bytes: int
    direct_ranks: tuple[int, ...]
    info: bytes
    """Encoded CheckpointInfo, without seconds."""


def write_upload_and_commit(
    prepared: PreparedSave,
    metadata: Mapping[str, Any],
    stage: LocalStage,
    begin_upload: Callable[[], None],
) -> CheckpointInfo:
    """Makes a save durable in the local stage, then at the path. Raises on every rank what `save` documents.

    `SaveHandle.local` returns when only the loss of a disk can lose the save. What comes after `begin_upload`, which
    may wait for an earlier upload, needs neither the training state nor staging memory.
    """
    agreed, target = prepared.agree(), prepared.target
    prepared.snapshot.wait()
    call, plan = prepared.call, agreed.rank_plan.global_plan
    files = SaveFiles(target, agreed.save_id, call.ranks.rank, agreed.rank_plan.files, prepared.extent_digests)
    with closing(stage):
        staged, content, reports = _write_to_stage(prepared, files, stage, metadata)
        local = LocalInfo(
            path=target.path,
            step=target.step,
            save_id=agreed.save_id,
            folder=stage.folder,
            num_bytes=staged.num_bytes,
            direct_ranks=staged.direct_ranks,
        )
        if staged.is_recoverable:
            prepared.progress.reach_local(local)
        prepared.close()
        begin_upload()
        after = call.about._replace(left_behind=_IS_RECOVERABLE if staged.is_recoverable else "")
        call = call._replace(about=after)
        _upload(call, files, stage, plan, prepared.meter)
        prepared.meter.begin("commit")
        info = commit_together(call, files, content, staged.info)
        remember_files(prepared, files, stage.files)
        warn_of_slow_phases(prepared, reports, info)
        if not staged.is_recoverable:
            prepared.progress.reach_local(local)
        stage.remove()
        stage.remove_superseded()
    return info


def _write_to_stage(
    prepared: PreparedSave, files: SaveFiles, stage: LocalStage, metadata: Mapping[str, Any]
) -> tuple[_StagedSave, bytes, list[TimedReport]]:
    """Writes this rank's files to its local stage. Returns the coordinator's message, and the manifest and the
    reports of all ranks, which are empty except on the coordinator.
    """
    agreed, call, target = prepared.agree(), prepared.call, files.target
    ranks, about, timer = call
    doing = f"writing {target.path} to the local stage"
    with ExitStack() as undo, together(ranks, doing, about=about):
        undo.callback(discard, files)
        with timer.phase("write"), closing(prepared.snapshot):
            reuse = find_reusable(prepared)
            stage.begin(_new_journal(ranks, target, stage, save_id=agreed.save_id))
            written = write_files(files, prepared, reuse=reuse)
            stage.complete([file for file, _ in written])
        timed_report = TimedReport(encode_report(agreed, written), timer.seconds, stage.is_direct, reused_bytes(reuse))
        report = msgspec.msgpack.encode(timed_report)
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may keep the save, even if this rank fails
        with report_straggler_rate(ranks, agreed.rank_plan.global_plan, timer.seconds["write"]):
            gathered = ranks.gather(report)
        reports = [msgspec.msgpack.decode(payload, type=TimedReport) for payload in gathered]
        payload, content = b"", b""
        if ranks.rank == COORDINATOR:
            content, info = encode_manifest_and_info(
                agreed, reports, call, target, metadata=metadata, generation=prepared.generation
            )
            is_recoverable = stage.write_manifest(content)
            direct_ranks = tuple(ranks.global_ranks[rank] for rank, each in enumerate(reports) if each.is_direct)
            num_bytes = msgspec.msgpack.decode(info, type=CheckpointInfo).num_bytes
            payload = msgspec.msgpack.encode(_StagedSave(is_recoverable, num_bytes, direct_ranks, info))
        undo.pop_all()

    with together(ranks, doing, about=about):
        staged = msgspec.msgpack.decode(broadcast_or_discard(ranks, files, payload), type=_StagedSave)
    stage.is_recoverable = staged.is_recoverable
    if ranks.rank == COORDINATOR:
        text = "data of %s is durable, on the local disks or, where one has no room, at the path, after %.2f s"
        logger.info(text, target.path, timer.total)
    return staged, content, reports


def _upload(call: SaveCall, files: SaveFiles, stage: LocalStage, plan: SavePlan | None, meter: ProgressMeter) -> None:
    """Uploads this rank's data files, and waits until all ranks have; the coordinator writes telemetry. If a rank
    fails, discards the files unless recovery can still commit the save.
    """
    ranks, about, timer = call
    target = files.target
    doing = f"uploading {target.path}"
    with ExitStack() as undo, together(ranks, doing, about=about), raising_superseded(target):
        undo.callback(discard, files)
        meter.begin("upload", stage.num_upload_bytes)
        with timer.phase("upload"):
            stage.upload(target.store, target.folder, meter.add)
        record = telemetry_record(call, files.save_id, stage.files)
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may commit the save, even if this rank fails
        with report_straggler_rate(ranks, plan, timer.seconds["upload"], did="uploaded", is_all=not stage.is_direct):
            records = ranks.gather(record)
        write_telemetry(call, target, files.save_id, records)
        if ranks.rank == COORDINATOR:  # an earlier save may have been uploading when this one began
            refuse_beside(target.store, target.folder, is_step=target.step is not None)
        undo.pop_all()


def _new_journal(ranks: Ranks, target: SaveTarget, stage: LocalStage, *, save_id: str) -> Journal:
    """Returns the journal of this rank's stage. For the coordinator's, looks up the saves that this one replaces."""
    endpoint = endpoint_of(target.store)
    overwrite = ranks.rank == COORDINATOR and target.may_replace()
    objects = target.owner.root_objects() if ranks.rank == COORDINATOR and target.owner is not None else ()
    replaces = []
    if overwrite:  # the save committed there, and saves still uploaded there
        journals = [found.journal for found in stage_folder.scan(stage.root) if found.journal]
        here = (endpoint, target.path)
        replaces = [journal.save_id for journal in journals if (journal.endpoint, journal.path) == here]
        with suppress(CheckpointError):
            replaces.append(layout.committed_save_id(target.store, target.folder))
    return Journal(
        save_id=save_id,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        root=str(target.store),
        endpoint=endpoint,
        folder=target.folder,
        step=target.step,
        overwrite=overwrite,
        replaces=replaces,
        root_objects=list(objects),
    )
