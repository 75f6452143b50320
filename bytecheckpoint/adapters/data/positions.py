"""Positions of data loaders between full saves: small parts of their state that say how far the trainer is. Put on top
of an earlier checkpoint they make the state of now.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import torch

from bytecheckpoint.adapters.data.loader_entry import DataLoaderEntry, refuse_sharded
from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.data.merge_streams import listed_ids, merge_streams
from bytecheckpoint.adapters.data.stream_wire import decode_loader_state, encode_state
from bytecheckpoint.adapters.plain.plain_data import SMALL_TENSOR_BYTES, encode_plain
from bytecheckpoint.adapters.shards import dense_dtype
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import unsupported

MAX_POSITION_BYTES = 1 << 14
"""Longest encoded position of one stream, or shared state of a loader."""
_GIVE_POSITION = "give the loader a method stream_position(id), which docs/data.md explains"
_SHORTEN_POSITION = (
    "let stream_position(id) of the loader return only the values that change at every step: the others come from the "
    "checkpoint before"
)
_SHORTEN_SHARED = (
    "let shared_state() of the loader return less: move what grows into the states of streams, where "
    "stream_position(id) can leave it out"
)


def encode_positions(fqn: str, state: DataLoaderState) -> bytes:
    """Returns this rank's part of the positions of a loader: by `stream_position(id)` if the loader has that method,
    else whole states of streams.

    Raises CheckpointSaveError (unsupported_value) for a state that a save refuses, for a position or shared state that
    is too large, and for a result of `stream_position` that is no dict.
    """
    entry, loader = DataLoaderEntry(fqn, state), state.streams
    entry.refuse_inexact()
    has_positions = hasattr(loader, "stream_position")
    position_of = getattr(loader, "stream_position", loader.stream_state)
    advice = _SHORTEN_POSITION if has_positions else _GIVE_POSITION
    streams: dict[str, msgspec.Raw] = {}
    for stream_id in entry.own_ids(loader):
        name = f"{fqn}.streams.{stream_id}"
        position = position_of(stream_id)
        encoded = encode_state(position, name, partial(_small_tensor, advice=advice))
        streams[stream_id] = msgspec.Raw(_checked(encoded, name, advice))
        if has_positions and not isinstance(position, dict):  # values that replace those of the stream's state
            what = f"a {type(position).__name__} of stream_position(id)"
            raise unsupported(name, what, "return a dict with some items of the stream's state, which is a dict, too")
    name = f"{fqn}.shared"
    shared = encode_plain(loader.shared_state(), name, partial(_small_tensor, advice=_SHORTEN_SHARED))
    return entry.encode_part(loader, streams, _checked(shared, name, _SHORTEN_SHARED))


def merge_positions(fqn: str, parts: Mapping[int, bytes]) -> bytes:
    """Unites the parts of all ranks. Raises CheckpointMismatchError (conflict) where they do not fit together."""
    merged = merge_streams(fqn, {rank: ("streams", part) for rank, part in parts.items()})
    if merged.problems:
        raise CheckpointMismatchError(
            f"the logged positions of a data loader do not fit together; nothing was loaded: {merged.problems[0].text}",
            kind="conflict",
            ranks=merged.problems[0].ranks,
        )
    return merged.encoded


def load_positions(fqn: str, state: DataLoaderState, merged: bytes) -> None:
    """Brings a loader, which stands where an earlier checkpoint is or at its start, to logged positions.

    Raises CheckpointMismatchError (conflict) if the positions are those of another loader. Then nothing is changed.
    """
    loader, tree = state.streams, decode_loader_state(merged)
    logged = tree["streams"]
    ids = sorted(loader.stream_ids())
    missing = [stream_id for stream_id in ids if stream_id not in logged]
    if missing or tree["keyed_by"] != state.keyed_by or (state.keyed_by == "rank" and tree["size"] != state.size):
        found = f"{tree['size']} ranks logged it" if not missing else f"{listed_ids(missing)} are not in it"
        raise CheckpointMismatchError(
            f"{fqn}: the logged position is not one of this loader: {found}. The loader stands at the checkpoint: "
            "make it as it was when its position was logged",
            kind="conflict",
        )
    has_positions = hasattr(loader, "stream_position")
    states = {each: {**loader.stream_state(each), **logged[each]} if has_positions else logged[each] for each in ids}
    loader.load_streams(states, tree["shared"])


def position_trees(merged: bytes) -> dict[str, Any]:
    """Returns the position of each stream by its id."""
    return dict(decode_loader_state(merged)["streams"])


def _checked(encoded: bytes, name: str, advice: str) -> bytes:
    """Returns encoded data. Raises CheckpointSaveError (unsupported_value) if it is too long for a log of positions."""
    if len(encoded) > MAX_POSITION_BYTES:
        raise unsupported(
            name,
            f"a state of {len(encoded)} bytes, and the log takes at most {MAX_POSITION_BYTES}",
            advice,
        )
    return encoded


def _small_tensor(fqn: str, tensor: torch.Tensor, *, advice: str) -> torch.Tensor:
    """Returns a small dense tensor. Raises CheckpointSaveError (unsupported_value), for large ones with `advice`."""
    refuse_sharded(fqn, tensor)
    dense_dtype(fqn, tensor)
    if tensor.nbytes > SMALL_TENSOR_BYTES:
        raise unsupported(fqn, "a tensor that is too large for the log of positions", advice)
    return tensor
