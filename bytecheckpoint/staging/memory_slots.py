"""The slots of this process for one job: staging memory whose bytes outlive the process. One slot has the newest memory
checkpoint that is complete, the other takes the next one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError, CheckpointSaveError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.memory.host_mapping import HostMapping
from bytecheckpoint.staging.copy_slots import CopySlots, bytes_of_all_slots
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.file_lock import ProcessLock
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, LivingProcess
from bytecheckpoint.storage.memory_root.room import check_room
from bytecheckpoint.storage.memory_root.slot_file import FoundSlot, Slot
from bytecheckpoint.storage.memory_root.version_files import VersionRecord
from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

GENERATION = "memory_generation"
"""Key in the provenance of a manifest. Its value, the generation, rises with the first memory save of a process,
and with the first one after a load.
"""
_SLOTS = 2


class JobMemory:
    """The part that this process has in the memory of one job. Used by one save at a time."""

    def __init__(self, job: JobFolder) -> None:
        self.job = job
        self.copies, self.parity = CopySlots(job, "copies"), CopySlots(job, "parity")
        """Slots in which this process holds copies and parity for other hosts."""
        self._joined: tuple[ProcessLock, LivingProcess] | None = None
        self._registered: tuple[ProcessLock, LivingProcess] | None = None
        self._slots: list[Slot] = []
        self._filling: Slot | None = None
        self._lengths: list[int] = []
        self._files: list[tuple[int, int]] = []
        """Rank and number in the name of each file of the image that was filled last."""
        self._warned: set[str] = set()
        self._settled: Collection[str] | None = None
        """Ids of the saves whose slots must stay; None while only the files in the job's folder say which they are."""
        self._newest = ""
        """Id of the save that was settled last; empty if none was."""
        self._doubted = ""
        """Id of the save of which this rank does not know whether it is complete."""
        self._failed: set[str] = set()
        """Ids of doubted saves that are complete nowhere."""
        self._generation = self._number = 0
        """The highest that any rank was seen to know."""
        self.opens_generation, self._is_left = True, False
        """The first: True if the next memory save begins a new generation: of this process, memory has no complete save
        yet that began after its last load. The second: True if a load came after the newest save began.
        """
        self._present: set[int] | None = None
        """Steps with a folder at the path, as far as the coordinator knows; None before it has looked."""
        with job.locked():
            job.remove_stale_temporaries()
            slot_file.remove_stale_temporaries(job.slots)

    def begin_save(self) -> None:
        """Lets `take` choose slots for a new save, and forgets those that somebody has deleted. Hazard: without this
        call before each save, `take` overwrites the slot of the save before, even if that is complete.
        """
        self._filling, self._is_left = None, False
        self._forget_lost()
        self.copies.begin_save()
        self.parity.begin_save()

    def take(self, lengths: Sequence[int], *, max_bytes: int | None) -> memoryview:
        """Returns memory for an image with files of these lengths, in bytes, in a slot whose content is no longer
        needed; without room for one, in that of a doubted save that has failed, or else of the oldest of several saves
        that are needed. Called again for the same save, takes the same slot.

        Raises CheckpointSaveError (no_space).
        """
        self._lengths = list(lengths)
        num_bytes = slot_file.slot_bytes(lengths)
        if self._filling is None:
            self._filling = self._reserved_slot(num_bytes, max_bytes)
        else:
            self._reserve(self._filling, num_bytes, max_bytes)
        return self._filling.begin(lengths)

    def reserve(self, lengths: Sequence[int], *, max_bytes: int | None) -> None:
        """Allocates both slots ahead of the first save. Raises CheckpointSaveError (no_space)."""
        self._forget_lost()
        num_bytes = slot_file.slot_bytes(lengths)
        while len(self._slots) < _SLOTS:
            self._add_slot(num_bytes, max_bytes)
        for slot in self._slots:
            self._reserve(slot, num_bytes, max_bytes)

    def image(self) -> dict[tuple[int, int], memoryview]:
        """Returns the data files of the image that was filled last, by rank and number in their names, with -1 as the
        rank of those that are not whole: see `mark_whole`.
        """
        if self._filling is None:
            raise RuntimeError("a slot is filled before its files are asked for")
        image, starts = self._filling.image(self._lengths), slot_file.image_starts(self._lengths)
        return {
            file: image[start:][:length].toreadonly()
            for file, start, length in zip(self._files, starts, self._lengths, strict=False)
        }

    def mark_whole(self, save_id: str, step: int, rank: int, files: Sequence[tuple[int, int]]) -> None:
        """Marks the image as whole, with these ranks and numbers in the names of its files. May be called again, with
        the rank -1 for files that are not valid after all.
        """
        if self._filling is None:
            raise RuntimeError("a slot is taken before it is filled")
        self._files = list(files)
        self._filling.mark_whole(save_id, step, rank, self._lengths, files=self._files)

    def doubt(self, save_id: str) -> None:
        """Counts this save, which is whole on all ranks, among the needed ones: others may learn that it is complete
        while this rank does not. Earlier doubted saves that failed are needed no more: removes their manifests.
        """
        self._settled = {*self._without_failed(), save_id}
        self._doubted = save_id

    def note_failure(self) -> None:
        """Notes that the doubted save, if any, is complete nowhere. Its slots stay until a later save is whole, or has
        no other room.
        """
        self._failed |= {self._doubted} - {""}

    def settle(self, save_id: str, *, is_protected: bool = False) -> None:
        """Makes this save, complete on all hosts or resumed from by all ranks, the only needed one, beside the
        `protected_save` unless `is_protected`: that is True if this save survives the loss of a host, or no save can.
        Unlinks unneeded slots of this process beyond two slots in all, or three if two saves have slots.
        """
        # First: if anything here fails, the save is complete all the same.
        self._newest, self._doubted, self._failed = save_id, "", set()
        protected = "" if is_protected else version_files.protected_save(self.job)
        self._settled = {save_id, protected} - {""}
        unneeded = [slot for slot in self._slots if slot.save_id not in self._settled]
        num_kept = len(self._slots) - len(unneeded)
        for slot in unneeded[max(_SLOTS + (num_kept > 1) - num_kept, 0) :]:  # more than two: see `doubt`
            self._slots.remove(slot)
            slot.remove()

    def keep_copies_of(self, save_id: str) -> None:
        """Settles copies and parity for other hosts on this save, which is complete, as `CopySlots.settle` does. An
        OSError is logged: it costs no checkpoint.
        """
        try:
            self.copies.settle(save_id)
            self.parity.settle(save_id)
        except OSError as error:
            logger.warning("older copies in %s could not be given up: %s", self.job.path, error)

    def trim(self, num_ranks: int) -> None:
        """Unlinks slots that no process holds and no save needs until there are two, of all, for each rank here."""
        with self.job.locked():
            found = list(slot_file.scan(self.job.slots))
            free = sorted(self._free_among(found), key=lambda each: each.capacity)
            not_held = (slot for each in free if (slot := slot_file.take(each.path)) is not None)
            for slot in islice(not_held, max(len(found) - _SLOTS * num_ranks, 0)):
                slot.remove()

    def note_seen(self, generation: int, number: int) -> None:
        """Notes a generation and a number that some rank knows, each if it is higher than the one noted before."""
        self._generation, self._number = max(self._generation, generation), max(self._number, number)

    def note_complete(self, record: VersionRecord) -> None:
        """Notes the newest complete version. Later saves keep its generation, unless a load came after it began."""
        self.note_seen(record.generation, record.number)
        self.opens_generation = self._is_left

    def note_load(self, generation: int = 0) -> None:
        """Notes that training goes on from a loaded checkpoint of this generation: the next save begins a higher one,
        also where this host has lost its memory and the newest step at the path is of a branch that training left.
        """
        self.note_seen(generation, 0)
        self.opens_generation = self._is_left = True

    def warn_once(self, message: str, *, is_reporter: bool) -> None:
        """Issues a warning if `is_reporter`, and only the first time for each message."""
        if is_reporter and message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def seen(self) -> tuple[int, int]:
        """Returns the highest generation and number that were noted. Before a save that opens a generation, first notes
        those of the versions that this host has.
        """
        if self.opens_generation:
            for version in version_files.read_versions(self.job):
                self.note_seen(version.record.generation, version.record.number)
        return self._generation, self._number

    @property
    def process(self) -> LivingProcess:
        """This process, registered as one that saves for the job: by the first read of this property, and again if
        somebody has emptied the folder since.
        """
        if self._joined is None or not self.job.has_joined(self._joined[1]):
            earlier = self._joined or self._registered
            self._joined = self.job.join()
            if earlier is not None:
                earlier[0].release()
        return self._joined[1]

    def register(self) -> None:
        """Registers this process, which may never save, so that `bcp gc` does not free the memory of the job while it
        lives.
        """
        earlier = self._registered
        if self._joined is None and (earlier is None or not self.job.has_joined(earlier[1])):
            self._registered = self.job.join(saves=False)
            if earlier is not None:
                earlier[0].release()

    def others(self) -> list[LivingProcess]:
        """Returns the other processes on this host that save for the job. Registers this one, as `process` does."""
        own = self.process.name
        return [process for process in self.job.living() if process.saves and process.name != own]

    def look_at(self, store: Store) -> None:
        """Reads, once, the store's steps for `check_step`, and the generation of the newest for `seen`. Logs errors."""
        if self._present is not None:
            return
        self._present = set()
        try:
            steps = (layout.parse_step(name) for name in store.list(""))
            self._present.update(step for step in steps if step is not None)
            newest = next(layout.newest_steps(store), None)
            if newest is not None:
                content = layout.read_manifest_bytes(store, layout.step_folder(newest))
                manifest = layout.parse_manifest(content, path=str(store), check_all=False)
                self.note_seen(generation_of(manifest) or 0, 0)
        except CheckpointError as error:
            logger.warning("memory checkpoints go on without a look at %s: %s", store, error.message)

    def check_step(self, store: Store, step: int, path: str) -> None:
        """Raises CheckpointExistsError if the step is committed at the path. After `look_at`, a remote store, which may
        be slow or away, is asked only for a step that was found or that this process has committed since.
        """
        self.look_at(store)
        may_exist = not is_remote(store) or step in (self._present or ())
        if may_exist and layout.has_manifest(store.list(layout.step_folder(step))):
            raise layout.exists_error(path)

    def note_commit(self, step: int) -> None:
        """Notes a step that this process has committed."""
        if self._present is not None:
            self._present.add(step)

    def _forget_lost(self) -> None:
        num_slots = len(self._slots)
        self._slots = slot_file.without_lost(self._slots)
        if lost := num_slots - len(self._slots):
            logger.warning(
                "slots are gone from %s (%d of %d), which this process did not delete: what they held is lost, and "
                "others are taken",
                self.job.path,
                lost,
                num_slots,
            )

    def _needed_saves(self) -> Collection[str]:
        """Returns the ids of the saves whose slots must stay."""
        return version_files.needed_saves(self.job) if self._settled is None else self._settled

    def _without_failed(self) -> Collection[str]:
        """Removes the manifests of the doubted saves that failed. Returns the ids of saves whose slots must stay."""
        for failed in self._failed:
            version_files.remove(self.job, failed)
        needed_saves = set(self._needed_saves()) - self._failed
        self._failed = set()
        return needed_saves

    def _free_among(self, found: Iterable[FoundSlot]) -> Iterator[FoundSlot]:
        """Yields the slots that no save needs, without those of this process."""
        needed_saves, own = self._needed_saves(), {slot.path for slot in self._slots}
        return (each for each in found if each.save_id not in needed_saves and each.path not in own)

    def _reserved_slot(self, num_bytes: int, max_bytes: int | None) -> Slot:
        """Returns a slot that is free and at least `num_bytes` long; without room for one, that of a doubted save that
        has failed, or else of the oldest needed save, if that is not the last one; for it the free ones of this process
        are unlinked. Raises CheckpointSaveError (no_space).
        """
        if not self._failed.isdisjoint(self._needed_saves()):
            with suppress(CheckpointSaveError):
                return self._reserved_free_slot(self._needed_saves(), num_bytes, max_bytes)
            self._settled, self._doubted = self._without_failed(), ""
        settled, held = self._settled, version_files.by_age(self.job, self._needed_saves(), settled=self._newest)
        needed_saves = held
        while True:
            try:
                slot = self._reserved_free_slot(needed_saves, num_bytes, max_bytes)
                break
            except CheckpointSaveError:
                if len(needed_saves) < 2:
                    self._settled = settled
                    raise
            for slot in [slot for slot in self._slots if slot.save_id not in held]:  # their room is for another
                self._slots.remove(slot)
                slot.remove()
            self._settled = needed_saves = needed_saves[1:]
        if (protected := version_files.protected_save(self.job)) in held and protected not in needed_saves:
            logger.warning(
                "there is no room in %s for a slot beside those of the newest save and of the newest one that survives "
                "a host: until copies of a save succeed again, the loss of a host costs what memory holds",
                self.job.root,
            )
        return slot

    def _reserved_free_slot(self, needed_saves: Collection[str], num_bytes: int, max_bytes: int | None) -> Slot:
        own = [slot for slot in self._slots if slot.save_id not in needed_saves]
        best = min(own, key=lambda slot: slot_file.fit(slot.capacity, num_bytes), default=None)
        slot = self._add_slot(num_bytes, max_bytes) if best is None else best
        self._reserve(slot, num_bytes, max_bytes)
        return slot

    def _add_slot(self, num_bytes: int, max_bytes: int | None) -> Slot:
        """Takes the best-fitting slot that no process holds and no save needs, or makes one. Registers this process.
        Raises CheckpointSaveError (no_space) if a new slot, and those that are to follow, have no room.
        """
        self.register()
        with self.job.locked():
            new_slot = slot_file.take_best_fit(self._free_among(slot_file.scan(self.job.slots)), num_bytes)
            if new_slot is None:
                self._check_room(num_bytes * max(_SLOTS - len(self._slots), 1), max_bytes)
                new_slot = slot_file.create(self.job.slots)
            self._slots.append(new_slot)
            return new_slot

    def _reserve(self, slot: Slot, num_bytes: int, max_bytes: int | None) -> None:
        new_bytes = num_bytes - slot.capacity
        if new_bytes > 0:
            self._check_room(new_bytes, max_bytes)
        try:
            slot.reserve(num_bytes, HostMapping)
        except OSError as error:
            raise CheckpointSaveError(
                f"the memory root {self.job.root} had no room for a slot of {num_bytes} bytes ({error.strerror}); "
                "nothing was written, and what memory held before is as it was: free space there, or save without "
                "Memory",
                kind="no_space",
                path=self.job.root,
            ) from error

    def _check_room(self, new_bytes: int, max_bytes: int | None) -> None:
        held_bytes = bytes_of_all_slots(self.job)
        check_room(self.job.root, new_bytes, held_bytes=held_bytes, max_bytes=max_bytes, is_copy=False)

    def close(self) -> None:
        """Releases all slots, with what they hold, to whichever process takes them next, and ends the registration of
        this process.
        """
        for slot in self._slots:
            slot.release()
        self.copies.close()
        self.parity.close()
        for joined in (self._joined, self._registered):
            if joined is not None:
                joined[0].release()


class TierOfSave(NamedTuple):
    """The memory tier of one save."""

    slots: JobMemory
    is_only: bool
    """True if the save goes nowhere else."""
    max_bytes: int | None
    """Limit for all that the job holds in memory on this host; None for no limit of its own."""

    def take(self, lengths: Sequence[int], *, staging_bytes: int | None) -> memoryview:
        """Returns memory for an image with files of these lengths, in bytes. Raises CheckpointSaveError:
        unsupported_value if `staging_bytes` is less than the image, no_space if there is no room for it.
        """
        num_bytes = slot_file.image_bytes(lengths)
        if staging_bytes is not None and staging_bytes < num_bytes:
            raise CheckpointSaveError(
                f"SaveOptions.staging_bytes={staging_bytes} is less than the {num_bytes} bytes that this rank stages, "
                "and memory holds them all at once; nothing was written: leave staging_bytes out, or give it at least "
                "this, or save without Memory",
                kind="unsupported_value",
            )
        return self.slots.take(lengths, max_bytes=self.max_bytes)


def generation_of(manifest: Manifest) -> int | None:
    """Returns the generation of a save with a memory tier, None for any other."""
    generation = manifest.provenance.get(GENERATION)
    return generation if isinstance(generation, int) and not isinstance(generation, bool) else None
