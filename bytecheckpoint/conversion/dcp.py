"""A folder of torch.distributed.checkpoint: `.metadata` and `.distcp` files, as its FileSystemWriter writes them. torch
itself plans what the state is taken apart into.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from bytecheckpoint.adapters.shards import torch_dtype
from bytecheckpoint.conversion.stream import FileRun, TargetFile, TargetPlan, run_bytes, spread
from bytecheckpoint.conversion.torch_save import left_out_metadata, save_runs, saved_value
from bytecheckpoint.conversion.zip_writer import ALIGNMENT
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.loading.plain_trees import PlainData, TensorStub
from bytecheckpoint.loading.select import LeftOut, Selection
from bytecheckpoint.manifest import DataFile, Manifest
from bytecheckpoint.planner.copy_plan import WantedTensor

METADATA_NAME, SUFFIX = ".metadata", ".distcp"
WHY_LOST = "empty, which torch.distributed.checkpoint does not write"
_VERSION = "1.0.0"
"""Version of the metadata, which torch writes since 2.9."""


def plan_dcp(manifest: Manifest, selection: Selection, plain: PlainData, *, num_ranks: int, infix: str) -> TargetPlan:
    """Plans a file for each rank that gets any tensor or value. `infix` in the names of files tells them from those of
    an older checkpoint.
    """
    nested = plain.nested()
    metadata, indices, values = planned_by_torch(nested, selection.wanted)
    lost = _lost_containers(nested, metadata)
    # One archive for each tensor, under however many names, and one for each value.
    archives: dict[object, list[MetadataIndex]] = {}
    for fqn, index in indices.items():
        value = values[fqn]
        archives.setdefault(value if isinstance(value, TensorStub) else (fqn, "value"), []).append(index)
    indices_of = list(archives.values())
    sizes = [
        sum(map(run_bytes, _archive(values[indices[0].fqn], selection.wanted, first_run=0))) for indices in indices_of
    ]
    files: list[TargetFile] = []
    by_rank: list[list[int]] = []
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, numbers in enumerate(spread(sizes, num_ranks)):
        by_rank.append([len(files)] if numbers else [])
        runs: list[FileRun] = []
        position = 0
        name = f"__{rank}_{infix}0{SUFFIX}"
        for number in numbers:
            archive = _archive(values[indices_of[number][0].fqn], selection.wanted, first_run=len(runs))
            length = sum(map(run_bytes, archive))
            storage |= {index: _StorageInfo(name, position, length) for index in indices_of[number]}
            padding = -length % ALIGNMENT
            runs += [*archive, b"\0" * padding]
            position += length + padding
        files += [TargetFile(name, runs)] if runs else []

    def encoded(_: Sequence[DataFile]) -> bytes:
        metadata.storage_data, metadata.storage_meta, metadata.version = storage, StorageMeta(), _VERSION
        return pickle.dumps(metadata)

    empty = [LeftOut(name, 0, 0, WHY_LOST) for name in lost]
    return TargetPlan(files, by_rank, METADATA_NAME, encoded, [*empty, *plain.left_out, *left_out_metadata(manifest)])


def planned_by_torch(
    state: Mapping[Any, Any], wanted: Sequence[WantedTensor]
) -> tuple[Metadata, dict[str, MetadataIndex], dict[str, Any]]:
    """Returns what torch would write for a state: its metadata, and by FQN the index and the value of each entry. The
    value of a tensor is its TensorStub, also in a value that torch does not take apart, such as a tuple.

    Raises CheckpointMismatchError (conflict) for two entries of one FQN.
    """
    stubs: dict[int, TensorStub] = {}

    def with_meta_tensors(value: Any) -> Any:
        if isinstance(value, TensorStub):
            tensor = wanted[value.number]
            meta = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta")
            stubs[id(meta)] = value
            return meta
        if isinstance(value, dict):
            return {key: with_meta_tensors(item) for key, item in value.items()}
        return type(value)(map(with_meta_tensors, value)) if type(value) in (list, tuple) else value

    def with_stubs(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_stubs(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(with_stubs, value))
        return stubs.get(id(value), value) if isinstance(value, torch.Tensor) else value

    planner = DefaultSavePlanner()
    with_meta = {str(key): with_meta_tensors(value) for key, value in state.items()}
    try:
        planner.set_up_planner(with_meta, is_coordinator=True)
    except ValueError as error:  # as of the keys 1 and "1"
        raise CheckpointMismatchError(
            f"torch.distributed.checkpoint would give two values one name: {error}; nothing was written: leave them "
            "out with exclude, or convert to another format",
            kind="conflict",
        ) from error
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    flat = planner.state_dict
    values = {fqn: with_stubs(value) for fqn, value in flat.items()}
    return metadata, {item.index.fqn: item.index for item in plan.items}, values


def _lost_containers(state: Mapping[Any, Any], metadata: Metadata) -> list[str]:
    """Returns the names of containers that torch leaves out: they are empty, or hold only empty ones."""
    paths = (metadata.planner_data or {}).values()
    written_inside = {path[:length] for path in paths for length in range(len(path) + 1)}
    written = set(paths)
    lost: list[str] = []

    def look(value: Any, path: tuple[Any, ...]) -> None:
        is_list = type(value) in (list, tuple)
        if path in written or not (is_list or isinstance(value, Mapping)):
            return
        if path not in written_inside:
            lost.append(".".join(map(str, path)))
            return
        for key, item in enumerate(value) if is_list else value.items():
            look(item, (*path, key if is_list else str(key)))

    for key, item in state.items():
        look(item, (str(key),))
    return lost


def _archive(value: Any, wanted: Sequence[WantedTensor], *, first_run: int) -> list[FileRun]:
    # A small tensor in plain data is one of torch's.
    if isinstance(value, torch.Tensor) or _holds_stub(value):
        return save_runs(value, wanted, first_run=first_run)
    return [saved_value(value)]


def _holds_stub(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_stub, value.values()))
    return isinstance(value, TensorStub) or (type(value) in (list, tuple) and any(map(_holds_stub, value)))
