"""The versions that one rank sees on its host, and those at the path: what the plan of a resume is made from."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.manifest import open_manifest
from bytecheckpoint.memory_tier.parity_block import FoundParity, scan_parity
from bytecheckpoint.planner.memory_tier.resume_plan import HolderKind, SeenVersion, StoredVersion
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.staging.memory_slots import generation_of
from bytecheckpoint.storage import layout, stage_folder
from bytecheckpoint.storage.inventory import refuse_beginning_anew
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder
from bytecheckpoint.storage.memory_root.slot_file import FilePlace, FoundSlot
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, endpoint_of

logger = logging.getLogger("bytecheckpoint")

_READS_AT_ONCE = 16


class HostView(NamedTuple):
    """All that a rank can read on its host, by save id."""

    versions: list[SeenVersion]
    manifests: dict[str, bytes]
    folders: dict[str, str]
    """Folder of each version below the path."""
    places: dict[tuple[str, HolderKind], dict[str, FilePlace]]
    """Data files by save id and kind of holder."""
    others: dict[tuple[str, HolderKind], dict[str, list[FilePlace]]]
    """Further places of data files that are in more than one slot of a kind."""
    parity: dict[str, FoundParity]


class VersionAtPath(NamedTuple):
    """A step at the path: committed, or files there of a save that is not known to have committed."""

    version: StoredVersion
    content: bytes
    """The encoded manifest; empty if the step is not committed."""


def look_at_host(job: JobFolder, local_stage: str | None, store: Store) -> HostView:
    """Returns the versions in the job's folder, and in the local stage the files of saves of steps to the store.
    Changes nothing.
    """
    held = {version.record.save_id: version for version in version_files.read_versions(job)}
    places: dict[tuple[str, HolderKind], dict[str, FilePlace]] = {}
    steps = {save_id: version.record.step for save_id, version in held.items()}
    others: dict[tuple[str, HolderKind], dict[str, list[FilePlace]]] = {}
    for slot, kind, name, place in _files_in_slots(job):
        steps.setdefault(slot.save_id, slot.header.step if slot.header is not None else 0)
        if places.setdefault((slot.save_id, kind), {}).setdefault(name, place) != place:
            others.setdefault((slot.save_id, kind), {}).setdefault(name, []).append(place)
    parity = _own_parity(job)
    for save_id in parity:
        steps.setdefault(save_id, 0)
    manifests = {save_id: version.content for save_id, version in held.items()}
    folders = {save_id: version.record.folder for save_id, version in held.items()}
    records = {save_id: (version.record.generation, version.record.number) for save_id, version in held.items()}
    for staged in _staged(local_stage, store):
        places.setdefault((staged.save_id, "local"), {}).update(staged.places)
        steps.setdefault(staged.save_id, staged.step)
        folders.setdefault(staged.save_id, staged.folder)
        if staged.content and staged.save_id not in manifests:
            with suppress(CheckpointError):
                records[staged.save_id] = generation_of(open_manifest(staged.content)) or 0, 0
                manifests[staged.save_id] = staged.content
    versions = [
        SeenVersion(
            save_id,
            *(records[save_id][0] if save_id in records else 0, step, records.get(save_id, (0, 0))[1]),
            needed=_lengths(manifests[save_id]) if save_id in manifests else None,
            memory=_lengths_held(places, save_id, "memory"),
            copies=_lengths_held(places, save_id, "peer"),
            local=_lengths_held(places, save_id, "local"),
            parity=[parity[save_id].held] if save_id in parity else [],
        )
        for save_id, step in steps.items()
    ]
    return HostView(versions, manifests, folders, places, others, parity)


def _files_in_slots(job: JobFolder) -> Iterator[tuple[FoundSlot, HolderKind, str, FilePlace]]:
    kinds: Sequence[HolderKind] = ("memory", "peer")
    for kind, slots in zip(kinds, (slot_file.scan(job.slots), scan_copies(job, "copies")), strict=True):
        for slot in slots:
            yield from ((slot, kind, name, place) for name, place in slot.places().items())


def _own_parity(job: JobFolder) -> dict[str, FoundParity]:
    """Returns one block of parity by save id: the block of this host, if it is among several of a save."""
    blocks = sorted(scan_parity(job), key=lambda found: found.held.members[found.held.position].host == job.host)
    return {found.save_id: found for found in blocks}


def _lengths_held(
    places: dict[tuple[str, HolderKind], dict[str, FilePlace]], save_id: str, kind: HolderKind
) -> dict[str, int]:
    return {name: place.byte_length for name, place in places.get((save_id, kind), {}).items()}


def _lengths(content: bytes) -> dict[str, int]:
    return {file.name: file.byte_length for file in open_manifest(content).files}


class _Staged(NamedTuple):
    """The files of one rank of a save in a local stage."""

    save_id: str
    step: int
    folder: str
    places: dict[str, FilePlace]
    content: bytes
    """The manifest, if it is there."""


def _staged(root: str | None, store: Store) -> Iterator[_Staged]:
    """Yields what a local stage holds of saves of steps to the store, not to others with its URL."""
    if root is None:
        return
    endpoint = endpoint_of(store)
    for found in stage_folder.scan(os.path.abspath(root)):  # noqa: PTH100 - paths are text here
        journal = found.journal
        if journal is None or journal.step is None or (journal.root, journal.endpoint) != (str(store), endpoint):
            continue
        folder = f"{os.path.abspath(root)}/{found.name}"  # noqa: PTH100
        places = {
            file.name: FilePlace(f"{folder}/{file.name}", 0, file.byte_length)
            for file in journal.files or []
            if found.sizes.get(file.name) == file.byte_length
        }
        content = b""
        if found.has_manifest:
            with suppress(CheckpointError):
                content = stage_folder.read_manifest(stage_folder.store_of(root, found.name)) or b""
        yield _Staged(journal.save_id, journal.step, journal.folder, places, content)


def look_at_path(
    store: Store, folders: dict[str, str], *, max_steps: int, abandoned: Collection[int]
) -> list[VersionAtPath]:
    """Returns the newest committed steps that are not abandoned, at most `max_steps` and without those whose manifest
    cannot be read; and, as not committed, the files that any other save of `folders` has in its folder.

    Raises StorageError if a listing fails. If `folders` is empty, also raises StorageError or CheckpointCorruptError
    (unsupported_version) about the newest manifest that is not damaged. Others raise nothing.
    """
    found: list[VersionAtPath] = []
    for step in islice(_steps_at(store, abandoned), max_steps):
        # Where neither memory nor a stage has a save, training would go on from an older step.
        each = _read_step(store, step, raises_if_undamaged=not found and not folders)
        found += [] if each is None else [each]
    committed = {each.version.save_id for each in found}
    for save_id, folder in folders.items():
        if save_id not in committed and (sizes := _uploaded_sizes(store, folder, save_id)):
            found.append(VersionAtPath(StoredVersion(save_id, None, 0, sizes, is_committed=False), b""))
    return found


def look_for_branches(store: Store, known: Sequence[VersionAtPath], abandoned: Collection[int]) -> list[VersionAtPath]:
    """Returns the committed steps before the `known` ones that have a higher generation than every later step: the
    later steps are of a branch that training has left. Reads the manifests of all steps before the `known` ones; if no
    `known` step has a generation, reads nothing and returns an empty list.
    """
    generations = [each.version.generation for each in known if each.version.generation is not None]
    if not generations:
        return []
    newest, oldest = max(generations), min(each.version.step for each in known if each.version.is_committed)
    steps = (step for step in _steps_at(store, abandoned) if step < oldest)
    found = []
    while batch := list(islice(steps, _READS_AT_ONCE)):
        for each in map_jobs(partial(_read_step, store), batch, num_threads=_READS_AT_ONCE):
            if each is not None and (each.version.generation or 0) > newest:
                newest = each.version.generation or 0
                found.append(each)
    return found


def newest_not_left(store: Store, abandoned: Collection[int]) -> int | None:
    """Returns the newest committed step that is not abandoned, also if its manifest cannot be read; None if there is no
    checkpoint. Raises CheckpointMismatchError (conflict) if all steps are abandoned or the root itself is a checkpoint.
    """
    newest = next(_steps_at(store, abandoned), None)
    if newest is None:
        refuse_beginning_anew(store)
    return newest


def _steps_at(store: Store, abandoned: Collection[int]) -> Iterator[int]:
    return (step for step in layout.steps_below(store, "", store.list("")) if step not in abandoned)


def _read_step(store: Store, step: int, *, raises_if_undamaged: bool = False) -> VersionAtPath | None:
    """Returns a committed step. If its manifest cannot be read, logs why and returns None; with `raises_if_undamaged`
    raises instead if the manifest may be good.
    """
    folder = layout.step_folder(step)
    try:
        content = layout.read_manifest_bytes(store, folder)
        manifest = layout.parse_manifest(content, path=join_name(str(store), folder), check_all=False)
    except CheckpointError as error:
        if raises_if_undamaged and (isinstance(error, StorageError) or error.kind == "unsupported_version"):
            raise
        logger.error("step %d at the path is passed over: %s", step, error.message)  # noqa: TRY400
        return None
    files = {file.name: file.byte_length for file in manifest.files}
    version = StoredVersion(manifest.save_id, generation_of(manifest), step, files, is_committed=True)
    return VersionAtPath(version, content)


def _uploaded_sizes(store: Store, folder: str, save_id: str) -> dict[str, int]:
    names = store.list(join_name(folder, layout.DATA_FOLDER))
    return {
        f"{layout.DATA_FOLDER}/{name}": size
        for name, size in names.items()
        if size is not None and name.startswith(f"{save_id}-")
    }
