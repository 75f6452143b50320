"""Checkpoints that torch itself wrote in one layout, loaded in place into every other one, to the bit. As in
test_matrix.py each is written once, and a destination loads all of them in one call to the workers.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import bytecheckpoint as bcp
from distributed.layouts import LAYOUTS, Builder, State, differences
from distributed.test_matrix import spoil
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUM_SHARDS = 3
OPTIMIZER = "adamw"


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


Write = Callable[[State, str], None]
WITH_OPTIMIZER: dict[str, tuple[Write, str]] = {
    "dcp-single": (write_dcp, "single"),
    "dcp-fsdp4": (write_dcp, "fsdp4"),
    "dcp-fsdp2_tp2": (write_dcp, "fsdp2_tp2"),
    "dcp-flattened": (write_flattened_dcp, "hsdp2x2"),
    "dcp-async": (write_dcp_in_background, "fsdp3"),
    "torch": (write_torch_file, "single"),
}
MODEL_ONLY: dict[str, tuple[Write, str]] = {
    "dcp-bare": (write_bare_dcp, "tp2"),
    "safetensors": (write_safetensors, "single"),
    "safetensors-indexed": (write_indexed_safetensors, "single"),
    "safetensors-sharded": (write_sharded_safetensors, "fsdp4"),
}
SOURCES = WITH_OPTIMIZER | MODEL_ONLY
DESTINATIONS = ("single", "ddp2", "fsdp3", "fsdp2_tp2", "hsdp2x2", "pp2_tp2")
FEW = ("dcp-fsdp4", "torch", "safetensors-sharded")
"""What is written and loaded each time; the whole matrix takes minutes."""


def _model(state: State) -> torch.nn.Module:
    (model,) = state["model"] if isinstance(state["model"], list) else [state["model"]]
    return model


def write(rank: int, world_size: int, source: str, path: str) -> None:
    function, layout = SOURCES[source]
    function(Builder(layout, rank).truth(OPTIMIZER), path)


def load_each(rank: int, world_size: int, layout: str, paths: dict[str, str]) -> dict[str, list[str]]:
    """What is wrong on this rank after a load of each source."""
    builder = Builder(layout, rank)
    expected = builder.truth(OPTIMIZER)
    wrong = {}
    for source, path in paths.items():
        state = builder.stateless(OPTIMIZER)
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
            world_size = LAYOUTS[SOURCES[source][1]].world_size
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
