"""Finds the data files in memory whose bytes are not those that were saved, after a load of a version failed: checks
every file that the ranks of a host read, extent by extent.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import cut_blocks
from bytecheckpoint.memory_tier.seen import HostView
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.memory_root.held_store import HeldStore
from bytecheckpoint.storage.memory_root.slot_file import FilePlace
from bytecheckpoint.storage.object_io import BLOCK_BYTES

_THREADS = 4


def damaged_files(store: HeldStore, files: Sequence[DataFile]) -> list[str]:
    """Returns the names of the files that cannot be read as they were saved."""
    is_damaged = map_jobs(lambda file: not _is_whole(store, file), files, num_threads=_THREADS)
    return [file.name for file, damaged in zip(files, is_damaged, strict=True) if damaged]


def choose_good_places(view: HostView, save_id: str, files: Sequence[DataFile]) -> None:
    """Puts an undamaged place into `view.places` for each file of this save that one kind of holder has in several
    slots. Keeps the place that is there if all are damaged.
    """
    by_name = {file.name: file for file in files}
    for (of_save, kind), others in view.others.items():
        places = view.places[of_save, kind]
        for name in others if of_save == save_id else ():
            candidates = [places[name], *others[name]]
            good = (place for place in candidates if name in by_name and not _damaged_at(place, by_name[name]))
            places[name] = next(good, places[name])


def _damaged_at(place: FilePlace, file: DataFile) -> list[str]:
    return damaged_files(HeldStore({file.name: place}, b"", shown=place.path, elsewhere={}), [file])


def _is_whole(store: HeldStore, file: DataFile) -> bool:
    """Returns True if every extent of a file can be read and matches its checksum."""
    blocks = cut_blocks(file.extent_lengths, max_bytes=BLOCK_BYTES)
    memory = memoryview(bytearray(max((block.byte_length for block in blocks), default=0)))
    for block in blocks:
        content = memory[: block.byte_length]
        try:
            store.read_into(file.name, block.byte_offset, content)
        except CheckpointError:
            return False
        start = 0
        for extent in block.extents:
            end = start + file.extent_lengths[extent]
            if xxhash.xxh3_64_intdigest(content[start:end]) != file.extent_digests[extent]:
                return False
            start = end
    return True
