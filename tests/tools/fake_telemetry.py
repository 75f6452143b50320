"""Writes checkpoints with made-up telemetry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytecheckpoint.manifest import Manifest, encode_manifest

SAVE_ID = "timed"
STARTED_AT = 1.75e9


def record(
    rank: int, phases: Mapping[str, tuple[float, float]], *, late_s: float = 0.0, **changed: Any
) -> dict[str, Any]:
    """Returns the record of a rank with these starts and ends of phases."""
    return {
        "version": 1,
        "save_id": SAVE_ID,
        "rank": rank,
        "host": f"node{rank // 8}",
        "started_at": STARTED_AT + late_s,
        "spans": [{"phase": phase, "start": start, "end": end} for phase, (start, end) in phases.items()],
        "seconds": {phase: end - start for phase, (start, end) in phases.items()} | {"checksum": 0.5},
        "num_bytes": 1000 + rank,
        "num_files": 1,
        **changed,
    }


def ordinary(rank: int, *, write_s: float = 1.0, late_s: float = 0.0) -> dict[str, Any]:
    """Returns a rank that plans for a tenth of a second, stages for two and then writes, which overlaps staging."""
    phases = {"plan": (0.0, 0.1), "stage": (0.1, 0.3), "write": (0.2, 0.2 + write_s)}
    return record(rank, phases, late_s=late_s)


def checkpoint_with_telemetry(folder: Path, records: Sequence[Any], **provenance: Any) -> Path:
    """Writes an empty checkpoint with this telemetry: for each file a record, or a list of records."""
    (folder / "telemetry").mkdir(parents=True)
    manifest = Manifest(save_id=SAVE_ID, provenance={"world_size": len(records), **provenance})
    (folder / "manifest.bcp").write_bytes(encode_manifest(manifest))
    for number, timed in enumerate(records):
        (folder / "telemetry" / f"{SAVE_ID}-{number:05d}.json").write_text(json.dumps(timed))
    return folder
