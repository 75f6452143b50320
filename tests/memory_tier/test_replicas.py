"""Bytes that ranks of several hosts hold alike are staged by two of them: nothing is sent, and replicas that have come
apart are found. Ranks with a memory root of their own stand for hosts.
"""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.distributed import transfer
from bytecheckpoint.memory_tier import protect
from bytecheckpoint.saving import global_plan
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, find_jobs
from distributed.workers import WorkerPool

SHAPE = (803, 257)
HSDP = ([0, 0, 1, 1], "hsdp")
DDP = ([0, 1, 2, 2], "ddp")


def state_of(kind: str, step: int) -> dict[str, Any]:
    """`hsdp`: two groups of ranks hold a sharded model each. `ddp`: every rank has all of it. `zero`: the model as with
    `ddp`, and the state of the optimizer sharded over all ranks.
    """
    num_ranks = dist.get_world_size()
    is_hybrid = kind == "hsdp" and num_ranks == 4
    mesh = init_device_mesh("cpu", (2, 2) if is_hybrid else (num_ranks,))
    placements = [Replicate(), Shard(0)] if is_hybrid else [Shard(0) if kind == "hsdp" else Replicate()]
    values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1000 * step
    state: dict[str, Any] = {
        f"layer{number}": distribute_tensor(values + number, mesh, placements) for number in range(3)
    }
    state |= {f"b{number}": torch.full((17,), float(step + number)) for number in range(4)}
    state |= {"half": torch.full((999,), float(step), dtype=torch.bfloat16), "nothing": torch.zeros(0, 3), "step": step}
    if kind == "zero":
        state["moment"] = distribute_tensor(values * 2, init_device_mesh("cpu", (num_ranks,)), [Shard(0)])
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differs(state: dict[str, Any], kind: str, step: int) -> list[str]:
    expected = state_of(kind, step)
    tensors = [name for name in expected if name != "step"]
    odd = [name for name in tensors if not torch.equal(local(state[name]), local(expected[name]))]
    return odd + ["step"] * (state["step"] != step)


def options(folder: Path, host: int, memory: dict[str, Any]) -> bcp.SaveOptions:
    return bcp.SaveOptions(memory=bcp.Memory(root=folder / f"host{host}", **memory), timeout_s=20)


class Counted:
    """The bytes that a rank fetches from the memory of others, and the plans that it makes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self.num_plans = 0
        fetch, plan = transfer.transfer, global_plan.plan_files

        def fetching(*arguments: Any, fetches: Any, **names: Any) -> None:
            self.num_bytes += sum(piece.byte_length for each in fetches for piece in each.pieces)
            fetch(*arguments, fetches=fetches, **names)

        def planning(*arguments: Any, **names: Any) -> Any:
            self.num_plans += 1
            return plan(*arguments, **names)

        patch.setattr(protect, "transfer", fetching)
        patch.setattr(global_plan, "plan_files", planning)


Saved = tuple[list[str], int, int]


def save(
    rank: int, world_size: int, folder: Path, hosts: list[int], kind: str, to: str, memory: dict[str, Any]
) -> Saved:
    """Saves steps 1 to 3; returns the tiers, the bytes that were fetched, and how often a plan was made."""
    given, tiers = options(folder, hosts[rank], memory), []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = Counted(patch)
        for step in range(1, 4):
            state = state_of(kind, step)
            handle = bcp.save(folder / "ckpt", state, step=step, async_save=True, options=given, to=to)
            tiers.append(handle.held("host").tier)
            handle.result()
    return tiers, counted.num_bytes, counted.num_plans


def end_processes(rank: int, world_size: int) -> None:
    """Gives up what the process holds, as its death would."""
    memories = process_state().memories
    for memory in memories.values():
        memory.close()
    memories.clear()


def resume(
    rank: int, world_size: int, folder: Path, hosts: list[int], kind: str, memory: dict[str, Any]
) -> tuple[int, list[str], int]:
    state = state_of(kind, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bcp.resume(folder / "ckpt", state, options=options(folder, hosts[rank], memory))
    assert report is not None
    assert report.step is not None
    return report.step, differs(state, kind, report.step), report.sources["storage"]


def job_on(folder: Path, host: int) -> JobFolder:
    ((job, _),) = find_jobs(str(folder / f"host{host}"))
    return job


def staged_on(folder: Path, host: int) -> dict[str, bytes]:
    """The data files of the newest version that ranks of a host have staged, by name."""
    job = job_on(folder, host)
    newest = version_files.read_versions(job)[-1]
    return {
        name: Path(place.path).read_bytes()[place.byte_offset :][: place.byte_length]
        for slot in slot_file.scan(job.slots)
        if slot.save_id == newest.record.save_id
        for name, place in slot.places().items()
    }


COPIES: dict[str, Any] = {"copies": 2}


@pytest.mark.parametrize(("hosts", "kind"), [HSDP, DDP])
@pytest.mark.parametrize("to", ["memory", "storage"])
def test_each_replicated_byte_is_staged_on_two_hosts_and_none_is_sent(
    workers: WorkerPool, tmp_path: Path, hosts: list[int], kind: str, to: str
) -> None:
    saved = workers.run(save, tmp_path, hosts, kind, to, COPIES, world_size=4)
    assert saved == [(["memory"] * 3, 0, 1)] * 4  # and the plan is found again
    files = version_files.read_versions(job_on(tmp_path, 0))[-1].files
    staged = [staged_on(tmp_path, host) for host in sorted({*hosts})]
    holders = {file.name: [of_host[file.name] for of_host in staged if file.name in of_host] for file in files}
    assert {name: len(contents) for name, contents in holders.items()} == dict.fromkeys(holders, 2)
    assert all(first == second for first, second in holders.values())
    assert [list(scan_copies(job_on(tmp_path, host), "copies")) for host in sorted({*hosts})] == [[]] * len(staged)


def test_a_checkpoint_in_storage_has_each_byte_once(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save, tmp_path, *HSDP, "storage", COPIES, world_size=4)
    num_bytes = 3 * SHAPE[0] * SHAPE[1] * 4 + 4 * 17 * 4 + 999 * 2
    stored = [path.stat().st_size for path in (tmp_path / "ckpt").rglob("data/*.safetensors") if "3/data" in str(path)]
    assert num_bytes <= sum(stored) <= num_bytes + 4096 * len(stored)


@pytest.mark.parametrize(("hosts", "kind"), [HSDP, DDP])
@pytest.mark.parametrize("world_size", [4, 3, 1])
def test_a_lost_host_is_resumed_from_the_replicas(
    workers: WorkerPool, tmp_path: Path, hosts: list[int], kind: str, world_size: int
) -> None:
    workers.run(save, tmp_path, hosts, kind, "memory", COPIES, world_size=4)
    for lost in sorted({*hosts}):
        shutil.copytree(tmp_path, tmp_path.parent / "kept", dirs_exist_ok=True)
        workers.run(end_processes, world_size=4)
        shutil.rmtree(tmp_path / f"host{lost}")
        left = [host for host in sorted({*hosts}) if host != lost]
        back = [*left, 8, 9, 8][:world_size] if world_size >= len(left) else []
        if back:
            resumed = workers.run(resume, tmp_path, back, kind, COPIES, world_size=world_size)
            assert resumed == [(3, [], 0)] * world_size
        workers.run(end_processes, world_size=4)
        shutil.rmtree(tmp_path)
        shutil.move(tmp_path.parent / "kept", tmp_path)


def test_only_what_has_no_replica_is_sent(workers: WorkerPool, tmp_path: Path) -> None:
    hosts = [0, 0, 1, 1]
    saved = workers.run(save, tmp_path, hosts, "zero", "memory", COPIES, world_size=4)
    assert [tiers for tiers, *_ in saved] == [["memory"] * 3] * 4
    sharded = 3 * SHAPE[0] * SHAPE[1] * 4
    assert sharded <= sum(num_bytes for _, num_bytes, _ in saved) <= sharded + 3 * 4 * 4096
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / "host1")
    assert workers.run(resume, tmp_path, [0, 5, 5, 5], "zero", COPIES, world_size=4) == [(3, [], 0)] * 4
    workers.run(end_processes, world_size=4)


PARITY: dict[str, Any] = {"copies": 1, "parity": 1}


@pytest.mark.parametrize(("hosts", "kind"), [HSDP, DDP])
def test_replicas_need_no_parity(workers: WorkerPool, tmp_path: Path, hosts: list[int], kind: str) -> None:
    """Not even three domains, which parity needs."""
    saved = workers.run(save, tmp_path, hosts, kind, "memory", PARITY, world_size=4)
    assert [(tiers, num_bytes) for tiers, num_bytes, _ in saved] == [(["memory"] * 3, 0)] * 4
    assert list(scan_copies(job_on(tmp_path, 0), "parity")) == []


def test_parity_covers_what_has_no_replica(workers: WorkerPool, tmp_path: Path) -> None:
    hosts = [0, 1, 2, 2]
    saved = workers.run(save, tmp_path, hosts, "zero", "memory", PARITY, world_size=4)
    assert [tiers for tiers, *_ in saved] == [["memory"] * 3] * 4
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / "host2")
    assert workers.run(resume, tmp_path, [0, 1, 5, 5], "zero", PARITY, world_size=4) == [(3, [], 0)] * 4
    workers.run(end_processes, world_size=4)


def test_a_third_copy_is_sent_where_replicas_are_in_two_domains(workers: WorkerPool, tmp_path: Path) -> None:
    memory = {"copies": 3}
    hosts = [0, 1, 2, 3]  # layer n: ranks 0 and 2, or 1 and 3, have the same rows
    saved = workers.run(save, tmp_path, hosts, "hsdp", "memory", memory, world_size=4)
    assert [tiers for tiers, *_ in saved] == [["memory"] * 3] * 4
    state_bytes = 3 * SHAPE[0] * SHAPE[1] * 4
    assert 0 < sum(num_bytes for _, num_bytes, _ in saved) <= 3 * (state_bytes + 4 * 4096)  # one copy, not two
    workers.run(end_processes, world_size=4)
    for host in (1, 3):  # all who staged the second half
        shutil.rmtree(tmp_path / f"host{host}")
    assert workers.run(resume, tmp_path, [0, 2, 8, 9], "hsdp", memory, world_size=4) == [(3, [], 0)] * 4
    workers.run(end_processes, world_size=4)


def save_in_one_rack(rank: int, world_size: int, folder: Path) -> tuple[str, int]:
    """The replicas are on two hosts of one rack: they fail together."""
    hosts, racks = [0, 0, 1, 1], ["a", "a", "a", "a"]
    given = options(folder, hosts[rank], {"copies": 2, "failure_domain": racks[rank]})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = Counted(patch)
        handle = bcp.save(folder / "ckpt", state_of("hsdp", 1), step=1, async_save=True, options=given, to="memory")
        handle.held("process")
        with pytest.raises(bcp.CheckpointMismatchError, match="needs as many failure domains") as raised:
            handle.held("host")
    return raised.value.kind, counted.num_bytes


def test_replicas_in_one_rack_are_none(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_in_one_rack, tmp_path, world_size=4) == [("conflict", 0)] * 4


def save_apart(rank: int, world_size: int, folder: Path, apart: int) -> list[tuple[list[str], int]]:
    """Some values of layer1 change on one rank. Returns what each of two saves warns of, and the bytes it fetches."""
    hosts, kind = HSDP
    given, told = options(folder, hosts[rank], COPIES), []
    for step in (1, 2):
        state = state_of(kind, step)
        if rank == apart:
            local(state["layer1"])[5:9] += 0.5
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counted = Counted(patch)
            handle = bcp.save(folder / "ckpt", state, step=step, async_save=True, options=given, to="memory")
            assert handle.held("host").tier == "memory"
            handle.result()
        texts = [str(each.message) for each in caught if "replicas are not alike" in str(each.message)]
        told.append((texts, counted.num_bytes))
    return told


@pytest.mark.parametrize("apart", [0, 2])
@pytest.mark.parametrize("lost", [0, 1])
def test_replicas_that_come_apart_are_named_at_each_save_and_the_writers_bytes_are_held_twice(
    workers: WorkerPool, tmp_path: Path, apart: int, lost: int
) -> None:
    told = workers.run(save_apart, tmp_path, apart, world_size=4)
    assert [texts for of_rank in told[1:] for texts, _ in of_rank] == [[]] * 6
    for step, (texts, _) in enumerate(told[0], start=1):
        (text,) = texts
        assert f"step-{step:010d}" in text or f"{step}" in text
        assert re.findall(r"layer\d", text) == ["layer1"]
        assert re.search(r"layer1: xxh3 [0-9a-f]{16} on rank [02], [0-9a-f]{16} on rank [02]", text)
    assert sum(of_rank[0][1] for of_rank in told) > 0  # in place of the replica that does not count
    names = {file.name for file in version_files.read_versions(job_on(tmp_path, 0))[-1].files}
    copies = [{n for slot in scan_copies(job_on(tmp_path, host), "copies") for n in slot.places()} for host in (0, 1)]
    for host in (0, 1):
        assert names <= {*staged_on(tmp_path, host), *copies[host]}
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / f"host{lost}")
    steps = workers.run(resume_apart, tmp_path, [1 - lost, 8, 8, 8], world_size=4)
    assert {step for step, _ in steps} == {2}
    ((_, first), *others) = steps
    assert all(torch.equal(values, first) for _, values in others)  # one of the two, on all ranks
    workers.run(end_processes, world_size=4)


def resume_apart(rank: int, world_size: int, folder: Path, hosts: list[int]) -> tuple[int, torch.Tensor]:
    state = state_of("hsdp", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bcp.resume(folder / "ckpt", state, options=options(folder, hosts[rank], COPIES))
    assert report is not None
    assert report.step is not None
    assert differs(state, "hsdp", report.step) in ([], ["layer1"])
    return report.step, state["layer1"].full_tensor()


def adapted(step: int) -> dict[str, Any]:
    """A base that never changes, sharded within each of two replicas, and an adapter that does."""
    state = state_of("hsdp", 0)
    mesh = init_device_mesh("cpu", (2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(),))
    placements = [Replicate(), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    return state | {"adapter": distribute_tensor(torch.full((64, 33), float(step)), mesh, placements), "step": step}


def save_reusing(rank: int, world_size: int, folder: Path) -> list[tuple[int, int, int]]:
    """Returns of each save the bytes that were reused, those that this rank fetched, and the plans that it made."""
    given, told = replace(options(folder, HSDP[0][rank], COPIES), reuse=True), []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the memory root")  # no other: no replica is told to be another
        for step in range(1, 6):
            counted = Counted(patch)
            handle = bcp.save(folder / "ckpt", adapted(step), step=step, async_save=True, options=given)
            assert handle.held("host").tier == "memory"
            told.append((handle.result().reused_bytes, counted.num_bytes, counted.num_plans))
            patch.undo()
    return told


def test_a_save_that_reuses_files_still_stages_all_of_them_on_two_hosts(workers: WorkerPool, tmp_path: Path) -> None:
    told = workers.run(save_reusing, tmp_path, world_size=4)
    base_bytes = 3 * SHAPE[0] * SHAPE[1] * 4
    assert [reused >= base_bytes for reused, *_ in told[0]] == [False] * 3 + [True] * 2  # found unchanged by two saves
    assert {num_bytes for of_rank in told for _, num_bytes, _ in of_rank} == {0}
    assert told[0][-1][2] == 0  # the plan of the save before is found again
    files = version_files.read_versions(job_on(tmp_path, 0))[-1].files
    staged = [staged_on(tmp_path, host) for host in (0, 1)]
    assert staged[0] == staged[1]
    assert {*staged[0]} == {file.name for file in files}
    for step in range(1, 5):
        bcp.delete(tmp_path / "ckpt", step)
    assert workers.run(load_adapted, tmp_path, world_size=2) == [5, 5]  # whole by itself
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / "host0")
    assert workers.run(resume_adapted, tmp_path, [1, 8, 8, 8], world_size=4) == [(5, 0)] * 4
    workers.run(end_processes, world_size=4)


def load_adapted(rank: int, world_size: int, folder: Path) -> int:
    state = adapted(0)
    bcp.load(folder / "ckpt", state)
    return checked_step(state)


def resume_adapted(rank: int, world_size: int, folder: Path, hosts: list[int]) -> tuple[int, int]:
    """Returns the step, and how many files came from storage."""
    state = adapted(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bcp.resume(folder / "ckpt", state, options=options(folder, hosts[rank], COPIES))
    assert report is not None
    return checked_step(state), report.sources["storage"]


def checked_step(state: dict[str, Any]) -> int:
    expected = adapted(state["step"])
    assert all(torch.equal(local(state[name]), local(expected[name])) for name in expected if name != "step")
    return int(state["step"])
