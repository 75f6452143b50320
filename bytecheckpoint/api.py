"""The public functions. Each phase of `save` and `load` is one block, read from top to bottom, whose names lead to the
modules that do the work.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from bytecheckpoint.adapters.collect import collect_all, data_reports, entries_of, finish_all, random_restores
from bytecheckpoint.adapters.finite_check import check_finite
from bytecheckpoint.adapters.frameworks.detect import Framework
from bytecheckpoint.adapters.key_map import KeyMap, listed_globs
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.distributed.ranks import COORDINATOR, Subject, join_ranks, together
from bytecheckpoint.info import LoadReport
from bytecheckpoint.loading.exchange import Traffic, read_together
from bytecheckpoint.loading.file_checks import plan_again, plan_together
from bytecheckpoint.loading.match import Match, match_again
from bytecheckpoint.loading.mismatches import warn_of_unused
from bytecheckpoint.loading.name_scope import Fitted, NameScope, WantedState, fit_state
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone, open_together, retry_replaced, wanted_step
from bytecheckpoint.loading.overwrite_state import report_overwrite
from bytecheckpoint.loading.read import Source
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.commit import write_and_commit
from bytecheckpoint.saving.global_plan import exchange_plans, make_local_plan
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.in_flight import process_state, reentry_refused, wait_until_numbered, wait_until_staged
from bytecheckpoint.saving.prepare import PreparedSave, allocate, kind_of_snapshot
from bytecheckpoint.saving.target import SaveCall, SaveOwner, check_metadata, open_target
from bytecheckpoint.saving.upload import write_upload_and_commit
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.layout import check_step, root_of
from bytecheckpoint.storage.open_store import open_store

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
        async_save: Return as soon as the state may change again, and write in the background.
        process_group: The ranks that take part; the default group if None, this process alone where there is none.
        role: Saves to `path/<role>` instead, for jobs that train several models side by side.
        metadata: Your own data for the manifest, of types that msgpack and JSON have; rank 0's counts.
        storage_options: For the fsspec backend; never stored.
        options: See SaveOptions.

    Returns:
        A handle whose `result()` returns the CheckpointInfo once the checkpoint is committed; it has finished already
        unless `async_save`. With `options.local_stage`, its `local()` returns when all data is durable on disks of the
        hosts.

    Raises:
        CheckpointExistsError: A committed checkpoint is there (`options.overwrite` replaces it), or another save has
            replaced it meanwhile; or the path would be a checkpoint and a root of steps, with any options.
        CheckpointMismatchError: Ranks do not agree about a tensor, a value or the target; the state has nothing of
            `framework`; or `step` or `role` is not valid.
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
        make_metadata=lambda: metadata,
        storage_options=storage_options,
        options=options or SaveOptions(),
        owner=None,
    )


@reentry_refused()
@gc_paused()  # for the whole call, so that the records of planning are freed before collections go on
def run_save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework,
    *,
    step: int | None,
    async_save: bool,
    process_group: dist.ProcessGroup | None,
    role: str | None,
    make_metadata: Callable[[], Mapping[str, Any] | None],
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions,
    owner: SaveOwner | None,
) -> SaveHandle:
    """Does what `save` says, for the `owner` of the root, if it has one. An error of `make_metadata` on one rank is
    raised by all.
    """
    timer, process = PhaseTimer(), process_state()
    wait_until_numbered()
    kind = kind_of_snapshot(options.snapshot, async_save=async_save)
    about = Subject(showable_url(str(path)), step if isinstance(step, int) else None, is_save=True)
    # The number of this call takes a thread, which would compete with training: a lazy save asks for it later.
    ranks = join_ranks(process_group, options.timeout_s, about=about, enters_later=kind == "lazy")
    call = SaveCall(ranks, about, timer)
    with ExitStack() as slot:
        with call.phase("wait"):
            waiting = process.saves.slot(awaits_upload=not (async_save and options.local_stage))
            staging_slot = slot.enter_context(waiting)
            if not async_save:
                slot.close()  # only what is staged needs the staging memory
        with call.phase("plan"):
            step, metadata = check_step(step), check_metadata(make_metadata())
            target = open_target(
                path, step=step, role=role, storage_options=storage_options, options=options, owner=owner
            )
            process.check_writable(target.store, ranks)
            entries = entries_of(state, framework)
            contents = collect_all(entries)
            check_finite(contents, check=options.check_finite, path=about.path, rank=ranks.global_ranks[ranks.rank])
            kept = process.kept(target)
            frozen = kept.frozen(entries)
            local_plan = make_local_plan(ranks, target, contents, options, plans=process.plans, frozen=frozen)
            call = call._replace(about=about._replace(step=step))
            prepared = PreparedSave(call, target, local_plan, kind=kind, options=options, kept=kept)

        slot.callback(prepared.close)
        with prepared.meter.reports_failure():
            prepared.take_snapshot(entries)

        finish = partial(write_and_commit, prepared, metadata)
        if target.stage is not None:
            uploading = process.saves.uploading(staging_slot, prepared.close)
            finish = partial(write_upload_and_commit, prepared, metadata, target.stage, uploading)
        if not (async_save and process.saves.run_in_background(prepared, finish, slot)):
            process.saves.run_now(prepared.progress, finish, slot, raises=not async_save)
    return SaveHandle(prepared.progress)


def warm_up(
    state: Mapping[str, Any],
    framework: Framework = "auto",
    *,
    process_group: dist.ProcessGroup | None = None,
    options: SaveOptions | None = None,
) -> None:
    """Does ahead of time what only the first asynchronous save of this state does.

    Plans the save together with all ranks, which must all call this, and allocates the staging memory, at most
    `staging_bytes` of the options. Writes nothing, and holds no tensor.

    `state`, `framework` and `process_group` are as for `save`. Raises CheckpointMismatchError and CheckpointSaveError
    like `save`, and the error of an earlier asynchronous save that the caller has not seen.
    """
    options, process = options or SaveOptions(), process_state()
    wait_until_numbered()
    about = Subject("(nowhere: warm_up)", None, is_save=True, call="warm_up")
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, "warming up", about=about), gc_paused(), process.saves.slot(awaits_upload=False):
        contents = collect_all(entries_of(state, framework))
        local_plan = make_local_plan(ranks, about.path, contents, options, plans=process.plans)
        agreed = exchange_plans(ranks, local_plan)
        allocate(agreed.rank_plan.files, process.buffers, local_plan.shards, staging_bytes=options.staging_bytes)
    ranks.close()


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
            Modules on the meta device get memory, optimizers without state get state.
        framework: As for `save`.
        step: A step, `latest` for the checkpoint at `path` itself or its newest committed step, None for `path` only.
        strict: Raise one error for all keys that are missing on either side, shapes and dtypes that differ, rules of
            `include`, `exclude` and `key_map` that match nothing, and a load that would fill nothing. Otherwise load
            what fits and report the rest, with a warning for the rules and for a load that fills nothing.
        key_map: From checkpoint FQN to state FQN: a dict, a list of (pattern, replacement) for re.sub applied in
            order, or a function. Optimizer state follows the parameters of its modules.
        include: Only checkpoint FQNs that match one of these globs.
        exclude: No checkpoint FQNs that match one of these globs. The optimizer state of a parameter goes with it.
        cast: Convert dtypes that differ. Floating-point dtypes round; a value out of range of an integer dtype is an
            error.
        process_group: As for `save`.
        role: As for `save`.
        storage_options: As for `save`.
        options: See LoadOptions.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or a file of it is gone. A checkpoint that is
            replaced while it is read is read again; kind `replaced` means that this happened too often.
        CheckpointMismatchError: State and checkpoint do not fit, the state has nothing of `framework`, or the path is a
            checkpoint and a root of steps and `step` does not select one; the state is unchanged.
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
        options=options or LoadOptions(),
        ignored=(),
    )


@retry_replaced
@gc_paused()  # as for save
def run_load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework,
    *,
    step: int | Literal["latest"] | None,
    strict: bool,
    key_map: KeyMap | None,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    cast: bool,
    process_group: dist.ProcessGroup | None,
    role: str | None,
    storage_options: Mapping[str, Any] | None,
    options: LoadOptions,
    ignored: Collection[str],
) -> LoadReport:
    """Does what `load` says, and with `strict` lets problems of the `ignored` kinds pass into the report."""
    started = time.monotonic()
    wait_until_numbered()
    wait_until_staged()  # a lazy save may still read the state that this load will change
    about = Subject(showable_url(str(path)), step if isinstance(step, int) else None, is_save=False)
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, f"looking for the checkpoint in {about.path}", about=about):
        target = LoadTarget(root_of(path, role), wanted_step(step), storage_options)
        source = open_together(ranks, target, options)

    with together(ranks, f"matching the state with {about.path}", about=about):
        included, excluded = listed_globs("include", include), listed_globs("exclude", exclude)
        scope = NameScope(source.manifest, ranks.rank, ranks.num_ranks, key_map, included, excluded)
        wanted = WantedState(state, framework, cast=cast, strict=strict, ignored=ignored)
        fitted = fit_state(ranks, scope, wanted, lambda seen: plan_together(ranks, source.showing(seen.manifest), seen))
        entries, stored, match, manifest, fetches, findings = fitted
        source = source.showing(manifest)

    with report_overwrite(source.changes, ranks), together(ranks, f"reading {about.path}", about=about):
        # Memory that does not exist yet is made only now that the load can no longer be refused.
        if any([not shard.address and shard.tensor.is_meta for shard in match.shards]):  # noqa: C419  as in find_shared
            source.changes.make_memory()
            refused = {problem.fqn for problem in match.problems}
            for entry in entries:
                entry.prepare(stored, refused)
            match = match_again(entries, stored, match, cast=cast)
            fetches = plan_again(source, match, checked=fetches)
        try:
            with source.counting(ranks):
                traffic = read_together(ranks, source, fetches, match)
            match.zero_padding()
        finally:
            if source.changes.may_have_overwritten:
                match.count_changes()
        finish_all(entries, stored, source.changes.overwriting)
        ranks.barrier()
    ranks.close()
    report = _report(source, fitted, match, traffic, time.monotonic() - started)
    if ranks.rank == COORDINATOR:
        warn_of_unused(findings, report.path)
        logger.info("loaded %s in %.2f s", report.path, report.seconds)
    return report


def _report(source: Source, fitted: Fitted, match: Match, traffic: Traffic, seconds: float) -> LoadReport:
    return LoadReport(
        path=source.path,
        step=source.manifest.step,
        save_id=source.manifest.save_id,
        num_tensors=len({shard.fqn for shard in match.shards}),
        num_bytes_read=traffic.num_bytes_read,
        num_bytes_received=traffic.num_bytes_received,
        missing=[problem.fqn for problem in fitted.findings.problems if problem.kind == "missing_key"],
        unexpected=fitted.findings.unexpected,
        mismatched=[problem.text for problem in fitted.findings.problems if problem.kind != "missing_key"],
        cast=sorted(match.cast),
        skipped=sorted(match.skipped),
        unused=list(map(str, fitted.findings.unused)),
        data=data_reports(fitted.entries),
        random_restores=random_restores(fitted.entries),
        seconds=seconds,
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
    target = LoadTarget(os.fspath(path), wanted_step(step), storage_options)
    source = open_alone(target, options or LoadOptions())
    return Checkpoint(source, source.path)


def latest(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Returns the newest committed step under a path, or None. Looks for manifests, not at names or times.

    Raises CheckpointMismatchError if the path is a checkpoint and a root of steps.
    """
    return next(layout.newest_steps(open_store(path, storage_options=storage_options, writer_threads=1)), None)


def steps(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Returns all committed steps under a path, ascending. Raises as `latest` does."""
    return layout.steps_of_root(open_store(path, storage_options=storage_options, writer_threads=1))


def delete(
    path: str | os.PathLike[str], step: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Deletes one committed checkpoint: the one at `path`, or with `step` that one under it. One rank calls it.

    Deletes the manifest first, then the files of its save: no reader finds a part of a checkpoint, and `bcp gc` finds
    the files that a killed deletion leaves. Other files stay: those of the user, of other steps, and those that a link
    points to. Links to this checkpoint no longer load.

    Raises CheckpointNotFoundError if no checkpoint is committed there, CheckpointCorruptError if its manifest cannot be
    read, and StorageError; then nothing is deleted.
    """
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    deletion.delete_checkpoint(store, layout.find_checkpoint(store, check_step(step), location=str(store)))
