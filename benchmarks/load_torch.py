"""How torch's own means and safetensors load in benchmarks/load.py: into the memory of the state, which is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from load_contender import Contender, Place
from load_states import Held
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


def contestants() -> dict[str, Contender]:
    return {
        "dcp": Contender(dcp_save, dcp_load),
        "torch.load": Contender(torch_save, torch_load(is_mapped=False)),
        "torch.load-mmap": Contender(torch_save, torch_load(is_mapped=True)),
        "safetensors": Contender(safetensors_save, safetensors_load),
    }


def dcp_save(folder: Path, held: Held) -> None:
    dcp.save(held.tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))


def dcp_load(place: Place, held: Held) -> None:
    planner = SlicePlanner(held.part.start) if held.layout.kind == "slice" else None
    dcp.load(held.tensors, storage_reader=reader(place), planner=planner)


def reader(place: Place) -> dcp.StorageReader:
    if place.url is None:
        return dcp.FileSystemReader(place.folder)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415  slow stores only

    return FsspecReader(place.url, **place.options)


class SlicePlanner(DefaultLoadPlanner):
    """DCP has no call for a part of a tensor on one rank, but its plans can say one: the rows from `start` on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def create_local_plan(self) -> LoadPlan:
        requests: list[ReadItem] = []
        for fqn, tensor in self.state_dict.items():
            offsets = torch.Size([self._start, *[0] * (tensor.dim() - 1)])
            wanted = [ChunkStorageMetadata(offsets, tensor.shape)]
            requests += create_read_items_for_chunk_list(fqn, self.metadata.state_dict_metadata[fqn], wanted)
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Of which the plan knows one part: all of what the state holds."""
        return self.state_dict[index.fqn]


def file_of(folder: Path, held: Held, suffix: str) -> Path:
    return folder / f"{0 if held.has_one_file else held.rank}.{suffix}"


def is_writer(held: Held) -> bool:
    return held.rank == 0 or not held.has_one_file


def torch_save(folder: Path, held: Held) -> None:
    """Each rank what it holds; where all hold the same, one for all."""
    if is_writer(held):
        torch.save(held.local_tensors, file_of(folder, held, "pt"))
    held.barrier()


def torch_load(*, is_mapped: bool) -> Callable[[Place, Held], None]:
    def run(place: Place, held: Held) -> None:
        put(torch.load(file_of(place.folder, held, "pt"), mmap=is_mapped), held)

    return run


def safetensors_save(folder: Path, held: Held) -> None:
    """As torch_save."""
    if is_writer(held):
        save_file(held.local_tensors, file_of(folder, held, "safetensors"))
    held.barrier()


def safetensors_load(place: Place, held: Held) -> None:
    path = file_of(place.folder, held, "safetensors")
    if held.layout.kind != "slice":
        put(load_file(path), held)
        return
    with safe_open(path, "pt") as file:
        for name, tensor in held.tensors.items():
            tensor.copy_(file.get_slice(name)[held.part])


def put(loaded: dict[str, Any], held: Held) -> None:
    is_slice = held.layout.kind == "slice"
    for name, tensor in held.local_tensors.items():
        tensor.copy_(loaded[name][held.part] if is_slice else loaded[name])
