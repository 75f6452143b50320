"""What the ranks of a save tell one another: what each could write, what each is to write, what each has written; and
the manifest that comes of it.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import torch

from bytecheckpoint.adapters.plain_merge import merge_plain
from bytecheckpoint.adapters.stored import Contents, Scope
from bytecheckpoint.adapters.tensors import LocalShard
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, tensor_record
from bytecheckpoint.planner.file_plan import PlacedChunk
from bytecheckpoint.planner.save_plan import Offer, SavePlan, Write, plan_save
from bytecheckpoint.ranks import COORDINATOR, Ranks
from bytecheckpoint.region import Region
from bytecheckpoint.staging import small_digests


class SaveRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wants saved, and where."""

    path: str
    step: int | None
    overwrite: bool
    offers: list[Offer]
    aliases: dict[str, str]
    plain: dict[str, tuple[Scope, bytes]]


class SaveOrder(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to write."""

    save_id: str
    writes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """Index of the offer, offsets and lengths of the part of it."""
    differing_replicas: list[str]


class SaveReport(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has written."""

    files: list[DataFile]
    chunks: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, int]]
    """Index of the offer, offsets, lengths; index of the file, byte offset, byte length."""


class Agreed(NamedTuple):
    """The outcome of planning. The coordinator knows of all ranks, the others of themselves."""

    save_id: str
    writes: list[Write]
    """Of this rank."""
    differing_replicas: Sequence[str]
    requests: list[SaveRequest]
    """Of all ranks; empty but on the coordinator."""
    plan: SavePlan | None
    """None but on the coordinator."""
    objects: Mapping[str, bytes]
    """Plain data that all ranks share, by FQN; here and below, empty but on the coordinator."""
    rank_objects: Mapping[str, Mapping[int, bytes]]


def save_request(
    path: str, step: int | None, contents: Sequence[Contents], *, overwrite: bool, num_ranks: int
) -> tuple[SaveRequest, list[LocalShard]]:
    """This rank's request, and the shards that its offers are, in the same order."""
    shards = [shard for of_entry in contents for shard in of_entry.shards]
    digests = small_digests(shards) if num_ranks > 1 else [None] * len(shards)
    offers = [
        Offer(shard.fqn, shard.dtype, shard.global_shape, shard.region.offsets, shard.region.lengths, digest)
        for shard, digest in zip(shards, digests, strict=True)
    ]
    aliases = {alias: fqn for of_entry in contents for alias, fqn in of_entry.aliases.items()}
    plain = {fqn: encoded for of_entry in contents for fqn, encoded in of_entry.plain.items()}
    return SaveRequest(path, step, overwrite, offers, aliases, plain), shards


def agree(ranks: Ranks, request: SaveRequest) -> Agreed:
    """Every rank's part of one plan.

    Raises CheckpointMismatchError (conflict, coverage) where what ranks want does not fit together.
    """
    payloads = ranks.gather(msgspec.msgpack.encode(request))
    if ranks.rank != COORDINATOR:
        order = msgspec.msgpack.decode(ranks.scatter([]), type=SaveOrder)
        return Agreed(order.save_id, _decode_writes(order), order.differing_replicas, [], None, {}, {})
    requests = [msgspec.msgpack.decode(payload, type=SaveRequest) for payload in payloads]
    check_same("save to", [_target(of_rank) for of_rank in requests], ranks.names)
    offers, aliases = [of_rank.offers for of_rank in requests], [of_rank.aliases for of_rank in requests]
    plan = plan_save(offers, aliases, names=ranks.names)
    objects, rank_objects = merge_plain([of_rank.plain for of_rank in requests], ranks.names)
    save_id = uuid.uuid4().hex[:16]
    orders = [
        SaveOrder(save_id, [(offer, *region) for offer, region in writes], list(plan.differing_replicas))
        for writes in plan.writes
    ]
    ranks.scatter([msgspec.msgpack.encode(order) for order in orders])
    own = _decode_writes(orders[COORDINATOR])
    return Agreed(save_id, own, plan.differing_replicas, requests, plan, objects, rank_objects)


def _decode_writes(order: SaveOrder) -> list[Write]:
    return [Write(offer, Region(offsets, lengths)) for offer, offsets, lengths in order.writes]


def _target(request: SaveRequest) -> str:
    overwrite = ", overwriting what is there" if request.overwrite else ""
    return f"{request.path} (step={request.step}{overwrite})"


def check_same(doing: str, targets: Sequence[str], names: Sequence[int]) -> None:
    """Raises CheckpointMismatchError (conflict) where ranks, whose global numbers are `names`, were told different
    things.
    """
    odd = [rank for rank, target in enumerate(targets) if target != targets[COORDINATOR]]
    if odd:
        raise CheckpointMismatchError(
            f"ranks were told to {doing} different places: rank {names[COORDINATOR]} {targets[COORDINATOR]}, rank "
            f"{names[odd[0]]} {targets[odd[0]]}; nothing was changed: pass the same to all ranks",
            kind="conflict",
            ranks=tuple(names[rank] for rank in odd),
        )


def encode_report(files: Sequence[tuple[Sequence[PlacedChunk], int, DataFile]]) -> bytes:
    """The report of a rank that wrote these files: their chunks, where their data starts, and what was written."""
    chunks = [
        (chunk.offer, *chunk.region, index, data_start + chunk.data_offset, chunk.byte_length)
        for index, (chunks, data_start, _) in enumerate(files)
        for chunk in chunks
    ]
    return msgspec.msgpack.encode(SaveReport([file for _, _, file in files], chunks))


def build_manifest(
    agreed: Agreed, payloads: Sequence[bytes], *, step: int | None, metadata: Mapping[str, Any]
) -> Manifest:
    """The manifest of what all ranks report, checked against what they were to write.

    Raises CheckpointSaveError (storage) where a rank reports something else than the plan says.
    """
    reports = [msgspec.msgpack.decode(payload, type=SaveReport) for payload in payloads]
    files: list[DataFile] = []
    chunks: dict[str, list[Chunk]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, (request, report) in enumerate(zip(agreed.requests, reports, strict=True)):
        _check_report(agreed, rank, report)
        for index, offsets, lengths, file, byte_offset, byte_length in report.chunks:
            offer = request.offers[index]
            described[offer.fqn] = offer.dtype, offer.shape
            chunk = Chunk(Region(offsets, lengths), len(files) + file, byte_offset, byte_length)
            chunks.setdefault(offer.fqn, []).append(chunk)
        files += report.files
    tensors = {fqn: tensor_record(*described[fqn], sorted(chunks[fqn])) for fqn in chunks}
    return Manifest(
        save_id=agreed.save_id,
        step=step,
        files=files,
        tensors=tensors,
        aliases=agreed.plan.aliases if agreed.plan is not None else {},
        objects=agreed.objects,
        rank_objects=agreed.rank_objects,
        metadata=metadata,
        provenance=_provenance(len(reports)),
    )


def _check_report(agreed: Agreed, rank: int, report: SaveReport) -> None:
    planned = sorted(agreed.plan.writes[rank]) if agreed.plan is not None else []
    written = sorted(Write(offer, Region(offsets, lengths)) for offer, offsets, lengths, *_ in report.chunks)
    data_bytes = sum(chunk[-1] for chunk in report.chunks)
    file_bytes = sum(file.byte_length for file in report.files)
    if planned != written or file_bytes < data_bytes:
        raise CheckpointSaveError(
            f"rank {rank} was to write {len(planned)} chunks and reports {len(written)} in {file_bytes} bytes of "
            "files; nothing was committed: this is a bug, please report it",
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
