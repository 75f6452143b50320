"""Times what is done once for each data file of a checkpoint of thousands of ranks, in a folder of this machine: the
looks of a load, the coordinator's check before a commit, and the deletion.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bytecheckpoint.distributed.ranks import SoleRank, Subject
from bytecheckpoint.manifest import DataFile, Manifest, encode_manifest
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.commit import check_is_shared
from bytecheckpoint.saving.target import SaveCall, open_target
from bytecheckpoint.saving.write import SaveFiles
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import delete_many
from shared.tables import table

TITLES = ["what", "files", "s", "CPU s", "at most, s", "reached"]
TARGET_S = 1.0
FILE_BYTES = 4096
SAVE_ID = "0" * 16


def measure_files(num_files: int, folder: Path, *, rounds: int) -> Iterator[str]:
    """Yields a table."""
    files = [
        DataFile(layout.data_file_name(SAVE_ID, rank, 0), FILE_BYTES, [FILE_BYTES], [rank]) for rank in range(num_files)
    ]
    manifest = Manifest(save_id=SAVE_ID, files=files)
    content = encode_manifest(manifest)
    target = open_target(folder, step=1, role=None, storage_options=None, options=SaveOptions())
    of_save = SaveFiles(target, SAVE_ID, 0, ())
    call = SaveCall(SoleRank(), Subject(target.path, 1, is_save=True), PhaseTimer())
    store, names = target.store, [join_name(target.folder, file.name) for file in files]

    parts: dict[str, Callable[[], object]] = {
        "looked at by a load": lambda: layout.check_files(store, target.folder, manifest, range(num_files)),
        "checked before a commit": lambda: check_is_shared(call, of_save, content),
        "deleted": lambda: delete_many(store, names),
    }
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in parts}
    for _ in range(rounds):
        _write(folder / target.folder, files)
        for what, do in parts.items():
            began, processor_began = time.perf_counter(), time.process_time()
            do()
            times[what].append((time.perf_counter() - began, time.process_time() - processor_began))
    rows = []
    for what, each in times.items():
        seconds, processor_s = (statistics.median(column) for column in zip(*each, strict=True))
        is_reached = "yes" if seconds <= TARGET_S else "no"
        rows.append([what, f"{num_files:,}", f"{seconds:.2f}", f"{processor_s:.2f}", f"{TARGET_S:g}", is_reached])
    yield from table(TITLES, rows)


def _write(folder: Path, files: list[DataFile]) -> None:
    (folder / layout.DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.name).write_bytes(bytes(FILE_BYTES))
    os.sync()  # the files of a checkpoint are on the disk, and removing them takes more than giving up a cached page
