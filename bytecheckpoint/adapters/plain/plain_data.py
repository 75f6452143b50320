"""Plain data written down without pickle: None, bool, int, float, complex, str, bytes, list, tuple, dict with str or
int keys, torch.Size, torch.dtype, numpy arrays and scalars, small tensors, and what `plain_types` knows. What comes
back has the same types.

The encoding is msgpack; what msgpack lacks is an extension type, documented in docs/format.md. Tensors that lie in
data files stand in the tree as a `TensorRef`.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from msgspec.msgpack import Ext, encode
from torch.distributed.tensor import DTensor

from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, parts_of
from bytecheckpoint.adapters.plain.numpy_values import array_from_wire, array_to_wire, is_plain_array, scalar_from_wire
from bytecheckpoint.adapters.plain.plain_types import advice_for, is_tagged, tag_value, untag_value
from bytecheckpoint.adapters.shards import (
    NEW_TUPLE,
    PLAIN_TENSORS,
    check_has_memory,
    dense_dtype,
    dtype_name,
    flat_bytes,
    torch_dtype,
    unsupported,
)
from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointSaveError, UnsafeCheckpointError

MAX_DEPTH = 64
MAX_DIMS = 64
SMALL_TENSOR_BYTES = 64 << 10

_TUPLE, _PAIRS, _COMPLEX, _SIZE, _DTYPE, _TENSOR, _ARRAY, _SCALAR, _REF, _BIG_INT, _ORDERED, _COUNTER = range(1, 13)
_MAX_INT_BITS = 14_284
"""Longer ones may have more than 4,300 decimal digits, which Python neither writes nor reads."""
_INT64 = range(-(1 << 63), 1 << 64)
_CONTENT_FQN = re.compile(r"@[0-9a-f]{16}\Z")

_UNDECODABLE = (
    *(msgspec.DecodeError, struct.error, ValueError, TypeError, AttributeError),
    *(RuntimeError, ArithmeticError, SyntaxError),
)
"""What msgspec, numpy and torch raise for content that nobody encoded: names that they lack, impossible shapes."""

_decode_fqn = msgspec.msgpack.Decoder(str).decode

_WRITTEN_AS_THEY_ARE = frozenset({type(None), bool, float, bytes})

TensorHook = Callable[[str, torch.Tensor], str | torch.Tensor | None]
"""Gives what stands in the tree for the tensor of this FQN: the FQN under which its bytes lie in data files, None where
that is its own, or a tensor to write in place."""


class TensorRef(NamedTuple):
    """Stands in a tree for a tensor whose bytes lie in data files."""

    fqn: str


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, DTensor, TensorRef, *PLAIN_TENSORS})
"""Types of what is no entry of its own and holds none: most of a state, told from the rest by one look."""

_LEAVES = ATOMS - {DTensor}  # one of a tensor subclass has the parts of that below it


def encode_plain(value: Any, fqn: str, on_tensor: TensorHook) -> bytes:
    """The tree below `fqn` as bytes; `on_tensor` says where its tensors go.

    Raises CheckpointSaveError (unsupported_value), naming the FQN, for what is no plain data.
    """
    return encode(_to_wire(value, fqn, on_tensor, MAX_DEPTH))


@lru_cache(maxsize=16)
def encode_refs(fqn: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    """A dict below `fqn` that has nothing but tensors under these names: their FQNs, and what `encode_plain` makes of
    it. Both follow from the names alone, and are the same on every save of a state.
    """
    for name in names:
        check_key(name, fqn)
    fqns = tuple(f"{fqn}.{name}" for name in names)
    refs = {name: _ext(_REF, of_tensor) for name, of_tensor in zip(names, fqns, strict=True)}
    return fqns, encode(refs)


def keep_in_tree(_fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The `on_tensor` of a tree whose tensors are all written in place."""
    return tensor


def join_fqn(fqn: str, key: object) -> str:
    return f"{fqn}.{key}" if fqn else str(key)


def _to_wire(value: Any, fqn: str, on_tensor: TensorHook, depth: int) -> Any:
    if depth == 0:
        raise too_deep(fqn)
    kind = type(value)
    if kind in _WRITTEN_AS_THEY_ARE:
        return value
    if kind is str:
        return _checked_text(value, fqn)
    if kind is int:
        return value if value in _INT64 else _big_int_to_wire(value, fqn)
    if isinstance(value, torch.Tensor):
        if is_subclass(value):
            return _dict_to_wire(parts_of(fqn, value), fqn, on_tensor, depth)
        return _place_of_tensor(value, fqn, on_tensor)
    if kind is TensorRef:
        return _ext(_REF, value.fqn)
    if kind in (list, tuple):
        items = [_to_wire(item, join_fqn(fqn, index), on_tensor, depth - 1) for index, item in enumerate(value)]
        return items if kind is list else _ext(_TUPLE, items)
    if kind in (dict, OrderedDict, Counter):
        return _dict_to_wire(value, fqn, on_tensor, depth)
    return _leaf_to_wire(value, fqn)


def _dict_to_wire(value: Mapping[Any, Any], fqn: str, on_tensor: TensorHook, depth: int) -> Any:
    has_names = set(map(type, value)) <= {str}
    if not (has_names and "".join(value).isascii()):
        for key in value:
            check_key(key, fqn)
    if has_names and type(value) is dict and depth > 1 and _WRITTEN_AS_THEY_ARE.issuperset(map(type, value.values())):
        return value
    prefix = f"{fqn}." if fqn else ""
    if has_names and type(value) is dict:
        return {
            key: _place_of_tensor(item, f"{prefix}{key}", on_tensor)
            if type(item) in PLAIN_TENSORS and depth > 1  # most of a state: told from the rest by one look
            else _to_wire(item, f"{prefix}{key}", on_tensor, depth - 1)
            for key, item in value.items()
        }
    pairs = [(key, _to_wire(item, f"{prefix}{key}", on_tensor, depth - 1)) for key, item in value.items()]
    return _ext(_PAIRS if type(value) is dict else _ORDERED if type(value) is OrderedDict else _COUNTER, pairs)


def _place_of_tensor(tensor: torch.Tensor, fqn: str, on_tensor: TensorHook) -> Ext:
    found = on_tensor(fqn, tensor)
    if found is None or isinstance(found, str):
        return Ext(_REF, encode(found or fqn))
    return _tensor_to_wire(fqn, found)


def too_deep(fqn: str) -> CheckpointSaveError:
    """What is raised where no depth is left; so ends what contains itself."""
    return unsupported(fqn, f"nested more than {MAX_DEPTH} deep", "flatten it, or break the circle that it makes")


def fits_inline(tensor: torch.Tensor) -> bool:
    """True if a tensor is small and whole, and may travel with the plain data around it."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    return is_plain and tensor.layout is torch.strided and tensor.nbytes <= SMALL_TENSOR_BYTES


def check_key(key: object, fqn: str) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a key, in the dict of this FQN, that no FQN can hold."""
    if type(key) is str and key.isascii():
        return
    if type(key) not in (str, int):
        raise unsupported(fqn, f"a dict with a key of type {type(key).__name__}, {key!r}", "use str or int keys")
    if isinstance(key, int) and key not in _INT64:
        raise unsupported(fqn, f"a dict with the key {key}, which takes more than 64 bits", "use str keys")
    _checked_text(str(key), f"{fqn}, in its key {key!r},")


def _checked_text(text: str, fqn: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise unsupported(fqn, "text with half a surrogate pair", "encode it as bytes with errors='surrogateescape'")
    return text


def _big_int_to_wire(value: int, fqn: str) -> Ext:
    if value.bit_length() > _MAX_INT_BITS:
        what = f"an int of {value.bit_length()} bits, and {_MAX_INT_BITS} is the most that can be saved"
        raise unsupported(fqn, what, "save its bytes, which value.to_bytes gives")
    return _ext(_BIG_INT, str(value))


def _leaf_to_wire(value: Any, fqn: str) -> Any:
    if type(value) is complex:
        return Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if isinstance(value, torch.Size):
        return _ext(_SIZE, list(value))
    if isinstance(value, torch.dtype):
        return _ext(_DTYPE, dtype_name(value))
    if is_plain_array(value):
        return _ext(_ARRAY if isinstance(value, np.ndarray) else _SCALAR, array_to_wire(value))
    tagged = tag_value(value)
    if tagged is not None:
        for text in tagged.texts:
            _checked_text(text, fqn)
        return _ext(_PAIRS, [tagged])
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise unsupported(fqn, f"an object of type {name}", advice_for(value))


def _tensor_to_wire(fqn: str, tensor: torch.Tensor) -> Ext:
    return _ext(_TENSOR, [dtype_name(tensor.dtype), list(tensor.shape), bytes(_content(fqn, tensor))])


def _content(fqn: str, tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, row-major, on the host; not a copy where they lie so already."""
    dense_dtype(fqn, tensor)
    check_has_memory(fqn, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1:  # torch cannot copy its sub-byte integers
        plain = plain.view(torch.uint8)
    return flat_bytes(plain.cpu().contiguous()).numpy().data


def content_fqn(fqn: str, tensor: torch.Tensor) -> str:
    """The FQN under which a tensor is stored that may differ from rank to rank: equal ones have the same."""
    content = _content(fqn, tensor)
    digest = xxhash.xxh3_64(f"{dtype_name(tensor.dtype)} {list(tensor.shape)} ".encode())
    digest.update(content)
    return f"{fqn}@{digest.hexdigest()}"


def is_content_fqn(fqn: str) -> bool:
    """True if an FQN has the form of those that `content_fqn` gives; one that a user chose may have it as well."""
    return "@" in fqn and _CONTENT_FQN.search(fqn) is not None


def without_content(fqn: str) -> str:
    """The FQN of the value, where this is one that `content_fqn` gave to its tensor; else the same."""
    return fqn.rpartition("@")[0] if is_content_fqn(fqn) else fqn


def _ext(code: int, content: Any) -> Ext:
    return Ext(code, encode(content))


def decode_plain(data: bytes) -> Any:
    """The tree in these bytes, with TensorRefs where tensors lie in data files. Runs no code of the checkpoint's.

    Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (limits_exceeded).
    """
    try:
        return _decode(data, MAX_DEPTH)
    except _UNDECODABLE as error:
        if isinstance(error, CheckpointCorruptError | UnsafeCheckpointError):
            raise
        raise CheckpointCorruptError(
            f"the manifest is damaged: plain data cannot be decoded: {error}", kind="bad_manifest"
        ) from error


def _decode(data: bytes | memoryview, depth: int) -> Any:
    if depth == 0:
        raise UnsafeCheckpointError(f"plain data is nested more than {MAX_DEPTH} deep", kind="limits_exceeded")

    def from_ext(code: int, content: memoryview) -> Any:
        if code == _REF:  # most of a state
            return NEW_TUPLE(TensorRef, (_decode_fqn(content),))
        return _from_ext(code, content, depth - 1)

    return msgspec.msgpack.decode(data, ext_hook=from_ext)


def _from_ext(code: int, content: memoryview, depth: int) -> Any:
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", content))
    value = _decode(content, depth)
    if code not in _DECODERS:
        raise ValueError(f"extension type {code} is not known")
    return _DECODERS[code](value)


def _dtype_from_wire(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.80} is no dtype of torch's")
    return dtype


def _tensor_from_wire(value: Any) -> torch.Tensor:
    name, shape, content = value
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, at most {MAX_DIMS}")
    if name not in DTYPE_ITEMSIZES or len(content) != prod(shape) * DTYPE_ITEMSIZES[name]:
        raise ValueError(f"{len(content)} bytes are no {name}{shape} tensor")
    if not content:
        return torch.empty(shape, dtype=torch_dtype(name), device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch_dtype(name)).reshape(shape)


def _checked_pairs(pairs: Any) -> Any:
    """Keys as the encoder writes them: of others somebody could have chosen the hashes, all the same."""
    if not all(type(key) is str or (type(key) is int and key in _INT64) for key, _ in pairs):
        raise ValueError("a dict has a key that is neither a text nor an integer of 64 bits")
    return pairs


def _from_pairs(pairs: Any) -> Any:
    """A dict, or what is written as a dict of one pair that no dict is."""
    return untag_value(*pairs[0]) if is_tagged(pairs) else dict(_checked_pairs(pairs))


_DECODERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _PAIRS: _from_pairs,
    _SIZE: torch.Size,
    _DTYPE: _dtype_from_wire,
    _TENSOR: _tensor_from_wire,
    _ARRAY: array_from_wire,
    _SCALAR: scalar_from_wire,
    _BIG_INT: int,
    _ORDERED: lambda pairs: OrderedDict(_checked_pairs(pairs)),
    _COUNTER: lambda pairs: Counter(dict(_checked_pairs(pairs))),
}


def leaves(value: Any, fqn: str) -> dict[str, Any]:
    """The leaves of a tree by FQN: what is loaded, compared and renamed one by one.

    Dicts and tensor subclasses are taken apart down to their last key, lists and tuples only where they hold tensors;
    an empty container is a leaf.

    Raises CheckpointSaveError (unsupported_value) where two leaves would have the same FQN.
    """
    found: dict[str, Any] = {}
    _add_leaves(value, fqn, found, MAX_DEPTH)
    return found


def _add_leaves(value: Any, fqn: str, found: dict[str, Any], depth: int) -> None:
    if depth == 0:
        raise too_deep(fqn)
    children = _children(value, fqn)
    if not children:
        if fqn in found:
            raise unsupported(fqn, "the name of two values", "rename a key that contains a dot, or mixes int and str")
        found[fqn] = value
    prefix = f"{fqn}." if fqn else ""
    for key, item in children:
        child = f"{prefix}{key}"
        if child == fqn:  # an empty key below an empty name
            raise unsupported(fqn, "the name of two values", "give the value with the empty key a name")
        if type(item) in _LEAVES and depth > 1 and child not in found:
            found[child] = item
        else:
            _add_leaves(item, child, found, depth - 1)


def _children(value: Any, fqn: str) -> Collection[tuple[object, Any]]:
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and _holds_tensor(value, fqn, MAX_DEPTH):
        return list(enumerate(value))
    return parts_of(fqn, value).items() if is_subclass(value) else []


def _holds_tensor(value: Any, fqn: str, depth: int) -> bool:
    if isinstance(value, torch.Tensor | TensorRef):
        return True
    if depth == 0:
        raise too_deep(fqn)
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return any(_holds_tensor(item, fqn, depth - 1) for item in items)


def with_leaves(value: Any, fqn: str, new: Mapping[str, Any]) -> Any:
    """The tree with new leaves, or new values for whole containers: dicts and lists are changed in place, tuples made
    anew. Leaves not in `new` stay, and so do those of tensor subclasses, which are filled in place.
    """
    if fqn in new:
        return new[fqn]
    children = _children(value, fqn)
    if not children or isinstance(value, torch.Tensor):
        return value
    prefix = f"{fqn}." if fqn else ""
    filled = [(key, with_leaves(item, f"{prefix}{key}", new)) for key, item in children]
    if type(value) is tuple:
        return tuple(item for _, item in filled)
    for key, item in filled:
        value[key] = item
    return value
