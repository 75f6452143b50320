"""What the ranks of a save tell the coordinator after they have written, and the manifest that comes of it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest import DataFile, Manifest, TensorTable
from bytecheckpoint.planner.file_layout import PlacedChunk
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.saving.chunk_locations import PlaceTable, pack_places
from bytecheckpoint.saving.global_plan import Agreed
from bytecheckpoint.saving.plan_cache import KnownPlan, Written
from bytecheckpoint.staging.compress import FramePlace
from bytecheckpoint.staging.file_image import PlannedFile


class WrittenFile(NamedTuple):
    """A data file that has been written."""

    file: DataFile
    places: Sequence[FramePlace] | None
    """Where its chunks lie, in the plan's order; None where they lie as planned."""


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has written."""

    files: list[DataFile]
    starts: list[int]
    """Of each file: the byte from which the offsets in `places` count."""
    places: bytes
    """Of its chunks; see chunk_locations.py. Empty where the coordinator knows all that."""
    varies: bool
    """Another save with the same plan may write them at other places: their lengths depend on their values."""


def encode_report(agreed: Agreed, written: Sequence[WrittenFile]) -> bytes:
    """The report of a rank that wrote these files."""
    varies = any(file.places is not None for file in written)
    starts = [0 if file.places is not None else len(planned.header) for planned, file in _pairs(agreed, written)]
    places = pack_places(_places(agreed, written), agreed.known) if varies or not agreed.has_written else b""
    return msgspec.msgpack.encode(_Report([file.file for file in written], starts, places, varies))


def _pairs(agreed: Agreed, written: Sequence[WrittenFile]) -> Iterator[tuple[PlannedFile, WrittenFile]]:
    return zip(agreed.known.files, written, strict=True)


def _places(agreed: Agreed, written: Sequence[WrittenFile]) -> Iterator[tuple[PlacedChunk, int, FramePlace]]:
    """Each chunk, the number of its file, and where it lies from the start that is reported for the file."""
    for number, (planned, file) in enumerate(_pairs(agreed, written)):
        as_planned = (FramePlace(chunk.data_offset, chunk.byte_length, "none") for chunk in planned.chunks)
        for chunk, place in zip(planned.chunks, file.places or as_planned, strict=True):
            yield chunk, number, place


def build_manifest(
    agreed: Agreed, payloads: Sequence[bytes], *, names: Sequence[int], step: int | None, metadata: Mapping[str, Any]
) -> Manifest:
    """The manifest of what all ranks report, checked against what they were to write. `names` are their global ranks.

    Raises CheckpointSaveError (storage) where a rank reports something else than the plan says.
    """
    reports = [msgspec.msgpack.decode(payload, type=_Report) for payload in payloads]
    written = agreed.known.written
    if written is not None:
        _check_files(written, reports, names)
    else:
        written = _written(agreed, reports, names)
        if not any(report.varies for report in reports):
            agreed.known.written = written
    return Manifest(
        save_id=agreed.save_id,
        step=step,
        files=[file for report in reports for file in report.files],
        tensors=written.tensors,
        aliases=agreed.known.plan.aliases if agreed.known.plan is not None else {},
        objects=agreed.objects,
        rank_objects=agreed.rank_objects,
        metadata=metadata,
        provenance=provenance_of(len(reports)),
    )


def remember_tensors(known: KnownPlan, decoded: Manifest) -> None:
    """Keeps what a manifest says about tensors in the form in which it was decoded: it encodes at once."""
    if known.written is not None:
        known.written = replace(known.written, tensors=decoded.tensors)


def _written(agreed: Agreed, reports: Sequence[_Report], names: Sequence[int]) -> Written:
    """Where everything lies, by what the ranks say."""
    plan = agreed.known.plan
    if plan is None:
        raise TypeError("the coordinator has made the plan, or knows where the chunks lie")
    table = PlaceTable([report.places for report in reports])
    for rank, report in enumerate(reports):
        _check_chunks(plan, rank, report, table, name=names[rank])
    files = [file for report in reports for file in report.files]
    columns = table.columns(plan.tensors, [report.starts for report in reports])
    return Written(
        tensors=TensorTable([tensor.fqn for tensor in plan.tensors], columns, files),
        file_lengths=[_lengths(report) for report in reports],
    )


def _lengths(report: _Report) -> list[int]:
    return [file.byte_length for file in report.files]


def _check_chunks(plan: SavePlan, rank: int, report: _Report, table: PlaceTable, *, name: int) -> None:
    planned = np.concatenate([plan.whole_items[rank], np.ones(len(plan.item_parts[rank]), bool)])
    written = table.is_written(rank)
    if not np.array_equal(planned, written) or sum(_lengths(report)) < table.num_bytes(rank):
        num_written = f"{np.count_nonzero(written)} in {sum(_lengths(report))} bytes"
        raise _not_as_planned(name, f"{np.count_nonzero(planned)} chunks", num_written)


def _check_files(written: Written, reports: Sequence[_Report], names: Sequence[int]) -> None:
    for name, expected, report in zip(names, written.file_lengths, reports, strict=True):
        if list(expected) != _lengths(report):
            raise _not_as_planned(name, f"files of {list(expected)} bytes", f"files of {_lengths(report)} bytes")


def _not_as_planned(name: int, planned: str, reported: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"rank {name} was to write {planned} and reports {reported}; nothing was committed: this is a bug, please "
        "report it",
        kind="storage",
        ranks=(name,),
    )


def provenance_of(world_size: int) -> dict[str, Any]:
    """What a manifest tells about the ranks that wrote the checkpoint, now."""
    return {
        "world_size": world_size,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "bytecheckpoint": version("bytecheckpoint"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
