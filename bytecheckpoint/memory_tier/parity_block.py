"""The block of parity that one rank of each host makes of what other hosts staged, and keeps beside the copies."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.transfer import Fetching, SentPiece
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory_tier.parity import xor_into
from bytecheckpoint.memory_tier.pieces import PIECE_BYTES, ExtentCheck
from bytecheckpoint.options import Memory
from bytecheckpoint.planner.memory_tier.parity_plan import PlacedPiece, form_groups, pieces_at, segment_bytes
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.planner.memory_tier.resume_plan import HeldParity, ParityMember
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.layout import data_file_name
from bytecheckpoint.storage.memory_root.job_folder import JobFolder
from bytecheckpoint.storage.memory_root.slot_file import FilePlace, image_bytes, image_starts
from bytecheckpoint.storage.memory_root.version_files import VersionRecord

MAX_MEMBERS = 8
"""Hosts in a group: parity takes a seventh of their memory then, and a rebuild moves seven images."""
_MIN_DOMAINS = 3


class ParitySource(msgspec.Struct, frozen=True, array_like=True):
    """A rank whose files go into parity."""

    rank: int
    """Within the group."""
    address: Address
    lengths: dict[int, int]
    """Length of each file in bytes, by the number in its name."""


class ParityOrder(msgspec.Struct, frozen=True, array_like=True):
    """The block that one rank makes."""

    held: HeldParity
    sources: list[ParitySource]
    """Ranks of other hosts with something to XOR."""


class _BlockNotes(msgspec.Struct, frozen=True, array_like=True):
    """Stands behind the block in its slot."""

    held: HeldParity
    digest: int
    """The xxh3-64 of the block."""


class FoundParity(NamedTuple):
    """A block of parity on this host."""

    save_id: str
    held: HeldParity
    digest: int
    place: FilePlace


def order_parity(
    places: Sequence[RankPlace], sources: Sequence[ParitySource], save_id: str
) -> dict[int, ParityOrder] | None:
    """Returns, by the first rank of each host, the order for the block that this rank makes. Returns None if parity
    cannot protect every host: with fewer than three failure domains, or a group of one host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.host, []).append(rank)
    domains = {place.host: place.failure_domain for place in places}
    groups = form_groups(domains, MAX_MEMBERS)
    if len({*domains.values()}) < _MIN_DOMAINS or any(len(group) == 1 for group in groups):
        return None
    orders = {}
    for group in groups:
        members = [ParityMember(host, _files(sources, ranks_of[host], save_id)) for host in group]
        owners = {
            name: rank for host in group for rank in ranks_of[host] for name, _ in _files(sources, [rank], save_id)
        }
        for position, host in enumerate(group):
            wanted = sorted({owners[placed.piece.file] for placed in pieces_at(position, members)})
            held = HeldParity(members, position)
            orders[ranks_of[host][0]] = ParityOrder(held, [sources[rank] for rank in wanted])
    return orders


def _files(sources: Sequence[ParitySource], ranks: Sequence[int], save_id: str) -> list[tuple[str, int]]:
    return [
        (data_file_name(save_id, rank, number), length)
        for rank in ranks
        for number, length in sources[rank].lengths.items()
    ]


class ParityBlock:
    """A block that is being made."""

    def __init__(self, slots: JobMemory, record: VersionRecord, order: ParityOrder, memory: Memory) -> None:
        self._slot = slots.parity
        self._record = record
        self._held = order.held
        self._position = order.held.position
        self._length = segment_bytes(order.held.members)
        self._lock = threading.Lock()
        notes = msgspec.msgpack.encode(_BlockNotes(order.held, (1 << 64) - 1))
        self._lengths = [self._length, len(notes)]
        self._image = self._slot.take(self._position, self._lengths, max_bytes=memory.max_bytes)
        np.frombuffer(self._image, np.uint8)[: self._length] = 0  # without the GIL, which training needs
        self._missing_pieces: dict[str, list[PlacedPiece]] = {}
        for placed in pieces_at(self._position, order.held.members):
            self._missing_pieces.setdefault(placed.piece.file, []).extend(_cut(placed))

    def fetches(self, order: ParityOrder, files: Mapping[str, DataFile], global_ranks: Sequence[int]) -> list[Fetching]:
        """Returns one fetch from each source of the order that this rank was given, of the pieces that have not arrived
        yet; from a source that has sent all, a fetch of no pieces, because that rank waits for this one. `files` are
        those of the save, by name.
        """
        return [self._fetching(source, files, global_ranks[source.rank]) for source in order.sources]

    def _fetching(self, source: ParitySource, files: Mapping[str, DataFile], global_rank: int) -> Fetching:
        names = {number: data_file_name(self._record.save_id, source.rank, number) for number in source.lengths}
        places = {
            SentPiece(number, placed.piece.byte_offset, placed.piece.byte_length): placed
            for number, name in names.items()
            for placed in self._missing_pieces.get(name, ())
        }
        checks = {number: ExtentCheck(files[name]) for number, name in names.items()}

        def take(piece: SentPiece, content: memoryview) -> None:
            placed = places[piece]
            checks[piece.file].check(piece.byte_offset, content, owner=global_rank)
            with self._lock:
                xor_into(self._image, placed.byte_offset, content)
                self._missing_pieces[placed.piece.file].remove(placed)

        return Fetching(source.rank, source.address, list(places), partial(_scratch, bytearray(PIECE_BYTES)), take)

    def mark_whole(self) -> None:
        """Writes the notes about the block into the slot, and marks it as whole."""
        block = self._image[: self._length]
        notes = msgspec.msgpack.encode(_BlockNotes(self._held, xxhash.xxh3_64_intdigest(block)))
        # A digest may be encoded in fewer bytes than the largest one.
        start = image_starts(self._lengths)[1]
        self._image[start : start + len(notes)] = notes
        self._lengths[1] = len(notes)
        self._slot.mark_whole(self._position, self._record.save_id, self._record.step, self._lengths)


def _scratch(memory: bytearray, piece: SentPiece) -> memoryview:
    return memoryview(memory)[: piece.byte_length]


def _cut(placed: PlacedPiece) -> list[PlacedPiece]:
    """Cuts a piece into parts of at most PIECE_BYTES: each is sent as a piece of its own."""
    (_, first, length), position = placed
    return [
        PlacedPiece(
            placed.piece._replace(byte_offset=first + start, byte_length=min(PIECE_BYTES, length - start)),
            position + start,
        )
        for start in range(0, length, PIECE_BYTES)
    ]


def scan_parity(job: JobFolder) -> list[FoundParity]:
    """Returns the filled parity blocks of a job on this host, except short ones and those with unreadable notes."""
    found = []
    for slot in scan_copies(job, "parity"):
        if slot.header is None or not slot.header.is_filled or len(slot.header.lengths) != len(("block", "notes")):
            continue
        block, notes = slot.places().values()
        described = _read_notes(notes)
        if described is not None and image_bytes([block.byte_length]) >= segment_bytes(described.held.members):
            found.append(FoundParity(slot.save_id, described.held, described.digest, block))
    return found


def _read_notes(place: FilePlace) -> _BlockNotes | None:
    with open(place.path, "rb") as file:  # noqa: PTH123 - paths are text here
        file.seek(place.byte_offset)
        content = file.read(place.byte_length)
    try:
        return msgspec.msgpack.decode(content, type=_BlockNotes)
    except msgspec.MsgspecError:
        return None
