"""Hosts that are lost: their memory roots are erased, and the job resumes from what other hosts hold of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seam, before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.distributed.liveness import connected_threads
from bytecheckpoint.memory_tier import rebuild
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from distributed.workers import WorkerPool

SHAPE = (601, 301)


def state_of(step: int) -> dict[str, Any]:
    """A tensor whose rows the ranks share, and small ones that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1000 * step
    small = {f"b{number}": torch.full((17,), float(step + number)) for number in range(5)}
    whole = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in small.items()}
    return {"w": distribute_tensor(values, mesh, [Shard(0)]), **whole, "step": step}


def differs(state: dict[str, Any], step: int) -> list[str]:
    expected = state_of(step)
    tensors = [name for name in expected if name != "step"]
    odd = [name for name in tensors if not torch.equal(state[name].to_local(), expected[name].to_local())]
    return odd + ["step"] * (state["step"] != step)


def options(folder: Path, host: int, timeout_s: float = 20, **memory: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(memory=bcp.Memory(root=folder / f"host{host}", **memory), timeout_s=timeout_s)


def save(rank: int, world_size: int, folder: Path, hosts: list[int], steps: range, memory: dict[str, Any]) -> list[str]:
    """`hosts` has the host of each rank."""
    tiers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            given = options(folder, hosts[rank], **memory)
            handle = bcp.save(folder / "ckpt", state_of(step), step=step, async_save=True, options=given, to="memory")
            tiers.append(handle.held("host").tier)
    return tiers


def end_processes(rank: int, world_size: int) -> None:
    """Gives up what the process holds, as its death would."""
    memories = process_state().memories
    for memory in memories.values():
        memory.close()
    memories.clear()


def resume(
    rank: int, world_size: int, folder: Path, hosts: list[int], memory: dict[str, Any]
) -> tuple[int, list[str], dict[str, int]]:
    state = state_of(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bcp.resume(folder / "ckpt", state, options=options(folder, hosts[rank], **memory))
    assert report is not None
    return report.step, differs(state, report.step), report.sources


COPIES = {"copies": 2}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("world_size", [4, 3, 2, 1])
def test_a_lost_host_is_resumed_from_copies_by_any_number_of_ranks(
    workers: WorkerPool, tmp_path: Path, lost: int, world_size: int
) -> None:
    hosts = [0, 0, 1, 1]
    assert workers.run(save, tmp_path, hosts, range(1, 4), COPIES, world_size=4) == [["memory"] * 3] * 4
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / f"host{lost}")
    new_hosts = [2, 2, 1 - lost, 1 - lost][-world_size:]  # host 2 is new
    results = workers.run(resume, tmp_path, new_hosts, COPIES, world_size=world_size)
    for step, odd, sources in results:
        # A file of each rank, and one of what all ranks hold, which is staged twice.
        assert (step, odd, sources["storage"], sum(sources.values())) == (3, [], 0, 5)
    if len({*new_hosts}) > 1:
        again = workers.run(save, tmp_path, new_hosts, range(4, 6), COPIES, world_size=world_size)
        assert again == [["memory"] * 2] * world_size
        step, odd, _ = workers.run(resume, tmp_path, new_hosts, COPIES, world_size=world_size)[0]
        assert (step, odd) == (5, [])
    workers.run(end_processes, world_size=4)


PARITY = {"copies": 1, "parity": 1}


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 1, 2, 3], [0, 0, 1, 2]])
def test_a_lost_host_is_rebuilt_from_parity(workers: WorkerPool, tmp_path: Path, hosts: list[int], lost: int) -> None:
    if lost not in hosts:
        return
    world_size = len(hosts)
    assert (
        workers.run(save, tmp_path, hosts, range(1, 4), PARITY, world_size=world_size) == [["memory"] * 3] * world_size
    )
    workers.run(end_processes, world_size=world_size)
    shutil.rmtree(tmp_path / f"host{lost}")
    new_hosts = [9 if host == lost else host for host in hosts]
    for step, odd, sources in workers.run(resume, tmp_path, new_hosts, PARITY, world_size=world_size):
        assert (step, odd, sources["storage"]) == (3, [], 0)
        assert sources["parity"] == hosts.count(lost)
    assert (
        workers.run(save, tmp_path, new_hosts, range(4, 6), PARITY, world_size=world_size)
        == [["memory"] * 2] * world_size
    )
    workers.run(end_processes, world_size=world_size)


@pytest.mark.parametrize("name", ["0" * 16, "f" * 16])
def test_a_stray_block_of_another_host_hides_no_parity(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    workers.run(save, tmp_path, [0, 1, 2], range(1, 4), PARITY, world_size=3)
    workers.run(end_processes, world_size=3)
    of_hosts = [find_jobs(str(tmp_path / f"host{host}"))[0][0] for host in (0, 1)]
    newest = max(scan_copies(of_hosts[0], "parity"), key=lambda slot: slot.header.step if slot.header else 0)
    shutil.copy(newest.path, Path(scan_copies(of_hosts[1], "parity")[0].path).with_name(name))
    shutil.rmtree(tmp_path / "host2")
    for step, odd, sources in workers.run(resume, tmp_path, [0, 1, 9], PARITY, world_size=3):
        assert (step, odd, sources["parity"]) == (3, [], 1)
    workers.run(end_processes, world_size=3)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_file_that_proves_damaged_is_rebuilt_from_parity(workers: WorkerPool, tmp_path: Path, damaged: int) -> None:
    hosts = [0, 1, 2]
    workers.run(save, tmp_path, hosts, range(1, 4), PARITY, world_size=3)
    workers.run(end_processes, world_size=3)
    ((job, _),) = find_jobs(str(tmp_path / f"host{damaged}"))
    for slot in slot_file.scan(job.slots):
        if slot.header is not None and slot.header.step == 3:
            place = max(slot.places().values(), key=lambda place: place.byte_length)
            with open(place.path, "r+b") as file:
                file.seek(place.byte_offset + place.byte_length - 1)
                file.write(b"?")
    for step, odd, sources in workers.run(resume, tmp_path, hosts, PARITY, world_size=3):
        assert (step, odd, sources["parity"]) == (3, [], 1)
    workers.run(end_processes, world_size=3)


def resume_without_memory(
    rank: int, world_size: int, folder: Path, hosts: list[int], step: str, ranks: list[int]
) -> tuple[tuple[int, list[str], dict[str, int]], float]:
    """These ranks do not have the memory for this step of a rebuild."""

    def no_memory(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank in ranks:
            patch.setattr(rebuild, step, no_memory)
        return resume(rank, world_size, folder, hosts, {**PARITY, "timeout_s": 90}), time.monotonic() - started


def save_to_storage(rank: int, world_size: int, folder: Path) -> None:
    bcp.save(folder / "ckpt", state_of(0), step=0)


@pytest.mark.parametrize(("rebuild_step", "ranks"), [("map_memory", [0, 1, 2]), ("_offered", [2]), ("_offered", [0])])
def test_a_host_that_ranks_have_no_memory_to_rebuild_gives_way_to_an_older_version(
    workers: WorkerPool, tmp_path: Path, rebuild_step: str, ranks: list[int]
) -> None:
    workers.run(save_to_storage, tmp_path, world_size=3)
    workers.run(save, tmp_path, [0, 1, 2], range(1, 4), PARITY, world_size=3)
    workers.run(end_processes, world_size=3)
    shutil.rmtree(tmp_path / "host2")
    for (step, odd, sources), seconds in workers.run(
        resume_without_memory, tmp_path, [0, 1, 9], rebuild_step, ranks, world_size=3
    ):
        assert (step, odd, sources["parity"]) == (0, [], 0)
        assert seconds < 60  # a rank that waited for another would wait for 90
    workers.run(end_processes, world_size=3)


def resume_failing(rank: int, world_size: int, folder: Path, hosts: list[int], failing: Seam, how: str) -> Any:
    """Rank 2 dies, or has a bug, before it calls this function. Returns what the resume raises, and after how long."""

    def fail() -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError

    started = time.monotonic()
    with before(failing, fail) if rank == 2 else nullcontext(), pytest.raises(bcp.CheckpointError) as raised:
        resume(rank, world_size, folder, hosts, {**PARITY, "timeout_s": 90})
    return raised.value.kind, raised.value.ranks, time.monotonic() - started


@pytest.mark.parametrize(
    ("failing", "how", "kind"),
    [
        (Seam(connected_threads, "connect"), "dies", "rank_missing"),
        (Seam(rebuild._Rebuild, "fetches"), "raises", "rank_failed"),
        (Seam(rebuild._Rebuild, "keep"), "dies", "rank_missing"),
        (Seam(rebuild._Rebuild, "keep"), "raises", "rank_failed"),
    ],
    ids=str,
)
def test_a_rank_that_fails_in_a_rebuild_is_named_at_once(
    workers: WorkerPool, tmp_path: Path, failing: Seam, how: str, kind: str
) -> None:
    workers.run(save, tmp_path, [0, 1, 2], range(1, 4), PARITY, world_size=3)
    workers.run(end_processes, world_size=3)
    shutil.rmtree(tmp_path / "host2")
    outcomes = workers.run_each(resume_failing, tmp_path, [0, 1, 9], failing, how, world_size=3)
    for outcome in outcomes[: 2 if how == "dies" else 3]:
        assert outcome.error is None
        assert outcome.value[:2] == (kind, (2,))
        assert outcome.value[2] < 60  # a rank that was waited for would take all of 90
    workers.run(end_processes, world_size=3)


def go_on(rank: int, world_size: int, folder: Path, hosts: list[int], memory: dict[str, Any]) -> None:
    """Resumes, and holds two steps more in the memory of the hosts that are left."""
    assert resume(rank, world_size, folder, hosts, memory)[:2] == (3, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (4, 5):
            bcp.save(
                folder / "ckpt", state_of(step), step=step, options=options(folder, hosts[rank], **memory), to="memory"
            )
    end_processes(rank, world_size)


@pytest.mark.parametrize(
    ("hosts", "before", "left", "after"),
    [([0, 0, 1], COPIES, [1], COPIES), ([0, 0, 1], COPIES, [1], {"copies": 1}), ([0, 1, 2], PARITY, [1, 2], PARITY)],
    ids=["too few hosts for copies", "no copies asked for", "too few hosts for parity"],
)
def test_copies_are_given_back_once_saves_have_none(
    workers: WorkerPool,
    tmp_path: Path,
    hosts: list[int],
    before: dict[str, Any],
    left: list[int],
    after: dict[str, Any],
) -> None:
    workers.run(save, tmp_path, hosts, range(1, 4), before, world_size=3)
    workers.run(end_processes, world_size=3)
    shutil.rmtree(tmp_path / "host0")
    workers.run(go_on, tmp_path, left, after, world_size=len(left))
    for host in left:
        ((job, _),) = find_jobs(str(tmp_path / f"host{host}"))
        assert scan_copies(job, "copies") + scan_copies(job, "parity") == []
