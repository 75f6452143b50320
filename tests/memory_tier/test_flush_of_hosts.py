"""`bcp memory flush` after the loss of a host: from parity, host by host, and from several memory roots at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from memory_tier.test_lost_hosts import COPIES, PARITY, differs, end_processes, save, state_of

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier.flush import flush
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from distributed.workers import WorkerPool


def load(rank: int, world_size: int, folder: Path) -> tuple[int | None, list[str]]:
    state = state_of(0)
    step = bcp.load(folder / "ckpt", state).step
    return step, differs(state, step or 0)


def damage(root: Path) -> None:
    """Flips a bit of each file that ranks of a host have staged."""
    ((job, _),) = find_jobs(str(root))
    for slot in slot_file.scan(job.slots):
        for place in slot.places().values():
            with open(place.path, "r+b") as file:
                file.seek(place.byte_offset + place.byte_length - 1)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_host_that_is_lost_is_flushed_from_parity(
    workers: WorkerPool, tmp_path: Path, lost: int, at_once: bool
) -> None:
    hosts = [0, 1, 2, 2]
    workers.run(save, tmp_path, hosts, range(1, 4), PARITY, world_size=4)
    workers.run(end_processes, world_size=4)
    shutil.rmtree(tmp_path / f"host{lost}")
    left = [str(tmp_path / f"host{host}") for host in (0, 1, 2) if host != lost]
    done = [flush(str(tmp_path / "ckpt"), roots) for roots in ([left] if at_once else [[root] for root in left])]
    assert [each.is_committed for each in done] == [False] * (len(done) - 1) + [True]
    assert workers.run(load, tmp_path, world_size=2) == [(3, [])] * 2
    assert list((tmp_path / "ckpt").rglob("*parity*")) == []


def test_with_a_damaged_block_of_parity_nothing_is_committed(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save, tmp_path, [0, 1, 2], range(1, 3), PARITY, world_size=3)
    workers.run(end_processes, world_size=3)
    shutil.rmtree(tmp_path / "host0")
    ((job, _),) = find_jobs(str(tmp_path / "host1"))
    for slot in slot_file.scan(f"{job.path}/parity"):
        content = bytearray(Path(slot.path).read_bytes())
        content[5000] ^= 1
        Path(slot.path).write_bytes(content)
    done = flush(str(tmp_path / "ckpt"), [str(tmp_path / f"host{host}") for host in (1, 2)])
    assert not done.is_committed
    assert len(done.missing) == 1  # that of the lost host
    assert bcp.steps(tmp_path / "ckpt") == []


@pytest.mark.parametrize("damaged", [0, 1])
def test_of_several_memory_roots_every_holder_of_a_file_is_tried(
    workers: WorkerPool, tmp_path: Path, damaged: int
) -> None:
    workers.run(save, tmp_path, [0, 0, 1, 1], range(1, 4), COPIES, world_size=4)
    workers.run(end_processes, world_size=4)
    damage(tmp_path / f"host{damaged}")
    done = flush(str(tmp_path / "ckpt"), [str(tmp_path / f"host{host}") for host in (0, 1)])
    assert done.is_committed
    assert workers.run(load, tmp_path, world_size=2) == [(3, [])] * 2
