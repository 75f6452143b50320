"""Pipelines of any number of stages, each on any rank: one checkpoint, whichever of them saved it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain_leaves import plain_leaves
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from distributed.truth import value
from distributed.workers import WorkerError, WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
NUM_LAYERS = 5
WIDTH = 7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)
        self.register_buffer("gain", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.gain.sum()


class Model(nn.Module):
    """With layers by their number in the whole model, so that a stage deletes those of others and renames nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(NUM_LAYERS)})
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


class Split(NamedTuple):
    """A model cut into stages."""

    firsts: tuple[int, ...]
    """The first layer of each stage."""
    ranks: tuple[int, ...]
    """On which of the pipeline's ranks each stage is."""
    form: str = "modules"
    """What the state holds: a list of `modules` or of `stages`, one `stage`, a `schedule`, or `traced` stages."""
    num_copies: int = 1
    """Of the pipeline: each of its ranks is so many, which shard the parameters among them."""

    @property
    def world_size(self) -> int:
        return (max(self.ranks) + 1) * self.num_copies


SPLITS = {
    "whole": Split((0,), (0,)),
    "two modules": Split((0, 3), (0, 1)),
    "three stages": Split((0, 1, 4), (0, 1, 2), "stage"),
    "interleaved": Split((0, 1, 2, 4), (0, 1, 0, 1), "stages"),
    "schedule": Split((0, 2), (0, 1), "schedule"),
    "interleaved schedule": Split((0, 1, 3, 4), (0, 1, 0, 1), "schedule"),
    "traced": Split((0, 2), (0, 1), "traced"),
    "two of two": Split((0, 4), (0, 1), "stages", num_copies=2),
}


def filled(model: nn.Module, prefix: str) -> nn.Module:
    with torch.no_grad():
        for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(value(prefix + fqn, tensor))
    return model


def cut(model: Model, split: Split, number: int) -> Model:
    """One stage of it."""
    end = split.firsts[number + 1] if number + 1 < len(split.firsts) else NUM_LAYERS
    for name in list(model.layers):
        if not split.firsts[number] <= int(name) < end:
            del model.layers[name]
    if number > 0:
        del model.embedding
    if end < NUM_LAYERS:
        del model.head
    return model


def traced(model: Model, split: Split, rank: int) -> Any:
    points = {f"layers.{first}": SplitPoint.BEGINNING for first in split.firsts[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own tree specs
        return pipeline(model, mb_args=(torch.ones(2, 4),), split_spec=points).build_stage(rank, torch.device("cpu"))


class Pipeline:
    """What one rank holds of a model with values made of `prefix` and FQN, in the form of the split."""

    def __init__(self, split: Split, rank: int, prefix: str) -> None:
        shard_mesh = group = None
        if split.num_copies > 1:
            shape = split.world_size // split.num_copies, split.num_copies
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "shard"))
            shard_mesh, group = mesh["shard"], mesh.get_group("stage")
            rank = rank // split.num_copies
        self._split = split
        numbers = [number for number, owner in enumerate(split.ranks) if owner == rank]
        if split.form == "traced":
            stages = [traced(filled(Model(), prefix), split, rank)]
            self.modules = [stages[0].submod]
        else:
            self.modules = [cut(filled(Model(), prefix), split, number) for number in numbers]
            for module in self.modules if shard_mesh is not None else ():
                fully_shard(module, mesh=shard_mesh)
            stages = [
                PipelineStage(module, number, len(split.firsts), torch.device("cpu"), group=group)
                for module, number in zip(self.modules, numbers, strict=True)
                if split.form != "modules"
            ]
        self.held = self._held(stages)
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.5) for module in self.modules]

    def _held(self, stages: list[Any]) -> Any:
        if self._split.form == "modules":
            return self.modules
        if self._split.form == "schedule":
            several = len(stages) > 1
            return ScheduleInterleaved1F1B(stages, 4) if several else Schedule1F1B(stages[0], 4)
        return stages if self._split.form == "stages" else stages[0]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.held, "optimizer": self.optimizers}

    def fill_optimizers(self, prefix: str) -> None:
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.125
            for fqn, parameter in module.named_parameters():
                state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(parameter.detach())}
                optimizer.state[parameter] = state
                whole = state["exp_avg"].full_tensor() if isinstance(parameter, DTensor) else state["exp_avg"]
                true = value(f"{prefix}{fqn}.exp_avg", whole)
                write(state["exp_avg"], true)

    def problems(self) -> list[str]:
        """What is not as it should be after a load of what has no prefix."""
        found = []
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            for fqn, tensor in tensors.items():
                if not torch.equal(whole(tensor), value(fqn, whole(tensor))):
                    found.append(fqn)
            for fqn, parameter in module.named_parameters():
                state = optimizer.state[parameter]
                moment = whole(state["exp_avg"])
                if not torch.equal(moment, value(f"{fqn}.exp_avg", moment)) or state["step"] != 3:
                    found.append(f"state of {fqn}")
            if optimizer.param_groups[0]["lr"] != 0.125:
                found.append("lr")
        return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def write(tensor: Tensor, true: Tensor) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(true)
        return
    parts = true.chunk(tensor.device_mesh.size())
    if tensor.device_mesh.get_local_rank() < len(parts):
        tensor.to_local().copy_(parts[tensor.device_mesh.get_local_rank()])


def save_split(rank: int, world_size: int, path: str, name: str) -> None:
    source = Pipeline(SPLITS[name], rank, "")
    source.fill_optimizers("")
    bcp.save(path, source.state, options=OPTIONS)


def load_splits(rank: int, world_size: int, root: str, name: str) -> dict[str, list[str]]:
    """By source: what is wrong on this rank, with fresh optimizers and then with others' state in them."""
    problems: dict[str, list[str]] = {}
    for source in SPLITS:
        target = Pipeline(SPLITS[name], rank, "noise.")
        bcp.load(f"{root}/{source}", target.state)
        problems[source] = target.problems()
        target.fill_optimizers("noise.")
        bcp.load(f"{root}/{source}", target.state)
        problems[source] += target.problems()
    return problems


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One checkpoint of each split."""
    root = str(tmp_path_factory.mktemp("splits"))
    for name, split in SPLITS.items():
        workers.run(save_split, f"{root}/{name}", name, world_size=split.world_size)
    return root


@pytest.mark.parametrize("name", SPLITS)
def test_each_split_loads_what_each_split_has_saved(workers: WorkerPool, saved: str, name: str) -> None:
    found = workers.run(load_splits, saved, name, world_size=SPLITS[name].world_size)
    assert found == [{source: [] for source in SPLITS}] * SPLITS[name].world_size


def test_names_are_those_of_the_whole_model_however_it_was_cut(saved: str) -> None:
    expected = {f"model.{fqn}" for fqn in Model().state_dict()}
    for name in SPLITS:
        checkpoint = bcp.open(f"{saved}/{name}")
        assert {fqn for fqn in checkpoint.keys() if fqn.startswith("model.")} == expected
        assert not [fqn for fqn in plain_leaves(checkpoint) if not fqn.startswith("optimizer.")]


def save_clash(rank: int, world_size: int, path: str, form: str, size: int) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(size, size, bias=False))
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    bcp.save(path, {"model": [stage] if form == "list" else stage}, options=OPTIONS)


@pytest.mark.parametrize("form", ["list", "stage"])
@pytest.mark.parametrize("size", [3, 600], ids=["small", "large"])
def test_stages_that_use_one_name_for_different_tensors_are_one_error(
    workers: WorkerPool, tmp_path: Path, form: str, size: int
) -> None:
    with pytest.raises(WorkerError) as error:
        workers.run(save_clash, str(tmp_path), form, size, world_size=2)
    for of_rank in error.value.errors.values():
        assert isinstance(of_rank, bcp.CheckpointMismatchError)
        assert of_rank.kind == "conflict"
        assert "model.0.weight: in stage 0 on rank 0, in stage 1 on rank 1" in str(of_rank)
    assert len(error.value.errors) == 2
    assert bcp.latest(tmp_path) is None


def save_of_one_rank(rank: int, world_size: int, path: str) -> None:
    stages = [PipelineStage(nn.Sequential(nn.Linear(3, 3)), number, 2, torch.device("cpu")) for number in range(2)]
    bcp.save(path, {"model": stages}, options=OPTIONS)


def test_so_are_two_stages_of_one_rank(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"model\.0\.weight is the name of two tensors.*whole model"):
        workers.run(save_of_one_rank, str(tmp_path), world_size=1)


def save_tied(rank: int, world_size: int, path: str) -> None:
    """The first and the last stage both hold the embedding; the plan of the first save is known to the others."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"embedding": nn.Embedding(300, 70), str(rank): nn.Linear(2, 2)})
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    for step in range(3):
        bcp.save(path, {"model": stage}, step=step, options=OPTIONS)


def test_stages_that_share_a_tensor_may_use_one_name(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_tied, str(tmp_path), world_size=2)
    torch.manual_seed(0)
    assert torch.equal(bcp.open(tmp_path)["model.embedding.weight"][...], nn.Embedding(300, 70).weight)
    assert len(bcp.open(tmp_path).keys()) == 5


def save_tied_in_the_last(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(30, 7)
    module = nn.ModuleDict({"embedding": embedding} if rank == 0 else {"aaa": embedding, "embedding": embedding})
    bcp.save(path, {"model": PipelineStage(module, rank, world_size, torch.device("cpu"))}, options=OPTIONS)


def test_a_stage_may_tie_what_another_has_under_one_of_its_names(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_tied_in_the_last, str(tmp_path), world_size=2)
    checkpoint = bcp.open(tmp_path)
    assert torch.equal(checkpoint["model.embedding.weight"][...], checkpoint["model.aaa.weight"][...])


def save_untied(rank: int, world_size: int, path: str) -> None:
    """Stages that hold the same at first, under one name, and no longer when they are saved again."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(600, 600, bias=False))
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    bcp.save(path, {"model": stage}, step=0, options=OPTIONS)
    with torch.no_grad():
        module[0].weight.fill_(float(rank))
    bcp.save(path, {"model": stage}, step=1, options=OPTIONS)


def test_a_known_plan_is_an_error_once_stages_differ(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"model\.0\.weight: in stage 0 on rank 0, in stage 1 on rank 1"):
        workers.run(save_untied, str(tmp_path), world_size=2)
    assert bcp.latest(tmp_path) == 0


def load_beside_nothing(rank: int, world_size: int, path: str) -> list[str]:
    """More ranks than stages: some have no stage, and leave the model out."""
    split = SPLITS["two modules"]
    if rank >= split.world_size:
        bcp.load(path, {})
        bcp.save(f"{path}.again", {}, options=OPTIONS)
        return []
    target = Pipeline(split, rank, "noise.")
    bcp.load(path, target.state)
    bcp.save(f"{path}.again", target.state, options=OPTIONS)
    return target.problems()


def test_a_rank_without_a_stage_leaves_the_model_out(workers: WorkerPool, saved: str) -> None:
    assert workers.run(load_beside_nothing, f"{saved}/three stages", world_size=3) == [[], [], []]
    assert bcp.open(f"{saved}/three stages.again").keys() == bcp.open(f"{saved}/two modules").keys()
