"""A file of torch.save, one archive of the whole state, written without the state: its pickle has tensors that point to
members of the archive, and these are streamed. torch.load reads it, also with weights_only.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from bytecheckpoint.adapters.shards import dtype_name, torch_dtype
from bytecheckpoint.conversion.stream import FileRun, TargetFile, TargetPlan, TensorSpan, run_bytes, spread, tensor_span
from bytecheckpoint.conversion.zip_writer import ZipMember, archive_runs
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats.torch_save.unpickler_globals import STORAGE_DTYPES
from bytecheckpoint.info import LEFT_OUT
from bytecheckpoint.loading.plain_trees import PlainData, TensorStub, without_numpy
from bytecheckpoint.loading.select import LeftOut, Selection
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.memory.tensor_bytes import as_bytes
from bytecheckpoint.planner.copy_plan import WantedTensor

_PROTOCOL = 2
"""The protocol that torch.save writes, and that weights_only knows."""
_STORAGES = {dtype: f"{name}Storage" for name, dtype in STORAGE_DTYPES.items()}
"""The classes by which torch names the dtype of a storage. Of all other dtypes a storage is of bytes."""


def plan_torch(manifest: Manifest, selection: Selection, plain: PlainData, *, name: str, num_ranks: int) -> TargetPlan:
    """Plans one archive of the whole state, in the file of this name."""
    nested = plain.nested()
    state = without_numpy(_with_lists(nested) if manifest.foreign_format == "torch.save" else nested, "")
    file = TargetFile(name, save_runs(state, selection.wanted))
    return TargetPlan([file], spread([file.byte_length], num_ranks), name, None, left_out_metadata(manifest))


def _with_lists(state: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the state of a file of Lightning with its lists of optimizers and schedulers, which the reader of
    torch.save has taken apart: `optimizer_states.0`. A list with a gap stays as it is, and so does every other file,
    which may have such names of its own.
    """
    if "pytorch-lightning_version" not in state:
        return state
    lists: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        key, _, number = str(name).rpartition(".")
        is_item = isinstance(value, dict) and (key == "lr_schedulers" or value.keys() >= {"state", "param_groups"})
        if number.isdecimal() and is_item and key not in state:
            lists.setdefault(key, {})[number] = value
    whole = {key for key, items in lists.items() if list(items) == [str(number) for number in range(len(items))]}
    with_lists: dict[Any, Any] = {}
    for name, value in state.items():
        key, _, number = str(name).rpartition(".")
        if key in whole and number in lists[key]:
            with_lists[key] = list(lists[key].values())
        else:
            with_lists[name] = value
    return with_lists


def left_out_metadata(manifest: Manifest) -> list[LeftOut]:
    """Returns a record of each metadata value, for a format without a place for them. What the reader of a foreign
    format says that it left out is no such value.
    """
    note = LEFT_OUT if manifest.foreign_format else None
    return [LeftOut(f"metadata {key}", 0, 0, "metadata") for key in manifest.metadata if key != note]


class _StorageStub(NamedTuple):
    key: str
    kind: str
    num_items: int


def save_runs(value: Any, wanted: Sequence[WantedTensor], *, first_run: int = 0) -> list[FileRun]:
    """Returns the archive that torch.save would write for a value with stubs for tensors, as runs of a file."""
    pickler = _Pickler(wanted)
    content = pickler.pickled(value)
    members = [
        ZipMember("archive/data.pkl", content),
        ZipMember("archive/byteorder", b"little"),
        *(ZipMember(f"archive/data/{key}", content) for key, content in enumerate(pickler.contents)),
        ZipMember("archive/version", b"3\n"),
    ]
    return archive_runs(members, first_run=first_run)


class _Pickler(pickle.Pickler):
    """Writes stubs as torch writes tensors."""

    def __init__(self, wanted: Sequence[WantedTensor]) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=_PROTOCOL)
        self._wanted = wanted
        self._storages: dict[int, _StorageStub] = {}
        """Storage of each tensor, by number."""
        self.contents: list[bytes | TensorSpan] = []
        """Contents of the storages, in the order of their keys."""

    def pickled(self, value: Any) -> bytes:
        self.dump(value)
        return self._stream.getvalue()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorStub):
            tensor = self._wanted[value.number]
            storage = self._storages.get(value.number)
            if storage is None:
                storage = self._new_storage(tensor.dtype, tensor_span(value.number, tensor))
                self._storages[value.number] = storage
            return _rebuilt(storage, tensor.dtype, tensor.shape)
        if isinstance(value, torch.Tensor):  # a small one in plain data
            dtype = dtype_name(value.dtype)
            storage = self._new_storage(dtype, bytes(as_bytes(value.contiguous())))
            return _rebuilt(storage, dtype, tuple(value.shape))
        return NotImplemented

    def _new_storage(self, dtype: str, content: bytes | TensorSpan) -> _StorageStub:
        self.contents.append(content)
        kind = _STORAGES.get(dtype, "UntypedStorage")
        num_items = run_bytes(content) // (itemsize(dtype) if dtype in _STORAGES else 1)
        return _StorageStub(str(len(self.contents) - 1), kind, num_items)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageStub):
            return None
        return "storage", getattr(torch, value.kind), value.key, "cpu", value.num_items


def _rebuilt(storage: _StorageStub, dtype: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns the function and arguments with which a pickle makes a tensor that is all of a storage."""
    hooks: OrderedDict[str, Any] = OrderedDict()
    strides = torch.empty(tuple(shape), device="meta").stride()
    place = (storage, 0, tuple(shape), strides, False, hooks)
    if dtype in _STORAGES:
        return _rebuild_tensor_v2, place
    return _rebuild_tensor_v3, (*place, torch_dtype(dtype))


def saved_value(value: Any) -> bytes:
    """Returns the bytes of the file that torch.save writes for a value of plain data."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
