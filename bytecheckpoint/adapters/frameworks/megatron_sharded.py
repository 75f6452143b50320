"""The objects of Megatron's `sharded_state_dict()`, told by their attributes and turned into regions of live memory.
Nothing of Megatron is imported.

    ShardedTensor         key, data, local_shape, global_shape, global_offset, prepend_axis_num, replica_id,
                          allow_shape_mismatch: a box of the tensor `key`, which has `prepend_axis_num` axes more than
                          `data`, of length 1 here. Offsets are in elements.
    ShardedTensorFactory  key, data, build_fn, merge_fn, replica_id: `build_fn` makes ShardedTensors of `data`, which
                          are views of it mostly (the halves of a SwiGLU), and `merge_fn` makes `data` of them.
    ShardedObject         key, data, global_shape, global_offset, replica_id: anything but a tensor.
    LocalNonpersistentObject   unwrap(): stays with its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamPart
from bytecheckpoint.adapters.plain.plain_tree import has_attributes
from bytecheckpoint.adapters.shards import LocalShard, dense_dtype, flat_bytes
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported
from bytecheckpoint.region import Region, lies_inside, whole


class ShardedPiece(NamedTuple):
    """A ShardedTensor, as it lies in live memory."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, with the axes that the piece itself lacks."""
    region: Region
    memory: torch.Tensor
    """Memory with the region's lengths, prepended axes and all."""
    source: torch.Tensor
    """The parameter or buffer that `memory` is a part of, or was made of."""
    padded_axis: int | None
    """The axis along which a checkpoint may have another length (a padded vocabulary)."""

    def shard(self, fqn: str) -> LocalShard:
        return LocalShard(fqn, dense_dtype(fqn, self.memory), self.shape, self.region, self.memory)

    @property
    def span(self) -> range | None:
        """Indices of its elements in the flattened source; None if they do not follow one another, or it is a copy."""
        if not (_is_view(self.memory, self.source) and self.memory.is_contiguous() and self.source.is_contiguous()):
            return None
        start = self.memory.storage_offset() - self.source.storage_offset()
        return range(start, start + self.memory.numel())

    def part(self, start: int, numel: int) -> FlatParamPart | None:
        """Returns the part of the piece, which may be empty, that lies in these elements of the flattened source; None
        if the piece has no `span`.
        """
        span = self.span
        if span is None:
            return None
        common = range(max(span.start, start), min(span.stop, start + numel))
        first, position = (common.start - span.start, common.start - start) if common else (0, 0)
        return FlatParamPart(self.shape, self.region, first, len(common), position, padded_axis=self.padded_axis)


class CopiedFactory(NamedTuple):
    """A factory whose pieces are copies of its data."""

    data: torch.Tensor
    merged: Callable[[], torch.Tensor]
    """Returns the data, made of what the pieces hold now."""


class ShardedObjects(NamedTuple):
    """The contents of a tree of sharded objects on this rank."""

    pieces: list[ShardedPiece]
    objects: list[tuple[str, Any]]
    """Sharded objects, each after its path in the tree."""
    copied: list[CopiedFactory]


def is_sharded_leaf(value: object) -> bool:
    """Returns True if a value is one of the objects that a sharded_state_dict holds."""
    is_local = type(value).__name__ == "LocalNonpersistentObject" and has_attributes(value, "unwrap")
    return is_local or _is_factory(value) or _is_tensor(value) or _is_object(value)


def _is_factory(value: object) -> bool:
    return has_attributes(value, "build_fn", "merge_fn")


def _is_tensor(value: object) -> bool:
    return has_attributes(value, "key", "local_shape", "global_offset", "replica_id")


def _is_object(value: object) -> bool:
    return has_attributes(value, "key", "data", "global_offset", "replica_id")


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the items of nested dicts and lists, each after its path: keys joined by dots."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, join_fqn(path, key))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from leaves_of(value, join_fqn(path, index))
    else:
        yield path, tree


def find_in(fqn: str, tree: Any) -> ShardedObjects:
    """Returns the sharded objects in what a module's `sharded_state_dict()` gave, or in a dict; skips other values.

    Raises CheckpointSaveError (unsupported_value) for an object that contradicts itself, flattened tensors, and a
    factory whose pieces are not all of its data.
    """
    found = ShardedObjects([], [], [])
    for path, leaf in leaves_of(tree):
        if _is_factory(leaf):
            _add_factory(fqn, leaf, found)
        elif _is_tensor(leaf):
            found.pieces.append(_piece(fqn, leaf, None))
        elif _is_object(leaf):
            found.objects.append((path, leaf))
    return found


def _add_factory(fqn: str, factory: Any, found: ShardedObjects) -> None:
    name = join_fqn(fqn, factory.key)
    data = factory.data
    if not isinstance(data, torch.Tensor):
        raise unsupported(name, "a ShardedTensorFactory without data", "make the sharded state dict with its data")
    _refuse_flattened(name, factory)
    built = factory.build_fn(factory.key, data, factory.replica_id, None)
    leaves = [leaf for _, leaf in leaves_of(built)]
    if not leaves or not all(_is_tensor(leaf) for leaf in leaves):
        raise unsupported(name, "a factory that builds other things than ShardedTensors", "save its data as a tensor")
    pieces = [_piece(fqn, leaf, data) for leaf in leaves]
    if all(_is_view(piece.memory, data) for piece in pieces):
        if not _cover(pieces, data):
            raise _not_inverse(name, "its pieces do not contain each element of its data exactly once")
    else:
        copied = CopiedFactory(data.detach(), lambda: factory.merge_fn(_data_of(built)))
        merged = copied.merged()
        if merged.shape != data.shape or not torch.equal(bits_of(merged.to(data.dtype)), bits_of(data)):
            raise _not_inverse(name, "its merge_fn does not give back what its build_fn took apart")
        found.copied.append(copied)
    found.pieces.extend(pieces)


def _data_of(built: Any) -> Any:
    """Returns what a build_fn returned, with the data of each ShardedTensor in its place."""
    if isinstance(built, Mapping):
        return {key: _data_of(value) for key, value in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_data_of, built))
    return built.data


def _cover(pieces: Sequence[ShardedPiece], data: torch.Tensor) -> bool:
    """Returns True if views of a tensor contain each of its elements exactly once."""
    if sum(piece.memory.numel() for piece in pieces) != data.numel():
        return False
    spans = [piece.span for piece in pieces]
    runs = sorted((span.start, span.stop) for span in spans if span)
    if None not in spans:
        ends = [stop for _, stop in runs]
        return [start for start, _ in runs] == [0, *ends[:-1]][: len(runs)]
    # Elements are compared by their positions in the storage: one byte stands for each position.
    tensors = [data, *(piece.memory for piece in pieces)]
    first = min(tensor.storage_offset() for tensor in tensors)
    reach = max(map(_last_element, tensors)) + 1
    seen = torch.zeros(reach - first, dtype=torch.uint8)
    for piece in pieces:
        memory = piece.memory
        seen.as_strided(memory.shape, memory.stride(), memory.storage_offset() - first).add_(1)
    places = seen.as_strided(data.shape, data.stride(), data.storage_offset() - first)
    return bool((places == 1).all())


def _last_element(tensor: torch.Tensor) -> int:
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((length - 1) * stride for length, stride in dims if length))


def _is_view(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    is_same = tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return is_same and tensor.dtype == source.dtype


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, for comparisons in which a NaN equals itself."""
    return flat_bytes(tensor.detach().contiguous())


def _piece(fqn: str, sharded: Any, source: torch.Tensor | None) -> ShardedPiece:
    name = join_fqn(fqn, sharded.key)
    data = sharded.data
    _refuse_flattened(name, sharded)
    if not isinstance(data, torch.Tensor):
        raise unsupported(name, "a ShardedTensor without data", "make the sharded state dict with its data")
    if tuple(data.shape) != tuple(sharded.local_shape):
        what = f"a ShardedTensor with data of shape {list(data.shape)} and local_shape {list(sharded.local_shape)}"
        raise unsupported(name, what, "give both the same shape")
    num_prepended = getattr(sharded, "prepend_axis_num", 0)
    # index() also makes Python's integers of numpy's, and refuses all else.
    shape, offsets = tuple(map(index, sharded.global_shape)), tuple(map(index, sharded.global_offset))
    lengths = (1,) * num_prepended + tuple(data.shape)
    region = Region(offsets, lengths)
    if not len(shape) == len(offsets) == len(lengths) or not lies_inside(region, whole(shape)):
        what = f"a ShardedTensor of shape {list(lengths)} at {list(offsets)}, which is not inside {list(shape)}"
        raise unsupported(name, what, "give it a global_offset, in elements, inside its global_shape")
    dense_dtype(name, data)
    memory = data.detach()[(None,) * num_prepended] if num_prepended else data.detach()
    padded_axis = num_prepended if getattr(sharded, "allow_shape_mismatch", False) and data.dim() else None
    source = data if source is None else source
    return ShardedPiece(sharded.key, shape, region, memory, source, padded_axis)


def _refuse_flattened(name: str, sharded: Any) -> None:
    if getattr(sharded, "flattened_range", None) is not None:
        what = f"a {type(sharded).__name__} with a flattened_range"
        raise unsupported(name, what, "pass the optimizer itself: its flat buffers are read as parts of parameters")


def _not_inverse(name: str, why: str) -> CheckpointSaveError:
    advice = "give merge_fn and build_fn that invert one another, or save the tensor without a factory"
    return unsupported(name, f"a ShardedTensorFactory that cannot be undone: {why}", advice)
