"""Names that the pickles of torch.save may have, and what stands in for each: records for tensors and storages,
plain values for the rest. Every other name is refused, and nothing that a pickle names is imported or run.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import UnsafeCheckpointError
from bytecheckpoint.formats.plain_values import DtypeName, SizeValue
from bytecheckpoint.formats.torch_save.unpickler import (
    FindGlobal,
    PickleError,
    UnheldValueError,
    check_keys,
    checked_key,
    may_collide,
)
from bytecheckpoint.manifest.plain_wire import MAX_DIMS, scalar_from_wire

_NUMPY_DTYPE = re.compile(r"\A[<>|=]?[biufcSU][0-9]{1,9}\Z")
_NUMPY_ADVICE = "save numbers and texts only, as by .tolist() or .astype(str)"
_ATTRIBUTE_BYTES = 100
"""Memory of an attribute that is copied to another dict, roughly."""
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OLD_NAMES = {"builtins.long": "builtins.int", "builtins.xrange": "builtins.range", "builtins.unicode": "builtins.str"}
"""Names of Python 2, which pickles of the protocol of torch.save have."""


class StorageKind(NamedTuple):
    """Stands for a class of storages."""

    dtype: str | None
    """dtype of the elements; None for bytes."""


class StorageRef(NamedTuple):
    """A storage that the pickle points to."""

    key: str
    """Name of the member that is its bytes."""
    dtype: str | None
    num_items: int
    """Length in elements of that dtype, or in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredView:
    """A tensor: elements of a storage."""

    storage: StorageRef
    dtype: str
    item_offset: int
    """Index of its first element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides, in elements."""

    @property
    def num_bytes(self) -> int:
        """Estimate of the size of this record, not of the tensor: the number of its lengths and strides."""
        return len(self.shape) + len(self.strides)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Stands for a class or function. `make` returns what a call of it is read as."""

    make: Callable[..., Any]


class Instance:
    """Stands for an object of a class that is known by name."""

    def __init__(self, kind: str, *args: Any) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.fields: dict[str, Any] = {}
        """Its attributes, in slots or not; empty if its state is neither a dict nor a pair of dicts or None."""
        self.num_bytes = 1
        """Estimate of the memory that its state takes beyond that of the values in it, which a pickle can name again
        and again."""

    def take_state(self, state: Any) -> None:
        self.state = state
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            return
        dicts = [part for part in parts if part]
        if len(dicts) == 1:  # nearly always: it is not copied
            self.fields = dicts[0]
            return
        self.fields = {key: value for part in dicts for key, value in part.items()}
        self.num_bytes = _ATTRIBUTE_BYTES * len(self.fields) + sum(map(may_collide, self.fields)) ** 2


class ByteStream:
    """Stands for an io.BytesIO."""

    def __init__(self, content: Any = b"") -> None:
        self.content = _to_bytes(content)

    def take_state(self, state: Any) -> None:
        content, _, attributes = state
        if attributes:
            raise PickleError("it has a stream with attributes of its own")
        self.content = _to_bytes(content)

    @property
    def num_bytes(self) -> int:
        return len(self.content)


class PickledArray:
    """Stands for a numpy array, which is empty until `take_state`."""

    def __init__(self) -> None:
        self.array: np.ndarray = np.empty(0)

    def take_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.array = _array(content, dtype, shape, "F" if is_fortran else "C")


class PickledDtype:
    """Stands for a numpy dtype."""

    def __init__(self, text: Any, *_: Any) -> None:
        if type(text) is not str or not _NUMPY_DTYPE.match(text):
            raise UnheldValueError(f"it holds numpy data of the dtype {text!r:.80}", _NUMPY_ADVICE)
        self.dtype = np.dtype(text)

    def take_state(self, state: Any) -> None:
        _, order, subdtype, names, fields, *_rest = state
        if subdtype or names or fields:
            raise UnheldValueError("it holds a numpy array of records", _NUMPY_ADVICE)
        if order in {"<", ">"}:
            self.dtype = self.dtype.newbyteorder(order)


def find_value(module: str, name: str) -> Any:
    """Returns the stand-in for a global of a torch.save file.

    Raises UnsafeCheckpointError (pickle_refused) for every name that is not known.
    """
    full_name = f"{_OLD_MODULES.get(module, module)}.{name}"
    full_name = _OLD_NAMES.get(full_name, full_name)
    found = VALUES.get(full_name)
    if found is None and module == "torch" and name in DTYPE_ITEMSIZES:
        return DtypeName(name)
    if found is None:
        raise refused(full_name)
    return found


def with_values(values: Mapping[str, Any]) -> FindGlobal:
    """Returns a `find_value` that knows these full names as well; they come before its own."""

    def find(module: str, name: str) -> Any:
        found = values.get(f"{module}.{name}")
        return find_value(module, name) if found is None else found

    return find


def refused(name: str) -> UnsafeCheckpointError:
    """Returns the error for a global without a stand-in. Callers put the path before it."""
    return UnsafeCheckpointError(
        f"its pickle names {name!r:.200}, which is neither a tensor nor plain data; nothing of it was imported or run, "
        "and nothing was loaded. If you trust whoever wrote it, load it with the program that it comes from and save "
        "tensors and plain data (numbers, texts, lists, dicts) only",
        kind="pickle_refused",
    )


def full_names(table: Mapping[str, str]) -> list[str]:
    """Returns the full names in a table from modules to the names in each, which spaces separate."""
    return [f"{module}.{name}" for module, names in table.items() for name in names.split()]


def instances(table: Mapping[str, str]) -> dict[str, Any]:
    """Returns stand-ins for the classes in a table as of `full_names`, by their full names: calls give an Instance."""
    return {name: Call(partial(Instance, name)) for name in full_names(table)}


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise PickleError(f"it has {value!r:.80} where a number from 0 on stands")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    numbers = values.lengths if isinstance(values, SizeValue) else values
    if type(numbers) not in {tuple, list}:
        raise PickleError(f"it has a {type(values).__name__} where a shape stands")
    return tuple(map(_natural, numbers))


def lengths_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor, or offsets in one. Raises PickleError for any other value."""
    lengths = _naturals(value)
    if len(lengths) > MAX_DIMS:
        raise PickleError(f"it has a tensor of {len(lengths)} dimensions, at most {MAX_DIMS} are read")
    return lengths


def find_storage(pid: Any) -> StorageRef:
    """Returns the storage of a `("storage", kind, key, location, numel)`. Raises PickleError for any other id."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageKind):
        raise PickleError("it points to something outside of it that is not a storage")
    if type(pid[2]) is not str:
        raise PickleError("it points to a storage by something that is not text")
    return StorageRef(pid[2], pid[1].dtype, _natural(pid[4]))


def _rebuild_tensor(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> StoredView:
    """Returns the tensor that these arguments describe; `rest` is requires_grad, hooks and metadata."""
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise PickleError("it makes a tensor from something that is not a storage of elements")
    return _view(storage, storage.dtype, (offset, size, strides), rest[2:])


def _rebuild_any_tensor(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> StoredView:
    """Returns the tensor that these arguments describe; `rest` is requires_grad, hooks, dtype and metadata."""
    if not isinstance(storage, StorageRef) or not isinstance(rest[2], DtypeName):
        raise PickleError("it makes a tensor from something that is not a storage")
    return _view(storage, rest[2].name, (offset, size, strides), rest[3:])


def _view(storage: StorageRef, dtype: str, place: tuple[Any, Any, Any], metadata: Sequence[Any]) -> StoredView:
    if metadata and metadata[0]:
        what = f"it has a tensor that is stored as another one ({metadata[0]!r:.80})"
        raise UnheldValueError(what, "save it with .resolve_conj() or .resolve_neg()")
    offset, size, strides = place
    view = StoredView(storage, dtype, _natural(offset), lengths_of(size), lengths_of(strides))
    if len(view.shape) != len(view.strides):
        raise PickleError(f"it has a tensor of shape {view.shape} and strides {view.strides}")
    return view


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    if kind is not _TENSOR or not isinstance(function, Call) or type(args) is not tuple:
        raise PickleError("it has a tensor of a class of its own")
    return function.make(*args)


def _size(lengths: Any = ()) -> SizeValue:
    return SizeValue(_naturals(lengths))


def _to_bytes(text: Any = b"", encoding: Any = "latin1") -> bytes:
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in {"latin1", "latin-1"}:
        raise PickleError("it encodes something that is not text")
    return text.encode("latin-1")


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise PickleError("it counts something that is not a dict")
    return Counter(counts or {})


def _array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    if not isinstance(dtype, PickledDtype) or type(content) is not bytes or order not in {"C", "F"}:
        raise PickleError("it holds a numpy array of objects, which is not plain data")
    return np.frombuffer(content, dtype.dtype).reshape(_naturals(shape), order=order)


def _numpy_scalar(dtype: Any, content: Any = None) -> Any:
    if not isinstance(dtype, PickledDtype) or type(content) is not bytes:
        raise PickleError("it holds a numpy object, which is not plain data")
    return scalar_from_wire((dtype.dtype.str, (), content))


def _complex(*args: Any) -> complex:
    if any(type(arg) not in {int, float} for arg in args):
        raise PickleError("it makes a complex number of something else")
    return complex(*args)


def _list_of(items: Any = ()) -> list[Any]:
    if type(items) not in {list, tuple, set, frozenset}:
        raise PickleError(f"it makes a list of a {type(items).__name__}")
    return list(items)


def _path(*parts: Any) -> str:
    if any(type(part) is not str for part in parts):
        raise PickleError("it makes a path of something that is not text")
    return parts[0] + "/".join(parts[1:]) if parts and parts[0] == "/" else "/".join(parts) or "."


def _text(value: Any) -> str:
    if type(value) is not str:
        raise PickleError("it names a layout by something that is not text")
    return value


def _device(kind: Any, index: Any = None) -> str:
    return _text(kind) if index is None else f"{_text(kind)}:{_natural(index)}"


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if type(pairs) not in {list, tuple} or any(type(pair) not in {list, tuple} or len(pair) != 2 for pair in pairs):
        raise PickleError("it makes a dict of something that is not a list of pairs")
    check_keys([key for key, _ in pairs])
    return OrderedDict((checked_key(key), value) for key, value in pairs)


def _dict_of(items: Any = ()) -> dict[Any, Any]:
    return dict(items if isinstance(items, dict) else _ordered(items))


def _reconstructed(kind: Any, *_: Any) -> Any:
    """Calls the class without arguments: so do pickles of the protocols 0 and 1, which set the state afterwards."""
    if not isinstance(kind, Call):
        raise PickleError("it makes an object of something that is not a class")
    return kind.make()


STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""Name of a class of storages, without `Storage` -> dtype of its elements."""
_TENSOR = Call(_rebuild_parameter)
"""Stands for the classes torch.Tensor and Parameter."""

VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "collections.OrderedDict": Call(_ordered),
        "collections.Counter": Call(_counter),
        "collections.defaultdict": Call(lambda _factory=None, items=(): defaultdict(None, _dict_of(items))),
        "builtins.dict": Call(_dict_of),
        "builtins.list": Call(_list_of),
        "builtins.set": Call(_list_of),
        "builtins.frozenset": Call(_list_of),
        **{f"builtins.{name}": name for name in ("int", "float", "str", "bool", "object")},
        "builtins.bytearray": Call(_to_bytes),
        "builtins.bytes": Call(_to_bytes),
        "builtins.complex": Call(_complex),
        "_codecs.encode": Call(_to_bytes),
        "_io.BytesIO": Call(ByteStream),
        "copyreg._reconstructor": Call(_reconstructed),
        "pathlib.PosixPath": Call(_path),
        "pathlib.PurePosixPath": Call(_path),
        "pathlib._local.PosixPath": Call(_path),
        **instances({"argparse": "Namespace", "types": "SimpleNamespace"}),
        "torch.Size": Call(_size),
        "torch.device": Call(_device),
        "torch.Tensor": _TENSOR,
        "torch.nn.parameter.Parameter": _TENSOR,
        "torch.nn.parameter.Buffer": _TENSOR,
        "torch.serialization._get_layout": Call(_text),
        "torch.storage.UntypedStorage": StorageKind(None),
        **{f"torch.{name}Storage": StorageKind(dtype) for name, dtype in STORAGE_DTYPES.items()},
        **{f"torch.cuda.{name}Storage": StorageKind(dtype) for name, dtype in STORAGE_DTYPES.items()},
        "torch._utils._rebuild_tensor": Call(_rebuild_tensor),
        "torch._utils._rebuild_tensor_v2": Call(_rebuild_tensor),
        "torch._utils._rebuild_tensor_v3": Call(_rebuild_any_tensor),
        "torch._utils._rebuild_parameter": Call(_rebuild_parameter),
        "torch._utils._rebuild_parameter_with_state": Call(_rebuild_parameter),
        "torch._tensor._rebuild_from_type_v2": Call(_rebuild_from_type),
        "numpy.dtype": Call(PickledDtype),
        "numpy.ndarray": Call(PickledArray),
        **dict.fromkeys(
            ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
            Call(lambda *_: PickledArray()),
        ),
        **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), Call(_numpy_scalar)),
        **dict.fromkeys(("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"), Call(_array)),
    }
)
"""Full name -> stand-in. A set is read as a list; a path, a device or a layout is read as its text."""
