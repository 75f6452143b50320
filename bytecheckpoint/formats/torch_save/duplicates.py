"""Compares values in two files of torch.save that may be copies of each other: tensors by the checksums that torch has
written, or by their bytes if there are none. It knows no format.
"""

from __future__ import annotations

from math import prod
from typing import Any

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats import strided_views
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, holds_tensor
from bytecheckpoint.formats.plain_values import encode_value
from bytecheckpoint.formats.torch_save.file import SavedFile, TorchArchive
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView
from bytecheckpoint.manifest import Chunk

_MAX_TENSOR_BYTES = 1 << 24
_MAX_ALL_BYTES = 1 << 30
_MAX_PIECES = 1 << 10
_HEAD_BYTES = 1 << 12

StoredCopy = tuple[SavedFile, StoredView]


class Comparer:
    """Compares values in the files of one checkpoint, and limits the bytes that are read for that."""

    def __init__(self) -> None:
        self._bytes_left = _MAX_ALL_BYTES

    def same_value(self, one: tuple[SavedFile, Any], other: tuple[SavedFile, Any], fqn: str) -> bool | None:
        """Compares two tensors as `same` does. Returns True if two other values are equal, and None if both hold
        tensors; False for a tensor and another value.
        """
        are_tensors = [isinstance(value, StoredView) for _, value in (one, other)]
        if all(are_tensors):
            return self.same(one, other, fqn)
        if not any(are_tensors) and holds_tensor(one[1]) and holds_tensor(other[1]):
            return None
        return not any(are_tensors) and _encoded(*one, fqn) == _encoded(*other, fqn)

    def same(self, one: StoredCopy, other: StoredCopy, fqn: str) -> bool | None:
        """Returns True if two tensors have the same dtype, shape and elements, else False; None if comparing would read
        too many bytes or pieces.

        Raises CheckpointCorruptError (bad_manifest, truncated) for a tensor that is not in its file.
        """
        here, there = one[1], other[1]
        if (here.dtype, here.shape) != (there.dtype, there.shape):
            return False
        if 0 in here.shape:
            return True
        by_checksums = _by_checksums(one, other)
        return self._by_bytes(one, other, fqn) if by_checksums is None else by_checksums

    def _by_bytes(self, one: StoredCopy, other: StoredCopy, fqn: str) -> bool | None:
        if max(strided_views.num_chunks(view.shape, view.strides) for _, view in (one, other)) > _MAX_PIECES:
            return None
        copies = [(saved.archive, saved.chunks(view, fqn)) for saved, view in (one, other)]
        # Reading the first bytes costs little, and shows that weights differ, however large they are.
        head_bytes = min(_HEAD_BYTES, *(chunks[0].byte_length for _, chunks in copies))
        if len({archive.read(chunks[0].byte_offset, head_bytes) for archive, chunks in copies}) > 1:
            return False
        num_bytes = _num_bytes(one[1])
        if num_bytes > min(_MAX_TENSOR_BYTES, self._bytes_left):
            return None
        self._bytes_left -= num_bytes
        return len({_content(*copy) for copy in copies}) == 1


def _content(archive: TorchArchive, chunks: list[Chunk]) -> bytes:
    return b"".join(archive.read(chunk.byte_offset, chunk.byte_length) for chunk in chunks)


def _by_checksums(one: StoredCopy, other: StoredCopy) -> bool | None:
    """Compares checksums; None if these do not tell. torch writes 0 if it should write no checksums, or no data."""
    (first, here), (second, there) = one, other
    checksums = first.archive.checksum(here.storage), second.archive.checksum(there.storage)
    layouts = {(view.storage.num_items, view.item_offset, view.strides) for view in (here, there)}
    if not all(checksums) or len(layouts) > 1:
        return None
    if checksums[0] == checksums[1]:
        return True
    # What differs may lie outside of the view: an expanded one has the bytes of a storage, and not all of its elements.
    is_all = _is_dense(here) and _num_bytes(here) == first.archive.storage(here.storage)[1]
    return False if is_all else None


def _is_dense(view: StoredView) -> bool:
    """Returns True if the elements of a view follow one another, in any order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(view.strides, view.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _num_bytes(view: StoredView) -> int:
    return itemsize(view.dtype) * prod(view.shape)


def _encoded(saved: SavedFile, value: Any, fqn: str) -> bytes:
    apart = saved._replace(builder=ManifestBuilder(saved.path))
    return encode_value(apart.plain(value, fqn), path=saved.path)
