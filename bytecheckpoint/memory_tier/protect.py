"""Copies of a memory checkpoint in other failure domains, sent once it is complete on all hosts.
planner/memory_tier/placement.py chooses who holds whose copy. What is staged in several domains is not sent.

A copy that fails costs no checkpoint: the save still survives the death of its processes, and the next save places its
copies anew.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import msgspec

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import Listener
from bytecheckpoint.distributed.transfer import Fetching, SentPiece, nothing_from, transfer
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointSaveError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory_tier.parity_block import ParityBlock, ParityOrder, ParitySource, order_parity
from bytecheckpoint.memory_tier.pieces import ExtentCheck, pieces_of
from bytecheckpoint.options import Memory
from bytecheckpoint.planner.memory_tier.mirrors import place_missing
from bytecheckpoint.planner.memory_tier.placement import RankPlace
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.layout import data_file_name
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.version_files import VersionRecord

_ATTEMPTS = 3
"""Connections may break; what has arrived is not sent again."""


class _CopyOffer(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank before the copies are sent."""

    host: str
    failure_domain: str | None
    address: Address
    lengths: list[int]
    """Bytes of its data files."""
    mirrored: list[tuple[int, int]]
    """Owner and number of the files of others that it has staged as well."""


class _CopyOrder(msgspec.Struct, frozen=True, array_like=True):
    """Files of the rank `owner`, by number and length in bytes, that another rank holds for it."""

    owner: int
    """Rank within the group."""
    address: Address
    numbers: list[int]
    lengths: list[int]


class _CopyOrders(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to one rank."""

    takers: list[int]
    """The ranks that fetch something from this rank."""
    orders: list[_CopyOrder]
    parity: ParityOrder | None = None
    refusal: str = ""
    """The reason why there can be no copies at all; else empty."""

    def sources(self) -> list[tuple[int, Address]]:
        """Returns rank and address of each rank that this rank fetches from. Each of them waits for this rank."""
        blocks = self.parity.sources if self.parity is not None else []
        return [(order.owner, order.address) for order in self.orders] + [(each.rank, each.address) for each in blocks]


class _CopyOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of the copies of one rank, or of all ranks. `failure` is empty if they were made."""

    failure: str = ""
    kind: str = ""
    ranks: tuple[int, ...] = ()


class Protection(NamedTuple):
    """The outcome of the copies of a save."""

    refusal: str
    """The reason why the save can have no copies; empty if it can have some."""
    error: CheckpointError | None
    """The error of making them, the same on all ranks; None if all were made, or with a refusal."""


def protect(ranks: Ranks, slots: JobMemory, record: VersionRecord, memory: Memory, *, timeout_s: float) -> Protection:
    """Copies what every rank has staged to hosts of other failure domains, or with `memory.parity` makes parity of it
    there. All ranks call it, after the checkpoint is complete in memory and before another slot is taken.

    Raises CheckpointError (rank_missing) for a rank that does not answer at all; any other failure is returned.
    """
    copying = _Copying(ranks, slots, record, memory)
    outcome = _CopyOutcome()
    for _ in range(_ATTEMPTS):
        with closing(Listener(towards=ranks.rendezvous_host)) as listener:
            orders = copying.agree(listener.address)
            if orders.refusal:
                slots.keep_copies_of(record.save_id)
                return Protection(orders.refusal, None)
            outcome = copying.settle(copying.try_all(listener, orders, timeout_s))
        if outcome.kind not in _RETRIED:
            break
    return Protection("", _error_of(outcome, record) if outcome.failure else None)


_RETRIED = {"rank_missing"}
"""Kinds of failure after which all is tried again. A broken connection looks like a dead rank; a rank that is really
dead does not answer the next message.
"""


class _Copying:
    """The copies of one save on one rank."""

    def __init__(self, ranks: Ranks, slots: JobMemory, record: VersionRecord, memory: Memory) -> None:
        self._ranks = ranks
        self._slots = slots
        self._record = record
        self._memory = memory
        image = slots.image()
        self._image = [content for (owner, _), content in image.items() if owner == ranks.rank]
        # Owner -1 stands for a mirrored file that proved to differ from its owner's.
        self._mirrored = [file for file in image if file[0] not in {ranks.rank, -1}]
        self._files: dict[str, DataFile] | None = None
        self._parity: ParityBlock | None = None
        self._missing_pieces: dict[int, list[SentPiece]] = {}
        """Pieces that have not arrived yet, by owner."""

    def agree(self, address: Address) -> _CopyOrders:
        """Tells the coordinator what this rank has staged, and returns this rank's orders."""
        lengths = [content.nbytes for content in self._image]
        offer = _CopyOffer(self._slots.job.host, self._memory.failure_domain, address, lengths, self._mirrored)
        place = partial(_place_parity, save_id=self._record.save_id)
        reduce = place if self._memory.parity else partial(_place, copies=self._memory.copies)
        reply = self._ranks.reduce_scatter(msgspec.msgpack.encode(offer), reduce)
        return msgspec.msgpack.decode(reply, type=_CopyOrders)

    def try_all(self, listener: Listener, orders: _CopyOrders, timeout_s: float) -> _CopyOutcome:
        """Sends and takes the pieces that have not arrived yet, and marks copies and parity that are whole. Failures
        are returned, because all ranks go on together.
        """
        try:
            try:
                fetches = self._fetches(orders)
            except (CheckpointError, OSError):
                # Else the ranks that wait for this one would wait in vain.
                self._transfer(listener, orders, [nothing_from(*source) for source in orders.sources()], timeout_s)
                raise
            self._transfer(listener, orders, fetches, timeout_s)
            for order in orders.orders:
                self._slots.copies.mark_whole(
                    order.owner, self._record.save_id, self._record.step, order.lengths, numbers=order.numbers
                )
            if self._parity is not None:
                self._parity.mark_whole()
            for held in (self._slots.copies, self._slots.parity):
                held.doubt(self._record.save_id)
        except CheckpointError as error:
            where = f"rank {self._ranks.global_ranks[self._ranks.rank]} on {socket.gethostname()}"
            return _CopyOutcome(f"{where}: {error.message}", error.kind, error.ranks)
        except OSError as error:
            return _CopyOutcome(f"copies on {socket.gethostname()} failed: {error}", "rank_failed")
        return _CopyOutcome()

    def _transfer(self, listener: Listener, orders: _CopyOrders, fetches: Sequence[Fetching], timeout_s: float) -> None:
        transfer(self._ranks, listener, self._image, takers=orders.takers, fetches=fetches, timeout_s=timeout_s)

    def _fetches(self, orders: _CopyOrders) -> list[Fetching]:
        """Takes slots for what this rank is to hold, and returns what it fetches into them."""
        fetches = [self._fetching(order) for order in orders.orders]
        if orders.parity is not None:
            self._parity = self._parity or ParityBlock(self._slots, self._record, orders.parity, self._memory)
            fetches += self._parity.fetches(orders.parity, self._files_of_save(), self._ranks.global_ranks)
        return fetches

    def settle(self, own: _CopyOutcome) -> _CopyOutcome:
        """Returns one failure of any rank, the same on all ranks, or an outcome without a failure. If there is none,
        gives up the copies of other saves; else notes that copies of this save are incomplete.
        """
        reply = self._ranks.reduce_scatter(msgspec.msgpack.encode(own), _joint_outcome)
        outcome = msgspec.msgpack.decode(reply, type=_CopyOutcome)
        if not outcome.failure:
            self._slots.keep_copies_of(self._record.save_id)
        else:
            for held in (self._slots.copies, self._slots.parity):
                held.note_incomplete(self._record.save_id)
        return outcome

    def _fetching(self, order: _CopyOrder) -> Fetching:
        files = {number: self._file(order.owner, number) for number in order.numbers}
        image = self._slots.copies.take(order.owner, order.lengths, max_bytes=self._memory.max_bytes)
        starts = dict(zip(order.numbers, slot_file.image_starts(order.lengths), strict=False))
        checks = {number: ExtentCheck(file) for number, file in files.items()}
        if order.owner not in self._missing_pieces:
            self._missing_pieces[order.owner] = [
                piece for number, file in files.items() for piece in pieces_of(number, file)
            ]
        missing = self._missing_pieces[order.owner]

        def memory(piece: SentPiece) -> memoryview:
            return image[starts[piece.file] + piece.byte_offset :][: piece.byte_length]

        def take(piece: SentPiece, content: memoryview) -> None:
            checks[piece.file].check(piece.byte_offset, content, owner=self._ranks.global_ranks[order.owner])
            missing.remove(piece)

        return Fetching(order.owner, order.address, [*missing], memory, take)

    def _file(self, owner: int, number: int) -> DataFile:
        return self._files_of_save()[data_file_name(self._record.save_id, owner, number)]

    def _files_of_save(self) -> dict[str, DataFile]:
        """Returns all data files of the save by name, from the manifest, which each host has. Raises
        CheckpointSaveError (rank_failed) if it is gone.
        """
        if self._files is None:
            versions = version_files.read_versions(self._slots.job)
            found = next((version for version in versions if version.record.save_id == self._record.save_id), None)
            if found is None:
                raise CheckpointSaveError(
                    f"the manifest of save {self._record.save_id} is gone from {self._slots.job.path}, or damaged",
                    kind="rank_failed",
                )
            self._files = {file.name: file for file in found.files}
        return self._files


def _place(payloads: Sequence[bytes], *, copies: int) -> Sequence[bytes]:
    """Returns the encoded orders of each rank; for all a refusal if there are too few failure domains."""
    offers = [msgspec.msgpack.decode(payload, type=_CopyOffer) for payload in payloads]
    places = [RankPlace(offer.host, offer.failure_domain) for offer in offers]
    plan = place_missing(places, [offer.lengths for offer in offers], _mirrors(offers), copies)
    num_domains = len({place.failure_domain for place in places})
    if plan.short:
        refusal = (
            f"Memory(copies={copies}) needs as many failure domains, and the ranks are in {num_domains}, on "
            f"{len({place.host for place in places})} hosts: memory checkpoints survive the death of processes, and of "
            "no host. Give each host a memory root and a failure domain of its own, or copies=1"
        )
        return [msgspec.msgpack.encode(_CopyOrders([], [], refusal=refusal))] * len(offers)
    orders: list[list[_CopyOrder]] = [[] for _ in offers]
    takers: list[list[int]] = [[] for _ in offers]
    for (owner, target), numbers in plan.sent.items():
        lengths = [offers[owner].lengths[number] for number in numbers]
        orders[target].append(_CopyOrder(owner, offers[owner].address, list(numbers), lengths))
        takers[owner].append(target)
    return [msgspec.msgpack.encode(_CopyOrders(*of_rank)) for of_rank in zip(takers, orders, strict=True)]


def _mirrors(offers: Sequence[_CopyOffer]) -> dict[tuple[int, int], list[int]]:
    """Returns, for each mirrored file, the ranks other than its owner that have it."""
    mirrors: dict[tuple[int, int], list[int]] = {}
    for rank, offer in enumerate(offers):
        for file in offer.mirrored:
            mirrors.setdefault(file, []).append(rank)
    return mirrors


def _place_parity(payloads: Sequence[bytes], *, save_id: str) -> Sequence[bytes]:
    """Does what `_place` does, for a save that is protected by parity in place of copies."""
    offers = [msgspec.msgpack.decode(payload, type=_CopyOffer) for payload in payloads]
    places = [RankPlace(offer.host, offer.failure_domain) for offer in offers]
    mirrors = _mirrors(offers)
    sources = [
        ParitySource(
            rank, offer.address, {n: length for n, length in enumerate(offer.lengths) if (rank, n) not in mirrors}
        )
        for rank, offer in enumerate(offers)
    ]
    if not any(source.lengths for source in sources):
        return [msgspec.msgpack.encode(_CopyOrders([], []))] * len(offers)
    found = order_parity(places, sources, save_id)
    if found is None:
        num_domains = len({place.failure_domain for place in places})
        refusal = (
            "Memory(parity=1) needs hosts in three failure domains or more, none of them with more than half of the "
            f"hosts; the ranks are in {num_domains} domains: memory checkpoints survive the "
            "death of processes, but not the loss of a host. Give copies=2, or copies=1 without parity"
        )
        return [msgspec.msgpack.encode(_CopyOrders([], [], refusal=refusal))] * len(offers)
    takers: list[list[int]] = [[] for _ in offers]
    for holder, order in found.items():
        for source in order.sources:
            takers[source.rank].append(holder)
    return [msgspec.msgpack.encode(_CopyOrders(takers[rank], [], found.get(rank))) for rank in range(len(offers))]


def _joint_outcome(payloads: Sequence[bytes]) -> Sequence[bytes]:
    outcomes = [msgspec.msgpack.decode(payload, type=_CopyOutcome) for payload in payloads]
    failed = [outcome for outcome in outcomes if outcome.failure]
    # The error about bytes or a host says more than the errors of connections that were closed because of it.
    failed.sort(key=lambda outcome: outcome.kind in _RETRIED)
    return [msgspec.msgpack.encode(failed[0] if failed else _CopyOutcome())] * len(payloads)


def _error_of(outcome: _CopyOutcome, record: VersionRecord) -> CheckpointError:
    cls = CheckpointCorruptError if outcome.kind == "checksum" else CheckpointSaveError
    return cls(
        f"{outcome.failure}. The copies of save {record.save_id} on other hosts are incomplete: it survives the death "
        "of its processes, and the copies before it stay; the next save places its copies anew",
        kind=outcome.kind or "rank_failed",
        step=record.step,
        ranks=outcome.ranks,
    )
