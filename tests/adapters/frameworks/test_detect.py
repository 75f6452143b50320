"""`framework` is a check of the state: what is of it is taken, and what is not is refused on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from training import mlp

import bytecheckpoint as bcp
from bytecheckpoint.adapters.frameworks.detect import FRAMEWORKS, refuse_absent
from distributed.ragged import ragged_tensor
from distributed.workers import WorkerPool

PLAIN = [name for name in FRAMEWORKS if name != "auto"]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("framework", PLAIN)
@pytest.mark.parametrize("call", [bcp.save, bcp.load, bcp.warm_up])
def test_a_plain_model_is_of_no_framework(tmp_path: Path, call: Any, framework: str) -> None:
    model = mlp()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "x": torch.ones(2)}
    bcp.save(tmp_path / "plain", {"model": mlp()})
    arguments = [state] if call is bcp.warm_up else [tmp_path / ("plain" if call is bcp.load else "new"), state]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"found were model \(a Sequential\), optimizer") as caught:
        call(*arguments, framework)
    assert caught.value.kind == "conflict"
    assert f"framework={framework!r}" in str(caught.value)
    assert not (tmp_path / "new").exists()


class Fixed:
    """A stateful object that gives this state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def of_ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel(mlp())


def of_fsdp1() -> Any:
    return FullyShardedDataParallel(mlp(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))


def of_fsdp2() -> Any:
    module = mlp()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


def dtensor() -> Any:
    return distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])


STATES: dict[str, tuple[Any, set[str]]] = {
    "ddp": (of_ddp, {"ddp"}),
    "inside": (lambda: torch.nn.ModuleDict({"a": of_ddp()}), {"ddp"}),
    "compiled": (lambda: torch.compile(of_ddp(), backend="eager"), {"ddp"}),
    "in a list": (lambda: [of_ddp()], {"ddp"}),
    "fsdp1": (of_fsdp1, {"fsdp"}),
    "fsdp2": (of_fsdp2, {"fsdp", "fsdp2", "dtensor"}),
    "state_dict of fsdp2": (lambda: of_fsdp2().state_dict(), {"fsdp", "fsdp2", "dtensor"}),
    "wrapper of fsdp2": (lambda: Fixed(of_fsdp2().state_dict()), {"fsdp", "fsdp2", "dtensor"}),
    "optimizer of fsdp2": (lambda: torch.optim.SGD(of_fsdp2().parameters()), {"fsdp", "fsdp2", "dtensor"}),
    "dtensor": (dtensor, {"fsdp", "fsdp2", "dtensor"}),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.usefixtures("group")
def test_what_counts_as_which(name: str) -> None:
    make, expected = STATES[name]
    state = {"epoch": 3, "nested": [{"x": make()}]}
    for framework in PLAIN:
        if framework in expected:
            check(state, framework)
        else:
            with pytest.raises(bcp.CheckpointMismatchError):
                check(state, framework)


def check(state: dict[str, Any], framework: str) -> None:

    refuse_absent(framework, state, has_own=False)


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_is_saved_and_loaded_under_its_framework(tmp_path: Path) -> None:
    """The calls of the open-source ByteCheckpoint, as its users have them."""
    for framework, make in (("ddp", of_ddp), ("fsdp", of_fsdp1), ("fsdp", of_fsdp2), ("fsdp2", of_fsdp2)):
        path, model = tmp_path / f"{framework}-{make.__name__}", make()
        optimizer = torch.optim.AdamW(model.parameters())
        bcp.save(path, {"model": model, "optimizer": optimizer, "extra_state": {"epoch": 1}}, framework=framework)
        bcp.load(path, {"model": make()}, framework=framework)


def of_vescale(rank: int, world_size: int, path: str) -> None:
    placed = ragged_tensor(init_device_mesh("cpu", (world_size,)), rank, "w", torch.ones(8, 5))
    bcp.save(path, {"w": placed}, "vescale")


def test_placements_of_vescale_count(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(of_vescale, str(tmp_path), world_size=4)


def refused(rank: int, world_size: int, path: str) -> str:
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.save(path, {"model": mlp()}, "fsdp")
    return caught.value.kind


def test_every_rank_refuses(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(refused, str(tmp_path / "new"), world_size=2) == ["conflict", "conflict"]
    assert not (tmp_path / "new").exists()
