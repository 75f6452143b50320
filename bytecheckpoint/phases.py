"""The phases of a save and of a load, each of which is one block, read from top to bottom, whose names lead to the
modules that do the work. What they promise to users is in api.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from bytecheckpoint.adapters.collect import Entry, collect_all, data_reports, entries_of, finish_all, random_restores
from bytecheckpoint.adapters.finite_check import check_finite
from bytecheckpoint.adapters.frameworks.detect import Framework
from bytecheckpoint.adapters.key_map import KeyMap, listed_globs
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, join_ranks, together
from bytecheckpoint.info import CheckpointInfo, LoadReport
from bytecheckpoint.loading.exchange import read_together
from bytecheckpoint.loading.file_checks import plan_again
from bytecheckpoint.loading.match import Match, match_again, part_ties
from bytecheckpoint.loading.mismatches import warn_of_unused
from bytecheckpoint.loading.name_scope import Fitted, NameScope, WantedState, fit_state
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_together, retry_replaced, wanted_step
from bytecheckpoint.loading.overwrite_state import report_overwrite
from bytecheckpoint.loading.read import Source, Traffic
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory_tier.part_of_save import (
    holding_first,
    replicas_of,
    slots_for,
    tier_of_save,
    where_to,
    with_memory_options,
)
from bytecheckpoint.memory_tier.resume import ResumeCall, ResumeLoads
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.commit import write_and_commit
from bytecheckpoint.saving.global_plan import exchange_plans, make_local_plan
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.in_flight import (
    ProcessState,
    note_load,
    process_state,
    reentry_refused,
    wait_until_numbered,
    wait_until_staged,
)
from bytecheckpoint.saving.prepare import PreparedSave, SnapshotKind, allocate, kind_of_snapshot
from bytecheckpoint.saving.target import SaveCall, SaveOwner, SaveTarget, checked_metadata, open_target
from bytecheckpoint.saving.upload import write_upload_and_commit
from bytecheckpoint.staging.memory_slots import TierOfSave, generation_of
from bytecheckpoint.storage.credentials import shown_path
from bytecheckpoint.storage.layout import checked_step, root_of

logger = logging.getLogger("bytecheckpoint")


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
    role: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    make_metadata: Callable[[], Mapping[str, Any] | None] | None = None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions,
    owner: SaveOwner | None,
    to: str = "storage",
) -> SaveHandle:
    """Does what `api.save` promises. `owner` is the owner of the root, or None if the root has none. `make_metadata`
    returns the metadata in place of `metadata`; an error that it raises on one rank is raised by all.
    """
    timer, process = PhaseTimer(), process_state()
    wait_until_numbered()
    kind = kind_of_snapshot(options, async_save=async_save)
    about = Subject(shown_path(path), step if isinstance(step, int) else None, is_save=True)
    # The number of this call takes a thread, which would compete with training: a lazy save asks for it later.
    ranks = join_ranks(process_group, options.timeout_s, about=about, enters_later=kind == "lazy")
    call = SaveCall(ranks, about, timer)
    with ExitStack() as slot:
        with call.phase("wait"):
            options, only_memory = where_to(to, options, about.path)
            slot_context = process.saves.slot(awaits_upload=not (only_memory or (async_save and options.local_stage)))
            staging_slot = slot.enter_context(slot_context)
            if kind == "none":
                slot.close()  # only what is staged needs the staging memory
        with call.phase("plan"):
            step = checked_step(step)
            manifest_metadata = checked_metadata(metadata if make_metadata is None else make_metadata())
            target = open_target(
                path, step=step, role=role, storage_options=storage_options, options=options, owner=owner
            )
            place = _place_of(process, ranks, target, options, is_only=only_memory)
            entries = entries_of(state, framework)
            call = call._replace(about=about._replace(step=step))
            prepared = _plan_locally(process, call, place, entries, kind=kind, options=options)

        slot.callback(prepared.close)
        with prepared.meter.reports_failure():
            prepared.take_snapshot(entries)

        finish: Callable[[], CheckpointInfo] = partial(write_and_commit, prepared, manifest_metadata)
        if place.target.stage is not None:
            begin_upload = partial(process.saves.begin_upload, staging_slot)
            finish = partial(write_upload_and_commit, prepared, manifest_metadata, place.target.stage, begin_upload)
        if place.memory is not None:
            finish = holding_first(prepared, place.memory, manifest_metadata, finish)
        if kind != "none" and not async_save:
            prepared.stage()
        if not (async_save and process.saves.run_in_background(prepared, finish, slot)):
            process.saves.run_now(prepared.progress, finish, slot, raises=not async_save)
    return SaveHandle(prepared.progress)


class _SavePlace(NamedTuple):
    """The target of a save, and its part in the memory tier, or None if the save does not use that tier."""

    target: SaveTarget
    memory: TierOfSave | None


def _place_of(
    process: ProcessState, ranks: Ranks, target: SaveTarget, options: SaveOptions, *, is_only: bool
) -> _SavePlace:
    """Returns the place of a save to this target. Unless the save is to memory only (`is_only`), checks that the target
    can be written, and raises if not.
    """
    target = with_memory_options(target, options, is_only=is_only)
    memory = tier_of_save(process, target, options, is_only=is_only)
    if not is_only:
        process.check_writable(target.store, ranks)
    return _SavePlace(target, memory)


def _plan_locally(
    process: ProcessState,
    call: SaveCall,
    place: _SavePlace,
    entries: list[Entry],
    *,
    kind: SnapshotKind,
    options: SaveOptions,
) -> PreparedSave:
    """Collects the state of this rank and makes its local plan."""
    ranks, target = call.ranks, place.target
    contents = collect_all(entries)
    check_finite(contents, check=options.check_finite, path=call.about.path, rank=ranks.global_ranks[ranks.rank])
    kept = process.kept(target)
    local_plan = make_local_plan(
        ranks,
        target,
        contents,
        options,
        plans=process.plans,
        frozen=kept.frozen(entries),
        replicas=replicas_of(place.memory, options),
    )
    return PreparedSave(call, target, local_plan, kind=kind, options=options, kept=kept, memory=place.memory)


@reentry_refused()
@gc_paused()
def run_warm_up(
    state: Mapping[str, Any],
    framework: Framework,
    *,
    path: str | os.PathLike[str] | None,
    process_group: dist.ProcessGroup | None,
    role: str | None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions,
) -> None:
    """Does what `api.warm_up` promises."""
    process = process_state()
    wait_until_numbered()
    about = Subject("(nowhere: warm_up)", None, is_save=True, call="warm_up")
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, "warming up", about=about), process.saves.slot(awaits_upload=False):
        contents = collect_all(entries_of(state, framework))
        slots = slots_for(process, None if path is None else root_of(path, role), storage_options, options)
        replicas = replicas_of(slots, options)
        local_plan = make_local_plan(ranks, about.path, contents, options, plans=process.plans, replicas=replicas)
        rank_plan = exchange_plans(ranks, local_plan).rank_plan
        staging_bytes = options.staging_bytes
        allocate(rank_plan.staged, process.buffers, local_plan.shards, staging_bytes=staging_bytes, tier_of_save=slots)
        ranks.barrier()  # a rank that has no room is named on all of them
    ranks.close()


@retry_replaced
@gc_paused()  # as for save
def run_load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework,
    *,
    step: int | Literal["latest"] | None,
    strict: bool,
    key_map: KeyMap | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    cast: bool,
    process_group: dist.ProcessGroup | None,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None,
    options: LoadOptions,
    ignored: Collection[str],
    opened: Callable[[Ranks, LoadOptions], Source] | None = None,
) -> LoadReport:
    """Does what `api.load` promises. With `strict`, problems of the `ignored` kinds are reported and not raised.
    `opened` returns the checkpoint, if it is not to be looked for at the path.
    """
    started = time.monotonic()
    wait_until_numbered()
    wait_until_staged()  # a lazy save may still read the state that this load will change
    about = Subject(shown_path(path), step if isinstance(step, int) else None, is_save=False)
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, f"looking for the checkpoint in {about.path}", about=about):
        target = LoadTarget(root_of(path, role), wanted_step(step), storage_options)
        source = opened(ranks, options) if opened is not None else open_together(ranks, target, options)

    with together(ranks, f"matching the state with {about.path}", about=about):
        included, excluded = listed_globs("include", include), listed_globs("exclude", exclude)
        scope = NameScope(source.manifest, ranks.rank, ranks.num_ranks, key_map, included, excluded)
        wanted = WantedState(state, framework, cast=cast, strict=strict, ignored=ignored)
        fitted = fit_state(ranks, source, scope, wanted)
        (entries, stored, match, manifest), fetches, findings = fitted
        source = source.showing(manifest)

    with report_overwrite(source.changes, ranks), together(ranks, f"reading {about.path}", about=about):
        # Memory that does not exist yet is made only now that the load can no longer be refused.
        if any(tensor.is_meta for tensor in TargetShards.of(match.shards).tensors_without_address):
            match, fetches = _make_memory(source, fitted, cast=cast)
        try:
            with source.counting(ranks):
                traffic = read_together(ranks, source, fetches, match)
            match.multiply_scales()
            match.zero_padding()
        finally:
            if source.changes.may_have_overwritten:
                match.count_changes()
        if findings.has_ties:
            part_ties(ranks, entries)
        finish_all(entries, stored, source.changes.overwriting)
        ranks.barrier()
    ranks.close()
    note_load(generation_of(source.manifest) or 0)
    report = _report(source, fitted, match, traffic, time.monotonic() - started)
    if ranks.rank == COORDINATOR:
        warn_of_unused(findings, report.path)
        logger.info("loaded %s in %.2f s", report.path, report.seconds)
    return report


def _make_memory(source: Source, fitted: Fitted, *, cast: bool) -> tuple[Match, list[Fetch]]:
    """Makes the memory that the state lacks. Returns the match of the whole state with the checkpoint, and the plan of
    the reads that fill the state.
    """
    source.changes.note_new_memory()
    entries, stored, before, _ = fitted.matched
    refused = {problem.fqn for problem in before.problems}
    for entry in entries:
        entry.prepare(stored, refused)
    match = match_again(entries, stored, before, cast=cast)
    return match, plan_again(source, match, checked=fitted.fetches)


def run_resume(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: Framework,
    *,
    options: SaveOptions,
    load_options: LoadOptions,
    strict: bool,
    key_map: KeyMap | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    cast: bool = False,
    process_group: dist.ProcessGroup | None,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None,
    abandoned: Collection[int] | None = None,
) -> LoadReport | None:
    """Does what `api.resume` promises. A manager passes the `abandoned` steps of its path: then the path is used for
    its other steps alone, and CheckpointMismatchError (conflict) is raised if it has checkpoints but no such step.
    """
    loading = partial(
        run_load,
        path,
        state,
        framework,
        strict=strict,
        key_map=key_map,
        include=include,
        exclude=exclude,
        cast=cast,
        process_group=process_group,
        role=role,
        storage_options=storage_options,
        options=load_options,
        ignored=(),
    )
    calls = ResumeLoads(loading, partial(loading, step=None))
    call = ResumeCall(
        path,
        options,
        process_group=process_group,
        role=role,
        storage_options=storage_options,
        abandoned=abandoned,
    )
    return call.run(calls)


def _report(source: Source, fitted: Fitted, match: Match, traffic: Traffic, seconds: float) -> LoadReport:
    num_bytes_read, num_bytes_received = map(sum, zip(traffic, *source.traffic_apart, strict=True))
    return LoadReport(
        path=source.path,
        step=source.manifest.step,
        save_id=source.manifest.save_id,
        num_tensors=match.num_tensors,
        num_bytes_read=num_bytes_read,
        num_bytes_received=num_bytes_received,
        missing=[problem.fqn for problem in fitted.findings.problems if problem.kind == "missing_key"],
        unexpected=fitted.findings.unexpected,
        ignored=fitted.findings.ignored,
        mismatched=[problem.text for problem in fitted.findings.problems if problem.kind != "missing_key"],
        cast=sorted(match.cast),
        skipped=sorted(match.skipped),
        unused=list(map(str, fitted.findings.unused)),
        data=data_reports(fitted.matched.entries),
        random_restores=random_restores(fitted.matched.entries),
        seconds=seconds,
    )
