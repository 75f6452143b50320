"""The slots of this process for copies of what ranks of other hosts staged, or for parity of it. As with the slots of a
rank, those of the newest save that is needed stay whole while the next save takes others, and all outlive the process.
"""

# ruff: noqa: PTH102, PTH118, PTH123 - the calls of `os` by name, as in posix_files.py

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, replace_file
from bytecheckpoint.storage.memory_root.room import check_room
from bytecheckpoint.storage.memory_root.slot_file import FoundSlot, Slot

CopyKind = Literal["copies", "parity"]
_NEEDED = "needed"


class CopySlots:
    """The copies that this process holds for one job. Used by one save at a time."""

    def __init__(self, job: JobFolder, kind: CopyKind) -> None:
        self._job = job
        self._kind = kind
        self._folder = _folder_of(job, kind)
        self._slots: list[Slot] = []
        self._taken: dict[int, Slot] = {}
        """Slots of the current save, by the rank whose image each is to hold."""
        self._incomplete: set[str] = set()
        """Ids of the saves of which another host could not hold all copies."""

    def begin_save(self) -> None:
        """Lets `take` choose slots for a new save, and forgets slots whose files were deleted by others."""
        self._taken, self._slots = {}, slot_file.without_lost(self._slots)

    def take(self, owner: int, lengths: Sequence[int], *, max_bytes: int | None) -> memoryview:
        """Returns memory for a copy of the image of rank `owner`; without room for one, overwrites a copy of an earlier
        save of which other hosts may lack copies. Called again for the same save, returns the same memory with its
        content.

        Raises CheckpointSaveError (no_space).
        """
        slot = self._taken.get(owner)
        if slot is not None:
            return slot.image(lengths)
        num_bytes = slot_file.slot_bytes(lengths)
        with self._job.locked():
            with suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            slot = self._taken[owner] = self._reserved_slot(num_bytes, max_bytes)
        return slot.begin(lengths)

    def mark_whole(
        self, owner: int, save_id: str, step: int, lengths: Sequence[int], *, numbers: Sequence[int] = ()
    ) -> None:
        """Marks a copy as whole. `numbers` are in the names of its files; empty if it has all files of the owner."""
        self._taken[owner].mark_whole(save_id, step, owner, lengths, files=[(owner, number) for number in numbers])

    def doubt(self, save_id: str) -> None:
        """Counts this save, if this process holds copies of it, among the needed ones, because other hosts may go on
        from it. Earlier saves that are incomplete on other hosts are no longer needed.
        """
        if self._taken:
            others = (each for each in self._needed_saves() if each not in self._incomplete)
            self._write_needed_saves([*others, save_id])

    def note_incomplete(self, save_id: str) -> None:
        """Notes that another host lacks copies of this save. Its copies here stay until those of a later save are
        whole, or have no other room: without the host that they are of, training can go on from it.
        """
        self._incomplete.add(save_id)

    def settle(self, save_id: str) -> None:
        """Keeps the copies of this save, all of which are whole, and up to as many spare slots. Unlinks all other slots
        of this process, and the slots of other saves that no process holds.
        """
        if not os.path.isdir(self._folder):  # noqa: PTH112
            return
        self._incomplete.clear()
        self._write_needed_saves([save_id])
        unneeded = [slot for slot in self._slots if slot.save_id != save_id]
        for slot in unneeded[len(self._taken) :]:
            self._slots.remove(slot)
            slot.remove()
        with self._job.locked():
            slot_file.remove_stale_temporaries(self._folder)
            for found in slot_file.scan(self._folder):
                if found.save_id != save_id and (stale_slot := slot_file.take(found.path)) is not None:
                    stale_slot.remove()

    def close(self) -> None:
        """Releases all slots, with what they hold, for whichever process takes them over later."""
        for slot in self._slots:
            slot.release()

    def _reserved_slot(self, num_bytes: int, max_bytes: int | None) -> Slot:
        needed_saves = self._needed_saves()
        if len(needed_saves) > 1:
            with suppress(CheckpointSaveError):
                return self._reserved_free_slot(needed_saves, num_bytes, max_bytes)
            protected = version_files.protected_save(self._job)
            needed_saves = [protected] if protected in needed_saves else needed_saves[:1]
        return self._reserved_free_slot(needed_saves, num_bytes, max_bytes)

    def _reserved_free_slot(self, needed_saves: Collection[str], num_bytes: int, max_bytes: int | None) -> Slot:
        held, slot = list(self._slots), self._free_slot(needed_saves, num_bytes)
        try:
            self._reserve(slot, num_bytes, max_bytes)
        except CheckpointSaveError:
            if slot not in held:  # created or taken over just now: another may need its room more than what it held
                self._slots.remove(slot)
                slot.remove()
            raise
        return slot

    def _free_slot(self, needed_saves: Collection[str], num_bytes: int) -> Slot:
        busy = {slot.path for slot in self._taken.values()}
        own = [slot for slot in self._slots if slot.save_id not in needed_saves and slot.path not in busy]
        if own:
            return min(own, key=lambda slot: slot_file.fit(slot.capacity, num_bytes))
        paths = {slot.path for slot in self._slots}
        found = slot_file.scan(self._folder)
        free = (each for each in found if each.save_id not in needed_saves and each.path not in paths)
        slot = slot_file.take_best_fit(free, num_bytes) or slot_file.create(self._folder)
        self._slots.append(slot)
        return slot

    def _reserve(self, slot: Slot, num_bytes: int, max_bytes: int | None) -> None:
        new_bytes = num_bytes - slot.capacity
        if new_bytes > 0:
            held_bytes = bytes_of_all_slots(self._job) + bytes_of_second_slots(self._job)
            check_room(self._job.root, new_bytes, held_bytes=held_bytes, max_bytes=max_bytes, is_copy=True)
        try:
            slot.reserve(num_bytes)
        except OSError as error:
            raise CheckpointSaveError(
                f"the memory root {self._job.root} had no room for a copy of {num_bytes} bytes ({error.strerror}); "
                "this save survives the death of its processes, and no host: free space there, or save with "
                "Memory(copies=1)",
                kind="no_space",
                path=self._job.root,
            ) from error

    def _needed_saves(self) -> Sequence[str]:
        """Returns the ids of the saves whose copies must stay. The first is the last known to be whole on all hosts."""
        name = os.path.join(self._folder, _NEEDED)
        with suppress(FileNotFoundError, msgspec.MsgspecError), open(name, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[str])
        return []

    def _write_needed_saves(self, save_ids: Sequence[str]) -> None:
        content = msgspec.json.encode(list(dict.fromkeys(save_ids)))
        with self._job.locked():  # so that no process takes the file being written for one that a dead process left
            replace_file(os.path.join(self._folder, _NEEDED), content)


def scan_copies(job: JobFolder, kind: CopyKind) -> list[FoundSlot]:
    """Returns the slots of one kind that this host holds for others: copies of the images of ranks, or parity."""
    return list(slot_file.scan(_folder_of(job, kind)))


def bytes_of_all_slots(job: JobFolder) -> int:
    """Returns the bytes that a job holds on this host: of its own ranks, copies and parity."""
    slots = (*slot_file.scan(job.slots), *scan_copies(job, "copies"), *scan_copies(job, "parity"))
    return sum(found.capacity for found in slots)


def bytes_of_second_slots(job: JobFolder) -> int:
    """Returns the bytes that ranks of this host with one slot need for their second, beyond the slots that lie empty
    for them. A copy must leave these bytes free: a rank without its second slot cannot save.
    """
    slots_of: dict[int, list[int]] = {}
    empty_bytes = 0
    for found in slot_file.scan(job.slots):
        if found.header is None:
            empty_bytes += found.capacity
        else:
            slots_of.setdefault(found.header.rank, []).append(found.capacity)
    needed_bytes = sum(capacities[0] for capacities in slots_of.values() if len(capacities) == 1)
    return max(needed_bytes - empty_bytes, 0)


def _folder_of(job: JobFolder, kind: CopyKind) -> str:
    return os.path.join(job.path, kind)
