"""Finds the data files in memory whose bytes are not those that were saved, after a load of a version failed: checks
every file that the ranks of a host read, by its checksums.
"""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory_tier.seen import HostView
from bytecheckpoint.storage.checksum_scan import ScanFault, ScanRange, ranges_of, scan
from bytecheckpoint.storage.memory_root.held_store import HeldStore
from bytecheckpoint.storage.memory_root.slot_file import FilePlace

_THREADS = 4


def damaged_files(store: HeldStore, files: Sequence[DataFile]) -> list[str]:
    """Returns the names of the files that cannot be read as they were saved."""
    names = [file.name for file in files]
    damaged: set[str] = set()

    def note(item: ScanRange, faults: Sequence[ScanFault]) -> None:
        damaged.update(names[item.file] for _ in faults)

    ranges = (
        each
        for number, file in enumerate(files)
        for each in ranges_of(number, file, end=file.byte_length, chosen=range(len(file.extent_lengths)))
    )
    scan(store, names, ranges, threads=_THREADS, on_done=note)
    return [name for name in names if name in damaged]


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
