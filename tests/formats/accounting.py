"""The tensors of a foreign checkpoint, found without the library's readers, and those that a manifest lacks."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bytecheckpoint.formats.find_checkpoint import Opening, find_checkpoint, manifest_of
from bytecheckpoint.manifest import Manifest


class Stored(NamedTuple):
    """The bytes of a tensor."""

    file: str
    """Below the folder of the checkpoint."""
    name: str
    first: int
    content: bytes


def lost(path: Path, *, is_padded: bool = False) -> list[str]:
    """The tensors that are neither in the manifest nor named in `left_out`. Where files are padded, a tensor counts as
    found if a part of it is.
    """
    found = find_checkpoint(str(path), "latest", Opening(None))
    manifest = manifest_of(found)
    folder = Path(str(found.store)) / found.folder
    files = [folder / found.foreign.file] if found.foreign and found.foreign.file else sorted(folder.rglob("*"))
    tensors = [each for file in files if file.is_file() for each in _tensors(file, folder)]
    assert tensors
    covered = _covered(manifest, folder)
    named = _named(manifest)
    missing = []
    contents: set[bytes] = set()
    for each in tensors:
        of_tensor = covered.get(each.file, bytearray())[each.first : each.first + len(each.content)]
        if any(of_tensor) and (is_padded or all(of_tensor)):
            contents.add(each.content)
        elif not any(each.file == name or each.file.startswith(name) for name in named):
            missing.append(each)
    contents |= {content for name in named for content in _contents(folder, name)}
    return [f"{each.file}: {each.name}" for each in missing if each.content not in contents]


def _named(manifest: Manifest) -> list[str]:
    text = manifest.metadata.get("left_out", "")
    return [name for reason in text.split("; ") if reason for name in reason.rpartition(": ")[0].split(", ")]


def _covered(manifest: Manifest, folder: Path) -> dict[str, bytearray]:
    """Of each file, 1 for the bytes that are in a chunk."""
    covered = {file.name: bytearray((folder / file.name).stat().st_size) for file in manifest.files}
    names = [file.name for file in manifest.files]
    for record in manifest.tensors.values():
        for chunk in record.chunks:
            covered[names[chunk.file]][chunk.byte_offset : chunk.byte_offset + chunk.byte_length] = (
                b"\1" * chunk.byte_length
            )
    return covered


def _classes() -> AbstractContextManager[object]:
    """Those of the open-source ByteCheckpoint, by its names."""
    from oss_files import stand_ins

    return stand_ins()


def _tensors(file: Path, folder: Path) -> Iterator[Stored]:
    name = file.relative_to(folder).as_posix()
    content = file.read_bytes()
    if file.name == ".metadata":
        for path, first, length in _items(content):
            within = (file.parent / path).relative_to(folder).as_posix()
            yield from _in_item(within, first, (file.parent / path).read_bytes()[first : first + length])
    elif file.suffix == ".safetensors":
        (num_bytes,) = struct.unpack_from("<Q", content)
        header: Mapping[str, Any] = json.loads(content[8 : 8 + num_bytes])
        for key, entry in header.items():
            if key != "__metadata__":
                start, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
                yield Stored(name, key, start, content[start:end])
    elif content.startswith(b"PK\3\4") and file.suffix != ".distcp":
        yield from _in_item(name, 0, content)


def _items(content: bytes) -> Iterator[tuple[str, int, int]]:
    """Of the data files of torch.distributed.checkpoint: file, offset and length."""
    with _classes() if b"bytecheckpoint.checkpointer" in content else nullcontext():
        metadata = pickle.loads(content)
    for info in metadata.storage_data.values():
        yield info.relative_path, info.offset, info.length


def _in_item(file: str, first: int, content: bytes) -> Iterator[Stored]:
    """An archive of torch.save, of which each member below `data` is the storage of a tensor."""
    if not content.startswith(b"PK\3\4"):
        yield Stored(file, "bytes", first, content)
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            folder, _, key = member.filename.rpartition("/")
            if folder.endswith("data") and key.isdecimal() and member.file_size:
                at = member.header_offset
                at += 30 + sum(struct.unpack_from("<2H", content, at + 26))
                yield Stored(file, key, first + at, content[at : at + member.file_size])


def _contents(folder: Path, name: str) -> Iterator[bytes]:
    """Of the tensors below a key of the dict in a file of torch.save: all files, or the one that is named before it."""
    file, _, key = name.rpartition(": ")
    files = [folder / file] if file else [each for each in sorted(folder.rglob("*.pt")) if key.isidentifier()]
    for each in files:
        if each.read_bytes()[:4] == b"PK\3\4":
            value = torch.load(each, weights_only=False)
            inner = value.get("optimizer_state_dict") if isinstance(value, dict) else None
            for root in (value, inner):
                yield from _storages(root.get(key)) if isinstance(root, dict) else ()


def _storages(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield bytes(value.untyped_storage())  # type: ignore[call-overload]
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _storages(item)
