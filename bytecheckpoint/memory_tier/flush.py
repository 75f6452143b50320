"""Uploads the memory checkpoints of a job that has ended to its path, without a trainer: each host uploads the files
that it has, and the host that finds all of them at the path commits the checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory_tier.parity_block import scan_parity
from bytecheckpoint.memory_tier.rebuild import is_whole_block, mapped_file, rebuild_member
from bytecheckpoint.planner.memory_tier.resume_plan import ParityMember
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.inventory import refuse_beside
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.held_store import HeldStore, StoredAt
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, find_job, find_jobs
from bytecheckpoint.storage.memory_root.slot_file import FilePlace
from bytecheckpoint.storage.memory_root.version_files import HeldVersion
from bytecheckpoint.storage.object_io import BLOCK_BYTES, copy_file
from bytecheckpoint.storage.open_store import open_store, real_location
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, one_block

logger = logging.getLogger("bytecheckpoint")

_WRITERS = 3
_BLOCK = "-parity-"


class MemoryCheckpoint(NamedTuple):
    """A memory checkpoint of which a host has the manifest."""

    root: str
    """Path or URL of the root that it can be committed below."""
    memory_root: str
    save_id: str
    step: int
    is_complete: bool
    """True if all hosts are known to have the manifest."""
    num_here: int
    """Its data files that are here; the manifest has `num_files`."""
    num_files: int
    num_bytes: int
    """Bytes of the files that are here."""
    num_living: int
    """Processes of the job on this host that live."""


class FlushedStep(NamedTuple):
    """The outcome of a flush."""

    path: str
    step: int
    save_id: str
    num_uploaded: int
    """Number of files that this host has uploaded."""
    is_committed: bool
    missing: Sequence[str]
    """Data files that are neither here nor at the path."""


class JobInMemory(NamedTuple):
    """The memory of one job, which may still run. `path` is the job's folder in a memory root."""

    root: str
    """Path or URL that the job saves to."""
    path: str
    num_slots: int
    num_bytes: int
    num_living: int
    age_s: float
    """Seconds since the last change of a version, or of the folder."""


def _distinct(roots: Sequence[str]) -> list[str]:
    """Returns each folder among the roots once, under the first of its names: others may lead there by a link."""
    by_folder: dict[str, str] = {}
    for root in roots:
        by_folder.setdefault(os.path.realpath(root), root)
    return list(by_folder.values())


def list_held(roots: Sequence[str]) -> Iterator[MemoryCheckpoint]:
    """Yields the versions in these memory roots, in each job as `read_versions` orders them, which is not by age."""
    for root in _distinct(roots):
        for job, description in find_jobs(root):
            places = dict(_holders(job))
            num_living = _num_living(job)
            for version in _versions(job):
                here = [file for file in version.files if file.name in places]
                yield MemoryCheckpoint(
                    description.location,
                    root,
                    version.record.save_id,
                    version.record.step,
                    version.is_complete,
                    len(here),
                    len(version.files),
                    sum(file.byte_length for file in here),
                    num_living,
                )


def flush(path: str, roots: Sequence[str], *, storage_options: Mapping[str, Any] | None = None) -> FlushedStep:
    """Uploads what these memory roots have of the newest complete version of a job and of the pending ones after it,
    which this host does not know to be complete: newest first, until one has all of its files at the path. That one is
    committed, unless it is already. Returns its outcome, or that of the newest version if none is whole there.

    Raises CheckpointNotFoundError if the roots hold nothing of the job, CheckpointSaveError (superseded) if processes
    of the job live, CheckpointExistsError if another save of the step is committed or the path itself is a checkpoint,
    and the errors of the store.
    """
    store = open_store(path, storage_options=storage_options, writer_threads=_WRITERS)
    jobs = [job for root in _distinct(roots) if (job := find_job(root, real_location(store, ""))) is not None]
    with _locked(jobs, str(store)):
        versions = [version for job in jobs for version in _versions(job)]
        if not versions:
            raise CheckpointNotFoundError(
                f"no memory checkpoint of {store} is in {', '.join(roots)}; nothing was uploaded: run it on the hosts "
                "of the job, as its user, with the path that was given to save, and its Memory(root=...) as "
                "--memory-root",
                kind="not_found",
                path=str(store),
            )
        outcomes = []
        for version in _versions_to_upload(versions):
            outcomes.append(_upload_version(store, version, jobs))
            if outcomes[-1].is_committed:
                return outcomes[-1]
    return outcomes[0]


def _versions_to_upload(versions: Sequence[HeldVersion]) -> list[HeldVersion]:
    """Returns the newest complete version and the pending ones after it, newest first; all if none is complete. Other
    hosts may know a pending one as complete, or not at all, so each host uploads all until one is whole at the path.
    """
    complete = {version.record.save_id for version in versions if version.is_complete}
    by_id = {version.record.save_id: version for version in versions}
    newest_first = sorted(by_id.values(), key=lambda version: version.record.order, reverse=True)
    last = next((number for number, each in enumerate(newest_first) if each.record.save_id in complete), None)
    return newest_first if last is None else newest_first[: last + 1]


def _upload_version(store: Store, version: HeldVersion, jobs: Sequence[JobFolder]) -> FlushedStep:
    """Uploads what this host has of a version, and commits it if all files are at the path then. Raises
    CheckpointExistsError if another checkpoint is there, or beside it one that forbids it.
    """
    record, folder = version.record, version.record.folder
    location = join_name(str(store), folder)
    committed = layout.committed_save_id(store, folder)
    if committed == record.save_id:
        return FlushedStep(location, record.step, record.save_id, 0, is_committed=True, missing=())
    if committed:
        raise layout.exists_error(location)
    refuse_beside(store, folder, is_step=True)
    upload = _Upload(store, version, jobs)
    for file in _missing(store, version):
        upload.upload_file(file)
    if missing := [file.name for file in _missing(store, version)]:
        upload.upload_parity(missing)
        upload.upload_rebuilt(missing)
        missing = [file.name for file in _missing(store, version)]
    if not missing:
        layout.commit(store, folder, version.content, replace=False)
        upload.remove_parity()
    return FlushedStep(
        location, record.step, record.save_id, upload.num_files, is_committed=not missing, missing=missing
    )


def _missing(store: Store, version: HeldVersion) -> list[DataFile]:
    """Returns the data files of a version that are not at the path with their length."""
    sizes = store.list(join_name(version.record.folder, layout.DATA_FOLDER))
    return [file for file in version.files if sizes.get(file.name.rpartition("/")[2]) != file.byte_length]


class _Upload:
    """The upload of one version from the memory roots of a host to its path."""

    def __init__(self, store: Store, version: HeldVersion, jobs: Sequence[JobFolder]) -> None:
        self.num_files = 0
        """Files uploaded so far."""
        self._store = store
        self._version = version
        self._folder = version.record.folder
        self._shown = f"memory of {join_name(str(store), self._folder)}"
        self._places: dict[str, list[FilePlace]] = {}
        """Places of the data files of all saves, by name."""
        for name, place in chain.from_iterable(map(_holders, jobs)):
            self._places.setdefault(name, []).append(place)
        blocks = (block for job in jobs for block in scan_parity(job) if block.save_id == version.record.save_id)
        self._blocks = {_block_name(each.save_id, each.held.members[each.held.position]): each for each in blocks}
        self._scratch = BufferPool(BLOCK_BYTES, _WRITERS + 1)

    def upload_file(self, file: DataFile) -> None:
        """Uploads a file from the first place that holds its bytes undamaged, if there is one."""
        for place in self._places.get(file.name, ()):
            held = HeldStore({file.name: place}, self._version.content, shown=self._shown, elsewhere={})
            try:
                copy_file(held, self._store, self._folder, file, self._scratch)
            except CheckpointExistsError:  # uploaded by the flush of another host
                return
            except CheckpointCorruptError as error:
                logger.error("%s is not uploaded from %s: %s", file.name, place.path, error.message)  # noqa: TRY400
            else:
                self.num_files += 1
                return

    def upload_parity(self, missing: Collection[str]) -> None:
        """Uploads the parity blocks of this host whose groups lack a file: the last host of a group to upload rebuilds
        the file from them. They are deleted when the version is committed, or else as garbage of the save.
        """
        for name, found in self._blocks.items():
            covered = {file for member in found.held.members for file, _ in member.files}
            if covered.isdisjoint(missing) or not is_whole_block(found):
                continue
            with suppress(CheckpointExistsError):
                self._store.write(join_name(self._folder, name), one_block(mapped_file(found.place)), replace=False)

    def upload_rebuilt(self, missing: Collection[str]) -> None:
        """Rebuilds missing files and uploads them, for each group of which this host holds a parity block and in which
        only one member lacks files: they are made from the files and the parity of the other members, all read from the
        path. Only logs that a group cannot be rebuilt.
        """
        source = HeldStore({}, b"", shown=self._shown, elsewhere={}, stored=StoredAt(self._store, self._folder))
        files, save_id = {file.name: file for file in self._version.files}, self._version.record.save_id
        groups = {
            tuple(member.host for member in each.held.members): each.held.members for each in self._blocks.values()
        }
        for members in groups.values():
            lost = [number for number, each in enumerate(members) if any(name in missing for name, _ in each.files)]
            if len(lost) != 1:
                continue
            blocks = [_block_name(save_id, member) for member in members]
            try:
                rebuilt = rebuild_member(source, members, lost[0], blocks, files)
                self._write([(name, content) for name, content in rebuilt if name in missing])
            except CheckpointExistsError:
                logger.info("another host rebuilds what is missing of %s", self._shown)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                logger.info("what is missing of %s cannot be rebuilt here: %s", self._shown, error.message)

    def _write(self, contents: Sequence[tuple[str, memoryview]]) -> None:
        for name, content in contents:
            self._store.write(join_name(self._folder, name), one_block(content), replace=False)
            self.num_files += 1

    def remove_parity(self) -> None:
        """Deletes the parity blocks of the save at the path, also those that other hosts have uploaded."""
        prefix = f"{self._version.record.save_id}{_BLOCK}"
        stored_names = self._store.list(join_name(self._folder, layout.DATA_FOLDER))
        names = [f"{layout.DATA_FOLDER}/{name}" for name in stored_names if name.startswith(prefix)]
        deletion.discard(self._store, self._folder, names)


def _block_name(save_id: str, member: ParityMember) -> str:
    return f"{layout.DATA_FOLDER}/{save_id}{_BLOCK}{member.host}"


def jobs_in_memory(roots: Sequence[str], location: str | None) -> list[JobInMemory]:
    """Returns the memory of every job in these roots, also of running jobs; with `location`, of that job only."""
    found = []
    for root in _distinct(roots):
        for job, description in find_jobs(root):
            if location in {None, description.location}:
                slots = [*slot_file.scan(job.slots), *scan_copies(job, "copies"), *scan_copies(job, "parity")]
                found.append(
                    JobInMemory(
                        description.location,
                        job.path,
                        len(slots),
                        sum(slot.capacity for slot in slots),
                        _num_living(job),
                        time.time() - _changed_at_s(job),
                    )
                )
    return found


# A removal that is under way or was killed leaves a part of a job's folder.


def _versions(job: JobFolder) -> list[HeldVersion]:
    with suppress(FileNotFoundError):
        return version_files.read_versions(job)
    return []


def _num_living(job: JobFolder) -> int:
    with suppress(FileNotFoundError):
        return len(job.living())
    return 0


def _changed_at_s(job: JobFolder) -> float:
    times = []
    for path in (job.versions, job.slots, job.path):
        with suppress(FileNotFoundError):
            times.append(os.stat(path).st_mtime)  # noqa: PTH116 - paths are text here
    return max(times, default=0.0)


def remove_job(root: str, path: str) -> Literal["removed", "gone", "lives"]:
    """Frees the memory of the job in the folder `path`, also what a removal that was killed has left of it. Returns
    "gone" if it is not there, and "lives" if a process of the job lives, or another one flushes or removes it at this
    moment: then it is left alone.
    """
    found = next((each for each in find_jobs(root) if each[0].path == path), None)
    if found is None:
        return "gone"
    job, description = found
    try:
        with _locked([job], description.location):
            _remove(Path(job.path))
    except CheckpointSaveError:
        return "lives"
    except FileNotFoundError:
        return "lives" if Path(job.path).exists() else "gone"
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return "lives"
    return "removed"


def _remove(folder: Path) -> None:
    while folder.exists():
        with suppress(FileNotFoundError):  # of one file that went meanwhile
            shutil.rmtree(folder)
            return  # what is there now is a later job's


@contextmanager
def _locked(jobs: Sequence[JobFolder], location: str) -> Iterator[None]:
    """Registers this process with these jobs for the block. Raises CheckpointSaveError (superseded) if other processes
    of a job live, and CheckpointNotFoundError if the folder of a job is gone.
    """
    with ExitStack() as joined:
        names = set()
        for job in jobs:
            try:
                # What a killed removal has left is not taken unregistered either: a process may begin to use it.
                job.make_joinable()
                lock, own = job.join()
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"another process has just removed what {job.root} held of {location}; nothing was uploaded: run "
                    "it again if other memory roots hold something of the job",
                    kind="not_found",
                    path=location,
                ) from error
            joined.callback(lock.release)
            names.add(own.name)
        for job in jobs:
            if any(other.name not in names for other in job.living()):
                raise CheckpointSaveError(
                    f"processes of the job that saves to {location} live on this host; nothing was changed: end them "
                    "first, or let them save to storage",
                    kind="superseded",
                    path=location,
                )
        yield


def _holders(job: JobFolder) -> Iterator[tuple[str, FilePlace]]:
    """Yields name and place of each data file of all saves that a job holds: own slots first, then copies."""
    for slot in (*slot_file.scan(job.slots), *scan_copies(job, "copies")):
        yield from slot.places().items()
