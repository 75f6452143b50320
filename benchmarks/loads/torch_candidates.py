"""Loads of torch itself and of safetensors, into the memory of a state that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from loads.candidate import LoadFunctions, StoredAt
from shared.rank_files import rank_file, write_safetensors, write_torch
from shared.states import HeldState


def candidates() -> dict[str, LoadFunctions]:
    return {
        "dcp": LoadFunctions(dcp_save, dcp_load),
        "torch.load": LoadFunctions(write_torch, torch_load(is_mapped=False)),
        "torch.load-mmap": LoadFunctions(write_torch, torch_load(is_mapped=True)),
        "safetensors": LoadFunctions(write_safetensors, safetensors_load),
    }


def dcp_save(folder: Path, held: HeldState) -> None:
    dcp.save(held.tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))


def dcp_load(stored: StoredAt, held: HeldState) -> None:
    planner = SlicePlanner(held.part.start) if held.layout.kind == "slice" else None
    dcp.load(held.tensors, storage_reader=reader(stored), planner=planner)


def reader(stored: StoredAt) -> dcp.StorageReader:
    if stored.url is None:
        return dcp.FileSystemReader(stored.folder)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415  slow stores only

    return FsspecReader(stored.url, **stored.options)


class SlicePlanner(DefaultLoadPlanner):
    """Plans the rows from `start` on: DCP has no call for a part of a tensor on one rank, but its plans can say one."""

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
        """Returns the state's tensor, which is the one part that the plan knows."""
        return self.state_dict[index.fqn]


def torch_load(*, is_mapped: bool) -> Callable[[StoredAt, HeldState], None]:
    def run(stored: StoredAt, held: HeldState) -> None:
        put(torch.load(rank_file(stored.folder, held, "pt"), mmap=is_mapped), held)

    return run


def safetensors_load(stored: StoredAt, held: HeldState) -> None:
    path = rank_file(stored.folder, held, "safetensors")
    if held.layout.kind != "slice":
        put(load_file(path), held)
        return
    with safe_open(path, "pt") as file:
        for name, tensor in held.tensors.items():
            tensor.copy_(file.get_slice(name)[held.part])


def put(loaded: dict[str, Any], held: HeldState) -> None:
    is_slice = held.layout.kind == "slice"
    for name, tensor in held.local_tensors.items():
        tensor.copy_(loaded[name][held.part] if is_slice else loaded[name])
