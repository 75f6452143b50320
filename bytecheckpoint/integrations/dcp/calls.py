"""`save`, `async_save` and `load` of the drop-in for torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.optim import Optimizer

from bytecheckpoint import phases
from bytecheckpoint.adapters.rank_values.rank_local import RankLocal
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.adapters.stateful import give_state
from bytecheckpoint.distributed.ranks import Subject, join_ranks, together
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.integrations.dcp.conflicts import OnConflict
from bytecheckpoint.integrations.dcp.storage import (
    LOAD_PLANNER_ADVICE,
    SAVE_PLANNER_ADVICE,
    BcpStorageReader,
    BcpStorageWriter,
    PathLike,
    alone_group,
    begin_save,
    flattened,
    refuse_other,
)
from bytecheckpoint.integrations.dcp.torch_keywords import stages_later, with_writers_keywords
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_together
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.runtime.threads import shared_threads
from bytecheckpoint.saving.handle import SaveHandle


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_conflict: OnConflict = "per_rank",
) -> Metadata:
    """Saves a state, with all ranks together, and returns when it is committed.

    Args:
        state_dict: Modules, optimizers, other values with state_dict() and load_state_dict(), tensors and plain data.
        checkpoint_id: A folder or any fsspec URL; a checkpoint that is there is replaced atomically.
        storage_writer: None or a BcpStorageWriter, whose path and options count where the arguments give none.
        planner: None or a DefaultSavePlanner, whose options change nothing here.
        process_group: The ranks that take part; if None, the group of the writer, or the default group.
        no_dist: Save in this process alone.
        use_collectives: Without effect: no collective is used in any case.
        options: See SaveOptions. Its `overwrite` has no effect: a checkpoint that is there is replaced, unless the
            writer was made with the keyword `overwrite=False`.
        storage_options: For the fsspec backend; never stored.
        on_conflict: Says what happens to plain data, and to unsharded tensors of at most 64 KiB, that differ between
            ranks: `per_rank` saves the value of each rank, with a warning; `error` refuses them.

    Returns:
        The checkpoint under DCP's names, each tensor as one chunk, without values that only other ranks than 0 saved.

    Raises:
        CheckpointMismatchError: A writer or planner of another class, or no place to save to (`conflict`); and the
            other errors of `bytecheckpoint.save`.
    """
    del use_collectives
    place = _place(BcpStorageWriter, storage_writer, checkpoint_id, storage_options)
    options = _save_options(storage_writer, options, planner=planner, on_conflict=on_conflict)
    with _ranks_of(process_group, storage_writer, no_dist=no_dist) as group:
        handle = begin_save(
            _shown(state_dict),
            place,
            process_group=group,
            options=options,
            on_conflict=on_conflict,
            is_async=False,
        )
        saved = place._replace(root=handle.result().path, step=None)
        return _metadata_of(saved, group, timeout_s=options.timeout_s)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_conflict: OnConflict = "per_rank",
) -> Future[CheckpointInfo] | AsyncSaveResponse:
    """Begins a save that writes in the background, and returns when the state may change again; earlier if an
    `async_stager` says that staging may go on after this call.

    The other arguments and the errors are those of `save`.

    Args:
        async_checkpointer_type: Without effect: the background is threads of this process at low priority.
        async_stager: None, or torch's BlockingAsyncStager or DefaultStager. It is not called: this library stages by
            itself, into pinned memory that it keeps. A DefaultStager with `use_async_staging` says that the caller
            waits for `staging_completion` before it changes the state: staging then goes on after this call, as with
            SaveOptions(snapshot="lazy"). Steps of torch optimizers wait by themselves.

    Returns:
        A future of the CheckpointInfo; where staging goes on, an AsyncSaveResponse of it and of a future that ends
        when the state may change. A failure that nobody asks the future about is raised by the next save, or printed at
        the end of the process.
    """
    del async_checkpointer_type, use_collectives
    place = _place(BcpStorageWriter, storage_writer, checkpoint_id, storage_options)
    options = _save_options(storage_writer, options, planner=planner, on_conflict=on_conflict)
    is_staged_later = stages_later(async_stager)
    if is_staged_later and options.snapshot == "auto":
        options = replace(options, snapshot="lazy")
    with _ranks_of(process_group, storage_writer, no_dist=no_dist) as group:
        handle = begin_save(
            _shown(state_dict),
            place,
            process_group=group,
            options=options,
            on_conflict=on_conflict,
            is_async=True,
        )
    upload = SaveFuture(handle)
    if not is_staged_later:
        return upload
    # torch declares futures of None, and gives back what the save returns.
    return AsyncSaveResponse(staging_completion=StagedFuture(handle), upload_completion=upload)  # type: ignore[arg-type]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Fills a state, in place and with all ranks together, from a checkpoint that any layout may have saved.

    Tensors, also those of modules and optimizers, are filled and converted to the state's dtype as with `cast=True` of
    `bytecheckpoint.load`, and plain data is replaced. load_state_dict() is called last, only of other values that have
    one. What the state does not ask for is ignored, at any depth.

    Args:
        state_dict: As for `save`. An empty dict in it takes whatever the checkpoint has in its place.
        checkpoint_id: A checkpoint, or a root of steps, of which the newest counts; folders of
            torch.distributed.checkpoint and other formats are read as they are.
        storage_reader: None or a BcpStorageReader, whose path and options count where the arguments give none.
        planner: None or a DefaultLoadPlanner; with its allow_partial_load, what the checkpoint lacks stays as it is.
        process_group: As for `save`.
        no_dist: Load in this process alone.
        options: See LoadOptions.
        storage_options: For the fsspec backend.

    Raises:
        CheckpointMismatchError: A key is missing (`missing_key`), a shape differs, or an argument is not supported; the
            state is unchanged. And the other errors of `bytecheckpoint.load`.
    """
    place = _place(BcpStorageReader, storage_reader, checkpoint_id, storage_options)
    ignored = {"unexpected_key"}
    if planner is not None:
        refuse_other(DefaultLoadPlanner, planner, LOAD_PLANNER_ADVICE)
        ignored |= {"missing_key"} if planner.allow_partial_load else set()  # type: ignore[attr-defined]
    if options is None and isinstance(storage_reader, BcpStorageReader):
        options = storage_reader.options
    options = given_or_default(options, LoadOptions)
    shown = _shown(state_dict)
    with _ranks_of(process_group, storage_reader, no_dist=no_dist) as group:
        phases.run_load(
            place.root,
            shown,
            "auto",
            step="latest",
            strict=True,
            cast=True,
            process_group=group,
            storage_options=place.storage_options,
            options=options,
            ignored=ignored,
        )
    for key in sorted(shown, key=str):
        if _is_asked(state_dict[key]):
            give_state(state_dict[key], shown[key])
        else:
            state_dict[key] = shown[key]


class SaveFuture(Future[CheckpointInfo]):
    """The outcome of a save in the background. It cannot be cancelled."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle
        self.set_running_or_notify_cancel()
        handle.add_done_callback(self._end)

    def _end(self, handle: SaveHandle) -> None:
        # Not by the handle's methods: these would note that the caller has seen the error.
        progress = handle._progress
        if progress.error is not None:
            self.set_exception(progress.error)
        else:
            self.set_result(progress.outcome.result())

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Blocks until the checkpoint is committed. Raises the error of the save, or TimeoutError after `timeout`
        seconds.
        """
        return self._handle.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Blocks until the save has ended, and returns its error or None; TimeoutError as `result` raises it."""
        return self._handle.exception(timeout)


class StagedFuture(Future[None]):
    """The end of staging, from which on the state may change. It cannot be cancelled."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle
        self.set_running_or_notify_cancel()
        shared_threads().begin("bcp-staging", self._wait)

    def _wait(self) -> None:
        progress = self._handle._progress
        progress.wait_until_staged(helps=False)
        if progress.error is not None:
            self.set_exception(progress.error)
        else:
            self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        """Blocks until the state may change. Without a `timeout`, the calling thread stages a part itself.

        Raises the error of the save if it failed before, or TimeoutError after `timeout` seconds.
        """
        if timeout is None:
            self._handle.staged()
        else:
            super().result(timeout)


def _place(
    plug_in: type[BcpStorageWriter | BcpStorageReader],
    given: object,
    checkpoint_id: PathLike | None,
    storage_options: Mapping[str, Any] | None,
) -> LoadTarget:
    """Returns the place of a checkpoint; what the arguments do not say is taken from the plug-in.

    Raises CheckpointMismatchError (conflict) for a plug-in of another class, or if neither names a place.
    """
    if given is not None and not isinstance(given, plug_in):
        raise CheckpointMismatchError(
            f"{type(given).__module__}.{type(given).__qualname__} writes or reads a format of its own; nothing was "
            f"done: pass {plug_in.__name__}(path), or checkpoint_id alone",
            kind="conflict",
        )
    path = checkpoint_id if checkpoint_id is not None or given is None else given.path
    if path is None:
        raise CheckpointMismatchError(
            f"there is no path; nothing was done: pass checkpoint_id, or {plug_in.__name__}(path)", kind="conflict"
        )
    of_plug_in = None if given is None else given.storage_options
    return LoadTarget(os.fspath(path), "latest", storage_options if storage_options is not None else of_plug_in)


def _save_options(
    writer: object, options: SaveOptions | None, *, planner: SavePlanner | None, on_conflict: OnConflict
) -> SaveOptions:
    """Returns the options of the call, or those of the writer if the call has none, changed as the keywords of the
    writer say. Without a keyword `overwrite`, that option is True.

    Raises CheckpointMismatchError (conflict) for a planner other than None or a DefaultSavePlanner, and ValueError for
    an unknown `on_conflict`. Callers call it before a state_dict(), which may gather a whole model.
    """
    if planner is not None:
        refuse_other(DefaultSavePlanner, planner, SAVE_PLANNER_ADVICE)
    if on_conflict not in {"per_rank", "error"}:
        raise ValueError(f"on_conflict takes 'per_rank' or 'error', not {on_conflict!r}")
    if not isinstance(writer, BcpStorageWriter):
        return replace(given_or_default(options, SaveOptions), overwrite=True)
    if options is None:
        return writer.options
    return with_writers_keywords(given_or_default(options, SaveOptions), writer.keywords)


@contextmanager
def _ranks_of(
    process_group: dist.ProcessGroup | None, plug_in: object, *, no_dist: bool
) -> Iterator[dist.ProcessGroup | None]:
    """Yields the group of the ranks that take part, None for the default group. With `no_dist` this is a new group of
    this process alone, which is destroyed at the end.
    """
    of_writer = plug_in.process_group if isinstance(plug_in, BcpStorageWriter) else None
    with alone_group(is_alone=no_dist) as alone:
        yield alone or process_group or of_writer


def _metadata_of(saved: LoadTarget, process_group: dist.ProcessGroup | None, *, timeout_s: float) -> Metadata:
    """Returns DCP's Metadata for a committed checkpoint. All ranks call this together, and one reads for all."""
    about = Subject(saved.root, None, is_save=True)
    ranks = join_ranks(process_group, timeout_s, about=about)
    with together(ranks, "reading what was saved", about=about):
        source = open_together(ranks, saved, LoadOptions(timeout_s=timeout_s))
    ranks.close()
    return flattened(source.manifest, saved.root, rank=0).metadata


def _shown(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state, sorted by key, with the result of state_dict() in place of each value that `_is_asked`. All
    ranks call them in this order, because a state_dict() may use collectives.
    """
    keys = sorted(state_dict, key=str)
    return {key: state_dict[key].state_dict() if _is_asked(state_dict[key]) else state_dict[key] for key in keys}


def _is_asked(value: object) -> bool:
    """Returns True for Stateful values saved as their state_dict(): no module, optimizer, RankLocal or RngState."""
    return isinstance(value, Stateful) and not isinstance(value, nn.Module | Optimizer | RankLocal | RngState)
