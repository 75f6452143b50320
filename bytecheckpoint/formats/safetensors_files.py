"""Hugging Face safetensors: one file, several with an index, or those that torch.distributed.checkpoint writes, in
which each file holds parts of tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bytecheckpoint.dtypes import QUANTIZED_DTYPES, WEIGHT_BLOCK, weight_block
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.formats.file_reader import (
    REQUESTS_IN_FLIGHT,
    FileReader,
    checked_name,
    conflicting,
    damaged,
    too_much,
    with_path,
)
from bytecheckpoint.formats.folder import SourceFolder, read_config
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import Region
from bytecheckpoint.runtime.threads import map_looks
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.safetensors_header import SafetensorsHeader, StoredEntry, read_header, torch_dtype_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX, _SOLE = f"model{INDEX_SUFFIX}", f"model{SUFFIX}"
_NUMBERED = re.compile(r"(?:shard-[0-9]+-)?(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
"""Names of the files of one checkpoint; torch's writer of parts puts the number of a rank before them."""
_SHARDING = "DCP_SHARDING_INFO"
_MAX_INDEX_BYTES = 100_000_000


class _FilePart(NamedTuple):
    """The part of a tensor that a file holds."""

    dtype: str
    """safetensors' name."""
    chunk: Chunk


def is_folder(source: SourceFolder) -> bool:
    return any(name.endswith(SUFFIX) for name in source.files)


def read_folder(source: SourceFolder) -> None:
    """Adds the files that an index names to the builder, else `model.safetensors`, else all. Raises as
    `detect.read_manifest` does.
    """
    indices = sorted(name for name in source.files if name.endswith(INDEX_SUFFIX))
    files = sorted(name for name in source.files if name.endswith(SUFFIX))
    if _INDEX in indices or len(indices) == 1:
        read_indexed(source, _INDEX if _INDEX in indices else indices[0])
    elif indices:
        what = f"holds several checkpoints: {', '.join(indices)}"
        raise conflicting(source.path, what, "give the path of one of them")
    elif _SOLE in files:
        read_files(source, [_SOLE])
    else:
        _refuse_incomplete(files, source.path)
        read_files(source, files)


def _refuse_incomplete(files: Sequence[str], path: str) -> None:
    """Raises CheckpointNotFoundError (not_committed) if numbered files are missing: an index is written last."""
    found: dict[tuple[str, str], set[str]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        found.setdefault((match["name"], match["count"]), set()).add(match["number"])
    for (name, count), numbers in found.items():
        if len(numbers) < int(count):
            raise CheckpointNotFoundError(
                f"{path} has {len(numbers)} of {int(count)} files {name}-*-of-{count}{SUFFIX} and no index, so what "
                "wrote them has not finished; nothing was loaded: fetch or write it again",
                kind="not_committed",
                path=path,
            )


def read_indexed(source: SourceFolder, name: str) -> None:
    """Adds the checkpoint of an index to the builder: each tensor from the file that the index names for it, and the
    tensors in these files that the index does not name. Raises as `read_folder`.
    """
    weights = read_index(source, name)
    source.refuse_missing(set(weights.values()), name)
    headers = _read_headers(source, sorted(set(weights.values())))
    missing = sorted(fqn for fqn, file in weights.items() if fqn not in headers.parts.get(file, {}))
    if missing:
        where = f"the first {missing[0]!r:.200} not in {weights[missing[0]]!r:.200}"
        path = join_name(source.path, name)
        raise damaged(path, f"{len(missing)} of its tensors are not where it says, {where}")
    wanted = {file: {fqn for fqn in parts if weights.get(fqn, file) == file} for file, parts in headers.parts.items()}
    _add_tensors(source, headers, wanted)


def read_files(source: SourceFolder, names: Sequence[str]) -> None:
    """Adds the checkpoint that these files are together to the builder. Raises as `read_folder`."""
    headers = _read_headers(source, names)
    _add_tensors(source, headers, headers.parts)


def files_of_index(source: SourceFolder, name: str) -> frozenset[str]:
    """Returns the safetensors files that an index names; an empty set if it is damaged, unsafe or missing."""
    with suppress(CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError):
        return frozenset(file for file in read_index(source, name).values() if file.endswith(SUFFIX))
    return frozenset()


def read_index(source: SourceFolder, name: str) -> dict[str, str]:
    """Returns tensor name -> file name of an index. Raises as `detect.read_manifest` does."""
    content = source.reader(name)
    if content.byte_length > _MAX_INDEX_BYTES:
        raise too_much(content.path, f"it has {content.byte_length} bytes, at most {_MAX_INDEX_BYTES} are read")
    try:
        index = json.loads(content.read_all(), object_pairs_hook=_without_repetitions)
    except (ValueError, RecursionError) as error:
        raise damaged(content.path, f"it is not an index: {error}") from error
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise damaged(content.path, "it has no weight_map from names to files")
    for file in set(weights.values()):
        checked_name(file, content.path)
    return weights


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise ValueError("a name stands in it twice")
    return by_name


class _Headers(NamedTuple):
    parts: dict[str, dict[str, _FilePart]]
    """File name -> tensor name -> the part that the file holds."""
    is_sharded: bool
    """True if files hold parts of tensors."""
    aliases: dict[str, str]


def _add_tensors(source: SourceFolder, headers: _Headers, wanted: Mapping[str, Collection[str]]) -> None:
    """Adds the tensors that `wanted` names by file, each put together from its parts in these files; then the aliases,
    and as metadata the size of the block that a scale is for, from `config.json` or else the headers.
    """
    builder = source.builder
    by_tensor: dict[str, list[_FilePart]] = {}
    for file, names in wanted.items():
        for fqn in (name for name in headers.parts[file] if name in names):
            by_tensor.setdefault(fqn, []).append(headers.parts[file][fqn])
    for fqn, parts in by_tensor.items():
        if len(parts) > 1 and not headers.is_sharded:
            files = " and ".join(builder.files[part.chunk.file].name for part in parts[:2])
            what = f"has {fqn!r:.200} in {files}, and no index says which one counts"
            raise conflicting(builder.path, what, "give the path of one file")
        if len({(part.dtype, len(part.chunk.region.offsets)) for part in parts}) > 1:
            raise damaged(builder.path, f"the parts of {fqn!r:.200} have different dtypes or dimensions")
        shape = tuple(map(max, zip(*(part.chunk.region.ends for part in parts), strict=True)))
        # Files of replicas hold the same part; any of them will do.
        chunks = {part.chunk.region: part.chunk for part in parts if part.chunk.region.numel}
        builder.add_tensor(fqn, torch_dtype_of(parts[0].dtype), shape, list(chunks.values()), num_parts=len(parts))
    for alias, fqn in headers.aliases.items():
        if alias not in builder.tensors and fqn in builder.tensors:
            builder.add_alias(alias, fqn)
    if any(record.dtype in QUANTIZED_DTYPES for record in builder.tensors.values()):
        quantization = read_config(source.store, source.name).get("quantization_config")
        in_config = quantization if isinstance(quantization, dict) else {}
        block = weight_block(in_config) or weight_block(builder.metadata)
        builder.metadata = {**builder.metadata, **({WEIGHT_BLOCK: [*block]} if block else {})}


def _read_headers(source: SourceFolder, names: Iterable[str]) -> _Headers:
    """Returns the headers of the files. Adds the files and their metadata to the builder, and no tensors."""
    builder = source.builder
    parts: dict[str, dict[str, _FilePart]] = {}
    aliases: dict[str, str] = {}
    is_sharded = False
    files = {name: source.reader(name) for name in names}
    headers = map_looks(_header, files.values(), num_threads=REQUESTS_IN_FLIGHT)
    for (name, file), header in zip(files.items(), headers, strict=True):
        sharding = _sharding(header, file.path)
        is_sharded |= sharding is not None
        number = builder.add_file(name, file.byte_length)
        parts[name] = {}
        for entry in header.entries:
            region = Region(_offsets(entry, sharding, file.path), tuple(entry.shape))
            chunk = Chunk(region, number, entry.byte_offset, entry.byte_length)
            parts[name][entry.name] = _FilePart(entry.dtype, chunk)
        if sharding is None:
            tied = {key: value for key, value in header.metadata.items() if value in parts[name] and key != "format"}
            aliases |= tied
            builder.metadata = {**builder.metadata, **header.metadata}
    return _Headers(parts, is_sharded, aliases)


def _header(file: FileReader) -> SafetensorsHeader:
    try:
        header = read_header(file.store, file.name)
    except CheckpointError as error:
        raise with_path(error, file.path) from error
    end = max((entry.byte_offset + entry.byte_length for entry in header.entries), default=header.data_offset)
    if end != file.byte_length:
        kind = "truncated" if file.byte_length < end else "bad_manifest"
        file.raise_damaged(f"it has {file.byte_length} bytes, and {end} by its header", kind=kind)
    return header


def _sharding(header: SafetensorsHeader, path: str) -> Mapping[str, Any] | None:
    """Returns DCP's record of where each part in a file belongs, by tensor name; None for a file of whole tensors."""
    text = header.metadata.get(_SHARDING)
    if text is None:
        return None
    try:
        sharding = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its {_SHARDING} is no JSON: {error}") from error
    if not isinstance(sharding, dict):
        raise damaged(path, f"its {_SHARDING} is not what torch.distributed.checkpoint writes")
    return sharding


def _offsets(entry: StoredEntry, sharding: Mapping[str, Any] | None, path: str) -> tuple[int, ...]:
    if sharding is None:
        return (0,) * len(entry.shape)
    part = sharding.get(entry.name)
    offsets = part.get("saved_offsets") if isinstance(part, dict) else None
    if not isinstance(offsets, list) or len(offsets) != len(entry.shape):
        raise damaged(path, f"its {_SHARDING} does not say which part of {entry.name!r:.200} it holds")
    if not all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets):
        raise damaged(path, f"its {_SHARDING} has {offsets!r:.80} for {entry.name!r:.200}")
    return tuple(offsets)
