"""Checkpoints that torch itself wrote in one layout, loaded in place into every other one, to the bit. As in
test_matrix.py each is written once, and a destination loads all of them in one call to the workers.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import bytecheckpoint as bcp
from distributed.layouts import FRAMEWORK_LAYOUTS, LAYOUTS, Builder, State, differences
from distributed.test_matrix import spoil
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUM_SHARDS, NUM_RANKS = 3, 4


def write_dcp(state: State, path: str) -> None:
    model, optimizer = get_state_dict(_model(state), state["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def write_flattened_dcp(state: State, path: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(_model(state), state["optimizer"], options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def write_dcp_in_background(state: State, path: str) -> None:
    model, optimizer = get_state_dict(_model(state), state["optimizer"])
    saving = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    saving.result()


def write_bare_dcp(state: State, path: str) -> None:
    dcp.save(get_state_dict(_model(state), ())[0], checkpoint_id=path)


def write_sharded_safetensors(state: State, path: str) -> None:
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save(get_state_dict(_model(state), ())[0], storage_writer=writer)


def write_dcp_folders(state: State, path: str) -> None:
    """As Accelerate does: the model and the optimizer in folders of their own."""
    model, optimizer = get_state_dict(_model(state), state["optimizer"])
    dcp.save({"model": model}, checkpoint_id=f"{path}/pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=f"{path}/optimizer_0")


def write_files_of_ranks(state: State, path: str) -> None:
    """Each rank with torch.save, of sharded tensors as they are."""
    model, optimizer = get_state_dict(_model(state), state["optimizer"])
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    Path(path).mkdir(exist_ok=True)
    torch.save(model, f"{path}/model_world_size_{world_size}_rank_{rank}.pt")
    torch.save(optimizer, f"{path}/optim_world_size_{world_size}_rank_{rank}.pt")


def write_megatron(state: State, path: str) -> None:
    """Megatron's older format, by one rank."""
    Path(path, "mp_rank_00").mkdir(parents=True)
    saved = {"model": _model(state).state_dict(), "iteration": 1234, "checkpoint_version": 3.0}
    torch.save(saved, f"{path}/mp_rank_00/model_optim_rng.pt")


def write_torch_file(state: State, path: str) -> None:
    torch.save({"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}, path)


def write_safetensors(state: State, path: str) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in state["model"].state_dict().items()}
    Path(path).mkdir()
    save_file(tensors, f"{path}/model.safetensors", {"format": "pt"})


def write_indexed_safetensors(state: State, path: str) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in state["model"].state_dict().items()}
    Path(path).mkdir()
    files = {name: f"model-0000{1 + index % NUM_SHARDS}-of-00003.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, f"{path}/{file}")
    index = json.dumps({"metadata": {"total_size": 0}, "weight_map": files})
    Path(path, "model.safetensors.index.json").write_text(index)


def write_zero_2(state: State, path: str) -> None:
    """As DeepSpeed lays out ZeRO 2 on four ranks."""
    model, optimizer = _model(state), state["optimizer"]
    flat = {key: torch.cat([tensor.flatten() for tensor in each.values()]) for key, each in _trained(model, optimizer)}
    total = len(flat["weight"])
    part = -(-total // (2 * NUM_RANKS)) * 2
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    padded = {key: torch.cat([tensor, torch.full((part * NUM_RANKS - total,), 77.0)]) for key, tensor in flat.items()}
    _save_model(model, Path(path), "mp_rank_00_model_states.pt", range(1), dict(model.state_dict()))
    for rank in range(NUM_RANKS):
        mine = slice(rank * part, (rank + 1) * part)
        of_rank = {key: padded[key][mine].clone() for key in ("exp_avg", "exp_avg_sq")}
        base = {"state": {0: {**of_rank, "step": torch.tensor(1234.0)}}, "param_groups": [{**group, "params": [0]}]}
        weights = [flat["weight"][mine].clone()]
        saved = {"zero_stage": 2, "partition_count": [NUM_RANKS], "base_optimizer_state": base}
        saved["single_partition_of_fp32_groups"] = weights
        torch.save({"optimizer_state_dict": saved}, Path(path, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def write_zero_3(state: State, path: str) -> None:
    """As DeepSpeed lays out ZeRO 3 on four ranks."""
    model, optimizer = _model(state), state["optimizer"]
    trained = dict(_trained(model, optimizer))
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    placeholders = dict(model.state_dict()) | {name: torch.empty(0) for name, _ in model.named_parameters()}
    _save_model(model, Path(path), name, range(NUM_RANKS), placeholders)
    for rank in range(NUM_RANKS):
        of_rank = {key: torch.cat([_shard(each, rank) for each in trained[key].values()]) for key in trained}
        weights = [of_rank.pop("weight")]
        inner = {"state": {0: {**of_rank, "step": torch.tensor(1234.0)}}, "param_groups": [{**group, "params": [0]}]}
        saved = {
            "zero_stage": 3,
            "partition_count": NUM_RANKS,
            "fp32_flat_groups": weights,
            "optimizer_state_dict": inner,
        }
        torch.save({"optimizer_state_dict": saved}, Path(path, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    yield "weight", {name: each.detach() for name, each in trained.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        yield key, {name: optimizer.state[each][key] for name, each in trained.items()}


def _shard(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    share = -(-tensor.numel() // NUM_RANKS)
    mine = tensor.flatten()[rank * share : (rank + 1) * share]
    return torch.cat([mine, torch.full((share - mine.numel(),), 77.0)])


def _save_model(
    model: torch.nn.Module, path: Path, name: str, ranks: Iterable[int], module: dict[str, torch.Tensor]
) -> None:
    path.mkdir()
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    for rank in ranks:
        states = {
            "module": module,
            "buffer_names": [name for name, _ in model.named_buffers()],
            "param_shapes": [{name: each.shape for name, each in model.named_parameters() if each.requires_grad}],
            "frozen_param_shapes": {name: each.shape for name, each in frozen.items()},
            "frozen_param_fragments": {
                key: _shard(each, rank) if "{}" in name else each for key, each in frozen.items()
            },
            "shared_params": {},
            "global_steps": 1234,
        }
        torch.save(states, path / name.format(rank))


Write = Callable[[State, str], None]
WITH_OPTIMIZER: dict[str, tuple[Write, str]] = {
    "dcp-single": (write_dcp, "single"),
    "dcp-fsdp4": (write_dcp, "fsdp4"),
    "dcp-fsdp2_tp2": (write_dcp, "fsdp2_tp2"),
    "dcp-flattened": (write_flattened_dcp, "hsdp2x2"),
    "dcp-async": (write_dcp_in_background, "fsdp3"),
    "dcp-folders": (write_dcp_folders, "fsdp2_tp2"),
    "dcp-fsdp1": (write_dcp, "fsdp1_4"),
    "ranks-fsdp1": (write_files_of_ranks, "fsdp1_4"),
    "ranks-fsdp2_tp2": (write_files_of_ranks, "fsdp2_tp2"),
    "ranks-hsdp": (write_files_of_ranks, "hsdp2x2"),
    "torch": (write_torch_file, "single"),
    "zero-2": (write_zero_2, "single"),
    "zero-3": (write_zero_3, "single"),
}
MODEL_ONLY: dict[str, tuple[Write, str]] = {
    "dcp-bare": (write_bare_dcp, "tp2"),
    "megatron": (write_megatron, "single"),
    "safetensors": (write_safetensors, "single"),
    "safetensors-indexed": (write_indexed_safetensors, "single"),
    "safetensors-sharded": (write_sharded_safetensors, "fsdp4"),
}
SOURCES = WITH_OPTIMIZER | MODEL_ONLY
DESTINATIONS = ("single", "ddp2", "fsdp3", "fsdp2_tp2", "hsdp2x2", "pp2_tp2")
FEW = ("dcp-fsdp4", "ranks-fsdp2_tp2", "torch", "safetensors-sharded", "zero-3")
"""What is written and loaded each time; the whole matrix takes minutes."""


def optimizer_of(source: str) -> str:
    """DeepSpeed has one count of steps for all parameters."""
    return "adamw_even" if source.startswith("zero") else "adamw"


def _model(state: State) -> torch.nn.Module:
    (model,) = state["model"] if isinstance(state["model"], list) else [state["model"]]
    return model


def write(rank: int, world_size: int, source: str, path: str) -> None:
    function, layout = SOURCES[source]
    function(Builder(layout, rank).truth(optimizer_of(source)), path)


def load_each(rank: int, world_size: int, layout: str, paths: dict[str, str]) -> dict[str, list[str]]:
    """What is wrong on this rank after a load of each source."""
    builder = Builder(layout, rank)
    wrong = {}
    for source, path in paths.items():
        expected, state = builder.truth(optimizer_of(source)), builder.stateless(optimizer_of(source))
        names = ["model", "optimizer"] if source in WITH_OPTIMIZER else ["model"]
        spoil(state)
        try:
            bcp.load(path, {name: state[name] for name in names})
        except bcp.CheckpointError:
            wrong[source] = [traceback.format_exc()]
            continue
        found = differences(state, expected)
        wrong[source] = [line for line in found if names == ["model", "optimizer"] or "optimizer." not in line]
    return wrong


class Folder:
    """Writes a source when it is first asked for."""

    def __init__(self, workers: WorkerPool, path: Path) -> None:
        self._workers = workers
        self._path = path
        self._written: set[str] = set()

    def path(self, source: str) -> str:
        if source not in self._written:
            world_size = (LAYOUTS | FRAMEWORK_LAYOUTS)[SOURCES[source][1]].world_size
            path = str(self._path / source)
            self._workers.run(write, source, path, world_size=world_size, process_group=world_size > 1)
            self._written.add(source)
        return str(self._path / source)


@pytest.fixture(scope="module")
def folder(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(workers, tmp_path_factory.mktemp("foreign"))


def check(workers: WorkerPool, folder: Folder, sources: Iterable[str], destination: str) -> None:
    world_size = LAYOUTS[destination].world_size
    # Stages of a pipeline number their own parameters, so numbers of a whole model are not theirs.
    paths = {source: folder.path(source) for source in sources if source != "torch" or "pp" not in destination}
    wrong = workers.run(load_each, destination, paths, world_size=world_size, process_group=world_size > 1)
    assert wrong == [{source: [] for source in paths}] * world_size


@pytest.mark.parametrize("destination", ["single", "fsdp2_tp2"])
def test_what_torch_wrote_is_loaded_to_the_bit(workers: WorkerPool, folder: Folder, destination: str) -> None:
    check(workers, folder, FEW, destination)


@pytest.mark.long
@pytest.mark.parametrize("destination", DESTINATIONS)
def test_every_format_is_loaded_into_every_layout(workers: WorkerPool, folder: Folder, destination: str) -> None:
    check(workers, folder, SOURCES, destination)
