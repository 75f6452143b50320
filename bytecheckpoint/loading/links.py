"""Links: manifests that point to files elsewhere than below their own folder, as `bcp convert --link` makes them. They
are followed only where that is asked for: else the writer of a manifest would choose what a load reads.

A link keeps checksums of a few bytes of each file that another program wrote, by which a file is recognised that was
written again with the same length. A change of a few bytes between the samples can escape that; not in a file of
torch.save, whose directory has a checksum of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError, and_more
from bytecheckpoint.formats.find_checkpoint import Opening, open_folder
from bytecheckpoint.manifest import DataFile, Manifest, Sample
from bytecheckpoint.manifest.validation import MAX_SAMPLE_BYTES
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_local
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_END_BYTES = 1 << 16
"""Length of the first and the last sample: headers of safetensors, directories of archives."""
_INNER_BYTES = 1 << 12
_NUM_INNER = 6
_NUM_NAMED = 5


class Files(NamedTuple):
    """The folder with the data files of a checkpoint."""

    store: Store
    folder: str


def files_of(own: Files, manifest: Manifest, opening: Opening, *, follow_links: bool, path: str) -> Files:
    """Returns the checkpoint's own folder, or the one that its manifest links to. `path` is for the error.

    Raises UnsafeCheckpointError (path_escape) if links are not to be followed, and the errors of opening a store.
    """
    if not manifest.linked_to:
        return own
    if not follow_links:
        raise UnsafeCheckpointError(
            f"{path} is a link: its files are in {showable_url(manifest.linked_to)!r:.300}, which is not below its own "
            "folder; nothing was read there: if you trust whoever made the link, follow it with "
            "LoadOptions(follow_links=True), or --follow-links of the command line",
            kind="path_escape",
            path=path,
        )
    return Files(*open_folder(manifest.linked_to, opening_at(manifest.linked_to, opening, follow_links=True)))


def opening_at(path: str, opening: Opening, *, follow_links: bool) -> Opening:
    """Returns how to open this path. Leaves the storage options out if the path is local and links are followed: then
    the options are meant for the store that a link leads to.
    """
    return opening._replace(storage_options=None) if follow_links and is_local(path) else opening


def sample_ranges(byte_length: int, directory_offset: int | None) -> list[tuple[int, int]]:
    """Returns offset and length of each sample of a file, in file order: its beginning, parts in between, and its end;
    all of a short file. For an archive, the end is its directory from `directory_offset` on, up to MAX_SAMPLE_BYTES.
    """
    if byte_length <= 2 * _END_BYTES:
        return [(0, byte_length)] if byte_length else []
    last = byte_length - _END_BYTES
    if directory_offset is not None:
        last = max(min(last, directory_offset), byte_length - MAX_SAMPLE_BYTES)
    steps = range(1, _NUM_INNER + 1)
    inner = [_END_BYTES + step * (last - _END_BYTES) // (_NUM_INNER + 1) for step in steps]
    found = [(offset, _INNER_BYTES) for offset in inner if offset + _INNER_BYTES <= last]
    return [(0, min(_END_BYTES, last)), *found, (last, byte_length - last)]


def take_sample(store: Store, name: str, byte_offset: int, byte_length: int) -> Sample:
    """Reads these bytes of a file, and returns their place and digest. Raises the errors of `Store.read_into`."""
    content = bytearray(byte_length)
    store.read_into(name, byte_offset, memoryview(content))
    return Sample(byte_offset, byte_length, xxhash.xxh3_64_intdigest(content))


def check_samples(store: Store, folder: str, files: Iterable[DataFile], *, threads: int) -> None:
    """Raises CheckpointCorruptError (checksum) if a sample of one of these files has changed since the link was made,
    and the errors of `Store.read_into`. A file without samples is not checked.
    """
    sampled = [file for file in files if file.samples]
    jobs = [(number, sample) for number, file in enumerate(sampled) for sample in file.samples]

    def is_changed(job: tuple[int, Sample]) -> bool:
        number, sample = job
        name = join_name(folder, sampled[number].name)
        return take_sample(store, name, sample.byte_offset, sample.byte_length) != sample

    differ = map_jobs(is_changed, jobs, num_threads=threads)
    changed = sorted({number for (number, _), differs in zip(jobs, differ, strict=True) if differs})
    if not changed:
        return
    path = join_name(str(store), folder)
    named = and_more([sampled[number].name for number in changed], _NUM_NAMED)
    raise CheckpointCorruptError(
        f"{path} has {len(changed)} of {len(sampled)} files that were written again after a link to them was made: "
        f"{named}; nothing was loaded: load from {path} itself, or make the link anew with `bcp convert --link`",
        kind="checksum",
        path=path,
    )
