"""Saving and loading, as the user calls them: each phase is one block, read from top to bottom, and says in which
module its work is done.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from bytecheckpoint.adapters.state import collect_all, entries_of
from bytecheckpoint.adapters.stored import KeyMap, Stored
from bytecheckpoint.agreement import agree, check_same, save_request
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.collector import collector_paused
from bytecheckpoint.handle import IN_FLIGHT, SaveHandle
from bytecheckpoint.info import LoadReport
from bytecheckpoint.location import check_step, root_of, save_location
from bytecheckpoint.matching import Match, Verdict, match_state, refuse_meta, share_findings
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.planner.file_plan import lay_out_files
from bytecheckpoint.ranks import COORDINATOR, Ranks, Subject, join_ranks, together
from bytecheckpoint.reading import Source
from bytecheckpoint.staging import image_of, stage_images, staged_bytes
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.opening import open_store
from bytecheckpoint.storage.store import Store
from bytecheckpoint.writing import Clock, Saving, check_metadata, refuse_existing, warn_of_differing, write_and_commit

logger = logging.getLogger("bytecheckpoint")

_HALF_LOADED = "The state is partly overwritten: load a good checkpoint into it before it is used"


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: str = "auto",
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
        framework: `auto`, `ddp`, `fsdp`, `fsdp2` or `dtensor`. All of them are read in the same way; a framework that
            is not supported is refused by its name.
        step: The training step, at least 0.
        async_save: Return as soon as the state may change again, and write in the background.
        process_group: The ranks that take part; the default group if None, this process alone where there is none.
        role: Saves to `path/<role>` instead, for jobs that train several models side by side.
        metadata: Data of your own for the manifest, as msgpack and JSON know it; what the first rank passes counts.
        storage_options: For the fsspec backend; never written down.
        options: See SaveOptions.

    Returns:
        A handle whose `result()` is the CheckpointInfo once the checkpoint is committed; finished already unless
        `async_save`.

    Raises:
        CheckpointExistsError: A committed checkpoint stands there (`options.overwrite` replaces it).
        CheckpointMismatchError: Ranks do not agree about a tensor, a value or the target; or `step` or `role` is none.
        CheckpointSaveError: A value cannot be saved, or a rank failed or did not come. Every rank raises it, and
            nothing was committed unless the message says so.
        StorageError: The store refused or could not be reached.
    """
    options = options or SaveOptions()
    clock = Clock()
    about = Subject(showable_url(str(path)), step if isinstance(step, int) else None, is_save=True)
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with ExitStack() as turn:
        with together(ranks, f"planning the save to {about.path}", about=about), collector_paused():
            turn.enter_context(IN_FLIGHT.turn())
            clock.lap("wait")
            if not async_save:
                turn.close()  # only what is staged needs the staging memory
            step, metadata = check_step(step), check_metadata(metadata)
            root, folder = save_location(path, step=step, role=role)
            store = open_store(root, storage_options=storage_options, writer_threads=options.writer_threads)
            refuse_existing(ranks, store, folder, overwrite=options.overwrite)
            contents = collect_all(entries_of(state, framework))
            target = join_name(str(store), folder)
            request, shards = save_request(
                target, step, contents, overwrite=options.overwrite, num_ranks=ranks.num_ranks
            )
            agreed = agree(ranks, request)
            warn_of_differing(ranks, agreed.differing_replicas)
            clock.lap("plan")

        with together(ranks, f"staging the save to {target}", about=about), collector_paused():
            files = lay_out_files(request.offers, agreed.writes, max_file_bytes=options.max_file_bytes)
            names = [layout.data_file_name(agreed.save_id, ranks.rank, index) for index in range(len(files))]
            images = [image_of(name, chunks, shards) for name, chunks in zip(names, files, strict=True)]
            if async_save:
                images = stage_images(images, files, shards, IN_FLIGHT.memory.take(staged_bytes(images)))
            clock.lap("stage")

        handle = SaveHandle(target)
        saving = Saving(
            ranks=ranks,
            store=store,
            folder=folder,
            about=about._replace(step=step),
            overwrite=options.overwrite,
            agreed=agreed,
            files=files,
            images=images,
            metadata=metadata,
            clock=clock,
        )
        if async_save:
            handle.mark_staged()
            clock.end_stall()
            if ranks.rank == COORDINATOR:
                logger.info("staged %s in %.2f s", target, clock.seconds["stall"])
            IN_FLIGHT.start(handle, lambda: write_and_commit(saving), turn.pop_all())
            return handle
    handle.finish(lambda: write_and_commit(saving), turn)
    handle.result()
    return handle


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    framework: str = "auto",
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

    Restores the top-level entries that the state names and leaves the checkpoint's others alone. Nothing is changed
    before every check that can be made up front has passed on every rank.

    Args:
        path: As for `save`.
        state: As for `save`: its tensors are the memory that is filled, its plain data is replaced in its containers.
            Modules on the meta device get memory, optimizers without state get state.
        framework: As for `save`.
        step: A step, `latest` for the checkpoint at `path` itself or its newest committed step, None for `path` only.
        strict: Keys that are missing on either side and shapes and dtypes that differ are one error; otherwise what
            fits is loaded and the report tells the rest.
        key_map: From checkpoint FQN to state FQN: a dict, a list of (pattern, replacement) for re.sub applied in
            order, or a function. Optimizer state follows the parameters of its modules.
        include: Only checkpoint FQNs that match one of these globs.
        exclude: No checkpoint FQNs that match one of these globs. The optimizer state of a parameter goes with it.
        cast: Convert where dtypes differ.
        process_group: As for `save`.
        role: As for `save`.
        storage_options: As for `save`.
        options: See LoadOptions.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or a file of it is gone.
        CheckpointMismatchError: State and checkpoint do not fit; the state is as it was.
        CheckpointCorruptError: Damaged bytes; the message says if the state was touched.
        UnsafeCheckpointError: The checkpoint asks for something that loading must not do.
        CheckpointSaveError: The state holds what is not supported (`unsupported_value`).
        CheckpointError: A rank failed (`rank_failed`) or did not come (`rank_missing`).
        StorageError: The store refused or could not be reached.
    """
    options = options or LoadOptions()
    started = time.monotonic()
    about = Subject(showable_url(str(path)), step if isinstance(step, int) else None, is_save=False)
    ranks = join_ranks(process_group, options.timeout_s, about=about)
    with together(ranks, f"looking for the checkpoint in {about.path}", about=about):
        store = open_store(root_of(path, role), storage_options=storage_options, writer_threads=1)
        source = _open_together(ranks, store, _wanted_step(step), options)

    with together(ranks, f"matching the state with {about.path}", about=about), collector_paused():
        stored = Stored(
            source.manifest, rank=ranks.rank, key_map=key_map, include=_globs(include), exclude=_globs(exclude)
        )
        entries = entries_of(state, framework)
        match = match_state(entries, stored, cast=cast)
        verdict = share_findings(ranks, match, stored, state.keys(), strict=strict)
        fetches = source.plan(match.shards, match.stored_fqns)
        _wait_for_all(ranks)

    about = about._replace(aftermath=_HALF_LOADED)
    with together(ranks, f"reading {about.path}", about=about), collector_paused():
        # Memory that does not exist yet is made only now that the load can no longer be refused.
        if any(shard.tensor.is_meta for shard in match.shards):
            for entry in entries:
                entry.prepare(stored)
            match = match_state(entries, stored, cast=cast)
            refuse_meta(match)
            fetches = source.plan(match.shards, match.stored_fqns)
        source.read(fetches, match.shards, match.stored_fqns)
        for entry in entries:
            entry.finish(stored)
        _wait_for_all(ranks)
    ranks.farewell()
    num_bytes = sum(fetch.byte_length for fetch in fetches)
    report = _report(source, match, verdict, num_bytes, time.monotonic() - started)
    if ranks.rank == COORDINATOR:
        logger.info("loaded %s in %.2f s", report.path, report.seconds)
    return report


def _wanted_step(step: object) -> int | Literal["latest"] | None:
    return "latest" if isinstance(step, str) and step == "latest" else check_step(step)


def _open_together(ranks: Ranks, store: Store, step: int | Literal["latest"] | None, options: LoadOptions) -> Source:
    """The checkpoint, its manifest read by one rank for all."""
    asked = ranks.gather(f"{store} (step={step})".encode())
    answer = b""
    if ranks.rank == COORDINATOR:
        check_same("load from", [target.decode() for target in asked], ranks.names)
        folder = layout.find_checkpoint(store, step, location=str(store))
        answer = msgspec.msgpack.encode((folder, layout.read_manifest_bytes(store, folder)))
    folder, content = msgspec.msgpack.decode(ranks.broadcast(answer), type=tuple[str, bytes])
    path = join_name(str(store), folder, layout.MANIFEST_NAME)
    return Source(store, folder, layout.parse_manifest(content, path=path), options)


def _wait_for_all(ranks: Ranks) -> None:
    """Nobody goes on before every rank has come this far; where one has failed, all raise."""
    ranks.gather(b"")
    ranks.broadcast(b"")


def _globs(globs: str | Sequence[str] | None) -> Sequence[str] | None:
    return [globs] if isinstance(globs, str) else globs


def _report(source: Source, match: Match, verdict: Verdict, num_bytes: int, seconds: float) -> LoadReport:
    return LoadReport(
        path=source.path,
        step=source.manifest.step,
        save_id=source.manifest.save_id,
        num_tensors=len({shard.fqn for shard in match.shards}),
        num_bytes_read=num_bytes,
        missing=[problem.fqn for problem in verdict.problems if problem.kind == "missing_key"],
        unexpected=verdict.unexpected,
        mismatched=[problem.text for problem in verdict.problems if problem.kind != "missing_key"],
        cast=sorted(match.cast),
        skipped=sorted(match.skipped),
        seconds=seconds,
    )


def open(  # noqa: A001  bcp.open is to a checkpoint what open is to a file
    path: str | os.PathLike[str],
    step: int | Literal["latest"] | None = "latest",
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """A committed checkpoint to look into, in one process and without a model. Reads the manifest only.

    `path`, `step`, `storage_options` and `options` are as for `load`.
    Raises CheckpointNotFoundError, CheckpointCorruptError, UnsafeCheckpointError or StorageError.
    """
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    folder = layout.find_checkpoint(store, _wanted_step(step), location=str(store))
    source = Source(store, folder, layout.read_manifest(store, folder), options or LoadOptions())
    return Checkpoint(source, source.path)


def latest(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> int | None:
    """The newest committed step under a path, or None. Found by manifests, not by names or times."""
    return layout.latest_step(open_store(path, storage_options=storage_options, writer_threads=1))


def steps(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """All committed steps under a path, rising; [] where there is none."""
    return layout.committed_steps(open_store(path, storage_options=storage_options, writer_threads=1))
