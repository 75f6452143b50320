"""Folders of torch.distributed.checkpoint: a `.metadata` file, and `.distcp` files in which each tensor, or part of it,
is an archive of torch.save. Whatever sharded the state (FSDP2, tensor parallelism, Megatron), they look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats import strided_views
from bytecheckpoint.formats.file_reader import FileReader, checked_name, damaged, not_readable, too_much, visit_places
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks import megatron_dist
from bytecheckpoint.formats.frameworks.dcp_metadata import METADATA_NAME, DcpTensor, Item, Metadata, read_metadata
from bytecheckpoint.formats.frameworks.megatron_dist import unstacked, unstacked_shape
from bytecheckpoint.formats.frameworks.megatron_globals import find_megatron_value
from bytecheckpoint.formats.torch_save.file import ZIP_MAGIC, SavedFile, TorchArchive, chunks_of, moved, unpickle
from bytecheckpoint.formats.torch_save.unpickler import MAX_PICKLE_BYTES
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView, find_value
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.region import Region
from bytecheckpoint.storage.paths import join_name

_MAX_HEAD_BYTES = 4096
_HEADS_A_LENGTH = 8
"""Archives of one length that an archive is compared with: of tensors of equal length and other shapes."""
_CHECKSUM_BYTES = 4


def is_folder(source: SourceFolder) -> bool:
    return METADATA_NAME in source.files or megatron_dist.read_backend(source) is not None


def read_folder(source: SourceFolder) -> None:
    """Adds the tensors and the plain data of a checkpoint to the builder. Raises as `detect.read_manifest` does."""
    backend = megatron_dist.read_backend(source)
    megatron_dist.refuse_other_backends(backend, source.path, has_metadata=METADATA_NAME in source.listing)
    root = read_state(source, "")
    is_of_megatron = backend is not None or megatron_dist.has_common_state(source)
    source.builder.take_apart(megatron_dist.with_common_state(root, source) if is_of_megatron else root)


def read_state(source: SourceFolder, inside: str, *, below: str = "") -> dict[Any, Any]:
    """Returns the content of the folder `inside` of a checkpoint's folder, as it was nested, with a TensorRef for
    each of its tensors. Adds the data files and the tensors to the builder, with `below` before the tensors' names.
    """
    file = source.reader(join_name(inside, METADATA_NAME))
    if file.byte_length > MAX_PICKLE_BYTES:
        raise too_much(file.path, f"it has {file.byte_length} bytes, at most {MAX_PICKLE_BYTES} are read")
    metadata = read_metadata(file.read_all(), file.path)
    reader = _DcpFolder(source, inside, below)
    reader.open_files(metadata)
    reader.find_all(metadata)
    for fqn, tensor in metadata.tensors.items():
        reader.add_tensor(fqn, tensor, unstacked_shape(metadata.attributes, fqn, tensor.shape, file.path))
    return reader.read_objects(metadata)


class _Head(NamedTuple):
    """The bytes of an archive before the storage of the tensor in it."""

    num_bytes: int
    checksum_offset: int
    """Offset of the CRC-32 of the storage in these bytes."""
    content: bytes
    """The bytes without that checksum."""
    view: StoredView
    storage_bytes: int


def _without_checksum(head: bytes, checksum_offset: int) -> bytes:
    return head[:checksum_offset] + head[checksum_offset + _CHECKSUM_BYTES :]


class _Container(dict[Any, Any]):
    """A dict or list that torch has taken apart; a dict that lies in the files as one value is no _Container."""


class _DcpFolder:
    """The data files of a folder, and what was found in them."""

    def __init__(self, source: SourceFolder, inside: str, below: str) -> None:
        self._source = source
        self._inside = inside
        self._below = below
        self.builder = source.builder
        self._files: dict[str, tuple[int, FileReader]] = {}
        """Number in the manifest and reader of each file."""
        self._views: dict[bytes, Any] = {}
        """Decoded tensor by pickle: similar parts have equal pickles."""
        self._heads: dict[int, list[_Head]] = {}
        """Heads of archives, by the length of archives in bytes. The last one is of the latest archive."""
        self._places: dict[int, tuple[StoredView, int, int]] = {}
        """What `_place` returns, by the id of the item: equal hashes of ids cannot be made."""
        self._objects: dict[int, tuple[TorchArchive, Any]] = {}
        """Archive and value of each object, by the id of the item."""

    def open_files(self, metadata: Metadata) -> None:
        """Adds the data files to the builder. Raises CheckpointNotFoundError (missing_file), and CheckpointCorruptError
        (truncated) if one is too short.
        """
        metadata_path = join_name(self.builder.path, self._inside, METADATA_NAME)
        items = [item for tensor in metadata.tensors.values() for _, item in tensor.chunks]
        for item in sorted((*items, *metadata.objects.values()), key=lambda item: item[:3]):
            if item.file not in self._files:
                name = join_name(self._inside, checked_name(item.file, metadata_path))
                file = self._source.reader(name)
                self._files[item.file] = self.builder.add_file(name, file.byte_length), file
            _, file = self._files[item.file]
            if item.byte_offset + item.byte_length > file.byte_length:
                what = f"{METADATA_NAME} places data at byte {item.byte_offset}"
                file.raise_damaged(f"it has {file.byte_length} bytes, and {what}", kind="truncated")

    def find_all(self, metadata: Metadata) -> None:
        """Reads ahead what `add_tensor` and `read_objects` need of each archive, several at a time. Those two raise for
        damage; this does not.
        """
        tensors = [item for tensor in metadata.tensors.values() for _, item in tensor.chunks if item.tensor is None]
        one_of_each = {item.byte_length: item for item in tensors}  # the others may have the same head
        self._visit(one_of_each.values(), lambda file, item: self._place(item, "", file))
        self._visit(tensors, lambda file, item: self._place(item, "", file))
        self._visit(metadata.objects.values(), self._look_into_object)

    def _visit(self, items: Iterable[Item], visit: Callable[[FileReader, Item], object]) -> None:
        in_order = sorted(items, key=lambda item: item[:3])
        visit_places(((self._files[item.file][1], item.byte_offset, item) for item in in_order), visit)

    def add_tensor(self, fqn: str, tensor: DcpTensor, shape: tuple[int, ...] | None) -> None:
        """Adds a tensor. `shape` is the true one if Megatron has cut the tensor and stacked the pieces, else None."""
        dtype = tensor.dtype
        parts = (self._chunks(fqn, dtype, tensor.shape, region=region, item=item) for region, item in tensor.chunks)
        chunks = [chunk for part in parts for chunk in part]
        if shape is not None:
            num_rows = sum(prod(chunk.region.lengths[:-1]) for chunk in chunks)
            self._refuse_too_many(fqn, num_rows, tensor, is_stacked=True)
            chunks = [part for chunk in chunks for part in unstacked(chunk, tensor.shape, shape, itemsize(dtype))]
        self._refuse_too_many(fqn, len(chunks), tensor, is_stacked=shape is not None)
        stored_shape = tensor.shape if shape is None else shape
        self.builder.add_tensor(self._below + fqn, dtype, stored_shape, chunks, num_parts=len(tensor.chunks))

    def _refuse_too_many(self, fqn: str, num_chunks: int, tensor: DcpTensor, *, is_stacked: bool) -> None:
        """Raises CheckpointCorruptError (unsupported_version) for a tensor in too many chunks."""
        # As many chunks as there are stored parts are never too many.
        if num_chunks > max(strided_views.MAX_CHUNKS, len(tensor.chunks)):
            why = "Megatron has stored it in flat parts" if is_stacked else "its parts are strided"
            advice = "save it on ranks that cut it into fewer parts" if is_stacked else "save contiguous tensors"
            raise not_readable(self.builder.path, f"{fqn!r:.200} lies in {num_chunks} pieces, because {why}", advice)

    def _chunks(self, fqn: str, dtype: str, shape: tuple[int, ...], *, region: Region, item: Item) -> list[Chunk]:
        if len(region.offsets) != len(shape) or len(region.lengths) != len(shape):
            what = f"{fqn!r:.200} of shape {list(shape)} has a part at {list(region.offsets)}"
            raise damaged(self.builder.path, what)
        if 0 in region.lengths:
            return []
        number, file = self._files[item.file]
        view, start, num_bytes = self._place(item, fqn, file)
        if view.dtype != dtype or view.shape != region.lengths:
            what = f"{dtype}{list(region.lengths)} in {METADATA_NAME}, {view.dtype}{list(view.shape)} in the file"
            file.raise_damaged(f"a part of {fqn!r:.200} is {what}")
        inside = chunks_of(view, fqn, file=number, byte_offset=start, byte_length=num_bytes, path=file.path)
        return moved(inside, region.offsets)

    def _place(self, item: Item, fqn: str, file: FileReader) -> tuple[StoredView, int, int]:
        """Returns the tensor of an archive, where its storage begins in the file, and the storage's length in bytes.

        Most archives begin with the same bytes as an earlier one of their length, but for a checksum: then their
        storage is in the same place. Where the storage alone is in the file, the metadata has the rest.
        """
        found = self._places.get(id(item))
        if found is not None:
            return found
        if item.tensor is not None:
            view = self._view(item.tensor, fqn)
            if itemsize(view.dtype) * view.storage.num_items != item.byte_length:
                file.raise_damaged(
                    f"a part of {fqn!r:.200} has {item.byte_length} bytes, {METADATA_NAME} says other numbers"
                )
            return view, item.byte_offset, item.byte_length
        heads = self._heads.setdefault(item.byte_length, [])
        for known in reversed(heads.copy()):
            head = file.read(item.byte_offset, known.num_bytes)
            if _without_checksum(head, known.checksum_offset) == known.content:
                place = known.view, item.byte_offset + known.num_bytes, known.storage_bytes
                return self._places.setdefault(id(item), place)
        archive = self._archive(item, fqn, file)
        view = self._view(archive.pickle, fqn)
        start, storage_bytes = archive.storage(view.storage)
        head_bytes = start - item.byte_offset
        if head_bytes <= _MAX_HEAD_BYTES:
            at = archive.checksum_offset(view.storage)
            content = _without_checksum(file.read(item.byte_offset, head_bytes), at)
            heads.append(_Head(head_bytes, at, content, view, storage_bytes))
            del heads[:-_HEADS_A_LENGTH]
        return self._places.setdefault(id(item), (view, start, storage_bytes))

    def _archive(self, item: Item, fqn: str, file: FileReader) -> TorchArchive:
        if file.read(item.byte_offset, min(item.byte_length, len(ZIP_MAGIC))) != ZIP_MAGIC:
            what = f"{fqn!r:.200} should be at byte {item.byte_offset}, and no archive of torch.save begins there"
            file.raise_damaged(what)
        return TorchArchive(file, item.byte_offset, item.byte_offset + item.byte_length)

    def _view(self, content: bytes, fqn: str) -> StoredView:
        view = self._views.get(content)
        if view is None:
            view = self._views[content] = unpickle(content, self.builder.path, find_value)
        if not isinstance(view, StoredView):
            raise damaged(self.builder.path, f"{fqn!r:.200} is not a tensor in its file")
        return view

    def read_objects(self, metadata: Metadata) -> dict[Any, Any]:
        """Returns plain data, in the containers that it came from, with a TensorRef for each tensor. Adds the tensors
        in objects to the builder.
        """
        root: dict[Any, Any] = {}
        values = {fqn: TensorRef(self._below + fqn) for fqn in metadata.tensors}
        values |= {fqn: self._object(fqn, item) for fqn, item in metadata.objects.items()}
        for fqn, value in values.items():
            path = metadata.paths.get(fqn, (fqn,))
            self._put(root, path if ".".join(map(str, path)) == fqn else (fqn,), value)
        return {key: _with_lists(value) for key, value in root.items()}

    def _object(self, fqn: str, item: Item) -> Any:
        number, file = self._files[item.file]
        archive, value = self._open_object(item, fqn, file)
        saved = SavedFile(archive, number, file.path, value, join_name(self._inside, item.file), self.builder)
        return saved.plain(value, self._below + fqn)

    def _open_object(self, item: Item, fqn: str, file: FileReader) -> tuple[TorchArchive, Any]:
        if id(item) not in self._objects:
            archive = self._archive(item, fqn, file)
            self._objects[id(item)] = archive, unpickle(archive.pickle, file.path, find_megatron_value)
        return self._objects[id(item)]

    def _look_into_object(self, file: FileReader, item: Item) -> None:
        archive, _ = self._open_object(item, "", file)
        for _, _, (_, name) in archive.storage_places():
            archive.locate(name, file)

    def _put(self, root: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
        """Puts a value into nested dicts, at the keys of its path."""
        at = root
        name = ".".join(map(str, path))
        for key in path[:-1]:
            at = at.setdefault(key, _Container())
            if type(at) not in {dict, _Container}:
                raise damaged(self.builder.path, f"{name!r:.200} lies in something that is not a container")
        if path[-1] in at:
            raise damaged(self.builder.path, f"it has {name!r:.200} twice")
        at[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Returns a value with each _Container as a list if its keys are the numbers from 0 on, else as a dict: torch makes
    texts of the keys of dicts.
    """
    if type(value) is not _Container:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    is_list = bool(items) and all(type(key) is int for key in items) and set(items) == set(range(len(items)))
    return [items[index] for index in range(len(items))] if is_list else items
