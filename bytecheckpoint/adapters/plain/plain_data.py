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
from collections.abc import Callable
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any

import msgspec
import torch
import xxhash
from msgspec.msgpack import Ext, encode

from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, parts_of
from bytecheckpoint.adapters.plain.plain_types import advice_for, is_tagged, tag_value, untag_value
from bytecheckpoint.adapters.shards import (
    NEW_TUPLE,
    PLAIN_TENSORS,
    check_has_all_memory,
    dense_dtype,
    dtype_name,
    flat_bytes,
    refuse_meta,
    torch_dtype,
)
from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.manifest import plain_wire as wire

SMALL_TENSOR_BYTES = 64 << 10

_CONTENT_FQN = re.compile(r"@[0-9a-f]{16}\Z")

_UNDECODABLE = (
    *(msgspec.DecodeError, struct.error, ValueError, TypeError, AttributeError),
    *(RuntimeError, ArithmeticError, SyntaxError),
)
"""Errors of msgspec, numpy and torch for content that no encoder wrote: names that they lack, impossible shapes."""

_decode_fqn = msgspec.msgpack.Decoder(str).decode

_CODE, _CONTENT = attrgetter("code"), attrgetter("data")

TensorHook = Callable[[str, torch.Tensor], str | torch.Tensor | None]
"""Returns the value that replaces the tensor of this FQN in the tree: the FQN under which its bytes lie in data files,
None if that is its own, or a tensor to write in place.
"""


def encode_plain(value: Any, fqn: str, on_tensor: TensorHook | None = None) -> bytes:
    """Returns the tree below `fqn` as bytes; `on_tensor` says where its tensors go. Without it, all are written in
    place.

    Raises CheckpointSaveError (unsupported_value), naming the FQN, for a value that is not plain data.
    """
    return wire.encode_tree(value, fqn, _TorchLeaves(on_tensor))


@lru_cache(maxsize=16)
def encode_refs(fqn: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str], bytes]:
    """Returns the FQNs of the tensors in a dict of tensors alone, the same FQNs as a set, and the encoding of the dict.
    All three depend on `fqn` and the names of the tensors only. Raises CheckpointSaveError as `check_key` does.
    """
    for name in names:
        wire.check_key(name, fqn)
    fqns = tuple(f"{fqn}.{name}" for name in names)
    refs = {name: wire.ext(wire.REF, of_tensor) for name, of_tensor in zip(names, fqns, strict=True)}
    return fqns, frozenset(fqns), encode(refs)


class _TorchLeaves:
    """Encodes torch's values, and those of `plain_types`."""

    tensor_types: frozenset[type] = PLAIN_TENSORS

    def __init__(self, on_tensor: TensorHook | None) -> None:
        self._on_tensor = on_tensor

    def encode_tensor(self, fqn: str, tensor: torch.Tensor) -> Ext:
        found = tensor if self._on_tensor is None else self._on_tensor(fqn, tensor)
        if found is None or isinstance(found, str):
            return Ext(wire.REF, encode(found or fqn))
        return wire.ext(wire.TENSOR, [dtype_name(found.dtype), list(found.shape), bytes(_content(fqn, found))])

    def encode_other(self, value: Any, fqn: str, levels_left: int) -> Any:
        if isinstance(value, torch.Tensor):
            if is_subclass(value):
                return wire.dict_to_wire(parts_of(fqn, value), fqn, self, levels_left)
            return self.encode_tensor(fqn, value)
        if isinstance(value, torch.Size):
            return wire.ext(wire.SIZE, list(value))
        if isinstance(value, torch.dtype):
            return wire.ext(wire.DTYPE, dtype_name(value))
        tagged = tag_value(value)
        if tagged is not None:
            for text in tagged.texts:
                wire.checked_text(text, fqn)
            return wire.ext(wire.PAIRS, [tagged])
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise wire.unsupported(fqn, f"an object of type {name}", advice_for(value))


def fits_inline(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that is written into the plain data that contains it: small, dense and of a plain type,
    on the meta device too. False for a small sparse one, a DTensor and every other subclass.
    """
    is_plain = type(tensor) in PLAIN_TENSORS and not tensor.is_nested
    return is_plain and tensor.layout is torch.strided and tensor.nbytes <= SMALL_TENSOR_BYTES


def _content(fqn: str, tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a dense tensor, row-major, on the host; not a copy if they lie so already."""
    dense_dtype(fqn, tensor)
    refuse_meta(fqn, tensor)
    check_has_all_memory(fqn, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1:  # torch cannot copy its sub-byte integers
        plain = plain.view(torch.uint8)
    return flat_bytes(plain.cpu().contiguous()).numpy().data


def content_fqn(fqn: str, tensor: torch.Tensor) -> str:
    """Returns the FQN under which a tensor is stored that may differ from rank to rank: equal tensors have the same."""
    content = _content(fqn, tensor)
    digest = xxhash.xxh3_64(f"{dtype_name(tensor.dtype)} {list(tensor.shape)} ".encode())
    digest.update(content)
    return f"{fqn}@{digest.hexdigest()}"


def is_content_fqn(fqn: str) -> bool:
    """Returns True if an FQN has the form that `content_fqn` gives; a name that a user chose may have it, too."""
    return "@" in fqn and _CONTENT_FQN.search(fqn) is not None


def without_content(fqn: str) -> str:
    """Returns the FQN of the value to whose tensor `content_fqn` gave this FQN; any other FQN as it is."""
    return fqn.rpartition("@")[0] if is_content_fqn(fqn) else fqn


def decode_plain(data: bytes) -> Any:
    """Returns the tree in these bytes, with TensorRefs where tensors lie in data files. Runs no code of the
    checkpoint's.

    Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (limits_exceeded).
    """
    try:
        return _decode(data, wire.MAX_DEPTH)
    except _UNDECODABLE as error:
        if isinstance(error, CheckpointCorruptError | UnsafeCheckpointError):
            raise
        raise CheckpointCorruptError(
            f"the manifest is damaged: plain data cannot be decoded: {error}", kind="bad_manifest"
        ) from error


def decode_refs(data: bytes) -> dict[str, str] | None:
    """Returns the FQNs, by key, in a dict of tensors alone, as `encode_refs` encodes it; None for any other tree, and
    for a damaged one. It takes no step of Python for each tensor.
    """
    try:
        tree = msgspec.msgpack.decode(data, type=dict[str, Ext])
        # The content of each extension is an encoded text: after the header of a list, they are a list of texts.
        texts = encode([""] * len(tree))[: -len(tree) or None] + b"".join(map(_CONTENT, tree.values()))
        fqns = msgspec.msgpack.decode(texts, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return dict(zip(tree, fqns, strict=True)) if {wire.REF}.issuperset(map(_CODE, tree.values())) else None


class _ExtensionFound(Exception):  # noqa: N818  it is no error
    """Ends the decoding of a tree that has other types than msgpack's own."""


def _refuse_extension(_code: int, _content: memoryview) -> Any:
    raise _ExtensionFound


_decode_simple = msgspec.msgpack.Decoder(ext_hook=_refuse_extension).decode


def decode_flagged(data: bytes | msgspec.Raw) -> tuple[Any, bool]:
    """Returns what `decode_plain` returns, and True if the tree has extension types. If it has none, it has no tensor
    either, and a walk for tensors is saved. Raises the errors of `decode_plain`.
    """
    try:
        return _decode_simple(data), False
    except (_ExtensionFound, *_UNDECODABLE):
        return decode_plain(bytes(data)), True


def _decode(data: bytes | memoryview, depth: int) -> Any:
    if depth == 0:
        raise UnsafeCheckpointError(f"plain data is nested more than {wire.MAX_DEPTH} deep", kind="limits_exceeded")

    def from_ext(code: int, content: memoryview) -> Any:
        if code == wire.REF:  # most of a state
            return NEW_TUPLE(wire.TensorRef, (_decode_fqn(content),))
        return _from_ext(code, content, depth - 1)

    return msgspec.msgpack.decode(data, ext_hook=from_ext)


def _from_ext(code: int, content: memoryview, depth: int) -> Any:
    if code == wire.COMPLEX:
        return complex(*struct.unpack("<dd", content))
    value = _decode(content, depth)
    if code not in _DECODERS:
        raise ValueError(f"extension type {code} is not known")
    return _DECODERS[code](value)


def _dtype_from_wire(name: Any) -> torch.dtype:
    dtype = vars(torch).get(name)  # hazard: getattr would import what torch imports late
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.80} is not a dtype of torch's")
    return dtype


def _tensor_from_wire(value: Any) -> torch.Tensor:
    name, shape, content = value
    if len(shape) > wire.MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, at most {wire.MAX_DIMS}")
    if name not in DTYPE_ITEMSIZES or len(content) != prod(shape) * DTYPE_ITEMSIZES[name]:
        raise ValueError(f"{len(content)} bytes are no {name}{shape} tensor")
    if not content:
        return torch.empty(shape, dtype=torch_dtype(name), device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch_dtype(name)).reshape(shape)


def _checked_pairs(pairs: Any) -> Any:
    """Returns the pairs. Raises ValueError for keys that no encoder writes: their hashes could be made to collide."""
    if not all(type(key) is str or (type(key) is int and key in wire.MSGPACK_INTS) for key, _ in pairs):
        raise ValueError("a dict has a key that is neither a text nor an integer of 64 bits")
    return pairs


def _from_pairs(pairs: Any) -> Any:
    return untag_value(*pairs[0]) if is_tagged(pairs) else dict(_checked_pairs(pairs))


_DECODERS: dict[int, Callable[[Any], Any]] = {
    wire.TUPLE: tuple,
    wire.PAIRS: _from_pairs,
    wire.SIZE: torch.Size,
    wire.DTYPE: _dtype_from_wire,
    wire.TENSOR: _tensor_from_wire,
    wire.ARRAY: wire.array_from_wire,
    wire.SCALAR: wire.scalar_from_wire,
    wire.BIG_INT: int,
    wire.ORDERED: lambda pairs: OrderedDict(_checked_pairs(pairs)),
    wire.COUNTER: lambda pairs: Counter(dict(_checked_pairs(pairs))),
}
