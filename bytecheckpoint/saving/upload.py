"""The second half of a save that goes through a local stage: data made durable on the disks of the hosts, which gives
the staging memory back, then uploaded to the path, and the manifest created last as in every save.

From the moment on at which every rank's data is durable, a save that fails or dies leaves it there, for recover.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, together
from bytecheckpoint.distributed.stragglers import report_straggler_rate
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import CheckpointInfo, LocalInfo
from bytecheckpoint.saving.local_stage import Tier
from bytecheckpoint.saving.report import encode_report
from bytecheckpoint.saving.telemetry import write_telemetry
from bytecheckpoint.saving.write import (
    Saving,
    commit_together,
    discard,
    encode,
    hear_that_all_have_written,
    write_files,
)
from bytecheckpoint.storage import layout, stage_folder
from bytecheckpoint.storage.inventory import refuse_beside
from bytecheckpoint.storage.stage_folder import Journal
from bytecheckpoint.storage.store import endpoint_of

logger = logging.getLogger("bytecheckpoint")

IS_KEPT = (
    "Every rank's data is kept in its local stage: `bcp.recover` finishes the save if that is still possible, and the "
    "next one that is committed removes it"
)


class _Staged(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks hear when the data of all is durable."""

    is_recoverable: bool
    """The manifest is durable as well."""
    num_bytes: int
    direct_ranks: tuple[int, ...]
    facts: bytes


def write_upload_and_commit(
    saving: Saving, tier: Tier, on_local: Callable[[LocalInfo], None], uploading: AbstractContextManager[None]
) -> CheckpointInfo:
    """Makes a planned save durable in the local stage, then at the path. Raises on every rank what `save` documents.

    `on_local` is told when nothing but the loss of a disk can lose the save any more; `uploading` is entered for what
    follows, which needs no memory that the save was staged in.
    """
    with closing(tier):
        staged, content = _stage(saving, tier)
        local = _local_info(saving, tier, staged)
        if staged.is_recoverable:
            on_local(local)
        with uploading:
            info = _upload(saving, tier, staged, content)
        if not staged.is_recoverable:
            on_local(local)
        tier.remove()
        tier.remove_superseded()
    return info


def _stage(saving: Saving, tier: Tier) -> tuple[_Staged, bytes]:
    """What was staged, and on the coordinator the manifest."""
    ranks, about, clock = saving.ranks, saving.about, saving.clock
    doing = f"writing {saving.path} to the local stage"
    with ExitStack() as undo, together(ranks, doing, about=about):
        undo.callback(discard, saving)
        with clock.phase("write"), closing(saving.snapshot):
            tier.begin(_journal_of(saving, tier))
            written = write_files(saving)
            tier.complete([of_file.file for of_file in written])
        report = msgspec.msgpack.encode((encode_report(saving.agreed, written), tier.is_direct))
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may keep it, whatever becomes of this rank
        with report_straggler_rate(ranks, saving.agreed.known.plan, clock.seconds["write"]):
            gathered = ranks.gather(report)
        payloads = [msgspec.msgpack.decode(payload, type=tuple[bytes, bool]) for payload in gathered]
        staged, content = b"", b""
        if ranks.rank == COORDINATOR:
            content, facts = encode(saving, [payload for payload, _ in payloads])
            is_recoverable = tier.keep_manifest(content)
            direct_ranks = [ranks.global_ranks[rank] for rank, (_, is_direct) in enumerate(payloads) if is_direct]
            num_bytes = msgspec.msgpack.decode(facts, type=CheckpointInfo).num_bytes
            staged = msgspec.msgpack.encode(_Staged(is_recoverable, num_bytes, tuple(direct_ranks), facts))
        undo.pop_all()

    with together(ranks, doing, about=about):
        heard = msgspec.msgpack.decode(hear_that_all_have_written(saving, staged), type=_Staged)
    tier.is_kept = heard.is_recoverable
    if ranks.rank == COORDINATOR:
        logger.info("data of %s is durable on the local disks after %.2f s", saving.path, clock.total)
    return heard, content


def _upload(saving: Saving, tier: Tier, staged: _Staged, content: bytes) -> CheckpointInfo:
    ranks, clock = saving.ranks, saving.clock
    about = saving.about._replace(aftermath=IS_KEPT if staged.is_recoverable else "")
    with ExitStack() as undo, together(ranks, f"uploading {saving.path}", about=about):
        undo.callback(discard, saving)
        with clock.phase("upload"):
            tier.upload(saving.store, saving.folder)
        write_telemetry(saving.store, saving.folder, saving.agreed.save_id, ranks=ranks, clock=clock, files=tier.files)
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may commit it, whatever becomes of this rank
        plan, upload_s = saving.agreed.known.plan, clock.seconds["upload"]
        with report_straggler_rate(ranks, plan, upload_s, did="uploaded", is_all=not tier.is_direct):
            ranks.gather(b"")
        if ranks.rank == COORDINATOR:  # an earlier save may have been uploading when this one began
            refuse_beside(saving.store, saving.folder, is_step=saving.about.step is not None)
        undo.pop_all()
    return commit_together(saving._replace(about=about), content, staged.facts)


def _journal_of(saving: Saving, tier: Tier) -> Journal:
    ranks = saving.ranks
    return Journal(
        save_id=saving.agreed.save_id,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        root=str(saving.store),
        endpoint=endpoint_of(saving.store),
        folder=saving.folder,
        step=saving.about.step,
        overwrite=saving.options.overwrite,
        replaces=_replaced(saving, tier) if ranks.rank == COORDINATOR and saving.options.overwrite else [],
    )


def _replaced(saving: Saving, tier: Tier) -> list[str]:
    """Save ids of what stands there, as far as it can be read, and of what earlier saves are uploading to there."""
    on_their_way = [found.journal for found in stage_folder.scan(tier.root) if found.journal]
    here = (endpoint_of(saving.store), saving.path)
    save_ids = [journal.save_id for journal in on_their_way if (journal.endpoint, journal.path) == here]
    with suppress(CheckpointError):
        save_ids.append(layout.committed_save_id(saving.store, saving.folder))
    return save_ids


def _local_info(saving: Saving, tier: Tier, staged: _Staged) -> LocalInfo:
    return LocalInfo(
        path=saving.path,
        step=saving.about.step,
        save_id=saving.agreed.save_id,
        folder=tier.folder,
        num_bytes=staged.num_bytes,
        direct_ranks=staged.direct_ranks,
    )
