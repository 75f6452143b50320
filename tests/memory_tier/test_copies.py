"""Copies on other hosts: ranks that have memory roots of their own stand for hosts."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from faults.seams import SAVE_PHASES, Seam, before, raising

import bytecheckpoint as bcp
from bytecheckpoint.distributed import transfer
from bytecheckpoint.distributed.connection import missing_error
from bytecheckpoint.distributed.liveness import connected_threads
from bytecheckpoint.memory_tier import pieces
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.copy_slots import CopySlots, scan_copies
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from bytecheckpoint.storage.memory_root.slot_file import FoundSlot
from distributed.workers import WorkerDied, WorkerPool

NUM_ELEMENTS = 700_001


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Every rank has a tensor of its own, of another length."""
    return {f"of_rank_{rank}": torch.arange(NUM_ELEMENTS + 1000 * rank, dtype=torch.float32) + step}


def options(folder: Path, rank: int, ranks_a_host: int, **memory: Any) -> bcp.SaveOptions:
    root = folder / f"host{rank // ranks_a_host}"
    return bcp.SaveOptions(memory=bcp.Memory(root=root, **memory), timeout_s=20)


def save_steps(rank: int, world_size: int, folder: Path, ranks_a_host: int, steps: range, to: str) -> list[str]:
    """Saves, and returns what each save answers about hosts."""
    answers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            given = options(folder, rank, ranks_a_host)
            handle = bcp.save(folder / "ckpt", state_of(rank, step), step=step, async_save=True, options=given, to=to)
            assert handle.held("process").tier == "memory"
            answers.append(handle.held("host").tier)
            handle.result()
    return answers


def contents(slots: list[FoundSlot]) -> dict[str, bytes]:
    """The data files in slots, by name."""
    return {
        name: Path(place.path).read_bytes()[place.byte_offset :][: place.byte_length]
        for slot in slots
        for name, place in slot.places().items()
    }


def held_on(folder: Path, host: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What ranks of a host staged, and the copies that it has."""
    ((job, _),) = find_jobs(str(folder / f"host{host}"))
    return contents(list(slot_file.scan(job.slots))), contents(scan_copies(job, "copies"))


@pytest.mark.parametrize(("world_size", "ranks_a_host"), [(2, 1), (4, 2), (4, 1), (3, 2)])
@pytest.mark.parametrize("to", ["memory", "storage"])
def test_every_image_is_on_another_host_too(
    workers: WorkerPool, tmp_path: Path, world_size: int, ranks_a_host: int, to: str
) -> None:
    answers = workers.run(save_steps, tmp_path, ranks_a_host, range(1, 5), to, world_size=world_size)
    assert answers == [["memory"] * 4] * world_size
    hosts = range(-(-world_size // ranks_a_host))
    held = [held_on(tmp_path, host) for host in hosts]
    for host in hosts:
        own, _ = held[host]
        others = {name: content for other in hosts if other != host for name, content in held[other][1].items()}
        missing = {name for name, content in own.items() if others.get(name) != content}
        assert own
        assert missing == set()


def test_slots_of_copies_are_used_again(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_steps, tmp_path, 1, range(1, 4), "memory", world_size=2)
    before = [scan_slots(tmp_path, host) for host in range(2)]
    workers.run(save_steps, tmp_path, 1, range(4, 8), "memory", world_size=2)
    assert [scan_slots(tmp_path, host) for host in range(2)] == before
    assert [len(paths) for paths in before] == [2, 2]


def scan_slots(folder: Path, host: int) -> set[str]:
    ((job, _),) = find_jobs(str(folder / f"host{host}"))
    return {slot.path for slot in scan_copies(job, "copies")}


def save_alone(rank: int, world_size: int, folder: Path) -> tuple[list[str], str, str]:
    """All ranks share a root: there is no other host."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            given = options(folder, rank, world_size)
            handle = bcp.save(
                folder / "ckpt", state_of(rank, step), step=step, async_save=True, options=given, to="memory"
            )
            tier = handle.result().tier
        told += [str(warning.message) for warning in caught if "failure domains" in str(warning.message)]
    with pytest.raises(bcp.CheckpointMismatchError, match="needs as many failure domains") as raised:
        handle.held("host")
    return told, tier, raised.value.kind


def test_one_host_is_warned_of_once_and_holds_the_save_all_the_same(workers: WorkerPool, tmp_path: Path) -> None:
    (first, *others), tiers, kinds = zip(*workers.run(save_alone, tmp_path, world_size=2), strict=True)
    assert len(first) == 1
    assert "are in 1, on 1 hosts" in first[0]
    assert others == [[]]
    assert {*tiers} == {"memory"}
    assert {*kinds} == {"conflict"}


def save_breaking(rank: int, world_size: int, folder: Path, breaks: int) -> tuple[str, list[int]]:
    """Saves while the first connections break in the middle; returns the answer and the pieces asked for each time."""
    asked: list[int] = []
    encode, check = transfer.with_digest, transfer.check_digest

    def counting(wanted: Any) -> bytes:
        asked.append(len(msgspec.msgpack.decode(wanted)))
        return encode(wanted)

    num_arrived = 0

    def breaking(*arguments: Any, **names: Any) -> None:
        nonlocal num_arrived, breaks
        num_arrived += 1
        if rank == 1 and breaks and num_arrived % 4 == 0:
            breaks -= 1
            raise missing_error((0,), "is cut off")
        check(*arguments, **names)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(transfer, "with_digest", counting)
        patch.setattr(transfer, "check_digest", breaking)
        patch.setattr(pieces, "PIECE_BYTES", 300_000)
        given = options(folder, rank, 1)
        handle = bcp.save(folder / "ckpt", state_of(rank, 1), step=1, async_save=True, options=given, to="memory")
        try:
            answer = handle.held("host").tier
        except bcp.CheckpointError as error:
            answer = error.kind
        handle.held("process")
    return answer, asked


def test_a_connection_that_breaks_goes_on_where_it_was(workers: WorkerPool, tmp_path: Path) -> None:
    (first, _), (second, asked) = workers.run(save_breaking, tmp_path, 2, world_size=2)
    assert (first, second) == ("memory", "memory")
    assert asked == [asked[0], asked[0] - 3, asked[0] - 6]
    assert held_on(tmp_path, 0)[0].items() <= held_on(tmp_path, 1)[1].items()


def test_connections_that_break_for_ever_leave_what_the_process_holds(workers: WorkerPool, tmp_path: Path) -> None:
    answers = workers.run(save_breaking, tmp_path, 99, world_size=2)
    assert [answer for answer, _ in answers] == ["rank_missing"] * 2
    assert held_on(tmp_path, 0)[1] == {}


@contextmanager
def flipping(folder: Path, *, is_here: bool) -> Iterator[None]:
    """A bit of the slot of host 1 flips after it was staged, when the first piece of it is sent, if that is here."""
    seal = transfer.seal
    is_flipping = is_here

    def flip(header: Any, buffers: Any) -> Any:
        nonlocal is_flipping
        if is_flipping:
            is_flipping = False
            ((job, _),) = find_jobs(str(folder / "host1"))
            place = next(place for slot in slot_file.scan(job.slots) for place in slot.places().values())
            with open(place.path, "r+b") as file:
                file.seek(place.byte_offset + 100_000)
                old = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([old ^ 1]))
        return seal(header, buffers)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(transfer, "seal", flip)
        yield


def save_flipped(rank: int, world_size: int, folder: Path) -> tuple[str, str, str]:
    """A bit of rank 1's slot flips after it was staged; then a save is as it should be."""
    with flipping(folder, is_here=rank == 1):
        given = options(folder, rank, 1)
        handle = bcp.save(folder / "ckpt", state_of(rank, 1), step=1, async_save=True, options=given, to="memory")
        with pytest.raises(bcp.CheckpointCorruptError) as raised:
            handle.held("host")
        with pytest.raises(bcp.CheckpointCorruptError):
            handle.result()
        after = bcp.save(folder / "ckpt", state_of(rank, 2), step=2, async_save=True, options=given, to="memory")
    return raised.value.kind, raised.value.message, after.held("host").tier


def test_bits_that_flip_in_a_slot_are_found_when_it_is_copied(workers: WorkerPool, tmp_path: Path) -> None:
    for kind, message, after in workers.run(save_flipped, tmp_path, world_size=2):
        assert (kind, after) == ("checksum", "memory")
        assert "came from the memory of rank 1 with another checksum than when they were staged" in message
        assert "the next save places its copies anew" in message


def save_flipped_in_a_group(rank: int, world_size: int, folder: Path, memory: dict[str, int]) -> Any:
    """A bit of the slot of rank 1 flips, in a save of the ranks 1 to 3 that makes parity."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    given = options(folder, rank, 1, **memory)
    with flipping(folder, is_here=rank == 1):
        state = state_of(rank, 1)
        handle = bcp.save(
            folder / "ckpt", state, step=1, async_save=True, process_group=group, options=given, to="memory"
        )
        with pytest.raises(bcp.CheckpointCorruptError) as raised:
            handle.result()
    return raised.value.message, raised.value.ranks


@pytest.mark.parametrize("memory", [{"copies": 2}, {"copies": 1, "parity": 1}])
def test_a_rank_whose_bits_flip_is_named_by_its_global_rank(
    workers: WorkerPool, tmp_path: Path, memory: dict[str, int]
) -> None:
    for message, ranks in workers.run(save_flipped_in_a_group, tmp_path, memory, world_size=4)[1:]:
        assert "came from the memory of rank 1 with another checksum" in message
        assert ranks == (1,)


def save_without_room(rank: int, world_size: int, folder: Path) -> tuple[str, str, str, list[str]]:
    image = 4 * (NUM_ELEMENTS + 2000)
    with noted_warnings() as logged, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = options(folder, rank, 1, max_bytes=2 * image + (1 << 20))
        bcp.save(folder / "ckpt", state_of(rank, 0), step=0, options=given)
        handle = bcp.save(folder / "ckpt", state_of(rank, 1), step=1, async_save=True, options=given)
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            handle.held("host")
        tiers = handle.held("process").tier, handle.result().tier
    return raised.value.kind, *tiers, logged


def save_while_a_host_has_no_room(rank: int, world_size: int, folder: Path, steps: range, without: int) -> list[int]:
    """Returns the number of slots with copies that the host has after each save. The host `without` has no room."""
    found = []

    def refuse(*_: object, **__: object) -> None:
        raise bcp.CheckpointSaveError("there is no room", kind="no_space")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == without:
            patch.setattr(CopySlots, "take", refuse)
        for step in steps:
            given = options(folder, rank, 1)
            bcp.save(folder / "ckpt", state_of(rank, step), step=step, async_save=True, options=given).result()
            ((job, _),) = find_jobs(str(given.memory.root))  # type: ignore[union-attr]
            found.append(len(scan_copies(job, "copies")))
    return found


def test_copies_for_a_host_do_not_pile_up_while_it_has_no_room_for_those_of_others(
    workers: WorkerPool, tmp_path: Path
) -> None:
    """Each save kept another slot on the hosts that had room, until they had none."""
    _, first = workers.run(save_while_a_host_has_no_room, tmp_path, range(2), -1, world_size=2)
    of_host, of_other = workers.run(save_while_a_host_has_no_room, tmp_path, range(2, 5), 1, world_size=2)
    assert (max(of_host), set(of_other)) == (3, {first[-1]})  # the last whole copies, those that failed, and new ones
    of_host, _ = workers.run(save_while_a_host_has_no_room, tmp_path, range(5, 7), -1, world_size=2)
    assert of_host[-1] == 2


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Yields the warnings that the library's log gets, in order."""
    handler, found = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytecheckpoint")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def test_a_host_without_room_for_copies_costs_no_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    results = workers.run(save_without_room, tmp_path, world_size=2)
    assert [result[:3] for result in results] == [("no_space", "memory", "storage")] * 2
    of_coordinator, of_other = (logged for *_, logged in results)
    for step, warning in enumerate(of_coordinator):
        assert f"step_{step:08} goes on to storage without copies in memory: " in warning
        assert "the next save places its copies anew" in warning
    assert (len(of_coordinator), of_other) == (2, [])


def save_failing_to_tidy(rank: int, world_size: int, folder: Path, to: str) -> tuple[str, list[str]]:
    """Rank 1 cannot tidy up when all ranks hold the save."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    given = replace(options(folder, 0, world_size, copies=1), timeout_s=90)
    with pytest.MonkeyPatch.context() as patch, noted_warnings() as logged, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 1:
            patch.setattr(JobMemory, "settle", refuse)
        info = bcp.save(folder / "ckpt", state_of(rank, 0), step=0, options=given, to=to).result()
    return info.tier, [each for each in logged if "tidied" in each]


@pytest.mark.parametrize("to", ["memory", "storage"])
def test_a_rank_that_cannot_tidy_up_does_not_fail_alone(workers: WorkerPool, tmp_path: Path, to: str) -> None:
    """The others had left the save, whose verdict it waited for, or waited in the next phase for this rank."""
    started = time.monotonic()
    (first, told), (second, told_other) = workers.run(save_failing_to_tidy, tmp_path, to, world_size=2)
    assert (first, second, told, len(told_other)) == (to, to, [], 2)
    assert time.monotonic() - started < 60


def save_without_threads(
    rank: int, world_size: int, folder: Path, ranks: list[int]
) -> tuple[str, tuple[int, ...], str, str]:
    """These ranks can have no threads for copies."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if rank in ranks and thread.name.startswith("bcp-copies"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(threading.Thread, "start", start_others)
        memory = bcp.Memory(root=folder / f"host{rank}")
        given = bcp.SaveOptions(memory=memory, timeout_s=90)
        handle = bcp.save(folder / "ckpt", state_of(rank, 0), step=0, async_save=True, options=given)
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            handle.held("host")
        return raised.value.message, raised.value.ranks, handle.held("process").tier, handle.result().tier


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=str)
def test_a_rank_that_can_have_no_threads_for_copies_costs_no_checkpoint(
    workers: WorkerPool, tmp_path: Path, ranks: list[int]
) -> None:
    started = time.monotonic()
    for message, *tiers in workers.run(save_without_threads, tmp_path, ranks, world_size=2):
        assert f"rank {ranks[0]} on " in message
        assert "the process can have no more threads" in message
        assert tiers == [(), "memory", "storage"]
    assert time.monotonic() - started < 60  # ranks that waited for one another would wait for 90


def save_without_room_or_disk(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    """The copies of a save fail, and so does its commit, later. Returns what `held` and the next save raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = options(folder, rank, 1, max_bytes=8 * (NUM_ELEMENTS + 2000) + (1 << 20))
        with before(SAVE_PHASES["reporting"], raising(OSError(5, "the disk fell off"))):
            handle = bcp.save(folder / "ckpt", state_of(rank, 0), step=0, async_save=True, options=given)
            with pytest.raises(bcp.CheckpointSaveError) as of_copies:
                handle.held("host")
            wait([handle._progress.outcome])
        with pytest.raises(bcp.CheckpointSaveError) as of_next:
            bcp.save(folder / "ckpt", state_of(rank, 1), step=1, options=given)
    return of_copies.value.kind, of_next.value.message


def test_an_error_of_copies_does_not_hide_that_the_save_failed_later(workers: WorkerPool, tmp_path: Path) -> None:
    for kind, message in workers.run(save_without_room_or_disk, tmp_path, world_size=2):
        assert kind == "no_space"
        assert "this one was not begun" in message
        assert "the disk fell off" in message


def save_to_full_memory(rank: int, world_size: int, folder: Path) -> str:
    """The save to memory fails because its copies fail, which `held` has raised: the next save is begun."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = options(folder, rank, 1, max_bytes=8 * (NUM_ELEMENTS + 2000) + (1 << 20))
        handle = bcp.save(folder / "ckpt", state_of(rank, 0), step=0, async_save=True, options=given, to="memory")
        with pytest.raises(bcp.CheckpointSaveError):
            handle.held("host")
        wait([handle._progress.outcome])
        assert handle._progress.error is not None
        return bcp.save(folder / "ckpt", state_of(rank, 1), step=1, options=bcp.SaveOptions()).result().tier


def test_an_error_of_copies_with_which_the_save_ends_is_raised_once(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_to_full_memory, tmp_path, world_size=2) == ["storage"] * 2


def save_and_die(rank: int, world_size: int, folder: Path, dying_at: Seam) -> tuple[str, str, tuple[int, ...], str]:
    """Rank 1 dies when it calls this function."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = replace(options(folder, rank, 1), timeout_s=90)
        bcp.save(folder / "ckpt", state_of(rank, 1), step=1, options=given, to="memory")
        if rank == 1:
            patch.setattr(dying_at.owner, dying_at.name, die)
        handle = bcp.save(folder / "ckpt", state_of(rank, 2), step=2, async_save=True, options=given, to="memory")
        tier = handle.held("process").tier
        with pytest.raises(bcp.CheckpointError) as raised:
            handle.held("host")
        with pytest.raises(bcp.CheckpointError):
            handle.result()
        tier_after = handle.held("process").tier
    return tier, raised.value.kind, raised.value.ranks, tier_after


@pytest.mark.parametrize("dying_at", [Seam(connected_threads, "connect"), Seam(transfer, "check_digest")], ids=str)
def test_a_peer_that_dies_is_named_at_once_and_what_the_process_holds_stays(
    workers: WorkerPool, tmp_path: Path, dying_at: Seam
) -> None:
    started = time.monotonic()
    first, second, third = workers.run_each(save_and_die, tmp_path, dying_at, world_size=3)
    assert isinstance(second.error, WorkerDied)
    for outcome in (first, third):
        assert outcome.value == ("memory", "rank_missing", (1,), "memory")
    assert time.monotonic() - started < 60  # a rank that was waited for would take all of 90
    own, _ = held_on(tmp_path, 0)
    assert len({name.partition("-")[0] for name in own}) == 2  # both steps


def save_while_training(rank: int, world_size: int, folder: Path) -> tuple[int, bool]:
    """Counts the steps of training that are made before the copies of a save are there."""
    entered, may_go_on = threading.Event(), threading.Event()
    check = transfer.check_digest

    def waiting(*arguments: Any, **names: Any) -> None:
        entered.set()
        may_go_on.wait(20)
        check(*arguments, **names)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(transfer, "check_digest", waiting)
        given = options(folder, rank, 1)
        state = state_of(rank, 1)
        handle = bcp.save(folder / "ckpt", state, step=1, async_save=True, options=given, to="memory")
        handle.staged()
        handle.held("process")
        entered.wait(20)
        num_steps = 0
        for _ in range(100):
            state[f"of_rank_{rank}"] += 1
            num_steps += 1
        was_done = handle.done()
        may_go_on.set()
        handle.held("host")
    return num_steps, was_done


def test_training_goes_on_while_copies_are_sent_and_changes_nothing_of_them(
    workers: WorkerPool, tmp_path: Path
) -> None:
    assert workers.run(save_while_training, tmp_path, world_size=2) == [(100, False)] * 2
    assert held_on(tmp_path, 0)[0].items() <= held_on(tmp_path, 1)[1].items()


def save_with_broken_copies(rank: int, world_size: int, folder: Path, steps: list[int], broken: list[int]) -> list[str]:
    """Saves; the copies of some steps break for ever."""
    answers = []
    check = transfer.check_digest

    def breaking(*arguments: Any, **names: Any) -> None:
        if step in broken:
            raise missing_error((0,), "is cut off")
        check(*arguments, **names)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(transfer, "check_digest", breaking)
        for step in steps:
            given = options(folder, rank, 1)
            handle = bcp.save(
                folder / "ckpt", state_of(rank, step), step=step, async_save=True, options=given, to="memory"
            )
            handle.held("process")
            answers.append("host" if handle.exception() is None else "process")
    return answers


def end_and_resume(rank: int, world_size: int, folder: Path, hosts: list[int]) -> tuple[int | None, bool]:
    """Resumes in processes that hold nothing yet."""
    for memory in process_state().memories.values():
        memory.close()
    process_state().memories.clear()
    state = {name: torch.zeros_like(tensor) for other in range(2) for name, tensor in state_of(other, 0).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bcp.resume(folder / "ckpt", state, options=options(folder, hosts[rank], 1))
    step = report.step if report is not None and report.step is not None else 0
    expected = {name: tensor for other in range(2) for name, tensor in state_of(other, step).items()}
    return step, all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_the_newest_save_that_survives_a_host_is_kept_until_copies_succeed_again(
    workers: WorkerPool, tmp_path: Path, lost: int | None
) -> None:
    answers = workers.run(save_with_broken_copies, tmp_path, [1, 2, 3, 4], [2, 3, 4], world_size=2)
    assert answers == [["host", "process", "process", "process"]] * 2
    if lost is not None:
        shutil.rmtree(tmp_path / f"host{lost}")
    hosts = [7 if host == lost else host for host in range(2)]
    expected = 4 if lost is None else 1
    assert workers.run(end_and_resume, tmp_path, hosts, world_size=2) == [(expected, True)] * 2


def test_two_slots_are_enough_again_once_copies_succeed(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_with_broken_copies, tmp_path, [1, 2, 3, 4, 5], [2, 3], world_size=2)
    for host in range(2):
        ((job, _),) = find_jobs(str(tmp_path / f"host{host}"))
        assert len(list(slot_file.scan(job.slots))) == 2
    shutil.rmtree(tmp_path / "host0")
    assert workers.run(end_and_resume, tmp_path, [7, 1], world_size=2) == [(5, True)] * 2


def save_where_two_slots_fit(rank: int, world_size: int, folder: Path) -> list[str]:
    image = 4 * (NUM_ELEMENTS + 1000) + (1 << 16)
    given_options = options

    def smaller(*arguments: Any, **memory: Any) -> bcp.SaveOptions:
        return given_options(*arguments, **memory, max_bytes=4 * image)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "options", smaller)
        return save_with_broken_copies(rank, world_size, folder, [1, 2, 3], [2, 3])


def test_without_room_for_a_third_slot_saves_go_on(workers: WorkerPool, tmp_path: Path) -> None:
    answers = workers.run(save_where_two_slots_fit, tmp_path, world_size=2)
    assert answers == [["host", "process", "process"]] * 2
    assert workers.run(end_and_resume, tmp_path, [0, 1], world_size=2) == [(3, True)] * 2
