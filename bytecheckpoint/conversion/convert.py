"""A conversion, from top to bottom: opens the source, plans the target, has all ranks stream its files, and last writes
what makes it exist.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.conversion.assemble import Elements, refuse_lost_blocks
from bytecheckpoint.conversion.choice import check_choice
from bytecheckpoint.conversion.dcp import plan_dcp
from bytecheckpoint.conversion.existing_target import (
    ExistingTarget,
    TargetPlace,
    find_existing,
    open_target,
    refuse_own_files,
    stale_after_link,
)
from bytecheckpoint.conversion.file_writer import FileWriter
from bytecheckpoint.conversion.huggingface import plan_hf
from bytecheckpoint.conversion.link import check_reachable, link_manifest, with_samples, write_link
from bytecheckpoint.conversion.mapped_source import mapped_view, names_for_experts
from bytecheckpoint.conversion.native import plan_own
from bytecheckpoint.conversion.stream import TargetPlan, scratch_bytes_of
from bytecheckpoint.conversion.torch_save import plan_torch
from bytecheckpoint.distributed.ranks import COORDINATOR, RankFailedError, Ranks, Subject, together
from bytecheckpoint.errors import CheckpointExistsError, CheckpointSaveError, StorageError
from bytecheckpoint.formats.find_checkpoint import Opening
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_together
from bytecheckpoint.loading.plain_trees import PlainData
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import LeftOut, Selection, SelectionRequest, select, with_state_of_excluded
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.name_maps.fused_experts import EXPERT_NAMES, FUSED, with_packed_weights, with_separate_experts
from bytecheckpoint.name_maps.load import CheckpointFolder
from bytecheckpoint.options import LoadOptions, NameMap
from bytecheckpoint.planner.copy_plan import check_wanted
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.garbage import sweep
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import one_block

MIN_MEMORY_BYTES = 64 << 20
_READER_THREADS = 8

_IS_THERE = "The target is there, whole"
_MAY_BE_THERE = "Whether the target exists, `bcp show` tells"

OnProgress = Callable[[int], None]
Progress = Callable[[int], AbstractContextManager[OnProgress]]


class ConvertLimits(NamedTuple):
    """Limits of a conversion."""

    memory_bytes: int
    """At least MIN_MEMORY_BYTES."""
    max_file_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertRequest:
    """Arguments of a conversion."""

    source: LoadTarget
    target: str
    target_options: Mapping[str, Any]
    selection: SelectionRequest
    limits: ConvertLimits
    overwrite: bool
    is_link: bool
    """Write a manifest only."""
    follow_links: bool
    name_map: NameMap | None = None
    """Write the checkpoint as another framework would have saved it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The result of a conversion, the same on every rank."""

    source: str
    """Path or URL of the checkpoint that was read."""
    source_format: str
    path: str
    """Path or URL of the target."""
    num_files: int
    num_bytes: int
    """Bytes of the files, all ranks together, without the index, metadata or manifest that is written last. Of a link:
    bytes of the manifest."""
    num_tensors: int
    aliases: Mapping[str, str]
    left_out: Sequence[LeftOut]
    dropped_prefix: str
    num_cast: int
    """Tensors of another dtype than in the source."""
    sides: tuple[str, str] | None
    """Framework of the source and of the target, by the name map."""
    experts: str = ""
    """The key in EXPERT_NAMES after which tensors of single experts are named, where stacks were taken apart."""


class _Plan(NamedTuple):
    """A planned conversion, on one rank."""

    source: Source
    sides: tuple[str, str] | None
    selection: Selection
    place: TargetPlace
    target: TargetPlan
    save_id: str
    stale: Sequence[str] = ()
    """Files to remove once the target exists, beside those of a replaced manifest."""
    experts: str = ""
    """As in the result: the key in EXPERT_NAMES."""


def convert(request: ConvertRequest, ranks: Ranks, *, progress: Progress) -> Converted:
    """Writes the target, on all ranks together, and closes `ranks`. On a rank that writes files, calls `progress` with
    the number of bytes to write; the function that its context yields is called with the length of each block written.

    Raises the errors of a load and of a save. The target is not there then, or as it was before, unless the file that
    makes it exist, which is written after the files of all ranks, was written already or may have been.
    """
    about = Subject(showable_url(request.target), None, is_save=True)
    if request.is_link:
        return _link(request, ranks, about)
    with together(ranks, "planning the conversion", about=about):
        plan = _plan(request, ranks)
        elements = Elements(plan.source, plan.selection.wanted)
        elements.check_files()
        if ranks.rank == COORDINATOR:
            _check_space(plan)
    written: list[DataFile] = []
    write = partial(_write, request, plan, elements, progress=progress)
    with together(ranks, f"writing {plan.place.path}", about=about):
        with _discarded_on(BaseException, plan, written):
            if plan.target.last is not None:
                write(plan.target.by_rank[ranks.rank], written)
        # From here on the coordinator may commit the target, whatever else becomes of another rank.
        with _discarded_on(BaseException if ranks.rank == COORDINATOR else RankFailedError, plan, written):
            reports = ranks.gather(msgspec.msgpack.encode(written))
            if ranks.rank == COORDINATOR and plan.target.last is not None:
                written[:] = _in_order(plan, reports)
            ranks.broadcast(b"")
    if ranks.rank == COORDINATOR:
        with together(ranks, f"committing {plan.place.path}", about=about):
            if plan.target.last is None:
                write(range(len(plan.target.files)), written)
            _commit(plan, written, overwrite=request.overwrite)
    after = about._replace(left_behind=_IS_THERE if ranks.rank == COORDINATOR else _MAY_BE_THERE)
    with together(ranks, f"committing {plan.place.path}", about=after):
        ranks.broadcast(b"")
    ranks.close()
    return _converted(plan)


def _link(request: ConvertRequest, ranks: Ranks, about: Subject) -> Converted:
    """Has one rank write a manifest that points into the source."""
    with together(ranks, "linking", about=about):
        source = _open_source(request, ranks)
        place = open_target(request.target, request.selection.to, Opening(request.target_options))
        source_folder = join_name(str(source.store), source.folder)
        view = mapped_view(source, request.name_map, is_state=True, in_place=True)
        manifest, selection = link_manifest(view, request.selection, source=source_folder, target=place.path)
        check_choice(view.manifest, request.selection, selection)
        num_bytes = 0
        if ranks.rank == COORDINATOR:
            find_existing(place, "bcp", overwrite=request.overwrite, beside=True)
            store, folder = (source.store, source.folder) if manifest.linked_to else (place.store, "")
            check_reachable(store, folder, manifest, path=place.path, threads=_READER_THREADS)
            manifest = with_samples(store, folder, manifest, threads=_READER_THREADS)
            replaced = deletion.files_of_checkpoint(place.store, "") if request.overwrite else []
            stale = stale_after_link(place, replaced, source)
            num_bytes = write_link(place.store, manifest, overwrite=request.overwrite)
            deletion.discard(place.store, "", stale)
        num_bytes = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(num_bytes)), type=int)
    ranks.close()
    target = TargetPlan([], [], layout.MANIFEST_NAME, lambda _: b"")
    plan = _Plan(source, view.sides, selection, place, target, manifest.save_id)
    return replace(_converted(plan), num_bytes=num_bytes)


def _open_source(request: ConvertRequest, ranks: Ranks) -> Source:
    """Opens the source and checks its whole manifest. If a dtype is wanted, weights that are packed in MXFP4 are
    tensors of the source too.
    """
    options = LoadOptions(
        exchange="off",
        reader_threads=_READER_THREADS,
        scratch_bytes=scratch_bytes_of(request.limits.memory_bytes),
        follow_links=request.follow_links,
    )
    source = open_together(ranks, request.source, options)
    source.manifest.table.check_all()
    return source.showing(with_packed_weights(source.manifest)) if request.selection.dtype else source


def _plan(request: ConvertRequest, ranks: Ranks) -> _Plan:
    """Plans the conversion. Every rank makes the same plan, because all read the same manifest and get the same id."""
    choice, limits = request.selection, request.limits
    source = _open_source(request, ranks)
    view = mapped_view(source, request.name_map, is_state=choice.to == "bcp", in_place=False)
    manifest = view.manifest
    choice = with_state_of_excluded(manifest, choice)
    selection = select(manifest, choice, view.names_of_map)
    check_choice(manifest, choice, selection)
    selection = replace(
        selection,
        wanted=view.made_of_stored(selection.wanted),
        left_out=[*view.left_out, *selection.left_out],
    )
    check_wanted(selection.wanted, source.manifest)
    plain = PlainData(manifest, selection, choice)
    place = open_target(request.target, choice.to, Opening(request.target_options))
    existing, save_id, experts = _agreed(request, source, place, ranks)
    num_selected = len(selection.wanted)
    if experts in EXPERT_NAMES:
        selection = replace(selection, wanted=with_separate_experts(selection.wanted, EXPERT_NAMES[experts]))
    if choice.to in ("dcp", "torch"):
        refuse_lost_blocks(selection, manifest.metadata)
    infix = f"{save_id[:8]}-" if existing.is_in_the_way else ""
    num_ranks, max_bytes = ranks.num_ranks, limits.max_file_bytes
    if choice.to == "hf":
        target = plan_hf(manifest, selection, max_shard_bytes=max_bytes, num_ranks=num_ranks, infix=infix)
    elif choice.to == "dcp":
        target = plan_dcp(manifest, selection, plain, num_ranks=num_ranks, infix=infix)
    elif choice.to == "torch":
        target = plan_torch(manifest, selection, plain, name=place.name, num_ranks=num_ranks)
    else:
        target = plan_own(manifest, selection, plain, max_file_bytes=max_bytes, num_ranks=num_ranks, save_id=save_id)
    if choice.to != "bcp":  # in "bcp", files get new names, and old ones go later
        refuse_own_files(place, existing, (file.name for file in target.files), source)
    experts = experts if len(selection.wanted) > num_selected else ""
    return _Plan(source, view.sides, selection, place, target, save_id, existing.stale, experts)


def _agreed(
    request: ConvertRequest, source: Source, place: TargetPlace, ranks: Ranks
) -> tuple[ExistingTarget, str, str]:
    """Returns to every rank what the coordinator found at the target, the save id that it drew, and the names that it
    chose for experts.
    """
    payload = b""
    if ranks.rank == COORDINATOR:
        found = find_existing(place, request.selection.to, overwrite=request.overwrite, beside=False)
        experts = (
            names_for_experts(request.selection, source, CheckpointFolder(place.store, ""))
            if request.selection.to == "hf"
            else FUSED
        )
        payload = msgspec.msgpack.encode((found, uuid.uuid4().hex[:16], experts))
    return msgspec.msgpack.decode(ranks.broadcast(payload), type=tuple[ExistingTarget, str, str])


def _check_space(plan: _Plan) -> None:
    """Raises CheckpointSaveError (no_space) if the target's file system, when it is local, has too little room."""
    store = plan.place.store
    free_bytes = store.free_bytes if isinstance(store, LocalStore) else None
    needed_bytes = sum(file.byte_length for file in plan.target.files)
    if free_bytes is not None and free_bytes < needed_bytes:
        raise CheckpointSaveError(
            f"{plan.place.path} takes {needed_bytes} bytes, and {free_bytes} are free there; nothing was written: free "
            "space, give another path, or take less with --include, --exclude or --dtype",
            kind="no_space",
            path=plan.place.path,
        )


def _write(
    request: ConvertRequest,
    plan: _Plan,
    elements: Elements,
    numbers: Sequence[int],
    written: list[DataFile],
    *,
    progress: Progress,
) -> None:
    """Writes the files of these numbers, and adds each to `written` once it is there. With `overwrite`, a file that is
    the whole target replaces an older one; of several files none does but the last, which `_commit` writes.
    """
    files = [plan.target.files[number] for number in numbers]
    if not files:
        return
    lengths = [file.byte_length for file in files]
    replace = request.overwrite and plan.target.last is None
    with progress(sum(lengths)) as on_progress:
        writer = FileWriter(
            plan.place.store,
            elements,
            max(lengths),
            memory_bytes=request.limits.memory_bytes,
            on_progress=on_progress,
        )
        for file in files:
            written.append(writer.write(file, replace=replace))  # noqa: PERF401 - undone if one fails


def _commit(plan: _Plan, files: Sequence[DataFile], *, overwrite: bool) -> None:
    """Writes the last file, which makes the target exist, if the plan has one; then removes files that are replaced."""
    store, target = plan.place.store, plan.target
    replaced: Sequence[str] = plan.stale
    if target.last_name == layout.MANIFEST_NAME and overwrite:
        replaced = deletion.files_of_checkpoint(store, "")
    if target.last is not None:
        with _discarded_on(BaseException, plan, files):
            content = target.last(files)
        with _discarded_on_refusal(plan, files):
            if target.last_name == layout.MANIFEST_NAME:
                layout.commit(store, "", content, replace=overwrite)
            else:
                store.write(target.last_name, one_block(content), replace=overwrite)
    new = {target.last_name, *(file.name for file in target.files)}
    deletion.discard(store, "", [name for name in replaced if name not in new])
    if target.last_name == layout.MANIFEST_NAME:
        sweep(store, "", plan.save_id)


@contextmanager
def _discarded_on(kind: type[BaseException], plan: _Plan, files: Sequence[DataFile]) -> Iterator[None]:
    """Removes the files if the block ends with an error of this class; the block may add to `files`."""
    try:
        yield
    except kind:
        _discard(plan, files)
        raise


@contextmanager
def _discarded_on_refusal(plan: _Plan, files: Sequence[DataFile]) -> Iterator[None]:
    """Removes the files if the store refused the file that makes the target exist; keeps them if that one may exist."""
    try:
        yield
    except (StorageError, CheckpointSaveError, CheckpointExistsError) as error:
        if error.kind in {"permission", "no_space", "exists"}:
            _discard(plan, files)
            raise
        raise type(error)(
            f"{error.message}. All data is written; whether the target exists, `bcp show` tells",
            kind=error.kind,
            path=error.path,
        ) from error


def _in_order(plan: _Plan, reports: Sequence[bytes]) -> list[DataFile]:
    """Returns the files of all ranks in the order of `TargetPlan.files`."""
    found: dict[int, DataFile] = {}
    for numbers, report in zip(plan.target.by_rank, reports, strict=True):
        found |= zip(numbers, msgspec.msgpack.decode(report, type=list[DataFile]), strict=True)
    return [found[number] for number in sorted(found)]


def _discard(plan: _Plan, written: Sequence[DataFile]) -> None:
    """Removes the written files of a target that will not exist, but never the one that makes it exist.

    Hazard: no other file may be removed, whatever its name: another process may be writing to the same place.
    """
    names = [file.name for file in written if file.name != plan.target.last_name]
    deletion.discard(plan.place.store, "", names)


def _converted(plan: _Plan) -> Converted:
    manifest, selection, target = plan.source.manifest, plan.selection, plan.target
    sources = {piece.fqn for tensor in selection.wanted for piece in tensor.pieces}
    # In a link through a map, these names may be those of the other framework, not of the source.
    dtypes = {fqn: manifest.describe(fqn)[0] for fqn in sources if fqn is not None and fqn in manifest.tensors}
    is_cast = [
        any(piece.fqn is not None and dtypes.get(piece.fqn, tensor.dtype) != tensor.dtype for piece in tensor.pieces)
        for tensor in selection.wanted
    ]
    return Converted(
        source=plan.source.path,
        source_format=manifest.foreign_format or OWN_FORMAT,
        path=plan.place.path,
        num_files=len(target.files) + (target.last is not None),
        num_bytes=sum(file.byte_length for file in target.files),
        num_tensors=len(selection.wanted),
        aliases=selection.aliases,
        left_out=[*selection.left_out, *target.left_out],
        dropped_prefix=selection.dropped_prefix,
        num_cast=sum(is_cast),
        sides=plan.sides,
        experts=plan.experts,
    )
