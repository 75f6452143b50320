"""Files of torch.save: a zip archive of one pickle, and a member for each storage, of which tensors are views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointError, UnsafeCheckpointError
from bytecheckpoint.formats import strided_views
from bytecheckpoint.formats.file_reader import (
    REQUESTS_IN_FLIGHT,
    FileReader,
    damaged,
    not_readable,
    visit_places,
    with_path,
)
from bytecheckpoint.formats.flat_ranges import FlatBuffer
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, plain_tree
from bytecheckpoint.formats.torch_save.archive import ZipArchive, torchscript_error
from bytecheckpoint.formats.torch_save.unpickler import (
    MAX_PICKLE_BYTES,
    FindGlobal,
    PickleError,
    UnheldValueError,
    read_pickle,
)
from bytecheckpoint.formats.torch_save.unpickler_globals import StorageRef, StoredView, find_storage
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import shifted
from bytecheckpoint.runtime.threads import map_looks

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
"""First bytes of files that torch wrote before version 1.6, or without a zip archive."""

_PICKLE = "data.pkl"
_SMALL = 1024

_Found = TypeVar("_Found")


class TorchArchive:
    """One archive of torch.save, which is bytes `start` to `end` of a file."""

    def __init__(self, file: FileReader, start: int, end: int) -> None:
        self._file = file
        self._zip = ZipArchive(file, start, end)
        self._folder = self._find_folder()
        self._storages: dict[str, tuple[int, int]] = {}
        """Where the storage of each member begins in the file, and its length in bytes."""
        byteorder = f"{self._folder}byteorder"
        if byteorder in self._zip.members and self._zip.read(byteorder, max_bytes=_SMALL) == b"big":
            advice = "load it on a machine of its kind, and save it again"
            raise not_readable(file.path, "its numbers are big-endian", advice)

    def _find_folder(self) -> str:
        """Returns the folder of all members, which is named after the file when it was written."""
        names = [name for name in self._zip.members if name == _PICKLE or name.endswith(f"/{_PICKLE}")]
        folders = [name.removesuffix(_PICKLE) for name in names if name.count("/") <= 1]
        if len(folders) != 1:
            self._file.raise_damaged(f"it is a zip archive without a {_PICKLE}, so torch.save did not write it")
        if f"{folders[0]}constants.pkl" in self._zip.members:
            raise torchscript_error(self._file.path)
        return folders[0]

    @property
    def pickle(self) -> bytes:
        return self._zip.read(self._folder + _PICKLE, max_bytes=MAX_PICKLE_BYTES)

    def checksum_offset(self, ref: StorageRef) -> int:
        """Returns where the checksum of a storage stands before it, from the start of the archive."""
        return self._zip.checksum_offset(f"{self._folder}data/{ref.key}")

    def checksum(self, ref: StorageRef) -> int | None:
        """Returns the checksum of a storage's bytes; None if the archive has no such member."""
        member = self._zip.members.get(f"{self._folder}data/{ref.key}")
        return None if member is None else member.checksum

    def read(self, byte_offset: int, byte_length: int) -> bytes:
        """Returns bytes of the file, `byte_offset` counted from the start of the file and not of the archive."""
        return self._file.read(byte_offset, byte_length)

    def storage_places(self) -> Iterator[tuple[FileReader, int, tuple[TorchArchive, str]]]:
        """Yields all storages, as places for `visit_places`, in the order of the file."""
        for byte_offset, name in self._zip.in_file_order():
            if name.startswith(f"{self._folder}data/"):
                yield self._file, byte_offset, (self, name)

    def locate(self, name: str, file: FileReader) -> tuple[int, int]:
        """Returns where a member's bytes begin in the file, and their number, and caches both for `storage`. `file`
        reads the archive's file.
        """
        found = self._zip.data_offset(name, file), self._zip.members[name].byte_length
        self._storages[name] = found
        return found

    def storage(self, ref: StorageRef) -> tuple[int, int]:
        """Returns where in the file a storage begins, and its length in bytes. Raises CheckpointCorruptError if there
        is none (truncated), or it has not the length that `ref` says.
        """
        num_bytes = ref.num_items * (1 if ref.dtype is None else itemsize(ref.dtype))
        name = f"{self._folder}data/{ref.key}"
        if name not in self._zip.members:
            self._file.raise_damaged(f"it has no member {name!r:.200}, which its pickle points to", kind="truncated")
        found = self._storages.get(name) or self.locate(name, self._file)
        if found[1] != num_bytes:
            what = f"its storage {ref.key!r:.200} has {found[1]} bytes, its pickle says {num_bytes}"
            self._file.raise_damaged(what)
        return found


def locate_storages(archives: Iterable[TorchArchive]) -> None:
    """Reads where the storages of these archives begin, with several requests in flight: each says it in front of its
    own bytes. What is damaged is left for `TorchArchive.storage` to raise.
    """
    places = [place for archive in archives for place in archive.storage_places()]
    visit_places(places, lambda file, found: found[0].locate(found[1], file))


def unpickle(content: bytes, path: str, find_global: FindGlobal) -> Any:
    """Returns the value in a pickle; errors get the path.

    Raises CheckpointCorruptError (bad_manifest) and UnsafeCheckpointError (pickle_refused).
    """
    try:
        return read_pickle(content, find_global=find_global, find_persistent=find_storage)
    except UnheldValueError as error:
        raise not_readable(path, f"of its pickle: {error}", error.advice, kind="bad_manifest") from error
    except PickleError as error:
        raise damaged(path, f"of its pickle: {error}") from error
    except UnsafeCheckpointError as error:
        raise with_path(error, path) from error


def chunks_of(view: StoredView, fqn: str, *, file: int, byte_offset: int, byte_length: int, path: str) -> list[Chunk]:
    """Returns the chunks of a tensor whose storage lies at these bytes of its file; none if it has no elements.

    Raises CheckpointCorruptError: bad_manifest if it reaches out of its storage, unsupported_version if its strides
    make too many chunks.
    """
    item_bytes = itemsize(view.dtype)
    if 0 in view.shape:
        return []
    end = item_bytes * strided_views.end_item(view.shape, view.strides, view.item_offset)
    if end > byte_length:
        raise damaged(path, f"{fqn!r:.200} reaches to byte {end} of a storage that has {byte_length}")
    if strided_views.num_chunks(view.shape, view.strides) > strided_views.MAX_CHUNKS:
        what = f"{fqn!r:.200} has the shape {list(view.shape)} and the strides {list(view.strides)}, so that its "
        what += "elements do not follow one another in the file"
        raise not_readable(path, what, "save it with .contiguous()")
    at = byte_offset + item_bytes * view.item_offset
    return list(
        strided_views.strided_chunks(view.shape, view.strides, file=file, byte_offset=at, item_bytes=item_bytes)
    )


def moved(chunks: Iterable[Chunk], offsets: Sequence[int]) -> list[Chunk]:
    """Returns the chunks of a part that begins at these offsets of its tensor as chunks of the tensor."""
    return [chunk._replace(region=shifted(chunk.region, offsets)) for chunk in chunks]


class SavedFile(NamedTuple):
    """A file of torch.save in a checkpoint. `add_tensor`, `plain` and `take_apart` add its tensors to the builder."""

    archive: TorchArchive
    file: int
    """Number of the file in the manifest."""
    path: str
    value: Any
    name: str
    """Name inside the folder of the checkpoint."""
    builder: ManifestBuilder

    def buffer(self, view: Any, what: str) -> tuple[FlatBuffer, str]:
        """Returns where a flat tensor lies, and its dtype. Raises CheckpointCorruptError (bad_manifest) for a `view`
        that is no flat tensor, or reaches out of its storage.
        """
        if not isinstance(view, StoredView) or len(view.shape) != 1 or (view.shape[0] > 1 and view.strides[0] != 1):
            raise damaged(self.path, f"{what} is not a flat tensor")
        start, num_bytes = self.archive.storage(view.storage)
        item_bytes = itemsize(view.dtype)
        if (view.item_offset + view.shape[0]) * item_bytes > num_bytes:
            raise damaged(self.path, f"{what} reaches out of its storage")
        return FlatBuffer(self.file, start + view.item_offset * item_bytes, view.shape[0]), view.dtype

    def chunks(self, view: StoredView, fqn: str) -> list[Chunk]:
        """Returns the chunks of a whole tensor; none if it has no elements. Raises as `chunks_of` does."""
        start, num_bytes = self.archive.storage(view.storage)
        return chunks_of(view, fqn, file=self.file, byte_offset=start, byte_length=num_bytes, path=self.path)

    def add_tensor(self, fqn: str, view: StoredView) -> None:
        self.builder.add_tensor(fqn, view.dtype, view.shape, self.chunks(view, fqn))

    def plain(self, value: Any, fqn: str) -> Any:
        """Adds the tensors of a value of the file to the builder; returns the value as plain data with TensorRefs."""
        return plain_tree(value, fqn, path=self.path, on_tensor=self.add_tensor)

    def take_apart(self, value: Any) -> None:
        """Adds a whole state to the builder. A tensor of several names is added once; the other names are aliases."""
        known: dict[str, str] = {}

        def add(fqn: str, view: StoredView) -> None:
            # As a text: hashes of texts cannot be made to collide, hashes of numbers can.
            place = repr((view.storage.key, view.dtype, view.item_offset, view.shape, view.strides))
            first = known.setdefault(place, fqn)
            if first == fqn:
                self.add_tensor(fqn, view)
            else:
                self.builder.add_alias(fqn, first)

        self.builder.take_apart(value, on_tensor=add)


def open_saved(
    files: Mapping[str, FileReader], *, builder: ManifestBuilder, find_global: FindGlobal
) -> list[SavedFile]:
    """Opens files in or below the folder of a checkpoint, by their names in it, and adds them to the builder's files.
    Raises CheckpointCorruptError or UnsafeCheckpointError.
    """
    opened = map_looks(partial(_open, find_global=find_global), files.values(), num_threads=REQUESTS_IN_FLIGHT)
    locate_storages(archive for archive, _ in opened)
    return [
        SavedFile(archive, builder.add_file(name, file.byte_length), file.path, value, name, builder)
        for (name, file), (archive, value) in zip(files.items(), opened, strict=True)
    ]


def _open(file: FileReader, *, find_global: FindGlobal) -> tuple[TorchArchive, Any]:
    if file.read(0, min(file.byte_length, len(LEGACY_MAGIC))) == LEGACY_MAGIC:
        advice = "load it with torch.load where it comes from, and save it with torch.save of torch 1.6 or later"
        what = "it was written by torch before 1.6, or with _use_new_zipfile_serialization=False"
        raise not_readable(file.path, what, advice)
    archive = TorchArchive(file, 0, file.byte_length)
    content = archive.pickle
    file.drop_cache()  # a checkpoint may be thousands of files, which are held together
    return archive, unpickle(content, file.path, find_global)


def translated(path: str, writer: str, function: Callable[..., _Found], *args: Any) -> _Found:
    """Returns the result of a function. Errors such as LookupError and TypeError, which files of another form cause,
    become CheckpointCorruptError (bad_manifest); a CheckpointError is raised as it is.
    """
    try:
        return function(*args)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise damaged(path, f"it is not what {writer} writes: {type(error).__name__}: {error}") from error
