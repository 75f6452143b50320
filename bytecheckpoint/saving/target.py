"""The place of one save and the call that all ranks make for it: small records that every step of a save takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, together
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.validation import MAX_DEPTH, MAX_METADATA_BYTES, is_too_deep
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.local_stage import LocalStage
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.inventory import refuse_occupied
from bytecheckpoint.storage.layout import root_of, step_folder
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import RootObject
from bytecheckpoint.storage.store import Store, SupportsDuplicate, UnconditionalStore, full_location

logger = logging.getLogger("bytecheckpoint")

_DOING = {"wait": "waiting for the slot of the save", "plan": "planning the save", "stage": "staging the save"}


class SaveCall(NamedTuple):
    """One call of `save`, made by all ranks together."""

    ranks: Ranks
    about: Subject
    timer: PhaseTimer

    @contextmanager
    def phase(self, name: Literal["wait", "plan", "stage"]) -> Iterator[None]:
        """Surrounds one phase before the writing: times it, and raises an error of one rank on all ranks."""
        doing = f"{_DOING[name]} to {self.about.path}"
        with together(self.ranks, doing, about=self.about), self.timer.phase(name):
            yield


class SaveOwner(NamedTuple):
    """The owner of the root that a save writes to. Another owner may take the root over while the save is in flight."""

    save_id_prefix: str
    """First 8 characters of the ids of its saves, by which other owners recognise what these saves left."""
    may_replace: Callable[[], bool]
    """Called by the coordinator, perhaps twice before anything is written, and again before the commit. Returns True if
    a checkpoint that stands there may be replaced; raises CheckpointExistsError if it is protected."""
    before_commit: Callable[[], None]
    """Called by the coordinator just before it creates the manifest. Raises like `check`."""
    check: Callable[[], None]
    """Raises CheckpointSaveError (superseded) if another owner has claimed the root. Called by the coordinator when the
    manifest exists."""
    root_objects: Callable[[], Sequence[RootObject]] = tuple
    """Called by the coordinator of a save through a local stage. Returns what `before_commit` would write to the root,
    which recovery writes if it commits the save."""
    after_failure: Callable[[], None] | None = None
    """Called by the coordinator when the save fails before the commit. Raises like `check`, and changes nothing."""


class SaveTarget(NamedTuple):
    """The place of the checkpoint; the same on all ranks, except that each may have another local stage, and that
    ranks other than the coordinator need no owner.
    """

    store: Store
    folder: str
    """Folder of the checkpoint inside the store."""
    step: int | None
    overwrite: bool
    stage: LocalStage | None = None
    """None where data goes to the store at once."""
    owner: SaveOwner | None = None
    """None if the root has no owner, and on ranks other than the coordinator."""
    memory: str = ""
    """Text of the memory options that must be the same on all ranks; empty without a memory tier."""
    reuse: bool = False
    """True if files of the newest checkpoint are taken where they are equal."""

    @property
    def path(self) -> str:
        return join_name(str(self.store), self.folder)

    def __str__(self) -> str:
        overwriting = ", overwriting what is there" if self.overwrite else ""
        staged = ", through a local stage" if self.stage is not None else ""
        reusing = ", reusing files" if self.reuse else ""
        return f"{full_location(self.store, self.folder)} (step={self.step}{overwriting}{staged}{reusing}{self.memory})"

    @property
    def save_id_prefix(self) -> str:
        """First characters of the save id; empty without an owner, as on ranks other than the coordinator."""
        return self.owner.save_id_prefix if self.owner is not None else ""

    def may_replace(self) -> bool:
        """Returns True if the existing checkpoint may be replaced. Called by the coordinator. Raises the errors of the
        owner.
        """
        return self.overwrite if self.owner is None else self.owner.may_replace()

    def refuse_existing(self, ranks: Ranks) -> None:
        """On the coordinator, raises the errors of `refuse_occupied` and of the owner, and StorageError (unsupported)
        if the store cannot replace the checkpoint that is there. Does nothing on the other ranks.
        """
        if ranks.rank == COORDINATOR:
            store, folder = self.store, self.folder
            overwrite = self.may_replace()
            refuse_occupied(store, folder, overwrite=overwrite)
            if overwrite and isinstance(store, UnconditionalStore) and layout.has_manifest(store.list(folder)):
                store.check_replaceable()


def open_target(
    path: str | os.PathLike[str],
    *,
    step: int | None,
    role: str | None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions,
    owner: SaveOwner | None = None,
) -> SaveTarget:
    """Opens the store and the local stage of a save. Raises the errors of `root_of`, `open_store` and `LocalStage`."""
    root, folder = root_of(path, role), "" if step is None else step_folder(step)
    store = open_store(
        root,
        storage_options=storage_options,
        writer_threads=options.writer_threads,
        timeout_s=options.timeout_s,
    )
    stage = LocalStage(options) if options.local_stage else None
    can_reuse = options.reuse and isinstance(store, SupportsDuplicate)
    if options.reuse and not can_reuse:
        logger.info("%s can neither link nor copy files, so each save writes all of them", root)
    return SaveTarget(store, folder, step, options.overwrite, stage, owner, reuse=can_reuse)


def checked_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the user's metadata as a manifest holds it.

    Raises CheckpointSaveError (unsupported_value), before anything is written, for what msgpack cannot encode, and for
    what readers refuse as too long or too deep.
    """
    try:
        encoded = msgspec.msgpack.encode(dict(metadata or {}))
        decoded: dict[str, Any] = msgspec.msgpack.decode(encoded, type=dict[str, Any])
        _check_limits(decoded, len(encoded))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointSaveError(
            f"metadata cannot be written down: {error}; nothing was written: use str keys, and None, bool, int, float, "
            "str, bytes, lists and dicts as values",
            kind="unsupported_value",
        ) from error
    return decoded


def _check_limits(metadata: Mapping[str, Any], num_bytes: int) -> None:
    if num_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"it has {num_bytes} bytes, and at most {MAX_METADATA_BYTES} are read")
    if is_too_deep(metadata):
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def empty_error(global_ranks: Sequence[int]) -> CheckpointSaveError:
    """Returns the error about a state without an entry."""
    return CheckpointSaveError(
        "the state is an empty dict, on every rank; nothing was written: pass what is to be saved, as in "
        '{"model": model}',
        kind="unsupported_value",
        ranks=tuple(global_ranks),
    )
