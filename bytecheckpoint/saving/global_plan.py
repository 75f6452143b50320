"""What the ranks of a save tell one another before anything is written: what each could write, and what each is to
write. Where all of them did the same before, they only say so.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.adapters.expectation import EntryContents, Scope
from bytecheckpoint.adapters.plain.merge_plain import merge_plain
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, check_same
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.file_layout import CodecOption
from bytecheckpoint.planner.save_plan import SavePlan, plan_save
from bytecheckpoint.planner.write_items import ItemRegion, PackedItems, WriteItem, pack_items
from bytecheckpoint.region import Region
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.saving.plan_cache import KnownPlan, PlanCache
from bytecheckpoint.saving.replica_checks import (
    InStages,
    PartDigests,
    check_stages,
    combined_digest,
    digests_of,
    in_several_stages,
    small_digests,
)
from bytecheckpoint.staging.file_image import cut_to_files, plan_files


class Target(NamedTuple):
    """Where a save goes to; the same on all ranks."""

    path: str
    step: int | None
    overwrite: bool
    is_staged: bool = False
    """Whether through a local stage, which may be another folder on each rank."""
    endpoint: str = ""
    """Of the store, where its URL does not say all."""

    def __str__(self) -> str:
        overwriting = ", overwriting what is there" if self.overwrite else ""
        staged = ", through a local stage" if self.is_staged else ""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"{self.path}{at} (step={self.step}{overwriting}{staged})"


class Wish(NamedTuple):
    """What one rank wants saved."""

    target: Target
    shards: Sequence[LocalShard]
    offers: Callable[[], list[WriteItem]]
    """The shards as other ranks hear of them, in the same order and without digests: made where no plan is known."""
    aliases: Mapping[str, str]
    plain: Mapping[str, tuple[Scope, bytes]]
    max_file_bytes: int
    codec: CodecOption
    stages: Mapping[str, int]
    """Of modules that are stages of a pipeline and say which: by FQN."""
    is_empty: bool = False
    """The state has no entry."""

    def fingerprint(self, ranks: Ranks) -> bytes:
        """What a plan depends on, and nothing else."""
        fqns_dtypes_shapes_regions = [*zip(*self.shards, strict=True)][:4]
        options = (self.max_file_bytes, self.codec)
        parts = (fqns_dtypes_shapes_regions, self.aliases, options, list(ranks.global_ranks), ranks.rank, self.stages)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(parts))


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A wish on its way to the coordinator."""

    target: str
    plan_id: str
    """Of the plan that this rank knows for it; empty where it knows none."""
    digests: list[int]
    """Of the compared groups of that plan."""
    offers: PackedItems | None
    """None where a plan is known."""
    aliases: dict[str, str]
    """Empty there."""
    plain: dict[str, tuple[Scope, bytes]]
    stages: dict[str, int] = {}
    """There, of `stage_digests` only."""
    stage_digests: PartDigests = {}
    """Of what the coordinator asked for, now or when the plan was made."""
    is_empty: bool = False
    """As in `Wish`."""


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to do."""

    save_id: str
    plan_id: str
    kept: bytes
    """A bit for each of its offers: write all of it."""
    parts: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """Index of the offer, offsets and lengths of the part of it."""
    together: list[list[int]]
    """Groups of its offers; see SavePlan."""
    compared: list[list[int]]
    differing_replicas: list[str]
    is_known: bool = False
    """Do what you did before; `kept` and what follows are empty."""
    tell_all: bool = False
    """No order yet: send the whole request first."""
    digested: list[str] = []
    """With digests of all parts of these tensors."""
    has_written: bool = False
    """The coordinator knows where the chunks of this plan lie."""


class Agreed(NamedTuple):
    """The outcome of planning on one rank."""

    save_id: str
    known: KnownPlan
    is_new: bool
    """The plan was made just now."""
    has_written: bool
    """The coordinator knows where the chunks lie in the files: nobody need tell it."""
    objects: Mapping[str, bytes]
    """Plain data that all ranks share, by FQN; here and below, empty but on the coordinator."""
    rank_objects: Mapping[str, Mapping[int, bytes]]


class Proposal(NamedTuple):
    """What one rank wants saved, and how it would be."""

    wish: Wish
    fingerprint: bytes
    known: KnownPlan | None
    """Used if all ranks know it as well; None where this one knows none."""


def wish_of(target: Target, contents: Sequence[EntryContents], options: SaveOptions) -> Wish:
    """What this rank wants saved of its entries."""
    shards = [shard for of_entry in contents for shard in of_entry.shards]
    if options.codec != "none":
        shards = [part for shard in shards for part in cut_to_files(shard, options)]

    def offers() -> list[WriteItem]:
        return [
            WriteItem(fqn, dtype, shape, region.offsets, region.lengths) for fqn, dtype, shape, region, *_ in shards
        ]

    aliases = {alias: fqn for of_entry in contents for alias, fqn in of_entry.aliases.items()}
    plain = {fqn: encoded for of_entry in contents for fqn, encoded in of_entry.plain.items()}
    stages = {fqn: stage for of_entry in contents for fqn, stage in of_entry.stages.items()}
    return Wish(target, shards, offers, aliases, plain, options.max_file_bytes, options.codec, stages, not contents)


def propose(ranks: Ranks, wish: Wish, plans: PlanCache) -> Proposal:
    """The plan that this rank knows for a wish, if it does. Nobody is told yet."""
    fingerprint = wish.fingerprint(ranks)
    return Proposal(wish, fingerprint, plans.find(fingerprint))


def agree(ranks: Ranks, proposal: Proposal, plans: PlanCache) -> Agreed:
    """Every rank's part of one plan, made now or known from a save of the same.

    Raises CheckpointMismatchError (conflict, coverage) where what ranks want does not fit together.
    """
    wish, known = proposal.wish, proposal.known
    decision = _Decision(ranks, known)
    order = decision.hear(_known_request(wish, known) if known is not None else _whole_request(wish, ranks, []))
    in_stages: Sequence[str] = ()
    while order.tell_all:
        in_stages = order.digested
        order = decision.hear(_whole_request(wish, ranks, in_stages))
    is_new = not order.is_known or known is None
    planned = _planned(order, wish, in_stages, ranks.num_ranks) if is_new or known is None else known
    if is_new:
        planned.plan = decision.plan
        plans.keep(proposal.fingerprint, planned)
    return Agreed(order.save_id, planned, is_new, order.has_written, decision.objects, decision.rank_objects)


def _known_request(wish: Wish, known: KnownPlan) -> _Request:
    digests = [combined_digest([wish.shards[index].tensor for index in group]) for group in known.compared]
    stages = {fqn: wish.stages[fqn] for fqn in known.in_stages if fqn in wish.stages}
    stage_digests = digests_of(wish.shards, known.in_stages, wish.aliases)
    return _Request(
        str(wish.target), known.plan_id, digests, None, {}, dict(wish.plain), stages, stage_digests, wish.is_empty
    )


@gc_paused()
def _whole_request(wish: Wish, ranks: Ranks, digested: Sequence[str] = ()) -> _Request:
    offers = wish.offers()
    if ranks.num_ranks > 1:
        for index, digest in enumerate(small_digests(wish.shards)):
            if digest is not None:
                offers[index] = msgspec.structs.replace(offers[index], digest=digest)
    digests = digests_of(wish.shards, digested, wish.aliases)
    return _Request(
        str(wish.target),
        "",
        [],
        pack_items(offers),
        dict(wish.aliases),
        dict(wish.plain),
        dict(wish.stages),
        digests,
        wish.is_empty,
    )


class _Decision:
    """What the coordinator makes of all requests: one order for each rank. Stays empty on the others."""

    def __init__(self, ranks: Ranks, known: KnownPlan | None) -> None:
        self._ranks = ranks
        self._known = known
        self.plan: SavePlan | None = None
        """The one that was made; None where a known one is used again."""
        self.objects: Mapping[str, bytes] = {}
        self.rank_objects: Mapping[str, Mapping[int, bytes]] = {}
        self._in_stages: list[str] = []
        """The FQNs that stages share, of which ranks have been asked for digests."""

    def hear(self, request: _Request) -> _Order:
        """This rank's order."""
        return msgspec.msgpack.decode(
            self._ranks.reduce_scatter(msgspec.msgpack.encode(request), self._orders), type=_Order
        )

    @gc_paused()
    def _orders(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        requests = [msgspec.msgpack.decode(payload, type=_Request) for payload in payloads]
        names, known = self._ranks.global_ranks, self._known
        told = [InStages(request.stages, request.stage_digests) for request in requests]
        check_same("save to", [request.target for request in requests], names)
        if all(request.is_empty for request in requests):
            raise CheckpointSaveError(
                "the state is an empty dict, on every rank; nothing was written: pass what is to be saved, as in "
                '{"model": model}',
                kind="unsupported_value",
                ranks=tuple(names),
            )
        save_id = uuid.uuid4().hex[:16]
        if known is not None and _is_still_so(known, requests):
            check_stages(known.in_stages, told, names)
            has_written = known.written is not None
            orders = [_Order(save_id, known.plan_id, b"", [], [], [], [], is_known=True, has_written=has_written)]
        elif any(request.plan_id for request in requests):
            orders = [_Order("", "", b"", [], [], [], [], tell_all=True)]
        elif self._asks_for_stages(requests):
            orders = [_Order("", "", b"", [], [], [], [], tell_all=True, digested=self._in_stages)]
        else:
            check_stages(self._in_stages, told, names)
            packed = [request.offers for request in requests if request.offers is not None]
            self.plan = plan_save(packed, [request.aliases for request in requests], global_ranks=names)
            orders = _orders(save_id, self.plan)
        if not orders[COORDINATOR].tell_all:
            self.objects, self.rank_objects = merge_plain([request.plain for request in requests], names)
        encoded = [msgspec.msgpack.encode(order) for order in orders]
        return encoded if len(encoded) == len(payloads) else encoded * len(payloads)

    def _asks_for_stages(self, requests: Sequence[_Request]) -> bool:
        """Whether ranks have yet to give digests of what several stages hold under one FQN."""
        asked, self._in_stages = self._in_stages, in_several_stages(request.stages for request in requests)
        return self._in_stages != asked


def _is_still_so(known: KnownPlan, requests: Sequence[_Request]) -> bool:
    """Whether every rank knows this plan, and replicas are what they were: all alike."""
    if any(request.plan_id != known.plan_id for request in requests) or known.plan is None:
        return False
    positions = [iter(request.digests) for request in requests]
    return all(len({next(positions[rank]) for rank in ranks}) == 1 for ranks in known.plan.compared)


def _orders(save_id: str, plan: SavePlan) -> list[_Order]:
    compared: list[list[list[int]]] = [[] for _ in plan.whole_items]
    for ranks, offers in plan.compared.items():
        for rank, of_rank in zip(ranks, offers, strict=True):
            compared[rank].append(list(of_rank))
    return [
        _Order(
            save_id,
            save_id,
            np.packbits(kept).tobytes(),
            [(offer, *region) for offer, region in parts],
            [list(group) for group in plan.groups[rank]],
            compared[rank],
            list(plan.differing_replicas),
        )
        for rank, (kept, parts) in enumerate(zip(plan.whole_items, plan.item_parts, strict=True))
    ]


@gc_paused()
def _planned(order: _Order, wish: Wish, in_stages: Sequence[str], num_ranks: int) -> KnownPlan:
    offers = wish.offers()
    num_offers = len(offers)
    kept = np.flatnonzero(np.unpackbits(np.frombuffer(order.kept, np.uint8), count=num_offers)).tolist()
    parts = [ItemRegion(offer, Region(offsets, lengths)) for offer, offsets, lengths in order.parts]
    writes = [*(ItemRegion(offer, offers[offer].region) for offer in kept), *parts]
    return KnownPlan(
        plan_id=order.plan_id,
        files=plan_files(
            offers,
            writes,
            together=order.together,
            max_file_bytes=wish.max_file_bytes,
            codec=wish.codec,
            num_ranks=num_ranks,
        ),
        compared=order.compared,
        differing_replicas=order.differing_replicas,
        in_stages=in_stages,
        num_offers=num_offers,
        parts=parts,
    )
