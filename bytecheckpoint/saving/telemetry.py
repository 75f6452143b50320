"""How a save went on one rank, written beside the data for whoever looks into slow saves later. Loading never reads it,
and a checkpoint is as good without it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import nullcontext, suppress

import msgspec

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Block, Store

_VERSION = 1


def write_telemetry(
    store: Store, folder: str, save_id: str, *, ranks: Ranks, clock: PhaseTimer, files: Sequence[DataFile]
) -> None:
    """One JSON object, as docs/format.md describes it. What goes wrong with it is no failure of the save."""
    with suppress(Exception):  # on this rank alone it would be raised, and the others may commit already
        _write(store, folder, save_id, ranks=ranks, clock=clock, files=files)


def _write(
    store: Store, folder: str, save_id: str, *, ranks: Ranks, clock: PhaseTimer, files: Sequence[DataFile]
) -> None:
    record = {
        "version": _VERSION,
        "save_id": save_id,
        "rank": ranks.global_ranks[ranks.rank],
        "host": socket.gethostname(),
        "started_at": clock.started_at,
        "spans": [span._asdict() for span in clock.spans],
        "seconds": clock.seconds,
        "num_bytes": sum(file.byte_length for file in files),
        "num_files": len(files),
    }
    content = memoryview(msgspec.json.encode(record))
    block = Block(0, content.nbytes, lambda: nullcontext(content))
    store.write(join_name(folder, layout.telemetry_name(save_id, ranks.rank)), [block], replace=True)
