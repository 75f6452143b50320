"""The messages of planning: a local plan on its way to the coordinator, and one rank's part of the global plan on its
way back. They describe tensors and hold none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bytecheckpoint.adapters.expectation import Scope
from bytecheckpoint.planner.memory_tier.mirrors import Mirror, MirroredFile, Mirroring
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.planner.write_items import PackedItems
from bytecheckpoint.saving.replica_checks import PartDigests


class LocalPlanMessage(msgspec.Struct, frozen=True, array_like=True):
    """A local plan on its way to the coordinator."""

    target: str
    plan_id: str
    """Id of the cached plan that the message refers to; empty if the message has the whole local plan."""
    digests: list[int]
    """One digest for each of the compared groups of the cached plan."""
    items: PackedItems | None
    """None if the message refers to a cached plan."""
    aliases: dict[str, str]
    """Empty if the message refers to a cached plan."""
    plain: dict[str, tuple[Scope, bytes]]
    stages: dict[str, int] = {}
    """Pipeline stages by FQN; with a cached plan, only of the FQNs in `stage_digests`."""
    stage_digests: PartDigests = {}
    """Digests of the tensors that the coordinator asked for, now or when the plan was made."""
    is_empty: bool = False
    digested_plain: list[str] = []
    """FQNs of plain data that are digests here."""
    place: RankPlace | None = None
    """Set if memory is to stage replicas in several failure domains, and the message has the whole local plan."""
    frozen: list[int] = []
    """If `place` is set: numbers of the frozen items of this rank. Their files hold frozen items only."""


class PlanReply(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's reply to one rank: its part of the global plan, or a request to send more."""

    save_id: str = ""
    whole: bytes = b""
    """A bit for each write item of this rank, set if the rank writes all of the item."""
    parts: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    """Index of the item, offsets and lengths of the part that this rank writes."""
    together: list[list[int]] = []
    """Groups of items of this rank; see SavePlan."""
    compared: list[list[int]] = []
    """Groups of items of this rank; see RankPlan."""
    differing_replicas: list[str] = []
    is_cached: bool = False
    """True if the cached plan holds; `whole` to `differing_replicas` are empty."""
    send_all: bool = False
    """True if the coordinator needs the whole local plan before it can reply."""
    send_plain: bool = False
    """True if the coordinator has only digests of some plain data, and every rank sends its message again."""
    asked: list[str] = []
    """FQNs of plain data whose values this rank then sends."""
    digested: list[str] = []
    """FQNs of tensors of which the coordinator needs digests of all parts."""
    has_locations: bool = False
    """True if the coordinator has the chunk locations of this plan."""
    num_bytes: int = 0
    """Number of bytes that this rank writes."""
    mirrored: list[MirroredFile] = []
    """Files of this rank that other ranks stage as well, for memory."""
    mirrors: list[Mirror] = []
    """Files of other ranks that this one stages as well."""


def mirroring_of(messages: Sequence[LocalPlanMessage], copies: int, max_file_bytes: int) -> Mirroring | None:
    """Returns the input for the plan of replicas in `copies` failure domains; None if `copies` is less than 2 or a rank
    sent no place.
    """
    places = [message.place for message in messages if message.place is not None]
    if copies < 2 or len(places) < len(messages):
        return None
    return Mirroring(places, copies, max_file_bytes, [frozenset(message.frozen) for message in messages])


def new_replies(save_id: str, plan: SavePlan) -> list[PlanReply]:
    """Returns the reply to each rank, in order of rank, with its part of a new plan."""
    compared: list[list[list[int]]] = [[] for _ in plan.whole_items]
    for ranks, items in plan.compared.items():
        for rank, of_rank in zip(ranks, items, strict=True):
            compared[rank].append(list(of_rank))
    return [
        PlanReply(
            save_id,
            np.packbits(is_whole).tobytes(),
            [(item, *region) for item, region in parts],
            [list(group) for group in plan.groups[rank]],
            compared[rank],
            list(plan.differing_replicas),
            num_bytes=plan.num_bytes[rank],
            mirrored=list(plan.memory.mirrored[rank]),
            mirrors=list(plan.memory.mirrors[rank]),
        )
        for rank, (is_whole, parts) in enumerate(zip(plan.whole_items, plan.item_parts, strict=True))
    ]
