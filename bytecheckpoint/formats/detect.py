"""Detects a foreign format by the names in a folder or the first bytes of a file, and has its reader read that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.formats import safetensors_files, unfinished
from bytecheckpoint.formats.file_reader import FileReader, damaged
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks import (
    dcp_folder,
    dcp_nested,
    deepspeed_folder,
    megatron_legacy_folder,
    trainer_folder,
)
from bytecheckpoint.formats.torch_save import file as torch_file
from bytecheckpoint.formats.torch_save import sharded_files
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.paths import check_file_name, join_name
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
_NUMBERED = ("iter_{:07d}", "global_step_{}")
"""Folders of Megatron, and of the open-source ByteCheckpoint, whose pointer has Megatron's name."""
_STEP_FOLDERS = ("global_step{}", *_NUMBERED, "checkpoint-{}", "step-{}")
"""Names of step folders: DeepSpeed, Megatron, the open-source ByteCheckpoint, transformers, torchtitan."""


class ForeignPlace(NamedTuple):
    """A foreign checkpoint, found and not yet read."""

    folder: str
    """Path inside the store."""
    file: str
    """Name in the folder; "" if the folder is the checkpoint."""
    format: Format
    num_bytes: int = 0
    """Length of the file."""


def find_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ForeignPlace | None:
    """Returns the foreign checkpoint that the folder with this listing is, or None."""
    source = SourceFolder(store, folder, listing)
    found = next((name for name, (is_folder, *_) in _READERS.items() if is_folder(source)), None)
    return None if found is None else ForeignPlace(folder, "", found)


def find_step(store: Store, step: int | None, listing: Mapping[str, int | None]) -> ForeignPlace | None:
    """Returns the foreign checkpoint in the folder of a step, below the root with this listing; for a step of None, in
    the folder that a tracker file in the root names. Returns None if there is no such checkpoint.
    """
    names = _latest(store, listing) if step is None else _names_of(step)
    for name in _folders_among(names, listing):
        place = find_folder(store, name, store.list(name))
        if place is not None:
            return place
    return None


def find_unfinished_error(
    store: Store, step: int | Literal["latest"] | None, listing: Mapping[str, int | None]
) -> CheckpointNotFoundError | None:
    """Returns the error for a path at which `find_folder` and `find_step` find nothing, if a foreign checkpoint lacks a
    part: in the folder of an int step, else in the root. For "latest", also if the folder of the latest step lacks a
    part or is missing, or if no file names one of the steps as the latest. Returns None for anything else.
    """
    if isinstance(step, int):
        found = (unfinished.unfinished_error(store, name) for name in _folders_among(_names_of(step), listing))
        return next(filter(None, found), None)
    error = unfinished.unfinished_error(store, "")
    if error is not None or step is None:
        return error
    trackers = _latest(store, listing)
    for name in _folders_among(trackers, listing):
        return unfinished.unfinished_error(store, name, named_by=trackers[name])
    if trackers:
        return unfinished.without_latest_error(str(store), trackers)
    return unfinished.only_steps_error(str(store), listing)


def _names_of(step: int) -> list[str]:
    return [form.format(step) for form in _STEP_FOLDERS]


def _folders_among(names: Iterable[str], listing: Mapping[str, int | None]) -> Iterator[str]:
    return (name for name in names if listing.get(name, 0) is None)


def _latest(store: Store, listing: Mapping[str, int | None]) -> dict[str, str]:
    """Returns the names that the folder of the latest step may have, each with the tracker file that says so. The names
    are not checked: compare them with a listing, and never use one as a path.
    """
    names: dict[str, str] = {}
    for pointer in (_DEEPSPEED_LATEST, _MEGATRON_LATEST):
        num_bytes = listing.get(pointer)
        if num_bytes and num_bytes <= _MAX_POINTER_BYTES:
            text = FileReader(store, pointer, num_bytes).read_all().decode("utf-8", "replace").strip()
            if pointer == _MEGATRON_LATEST and text.isascii() and text.isdecimal():
                names |= dict.fromkeys([form.format(int(text)) for form in _NUMBERED], pointer)
            elif text:
                names[text] = pointer
    return names


def find_file(store: Store, folder: str, name: str, num_bytes: int) -> ForeignPlace:
    """Returns the checkpoint that a file is, its format known by the name and the first bytes.

    Raises CheckpointNotFoundError (not_found) for an unknown format, CheckpointCorruptError (truncated) for an empty
    file, UnsafeCheckpointError (path_escape) for a name that no store reads, and StorageError.
    """
    check_file_name(join_name(str(store), folder, name), name)
    file = FileReader(store, join_name(folder, name), num_bytes)
    if not num_bytes:
        raise damaged(file.path, "it is empty", kind="truncated")
    head = file.read(0, min(num_bytes, _HEAD_BYTES))
    if name.endswith(safetensors_files.INDEX_SUFFIX) or head[8:9] == b"{":
        return ForeignPlace(folder, name, "safetensors", num_bytes)
    if head.startswith((torch_file.ZIP_MAGIC, torch_file.LEGACY_MAGIC)):
        return ForeignPlace(folder, name, "torch.save", num_bytes)
    raise CheckpointNotFoundError(
        f"{file.path} is a file of no format that is known: neither safetensors nor torch.save wrote it, as far as its "
        "first bytes tell; it was not touched: give the folder of a checkpoint, or the path of such a file",
        kind="not_found",
        path=file.path,
    )


def read_manifest(store: Store, place: ForeignPlace) -> Manifest:
    """Returns the manifest of a foreign checkpoint. Reads plain data and what describes tensors; elements of tensors
    only to compare copies.

    Raises CheckpointNotFoundError (missing_file, not_committed), CheckpointMismatchError (conflict),
    CheckpointCorruptError, UnsafeCheckpointError or StorageError. A damaged checkpoint may also raise ValueError,
    OverflowError or MemoryError, which `manifest_bytes` turns into CheckpointCorruptError.
    """
    # Of a file beside thousands of others, a list of checkpoints reads each: only an index needs the listing.
    is_alone = place.file and not place.file.endswith(safetensors_files.INDEX_SUFFIX)
    listing = {place.file: place.num_bytes} if is_alone else store.list(place.folder)
    source = SourceFolder(store, place.folder, listing)
    if place.file:
        _read_file(source, place)
    else:
        _, *steps = _READERS[place.format]
        for read in steps:
            read(source)
        source.name_unread_files()
    return source.builder.manifest(place.format)


_Check = Callable[[SourceFolder], bool]
_Read = Callable[[SourceFolder], None]
_READERS: Mapping[Format, tuple[_Check, *tuple[_Read, ...]]] = MappingProxyType(
    {
        "torch.distributed.checkpoint": (dcp_folder.is_folder, dcp_folder.read_folder),
        "deepspeed": (deepspeed_folder.is_folder, deepspeed_folder.read_folder),
        "megatron": (megatron_legacy_folder.is_folder, megatron_legacy_folder.read_folder),
        "torch.distributed.checkpoint folders": (dcp_nested.is_folder, dcp_nested.read_folder),
        "safetensors": (safetensors_files.is_folder, safetensors_files.read_folder, trainer_folder.add_beside),
        "torch.save": (trainer_folder.is_folder, trainer_folder.read_torch_model, trainer_folder.add_beside),
        "torch.save of ranks": (sharded_files.is_folder, sharded_files.read_folder),
    }
)
"""Format -> the check that a folder has it, then the functions that read the folder, in order. The first format whose
check is true counts."""


def _read_file(source: SourceFolder, place: ForeignPlace) -> None:
    if place.format == "torch.save":
        source.builder.path = join_name(source.path, place.file)
        saved = source.open(place.file)
        saved.take_apart(saved.value)
    elif place.file.endswith(safetensors_files.INDEX_SUFFIX):
        safetensors_files.read_indexed(source, place.file)
    else:
        safetensors_files.read_files(source, [place.file])
