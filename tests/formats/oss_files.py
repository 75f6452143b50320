"""Folders as the open-source ByteCheckpoint lays them out, made of those of torch.distributed.checkpoint: of each
tensor the bare storage, and the rest of it in the metadata. Its classes are stood for by their names.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from foreign_files import bits

_PACKAGE = "bytecheckpoint.checkpointer"


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """One state, saved without a process group."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    convert(folder)


def convert(folder: Path) -> None:
    """Makes it of a folder of torch.distributed.checkpoint, whoever has saved that."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    contents = {path: path.read_bytes() for path in folder.glob("*.distcp")}
    files: dict[str, io.BytesIO] = {path.name: io.BytesIO() for path in contents}
    storage_data, tensors = {}, {}
    with stand_ins() as (make_metadata, make_info):
        for index, info in metadata.storage_data.items():
            item = contents[folder / info.relative_path][info.offset : info.offset + info.length]
            tensor = torch.load(io.BytesIO(item), weights_only=False)
            tensors[index] = None
            if isinstance(tensor, torch.Tensor):
                tensors[index], item = _taken_apart(tensor.clone(memory_format=torch.contiguous_format))
            file = files[info.relative_path]
            storage_data[index] = make_info(info.relative_path, file.tell(), len(item))
            file.write(item)
        content = pickle.dumps(make_metadata(metadata, storage_data, tensors))
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(content)


def _taken_apart(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """The pickle of a tensor, and its storage."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=2)

    def persistent_id(value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        kind = getattr(torch, value._pickle_storage_type())
        return "storage", kind, "0", "cpu", value._size()

    pickler.persistent_id = persistent_id  # type: ignore[method-assign]
    pickler.dump(tensor)
    return content.getvalue(), bits(tensor)


@contextmanager
def stand_ins() -> Iterator[tuple[Any, Any]]:
    module = ModuleType(f"{_PACKAGE}.meta_type")
    made = {name: type(name, (), {"__module__": module.__name__}) for name in ("Metadata", "_StorageInfo")}
    vars(module).update(made)

    def make_metadata(metadata: Any, storage_data: Any, tensors: Any) -> Any:
        found = made["Metadata"]()
        vars(found).update(
            state_dict_metadata=metadata.state_dict_metadata,
            planner_data=metadata.planner_data,
            storage_data=storage_data,
            all_tensor_metadata=tensors,
            bytecheckpoint_version="0.0.2",
            user_defined_dict={},
        )
        return found

    def make_info(relative_path: str, offset: int, length: int) -> Any:
        info = made["_StorageInfo"]()
        vars(info).update(relative_path=relative_path, offset=offset, length=length)
        return info

    with mock.patch.dict(sys.modules, {_PACKAGE: ModuleType(_PACKAGE), module.__name__: module}):
        yield make_metadata, make_info
