"""Files of torch.save: a zip archive of one pickle and one member for each storage. Tensors may be views of the same
storage, and lie there in any order.
"""

from __future__ import annotations

from typing import Any

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointError, UnsafeCheckpointError
from bytecheckpoint.formats import strided_views
from bytecheckpoint.formats.file_reader import FileReader, damaged, not_readable
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.archive import ZipArchive
from bytecheckpoint.formats.torch_save.unpickler import MAX_PICKLE_BYTES, FindGlobal, PickleError, read_pickle
from bytecheckpoint.formats.torch_save.unpickler_globals import StorageRef, StoredView, find_storage, find_value

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
"""How files begin that torch wrote before version 1.6, or when told not to write a zip archive."""

_PICKLE = "data.pkl"
_SMALL = 1024


class TorchArchive:
    """One archive of torch.save, which is bytes `start` to `end` of a file."""

    def __init__(self, file: FileReader, start: int, end: int) -> None:
        self._file = file
        self._zip = ZipArchive(file, start, end)
        self._folder = self._find_folder()
        if self._text("byteorder") == "big":
            advice = "load it on a machine of its kind, and save it again"
            raise not_readable(file.path, "its numbers are big-endian", advice)

    def _find_folder(self) -> str:
        """Every member lies in one folder, which is named after the file when it was written."""
        names = [name for name in self._zip.members if name == _PICKLE or name.endswith(f"/{_PICKLE}")]
        folders = [name.removesuffix(_PICKLE) for name in names if name.count("/") <= 1]
        if len(folders) != 1:
            self._file.damaged(f"it is a zip archive without a {_PICKLE}, so torch.save did not write it")
        if f"{folders[0]}constants.pkl" in self._zip.members:
            advice = "load it with torch.jit.load, and save its state_dict"
            raise not_readable(self._file.path, "it is a program of TorchScript", advice)
        return folders[0]

    def _text(self, name: str) -> str:
        full_name = self._folder + name
        return self._zip.read(full_name, max_bytes=_SMALL).decode("latin-1") if full_name in self._zip.members else ""

    @property
    def pickle(self) -> bytes:
        return self._zip.read(self._folder + _PICKLE, max_bytes=MAX_PICKLE_BYTES)

    def checksum_offset(self, ref: StorageRef) -> int:
        """Where the checksum of a storage stands before it, from the start of the archive."""
        return self._zip.checksum_offset(f"{self._folder}data/{ref.key}")

    def checksum(self, ref: StorageRef) -> int | None:
        """That of a storage's bytes; None where the archive has no such member."""
        member = self._zip.members.get(f"{self._folder}data/{ref.key}")
        return None if member is None else member.CRC

    def read(self, byte_offset: int, byte_length: int) -> bytes:
        """These bytes of its file."""
        return self._file.read(byte_offset, byte_length)

    def storage(self, ref: StorageRef) -> tuple[int, int]:
        """Where in the file a storage begins, and its length in bytes."""
        name = f"{self._folder}data/{ref.key}"
        member = self._zip.members.get(name)
        if member is None:
            self._file.damaged(f"it has no member {name!r:.200}, which its pickle points to", kind="truncated")
        num_bytes = ref.num_items * (1 if ref.dtype is None else itemsize(ref.dtype))
        if member.file_size != num_bytes:
            self._file.damaged(f"its member {name!r:.200} has {member.file_size} bytes, its pickle says {num_bytes}")
        return self._zip.data_offset(name), num_bytes


def unpickle(content: bytes, path: str, find_global: FindGlobal) -> Any:
    """The value in a pickle, whose errors get the path.

    Raises CheckpointCorruptError (bad_manifest) and UnsafeCheckpointError (pickle_refused).
    """
    try:
        return read_pickle(content, find_global=find_global, find_persistent=find_storage)
    except PickleError as error:
        raise damaged(path, f"of its pickle: {error}") from error
    except UnsafeCheckpointError as error:
        raise with_path(error, path) from error


def with_path(error: CheckpointError, path: str) -> CheckpointError:
    return type(error)(f"{path}: {error.message}", kind=error.kind, path=path)


def read_archive(archive: TorchArchive, parts: ManifestBuilder, file: int) -> None:
    """Adds what lies in an archive of the file of this number."""
    value = unpickle(archive.pickle, parts.path, find_value)
    parts.take_apart(value, on_tensor=_Tensors(archive, parts, file).add)


class _Tensors:
    """The tensors of one archive, the same one under several names among them."""

    def __init__(self, archive: TorchArchive, parts: ManifestBuilder, file: int) -> None:
        self._archive = archive
        self._parts = parts
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        self._known: dict[str, str] = {}

    def add(self, fqn: str, view: StoredView) -> None:
        # As a text: nobody can choose the hash of one, as of numbers.
        place = repr((view.storage.key, view.dtype, view.item_offset, view.shape, view.strides))
        first = self._known.setdefault(place, fqn)
        if first != fqn:
            self._parts.add_alias(fqn, first)
            return
        if view.storage.key not in self._places:
            self._places[view.storage.key] = self._archive.storage(view.storage)
        start, num_bytes = self._places[view.storage.key]
        chunks = chunks_of(view, fqn, file=self._file, byte_offset=start, byte_length=num_bytes, path=self._parts.path)
        self._parts.add_tensor(fqn, view.dtype, view.shape, chunks)


def chunks_of(view: StoredView, fqn: str, *, file: int, byte_offset: int, byte_length: int, path: str) -> list[Any]:
    """The chunks of a tensor whose storage lies at these bytes of its file."""
    item_bytes = itemsize(view.dtype)
    if 0 in view.shape:
        return []
    end = item_bytes * strided_views.last_item(view.shape, view.strides, view.item_offset)
    if end > byte_length:
        raise damaged(path, f"{fqn!r:.200} reaches to byte {end} of a storage that has {byte_length}")
    if strided_views.num_chunks(view.shape, view.strides) > strided_views.MAX_CHUNKS:
        what = (
            f"{fqn!r:.200} has the shape {list(view.shape)} and the strides {list(view.strides)}, so that its elements"
        )
        advice = "save it with .contiguous()"
        raise not_readable(path, f"{what} do not follow one another in the file", advice)
    first = byte_offset + item_bytes * view.item_offset
    return list(
        strided_views.strided_chunks(view.shape, view.strides, file=file, byte_offset=first, item_bytes=item_bytes)
    )


def refuse_legacy(path: str) -> None:
    advice = "load it with torch.load where it comes from, and save it with torch.save of torch 1.6 or later"
    raise not_readable(path, "it was written by torch before 1.6, or with _use_new_zipfile_serialization=False", advice)
