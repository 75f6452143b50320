"""The public functions, with what they promise. Their phases are in phases.py."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from bytecheckpoint.adapters.frameworks.detect import Framework
from bytecheckpoint.adapters.key_map import KeyMap
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.info import LoadReport
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone, wanted_step
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.phases import run_load, run_resume, run_save, run_warm_up
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.layout import checked_step
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import path_text

logger = logging.getLogger("bytecheckpoint")


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework = "auto",
    *,
    step: int | None = None,
    async_save: bool = False,
    process_group: dist.ProcessGroup | None = None,
    role: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    to: Literal["storage", "memory"] = "storage",
) -> SaveHandle:
    """Saves the state of all ranks as one checkpoint that any layout can load.

    Args:
        path: A directory or any fsspec URL; with `step` the checkpoint is at `path/step_00001000`.
        state: A dict of modules, optimizers, objects with state_dict(), tensors and plain data; every rank passes
            what it holds, and all call `save` together.
        framework: `auto`, `ddp`, `fsdp`, `fsdp2`, `dtensor`, `vescale`, `megatron` or `deepspeed`. `auto` detects it.
            A framework that the state has nothing of is refused, such as `fsdp` with a model that is not wrapped yet:
            see docs/frameworks.md.
        step: The training step, at least 0.
        async_save: Return when the state may change again, and write in the background. With `snapshot="lazy"`, return
            before that: the state must not change until the handle's `staged()` returns.
        process_group: The ranks that take part; the default group if None, this process alone where there is none.
        role: Saves to `path/<role>` instead, for jobs that train several models side by side.
        metadata: Your own data for the manifest, of types that msgpack and JSON have; rank 0's is stored.
        storage_options: For the fsspec backend; never stored.
        options: See SaveOptions.
        to: `memory` holds the checkpoint in the memory of the hosts only, where `bcp.resume` finds it; `storage`
            commits it at the path, and with `options.memory` holds it in memory first.

    Returns:
        A handle whose `result()` returns the CheckpointInfo once the checkpoint is committed, or, if `to` is `memory`,
        held in memory; the save has finished already unless `async_save`. With `options.local_stage`, the handle's
        `local()` returns when all data is durable on disks of the hosts, or at the path where a disk has no room.

    Raises:
        CheckpointExistsError: A committed checkpoint is there (`options.overwrite` replaces it), or another save has
            replaced it meanwhile; or the path would be a checkpoint and a root of steps, with any options.
        CheckpointMismatchError: Ranks do not agree about a tensor, a value or the target; the state has nothing of
            `framework`; or `step`, `role` or `to` is not valid.
        CheckpointSaveError: A value cannot be saved, or a rank failed or is missing. Every rank raises it, and nothing
            was committed unless the message says so.
        StorageError: The store refused or could not be reached.

    With `snapshot="lazy"` and a cached plan, the handle raises the errors that ranks find together.
    """
    return run_save(
        path,
        state,
        framework,
        step=step,
        async_save=async_save,
        process_group=process_group,
        role=role,
        metadata=metadata,
        storage_options=storage_options,
        options=given_or_default(options, SaveOptions),
        owner=None,
        to=to,
    )


def warm_up(
    state: Mapping[str, Any],
    framework: Framework = "auto",
    *,
    path: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> None:
    """Does ahead of time what only the first asynchronous save of this state does.

    Plans the save together with all ranks, which must all call this, and allocates the staging memory, at most
    `staging_bytes` of the options; with `options.memory`, both slots of the job that saves to `path`. Writes nothing
    to `path`, and keeps no reference to a tensor.

    `path` is needed for `options.memory` only; the other arguments are as for `save`. Raises CheckpointMismatchError,
    CheckpointSaveError and StorageError like `save`, and the error of an earlier asynchronous save that the caller has
    not seen.
    """
    run_warm_up(
        state,
        framework,
        path=path,
        process_group=process_group,
        role=role,
        storage_options=storage_options,
        options=given_or_default(options, SaveOptions),
    )


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework = "auto",
    *,
    step: int | Literal["latest"] | None = "latest",
    strict: bool = True,
    key_map: KeyMap | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Fills the state of all ranks, in place, from a checkpoint that any layout may have saved.

    Restores the top-level entries that the state names and ignores the checkpoint's others; a foreign checkpoint
    without such entries may have the names of the state's only entry. Nothing is changed before every check that can be
    made up front has passed on every rank.

    Args:
        path: As for `save`; or a safetensors file or folder, a folder of torch.distributed.checkpoint or DeepSpeed, or
            a torch.save file, which are read without conversion.
        state: As for `save`: its tensors are the memory that is filled, its plain data is replaced in its containers.
            Modules on the meta device get memory, optimizers without state get state, and lose the state of parameters
            that had none when they were saved.
        framework: As for `save`.
        step: A step, `latest` for the checkpoint at `path` itself or its newest committed step, None for `path` only.
        strict: Raise one error for all keys that are missing on either side, shapes and dtypes that differ, rules of
            `include`, `exclude` and `key_map` that match nothing, and a load that would fill nothing. Otherwise load
            what fits and report the rest, with a warning for the rules and for a load that fills nothing.
        key_map: From checkpoint FQN to state FQN: a dict, a list of (pattern, replacement) for re.sub applied in
            order, or a function. Optimizer state follows the parameters of its modules.
        include: Only checkpoint FQNs that match one of these globs.
        exclude: No checkpoint FQNs that match one of these globs. The optimizer state of a parameter goes with it.
        cast: Convert dtypes that differ. Floating-point dtypes round; a value out of range of an integer dtype, or that
            a float8 dtype turns into NaN or another sign, is an error. Weights in float8, int8 or MXFP4 with scales
            beside them (`weight_scale_inv`, `weight_scale`, `_scales`) are multiplied by these on the way to full
            precision, unless the state has a place for the scales too.
        process_group: As for `save`.
        role: As for `save`.
        storage_options: As for `save`.
        options: See LoadOptions.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or a file of it is gone. A checkpoint that is
            replaced while it is read is read again; kind `replaced` means that this happened too often.
        CheckpointMismatchError: State and checkpoint do not fit, the state has nothing of `framework`, or the path is a
            checkpoint and a root of steps and `step` does not select one; the state is unchanged. Only a value that
            `cast` cannot convert (`dtype`), and two values where an optimizer's flat buffer has room for one
            (`conflict`), are found while reading, when parts may be overwritten.
        CheckpointCorruptError: Damaged bytes.
        UnsafeCheckpointError: The checkpoint requires something that loading must not do.
        CheckpointSaveError: The state holds what is not supported (`unsupported_value`).
        CheckpointError: A rank failed (`rank_failed`) or is missing (`rank_missing`).
        StorageError: The store refused or could not be reached.

    Once reading has begun, the message ends with a sentence that says if this rank's state was overwritten.
    """
    return run_load(
        path,
        state,
        framework,
        step=step,
        strict=strict,
        key_map=key_map,
        include=include,
        exclude=exclude,
        cast=cast,
        process_group=process_group,
        role=role,
        storage_options=storage_options,
        options=given_or_default(options, LoadOptions),
        ignored=(),
    )


def resume(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework = "auto",
    *,
    options: SaveOptions,
    strict: bool = True,
    key_map: KeyMap | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    load_options: LoadOptions | None = None,
) -> LoadReport | None:
    """Fills the state of all ranks, in place, from the newest checkpoint that the memory of the hosts, their local
    stages and the path hold. Any number of ranks in any layout. Bytes out of memory and local stages are always
    verified; `load_options.verify` counts only for a checkpoint of which nothing but the path has files.

    What is damaged is read from another holder, or the next older checkpoint is taken, by all ranks together. Newest
    means of the latest branch of training, then of the greatest step. The first save of a new process, and the first
    after a load, begin a branch: they are newer than all saves before them.

    Args:
        path: What was given to `save`.
        state: As for `load`.
        framework: As for `load`.
        options: The options of the saves: `memory`, `local_stage` and `timeout_s`.
        load_options: See LoadOptions. All other arguments are as for `load`.

    Returns:
        The report, with `sources`; None, with the state unchanged, where no finished save was found.

    Raises:
        CheckpointCorruptError: Something was saved, and none of it can be loaded, or its newest step may be of a later
            release. The message says so, and if the state is unchanged or undefined.
        CheckpointMismatchError: `options` has no memory; or as `load`.
        CheckpointError: As `load`.
    """
    return run_resume(
        path,
        state,
        framework,
        options=given_or_default(options, SaveOptions),
        load_options=given_or_default(load_options, LoadOptions, argument="load_options"),
        strict=strict,
        key_map=key_map,
        include=include,
        exclude=exclude,
        cast=cast,
        process_group=process_group,
        role=role,
        storage_options=storage_options,
    )


def open(  # noqa: A001  bcp.open is to a checkpoint what open is to a file
    path: str | os.PathLike[str],
    step: int | Literal["latest"] | None = "latest",
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a committed checkpoint for inspection, in one process and without a model. Reads only the manifest, or the
    metadata of a foreign format.

    `path`, `step`, `storage_options` and `options` are as for `load`.
    Raises CheckpointNotFoundError, CheckpointCorruptError, UnsafeCheckpointError or StorageError, and
    CheckpointMismatchError if the path is a checkpoint and a root of steps and `step` does not select one.
    """
    target = LoadTarget(path_text(path), wanted_step(step), storage_options)
    source = open_alone(target, given_or_default(options, LoadOptions))
    return Checkpoint(source)


def latest(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Returns the greatest step under a path whose folder holds a manifest, or None. A checkpoint at the path itself,
    saved without a step, is none.

    Raises CheckpointMismatchError if the path is a checkpoint and a root of steps.
    """
    return next(layout.newest_steps(open_store(path, storage_options=storage_options, writer_threads=1)), None)


def steps(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Returns all committed steps under a path, ascending. Raises as `latest` does."""
    return layout.steps_of_root(open_store(path, storage_options=storage_options, writer_threads=1))


def delete(
    path: str | os.PathLike[str], step: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Deletes one committed checkpoint, pinned or not: the one at `path`, or with `step` that one under it. One rank
    calls it.

    Deletes the manifest first, then the files of its save and a manager's records beside it: no reader finds a part of
    a checkpoint, and `bcp gc` finds the files that a killed or failed deletion leaves. Other files stay: those of the
    user, of other steps, and those that a link points to. Links to this checkpoint no longer load.

    Raises CheckpointNotFoundError if no checkpoint is committed there, CheckpointCorruptError or UnsafeCheckpointError
    if its manifest cannot be read, and StorageError; then nothing is deleted but, if the storage failed, perhaps the
    manifest.
    """
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    deletion.delete_checkpoint(store, layout.find_checkpoint(store, checked_step(step), location=str(store)))
