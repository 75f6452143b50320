"""The state of a data loader as bytes: the part that one rank sends, and the object that a manifest holds.

The states of streams are encoded one by one, on the ranks that own them, and stay encoded until a rank gets them: a
checkpoint may have 100,000 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import msgspec
import numpy as np

from bytecheckpoint.adapters.plain.plain_data import TensorHook, decode_flagged, decode_plain, encode_plain
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH

MARK = "@streams"
"""First key of the object of a data loader. Its value is the version of the form."""
VERSION = 1
LAYOUT_KEYS = ("size", "owners")
"""Keys whose values say which ranks saved the state, and nothing about the data."""

ONLY_FOR_LOADERS = "saved by a DataLoaderState; load it into one, or leave it out with exclude"
"""Reason why another object does not take the state of a data loader."""

KeyedBy = Literal["stream", "rank"]
"""States belong to streams, which any rank can take over, or to data-parallel ranks."""

_MARK_BYTES = msgspec.msgpack.encode(MARK)
_FLAT = frozenset({type(None), bool, float, bytes, int, str})
_NAMES = frozenset({str})
_encode = msgspec.msgpack.Encoder().encode


class StreamsPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a data loader's state that one process sends."""

    loader: str
    """Name of the loader's class."""
    elastic: str
    keyed_by: KeyedBy
    size: int
    """Number of data-parallel ranks."""
    dp_rank: int
    shared: msgspec.Raw
    streams: msgspec.Raw
    """Map from stream id, sorted, to its encoded state."""
    known: bytes
    """Digest of the ids that all ranks should own together; empty if the loader does not say."""
    known_ids: Sequence[str] = ()
    """The ids that `known` is the digest of, from data-parallel rank 0 only."""


class _StoredStreams(msgspec.Struct, frozen=True, rename={"version": MARK}):
    """The object in a manifest."""

    version: int
    loader: str
    elastic: str
    keyed_by: str
    size: int
    """Number of data-parallel ranks of the save."""
    shared: msgspec.Raw
    streams: dict[str, msgspec.Raw]
    owners: msgspec.Raw
    """Data-parallel rank that saved each stream, in the order of the sorted ids: an int32 array."""


class StreamTable(Mapping[str, Any]):
    """The states of all streams by id, each decoded when it is asked for."""

    def __init__(self, encoded: Mapping[str, msgspec.Raw]) -> None:
        self._encoded = encoded

    def __getitem__(self, stream_id: str) -> Any:
        return decode_plain(bytes(self._encoded[stream_id]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def decode(self, ids: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the states of these streams: those of plain data alone, and those that may hold tensors."""
        plain: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for stream_id in ids:
            tree, has_extensions = decode_flagged(self._encoded[stream_id])
            (others if has_extensions else plain)[stream_id] = tree
        return plain, others


def encode_state(state: Any, fqn: str, on_tensor: TensorHook) -> bytes:
    """Returns the state of a stream as bytes, as `encode_plain` does, but fast for dicts and lists of simple values.

    Raises CheckpointSaveError (unsupported_value) for a value that is not plain data.
    """
    if _is_simple(state, MAX_DEPTH):
        try:
            return _encode(state)
        except (OverflowError, UnicodeEncodeError):  # encode_plain can encode more, and its errors name the FQN
            return encode_plain(state, fqn, on_tensor)
    return encode_plain(state, fqn, on_tensor)


def _is_simple(value: Any, depth: int) -> bool:
    """Returns True if a tree is at most `depth` deep, and msgpack has a form of its own for all values in it."""
    kind = type(value)
    if kind in _FLAT:
        return True
    if depth == 0:
        return False
    if kind is dict:
        if not _NAMES.issuperset(map(type, value)):
            return False
        items = value.values()
    elif kind is list:
        items = value
    else:
        return False
    return _FLAT.issuperset(map(type, items)) or all(_is_simple(item, depth - 1) for item in items)


def encode_loader_state(part: StreamsPart, streams: Mapping[str, msgspec.Raw], owners: Mapping[str, int]) -> bytes:
    """Returns the object of a manifest. `part` is any rank's: only what all ranks have in common is taken from it.
    `owners` are data-parallel ranks, by stream.
    """
    ids = sorted(streams)
    array = np.fromiter((owners[stream_id] for stream_id in ids), np.int32, count=len(ids))
    stored = _StoredStreams(
        version=VERSION,
        loader=part.loader,
        elastic=part.elastic,
        keyed_by=part.keyed_by,
        size=part.size,
        shared=part.shared,
        streams={stream_id: streams[stream_id] for stream_id in ids},
        owners=msgspec.Raw(encode_plain(array, "")),
    )
    return _encode(stored)


def is_loader_state(data: bytes) -> bool:
    """Returns True if an object of a manifest is the state of a data loader, as its first key says."""
    is_short_map = bool(data) and data[0] >> 4 == 0x8
    return is_short_map and data[1 : 1 + len(_MARK_BYTES)] == _MARK_BYTES


def decode_loader_state(data: bytes) -> Any:
    """Returns the state of a data loader as `decode_plain` does, but with a StreamTable in place of its streams;
    data in a form that this release does not know as `decode_plain` alone. Raises the errors of `decode_plain`.
    """
    try:
        stored = msgspec.msgpack.decode(data, type=_StoredStreams)
    except msgspec.DecodeError:  # of a later version, or another value that only has the mark
        return decode_plain(data)
    tree = {MARK: stored.version, **msgspec.structs.asdict(stored), "streams": StreamTable(stored.streams)}
    del tree["version"]
    return tree | {key: decode_plain(bytes(tree[key])) for key in ("shared", "owners")}


def is_stream_tree(tree: Any) -> TypeGuard[dict[str, Any]]:
    """Returns True for the tree of a data loader's state."""
    return isinstance(tree, dict) and MARK in tree


def is_whole(tree: Mapping[str, Any]) -> bool:
    """Returns True if nothing was left out of the tree of a data loader's state, and its streams, owners and size are
    of the right kind. The kinds of other values are not checked.
    """
    if not {"keyed_by", "size", "shared", "streams", "owners"} <= tree.keys():
        return False
    owners, streams = tree["owners"], tree["streams"]
    if not isinstance(owners, np.ndarray) or not isinstance(streams, dict | StreamTable):
        return False
    return owners.shape == (len(streams),) and type(tree["size"]) is int and tree["size"] > 0
