"""Files of torch.save that a folder has several of, each opened once: its value, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.formats.file_reader import FileReader, damaged
from bytecheckpoint.formats.flat_ranges import FlatBuffer
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, plain_tree
from bytecheckpoint.formats.torch_save.file import LEGACY_MAGIC, TorchArchive, chunks_of, refuse_legacy, unpickle
from bytecheckpoint.formats.torch_save.unpickler import FindGlobal
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_Found = TypeVar("_Found")


class SavedFile(NamedTuple):
    """A file of torch.save."""

    archive: TorchArchive
    file: int
    """Its number."""
    path: str
    value: Any
    name: str
    """Below the folder of the checkpoint."""

    def buffer(self, view: Any, what: str) -> tuple[FlatBuffer, str]:
        """A flat tensor of it, and its dtype. Raises CheckpointCorruptError (bad_manifest) where it is none."""
        if not isinstance(view, StoredView) or len(view.shape) != 1 or (view.shape[0] > 1 and view.strides[0] != 1):
            raise damaged(self.path, f"{what} is no flat tensor")
        start, num_bytes = self.archive.storage(view.storage)
        item_bytes = itemsize(view.dtype)
        if (view.item_offset + view.shape[0]) * item_bytes > num_bytes:
            raise damaged(self.path, f"{what} reaches out of its storage")
        return FlatBuffer(self.file, start + view.item_offset * item_bytes, view.shape[0]), view.dtype

    def chunks(self, view: StoredView, fqn: str) -> list[Chunk]:
        """Of a whole tensor in it."""
        start, num_bytes = self.archive.storage(view.storage)
        return chunks_of(view, fqn, file=self.file, byte_offset=start, byte_length=num_bytes, path=self.path)

    def plain(self, builder: ManifestBuilder, value: Any, fqn: str) -> Any:
        """Plain data of it, with the name of each tensor in its place; these are added to the parts."""

        def add(name: str, view: StoredView) -> None:
            builder.add_tensor(name, view.dtype, view.shape, self.chunks(view, name))

        return plain_tree(value, fqn, path=self.path, on_tensor=add)


def open_saved(
    store: Store, folder: str, name: str, num_bytes: int, *, builder: ManifestBuilder, find_global: FindGlobal
) -> SavedFile:
    """A file at or below the folder of a checkpoint. Raises CheckpointCorruptError or UnsafeCheckpointError."""
    file = FileReader(store, join_name(folder, name), num_bytes)
    if file.read(0, min(num_bytes, len(LEGACY_MAGIC))) == LEGACY_MAGIC:
        refuse_legacy(file.path)
    archive = TorchArchive(file, 0, num_bytes)
    value = unpickle(archive.pickle, file.path, find_global)
    return SavedFile(archive, builder.add_file(name, num_bytes), file.path, value, name)


def missing_file(path: str, what: str) -> CheckpointNotFoundError:
    """The error for a folder that lacks files of some ranks."""
    return CheckpointNotFoundError(
        f"{path} {what}; nothing was loaded: restore the files of all ranks, or take another checkpoint",
        kind="missing_file",
        path=path,
    )


def translated(path: str, writer: str, function: Callable[..., _Found], *args: Any) -> _Found:
    """What a function gives, whose stumbling over values of another kind becomes an error about the file."""
    try:
        return function(*args)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise damaged(path, f"it is not what {writer} writes: {type(error).__name__}: {error}") from error
