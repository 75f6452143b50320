"""What the ranks of a save tell the coordinator after they have written, and the manifest that comes of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import torch

from bytecheckpoint.agreement import Agreed
from bytecheckpoint.compressing import Place
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, TensorRecord, tensor_record
from bytecheckpoint.plan_cache import KnownPlan, Written
from bytecheckpoint.planner.file_plan import are_exactly
from bytecheckpoint.planner.save_plan import Write
from bytecheckpoint.region import Region
from bytecheckpoint.staging import PlannedFile


class WrittenFile(NamedTuple):
    """A data file that has been written."""

    file: DataFile
    places: Sequence[Place] | None
    """Where its chunks lie, in the plan's order; None where they lie as planned."""


_Entry = tuple[int, tuple[int, ...], tuple[int, ...], int, int, int, str]
"""A chunk: index of the offer, offsets, lengths; index of the file, byte offset, byte length, codec."""


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has written."""

    files: list[DataFile]
    chunks: list[_Entry]
    """Empty where the coordinator knows all that."""
    varies: bool
    """Another save with the same plan may write them at other places: their lengths depend on their values."""


def encode_report(agreed: Agreed, written: Sequence[WrittenFile]) -> bytes:
    """The report of a rank that wrote these files."""
    varies = any(file.places is not None for file in written)
    chunks = []
    if varies or not agreed.has_written:
        for index, (planned, file) in enumerate(zip(agreed.known.files, written, strict=True)):
            chunks += _entries(index, planned, file.places)
    return msgspec.msgpack.encode(_Report([file.file for file in written], chunks, varies))


def _entries(index: int, planned: PlannedFile, places: Sequence[Place] | None) -> list[_Entry]:
    start = len(planned.header)
    as_planned = (Place(start + chunk.data_offset, chunk.byte_length, "none") for chunk in planned.chunks)
    return [
        (chunk.offer, *chunk.region, index, *place)
        for chunk, place in zip(planned.chunks, places or as_planned, strict=True)
    ]


def build_manifest(
    agreed: Agreed, payloads: Sequence[bytes], *, step: int | None, metadata: Mapping[str, Any]
) -> Manifest:
    """The manifest of what all ranks report, checked against what they were to write.

    Raises CheckpointSaveError (storage) where a rank reports something else than the plan says.
    """
    reports = [msgspec.msgpack.decode(payload, type=_Report) for payload in payloads]
    written = agreed.known.written
    if written is not None:
        _check_files(written, reports)
    else:
        written = _written(agreed, reports)
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
        provenance=_provenance(len(reports)),
    )


def remember_tensors(known: KnownPlan, decoded: Manifest) -> None:
    """Keeps what a manifest says about tensors in the form in which it was decoded: it encodes at once."""
    if known.written is not None:
        known.written = replace(known.written, tensors=decoded.tensors)


def _written(agreed: Agreed, reports: Sequence[_Report]) -> Written:
    """Where everything lies, by what the ranks say."""
    num_files = 0
    chunks: dict[str, list[Chunk]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, (offers, report) in enumerate(zip(agreed.known.offers, reports, strict=True)):
        _check_chunks(agreed, rank, report)
        for index, offsets, lengths, file, byte_offset, byte_length, codec in report.chunks:
            offer = offers[index]
            described[offer.fqn] = offer.dtype, offer.shape
            chunk = Chunk(Region(offsets, lengths), num_files + file, byte_offset, byte_length, codec)
            chunks.setdefault(offer.fqn, []).append(chunk)
        num_files += len(report.files)
    tensors: dict[str, TensorRecord] = {
        fqn: tensor_record(*described[fqn], sorted(of_tensor)) for fqn, of_tensor in chunks.items()
    }
    return Written(tensors=tensors, file_lengths=[_lengths(report) for report in reports])


def _lengths(report: _Report) -> list[int]:
    return [file.byte_length for file in report.files]


def _check_chunks(agreed: Agreed, rank: int, report: _Report) -> None:
    planned = agreed.known.plan.writes[rank] if agreed.known.plan is not None else []
    written = [Write(offer, Region(offsets, lengths)) for offer, offsets, lengths, *_ in report.chunks]
    data_bytes = sum(chunk[-2] for chunk in report.chunks)
    if not are_exactly(written, planned) or sum(_lengths(report)) < data_bytes:
        raise _not_as_planned(rank, f"{len(planned)} chunks", f"{len(written)} in {sum(_lengths(report))} bytes")


def _check_files(written: Written, reports: Sequence[_Report]) -> None:
    for rank, (expected, report) in enumerate(zip(written.file_lengths, reports, strict=True)):
        if list(expected) != _lengths(report):
            raise _not_as_planned(rank, f"files of {list(expected)} bytes", f"files of {_lengths(report)} bytes")


def _not_as_planned(rank: int, planned: str, reported: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"rank {rank} was to write {planned} and reports {reported}; nothing was committed: this is a bug, please "
        "report it",
        kind="storage",
        ranks=(rank,),
    )


def _provenance(world_size: int) -> dict[str, Any]:
    return {
        "world_size": world_size,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "bytecheckpoint": version("bytecheckpoint"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
