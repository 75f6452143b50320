"""Checksums of a few bytes of files that another program wrote, which a link keeps: a file that was written again, with
the same length, is told from the one that was linked to. It reads little of a file, so a change of a few bytes between
the samples can escape it; not in a file of torch.save, whose directory has a checksum of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointCorruptError, and_more
from bytecheckpoint.manifest import DataFile, Sample
from bytecheckpoint.manifest.validation import MAX_SAMPLE_BYTES
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_END_BYTES = 1 << 16
"""Of the first and the last sample: headers of safetensors, directories of archives."""
_INNER_BYTES = 1 << 12
_NUM_INNER = 6
_NUM_NAMED = 5


class SampleFault(NamedTuple):
    """A sample that is not as it was when the link was made."""

    file: int
    """Index into the files that were given."""
    sample: Sample
    found: int
    """The checksum now."""


def sample_ranges(byte_length: int, directory_offset: int | None) -> list[tuple[int, int]]:
    """Offset and length of the samples of a file, in bytes. An archive's directory is among them whole, where it has no
    more than MAX_SAMPLE_BYTES.
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
    """Raises what `Store.read_into` raises."""
    content = bytearray(byte_length)
    store.read_into(name, byte_offset, memoryview(content))
    return Sample(byte_offset, byte_length, xxhash.xxh3_64_intdigest(content))


def sample_faults(store: Store, names: Sequence[str], files: Sequence[DataFile], *, threads: int) -> list[SampleFault]:
    """The samples that these files, of these names in the store, have no more. Raises what `Store.read_into` raises."""

    def compare(job: tuple[int, Sample]) -> SampleFault | None:
        number, sample = job
        found = take_sample(store, names[number], sample.byte_offset, sample.byte_length)
        return None if found == sample else SampleFault(number, sample, found.digest)

    jobs = [(number, sample) for number, file in enumerate(files) for sample in file.samples]
    return [fault for fault in map_jobs(compare, jobs, num_threads=threads) if fault is not None]


def check_samples(store: Store, folder: str, files: Iterable[DataFile], *, threads: int) -> None:
    """Raises CheckpointCorruptError (checksum) where one of these files was written again after the link was made."""
    sampled = [file for file in files if file.samples]
    names = [join_name(folder, file.name) for file in sampled]
    changed = sorted({fault.file for fault in sample_faults(store, names, sampled, threads=threads)})
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
