"""The save in flight of a strategy, and the work of rank 0 once it is committed, copies and removals; and the refusal
of DeepSpeed's strategy. Knows nothing of Lightning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import fsspec

from bytecheckpoint import api
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.agreement.stopping import rank_in
from bytecheckpoint.manager.cool_down import copy_step
from bytecheckpoint.saving.handle import SaveHandle, has_failed
from bytecheckpoint.storage import garbage, layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_plain_path, open_store
from bytecheckpoint.storage.paths import join_name

logger = logging.getLogger("bytecheckpoint")


def refuse_deepspeed(strategy: object, of_deepspeed: type) -> None:
    """Raises CheckpointMismatchError (conflict) for DeepSpeed's strategy: it keeps weights and optimizers in partitions
    of its own, which a strategy does not see.
    """
    if isinstance(strategy, of_deepspeed):
        raise CheckpointMismatchError(
            f"{type(strategy).__name__} is DeepSpeed's strategy, whose partitions are not saved from here; nothing was "
            "set up: use BcpFSDPStrategy or BcpModelParallelStrategy, or save the engine itself with bcp.save",
            kind="conflict",
        )


class SaveInFlight:
    """The save of a strategy that may be under way, on one rank."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._work: list[Future[None]] = []
        self._copied_to = ""

    def note_begun(self, handle: SaveHandle) -> None:
        """Notes a save that has begun. Call `settle` before."""
        self._handle = handle

    def copy(self, source: str, target: str, storage_options: Mapping[str, Any] | None, *, timeout_s: float) -> None:
        """Makes rank 0 copy the checkpoint to another path: in the background once the save in flight is committed, or
        before this returns if no save is in flight. All ranks call this.

        An error of the copy is raised on all ranks: by `settle` if a save is in flight, else by this. `timeout_s` are
        the seconds that this waits for other ranks.
        """

        def act() -> None:
            if rank_in(None) == 0:
                copy_checkpoint(source, target, storage_options)

        if self._handle is None:
            Decisions(None, target, timeout_s=timeout_s).do(_copying(target), act)
            return
        self._copied_to = target
        self._submit(self._handle, act)

    def remove(self, path: str, storage_options: Mapping[str, Any] | None) -> None:
        """Removes a checkpoint once the save in flight is committed and copied, and not at all if that save or a copy
        fails; at once if no save is in flight. Rank 0 calls it. A removal that fails is only logged.
        """

        def remove() -> None:
            try:
                remove_checkpoint(path, storage_options)
            except (CheckpointError, OSError) as error:
                logger.warning("%s could not be removed, and stays: %s", showable_url(path), error)

        self._after_commit(remove)

    def remove_object(self, path: str, name: str, storage_options: Mapping[str, Any] | None) -> None:
        """Removes the object of this name below a path, at the time at which `remove` removes a checkpoint. Rank 0
        calls it. If the removal fails, nothing is raised or logged, and `bcp gc` finds it.
        """

        def remove() -> None:
            with suppress(CheckpointError):
                open_store(path, storage_options=storage_options, writer_threads=1).delete(name)

        self._after_commit(remove)

    def settle(self, *, timeout_s: float, wait_s: float | None = None) -> None:
        """Waits until the save in flight is committed, and its copies and removals are done. All ranks call this.

        Args:
            timeout_s: Seconds to wait for other ranks.
            wait_s: Seconds to wait for the save, and as many for its copies; None waits for as long as they take.

        Raises the error of the save or of a copy, on all ranks; TimeoutError if the save has not ended after `wait_s`:
        the next call waits for it again.
        """
        handle, self._handle = self._handle, None
        work, self._work = self._work, []
        copied_to, self._copied_to = self._copied_to, ""
        if handle is not None:
            try:
                handle.result(wait_s)
            except TimeoutError:
                if not handle.done():  # a caller that waits longer, such as teardown, is to find it
                    self._handle, self._work, self._copied_to = handle, work, copied_to
                raise

        def finish() -> None:
            if copied_to and wait(work, wait_s).not_done:
                raise TimeoutError(f"it was still under way {wait_s:g} s after the save")
            for done in work:
                done.result()

        if copied_to:
            Decisions(None, copied_to, timeout_s=timeout_s).do(_copying(copied_to), finish)
        else:
            finish()

    def close(self) -> None:
        """Ends the worker thread, after what it has to do."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _after_commit(self, act: Callable[[], None]) -> None:
        """Calls `act` unless the save in flight has failed: at once if there is none, or if it has ended and none of
        its work waits; else as `_submit`.
        """
        handle = self._handle
        if handle is None or (handle.done() and not self._work):
            if handle is None or not has_failed(handle):
                act()
            return
        self._submit(handle, act)

    def _submit(self, handle: SaveHandle, act: Callable[[], None]) -> None:
        """Calls `act` on the worker thread once the save has ended, unless that or an earlier `act` failed."""
        if self._worker is None:
            # A thread of its own: what follows one commit comes before what follows the next.
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="bcp-after-commit")

        earlier = list(self._work)  # ended before `run` begins: there is one thread

        def run() -> None:
            if not has_failed(handle) and not any(each.exception() for each in earlier):
                act()

        self._work.append(self._worker.submit(run))


def _copying(target: str) -> str:
    return f"copying a checkpoint to {showable_url(target)}"


def copy_checkpoint(source: str, target: str, storage_options: Mapping[str, Any] | None) -> None:
    """Puts a committed checkpoint at a second path, in place of any checkpoint or link there; by links or copies inside
    the storage, if it has them.

    Raises like `copy_step`.
    """
    if is_plain_path(target) and os.path.islink(target):  # noqa: PTH114
        os.unlink(target)  # noqa: PTH108 - else what it points to would be replaced
    of_source = open_store(source, storage_options=storage_options, writer_threads=1)
    of_target = open_store(target, storage_options=storage_options, writer_threads=1)
    found = layout.committed_save_id(of_target, "")
    manifest = layout.read_manifest(of_source, "")
    if found != manifest.save_id:
        _link_files(source, target, [file.name for file in manifest.files], storage_options)
    copy_step(of_source, "", of_target, "", may_replace={found} if found else ())


def _link_files(source: str, target: str, names: Iterable[str], storage_options: Mapping[str, Any] | None) -> None:
    """Creates the data files at the target by links, or by copies inside the storage. `copy_step` copies the bytes of
    a file that cannot be created in this way.
    """
    if is_plain_path(source):
        for name in names:
            linked = os.path.join(target, name)  # noqa: PTH118 - a URL's rules do not apply
            with suppress(OSError):
                os.makedirs(os.path.dirname(linked), exist_ok=True)  # noqa: PTH103, PTH120
                os.link(os.path.join(source, name), linked)  # noqa: PTH118
        return
    with suppress(OSError, NotImplementedError, ImportError, ValueError):
        files, root = fsspec.core.url_to_fs(source, **(storage_options or {}))
        _, target_root = fsspec.core.url_to_fs(target, **(storage_options or {}))
        for name in names:
            files.cp_file(join_name(root, name), join_name(target_root, name))


def remove_checkpoint(path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Deletes the checkpoint at a path, what abandoned saves have left there, and its folder if nothing else is in it.
    Of a link, only the link is deleted. It is no error if there is nothing.

    Raises CheckpointCorruptError if a manifest cannot be read, and StorageError.
    """
    if is_plain_path(path) and os.path.islink(path):  # noqa: PTH114
        os.unlink(path)  # noqa: PTH108
        return
    with suppress(CheckpointNotFoundError):
        api.delete(path, storage_options=storage_options)
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    for leftover in garbage.find_leftovers(store, "").found:
        garbage.remove(store, leftover)
    if is_plain_path(path):
        for folder, _, _ in os.walk(path, topdown=False):
            with suppress(OSError):  # of a folder that is not empty
                os.rmdir(folder)  # noqa: PTH106
