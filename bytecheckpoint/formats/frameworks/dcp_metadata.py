"""The `.metadata` of a torch.distributed.checkpoint folder: a pickle of torch's own classes, read as records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bytecheckpoint.formats.file_reader import not_readable
from bytecheckpoint.formats.plain_values import DtypeName
from bytecheckpoint.formats.torch_save.file import translated, unpickle
from bytecheckpoint.formats.torch_save.unpickler import PickleError
from bytecheckpoint.formats.torch_save.unpickler_globals import Instance, instances, lengths_of, with_values
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH
from bytecheckpoint.region import Region

METADATA_NAME = ".metadata"

_CHECKPOINT, _MEGATRON = "torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.strategies.torch"
_OLD_TORCH, _OSS = "torch.distributed._shard.sharded_tensor.metadata", "bytecheckpoint.checkpointer.meta_type"
"""Modules of torch up to 2.2, and of the open-source ByteCheckpoint, whose package has this library's name."""
_CLASSES = {
    _CHECKPOINT + "metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    _CHECKPOINT + "filesystem": "_StorageInfo _StoragePrefix",
    # plans of the ranks, which Megatron keeps in `.metadata`
    _CHECKPOINT + "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    _MEGATRON: "MCoreMetadata MCoreSavePlan",
    _OLD_TORCH: "TensorProperties MEM_FORMAT_ENCODING",
    _OSS: "Metadata _StorageInfo",
}

_Place = tuple[str, str]
"""Name of a tensor, and the offsets of a chunk as text: hashes of texts cannot be made to collide."""


class Item(NamedTuple):
    """The bytes of a chunk, or of an object, in a file."""

    file: str
    byte_offset: int
    byte_length: int
    tensor: bytes | None = None
    """The pickle of a tensor whose storage alone is in the file, as the open-source ByteCheckpoint writes it; None for
    an archive of torch.save."""


class DcpTensor(NamedTuple):
    """A tensor, and where each of its regions lies."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[Region, Item]]


class Metadata(NamedTuple):
    """The contents of a `.metadata` file."""

    tensors: dict[str, DcpTensor]
    objects: dict[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    """Name -> keys of nested containers, which were joined to the name."""
    attributes: Mapping[str, Any]
    """Other attributes of the pickled object, which frameworks add."""


def read_metadata(content: bytes, path: str) -> Metadata:
    """Returns the contents of a `.metadata` file.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version) or UnsafeCheckpointError (pickle_refused).
    """
    found = unpickle(content, path, _find_class)
    return translated(path, "torch.distributed.checkpoint", _parse, found, path)


_find_class = with_values(instances(_CLASSES))


def _parse(metadata: Any, path: str) -> Metadata:
    fields = dict(_fields(metadata, "Metadata", "MCoreMetadata"))
    pickles = {_place(index): content for index, content in (fields.pop("all_tensor_metadata", None) or {}).items()}
    items = _items(fields.pop("storage_data", None), pickles, path)
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Item] = {}
    for name, description in fields.pop("state_dict_metadata").items():
        fqn = _text(name)
        if _is_a(description, "BytesStorageMetadata"):
            objects[fqn] = _item(items, fqn, None)
            continue
        tensor_fields = _fields(description, "TensorStorageMetadata")
        chunks = []
        for chunk in tensor_fields["chunks"]:
            chunk_fields = _fields(chunk, "ChunkStorageMetadata")
            region = Region(lengths_of(chunk_fields["offsets"]), lengths_of(chunk_fields["sizes"]))
            chunks.append((region, _item(items, fqn, region.offsets)))
        tensors[fqn] = DcpTensor(_dtype(tensor_fields["properties"]), lengths_of(tensor_fields["size"]), chunks)
    return Metadata(tensors, objects, dict(_paths(fields.pop("planner_data", None))), fields)


def _is_a(value: Any, *names: str) -> bool:
    return isinstance(value, Instance) and value.kind.rpartition(".")[2] in names


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not _is_a(value, *names):
        raise PickleError(f"it has no {names[0]} where one should be")
    fields: dict[str, Any] = value.fields
    return fields


def _text(name: Any) -> str:
    if type(name) is not str:
        raise PickleError("a name in it is not text")
    return name


def _place(index: Any) -> _Place:
    fields = _fields(index, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields["fqn"]), "" if offset is None else repr(lengths_of(offset))


def _items(storage_data: Any, pickles: Mapping[_Place, Any], path: str) -> dict[_Place, Item]:
    items = {}
    for index, info in storage_data.items():
        index_fields, info_fields = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if info_fields.get("transform_descriptors"):
            how = ", ".join(map(str, info_fields["transform_descriptors"]))
            advice = "load it with torch.distributed.checkpoint, and save it without extensions"
            raise not_readable(path, f"{index_fields['fqn']!r:.200} was changed when it was saved ({how:.80})", advice)
        place = _place(index)
        tensor = pickles.get(place)
        numbers = info_fields["offset"], info_fields["length"]
        if (
            not all(type(number) is int and number >= 0 for number in numbers)
            or type(info_fields["relative_path"]) is not str
            or not (tensor is None or type(tensor) is bytes)
        ):
            raise PickleError(f"it has no valid place for {index_fields['fqn']!r:.200}")
        items[place] = Item(info_fields["relative_path"], *numbers, tensor)
    return items


def _item(items: Mapping[_Place, Item], fqn: str, offset: tuple[int, ...] | None) -> Item:
    """Returns where a value (`offset` is None) or the part of a tensor is; a whole tensor may have no offset."""
    item = items.get((fqn, "" if offset is None else repr(offset))) or items.get((fqn, ""))
    if item is None:
        where = "" if offset is None else f" at {list(offset)}"
        raise PickleError(f"it does not say where {fqn!r:.200}{where} is")
    return item


def _dtype(properties: Any) -> str:
    state = properties.state if _is_a(properties, "TensorProperties") else None
    dtype = state["dtype"] if isinstance(state, dict) else state[0] if isinstance(state, tuple) else None
    if not isinstance(dtype, DtypeName):
        raise PickleError("it has a tensor without a dtype")
    return dtype.name


def _paths(planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yields each name with the keys of its place in nested containers; nothing for data of another kind of planner."""
    for fqn, path in planner_data.items() if isinstance(planner_data, dict) else ():
        if isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH and all(type(key) in {str, int} for key in path):
            yield fqn, path
