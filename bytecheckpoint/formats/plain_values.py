"""Encodes plain data of other formats as a manifest holds it. Records take the place of values of torch in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.msgpack import Ext

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.manifest import plain_wire as wire


class DtypeName(NamedTuple):
    """Stands for a torch.dtype in plain data, which is read without torch."""

    name: str

    def __repr__(self) -> str:
        """Returns the text that torch itself shows, because keys become text."""
        return f"torch.{self.name}"


class SizeValue(NamedTuple):
    """Stands for a torch.Size."""

    lengths: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Estimate of the size of this record, not of a tensor: the number of its lengths."""
        return len(self.lengths)


class _RecordLeaves:
    """Encodes DtypeName and SizeValue, the leaves that msgpack has no type for. Tensors are TensorRefs already."""

    tensor_types: frozenset[type] = frozenset()

    def encode_tensor(self, fqn: str, tensor: Any) -> Ext:
        raise NotImplementedError

    def encode_other(self, value: Any, fqn: str, _levels_left: int) -> Ext:
        if isinstance(value, DtypeName):
            return wire.ext(wire.DTYPE, value.name)
        if isinstance(value, SizeValue):
            return wire.ext(wire.SIZE, list(value.lengths))
        raise wire.unsupported(fqn, f"an object of type {type(value).__name__}", "save plain data only")


def encode_value(value: Any, *, path: str) -> bytes:
    """Returns a tree of plain data as bytes. Raises CheckpointCorruptError (bad_manifest) if it holds anything else."""
    try:
        return wire.encode_tree(value, "", _RecordLeaves())
    except CheckpointSaveError as error:
        raise damaged(path, f"of its plain data: {error.message}") from error
