"""Memory checkpoints of several ranks on several hosts: every host is a memory root of its own, and any layout resumes
what any other one saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from distributed.layouts import LAYOUTS, Builder, differences
from distributed.workers import WorkerError, WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:the memory root")
WAYS = [("fsdp3", "tp2"), ("hsdp2x2", "single"), ("single", "fsdp4"), ("tp2", "hsdp2x2"), ("fsdp4", "fsdp3")]


def options_of(rank: int, memory: str, num_hosts: int, **others: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(memory=bcp.Memory(copies=1, root=f"{memory}/host{rank % num_hosts}"), timeout_s=60, **others)


def save_to_memory(rank: int, world_size: int, layout: str, path: str, memory: str, num_hosts: int) -> str:
    options = options_of(rank, memory, num_hosts)
    builder = Builder(layout, rank)
    bcp.save(path, builder.noise("adamw"), step=1, options=options, to="memory")
    handle = bcp.save(path, builder.truth("adamw"), step=2, async_save=True, options=options, to="memory")
    return handle.held("process").save_id


def resume(
    rank: int, world_size: int, layout: str, path: str, memory: str, num_hosts: int
) -> tuple[list[str], dict[str, int], int | None]:
    builder = Builder(layout, rank)
    state = builder.noise("adamw")
    report = bcp.resume(path, state, options=options_of(rank, memory, num_hosts))
    assert report is not None
    return differences(state, builder.truth("adamw")), dict(report.sources), report.step


@pytest.mark.parametrize(("source", "destination"), [way for way in WAYS if {*way} <= LAYOUTS.keys()])
def test_any_layout_resumes_what_any_other_holds(
    workers: WorkerPool, tmp_path: Path, source: str, destination: str
) -> None:
    resume_each(workers, tmp_path, source, [destination], num_hosts=min(2, LAYOUTS[source].world_size))


def test_some_of_the_hosts_alone_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    path, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    workers.run(save_to_memory, "fsdp4", path, memory, 2, world_size=4)
    with pytest.raises(WorkerError, match="can be resumed"):
        workers.run(resume, "single", path, memory, 2, world_size=1)


@pytest.mark.long
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_resumes_what_every_other_holds(
    workers: WorkerPool, tmp_path: Path, source: str, num_hosts: int
) -> None:
    resume_each(workers, tmp_path, source, [*LAYOUTS], num_hosts=min(num_hosts, LAYOUTS[source].world_size))


def resume_each(
    workers: WorkerPool, tmp_path: Path, source: str, destinations: Sequence[str], *, num_hosts: int
) -> None:
    path, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    workers.run(save_to_memory, source, path, memory, num_hosts, world_size=LAYOUTS[source].world_size)
    for destination in destinations:
        world_size = LAYOUTS[destination].world_size
        try:
            found = workers.run(resume, destination, path, memory, num_hosts, world_size=world_size)
        except WorkerError as error:  # ranks on some of the hosts see all only of what has replicas there
            if world_size >= num_hosts or "can be resumed" not in str(error):
                raise
            continue
        for wrong, sources, step in found:
            assert (wrong, step) == ([], 2)
            assert sources["memory"] + sources["peer"] > 0
            assert sources["storage"] == 0


def damage_newest(memory: str, host: int) -> None:
    ((job, _),) = find_jobs(f"{memory}/host{host}")
    newest = version_files.read_versions(job)[-1].record.save_id
    for slot in slot_file.scan(job.slots):
        if slot.save_id == newest and slot.places():
            for place in slot.places().values():
                with open(place.path, "r+b") as file:
                    file.seek(place.byte_offset + place.byte_length - 3)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 64]))
            return
    raise AssertionError(f"host {host} holds no file of {newest}")


def resume_step(rank: int, world_size: int, path: str, memory: str, num_hosts: int) -> tuple[int, float]:
    state = {"x": torch.zeros(5000, 3), f"of rank {rank}": torch.zeros(5000)}
    report = bcp.resume(path, state, options=options_of(rank, memory, num_hosts))
    assert report is not None
    assert report.step is not None
    assert all(bool((tensor == report.step).all()) for tensor in state.values())
    return report.step, float(state["x"][0, 0])


def save_steps(rank: int, world_size: int, path: str, memory: str, num_hosts: int, steps: list[int]) -> None:
    for step in steps:
        state = {"x": torch.full((5000, 3), float(step)), f"of rank {rank}": torch.full((5000,), float(step))}
        bcp.save(path, state, step=step, options=options_of(rank, memory, num_hosts), to="memory")


def test_damage_on_one_host_takes_all_ranks_to_the_version_before(workers: WorkerPool, tmp_path: Path) -> None:
    path, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    workers.run(save_steps, path, memory, 2, [1, 2, 3], world_size=4)
    assert {step for step, _ in workers.run(resume_step, path, memory, 2, world_size=4)} == {3}
    damage_newest(memory, 1)
    assert {step for step, _ in workers.run(resume_step, path, memory, 2, world_size=4)} == {2}


def test_the_manifest_is_on_every_host_and_two_slots_a_rank(workers: WorkerPool, tmp_path: Path) -> None:
    path, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    workers.run(save_steps, path, memory, 2, [1, 2, 3, 4], world_size=4)
    ids = []
    for host in range(2):
        ((job, _),) = find_jobs(f"{memory}/host{host}")
        assert len(list(slot_file.scan(job.slots))) == 4
        newest = version_files.read_versions(job)[-1]
        assert newest.is_complete
        ids.append((newest.record.save_id, newest.content))
    assert ids[0] == ids[1]


def save_with_labels(rank: int, world_size: int, path: str, memory: str) -> None:
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, failure_domain=f"rack {rank}", root=memory))
    bcp.save(path, {"x": torch.zeros(10)}, step=1, options=options, to="memory")


def test_ranks_of_one_host_with_other_labels_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="share a memory root"):
        workers.run(save_with_labels, str(tmp_path / "ckpt"), str(tmp_path / "memory"), world_size=2)


def save_with_other_copies(rank: int, world_size: int, path: str, memory: str) -> None:
    options = bcp.SaveOptions(memory=bcp.Memory(max_bytes=(rank + 1) << 30, root=memory))
    bcp.save(path, {"x": torch.zeros(10)}, step=1, options=options, to="memory")


def test_ranks_with_other_limits_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="different places"):
        workers.run(save_with_other_copies, str(tmp_path / "ckpt"), str(tmp_path / "memory"), world_size=2)


def fail_to_resume(rank: int, world_size: int, path: str, memory: str) -> str:
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.resume(f"{path}{rank}", {"x": torch.zeros(10)}, options=options_of(0, memory, 1))
    return caught.value.kind


def test_ranks_that_resume_other_paths_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    kinds = workers.run(fail_to_resume, str(tmp_path / "ckpt"), str(tmp_path / "memory"), world_size=2)
    assert kinds == ["conflict", "conflict"]
