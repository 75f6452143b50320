"""The planning of a save by all ranks: each sends its local plan to the coordinator and receives its part of the global
plan. Plans are cached: a save of the same tensors is not planned again if all ranks have the plan.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.adapters.expectation import EntryContents, Scope
from bytecheckpoint.adapters.plain.merge_plain import merge_plain, refuse_tensors
from bytecheckpoint.adapters.plain.plain_digests import digested, digests_of, restored
from bytecheckpoint.adapters.shard_columns import ShardBlocks
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, check_same
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.file_layout import CodecOption
from bytecheckpoint.planner.memory_tier.mirrors import Mirror
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.planner.save_plan import SavePlan, plan_save
from bytecheckpoint.planner.write_items import ItemRegion, WriteItem, pack_items
from bytecheckpoint.region import Region
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.saving.plans.messages import LocalPlanMessage, PlanReply, mirroring_of, new_replies
from bytecheckpoint.saving.plans.rank_plan import MirroredImage, PlanCache, RankPlan
from bytecheckpoint.saving.replica_checks import (
    StageDigests,
    check_pipeline_stages,
    combined_digests,
    fqns_in_several_stages,
    part_digests,
    small_digests,
    warn_of_differing,
)
from bytecheckpoint.saving.target import empty_error
from bytecheckpoint.staging.file_image import FileApart, cut_to_files, plan_apart, plan_files

_SEND_ALL = PlanReply(send_all=True)


class ReplicaCopies(NamedTuple):
    """The place of a rank, and the number of copies of replicated bytes that the memory tier stages."""

    place: RankPlace
    copies: int
    """Number of failure domains that get a copy, the writer's included."""


class LocalSavePlan(NamedTuple):
    """Everything that one rank holds and wants saved."""

    target: str
    """Description of the place, which must be the same on all ranks."""
    shards: ShardBlocks
    aliases: Mapping[str, str]
    """FQN that a tied tensor is stored under, by each other name of it."""
    plain: Mapping[str, tuple[Scope, bytes]]
    stages: Mapping[str, int]
    """Pipeline stage by FQN, of modules that know theirs."""
    max_file_bytes: int
    codec: CodecOption
    plans: PlanCache
    """Cache to which a new plan is added."""
    is_empty: bool = False
    """True if the state has no entry."""
    fingerprint: bytes = b""
    """Digest of everything that a plan depends on, and of nothing else."""
    cached: RankPlan | None = None
    """Plan of an earlier save with this fingerprint; valid if all ranks have it and replicas are still alike."""
    save_id_prefix: str = ""
    """First characters of the new save id; the others are random."""
    frozen: Collection[str] = ()
    """FQNs of tensors that get files of their own."""
    replicas: ReplicaCopies | None = None
    """None in a save of one rank, without a memory tier, and if the memory tier holds one copy of each byte and no
    parity.
    """

    def items(self) -> list[WriteItem]:
        """Returns the shards as records for the planner, in the same order and without digests."""
        return [
            WriteItem(fqn, dtype, shape, region.offsets, region.lengths)
            for fqn, dtype, shape, region in self.shards.described()
        ]


class AgreedPlan(NamedTuple):
    """One rank's part of the global plan, once all ranks have agreed."""

    save_id: str
    rank_plan: RankPlan
    is_new: bool
    """True if the plan was made in this save and not taken from the cache."""
    has_locations: bool
    """True if the coordinator has the chunk locations, so that no rank reports them."""
    objects: Mapping[str, bytes]
    """Plain data that all ranks share, by FQN; empty except on the coordinator."""
    rank_objects: Mapping[str, Mapping[int, bytes]]
    """Plain data of single ranks, by FQN and rank; empty except on the coordinator."""


def make_local_plan(
    ranks: Ranks,
    target: object,
    contents: Sequence[EntryContents],
    options: SaveOptions,
    *,
    plans: PlanCache,
    frozen: Collection[str] = (),
    replicas: ReplicaCopies | None = None,
) -> LocalSavePlan:
    """Returns the local plan of the entries that this rank holds. Its `cached` is the plan of an earlier save with the
    same fingerprint, or None.
    """
    shards = ShardBlocks(entry.shards for entry in contents)
    if options.codec != "none":
        shards = ShardBlocks([[part for shard in shards for part in cut_to_files(shard, options)]])
    plan = LocalSavePlan(
        target=str(target),
        shards=shards,
        aliases={alias: fqn for entry in contents for alias, fqn in entry.aliases.items()},
        plain={fqn: encoded for entry in contents for fqn, encoded in entry.plain.items()},
        stages={fqn: stage for entry in contents for fqn, stage in entry.stages.items()},
        max_file_bytes=options.max_file_bytes,
        codec=options.codec,
        plans=plans,
        is_empty=not contents,
        frozen=frozen,
        replicas=replicas if ranks.num_ranks > 1 else None,
    )
    placement = (list(ranks.global_ranks), ranks.rank, plan.stages, sorted(frozen), plan.replicas)
    parts = (shards.digests(), plan.aliases, (plan.max_file_bytes, plan.codec), *placement)
    fingerprint = xxhash.xxh3_128_digest(msgspec.msgpack.encode(parts))
    return plan._replace(fingerprint=fingerprint, cached=plans.find(fingerprint))


def exchange_plans(ranks: Ranks, local_plan: LocalSavePlan) -> AgreedPlan:
    """Returns this rank's part of the global plan, made now or cached by all ranks. A new plan goes into the cache, and
    the coordinator warns if it has found small replicas that differ.

    Raises CheckpointMismatchError (conflict, coverage) if the local plans contradict one another, and
    CheckpointSaveError (unsupported_value) if the state has no entry on any rank.
    """
    cached = local_plan.cached
    planner = _GlobalPlanner(ranks, local_plan)
    if cached is None:
        reply = planner.exchange(_whole_message(local_plan, ranks))
    else:
        message = partial(_cached_message, local_plan, cached, has_digests=ranks.rank != COORDINATOR)
        sent_whole = cached.sent_whole
        reply = planner.exchange(message(sent_whole))
        if reply.send_plain:
            sent_whole = {**sent_whole, **dict.fromkeys(reply.asked, b"")}
            reply = planner.exchange(message(sent_whole))
        # Not before: after a conflict, every rank would have been asked for what all of them have.
        digests = digests_of(local_plan.plain) if sent_whole else {}
        cached.sent_whole = {fqn: digests[fqn] for fqn in sent_whole if fqn in digests}
    in_pipeline_stages: Sequence[str] = ()
    while reply.send_all:
        in_pipeline_stages = reply.digested
        reply = planner.exchange(_whole_message(local_plan, ranks, in_pipeline_stages))
    is_new = not reply.is_cached
    if cached is None or is_new:
        rank_plan = _rank_plan(reply, local_plan, in_pipeline_stages, ranks.num_ranks)
        rank_plan.global_plan, rank_plan.known_plain = planner.plan, planner.known_plain
        rank_plan.writers = planner.writers
        local_plan.plans.add(local_plan.fingerprint, rank_plan)
        if ranks.rank == COORDINATOR:
            warn_of_differing(rank_plan.differing_replicas)
    else:
        rank_plan = cached
    return AgreedPlan(reply.save_id, rank_plan, is_new, reply.has_locations, planner.objects, planner.rank_objects)


def _cached_message(
    local_plan: LocalSavePlan, cached: RankPlan, sent_whole: Mapping[str, bytes], *, has_digests: bool
) -> LocalPlanMessage:
    """Returns the message of a rank with a cached plan. With `has_digests`, it has the digests of long plain values
    that ranks have in common, but sends a value whole if `sent_whole` has another digest for its FQN.
    """
    plain, digested_plain = digested(local_plan.plain, sent_whole) if has_digests else ({**local_plan.plain}, [])
    return LocalPlanMessage(
        target=local_plan.target,
        plan_id=cached.plan_id,
        digests=combined_digests(local_plan.shards, cached.compared),
        items=None,
        aliases={},
        plain=plain,
        stages={fqn: local_plan.stages[fqn] for fqn in cached.in_pipeline_stages if fqn in local_plan.stages},
        stage_digests=part_digests(local_plan.shards, cached.in_pipeline_stages, local_plan.aliases),
        is_empty=local_plan.is_empty,
        digested_plain=digested_plain,
    )


@gc_paused()
def _whole_message(local_plan: LocalSavePlan, ranks: Ranks, digested: Sequence[str] = ()) -> LocalPlanMessage:
    """Returns the message with the whole local plan. `digested` are the FQNs of tensors whose parts get digests."""
    items, replicas = local_plan.items(), local_plan.replicas
    if ranks.num_ranks > 1:
        for index, digest in enumerate(small_digests(local_plan.shards)):
            if digest is not None:
                items[index] = msgspec.structs.replace(items[index], digest=digest)
    return LocalPlanMessage(
        target=local_plan.target,
        plan_id="",
        digests=[],
        items=pack_items(items),
        aliases=dict(local_plan.aliases),
        plain=dict(local_plan.plain),
        stages=dict(local_plan.stages),
        stage_digests=part_digests(local_plan.shards, digested, local_plan.aliases),
        is_empty=local_plan.is_empty,
        place=replicas.place if replicas is not None else None,
        frozen=[index for index, item in enumerate(items) if replicas is not None and item.fqn in local_plan.frozen],
    )


class _GlobalPlanner:
    """Exchanges the messages of planning. On the coordinator it makes one reply for each rank and fills the public
    fields, which stay empty on the other ranks.
    """

    def __init__(self, ranks: Ranks, local_plan: LocalSavePlan) -> None:
        self._ranks = ranks
        self._cached = local_plan.cached
        self._save_id_prefix = local_plan.save_id_prefix
        self._copies = local_plan.replicas.copies if local_plan.replicas is not None else 1
        self._max_file_bytes = local_plan.max_file_bytes
        self.plan: SavePlan | None = None
        """None on the other ranks, and if the cached plan is used."""
        self.objects: Mapping[str, bytes] = {}
        self.rank_objects: Mapping[str, Mapping[int, bytes]] = {}
        self.known_plain: Mapping[bytes, bytes] = {}
        self.writers: Mapping[str, int] = {}
        self._in_pipeline_stages: list[str] = []
        """FQNs that pipeline stages share, for which digests were requested."""

    def exchange(self, message: LocalPlanMessage) -> PlanReply:
        """Sends this rank's message to the coordinator and returns its reply."""
        reply = self._ranks.reduce_scatter(msgspec.msgpack.encode(message), self._replies)
        return msgspec.msgpack.decode(reply, type=PlanReply)

    @gc_paused()
    def _replies(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        messages = [msgspec.msgpack.decode(payload, type=LocalPlanMessage) for payload in payloads]
        global_ranks, cached = self._ranks.global_ranks, self._cached
        stages = [StageDigests(message.stages, message.stage_digests) for message in messages]
        check_same("save to", [message.target for message in messages], global_ranks)
        if all(message.is_empty for message in messages):
            raise empty_error(global_ranks)
        save_id = (self._save_id_prefix + uuid.uuid4().hex)[:16]
        sent = [(message.plain, message.digested_plain) for message in messages]
        plain, self.known_plain, asked = restored(sent, cached.known_plain if cached is not None else {})
        is_cached = cached is not None and _still_holds(cached, messages)
        if plain is None:
            replies = [PlanReply(send_plain=True, asked=fqns) for fqns in asked] if is_cached else [_SEND_ALL]
        elif cached is not None and is_cached:
            cached.known_plain = self.known_plain
            self.objects, self.rank_objects = merge_plain(plain, global_ranks)
            check_pipeline_stages(cached.in_pipeline_stages, stages, global_ranks)
            refuse_tensors(plain, cached.writers, global_ranks)
            replies = [PlanReply(save_id, is_cached=True, has_locations=cached.written is not None)]
        elif any(message.plan_id for message in messages):
            replies = [_SEND_ALL]
        elif self._needs_stage_digests(messages):
            replies = [PlanReply(send_all=True, digested=self._in_pipeline_stages)]
        else:
            # Before the plan: two owners of a stream would also make that fail, with a less clear error.
            self.objects, self.rank_objects = merge_plain(plain, global_ranks)
            check_pipeline_stages(self._in_pipeline_stages, stages, global_ranks)
            packed = [message.items for message in messages if message.items is not None]
            self.plan = plan_save(
                packed,
                [message.aliases for message in messages],
                global_ranks=global_ranks,
                mirroring=mirroring_of(messages, self._copies, self._max_file_bytes),
            )
            self.writers = {tensor.fqn: int(tensor.ranks[0]) for tensor in self.plan.tensors if len(tensor.ranks)}
            refuse_tensors(plain, self.writers, global_ranks)
            replies = new_replies(save_id, self.plan)
        encoded = [msgspec.msgpack.encode(reply) for reply in replies]
        return encoded if len(encoded) == len(payloads) else encoded * len(payloads)

    def _needs_stage_digests(self, messages: Sequence[LocalPlanMessage]) -> bool:
        """Notes the FQNs that several pipeline stages hold. Returns True unless digests were requested for just these
        before.
        """
        requested = self._in_pipeline_stages
        self._in_pipeline_stages = fqns_in_several_stages(message.stages for message in messages)
        return self._in_pipeline_stages != requested


def _still_holds(cached: RankPlan, messages: Sequence[LocalPlanMessage]) -> bool:
    """Returns True if every rank has this plan cached and replicas that were alike still are."""
    if any(message.plan_id != cached.plan_id for message in messages) or cached.global_plan is None:
        return False
    digests = [iter(message.digests) for message in messages]
    return all(len({next(digests[rank]) for rank in ranks}) == 1 for ranks in cached.global_plan.compared)


@gc_paused()
def _rank_plan(
    reply: PlanReply, local_plan: LocalSavePlan, in_pipeline_stages: Sequence[str], num_ranks: int
) -> RankPlan:
    """Returns this rank's part of the global plan, made of the coordinator's reply."""
    items = local_plan.items()
    whole_items = np.flatnonzero(np.unpackbits(np.frombuffer(reply.whole, np.uint8), count=len(items))).tolist()
    parts = [ItemRegion(item, Region(offsets, lengths)) for item, offsets, lengths in reply.parts]
    writes = {item: ItemRegion(item, items[item].region) for item in whole_items}
    writes.update(enumerate(parts, start=len(items)))  # by slot
    mirrored = [
        FileApart(
            [writes.pop(slot) for slot in file.slots], reply.together, reply.num_bytes * num_ranks, file.is_frozen
        )
        for file in reply.mirrored
    ]
    files = plan_files(
        items,
        list(writes.values()),
        apart=mirrored,
        groups=reply.together,
        max_file_bytes=local_plan.max_file_bytes,
        codec=local_plan.codec,
        num_ranks=num_ranks,
        frozen=local_plan.frozen,
    )
    return RankPlan(
        plan_id=reply.save_id,
        files=files,
        compared=reply.compared,
        differing_replicas=reply.differing_replicas,
        in_pipeline_stages=in_pipeline_stages,
        num_items=len(items),
        parts=parts,
        mirrors=[
            MirroredImage(
                mirror.owner, mirror.number, plan_apart(len(files) + number, _apart(mirror, items, num_ranks), items)
            )
            for number, mirror in enumerate(reply.mirrors)
        ],
    )


def _apart(mirror: Mirror, items: Sequence[WriteItem], num_ranks: int) -> FileApart:
    writes = [*(ItemRegion(item, items[item].region) for item in mirror.items), *mirror.parts]
    return FileApart(writes, mirror.together, mirror.owner_bytes * num_ranks)
