"""The part of the memory tier in one call of `save`: where the save goes, and the slots that it takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.memory_tier.hold import hold, hold_and_finish
from bytecheckpoint.options import Memory, SaveOptions
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.saving.global_plan import ReplicaCopies
from bytecheckpoint.saving.in_flight import ProcessState
from bytecheckpoint.saving.prepare import PreparedSave
from bytecheckpoint.saving.target import SaveTarget
from bytecheckpoint.staging.memory_slots import JobMemory, TierOfSave
from bytecheckpoint.storage.memory_root.job_folder import is_in_memory, open_job
from bytecheckpoint.storage.open_store import open_store, real_location
from bytecheckpoint.storage.store import Store

DESTINATIONS = ("storage", "memory")


def where_to(to: object, options: SaveOptions, path: str) -> tuple[SaveOptions, bool]:
    """Returns the options of a save that goes to `to`, and True if that is memory only. The options for memory have no
    local stage and reuse no files.

    Raises CheckpointMismatchError (conflict), which is a ValueError, for another `to` than `storage` and `memory`, and
    for `memory` if the options have none.
    """
    if not isinstance(to, str) or to not in DESTINATIONS:
        what = f"to takes 'storage' or 'memory', not {to!r:.100}; nothing was saved"
        raise CheckpointMismatchError(what, kind="conflict")
    if to == "storage":
        return options, False
    if options.memory is None:
        raise CheckpointMismatchError(
            f"the save to {path} was to go to memory, and its options have none; nothing was saved: pass "
            "SaveOptions(memory=bcp.Memory())",
            kind="conflict",
            path=path,
        )
    return replace(options, local_stage=None, reuse=False), True


def with_memory_options(target: SaveTarget, options: SaveOptions, *, is_only: bool) -> SaveTarget:
    """Returns the target with a text of the memory options that must be the same on all ranks."""
    memory = options.memory
    if memory is None:
        return target
    agreed = f"copies={memory.copies}, parity={memory.parity}, max_bytes={memory.max_bytes}"
    return target._replace(memory=f", {'only ' if is_only else ''}in memory with {agreed}")


def tier_of_save(
    process: ProcessState, target: SaveTarget, options: SaveOptions, *, is_only: bool
) -> TierOfSave | None:
    """Returns the slots for a save, or None if it has no memory tier. Raises StorageError if the root cannot be used,
    and CheckpointMismatchError (conflict) for a save without a step.
    """
    if options.memory is None:
        return None
    if target.step is None:
        raise CheckpointMismatchError(
            f"the save to {target.path} has no step, and memory checkpoints are ordered by it; nothing was written: "
            "pass step=, or save without Memory",
            kind="conflict",
            path=target.path,
        )
    return TierOfSave(memory_of(process, options.memory, target.store), is_only, options.memory.max_bytes)


def slots_for(
    process: ProcessState, root: str | None, storage_options: Mapping[str, Any] | None, options: SaveOptions
) -> TierOfSave | None:
    """Returns the slots for saves to this root, before the first save; None if the options have no memory tier. Raises
    CheckpointMismatchError (conflict) if they have one and no root is given.
    """
    memory = options.memory
    if memory is None:
        return None
    if root is None:
        raise CheckpointMismatchError(
            "slots of memory checkpoints belong to the job that saves to a path, and none was given; nothing was "
            "allocated: pass path= as to save, or options without Memory",
            kind="conflict",
        )
    store = open_store(root, storage_options=storage_options, writer_threads=1, timeout_s=options.timeout_s)
    return TierOfSave(memory_of(process, memory, store), is_only=False, max_bytes=memory.max_bytes)


def replicas_of(tier: TierOfSave | None, options: SaveOptions) -> ReplicaCopies | None:
    """Returns the place of this rank and the number of copies, at least 2, that memory is to have of replicated bytes.
    Returns None without a memory tier, or with `copies=1` and no parity.
    """
    memory = options.memory
    if tier is None or memory is None or (memory.copies == 1 and not memory.parity):
        return None
    return ReplicaCopies(RankPlace(tier.slots.job.host, memory.failure_domain), max(memory.copies, 2))


def memory_of(process: ProcessState, memory: Memory, store: Store) -> JobMemory:
    """Returns the JobMemory of this process for the job that saves to this root. The first call for a job makes it, and
    warns of a memory root on a disk.
    """
    root = os.fspath(memory.root)
    job = open_job(root, real_location(store, ""))
    if job.path not in process.memories:
        if not is_in_memory(root):
            warnings.warn(
                f"the memory root {root} is on a disk and not in tmpfs: memory checkpoints work there, as fast as its "
                "page cache writes back",
                stacklevel=2,
            )
        process.memories[job.path] = JobMemory(job)
        process.memories[job.path].note_load(process.loaded_generation)
    return process.memories[job.path]


def holding_first(
    prepared: PreparedSave,
    tier: TierOfSave,
    metadata: Mapping[str, Any],
    finish: Callable[[], CheckpointInfo],
) -> Callable[[], CheckpointInfo]:
    """Returns a function that holds the save in memory, then commits it by `finish`, unless the save goes to memory
    alone.
    """
    if tier.is_only:
        return partial(hold, prepared, tier, metadata)
    return partial(hold_and_finish, prepared, tier, metadata, finish)
