"""The memory checkpoints that a host knows: a copy of the manifest of each, and its place in the order of versions.

A version is pending from the moment that its data is whole on all hosts, and complete once the manifest is on all of
them. A pending one can be recovered, too; but other hosts may already have gone on from the version before it.
"""

# ruff: noqa: PTH104, PTH108, PTH118, PTH123, PTH208 - the calls of `os` by name, as in posix_files.py

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import msgspec
import xxhash

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile, open_manifest
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, replace_file
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX

_ID_LENGTH = 16
_PREFIX = struct.Struct("<8sIQ")  # magic, length and checksum of the record
_MAGIC = b"BCPMEMV1"
_NAME = re.compile(r"\A([0-9a-f]{16})\.(pending|manifest)\Z")
_KEPT = 2
"""The newest complete version, and the one before it, whose slots may still be whole."""
_PROTECTED = "protected"


class VersionRecord(msgspec.Struct, frozen=True, array_like=True):
    """The place of a memory checkpoint among all of the job."""

    save_id: str
    generation: int
    """Rises with the first memory save after a load, so that a branch that training left is never resumed."""
    step: int
    number: int
    """Rises with every memory save of the job."""
    folder: str
    """Folder of the checkpoint below the path, where it can be committed."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: training is resumed from the version with the greatest."""
        return self.generation, self.step, self.number


class HeldVersion(NamedTuple):
    """A memory checkpoint, called a version, of which a host has the manifest."""

    record: VersionRecord
    is_complete: bool
    """True if all hosts are known to have the manifest."""
    content: bytes
    """The manifest, encoded."""
    files: tuple[DataFile, ...]
    """Data files of the manifest."""


def add_pending(job: JobFolder, record: VersionRecord, content: bytes) -> None:
    """Writes the manifest of a version as pending: all hosts hold its data, but not all may have its manifest yet."""
    encoded = msgspec.msgpack.encode(record)
    prefix = _PREFIX.pack(_MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded))
    replace_file(_path(job, record.save_id, "pending"), prefix, encoded, content)


def mark_complete(job: JobFolder, save_id: str) -> None:
    """Notes that all hosts have the manifest of this save. Of the versions with smaller numbers, removes all manifests
    but those of the last one and of the protected one. Raises FileNotFoundError if the save's version is not pending.
    """
    os.rename(_path(job, save_id, "pending"), _path(job, save_id, "manifest"))
    found = sorted(read_versions(job), key=lambda version: version.record.number)
    newest = next((version.record.number for version in found if version.record.save_id == save_id), 0)
    earlier = [version for version in found if version.record.number <= newest]
    protected = protected_save(job)
    for version in earlier[:-_KEPT]:
        if version.record.save_id != protected:
            remove(job, version.record.save_id)


def note_protected(job: JobFolder, save_id: str) -> None:
    """Notes that the version of this save is the one to keep against the loss of a host: the newest that survives it,
    or the newest of all where none can.
    """
    replace_file(os.path.join(job.versions, _PROTECTED), save_id.encode())


def protected_save(job: JobFolder) -> str:
    """Returns the id of the save that `note_protected` was given last; empty if there is none."""
    path = os.path.join(job.versions, _PROTECTED)
    with suppress(FileNotFoundError, UnicodeDecodeError), open(path, encoding="ascii") as file:
        return file.read(_ID_LENGTH)
    return ""


def remove(job: JobFolder, save_id: str) -> None:
    """Removes the manifest of a version, so that the host no longer knows it. Slots with its data stay."""
    for ending in ("pending", "manifest"):
        with suppress(FileNotFoundError):
            os.unlink(_path(job, save_id, ending))


def read_versions(job: JobFolder) -> list[HeldVersion]:
    """Returns the versions that the host knows, in ascending order of generation, then step, then number, not of age.
    Damaged ones are left out.
    """
    found = []
    for name in os.listdir(job.versions):
        match = _NAME.match(name)
        if match is None:
            continue
        with suppress(FileNotFoundError), open(os.path.join(job.versions, name), "rb") as file:
            version = _decode(file.read(), is_complete=match.group(2) == "manifest")
            if version is not None and version.record.save_id == match.group(1):
                found.append(version)
    return sorted(found, key=lambda version: version.record.order)


def remove_stale_temporaries(job: JobFolder) -> None:
    """Removes manifests whose writing was interrupted. Only the process that writes them may call this."""
    for name in os.listdir(job.versions):
        if name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(job.versions, name))


def needed_saves(job: JobFolder) -> set[str]:
    """Returns the ids of the saves whose slots must stay, as far as this host can tell alone: the newest complete one,
    all pending ones after it, one of which other hosts may have completed, and the `protected_save`.
    """
    found = sorted(read_versions(job), key=lambda version: version.record.number)
    complete = [number for number, version in enumerate(found) if version.is_complete]
    needed = {version.record.save_id for version in found[complete[-1] if complete else 0 :]}
    return needed | ({protected_save(job)} - {""})


def by_age(job: JobFolder, save_ids: Collection[str], *, settled: str) -> list[str]:
    """Returns these ids: first the saves without a manifest on this host, which are complete nowhere, then the others
    from the oldest to the newest. `settled`, which is complete or was resumed from, always comes after the protected
    save: a resume may take an older save, or one whose manifest only other hosts have.
    """
    numbers = {version.record.save_id: version.record.number for version in read_versions(job)}
    numbers[settled] = max(numbers.get(settled, 0), numbers.get(protected_save(job), 0))
    return sorted(save_ids, key=lambda save_id: (numbers.get(save_id, -1), save_id == settled))


def _path(job: JobFolder, save_id: str, ending: str) -> str:
    return os.path.join(job.versions, f"{save_id}.{ending}")


def _decode(content: bytes, *, is_complete: bool) -> HeldVersion | None:
    """Returns the version in a file; None if it is damaged."""
    if len(content) < _PREFIX.size:
        return None
    magic, num_bytes, digest = _PREFIX.unpack_from(content)
    end = _PREFIX.size + num_bytes
    encoded, manifest_bytes = content[_PREFIX.size : end], content[end:]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(encoded) != digest:
        return None
    with suppress(msgspec.MsgspecError, CheckpointError):
        record = msgspec.msgpack.decode(encoded, type=VersionRecord)
        manifest = open_manifest(manifest_bytes)
        if manifest.save_id == record.save_id:
            return HeldVersion(record, is_complete, manifest_bytes, tuple(manifest.files))
    return None
