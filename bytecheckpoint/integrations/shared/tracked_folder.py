"""A folder of checkpoints under names of a framework, with a file that says which is the newest: `latest` of DeepSpeed,
`latest_checkpointed_iteration.txt` of Megatron-LM. The file is written when the manifest exists, and before any rank
learns that its save is committed: so it never names an incomplete checkpoint, nor one older than a save that a rank
knows to have succeeded, unless that save was told to leave the file as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from bytecheckpoint import api, phases
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manifest.validation import UNSAFE_NAME
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.target import SaveOwner
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, one_block, read_whole

T = TypeVar("T")
_MAX_BYTES = 4096
"""Largest length of the file."""


class TrackedFolder(NamedTuple):
    """The folder, as the ranks of the default group reach it."""

    root: str
    """Path or URL."""
    tracker: str
    """Name of the file."""
    storage_options: Mapping[str, Any] | None
    timeout_s: float

    def path_of(self, name: str) -> str:
        return join_name(self.root, name)

    def shown(self, name: str = "") -> str:
        """Returns the path or URL, of one checkpoint or of the folder, for messages: without credentials."""
        return showable_url(self.path_of(name))

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        tracked_as: str | None,
        async_save: bool,
        metadata: Mapping[str, Any],
        options: SaveOptions,
        on_tracked: Callable[[str | None], object] | None,
    ) -> SaveHandle:
        """Saves one checkpoint, and replaces one of this name atomically. At the commit, rank 0 writes `tracked_as`
        into the tracker file, then calls `on_tracked` with the file's old content, None if there was no file: in the
        background if `async_save`. With `tracked_as` None it does neither.

        Raises the errors of `bytecheckpoint.save`, and StorageError if the tracker file cannot be written: the
        checkpoint is then committed all the same.
        """
        check = _nothing if tracked_as is None else partial(self._track, name, tracked_as, on_tracked)
        return phases.run_save(
            self.path_of(name),
            state,
            "auto",
            step=None,
            async_save=async_save,
            process_group=None,
            metadata=metadata,
            storage_options=self.storage_options,
            options=replace(options, overwrite=True),
            owner=SaveOwner("", may_replace=lambda: True, before_commit=_nothing, check=check),
        )

    def decide_together(self, decide: Callable[[], T], kind: type[T]) -> T:
        """Calls `decide` on rank 0 and returns its result on every rank; if it fails, all ranks raise its error. All
        ranks call this together. First waits until the saves of this process have ended.
        """
        process_state().saves.wait_until_ended()
        return self.decisions.decide_together("looking for a checkpoint", decide, kind)

    @property
    def decisions(self) -> Decisions:
        return Decisions(None, self.shown(), timeout_s=self.timeout_s)

    def read(self, *, content: str) -> str | None:
        """Returns the content of the tracker file without white space around it; None if there is no such file. Raises
        CheckpointNotFoundError if the file is empty or only white space: its advice says to write `content`, such as
        "the name", of a checkpoint into it.
        """
        text = self._content(self._store())
        if text == "":
            raise CheckpointNotFoundError(
                f"{self.shown(self.tracker)} is empty, as a write that was cut short leaves it; nothing was loaded: "
                f"write {content} of a checkpoint into it, one of {self.committed()}, or delete it to begin anew",
                kind="not_found",
                path=self.shown(),
            )
        return text

    def open(self, name: str, *, about: str, advice: str = "") -> Checkpoint:
        """Opens one checkpoint. Raises CheckpointNotFoundError if none is committed under this name: the message begins
        with `about`, names those that are committed, and ends with `advice`. Raises the other errors of
        `bytecheckpoint.open`.
        """
        try:
            return api.open(self.path_of(name), storage_options=self.storage_options)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{about} is no committed checkpoint: {error.message}. Nothing was loaded; committed are: "
                f"{self.shown_committed()}{advice}",
                kind=error.kind,
                path=self.shown(name),
            ) from error

    def shown_committed(self) -> str:
        """Returns the names of `committed` for messages; "none" if there are none."""
        return ", ".join(self.committed()) or "none"

    def committed(self) -> list[str]:
        """Returns the names of the committed checkpoints of this library in the folder, sorted."""
        store = self._store()
        folders = [name for name, size in store.list("").items() if size is None and not UNSAFE_NAME.search(name)]
        return sorted(name for name in folders if layout.has_manifest(store.list(name)))

    def _track(self, name: str, content: str, on_tracked: Callable[[str | None], object] | None) -> None:
        store = self._store()
        try:
            before = self._content(store)
            store.write(self.tracker, one_block(content.encode()), replace=True)
            if on_tracked is not None:
                on_tracked(before)  # not earlier: callers delete what the file no longer names
        except CheckpointError as error:
            path = self.shown(name)
            raise StorageError(
                f"{path} is committed and complete, but {self.tracker} beside it, by which a restart would find it, "
                f"could not be written: {error.message}. Until the next save a restart finds the one before: write "
                f"{content!r} into it, or load {path} by its name",
                kind=error.kind,
                path=path,
            ) from error

    def _content(self, store: Store) -> str | None:
        if store.list("").get(self.tracker) is None:
            return None
        return read_whole(store, self.tracker, max_bytes=_MAX_BYTES).decode(errors="replace").strip()

    def _store(self) -> Store:
        return open_store(self.root, storage_options=self.storage_options, writer_threads=1, timeout_s=self.timeout_s)


def _nothing(*_: object) -> None:
    """Does nothing, in place of a call that is not needed."""
