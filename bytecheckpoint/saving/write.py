"""The second half of a save: data written by every rank, reports gathered, the manifest created. It runs on the
caller's thread or in the background, and uses the ranks' messages only, never their collectives. A save that goes
through a local stage does the same in other steps, which are in upload.py.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, RankFailedError, Ranks, Subject, together
from bytecheckpoint.distributed.stragglers import report_straggler_rate
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    and_more,
)
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.manifest import DataFile, Manifest, decode_manifest, encode_manifest, open_manifest
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.saving.global_plan import Agreed
from bytecheckpoint.saving.local_stage import Tier
from bytecheckpoint.saving.report import WrittenFile, build_manifest, encode_report, remember_tensors
from bytecheckpoint.saving.telemetry import write_telemetry
from bytecheckpoint.staging.compress import CompressedFile, allocate_for, compress_file
from bytecheckpoint.staging.snapshots import Snapshot
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.garbage import MIN_AGE_S, sweep
from bytecheckpoint.storage.inventory import refuse_occupied
from bytecheckpoint.storage.object_io import FileImage, write_image
from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, UnconditionalStore

logger = logging.getLogger("bytecheckpoint")

_MAY_BE_COMMITTED = "All data is written; whether the checkpoint was committed, `bcp ls` tells"
_HELD_UP_S = MIN_AGE_S / 2
"""A save that is older may have been taken for dead, and its data been cleared away."""
_UNSEEN_PAUSES_S = (0.1, 0.4, 1.5)
_CANNOT_BE_COMMITTED = {"no_space", "permission"}
"""Errors with which a store refused to write anything, and did not merely lose the answer."""


class Saving(NamedTuple):
    """A save that has been planned."""

    ranks: Ranks
    store: Store
    folder: str
    """Of the checkpoint inside the store."""
    about: Subject
    options: SaveOptions
    agreed: Agreed
    snapshot: Snapshot
    """The bytes of this rank's files."""
    scratch: BufferPool
    """Memory to put compressed files together in."""
    metadata: Mapping[str, Any]
    clock: PhaseTimer
    tier: Tier | None
    """Where data goes first; None where it goes to the store at once."""

    @property
    def path(self) -> str:
        return join_name(str(self.store), self.folder)

    @property
    def names(self) -> list[str]:
        """Of this rank's data files, inside the checkpoint's folder."""
        numbers = range(len(self.agreed.known.files))
        return [layout.data_file_name(self.agreed.save_id, self.ranks.rank, number) for number in numbers]


def refuse_existing(ranks: Ranks, store: Store, folder: str, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError, before anything is written, where a committed checkpoint is not to be replaced, or
    none may stand beside another one, and StorageError (unsupported) where the store cannot replace it.
    """
    if ranks.rank == COORDINATOR:
        refuse_occupied(store, folder, overwrite=overwrite)
        if overwrite and isinstance(store, UnconditionalStore) and layout.has_manifest(store.list(folder)):
            store.check_replaceable()


def check_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The user's metadata, which has to fit into a manifest.

    Raises CheckpointSaveError (unsupported_value) before anything is written.
    """
    try:
        kept: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(metadata or {})), type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointSaveError(
            f"metadata cannot be written down: {error}; nothing was written: use str keys, and None, bool, int, float, "
            "str, bytes, lists and dicts as values",
            kind="unsupported_value",
        ) from error
    return kept


def warn_of_differing(ranks: Ranks, agreed: Agreed) -> None:
    """Says on one rank, once for each plan, which small tensors replicas disagree about."""
    fqns = agreed.known.differing_replicas if agreed.is_new else ()
    if fqns and ranks.rank == COORDINATOR:
        warnings.warn(
            f"{len(fqns)} tensors that ranks hold as replicas have different values: {and_more(fqns, 10)}. The lowest "
            "rank's value is saved; wrap what is meant to differ in bcp.RankLocal",
            stacklevel=3,
        )


def write_and_commit(saving: Saving) -> CheckpointInfo:
    """Makes a planned save durable. Raises on every rank what `save` documents."""
    ranks, about, clock = saving.ranks, saving.about, saving.clock
    # Other ranks learn of a failure first: what was written is deleted when `together` has been left.
    with ExitStack() as undo, together(ranks, f"writing {saving.path}", about=about):
        undo.callback(discard, saving)
        with clock.phase("write"), closing(saving.snapshot):
            written = write_files(saving)
        report = encode_report(saving.agreed, written)
        if ranks.rank != COORDINATOR:
            undo.pop_all()  # from here on the coordinator may commit it, whatever becomes of this rank
        with report_straggler_rate(ranks, saving.agreed.known.plan, clock.seconds["write"]):
            reports = ranks.gather(report)
        files = [of_file.file for of_file in written]
        write_telemetry(saving.store, saving.folder, saving.agreed.save_id, ranks=ranks, clock=clock, files=files)
        facts = content = b""
        if ranks.rank == COORDINATOR:
            content, facts = encode(saving, reports)
        undo.pop_all()
    return commit_together(saving, content, facts)


def commit_together(saving: Saving, content: bytes, facts: bytes) -> CheckpointInfo:
    """Creates the manifest, once every rank has written: it is the commit. Content and facts are the coordinator's, who
    tells the facts to all.
    """
    ranks, about, clock = saving.ranks, saving.about, saving.clock
    may_be = f"{about.aftermath}. {_MAY_BE_COMMITTED}" if about.aftermath else _MAY_BE_COMMITTED
    after = about._replace(aftermath=about.aftermath if ranks.rank == COORDINATOR else may_be)
    replaced: Sequence[str] = ()
    with ExitStack() as undo, together(ranks, f"committing {saving.path}", about=after), clock.phase("commit"):
        hear_that_all_have_written(saving, b"")
        if ranks.rank == COORDINATOR:
            replaced = _commit(saving, content, undo)
        info = msgspec.msgpack.decode(ranks.broadcast(facts), type=CheckpointInfo)
    ranks.close()
    clock.end_stall()
    if ranks.rank == COORDINATOR:
        # After the other ranks know: there may be thousands of files, and this rank alone deletes them.
        deletion.discard(saving.store, saving.folder, replaced)
        sweep(saving.store, saving.folder, saving.agreed.save_id)
        logger.info("committed %s in %.2f s", saving.path, clock.total)
    return replace(info, seconds={**clock.seconds, "total": clock.total})


def write_files(saving: Saving) -> list[WrittenFile]:
    """All files of this rank, made durable."""
    files = saving.agreed.known.files
    num_raw = sum(not planned.codecs for planned in files)  # they come first
    written = [_write_raw(saving, number) for number in range(num_raw)]
    return written + _compress_and_write(saving, range(num_raw, len(files))) if num_raw < len(files) else written


def _compress_and_write(saving: Saving, numbers: range) -> list[WrittenFile]:
    """While one file is written the next is compressed, and never a third is held: they take turns in two memories."""
    files = [saving.agreed.known.files[number] for number in numbers]
    memories = [allocate_for(files) for _ in range(2)]
    compressed: dict[int, CompressedFile] = {}
    written: list[WrittenFile] = []

    def compress(number: int) -> None:
        compressed[number] = _compress(saving, number, memories[number % 2])

    def write(number: int) -> None:
        written.append(_write_compressed(saving, number, compressed.pop(number)))

    compressing = [partial(compress, number) for number in numbers]
    writing = [partial(write, number) for number in numbers]
    for at_once in zip_longest([None, *writing], compressing):
        run_jobs(lambda step: step(), [step for step in at_once if step is not None], num_threads=2)
    return written


def _write_raw(saving: Saving, number: int) -> WrittenFile:
    planned = saving.agreed.known.files[number]
    content = partial(saving.snapshot.content, number)
    image = FileImage(saving.names[number], planned.extent_lengths, planned.blocks, content)
    return WrittenFile(_write_image(saving, image), None)


def _compress(saving: Saving, number: int, memory: memoryview) -> CompressedFile:
    return compress_file(
        saving.agreed.known.files[number],
        partial(saving.snapshot.content, number),
        memory,
        threads=saving.options.writer_threads,
        on_compressed=partial(saving.clock.add, "compress"),
        on_checksum=partial(saving.clock.add, "checksum"),
    )


def _write_compressed(saving: Saving, number: int, compressed: CompressedFile) -> WrittenFile:
    image = compressed.image(saving.names[number], saving.scratch)
    return WrittenFile(_write_image(saving, image), compressed.places)


def _write_image(saving: Saving, image: FileImage) -> DataFile:
    path = join_name(saving.folder, image.name)
    on_checksum = partial(saving.clock.add, "checksum")
    if saving.tier is not None:
        return saving.tier.write(image, saving.store, path, on_checksum)
    return write_image(saving.store, path, image, on_checksum)


def encode(saving: Saving, reports: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The manifest as it will be committed, and what `save` tells about it."""
    with gc_paused():
        manifest = build_manifest(
            saving.agreed,
            reports,
            names=saving.ranks.global_ranks,
            step=saving.about.step,
            metadata=saving.metadata,
        )
        content = encode_manifest(manifest)
        decoded = _decode_checked(content)
        remember_tensors(saving.agreed.known, decoded)
        return content, msgspec.msgpack.encode(describe_checkpoint(decoded, path=saving.path, seconds={}))


def hear_that_all_have_written(saving: Saving, told: bytes) -> bytes:
    """What the coordinator has told. Takes back what this rank has written where another one failed.

    Hazard: only when the coordinator says so. One that is merely slow may yet commit what this rank has reported; so
    may one that has the report of a rank which was interrupted since.
    """
    try:
        return saving.ranks.broadcast(told)
    except RankFailedError:
        discard(saving)
        raise


def _decode_checked(content: bytes) -> Manifest:
    """The manifest as every reader will see it: what none would accept is never committed."""
    try:
        return decode_manifest(content)
    except CheckpointCorruptError as error:
        raise CheckpointSaveError(
            f"what the ranks report to have written makes no checkpoint: {error.message}. Nothing was committed: this "
            "is a bug, please report it",
            kind="storage",
        ) from error


def _commit(saving: Saving, content: bytes, undo: ExitStack) -> Sequence[str]:
    """Creates the manifest; returns the files of the checkpoint that it replaces. Where it is certain that nothing was
    committed, `undo` deletes what this save has written.
    """
    with ExitStack() as refused:
        refused.callback(undo.callback, discard, saving)
        if saving.clock.age_s > _HELD_UP_S:
            _refuse_if_cleared_away(saving, content)
        if saving.ranks.num_ranks > 1 and not is_remote(saving.store):
            _refuse_what_is_not_shared(saving, content)
        refused.pop_all()
    replaced = deletion.files_of_checkpoint(saving.store, saving.folder) if saving.options.overwrite else []
    try:
        layout.commit(saving.store, saving.folder, content, replace=saving.options.overwrite)
    except CheckpointExistsError:
        undo.callback(discard, saving)  # somebody else's checkpoint stands: ours cannot have been committed
        raise
    except (StorageError, CheckpointSaveError) as error:
        if error.kind in _CANNOT_BE_COMMITTED and not _is_there(saving):
            undo.callback(discard, saving)
            raise
        raise type(error)(f"{error.message}. {_MAY_BE_COMMITTED}", kind=error.kind, path=error.path) from error
    return replaced


def _refuse_if_cleared_away(saving: Saving, content: bytes) -> None:
    manifest = open_manifest(content)
    try:
        layout.check_files(saving.store, saving.folder, manifest, range(len(manifest.files)))
    except (CheckpointNotFoundError, CheckpointCorruptError) as error:
        raise CheckpointSaveError(
            f"the save to {saving.path} was held up for {saving.clock.age_s / 3600:.1f} hours, and what it had written "
            "is not there any more: it was taken for that of a dead save and cleared away. Nothing was committed, and "
            "what stood there is as it was: save again",
            kind="storage",
            path=saving.path,
        ) from error


def _refuse_what_is_not_shared(saving: Saving, content: bytes) -> None:
    """Where hosts do not share a folder, the manifest would name files that are on other disks. Each file is opened by
    its name: what a network file system tells of a folder may be a minute old.
    """
    for file in open_manifest(content).files:  # whose millions of chunks have been checked
        try:
            _last_byte(saving, file)
        except (CheckpointNotFoundError, CheckpointCorruptError) as error:
            raise CheckpointSaveError(
                f"{join_name(saving.path, file.name)}, which another rank has written, cannot be read by "
                f"rank {saving.ranks.global_ranks[COORDINATOR]} ({error.kind}): the path has to be on a file system "
                "that the hosts of all ranks share, and show all of them the same. Nothing was committed, and what "
                "stood there is as it was: save to a shared folder or an object store",
                kind="storage",
                path=saving.path,
            ) from error


def _last_byte(saving: Saving, file: DataFile) -> None:
    """Reads it. Some file systems show a file a moment after it was closed elsewhere."""
    name = join_name(saving.folder, file.name)
    for pause_s in (*_UNSEEN_PAUSES_S, None):
        try:
            saving.store.read_into(name, file.byte_length - 1, memoryview(bytearray(1)))
        except (CheckpointNotFoundError, CheckpointCorruptError):
            if pause_s is None:
                raise
            time.sleep(pause_s)
        else:
            return


def _is_there(saving: Saving) -> bool:
    """Whether the manifest of this save may be in its place."""
    try:
        if not layout.has_manifest(saving.store.list(saving.folder)):
            return False
        return layout.read_manifest(saving.store, saving.folder).save_id == saving.agreed.save_id
    except CheckpointError:
        return True


def discard(saving: Saving) -> None:
    """Removes what a save that will not be committed has written: the coordinator all of it, the others their own.

    Nothing of one that recovery can still commit.
    """
    if saving.tier is not None:
        if saving.tier.is_kept:
            return
        saving.tier.remove()
    names = [*saving.names, layout.telemetry_name(saving.agreed.save_id, saving.ranks.rank)]
    with suppress(CheckpointError):
        if saving.ranks.rank == COORDINATOR:
            data = layout.data_files_of(saving.store, saving.folder, saving.agreed.save_id)
            names = data + layout.telemetry_of(saving.store, saving.folder, saving.agreed.save_id)
    deletion.discard(saving.store, saving.folder, names)
