"""Small tensors that every rank holds, such as an optimizer's `step`, lie side by side in few files: a load reads what
it wants, and opens few files for it. Checkpoints that have them in every rank's file load as well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, raising
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.distributed.liveness import connected_threads
from bytecheckpoint.loading import receive
from bytecheckpoint.planner import deduplicate, read_division, save_plan
from bytecheckpoint.runtime import progress
from distributed.workers import WorkerPool

WIDTH, NUM_LAYERS = 48, 12


class _OpenedFiles:
    """Data files that this process has opened. An audit hook stays for ever, so there is one a process."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".safetensors"):
            self.names.add(arguments[0])


_OPENED: list[_OpenedFiles] = []


def trained(world_size: int, *, num_replicas: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after a step, sharded as FSDP2 has it, or HSDP where there are replicas of the shards."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    shape = (num_replicas, world_size // num_replicas) if num_replicas > 1 else (world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 2  # the same bits on any number of ranks
    optimizer.step()
    return model, optimizer


def local_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [*model.parameters(), *(each for of_one in optimizer.state.values() for each in of_one.values())]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held]


def save_trained(
    rank: int, world_size: int, path: str, num_replicas: int, is_spread: bool, codec: str = "none"
) -> None:
    model, optimizer = trained(world_size, num_replicas=num_replicas, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        if is_spread:  # as earlier versions did
            for module in (deduplicate, save_plan):
                patch.setattr(module, "is_small", lambda _: False)
        bcp.save(path, {"model": model, "optimizer": optimizer}, options=bcp.SaveOptions(codec=codec))


def load_trained(
    rank: int, world_size: int, path: str, num_replicas: int, options: bcp.LoadOptions
) -> tuple[bool, int, int, int]:
    """Whether all is as it was saved; bytes read, bytes wanted, files opened."""
    _OPENED[:] = _OPENED or [_OpenedFiles()]
    expected = local_tensors(*trained(world_size, num_replicas=num_replicas, seed=1))
    model, optimizer = trained(world_size, num_replicas=num_replicas, seed=2)
    _OPENED[0].names.clear()
    report = bcp.load(path, {"model": model, "optimizer": optimizer}, options=options)
    num_opened = len(_OPENED[0].names)
    found = local_tensors(model, optimizer)
    same = all(map(torch.equal, found, expected))
    return same, report.num_bytes_read, sum(tensor.nbytes for tensor in found), num_opened


def save_with(
    workers: WorkerPool, path: Path, *, world_size: int, num_replicas: int = 1, is_spread: bool = False
) -> str:
    workers.run(save_trained, str(path), num_replicas, is_spread, world_size=world_size)
    return str(path)


OFF, ON = bcp.LoadOptions(exchange="off"), bcp.LoadOptions(exchange="on", timeout_s=60)


@pytest.mark.parametrize("world_size", [8, 4])
def test_a_load_reads_what_it_wants_and_opens_few_files(workers: WorkerPool, tmp_path: Path, world_size: int) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=8)
    results = workers.run(load_trained, path, 1, OFF, world_size=world_size)
    assert all(same for same, *_ in results)
    assert sum(num_read for _, num_read, *_ in results) <= 1.02 * sum(num_wanted for *_, num_wanted, _ in results)
    assert max(num_opened for *_, num_opened in results) <= 8 // world_size + 1


@pytest.mark.parametrize("world_size", [3, 5, 6])
def test_a_load_on_other_ranks_opens_the_files_with_its_rows_and_one_more(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=8)
    results = workers.run(load_trained, path, 1, OFF, world_size=world_size)
    assert all(same for same, *_ in results)
    num_rows = -(-WIDTH // world_size)
    for rank, (*_, num_opened) in enumerate(results):
        first, last = rank * num_rows, min((rank + 1) * num_rows, WIDTH) - 1
        of_writer = WIDTH // 8
        assert num_opened <= last // of_writer - first // of_writer + 2


def test_replicas_of_shards_lie_where_one_rank_has_them(workers: WorkerPool, tmp_path: Path) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=8, num_replicas=2)
    results = workers.run(load_trained, path, 2, OFF, world_size=8)
    assert all(same for same, *_ in results)
    assert sum(num_read for _, num_read, *_ in results) <= 1.02 * sum(num_wanted for *_, num_wanted, _ in results)
    assert max(num_opened for *_, num_opened in results) <= 3


@pytest.mark.parametrize("options", [OFF, ON], ids=["alone", "exchanging"])
def test_a_checkpoint_with_small_replicas_in_every_file_loads(
    workers: WorkerPool, tmp_path: Path, options: bcp.LoadOptions
) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=8, is_spread=True)
    for world_size in (8, 3):
        results = workers.run(load_trained, path, 1, options, world_size=world_size)
        assert all(same for same, *_ in results)


def load_in_common(
    rank: int, world_size: int, path: str, damages_on: int | None = None, is_verified: bool = True
) -> tuple[bool, int, int]:
    """As many ranks would, of which none connects with another: rank 0 reads and sends what all want."""

    def verify_damaged(content: memoryview, *of_run: Any, reader: str) -> None:
        content[-1] ^= 1
        verify(content, *of_run, reader=reader)

    verify = receive._verify
    expected = local_tensors(*trained(world_size, num_replicas=1, seed=1))
    model, optimizer = trained(world_size, num_replicas=1, seed=2)
    options = bcp.LoadOptions(exchange="on", timeout_s=60, verify=is_verified)
    with (
        pytest.MonkeyPatch.context() as patch,
        before(Seam(connected_threads, "connect"), raising(AssertionError())),
    ):
        patch.setattr(read_division, "FEW_RANKS", 2)
        if rank == damages_on:
            patch.setattr(receive, "_verify", verify_damaged)
        report = bcp.load(path, {"model": model, "optimizer": optimizer}, options=options)
    same = all(map(torch.equal, local_tensors(model, optimizer), expected))
    return same, report.num_bytes_read, report.num_bytes_received


STEP_BYTES = 2 * NUM_LAYERS * 4


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_many_ranks_want_is_read_once_and_nobody_connects(
    workers: WorkerPool, tmp_path: Path, codec: str, verify: bool
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_trained, path, 1, False, codec, world_size=8)
    for world_size in (8, 4):
        results = workers.run(load_in_common, path, None, verify, world_size=world_size)
        assert all(same for same, *_ in results)
        read = sum(num_read for _, num_read, _ in results)
        # Of a compressed file whole frames are read, each once.
        assert read <= bcp.open(path).info.num_bytes
        assert [num_received > 0 for *_, num_received in results] == [False] + [True] * (world_size - 1)
        assert codec != "none" or {num_received for *_, num_received in results[1:]} == {STEP_BYTES}


def progress_in_common(rank: int, world_size: int, path: str) -> tuple[int, set[str], int]:
    """Bytes that were read, the phases in which bytes were counted, and the most bytes that were to be read. Asserts
    that no more are counted than are to be read.
    """
    seen: list[bcp.Progress] = []
    model, optimizer = trained(world_size, num_replicas=1, seed=2)
    options = bcp.LoadOptions(exchange="on", timeout_s=60, on_progress=seen.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_division, "FEW_RANKS", 2)
        patch.setattr(progress, "_REPORT_S", 0.0)
        report = bcp.load(path, {"model": model, "optimizer": optimizer}, options=options)
    assert all(each.bytes_done <= each.bytes_total for each in seen)
    assert max(each.bytes_done for each in seen) == report.num_bytes_read
    counted = {each.phase for each in seen if each.bytes_done}
    return report.num_bytes_read, counted, max(each.bytes_total for each in seen)


def test_progress_counts_what_is_read_for_all_ranks_in_the_phase_of_reading(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=4)
    results = workers.run(progress_in_common, path, world_size=4)
    for num_read, counted, num_expected in results:
        assert (counted, num_expected) == ({"read"}, num_read)


def test_what_is_damaged_on_the_way_to_a_rank_is_noticed_there(workers: WorkerPool, tmp_path: Path) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=4)
    outcomes = workers.run_each(load_in_common, path, 2, world_size=4)
    for outcome in outcomes:
        assert isinstance(outcome.error, bcp.CheckpointCorruptError)
        assert outcome.error.kind == "checksum"
        assert outcome.error.ranks == (2,)
        assert "damaged on the way" in str(outcome.error)


def test_damage_in_what_many_ranks_want_is_told_to_all(workers: WorkerPool, tmp_path: Path) -> None:
    path = save_with(workers, tmp_path / "ckpt", world_size=4)
    (file,) = (tmp_path / "ckpt").rglob("*-00000-0.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # float32 is the largest dtype of the file: what all want lies at its end
    file.write_bytes(content)
    for outcome in workers.run_each(load_in_common, path, world_size=4):
        assert isinstance(outcome.error, bcp.CheckpointCorruptError)
        assert outcome.error.kind == "checksum"
        assert file.name in str(outcome.error)
