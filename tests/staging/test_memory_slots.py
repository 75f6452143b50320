"""Which slot a save to memory gets, and what stays whole meanwhile."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.manifest import Manifest, encode_manifest
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import open_job
from bytecheckpoint.storage.memory_root.slot_file import Slot
from bytecheckpoint.storage.memory_root.version_files import VersionRecord

MIB = 1 << 20
PROTECTED, NEWEST = "a" * 16, "b" * 16


def memory_of(tmp_path: Path) -> JobMemory:
    return JobMemory(open_job(str(tmp_path / "memory"), str(tmp_path / "ckpt")))


def hold(memory: JobMemory, save_id: str, num_bytes: int, *, is_protected: bool) -> None:
    """Makes a save complete in memory, as one that survives the loss of a host or one whose copies failed."""
    step = memory.seen()[1] + 1
    memory.begin_save()
    memory.take([num_bytes], max_bytes=None)[:] = bytes([step]) * num_bytes
    memory.mark_whole(save_id, step, 0, [(0, 0)])
    record = VersionRecord(save_id, 1, step, step, f"step_{step:08d}")
    version_files.add_pending(memory.job, record, encode_manifest(Manifest(save_id=save_id, step=step)))
    memory.settle(save_id)
    memory.note_complete(record)
    version_files.mark_complete(memory.job, save_id)
    if is_protected:
        version_files.note_protected(memory.job, save_id)
        memory.settle(save_id, is_protected=True)


def held(memory: JobMemory) -> dict[str, set[int]]:
    """Returns the values of the bytes of each save that is whole in a slot."""
    found = {}
    for slot in slot_file.scan(memory.job.slots):
        for place in slot.places().values():
            with open(place.path, "rb") as file:
                file.seek(place.byte_offset)
                found[slot.save_id] = set(file.read(place.byte_length))
    return found


def test_stale_slots_go_also_where_held_ones_are_smaller(tmp_path: Path) -> None:
    memory = memory_of(tmp_path)
    with memory.job.locked():
        stale = [slot_file.create(memory.job.slots) for _ in range(3)]
    for slot in stale:
        slot.reserve(4 * MIB)
    memory.reserve([MIB], max_bytes=None)
    for slot in stale:
        slot.release()
    memory.trim(1)
    assert [slot.capacity < 2 * MIB for slot in slot_file.scan(memory.job.slots)] == [True] * 2


@pytest.fixture
def three_slots(tmp_path: Path) -> JobMemory:
    """Memory with a save that survives a host, a newer one that does not, and a free slot, of 1 MiB each."""
    memory = memory_of(tmp_path)
    hold(memory, PROTECTED, MIB, is_protected=True)
    hold(memory, "c" * 16, MIB, is_protected=False)
    hold(memory, NEWEST, MIB, is_protected=False)
    assert held(memory) == {PROTECTED: {1}, "c" * 16: {2}, NEWEST: {3}}
    memory.begin_save()
    return memory


def test_a_longer_save_has_a_free_slot_lengthened_where_there_is_room(three_slots: JobMemory) -> None:
    assert len(three_slots.take([2 * MIB], max_bytes=8 * MIB)) == 2 * MIB
    assert held(three_slots) == {PROTECTED: {1}, NEWEST: {3}}


def test_a_longer_save_without_room_to_lengthen_a_free_slot_takes_the_protected_one(
    three_slots: JobMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        image = three_slots.take([2 * MIB], max_bytes=7 * MIB // 2)
    assert "the loss of a host costs what memory holds" in caplog.text
    assert len(image) == 2 * MIB
    assert held(three_slots) == {NEWEST: {3}}
    assert len(list(slot_file.scan(three_slots.job.slots))) == 2


def test_a_save_that_has_no_room_in_any_slot_leaves_what_memory_holds(three_slots: JobMemory) -> None:
    for _ in range(2):
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            three_slots.take([4 * MIB], max_bytes=7 * MIB // 2)
        assert raised.value.kind == "no_space"
        assert held(three_slots).items() >= {PROTECTED: {1}, NEWEST: {3}}.items()


def test_a_new_slot_whose_pages_cannot_be_allocated_gives_way_to_the_protected_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(tmp_path)
    hold(memory, PROTECTED, MIB, is_protected=True)
    hold(memory, NEWEST, MIB, is_protected=False)
    memory.begin_save()
    reserve = Slot.reserve

    def refuse_new(slot: Slot, num_bytes: int, *mapping: type) -> None:
        if slot.capacity < num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(slot, num_bytes, *mapping)

    monkeypatch.setattr(Slot, "reserve", refuse_new)
    assert len(memory.take([MIB], max_bytes=None)) == MIB
    assert held(memory) == {NEWEST: {2}}
    assert len(list(slot_file.scan(memory.job.slots))) == 2


def test_a_save_that_failed_gives_way_before_the_newest_complete_one(tmp_path: Path) -> None:
    """Without room for a third slot, that of the newest complete save was overwritten, as the protected one."""
    memory = memory_of(tmp_path)
    hold(memory, PROTECTED, MIB, is_protected=True)
    memory.begin_save()
    memory.take([MIB], max_bytes=None)
    memory.mark_whole(NEWEST, 2, 0, [(0, 0)])
    memory.doubt(NEWEST)
    memory.note_failure()
    memory.begin_save()
    memory.take([MIB], max_bytes=5 * MIB // 2)
    assert held(memory) == {PROTECTED: {1}}


def test_a_save_that_is_complete_has_not_failed_though_this_rank_cannot_tidy_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks have given up the saves before it: they can go on from this one alone, until the next is complete."""

    def refuse(_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    memory = memory_of(tmp_path)
    hold(memory, PROTECTED, MIB, is_protected=False)
    memory.begin_save()
    memory.take([MIB], max_bytes=None)[:] = b"\2" * MIB
    memory.mark_whole(NEWEST, 2, 0, [(0, 0)])
    memory.doubt(NEWEST)
    with monkeypatch.context() as patch:
        patch.setattr(version_files, "protected_save", refuse)
        with pytest.raises(OSError, match="Too many"):
            memory.settle(NEWEST)
    memory.note_failure()
    for save_id in ("c" * 16, "d" * 16):
        memory.begin_save()
        memory.take([MIB], max_bytes=None)
        memory.mark_whole(save_id, 3, 0, [(0, 0)])
        memory.doubt(save_id)
        memory.note_failure()
    assert held(memory)[NEWEST] == {2}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_known_here", [False, True])
def test_without_room_for_a_third_slot_a_save_that_was_cut_short_holds_up_no_later_one(
    tmp_path: Path, is_known_here: bool, is_restarted: bool
) -> None:
    """Where a rank ended before it knew whether a save is complete, all later ones failed until a resume. The newest
    stays that this host has the manifest of: only such a save may be complete elsewhere.
    """
    memory = memory_of(tmp_path)
    hold(memory, PROTECTED, MIB, is_protected=False)
    memory.begin_save()
    memory.take([MIB], max_bytes=None)[:] = b"\2" * MIB
    memory.mark_whole(NEWEST, 2, 0, [(0, 0)])
    if is_known_here:
        record = VersionRecord(NEWEST, 1, 2, 2, "step_00000002")
        version_files.add_pending(memory.job, record, encode_manifest(Manifest(save_id=NEWEST, step=2)))
    memory.doubt(NEWEST)
    if is_restarted:
        memory.close()
        memory = memory_of(tmp_path)
    memory.begin_save()
    memory.take([MIB], max_bytes=5 * MIB // 2)
    assert held(memory) == ({NEWEST: {2}} if is_known_here else {PROTECTED: {1}})


@pytest.mark.parametrize("resumed", ["c" * 16, NEWEST])
def test_without_room_for_a_third_slot_the_resumed_save_stays_and_not_the_protected_one(
    tmp_path: Path, resumed: str
) -> None:
    """Where a resume has passed over the protected save, which is newer, or has taken the manifest from another host,
    the next save took the slot of what training went on from.
    """
    memory = memory_of(tmp_path)
    if resumed != NEWEST:
        hold(memory, resumed, MIB, is_protected=False)
    hold(memory, PROTECTED, MIB, is_protected=True)
    if resumed == NEWEST:
        memory.begin_save()
        memory.take([MIB], max_bytes=None)
        memory.mark_whole(NEWEST, 2, 0, [(0, 0)])
    memory.close()
    memory = memory_of(tmp_path)
    memory.settle(resumed)
    memory.begin_save()
    memory.take([MIB], max_bytes=5 * MIB // 2)
    assert list(held(memory)) == [resumed]


@pytest.mark.parametrize("lengths", [[2 * MIB], [8 * MIB]])
def test_without_a_protected_save_the_newest_stays(tmp_path: Path, lengths: Sequence[int]) -> None:
    memory = memory_of(tmp_path)
    for save_id in (PROTECTED, NEWEST):
        hold(memory, save_id, MIB, is_protected=False)
    memory.begin_save()
    with pytest.raises(bcp.CheckpointSaveError, match="max_bytes"):
        memory.take(lengths, max_bytes=5 * MIB // 2)
    assert held(memory)[NEWEST] == {2}


@pytest.mark.parametrize("held_bytes", [None, MIB // 4], ids=["a new slot", "a shorter slot"])
def test_a_copy_without_room_is_refused_again_when_it_is_tried_again(tmp_path: Path, held_bytes: int | None) -> None:
    copies = memory_of(tmp_path).copies
    if held_bytes is not None:
        copies.take(1, [held_bytes], max_bytes=None)
        copies.begin_save()
    for _ in range(2):  # as after a connection broke beside it
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            copies.take(1, [MIB], max_bytes=MIB // 2)
        assert raised.value.kind == "no_space"
        assert "a copy for another host needs" in str(raised.value)
        assert "nothing was written" not in str(raised.value)  # the save itself is complete
    assert copies.take(1, [MIB], max_bytes=None).nbytes == MIB


def test_a_copy_leaves_no_room_for_a_second_slot_that_was_allocated_ahead(tmp_path: Path) -> None:
    memory = memory_of(tmp_path)
    memory.reserve([MIB], max_bytes=None)
    hold(memory, NEWEST, MIB, is_protected=False)
    memory.copies.begin_save()
    assert memory.copies.take(1, [MIB], max_bytes=7 * MIB // 2).nbytes == MIB


def test_copies_that_other_hosts_lack_give_way_where_there_is_no_room_for_more(tmp_path: Path) -> None:
    """With room for two, copies failed from then on, though the other host had room again."""
    memory = memory_of(tmp_path)
    copies = memory.copies

    def make(save_id: str, value: int) -> None:
        copies.begin_save()
        copies.take(1, [MIB], max_bytes=5 * MIB // 2)[:] = bytes([value]) * MIB
        copies.mark_whole(1, save_id, value, [MIB])
        copies.doubt(save_id)

    def held_copies() -> list[str]:
        return sorted(found.save_id for found in scan_copies(memory.job, "copies") if found.capacity)

    make(PROTECTED, 1)
    copies.settle(PROTECTED)
    for save_id in (NEWEST, "c" * 16):
        make(save_id, 2)
        assert held_copies() == [PROTECTED, save_id]
        copies.note_incomplete(save_id)
    make("d" * 16, 3)
    copies.settle("d" * 16)
    assert "d" * 16 in held_copies()
    copies.begin_save()
    copies.take(1, [MIB], max_bytes=5 * MIB // 2)
    with pytest.raises(bcp.CheckpointSaveError, match="a copy for another host needs"):
        copies.take(2, [MIB], max_bytes=5 * MIB // 2)
    assert "d" * 16 in held_copies()


@pytest.mark.parametrize("last_whole", [PROTECTED, NEWEST])
def test_copies_that_other_hosts_may_lack_give_way_after_a_restart(tmp_path: Path, last_whole: str) -> None:
    """A process that is killed among copies leaves those of two saves: with room for two, copies failed ever after."""
    before = memory_of(tmp_path)
    for save_id in (PROTECTED, NEWEST):
        before.copies.begin_save()
        before.copies.take(1, [MIB], max_bytes=None)
        before.copies.mark_whole(1, save_id, 1, [MIB])
        before.copies.doubt(save_id)
        if save_id == PROTECTED:
            before.copies.settle(save_id)
    version_files.note_protected(before.job, last_whole)
    before.close()
    memory = memory_of(tmp_path)
    memory.copies.take(1, [MIB], max_bytes=5 * MIB // 2)
    assert [found.save_id for found in scan_copies(memory.job, "copies") if found.save_id] == [last_whole]
