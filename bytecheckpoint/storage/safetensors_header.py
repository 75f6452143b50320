"""The header of a data file, which makes it a valid safetensors file. Loading a checkpoint does not need it: the
manifest has all positions. Knows no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Annotated, NamedTuple

import msgspec

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError
from bytecheckpoint.region import Region
from bytecheckpoint.storage.store import Store

HEADER_ALIGNMENT = 4096
"""Tensor data starts at a multiple of this, in bytes."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_MAX_DIMS = 64
_STORED_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NEWER_DTYPES = {
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}
"""Newer names of the format: read, and never written to data files."""
_TORCH_DTYPES = {stored: dtype for dtype, stored in (_STORED_DTYPES | _NEWER_DTYPES).items()}
_INTEGERS = {1: "U8", 2: "I16", 4: "I32", 8: "I64", 16: "I64"}
"""Stored dtypes by item size, for every other dtype. Newer names of the format are not used: older readers refuse the
whole file."""


class HeaderEntry(NamedTuple):
    """A chunk to be described in a header."""

    name: str
    dtype: str
    """torch's name without `torch.`."""
    shape: Sequence[int]
    """Shape of the chunk, in elements."""
    byte_length: int


class StoredEntry(NamedTuple):
    """A chunk as a data file's header describes it."""

    name: str
    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    byte_offset: int
    """Position from the start of the file."""
    byte_length: int


class SafetensorsHeader(NamedTuple):
    """The decoded header of a data file."""

    entries: list[StoredEntry]
    """Chunks in file order."""
    metadata: dict[str, str]
    data_offset: int
    """Start of tensor data, in bytes from the start of the file."""


def torch_dtype_of(stored: str) -> str:
    """Returns torch's name of a dtype of the format. Raises KeyError if the format has no such dtype."""
    return _TORCH_DTYPES[stored]


def stored_dtype_of(dtype: str) -> str | None:
    """Returns the format's name of a dtype of torch; None if the format does not have the dtype."""
    return _STORED_DTYPES.get(dtype) or _NEWER_DTYPES.get(dtype)


def chunk_name(fqn: str, shape: Sequence[int], region: Region) -> str:
    """Returns `FQN` if the region is the whole tensor, else, and for the FQN `__metadata__`, `FQN[o0:e0,o1:e1]`."""
    if region.lengths == tuple(shape) and fqn != _METADATA:  # that name means something else in the format
        return fqn
    spans = (f"{offset}:{end}" for offset, end in zip(region.offsets, region.ends, strict=True))
    return f"{fqn}[{','.join(spans)}]"


def chunk_entry(
    fqn: str, dtype: str, shape: Sequence[int], *, region: Region, byte_length: int, codec: str
) -> HeaderEntry:
    """Returns the entry of a chunk of `byte_length` in its file. A compressed one is described as uint8."""
    name = chunk_name(fqn, shape, region)
    if codec == "none":
        return HeaderEntry(name, dtype, region.lengths, byte_length)
    return HeaderEntry(name, "uint8", (byte_length,), byte_length)


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes before the first chunk of a data file, padded to HEADER_ALIGNMENT. The chunks follow in the
    order of the entries.

    A name that is taken (an FQN may look like the name of another one's chunk) gets underscores appended. A dtype that
    older readers would refuse is described as integers. Raises ValueError for an entry whose length is not that of its
    shape and dtype, UnsafeCheckpointError (limits_exceeded) if readers would refuse so long a header.
    """
    quote = json.encoder.encode_basestring_ascii
    fields = [f"{quote(_METADATA)}:{json.dumps(dict(metadata))}"] if metadata else []
    names = {_METADATA}
    described: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}  # few shapes, many chunks
    start = 0
    for name, dtype, shape, byte_length in entries:
        unique = name
        while unique in names:
            unique += "_"
        names.add(unique)
        kind = (dtype, tuple(shape))
        stored, num_bytes = described.get(kind) or described.setdefault(kind, _describe(*kind))
        if num_bytes != byte_length:
            raise ValueError(f"{name}: shape {tuple(shape)} of {dtype} takes {num_bytes} bytes, not {byte_length}")
        end = start + byte_length
        fields.append(f'{quote(unique)}:{{{stored},"data_offsets":[{start},{end}]}}')
        start = end
    return _pad(("{" + ",".join(fields) + "}").encode("ascii"))


def _describe(dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Returns dtype and shape as JSON, and the length in bytes."""
    size = itemsize(dtype)
    stored = _STORED_DTYPES.get(dtype) or _INTEGERS[size]
    dims = shape if size < 16 else (*shape, 2)
    return f'"dtype":"{stored}","shape":[{",".join(map(str, dims))}]', size * prod(shape)


def _pad(text: bytes) -> bytes:
    """Returns the header's padded length, then the padded header. Raises UnsafeCheckpointError if that is too long."""
    num_bytes = -(-(_LENGTH.size + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - _LENGTH.size
    if num_bytes > MAX_HEADER_BYTES:
        raise UnsafeCheckpointError(
            f"the header of a data file would have {num_bytes} bytes, and readers accept {MAX_HEADER_BYTES}; nothing "
            "was written: lower max_file_bytes, so that a file holds fewer tensors",
            kind="limits_exceeded",
        )
    return _LENGTH.pack(num_bytes) + text.ljust(num_bytes)


def read_header(store: Store, name: str) -> SafetensorsHeader:
    """Reads the header of a data file in a store. Raises like `Store.read_into` and `decode_header`."""
    prefix = bytearray(_LENGTH.size)
    store.read_into(name, 0, memoryview(prefix))
    num_bytes = _header_bytes(prefix, name)
    content = bytearray(_LENGTH.size + num_bytes)
    store.read_into(name, 0, memoryview(content))
    try:
        return decode_header(content)
    except CheckpointError as error:
        raise type(error)(f"{name}: {error.message}", kind=error.kind, path=name) from error


def _header_bytes(prefix: bytes | bytearray, name: str) -> int:
    (num_bytes,) = _LENGTH.unpack_from(prefix)
    if num_bytes > MAX_HEADER_BYTES:
        raise UnsafeCheckpointError(
            f"{name} says that its header has {num_bytes} bytes; at most {MAX_HEADER_BYTES} are accepted: it is "
            "damaged or not a safetensors file, and was not read",
            kind="limits_exceeded",
            path=name,
        )
    return int(num_bytes)


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _WireEntry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


@cache
def _decoders() -> tuple[
    msgspec.json.Decoder[dict[str, msgspec.Raw]],
    msgspec.json.Decoder[dict[str, str]],
    msgspec.json.Decoder[_WireEntry],
]:
    """Returns the decoders, made at first use."""
    return (
        msgspec.json.Decoder(dict[str, msgspec.Raw]),
        msgspec.json.Decoder(dict[str, str]),
        msgspec.json.Decoder(_WireEntry),
    )


def decode_header(data: bytes | bytearray) -> SafetensorsHeader:
    """Decodes and checks the header at the start of these bytes: known dtypes, lengths, no hole, no overlap.

    `data` may be longer than the header. Raises CheckpointCorruptError (truncated, bad_manifest) or
    UnsafeCheckpointError (limits_exceeded).
    """
    if len(data) < _LENGTH.size:
        raise _bad_header(f"{len(data)} bytes are not a data file", kind="truncated")
    num_bytes = _header_bytes(data, "a data file")
    text = memoryview(data)[_LENGTH.size : _LENGTH.size + num_bytes]
    if len(text) < num_bytes:
        raise _bad_header(f"it ends after {len(text)} of {num_bytes} bytes", kind="truncated")
    fields, metadata, entry = _decoders()
    try:
        raw = fields.decode(text)
        texts = metadata.decode(raw.pop(_METADATA)) if _METADATA in raw else None
        wires = {name: entry.decode(value) for name, value in raw.items()}
        num_repeated = _num_repeated(bytes(text), len(wires), texts)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # json's own are ValueErrors
        raise _bad_header(f"it cannot be decoded: {error}") from error
    if num_repeated:
        raise _bad_header(f"{num_repeated} of its names are repeated")
    return _checked(wires, texts or {}, data_offset=_LENGTH.size + num_bytes)


def _num_repeated(text: bytes, num_tensors: int, metadata: Mapping[str, str] | None) -> int:
    """Returns how many names, at any depth, repeat another name of the same JSON object: a decoder returns only the
    last. `num_tensors` and `metadata` are from the decoder's result.
    """
    # A cheap check: without escapes, a tensor has these strings: its name, three keys, its dtype.
    num_strings = 5 * num_tensors + (0 if metadata is None else 1 + 2 * len(metadata))
    if b"\\" not in text and text.count(b'"') == 2 * num_strings:
        return 0
    counts: list[int] = []

    def count(items: list[tuple[str, object]]) -> None:
        counts.append(len(items) - len({name for name, _ in items}))

    json.loads(text, object_pairs_hook=count)
    return sum(counts)


def _checked(wires: Mapping[str, _WireEntry], metadata: dict[str, str], *, data_offset: int) -> SafetensorsHeader:
    entries = []
    end = 0
    for name, wire in sorted(wires.items(), key=lambda item: item[1].data_offsets):
        start, stop = wire.data_offsets
        if wire.dtype not in _TORCH_DTYPES:
            raise _bad_header(f"{name!r:.200} has the dtype {wire.dtype!r:.40}, which is none of the format's")
        num_bytes = itemsize(_TORCH_DTYPES[wire.dtype]) * prod(wire.shape)
        if start != end or stop - start != num_bytes:
            raise _bad_header(
                f"{name!r:.200} of dtype {wire.dtype} and shape {wire.shape} is said to be at bytes {start} to {stop}, "
                f"where bytes {end} to {end + num_bytes} were expected"
            )
        entries.append(StoredEntry(name, wire.dtype, wire.shape, data_offset + start, stop - start))
        end = stop
    return SafetensorsHeader(entries, metadata, data_offset)


def _bad_header(what: str, *, kind: str = "bad_manifest") -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"the header of a data file is damaged: {what}; restore the file or take another step", kind=kind
    )
