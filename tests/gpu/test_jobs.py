"""Jobs on a GPU: what adapters make of their state, ranks that exchange bytes, CUDA graphs beside saves and loads, and
contexts. Bodies that need no CUDA run on the host as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_cases import OPTIONS, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from gpu.conftest import NEEDS_GPU

PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
EXCHANGED = bcp.LoadOptions(exchange="on", scratch_bytes=8 << 20)
ROWS = 3001
"""Odd, so that ranks hold different lengths."""


def trained(place: str, **arguments: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Embedding(100, 64)]
    model = torch.nn.ModuleList(layers).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **arguments)
    for _ in range(2):
        train(model)
        optimizer.step()
    return model, optimizer


def train(model: torch.nn.Module) -> None:
    linear, norm, embedding = model
    place = linear.weight.device
    loss = norm(linear(torch.randn(32, 512, device=place))).square().sum()
    (loss + embedding(torch.arange(100, device=place)).square().sum()).backward()


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [value.detach().cpu().clone() for value in (*model.state_dict().values(), *state)]


@PLACES
@pytest.mark.parametrize("kind", ["copy", "waves", "lazy"])
@pytest.mark.parametrize("arguments", [{"foreach": False}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_a_module_and_its_optimizer_resume_bit_for_bit(
    tmp_path: Path, place: str, kind: str, arguments: dict[str, Any]
) -> None:
    model, optimizer = trained(place, **arguments)
    expected = tensors_of(model, optimizer)
    handle = save(tmp_path, {"model": model, "optimizer": optimizer}, kind)
    train(model)
    optimizer.step()
    handle.result(60)
    other, its_optimizer = trained(place, **arguments)
    train(other)
    its_optimizer.step()
    bcp.load(tmp_path, {"model": other, "optimizer": its_optimizer})
    found = tensors_of(other, its_optimizer)
    assert [number for number, value in enumerate(expected) if not torch.equal(value, found[number])] == []


@PLACES
@pytest.mark.parametrize("kind", ["copy", "lazy"])
def test_ranks_pass_on_what_one_has_read(tmp_path: Path, workers: WorkerPool, place: str, kind: str) -> None:
    assert workers.run(exchange, str(tmp_path), place, kind, world_size=2) == [True, True]


def exchange(rank: int, world_size: int, path: str, place: str, kind: str) -> bool:
    """Both ranks may be on the same GPU: nothing here needs NCCL."""
    device = torch.device(place, rank % torch.cuda.device_count()) if place == "cuda" else torch.device(place)
    if place == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(place, (world_size,))
    rows = torch.arange(ROWS * 500.0).view(ROWS, 500)
    own = rows.chunk(world_size)[rank].to(device)

    def state(factor: float) -> dict[str, Any]:
        sharded = DTensor.from_local(own * factor, mesh, [Shard(0)], run_check=False, shape=rows.shape, stride=(500, 1))
        return {"sharded": sharded, "replicated": (rows * factor).to(device), "columns": (rows * factor).to(device).T}

    save(path, state(1), kind).result(60)
    loaded = state(0)
    bcp.load(path, loaded, options=EXCHANGED)
    columns = torch.equal(loaded["columns"].cpu(), rows.T)
    return columns and torch.equal(loaded["sharded"].to_local(), own) and torch.equal(loaded["replicated"].cpu(), rows)


class TestCapture:
    """CUDA graphs."""

    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("kind", ["copy", "waves", "lazy", "lazy waves"])
    def test_a_capture_beside_a_save_stays_valid(self, tmp_path: Path, kind: str) -> None:
        state = {f"t{number}": torch.full((40_000_000,), float(number), device="cuda") for number in range(6)}
        for number in range(3):
            handle = bcp.save(tmp_path / str(number), state, async_save=True, options=OPTIONS[kind])
            captured(handle.done)
            handle.result(120)
            loaded = bcp.open(tmp_path / str(number)).state_dict()
            assert all(torch.equal(loaded[name], value.cpu()) for name, value in state.items())

    def test_a_capture_beside_a_load_stays_valid(self, tmp_path: Path) -> None:
        from concurrent.futures import ThreadPoolExecutor

        expected = {f"t{number}": torch.full((40_000_000,), float(number)) for number in range(4)}
        bcp.save(tmp_path, expected)
        state = {name: torch.zeros(40_000_000, device="cuda") for name in expected}

        def load() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                bcp.load(tmp_path, state)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load)
            captured(loading.done)
            loading.result(120)
        assert all(torch.equal(state[name].cpu(), value) for name, value in expected.items())

    def test_a_replayed_step_is_saved_as_it_was(self, tmp_path: Path) -> None:
        """By a copy: a lazy snapshot is refused, because a replay runs no hooks."""
        weight = torch.nn.Parameter(torch.ones(1_000_000, device="cuda"))
        optimizer = torch.optim.AdamW([weight], capturable=True)
        weight.grad = torch.ones_like(weight)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        state = {"weight": weight, "optimizer": optimizer}
        with pytest.raises(bcp.CheckpointSaveError, match="capturable"):
            save(tmp_path / "lazy", state, "lazy")
        expected = weight.detach().clone()
        handle = save(tmp_path / "copy", state, "copy")
        for _ in range(10):
            graph.replay()
        handle.result(60)
        assert torch.equal(bcp.open(tmp_path / "copy").state_dict()["weight"], expected.cpu())
        assert not torch.equal(weight, expected)

    def test_a_save_inside_of_a_capture_is_refused(self, tmp_path: Path) -> None:
        tensor = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(bcp.CheckpointSaveError, match="captures a CUDA graph"):
                bcp.save(tmp_path, {"t": tensor})
        graph.replay()
        assert tensor.unique().tolist() == [2.0]


def captured(is_done: Callable[[], bool]) -> None:
    """Captures graphs, one after the other, until that is so, and one more; all of them do what was captured."""
    is_last = False
    while not is_last:
        is_last = is_done()
        value, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.graph(graph):
            for _ in range(200):
                value.add_(1)
        graph.replay()
        assert value.unique().tolist() == [200.0]


CONTEXTS = """
import json, os, sys
import torch
import bytecheckpoint as bcp

folder, number, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = "cpu" if kind == "host" else f"cuda:{number}"
state = {"t": torch.arange(3_000_000.0, device=device), "m": torch.ones(500, 700, device=device).T}
for name, options in {
    "copy": bcp.SaveOptions(snapshot="copy"),
    "waves": bcp.SaveOptions(snapshot="copy", staging_bytes=32 << 20),
    "lazy": bcp.SaveOptions(snapshot="lazy"),
}.items():
    for attempt in range(2):
        bcp.save(f"{folder}/{name}-{attempt}", state, async_save=True, options=options).result(60)
        bcp.load(f"{folder}/{name}-{attempt}", state)
bcp.save(f"{folder}/synchronous", state)
if kind == "fork":
    child = os.fork()
    if not child:
        own = {"t": torch.ones(1000)}
        bcp.save(f"{folder}/child", own, async_save=True).result(60)
        bcp.load(f"{folder}/child", own)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
used = [torch._C._cuda_hasPrimaryContext(each) for each in range(torch.cuda.device_count())]
print(json.dumps(used))
"""


def contexts_after(folder: Path, device: int, kind: str) -> list[bool]:
    """The devices of a new process that have a context after saves and loads."""
    command = [sys.executable, "-c", CONTEXTS, str(folder), str(device), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    used: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return used


class TestContexts:
    """Half a gigabyte of a device each."""

    pytestmark = NEEDS_GPU

    def test_host_tensors_make_none(self, tmp_path: Path) -> None:
        assert not any(contexts_after(tmp_path, 0, "host"))

    def test_a_forked_child_saves_host_tensors(self, tmp_path: Path) -> None:
        assert contexts_after(tmp_path, 0, "fork")[0]

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
    def test_none_is_made_on_another_device(self, tmp_path: Path) -> None:
        used = contexts_after(tmp_path, 1, "device")
        assert used == [number == 1 for number in range(len(used))]
