"""Hugging Face's layout: safetensors files of one model, with an index where there are several."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

from bytecheckpoint.conversion.stream import FileRun, TargetFile, TargetPlan, spread, tensor_span
from bytecheckpoint.conversion.torch_save import left_out_metadata
from bytecheckpoint.dtypes import QUANTIZED_DTYPES, WEIGHT_BLOCK, weight_block
from bytecheckpoint.errors import CheckpointMismatchError, UnsafeCheckpointError
from bytecheckpoint.loading.select import LeftOut, Selection, has_plain_data
from bytecheckpoint.manifest import DataFile, Manifest
from bytecheckpoint.planner.copy_plan import WantedTensor
from bytecheckpoint.storage.safetensors_header import MAX_HEADER_BYTES, stored_dtype_of

SOLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"

_HEADER_ALIGNMENT = 8
_METADATA = "__metadata__"


def plan_hf(
    manifest: Manifest, selection: Selection, *, max_shard_bytes: int, num_ranks: int, infix: str
) -> TargetPlan:
    """Plans safetensors files. `infix` in the names of several files tells them from those of an older checkpoint; a
    sole file is always called SOLE_NAME.

    Raises CheckpointMismatchError (conflict) for what safetensors cannot hold, and UnsafeCheckpointError
    (limits_exceeded) for a header that no reader accepts.
    """
    wanted = selection.wanted
    _refuse_unheld(wanted)
    spans = [tensor_span(number, tensor) for number, tensor in enumerate(wanted)]
    shards = _tensors_by_file([span.byte_length for span in spans], max_shard_bytes)
    aliases = {alias: fqn for alias, fqn in selection.aliases.items() if alias != _METADATA}
    block = weight_block(manifest.metadata) if any(tensor.dtype in QUANTIZED_DTYPES for tensor in wanted) else ()
    metadata = {"format": "pt", **({WEIGHT_BLOCK: str([*block])} if block else {})}
    files = []
    for shard_number, shard in enumerate(shards, 1):
        name = SOLE_NAME if len(shards) == 1 else f"model-{infix}{shard_number:05d}-of-{len(shards):05d}.safetensors"
        order = sorted(shard, key=lambda number: (-spans[number].item_bytes, wanted[number].fqn))
        runs: list[FileRun] = [
            _header([wanted[number] for number in order], aliases, metadata),
            *(spans[each] for each in order),
        ]
        files.append(TargetFile(name, runs))
    by_rank = spread([file.byte_length for file in files], num_ranks)
    weight_map = {wanted[number].fqn: files[at].name for at, shard in enumerate(shards) for number in shard}
    index = {
        "metadata": {"total_size": sum(span.byte_length for span in spans)},
        "weight_map": dict(sorted(weight_map.items())),
    }

    def encoded(_: Sequence[DataFile]) -> bytes:
        return (json.dumps(index, indent=2) + "\n").encode()

    last_name, last = (SOLE_NAME, None) if len(shards) == 1 else (INDEX_NAME, encoded)
    held = {f"metadata {key}" for key in metadata}
    left_out = [item for item in left_out_metadata(manifest) if item.name not in held]
    return TargetPlan(files, by_rank, last_name, last, [*left_out_values(manifest, selection), *left_out])


def left_out_values(manifest: Manifest, selection: Selection) -> list[LeftOut]:
    """Returns a record per entry with plain data and per object that differs by rank: an HF target has neither."""
    names = [fqn for fqn, tree in selection.trees.items() if has_plain_data(tree)]
    return [LeftOut(fqn, 0, 0, "plain data") for fqn in [*names, *manifest.rank_objects]]


def _refuse_unheld(wanted: Sequence[WantedTensor]) -> None:
    unheld = [tensor for tensor in wanted if stored_dtype_of(tensor.dtype) is None]
    if unheld:
        raise CheckpointMismatchError(
            f"safetensors has no dtype for {len(unheld)} tensors, the first {unheld[0].fqn!r:.200} of "
            f"{unheld[0].dtype}; nothing was written: leave them out with exclude, or convert to another format",
            kind="conflict",
        )
    if any(tensor.fqn == _METADATA for tensor in wanted):
        raise CheckpointMismatchError(
            f"a tensor is named {_METADATA!r}, which means something else in safetensors; nothing was written: rename "
            "it",
            kind="conflict",
        )


def _tensors_by_file(byte_lengths: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Returns the numbers of the tensors in each file, in the checkpoint's order. A tensor larger than `max_bytes` gets
    a file of its own. Without tensors, there is one empty file.
    """
    files: list[list[int]] = [[]]
    num_bytes = 0
    for number, byte_length in enumerate(byte_lengths):
        if files[-1] and num_bytes + byte_length > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(number)
        num_bytes += byte_length
    return files


def _header(tensors: Sequence[WantedTensor], aliases: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
    held = {tensor.fqn for tensor in tensors}
    # As safetensors' own save_model tells which names it has left out because they are tied to another.
    tied = {alias: fqn for alias, fqn in aliases.items() if fqn in held and alias not in metadata}
    fields: dict[str, object] = {_METADATA: {**metadata, **tied}}
    start = 0
    for tensor in tensors:
        end = start + tensor_span(0, tensor).byte_length
        dtype = stored_dtype_of(tensor.dtype)
        fields[tensor.fqn] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsafeCheckpointError(
            f"the header of a file would have {len(text)} bytes, and readers accept {MAX_HEADER_BYTES}; nothing was "
            "written: lower the largest size of a file, so that each holds fewer tensors",
            kind="limits_exceeded",
        )
    return struct.pack("<Q", len(text)) + text
