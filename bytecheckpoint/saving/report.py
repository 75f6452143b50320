"""The report of each rank after it has written, from which the coordinator builds the manifest; and its timings, which
the coordinator writes as telemetry. Loading never reads telemetry.
"""

from __future__ import annotations

import logging
import platform
import socket
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from bytecheckpoint.distributed.ranks import BLOCK_RANKS, COORDINATOR
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointSaveError
from bytecheckpoint.info import describe_checkpoint
from bytecheckpoint.manifest import DataFile, Manifest, TensorRecord, TensorTable, encode_manifest, open_manifest
from bytecheckpoint.manifest.run_column import RunColumn
from bytecheckpoint.planner.file_layout import PlacedChunk
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.saving.chunk_locations import ChunkLocations, pack_locations
from bytecheckpoint.saving.global_plan import AgreedPlan
from bytecheckpoint.saving.plans.rank_plan import WrittenTensors
from bytecheckpoint.saving.target import SaveCall, SaveTarget
from bytecheckpoint.staging.compress import ChunkLocation
from bytecheckpoint.staging.memory_slots import GENERATION
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import one_block

logger = logging.getLogger("bytecheckpoint")

_TELEMETRY_VERSION = 1
_WRITES_IN_FLIGHT = 16


class WrittenFile(NamedTuple):
    """A data file of a save: written by it, or taken from an earlier checkpoint because it is equal."""

    file: DataFile
    locations: Sequence[ChunkLocation] | None
    """Locations of its chunks, in the plan's order; None if they are as planned."""


class ReportedFile(msgspec.Struct, frozen=True, array_like=True):
    """A data file on its way to the coordinator. Its extents are packed into bytes: as numbers, those of thousands of
    ranks would be millions of objects.
    """

    name: str
    byte_length: int
    extent_lengths: bytes
    extent_digests: bytes
    content_digest: bytes

    @classmethod
    def of(cls, file: DataFile) -> ReportedFile:
        lengths, digests = (array("Q", each).tobytes() for each in (file.extent_lengths, file.extent_digests))
        return cls(file.name, file.byte_length, lengths, digests, file.content_digest)

    def data_file(self) -> DataFile:
        lengths, digests = array("Q", self.extent_lengths), array("Q", self.extent_digests)
        return DataFile(self.name, self.byte_length, lengths, digests, content_digest=self.content_digest)


class _RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The files and chunks that one rank has written."""

    files: list[ReportedFile]
    starts: list[int]
    """Byte of each file from which the offsets in `locations` count."""
    locations: bytes
    """Packed locations of its chunks; empty if the coordinator has them."""
    varies: bool
    """True if compressed lengths, and so locations, depend on the values of this save."""

    @property
    def file_lengths(self) -> list[int]:
        return [file.byte_length for file in self.files]


class TimedReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank that has written, with the seconds of its phases."""

    report: bytes
    seconds: dict[str, float]
    is_direct: bool = False
    """True if data went directly to the path, not to the local stage."""
    reused_bytes: int = 0
    """Bytes of files that were taken from an earlier checkpoint."""
    record: bytes = b""
    """The rank's `telemetry_record`."""


def encode_report(agreed: AgreedPlan, written: Sequence[WrittenFile]) -> bytes:
    """Returns the report of a rank that wrote these files."""
    varies = any(file.locations is not None for file in written)
    planned = agreed.rank_plan.files
    starts = [
        0 if file.locations is not None else len(plan.header) for plan, file in zip(planned, written, strict=True)
    ]
    is_known = agreed.has_locations and not varies
    locations = b"" if is_known else pack_locations(_locations(agreed, written), agreed.rank_plan)
    files = [ReportedFile.of(file.file) for file in written]
    return msgspec.msgpack.encode(_RankReport(files, starts, locations, varies))


def reported_files(report: bytes) -> list[DataFile]:
    """Returns the data files in a report."""
    return [file.data_file() for file in msgspec.msgpack.decode(report, type=_RankReport).files]


def _locations(agreed: AgreedPlan, written: Sequence[WrittenFile]) -> Iterator[tuple[PlacedChunk, int, ChunkLocation]]:
    """Yields each chunk, the number of its file, and its location: see `_RankReport.starts`."""
    for number, (planned, file) in enumerate(zip(agreed.rank_plan.files, written, strict=True)):
        as_planned = (ChunkLocation(chunk.data_offset, chunk.byte_length, "none") for chunk in planned.chunks)
        for chunk, location in zip(planned.chunks, file.locations or as_planned, strict=True):
            yield chunk, number, location


def encode_manifest_and_info(
    agreed: AgreedPlan,
    timed_reports: Sequence[TimedReport],
    call: SaveCall,
    target: SaveTarget,
    *,
    metadata: Mapping[str, Any],
    generation: int | None = None,
) -> tuple[bytes, bytes]:
    """Returns the encoded manifest, checked by decoding it, and the encoded CheckpointInfo about it, without seconds.
    Keeps the chunks in the rank plan for later saves. `generation` is that of a save with a memory tier.

    Raises the errors of `encode_manifest`, and CheckpointSaveError (storage) if the reports contradict the plan or make
    no checkpoint.
    """
    with gc_paused():
        written = agreed.rank_plan.written
        manifest = build_manifest(
            agreed,
            [each.report for each in timed_reports],
            global_ranks=call.ranks.global_ranks,
            step=target.step,
            metadata=metadata,
        )
        if generation is not None:
            manifest = replace(manifest, provenance={**manifest.provenance, GENERATION: generation})
        content = encode_manifest(manifest)
        try:
            decoded = open_manifest(content)
            if written is None or not _same_chunks(written.tensors, decoded):  # these chunks were not checked before
                decoded.table.check_all()
        except CheckpointCorruptError as error:
            raise CheckpointSaveError(
                f"what the ranks report to have written makes no checkpoint: {error.message}. Nothing was committed: "
                "this is a bug, please report it",
                kind="storage",
            ) from error
        written = agreed.rank_plan.written
        if written is not None:  # decoded columns are faster to encode
            agreed.rank_plan.written = replace(written, tensors=decoded.tensors)
        info = describe_checkpoint(decoded, path=target.path)
        return content, msgspec.msgpack.encode(
            replace(info, reused_bytes=sum(each.reused_bytes for each in timed_reports))
        )


def _same_chunks(tensors: Mapping[str, TensorRecord], decoded: Manifest) -> bool:
    """Returns True if a decoded manifest has the same chunks as an earlier save with this plan, in which they were
    checked.
    """
    if not isinstance(tensors, TensorTable) or list(tensors) != list(decoded.tensors):
        return False
    return all(map(_are_equal, tensors.columns, decoded.table.columns))


def _are_equal(checked: Any, now: Any) -> bool:
    return checked == now if isinstance(checked, RunColumn) else np.array_equal(checked, now)


def build_manifest(
    agreed: AgreedPlan,
    payloads: Sequence[bytes],
    *,
    global_ranks: Sequence[int],
    step: int | None,
    metadata: Mapping[str, Any],
) -> Manifest:
    """Returns the manifest that the reports of all ranks make; `payloads` and `global_ranks` are in the same order.
    Sets `written` of the rank plan for later saves, unless compression varies where chunks lie.

    Raises CheckpointSaveError (storage) if a report contradicts the plan.
    """
    reports = [msgspec.msgpack.decode(payload, type=_RankReport) for payload in payloads]
    plan, written = agreed.rank_plan.global_plan, agreed.rank_plan.written
    if plan is None:
        raise TypeError("only the coordinator has the global plan")
    if written is not None:
        for rank, expected, report in zip(global_ranks, written.file_lengths, reports, strict=True):
            if expected != report.file_lengths:
                raise _contradiction(rank, f"files of {expected} bytes", f"files of {report.file_lengths} bytes")
    else:
        written = _written_tensors(plan, reports, global_ranks)
        if not any(report.varies for report in reports):
            agreed.rank_plan.written = written
    return Manifest(
        save_id=agreed.save_id,
        step=step,
        files=[file.data_file() for report in reports for file in report.files],
        tensors=written.tensors,
        aliases=plan.aliases,
        objects=agreed.objects,
        rank_objects=agreed.rank_objects,
        metadata=metadata,
        provenance=provenance_of(len(reports)),
    )


def _written_tensors(plan: SavePlan, reports: Sequence[_RankReport], global_ranks: Sequence[int]) -> WrittenTensors:
    """Returns the chunks that the ranks report. Raises CheckpointSaveError if they differ from the plan."""
    locations = ChunkLocations([report.locations for report in reports])
    for rank, report in enumerate(reports):
        planned = np.concatenate([plan.whole_items[rank], np.ones(len(plan.item_parts[rank]), bool)])
        written = locations.is_written(rank)
        num_bytes = sum(report.file_lengths)
        if not np.array_equal(planned, written) or num_bytes < locations.num_bytes(rank):
            reported = f"{np.count_nonzero(written)} in {num_bytes} bytes"
            raise _contradiction(global_ranks[rank], f"{np.count_nonzero(planned)} chunks", reported)
    files = [file.data_file() for report in reports for file in report.files]
    columns = locations.columns(plan.tensors, [report.starts for report in reports])
    return WrittenTensors(
        tensors=TensorTable([tensor.fqn for tensor in plan.tensors], columns, files),
        file_lengths=[report.file_lengths for report in reports],
    )


def _contradiction(rank: int, planned: str, reported: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"rank {rank} was to write {planned} and reports {reported}; nothing was committed: this is a bug, please "
        "report it",
        kind="storage",
        ranks=(rank,),
    )


def provenance_of(world_size: int) -> dict[str, Any]:
    """Returns the provenance of a checkpoint that is written now: number of ranks, time, and versions of software."""
    try:
        own_version = version("bytecheckpoint")
    except PackageNotFoundError:  # a source tree on the path, or a frozen program without metadata
        own_version = "unknown"
    return {
        "world_size": world_size,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "bytecheckpoint": own_version,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def telemetry_record(call: SaveCall, save_id: str, files: Sequence[DataFile]) -> bytes:
    """Returns a JSON object with the timing of this rank, see docs/format.md; empty bytes after any error, because
    telemetry fails no save.
    """
    ranks, _, timer = call
    with suppress(Exception):
        record = {
            "version": _TELEMETRY_VERSION,
            "save_id": save_id,
            "rank": ranks.global_ranks[ranks.rank],
            "host": socket.gethostname(),
            "started_at": timer.started_at,
            "spans": [span._asdict() for span in timer.spans],
            "seconds": timer.seconds,
            "num_bytes": sum(file.byte_length for file in files),
            "num_files": len(files),
        }
        return msgspec.json.encode(record)
    return b""


def write_telemetry(call: SaveCall, target: SaveTarget, save_id: str, records: Sequence[bytes]) -> None:
    """Writes the records of all ranks on the coordinator, one object for each block of ranks. No error fails the save;
    one of the store is logged.
    """
    if call.ranks.rank != COORDINATOR:
        return

    def write(first: int) -> None:
        content = b"[" + b",".join(filter(None, records[first : first + BLOCK_RANKS])) + b"]"
        name = join_name(target.folder, layout.telemetry_name(save_id, first))
        target.store.write(name, one_block(content), replace=True)

    with suppress(Exception):  # the other ranks have reported, and wait for the commit
        try:
            run_jobs(write, range(0, len(records), BLOCK_RANKS), num_threads=_WRITES_IN_FLIGHT)
        except CheckpointError as error:
            logger.warning("the timings of the save to %s could not be written: %s", target.path, error)
