"""Rebuilds the data files of lost hosts from parity, before a version is loaded: each becomes a copy on a host that is
here, and the plan of the resume finds it there. What cannot be rebuilt is reported to that plan as damaged.
"""

from __future__ import annotations

# ruff: noqa: TRY400 - the message says all that a user needs, without a traceback
import logging
import mmap
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import msgspec
import xxhash

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import Listener
from bytecheckpoint.distributed.transfer import Fetching, SentPiece, nothing_from, transfer
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory.host_mapping import map_memory
from bytecheckpoint.memory_tier.parity import xor_into
from bytecheckpoint.memory_tier.parity_block import FoundParity
from bytecheckpoint.memory_tier.pieces import PIECE_BYTES, ExtentCheck
from bytecheckpoint.planner.memory_tier.parity_plan import pieces_without, plan_rebuild, segment_bytes
from bytecheckpoint.planner.memory_tier.resume_plan import (
    DamagedHolding,
    FileHolder,
    HeldParity,
    ParityMember,
    VersionPlan,
)
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.memory_root.slot_file import FilePlace, image_starts
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_RANK_AND_NUMBER = re.compile(r"-(\d+)-(\d+)\.")


class _HostOffer(msgspec.Struct, frozen=True, array_like=True):
    """The message of one rank."""

    host: str
    address: Address
    block: HeldParity | None
    """Parity of the version on its host; None if it is damaged or there is none."""


class _RebuildOrder(msgspec.Struct, frozen=True, array_like=True):
    """A lost member that one rank rebuilds."""

    members: list[ParityMember]
    lost: int
    """Position of the lost member."""
    servers: list[tuple[int, Address]]
    """Rank (within the group) and address that read for each member; the entry of the lost member is not used."""

    def sources(self) -> list[tuple[int, Address]]:
        """Returns rank and address of each rank that the rebuilder fetches from. Each of them waits for it."""
        return [server for position, server in enumerate(self.servers) if position != self.lost]


class _RebuildReply(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to one rank."""

    takers: list[int]
    orders: list[_RebuildOrder]


class RebuildInput(NamedTuple):
    """One rank's view of the version that is rebuilt."""

    version: VersionPlan
    places: Mapping[str, FilePlace]
    """Data files in the memory of this host."""
    block: FoundParity | None
    files: Mapping[str, DataFile]
    """All data files of the manifest."""
    step: int


def needs_rebuild(version: VersionPlan) -> bool:
    """Returns True if parity is the cheapest holder of any file."""
    return any(holders[0].kind == "parity" for holders in version.files.values())


def rebuild(
    ranks: Ranks, memory: JobMemory, inputs: RebuildInput, *, timeout_s: float, max_bytes: int | None
) -> list[DamagedHolding]:
    """Rebuilds what only parity has. All ranks call it. Returns what this rank found damaged or failed to rebuild.
    Rebuilt files are held as copies from then on.
    """
    host, save_id = memory.job.host, inputs.version.save_id
    is_whole = inputs.block is not None and is_whole_block(inputs.block)
    damaged = []
    if inputs.block is not None and not is_whole:
        damaged.append(DamagedHolding(save_id, "", FileHolder("parity", host)))
    with closing(Listener(towards=ranks.rendezvous_host)) as listener:
        held = inputs.block.held if inputs.block is not None and is_whole else None
        offer = _HostOffer(host, listener.address, held)
        reduce = partial(_order, inputs.version)
        reply = msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(offer), reduce), type=_RebuildReply)
        memory.copies.begin_save()
        try:
            offered, takers = list[memoryview](), list[int]()
            try:
                offered = list(_offered(inputs, host))
                takers = reply.takers
                works = [_Rebuild(order, inputs, ranks.global_ranks) for order in reply.orders]
                fetches = [fetch for work in works for fetch in work.fetches()]
            except OSError:  # no memory
                # Else the ranks that wait for this one would wait in vain.
                fetches = [nothing_from(*source) for order in reply.orders for source in order.sources()]
                transfer(ranks, listener, offered, takers=takers, fetches=fetches, timeout_s=timeout_s)
                raise
            transfer(ranks, listener, offered, takers=takers, fetches=fetches, timeout_s=timeout_s)
            for work in works:
                work.keep(memory, max_bytes=max_bytes)
            memory.copies.doubt(save_id)
        except (CheckpointError, OSError) as error:
            for order in reply.orders:
                logger.error("host %s is not rebuilt: %s", order.members[order.lost].host, error)
            if not reply.orders:
                logger.error("nothing is rebuilt from host %s: %s", host, error)
            damaged += [
                DamagedHolding(save_id, name, FileHolder("parity", ""))
                for order in reply.orders
                for name, _ in order.members[order.lost].files
            ]
    return damaged


def is_whole_block(block: FoundParity) -> bool:
    """Returns True if a block of parity has the digest that was noted when it was made."""
    with mapped_file(block.place) as content:
        return xxhash.xxh3_64_intdigest(content) == block.digest


def mapped_file(place: FilePlace) -> memoryview:
    """Returns a file in a slot as memory. It stays mapped for as long as the view is used."""
    with open(place.path, "rb") as file:  # noqa: PTH123 - paths are text here
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(mapped)[place.byte_offset :][: place.byte_length]


def _offered(inputs: RebuildInput, host: str) -> Iterator[memoryview]:
    """Yields what this rank serves: the files of its host as a member, empty where one is not here, then the block.
    Yields nothing if the host has no block of its own.
    """
    if inputs.block is None:
        return
    member = inputs.block.held.members[inputs.block.held.position]
    if member.host != host:
        return
    for name, _ in member.files:
        yield mapped_file(inputs.places[name]) if name in inputs.places else memoryview(b"")
    yield mapped_file(inputs.block.place)


def _order(version: VersionPlan, payloads: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the reply to every rank. Assigns each lost member to one rank, in turn, ranks without a block first.
    Skips a lost member if another member of its group offers no block: then it cannot be rebuilt.
    """
    offers = [msgspec.msgpack.decode(payload, type=_HostOffer) for payload in payloads]
    first: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        if offer.block is not None:
            first.setdefault(offer.host, rank)
    takers: list[set[int]] = [set() for _ in offers]
    orders: list[list[_RebuildOrder]] = [[] for _ in offers]
    # Hosts that hold nothing of the version come first.
    by_need = sorted(range(len(offers)), key=lambda rank: (offers[rank].block is not None, rank))
    turn = 0
    for members, lost in _lost_members(version, offers):
        others = [member.host for number, member in enumerate(members) if number != lost]
        if not all(host in first for host in others):
            continue
        rebuilder = by_need[turn % len(offers)]
        turn += 1
        servers = [(first.get(member.host, 0), offers[first.get(member.host, 0)].address) for member in members]
        orders[rebuilder].append(_RebuildOrder(members, lost, servers))
        for host in others:
            takers[first[host]].add(rebuilder)
    return [
        msgspec.msgpack.encode(_RebuildReply(sorted(of_rank), own)) for of_rank, own in zip(takers, orders, strict=True)
    ]


def _lost_members(version: VersionPlan, offers: Sequence[_HostOffer]) -> Iterator[tuple[list[ParityMember], int]]:
    """Yields each group with the position of a member, for every member with a file whose cheapest holder is parity."""
    groups = {
        tuple(member.host for member in offer.block.members): offer.block.members
        for offer in offers
        if offer.block is not None
    }
    for members in groups.values():
        for lost, member in enumerate(members):
            if any(version.files[name][0].kind == "parity" for name, _ in member.files if name in version.files):
                yield members, lost


def rebuild_member(
    source: Store, members: Sequence[ParityMember], lost: int, blocks: Sequence[str], files: Mapping[str, DataFile]
) -> Iterator[tuple[str, memoryview]]:
    """Yields names and bytes of the files of a lost member, made from the files of the other members and their parity:
    `blocks` has the name of each member's parity in the source. Holds all bytes of the lost member in memory.

    Raises CheckpointNotFoundError if the source lacks a file or parity, and CheckpointCorruptError if the result is not
    what was saved.
    """
    length = segment_bytes(members)
    content = bytearray(length * (len(members) - 1))
    scratch = memoryview(bytearray(PIECE_BYTES))
    parts = [(name, first, num_bytes, place) for (name, first, num_bytes), place in pieces_without(lost, members)]
    parts += [(blocks[step.holder], 0, length, step.number * length) for step in plan_rebuild(lost, len(members))]
    for name, first, num_bytes, place in parts:
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = scratch[: min(PIECE_BYTES, num_bytes - start)]
            source.read_into(name, first + start, piece)
            xor_into(content, place + start, piece)
    position = 0
    for name, byte_length in members[lost].files:
        file = memoryview(content)[position : position + byte_length]
        ExtentCheck(files[name]).check(0, file, owner=None)
        yield name, file
        position += byte_length


def _rank_and_number(name: str) -> tuple[int, int]:
    """Returns the rank and the number in the name of a data file; zeros if the name has none."""
    found = _RANK_AND_NUMBER.search(name)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


class _Rebuild:
    """The bytes of one lost member while they are rebuilt."""

    def __init__(self, order: _RebuildOrder, inputs: RebuildInput, global_ranks: Sequence[int]) -> None:
        self._order = order
        self._inputs = inputs
        self._global_ranks = global_ranks
        self._length = segment_bytes(order.members)
        self._lock = threading.Lock()
        self._content = memoryview(map_memory(self._length * (len(order.members) - 1), large_pages=True))

    def fetches(self) -> list[Fetching]:
        """Returns a fetch from each other member, of its segments and its parity."""
        members, lost = self._order.members, self._order.lost
        numbers = {
            name: (owner, number)
            for owner, member in enumerate(members)
            for number, (name, _) in enumerate(member.files)
        }
        wanted: dict[int, dict[SentPiece, list[int]]] = {owner: {} for owner in range(len(members)) if owner != lost}
        for (name, first, length), place in pieces_without(lost, members):
            owner, file = numbers[name]
            _add(wanted[owner], SentPiece(file, first, length), place)
        for step in plan_rebuild(lost, len(members)):
            parity = len(members[step.holder].files)
            _add(wanted[step.holder], SentPiece(parity, 0, self._length), step.number * self._length)
        return [self._fetching(owner, places) for owner, places in wanted.items()]

    def _fetching(self, owner: int, places: Mapping[SentPiece, Sequence[int]]) -> Fetching:
        rank, address = self._order.servers[owner]
        scratch = memoryview(bytearray(PIECE_BYTES))
        checks = [ExtentCheck(self._inputs.files[name]) for name, _ in self._order.members[owner].files]

        def memory(piece: SentPiece) -> memoryview:
            return scratch[: piece.byte_length]

        def take(piece: SentPiece, content: memoryview) -> None:
            if piece.file < len(checks):  # the piece behind the files is parity
                checks[piece.file].check(piece.byte_offset, content, owner=self._global_ranks[rank])
            with self._lock:
                for place in places[piece]:
                    xor_into(self._content, place, content)

        return Fetching(rank, address, list(places), memory, take)

    def keep(self, memory: JobMemory, *, max_bytes: int | None) -> None:
        """Puts the rebuilt files into slots for copies. Raises CheckpointCorruptError if a checksum does not match, and
        CheckpointSaveError (no_space) if there is no room.
        """
        position, content = 0, self._content
        by_rank: dict[int, dict[int, memoryview]] = {}
        for name, length in self._order.members[self._order.lost].files:
            rank, number = _rank_and_number(name)
            file = content[position : position + length]
            ExtentCheck(self._inputs.files[name]).check(0, file, owner=None)
            by_rank.setdefault(rank, {})[number] = file
            position += length
        for rank, files in by_rank.items():
            lengths = [file.nbytes for file in files.values()]
            image = memory.copies.take(rank, lengths, max_bytes=max_bytes)
            for start, file in zip(image_starts(lengths), files.values(), strict=False):
                image[start : start + file.nbytes] = file
            memory.copies.mark_whole(
                rank, self._inputs.version.save_id, self._inputs.step, lengths, numbers=list(files)
            )


def _add(places: dict[SentPiece, list[int]], piece: SentPiece, place: int) -> None:
    """Adds a piece, cut into parts of at most PIECE_BYTES: each is sent as a piece of its own."""
    file, first, length = piece
    for start in range(0, length, PIECE_BYTES):
        part = SentPiece(file, first + start, min(PIECE_BYTES, length - start))
        places.setdefault(part, []).append(place + start)
