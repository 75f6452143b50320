"""Hugging Face safetensors: one file, several with an index, or those that torch.distributed.checkpoint writes, in
which each file holds parts of tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.formats.file_reader import FileReader, damaged, too_much
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import Region, whole
from bytecheckpoint.storage.paths import check_name, join_name
from bytecheckpoint.storage.safetensors_header import SafetensorsHeader, StoredEntry, read_header, torch_dtype_of
from bytecheckpoint.storage.store import Store

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX, _SOLE = f"model{INDEX_SUFFIX}", f"model{SUFFIX}"
_NUMBERED = re.compile(r"(?:shard-[0-9]+-)?(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
"""Names of the files of one checkpoint; torch's writer of parts puts the number of a rank before them."""
_SHARDING = "DCP_SHARDING_INFO"
_MAX_INDEX_BYTES = 100_000_000


class _Part(NamedTuple):
    """What a file holds of a tensor."""

    entry: StoredEntry
    file: int
    offsets: tuple[int, ...]


def read_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    """The checkpoint that the files of a folder are. An index says which belong to it; else there is one, or all do.

    Raises CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict), CheckpointCorruptError or
    UnsafeCheckpointError.
    """
    indices = sorted(name for name in listing if name.endswith(INDEX_SUFFIX) and listing[name] is not None)
    files = sorted(name for name in listing if name.endswith(SUFFIX) and listing[name] is not None)
    path = join_name(str(store), folder)
    if _INDEX in indices or len(indices) == 1:
        return read_indexed(store, folder, _INDEX if _INDEX in indices else indices[0])
    if indices:
        raise CheckpointMismatchError(
            f"{path} holds several checkpoints: {', '.join(indices)}; nothing was loaded: give the path of one of them",
            kind="conflict",
            path=path,
        )
    if _SOLE in files:
        return read_files(store, folder, [_SOLE])
    _refuse_incomplete(files, path)
    return read_files(store, folder, files)


def _refuse_incomplete(files: Sequence[str], path: str) -> None:
    """Raises CheckpointNotFoundError (not_committed) where files say that they are of more than there are: a download
    or a conversion writes the index last.
    """
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


def read_indexed(store: Store, folder: str, name: str) -> ManifestBuilder:
    """The checkpoint of an index: the names in it, each from the file that it says."""
    path = join_name(str(store), folder, name)
    weights = read_index(store, join_name(folder, name), path, store.list(folder).get(name) or 0)
    parts = _read(store, folder, sorted(set(weights.values())))
    missing = sorted(fqn for fqn, file in weights.items() if fqn not in parts.found.get(file, {}))
    if missing:
        fqn = missing[0]
        what = (
            f"{len(missing)} of its tensors are not where it says, the first {fqn!r:.200} not in {weights[fqn]!r:.200}"
        )
        raise damaged(path, what)
    wanted = {file: {fqn for fqn in parts.found[file] if weights.get(fqn, file) == file} for file in parts.found}
    return parts.put_together(wanted)


def read_files(store: Store, folder: str, names: Sequence[str]) -> ManifestBuilder:
    """The checkpoint that these files are together."""
    found = _read(store, folder, names)
    return found.put_together({file: set(entries) for file, entries in found.found.items()})


def files_of_index(store: Store, name: str, num_bytes: int) -> frozenset[str]:
    """The safetensors files that an index of so many bytes names; none where it is damaged."""
    with suppress(CheckpointCorruptError, UnsafeCheckpointError):
        named = read_index(store, name, join_name(str(store), name), num_bytes).values()
        return frozenset(file for file in named if file.endswith(SUFFIX))
    return frozenset()


def read_index(store: Store, name: str, path: str, num_bytes: int) -> dict[str, str]:
    """File of each tensor, as the index of so many bytes says. `path` is for messages.

    Raises CheckpointCorruptError or UnsafeCheckpointError.
    """
    if num_bytes > _MAX_INDEX_BYTES:
        raise too_much(path, f"it has {num_bytes} bytes, at most {_MAX_INDEX_BYTES} are read")
    content = FileReader(store, name, num_bytes).read(0, num_bytes)
    try:
        index = json.loads(content, object_pairs_hook=_without_repetitions)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no index: {error}") from error
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise damaged(path, "it has no weight_map from names to files")
    for file in set(weights.values()):
        check_name(file)
    return weights


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in it twice")
    return found


class _Found(NamedTuple):
    """The headers of some files."""

    parts: ManifestBuilder
    found: dict[str, dict[str, _Part]]
    """By name of the file, then of the tensor."""
    is_sharded: bool
    """Files hold parts of tensors."""
    aliases: dict[str, str]

    def put_together(self, wanted: Mapping[str, set[str]]) -> ManifestBuilder:
        """The parts with these tensors of each file."""
        by_tensor: dict[str, list[_Part]] = {}
        for file, names in wanted.items():
            for fqn in (name for name in self.found[file] if name in names):
                by_tensor.setdefault(fqn, []).append(self.found[file][fqn])
        for fqn, of_tensor in by_tensor.items():
            self._add(fqn, of_tensor)
        for alias, fqn in self.aliases.items():
            if alias not in self.parts.tensors and fqn in self.parts.tensors:
                self.parts.add_alias(alias, fqn)
        return self.parts

    def _add(self, fqn: str, of_tensor: Sequence[_Part]) -> None:
        if len(of_tensor) > 1 and not self.is_sharded:
            files = " and ".join(self.parts.files[part.file].name for part in of_tensor[:2])
            raise CheckpointMismatchError(
                f"{self.parts.path}: {fqn!r:.200} is in {files}, and no index says which one counts; nothing was "
                "loaded: give the path of one file",
                kind="conflict",
                path=self.parts.path,
            )
        kinds = {(part.entry.dtype, len(part.offsets)) for part in of_tensor}
        if len(kinds) > 1:
            raise damaged(self.parts.path, f"the parts of {fqn!r:.200} have different dtypes or dimensions")
        ends = [map(int.__add__, part.offsets, part.entry.shape) for part in of_tensor]
        shape = tuple(map(max, zip(*ends, strict=True)))
        # Files of replicas hold the same part; any of them will do.
        regions = {Region(part.offsets, part.entry.shape): part for part in of_tensor}
        chunks = [
            Chunk(region, part.file, part.entry.byte_offset, part.entry.byte_length)
            for region, part in regions.items()
            if region.numel
        ]
        dtype = torch_dtype_of(of_tensor[0].entry.dtype)
        self.parts.add_tensor(fqn, dtype, shape, chunks, num_parts=len(of_tensor))


def _read(store: Store, folder: str, names: Iterable[str]) -> _Found:
    parts = ManifestBuilder(join_name(str(store), folder))
    listings: dict[str, Mapping[str, int | None]] = {}
    found: dict[str, dict[str, _Part]] = {}
    aliases: dict[str, str] = {}
    is_sharded = False
    for name in names:
        parent, _, last = name.rpartition("/")
        if parent not in listings:
            listings[parent] = store.list(join_name(folder, parent))
        path = join_name(parts.path, name)
        num_bytes = listings[parent].get(last)
        if num_bytes is None:
            raise CheckpointNotFoundError(
                f"{path} is not there, and the checkpoint has tensors in it; nothing was loaded: restore it, or take "
                "another checkpoint",
                kind="missing_file",
                path=path,
            )
        header = _header(store, join_name(folder, name), path, num_bytes)
        sharding = _sharding(header, path)
        is_sharded |= sharding is not None
        number = parts.add_file(name, num_bytes)
        found[name] = {entry.name: _Part(entry, number, _offsets(entry, sharding, path)) for entry in header.entries}
        if sharding is None:
            aliases |= {key: value for key, value in header.metadata.items() if value in found[name]}
            parts.metadata = {**parts.metadata, **header.metadata}
    return _Found(parts, found, is_sharded, aliases)


def _header(store: Store, name: str, path: str, num_bytes: int) -> SafetensorsHeader:
    try:
        header = read_header(store, name)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error.message}", kind=error.kind, path=path) from error
    end = max((entry.byte_offset + entry.byte_length for entry in header.entries), default=header.data_offset)
    if end != num_bytes:
        kind = "truncated" if num_bytes < end else "bad_manifest"
        raise damaged(path, f"it has {num_bytes} bytes, and {end} by its header", kind=kind)
    return header


def _sharding(header: SafetensorsHeader, path: str) -> Mapping[str, Any] | None:
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
        return whole(entry.shape).offsets
    of_entry = sharding.get(entry.name)
    offsets = of_entry.get("saved_offsets") if isinstance(of_entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != len(entry.shape):
        raise damaged(path, f"its {_SHARDING} does not say which part of {entry.name!r:.200} it holds")
    if not all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets):
        raise damaged(path, f"its {_SHARDING} has {offsets!r:.80} for {entry.name!r:.200}")
    return tuple(offsets)
