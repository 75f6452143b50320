"""Which foreign format a folder or file is, told by its contents, and its reader. Names of files say what a folder is,
the first bytes what a file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.formats import safetensors_files
from bytecheckpoint.formats.file_reader import FileReader, damaged
from bytecheckpoint.formats.frameworks import (
    dcp_folder,
    dcp_nested,
    deepspeed_folder,
    megatron_dist,
    megatron_legacy_folder,
    trainer_folder,
)
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save import file as torch_file
from bytecheckpoint.formats.torch_save import sharded_files
from bytecheckpoint.formats.unread_files import name_unread_files
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

Format = Literal[
    "safetensors",
    "torch.save",
    "torch.save of ranks",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint folders",
    "deepspeed",
    "megatron",
]

_HEAD_BYTES = 16
_DEEPSPEED_LATEST, _MEGATRON_LATEST = "latest", "latest_checkpointed_iteration.txt"
_MAX_POINTER_BYTES = 1024
_MEGATRON_STEP = "iter_{:07d}"
_NUMBERED = (_MEGATRON_STEP, "global_step_{}")
"""Of Megatron, and of the open-source ByteCheckpoint, whose pointer has Megatron's name."""
_STEP_FOLDERS = ("global_step{}", *_NUMBERED, "checkpoint-{}")
"""Of DeepSpeed, these and the Trainer of transformers."""


class ForeignPlace(NamedTuple):
    """A foreign checkpoint, found and not yet read."""

    folder: str
    """Inside the store."""
    file: str
    """Inside the folder; "" where the folder is the checkpoint."""
    format: Format


def find_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ForeignPlace | None:
    """The checkpoint that a folder with this listing is, if any."""
    files = {name for name, num_bytes in listing.items() if num_bytes is not None}
    if dcp_folder.METADATA_NAME in files or megatron_dist.read_backend(store, folder, listing):
        return ForeignPlace(folder, "", "torch.distributed.checkpoint")
    if deepspeed_folder.is_folder(files):
        return ForeignPlace(folder, "", "deepspeed")
    if megatron_legacy_folder.is_folder(listing):
        return ForeignPlace(folder, "", "megatron")
    if dcp_nested.is_folder(store, folder, listing):
        return ForeignPlace(folder, "", "torch.distributed.checkpoint folders")
    if any(name.endswith(safetensors_files.SUFFIX) for name in files):
        return ForeignPlace(folder, "", "safetensors")
    if files & {trainer_folder.TORCH_SOLE, trainer_folder.TORCH_INDEX}:
        return ForeignPlace(folder, "", "torch.save")
    if sharded_files.is_folder(files):
        return ForeignPlace(folder, "", "torch.save of ranks")
    return None


def find_step(store: Store, step: int | None, listing: Mapping[str, int | None]) -> ForeignPlace | None:
    """The checkpoint of a step in the root with this listing, if any: None is the one to which a file there points."""
    names = _latest(store, listing) if step is None else [form.format(step) for form in _STEP_FOLDERS]
    for name in (name for name in names if listing.get(name, 0) is None):
        place = find_folder(store, name, store.list(name))
        if place is not None:
            return place
    return None


def _latest(store: Store, listing: Mapping[str, int | None]) -> list[str]:
    """What DeepSpeed and Megatron say is the newest."""
    names = []
    for pointer in (_DEEPSPEED_LATEST, _MEGATRON_LATEST):
        num_bytes = listing.get(pointer)
        if num_bytes and num_bytes <= _MAX_POINTER_BYTES:
            text = FileReader(store, pointer, num_bytes).read(0, num_bytes).decode("utf-8", "replace").strip()
            is_number = pointer == _MEGATRON_LATEST and text.isascii() and text.isdecimal()
            if is_number:
                names += [form.format(int(text)) for form in _NUMBERED]
            elif text in listing:  # else it names nothing here: it is no path to follow
                names.append(text)
    return names


def find_file(store: Store, folder: str, name: str, num_bytes: int) -> ForeignPlace:
    """The checkpoint that a file is.

    Raises CheckpointNotFoundError (not_found) for one of no format that is known, CheckpointCorruptError (truncated)
    for an empty one.
    """
    file = FileReader(store, join_name(folder, name), num_bytes)
    if not num_bytes:
        raise damaged(file.path, "it is empty", kind="truncated")
    head = file.read(0, min(num_bytes, _HEAD_BYTES))
    if name.endswith(safetensors_files.INDEX_SUFFIX) or head[8:9] == b"{":
        return ForeignPlace(folder, name, "safetensors")
    if head.startswith((torch_file.ZIP_MAGIC, torch_file.LEGACY_MAGIC)):
        return ForeignPlace(folder, name, "torch.save")
    raise CheckpointNotFoundError(
        f"{file.path} is a file of no format that is known: neither safetensors nor torch.save wrote it, as far as its "
        "first bytes tell; it was not touched: give the folder of a checkpoint, or the path of such a file",
        kind="not_found",
        path=file.path,
    )


def read_manifest(store: Store, place: ForeignPlace) -> Manifest:
    """The manifest of a foreign checkpoint: of its files, only what describes tensors is read.

    Raises CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict), CheckpointCorruptError,
    UnsafeCheckpointError or StorageError.
    """
    listing = store.list(place.folder)
    builder = _read(store, place, listing)
    if not place.file:
        name_unread_files(store, place.folder, listing, builder)
    return builder.manifest(place.format)


def _read(store: Store, place: ForeignPlace, listing: Mapping[str, int | None]) -> ManifestBuilder:
    folder, name, kind = place
    if kind == "torch.distributed.checkpoint":
        return dcp_folder.read_folder(store, folder, listing)
    if kind == "torch.distributed.checkpoint folders":
        return dcp_nested.read_folder(store, folder, listing)
    if kind == "megatron":
        return megatron_legacy_folder.read_folder(store, folder, listing)
    if kind == "torch.save of ranks":
        return sharded_files.read_folder(store, folder, listing)
    if kind == "deepspeed":
        return deepspeed_folder.read_folder(store, folder, listing)
    if not name:
        is_torch = kind == "torch.save"
        read_model = trainer_folder.read_torch_model if is_torch else safetensors_files.read_folder
        builder = read_model(store, folder, listing)
        trainer_folder.add_beside(store, folder, listing, builder)
        return builder
    if kind == "torch.save":
        return _read_torch_file(store, folder, name, listing)
    if name.endswith(safetensors_files.INDEX_SUFFIX):
        return safetensors_files.read_indexed(store, folder, name)
    return safetensors_files.read_files(store, folder, [name])


def _read_torch_file(store: Store, folder: str, name: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    file = FileReader(store, join_name(folder, name), listing.get(name) or 0)
    builder = ManifestBuilder(file.path)
    if file.read(0, min(file.byte_length, _HEAD_BYTES)).startswith(torch_file.LEGACY_MAGIC):
        torch_file.refuse_legacy(file.path)
    archive = torch_file.TorchArchive(file, 0, file.byte_length)
    torch_file.read_archive(archive, builder, builder.add_file(name, file.byte_length))
    return builder
