"""The second half of a save: data written by every rank, reports gathered, the manifest created. It runs on the
caller's thread or in the background, and uses the ranks' messages only, never their collectives.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.agreement import Agreed, build_manifest, encode_report
from bytecheckpoint.collector import collector_paused
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSaveError,
    StorageError,
)
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.manifest import Manifest, decode_manifest, encode_manifest
from bytecheckpoint.planner.file_plan import PlacedChunk
from bytecheckpoint.ranks import COORDINATOR, RankFailedError, Ranks, Subject, together
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.store import Store
from bytecheckpoint.storage.writer import Image, write_image

logger = logging.getLogger("bytecheckpoint")

_MAY_BE_COMMITTED = "All data is written; whether the checkpoint was committed, `bcp ls` tells"
_CANNOT_BE_COMMITTED = {"no_space", "permission"}
"""Errors with which a store refused to write anything, and did not merely lose the answer."""


class Saving(NamedTuple):
    """A save that has been planned and staged."""

    ranks: Ranks
    store: Store
    folder: str
    """Of the checkpoint inside the store."""
    about: Subject
    overwrite: bool
    agreed: Agreed
    files: Sequence[Sequence[PlacedChunk]]
    """The chunks of each data file of this rank."""
    images: Sequence[Image]
    """The bytes of the same files."""
    metadata: Mapping[str, Any]
    clock: Clock

    @property
    def path(self) -> str:
        return join_name(str(self.store), self.folder)


class Clock:
    """How long the phases of a save take. In seconds."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now

    def end_stall(self) -> None:
        """The call gives its thread back; only the first time counts."""
        self.seconds.setdefault("stall", time.monotonic() - self._started)

    def total(self) -> float:
        return time.monotonic() - self._started


def refuse_existing(ranks: Ranks, store: Store, folder: str, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError, before anything is staged, where a committed checkpoint is not to be replaced."""
    if ranks.rank == COORDINATOR and not overwrite and layout.has_manifest(store.list(folder)):
        raise layout.exists_error(join_name(str(store), folder))


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


def warn_of_differing(ranks: Ranks, fqns: Sequence[str]) -> None:
    """Says once, on one rank, which small tensors replicas disagree about."""
    if fqns and ranks.rank == COORDINATOR:
        shown = ", ".join(fqns[:10]) + (f" and {len(fqns) - 10} more" if len(fqns) > 10 else "")
        warnings.warn(
            f"{len(fqns)} tensors that ranks hold as replicas have different values: {shown}. The lowest rank's value "
            "is saved; wrap what is meant to differ in bcp.RankLocal",
            stacklevel=3,
        )


def write_and_commit(saving: Saving) -> CheckpointInfo:
    """Makes a planned and staged save durable. Raises on every rank what `save` documents."""
    ranks, about, clock = saving.ranks, saving.about, saving.clock
    with together(ranks, f"writing {saving.path}", about=about), ExitStack() as undo:
        undo.callback(_discard, saving)
        names = [join_name(saving.folder, image.name) for image in saving.images]
        written = [write_image(saving.store, *item) for item in zip(names, saving.images, strict=True)]
        clock.lap("write")
        data_starts = [image.data_start for image in saving.images]
        reports = ranks.gather(encode_report(list(zip(saving.files, data_starts, written, strict=True))))
        facts = content = b""
        if ranks.rank == COORDINATOR:
            content, facts = _encode_manifest(saving, reports)
        undo.pop_all()

    # The manifest appears last, and only once every rank has written: it is the commit.
    after = about._replace(aftermath="" if ranks.rank == COORDINATOR else _MAY_BE_COMMITTED)
    with together(ranks, f"committing {saving.path}", about=after):
        _hear_that_all_have_written(saving)
        if ranks.rank == COORDINATOR:
            _commit(saving, content)
        info = msgspec.msgpack.decode(ranks.broadcast(facts), type=CheckpointInfo)
        clock.lap("commit")
    ranks.farewell()
    clock.end_stall()
    if ranks.rank == COORDINATOR:
        logger.info("committed %s in %.2f s", saving.path, clock.total())
    return replace(info, seconds=clock.seconds)


def _encode_manifest(saving: Saving, reports: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The manifest as it will be committed, and what `save` tells about it."""
    with collector_paused():
        manifest = build_manifest(saving.agreed, reports, step=saving.about.step, metadata=saving.metadata)
        info = describe_checkpoint(manifest, path=saving.path, seconds={})
        return _encode_checked(manifest), msgspec.msgpack.encode(info)


def _hear_that_all_have_written(saving: Saving) -> None:
    """Takes back what this rank has written where another one failed.

    Hazard: only when the coordinator says so. One that is merely slow may yet commit what this rank has reported.
    """
    try:
        saving.ranks.broadcast(b"")
    except RankFailedError:
        _discard(saving)
        raise


def _encode_checked(manifest: Manifest) -> bytes:
    """The encoded manifest, which every reader will accept: what none would is never committed."""
    content = encode_manifest(manifest)
    try:
        decode_manifest(content)
    except CheckpointCorruptError as error:
        raise CheckpointSaveError(
            f"what the ranks report to have written makes no checkpoint: {error.message}. Nothing was committed: this "
            "is a bug, please report it",
            kind="storage",
        ) from error
    return content


def _commit(saving: Saving, content: bytes) -> None:
    replaced = _data_files(saving) if saving.overwrite else []
    try:
        layout.commit(saving.store, saving.folder, content, replace=saving.overwrite)
    except CheckpointExistsError:
        _discard(saving)  # somebody else's checkpoint stands: ours cannot have been committed
        raise
    except (StorageError, CheckpointSaveError) as error:
        if error.kind in _CANNOT_BE_COMMITTED and not _is_there(saving):
            _discard(saving)
            raise
        raise type(error)(f"{error.message}. {_MAY_BE_COMMITTED}", kind=error.kind, path=error.path) from error
    layout.discard(saving.store, saving.folder, replaced)


def _is_there(saving: Saving) -> bool:
    """Whether the manifest of this save may be in its place."""
    try:
        if not layout.has_manifest(saving.store.list(saving.folder)):
            return False
        return layout.read_manifest(saving.store, saving.folder).save_id == saving.agreed.save_id
    except CheckpointError:
        return True


def _data_files(saving: Saving) -> list[str]:
    """Those of the checkpoint that is being replaced; none where it cannot be read, which replacing may well mend."""
    with suppress(CheckpointError):
        manifest = layout.read_manifest(saving.store, saving.folder)
        return [file.name for file in manifest.files]
    return []


def _discard(saving: Saving) -> None:
    """Removes what a save that will not be committed has written: the coordinator all of it, the others their own."""
    names = [image.name for image in saving.images]
    with suppress(CheckpointError):
        if saving.ranks.rank == COORDINATOR:
            names = layout.data_files_of(saving.store, saving.folder, saving.agreed.save_id)
    layout.discard(saving.store, saving.folder, names)
