"""The global plan of a save: from the write items of all ranks to the chunks that each rank writes. Replicas are
dropped, bytes are balanced, and every tensor is checked to be whole. It knows neither tensors nor files nor
communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.deduplicate import Replica, assign_writers, is_small, merge_aliases
from bytecheckpoint.planner.grid_shards import GridShards, find_grid_shards
from bytecheckpoint.planner.memory_tier.mirrors import Mirroring, MirrorPlan, ReplicatedChunk, in_order, plan_mirrors
from bytecheckpoint.planner.shard_owners import Holders, RegionOwners, TensorItems, collect_items, find_owners
from bytecheckpoint.planner.write_items import ItemRegion, ItemTable, PackedItems, unpack_items
from bytecheckpoint.region import Region, part_of_grid

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PlannedTensor(NamedTuple):
    """The chunks of one tensor, by rising offsets, and their writers."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, ...] | None
    """The lengths of a part if the chunks are a regular grid."""
    coordinates: Sequence[int] | NDArray[np.int64]
    """Offsets, then lengths of each chunk. Empty for a grid."""
    ranks: Sequence[int] | NDArray[np.int32]
    """The rank that writes each chunk."""
    slots: Sequence[int] | NDArray[np.int32]
    """The slot of each chunk among the writes of its rank; see SavePlan."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks that each rank writes. A rank's slots are numbered: first the whole of each of its write items, then
    the parts of items.
    """

    whole_items: Sequence[NDArray[np.bool_]]
    """By rank: True for each item that the rank writes as a whole."""
    item_parts: Sequence[Sequence[ItemRegion]]
    """By rank: the parts of items that it writes."""
    groups: Sequence[Sequence[Sequence[int]]]
    """By rank: groups of its small items that the same ranks hold, the group with most holders first. A load mostly
    wants all of a group or nothing of it, so each has extents of its own."""
    num_bytes: Sequence[int]
    """By rank: bytes of the elements that it writes."""
    tensors: Sequence[PlannedTensor]
    aliases: Mapping[str, str]
    differing_replicas: Sequence[str]
    """FQNs of small tensors that ranks hold with different values; the lowest rank's value is written."""
    compared: Mapping[tuple[int, ...], Sequence[Sequence[int]]]
    """Small tensors that ranks hold as equal replicas: ranks -> the indices of each rank's items, in one order."""
    memory: MirrorPlan
    """The files that the memory tier stages on several ranks; empty lists where none was asked for."""


def plan_save(
    packed: Sequence[PackedItems],
    aliases: Sequence[Mapping[str, str]],
    *,
    global_ranks: Sequence[int],
    mirroring: Mirroring | None = None,
) -> SavePlan:
    """Plans a save. `packed[r]` and `aliases[r]` (alias FQN -> stored FQN) come from rank r, whose global
    rank, for errors, is `global_ranks[r]`. `mirroring` asks that replicas are staged in several failure domains.

    Raises CheckpointMismatchError: `conflict` if ranks disagree about a tensor or a tie, or hold parts that overlap or
    reach out of the shape, `coverage` if some part of a tensor is on no rank. One error is about all tensors with that
    fault.
    """
    tables = unpack_items(packed)
    merged_aliases = merge_aliases(tables, aliases, global_ranks)
    tensors = collect_items(tables, merged_aliases, global_ranks)
    planner = _Planner(tables, tensors, num_ranks=len(packed))
    remaining = dict(tensors)
    for grids in find_grid_shards(tensors):
        planner.add_grids(grids)
        for fqn in grids.fqns:
            del remaining[fqn]
    for fqn, owners in find_owners(remaining, global_ranks):
        if isinstance(owners, RegionOwners):
            planner.add_owners(fqn, owners)
        else:
            planner.add_holders(fqn, owners)
    planner.assign_replicas()
    return planner.plan(merged_aliases, mirroring)


class _Replicas(NamedTuple):
    """The holders of one region: ranks, the index among each one's items, and digests, if there are any."""

    ranks: Sequence[int]
    items: Sequence[int]
    digests: Sequence[int]


class _Planner:
    """The plan in the making. A region that one rank holds is written by it; replicas are assigned at the end."""

    def __init__(self, tables: Sequence[ItemTable], tensors: Mapping[str, TensorItems], *, num_ranks: int) -> None:
        num_items = [0] * num_ranks
        for table in tables:
            for rank in table.ranks.tolist():
                num_items[rank] = len(table.fqns)
        self._tensors = tensors
        self._num_items = num_items
        self._first_slots = np.array([0, *accumulate(num_items)])
        self._is_whole = np.zeros(self._first_slots[-1], bool)
        self._replicas: dict[tuple[int, ...], list[Replica]] = {}
        self._planned: dict[str, PlannedTensor] = {}
        self._chunks: dict[str, list[tuple[Region, int, int]]] = {}
        """FQN -> region, writer and slot of each chunk, of tensors that are planned region by region."""
        self._loads = np.zeros(num_ranks, np.int64)
        self._groups: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(num_ranks)]
        """By writer: holders -> small items that these hold."""
        self._parts: list[list[ItemRegion]] = [[] for _ in range(num_ranks)]
        self._differing: list[str] = []
        self._compared: dict[tuple[int, ...], list[list[int]]] = {}
        self._replicated: list[ReplicatedChunk] = []
        """Chunks that other ranks than their writers hold as well."""

    def plan(self, aliases: Mapping[str, str], mirroring: Mirroring | None) -> SavePlan:
        num_bytes = self._loads.tolist()
        nothing: list[list[Any]] = [[] for _ in num_bytes]
        for fqn, chunks in self._chunks.items():
            self._planned[fqn] = _planned(fqn, self._tensors[fqn], sorted(chunks))
        return SavePlan(
            whole_items=np.split(self._is_whole, self._first_slots[1:-1]),
            item_parts=self._parts,
            groups=[[groups[holders] for holders in in_order(groups)] for groups in self._groups],
            num_bytes=num_bytes,
            tensors=[self._planned[fqn] for fqn in self._tensors if fqn in self._planned],
            aliases=aliases,
            differing_replicas=self._differing,
            compared=self._compared,
            memory=(
                MirrorPlan(nothing, nothing)
                if mirroring is None
                else plan_mirrors(self._replicated, num_bytes, mirroring)
            ),
        )

    def add_grids(self, grids: GridShards) -> None:
        ranks = grids.ranks
        is_single = grids.num_replicas == 1
        is_written = is_single[:, None] & (np.arange(ranks.shape[1]) < grids.num_parts[:, None])
        slots = self._first_slots[ranks] + grids.items[:, None]
        self._is_whole[slots[is_written]] = True
        item_bytes = np.array([itemsize(self._tensors[fqn].dtype) for fqn in grids.fqns], np.int64)
        num_bytes = grids.boxes[:, :, 1].prod(axis=2) * item_bytes[:, None]
        np.add.at(self._loads, ranks[is_written], num_bytes[is_written])
        items = np.repeat(grids.items.astype(np.int32)[:, None], ranks.shape[1], axis=1)
        parts, num_parts = grids.boxes[:, 0, 1].tolist(), grids.num_parts.tolist()
        for tensor in np.flatnonzero(is_single).tolist():
            fqn, part, count = grids.fqns[tensor], tuple(parts[tensor]), num_parts[tensor]
            dtype, shape, *_ = self._tensors[fqn]
            self._planned[fqn] = PlannedTensor(
                fqn, dtype, shape, part, (), ranks[tensor, :count], items[tensor, :count]
            )
        for tensor in np.flatnonzero(~is_single).tolist():
            self._add_replicated(grids, tensor)

    def _add_replicated(self, grids: GridShards, tensor: int) -> None:
        """Adds all parts of the tensor with this number in the grids, each of which several ranks hold."""
        fqn, num_replicas = grids.fqns[tensor], int(grids.num_replicas[tensor])
        ((table, item),) = self._tensors[fqn].sources
        end = int(grids.num_parts[tensor]) * num_replicas
        rows = grids.order[tensor, :end]
        ranks = grids.holders[rows].tolist()
        column = table.digest_columns.get(item)
        digests = table.digests[rows, column].tolist() if column is not None else []
        starts = range(0, end, num_replicas)
        for start, (offsets, lengths) in zip(starts, grids.boxes[tensor, :end:num_replicas].tolist(), strict=True):
            held = slice(start, start + num_replicas)
            replicas = _Replicas(ranks[held], [item] * num_replicas, digests[held])
            self._add_region(fqn, Region(tuple(offsets), tuple(lengths)), replicas)

    def add_owners(self, fqn: str, owners: RegionOwners) -> None:
        dtype, shape, *_ = self._tensors[fqn]
        if np.diff(owners.bounds).max() > 1:
            for index, (offsets, lengths) in enumerate(owners.boxes.tolist()):
                held = slice(owners.bounds[index], owners.bounds[index + 1])
                digests = owners.digests[held].tolist() if owners.digests is not None else ()
                replicas = _Replicas(owners.ranks[held].tolist(), owners.items[held].tolist(), digests)
                self._add_region(fqn, Region(tuple(offsets), tuple(lengths)), replicas)
            return
        self._is_whole[self._first_slots[owners.ranks] + owners.items] = True
        np.add.at(self._loads, owners.ranks, owners.boxes[:, 1].prod(axis=1) * itemsize(dtype))
        coordinates = owners.boxes.reshape(-1) if owners.part is None else ()
        self._planned[fqn] = PlannedTensor(fqn, dtype, shape, owners.part, coordinates, owners.ranks, owners.items)

    def add_holders(self, fqn: str, holders: Holders) -> None:
        for region, of_region in holders.items():
            if not region.numel and 0 not in self._tensors[fqn].shape:
                continue  # a rank's share of an uneven split is empty
            ranks, items = [holder.rank for holder in of_region], [holder.item for holder in of_region]
            digests = [holder.digest for holder in of_region if holder.digest is not None]
            self._add_region(fqn, region, _Replicas(ranks, items, digests))

    def _add_region(self, fqn: str, region: Region, replicas: _Replicas) -> None:
        ranks, items, digests = replicas
        num_bytes = region.numel * itemsize(self._tensors[fqn].dtype)
        if len(ranks) > 1 and len(set(digests)) > 1 and is_small(num_bytes):
            self._groups[ranks[0]].setdefault(tuple(ranks), []).append(items[0])
        if len(set(digests)) > 1:
            self._differing.append(fqn)
            ranks, items = ranks[:1], items[:1]
        elif len(ranks) > 1 and digests:
            by_holder = self._compared.setdefault(tuple(ranks), [[] for _ in ranks])
            for of_holder, item in zip(by_holder, items, strict=True):
                of_holder.append(item)
        if len(ranks) == 1 or not region.numel:
            self._write_whole(fqn, region, ranks[0], items[0])
            self._loads[ranks[0]] += num_bytes
            if len(ranks) > 1:  # a region without elements
                chunk = ReplicatedChunk(ranks[0], items[0], tuple(ranks), items, None, 0, is_grouped=False)
                self._replicated.append(chunk)
        else:
            self._replicas.setdefault(tuple(ranks), []).append(Replica(fqn, region, num_bytes, items))

    def _write_whole(self, fqn: str, region: Region, rank: int, item: int) -> None:
        self._is_whole[self._first_slots[rank] + item] = True
        self._chunks.setdefault(fqn, []).append((region, rank, item))

    def assign_replicas(self) -> None:
        """Chooses a writer for each replicated region, starting with the regions that the fewest ranks hold."""
        for ranks in sorted(self._replicas, key=lambda ranks: (len(ranks), ranks)):
            loads = self._loads[list(ranks)].tolist()
            for replica, region, position in assign_writers(self._replicas[ranks], loads):
                rank, item = ranks[position], replica.items[position]
                is_grouped = is_small(replica.byte_length)
                slot, part = item, None
                if is_grouped:
                    self._groups[rank].setdefault(ranks, []).append(item)
                if region == replica.region:
                    self._write_whole(replica.fqn, region, rank, item)
                else:
                    slot, part = self._num_items[rank] + len(self._parts[rank]), region
                    self._parts[rank].append(ItemRegion(item, region))
                    self._chunks.setdefault(replica.fqn, []).append((region, rank, slot))
                num_bytes = region.numel * replica.byte_length // replica.region.numel
                chunk = ReplicatedChunk(rank, slot, ranks, replica.items, part, num_bytes, is_grouped)
                self._replicated.append(chunk)
            self._loads[list(ranks)] = loads


def _planned(fqn: str, tensor: TensorItems, chunks: Sequence[tuple[Region, int, int]]) -> PlannedTensor:
    """Returns the record of a tensor with these chunks (region, rank, slot), as a grid if they form one."""
    coordinates = [number for region, _, _ in chunks for number in (*region.offsets, *region.lengths)]
    part = part_of_grid(tensor.shape, coordinates, len(chunks))
    return PlannedTensor(
        fqn=fqn,
        dtype=tensor.dtype,
        shape=tensor.shape,
        part=part,
        coordinates=() if part is not None else coordinates,
        ranks=[rank for _, rank, _ in chunks],
        slots=[slot for _, _, slot in chunks],
    )
