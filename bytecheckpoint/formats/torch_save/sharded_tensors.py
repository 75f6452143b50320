"""torch's ShardedTensor and DTensor in a rank's file of torch.save, read as the regions that the rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from bytecheckpoint.formats.file_reader import too_much
from bytecheckpoint.formats.torch_save.unpickler import PickleError
from bytecheckpoint.formats.torch_save.unpickler_globals import (
    Call,
    Instance,
    StoredView,
    find_value,
    full_names,
    lengths_of,
    refused,
    with_values,
)
from bytecheckpoint.manifest.plain_wire import MAX_DIMS
from bytecheckpoint.region import Region, whole

_TORCH = "torch.distributed."
_PLACEMENTS = "Shard _StridedShard _StridedShardOffsetMode Replicate Partial _Partial _MaskPartial"
_SPECS = "DTensorSpec TensorMeta ShardOrderEntry"
_CLASSES = frozenset(
    full_names(
        {
            _TORCH + "_shard.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
            _TORCH + "_shard.sharded_tensor.shard": "Shard",
            _TORCH + "_shard.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
            _TORCH + "_shard.metadata": "ShardMetadata",
            _TORCH + "_shard.sharding_spec.api": "EnumerableShardingSpec",
            _TORCH + "_shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
            _TORCH + "remote_device": "_remote_device",
            **dict.fromkeys(
                (f"{_TORCH}{name}" for name in ("tensor", "_tensor", "_tensor.api", "tensor._api")), "DTensor"
            ),
            _TORCH + "tensor.placement_types": _PLACEMENTS,
            _TORCH + "_tensor.placement_types": f"{_PLACEMENTS} {_SPECS}",
            _TORCH + "tensor._ops._embedding_ops": "_MaskPartial",
            _TORCH + "_tensor.ops.embedding_ops": "_MaskPartial",
            _TORCH + "tensor._dtensor_spec": _SPECS,
            _TORCH + "_tensor._dtensor_spec": _SPECS,
            _TORCH + "device_mesh": "DeviceMesh",
            _TORCH + "_tensor.device_mesh": "DeviceMesh",
            _TORCH + "_mesh_layout": "_MeshLayout _FlatLayout",
            _TORCH + "_pycute.layout": "Layout",
        }
    )
)
"""All classes that these tensors name."""
_ENUMERATIONS = ("MEM_FORMAT_ENCODING", "_StridedShardOffsetMode")
_SHARDED_TENSOR, _DTENSOR = "ShardedTensor", "DTensor"
_SHARD, _STRIDED, _WHOLE = "Shard", "_StridedShard", "Replicate"
_MAX_RANKS = 1 << 17
MAX_PARTS = 1 << 23


class ShardedTensor(NamedTuple):
    """A tensor of which a rank has parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Region, StoredView], ...]
    all_regions: Callable[[], Iterable[Region]]
    """Returns the regions of all ranks, each once and none empty. They may be as many as ranks."""


class _Axis(NamedTuple):
    placement: Any
    size: int
    """Length in ranks."""


class _TorchClass:
    """Stands for one of torch's classes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, *args: Any) -> Instance:
        return Instance(self.name, *args)


def _attribute(owner: Any, name: Any) -> _TorchClass:
    """Stands for getattr: returns the stand-in for a class nested in one of torch's, or for a member of its
    enumerations. Raises PickleError or UnsafeCheckpointError for all else.
    """
    if not isinstance(owner, _TorchClass) or type(name) is not str:
        raise PickleError("it asks for an attribute")
    full_name = f"{owner.name}.{name}"
    if full_name not in _CLASSES and not owner.name.endswith(_ENUMERATIONS):
        raise refused(full_name)
    return _TorchClass(full_name)


def _rebuild(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Returns the stand-in for a tensor subclass, made from the parts that its state names; the plain tensor for a
    torch.Tensor, which is rebuilt in this way if it has attributes. Raises PickleError for other classes.
    """
    if not isinstance(kind, _TorchClass):
        return find_value("torch._tensor", "_rebuild_from_type_v2").make(function, kind, args, state)
    made = kind.make(*(args if type(args) is tuple else ()))
    made.take_state(state)
    return made


find_sharded_value = with_values(
    {
        **{name: _TorchClass(name) for name in _CLASSES},
        **dict.fromkeys(("builtins.getattr", "__builtin__.getattr"), Call(_attribute)),
        "torch._tensor._rebuild_from_type_v2": Call(_rebuild),
        "torch._utils._rebuild_wrapper_subclass": Call(lambda *_: None),
    }
)
"""Returns the stand-in for a global. Raises UnsafeCheckpointError (pickle_refused) for every name that is not known."""


def is_sharded(value: Any) -> bool:
    return isinstance(value, Instance) and _name(value) in {_SHARDED_TENSOR, _DTENSOR}


class ShardedReader:
    """Reads the sharded tensors of one checkpoint, each object once: a small pickle can name the same one a million
    times.

    The objects that are read have to live as long as this reader: it knows them by id.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_parts = 0
        self._known: dict[int, ShardedTensor] = {}
        self._regions: dict[int, frozenset[Region]] = {}

    def read(self, value: Instance) -> ShardedTensor:
        """Returns the tensor. Raises UnsafeCheckpointError (limits_exceeded) if all calls of this reader together
        return too many parts, and for a malformed value errors that `translated` replaces.
        """
        found = self._known.get(id(value))
        if found is None:
            is_dtensor = _name(value) != _SHARDED_TENSOR
            found = self._known[id(value)] = _read_dtensor(value) if is_dtensor else self._read_sharded_tensor(value)
        self._num_parts += 1 + len(found.parts)
        if self._num_parts > MAX_PARTS:
            raise too_much(self._path, f"its sharded tensors have more than {MAX_PARTS} parts, of all ranks")
        return found

    def _read_sharded_tensor(self, value: Instance) -> ShardedTensor:
        local_shards, metadata, *_ = value.state
        shape = lengths_of(metadata.fields["size"])
        dtype = metadata.fields["tensor_properties"].state[0].name
        parts = []
        for shard in local_shards:
            region, view = _region(shard.fields["metadata"]), shard.fields["tensor"]
            parts.append((region, _checked(view, region)))
        shards = metadata.fields["shards_metadata"]
        return ShardedTensor(dtype, shape, tuple(parts), lambda: self._regions_of(shards))

    def _regions_of(self, shards: Any) -> frozenset[Region]:
        found = self._regions.get(id(shards))
        if found is None:
            regions = map(_region, shards)
            found = self._regions[id(shards)] = frozenset(region for region in regions if region.numel)
        return found


def refuse_others(value: Any) -> None:
    """Raises UnsafeCheckpointError (pickle_refused) for a class of torch.distributed, and for an object of one that is
    not a sharded tensor.
    """
    if isinstance(value, _TorchClass):
        raise refused(value.name)
    if isinstance(value, Instance) and not is_sharded(value) and value.kind.startswith(_TORCH):
        raise refused(value.kind)


def _name(value: Any) -> str:
    return value.kind.rpartition(".")[2] if isinstance(value, Instance) else ""


def _region(shard: Instance) -> Region:
    return Region(lengths_of(shard.fields["shard_offsets"]), lengths_of(shard.fields["shard_sizes"]))


def _checked(view: Any, region: Region) -> StoredView:
    if not isinstance(view, StoredView) or view.shape != region.lengths:
        found = list(view.shape) if isinstance(view, StoredView) else type(view).__name__
        raise PickleError(f"a rank's part of a tensor is {found}, and should have the shape {list(region.lengths)}")
    return view


def _read_dtensor(value: Instance) -> ShardedTensor:
    spec = value.fields["_spec"].fields
    view, mesh, placements = value.fields["_local_tensor"], spec["mesh"].fields, spec["placements"]
    meta = spec["tensor_meta"]
    shape = lengths_of(meta.args[0] if meta.args else meta.fields["shape"])
    sizes = _mesh_sizes(mesh)
    if not 0 < prod(sizes) <= _MAX_RANKS or len(sizes) != len(placements) or len(sizes) > MAX_DIMS:
        raise PickleError(f"a tensor is placed along {len(placements)} axes of a mesh of {list(sizes)!r:.200} ranks")

    axes = list(map(_Axis, placements, sizes))
    order = sorted(range(len(axes)), key=lambda axis: _name(axes[axis].placement) == _STRIDED)
    """Strided placements cut the part that other placements leave."""
    if not isinstance(view, StoredView):
        raise PickleError("a rank's part of a tensor is not a tensor")
    coordinate = mesh["_coordinate_on_dim"]
    parts = []
    if coordinate is not None:  # else this rank is not in the mesh
        at = lengths_of(coordinate)
        if len(at) != len(axes):
            raise PickleError(f"a rank is at {at} of a mesh of {len(axes)} axes")
        region = whole(shape)
        for axis in order:
            region = _cut(region, axes[axis], at[axis])
        parts = [(region, _checked(view, region))] if region.numel else []
    ordered = [axes[axis] for axis in order]
    return ShardedTensor(view.dtype, shape, tuple(parts), lambda: _everywhere(whole(shape), ordered))


def _mesh_sizes(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the number of ranks along each axis of a mesh, which releases of torch store in different places."""
    ranks = mesh.get("mesh")
    if isinstance(ranks, StoredView):
        return ranks.shape
    layout = mesh["_layout"]
    axes = layout.fields.get("axes")
    sizes = [axis.fields["shape"] for axis in axes] if axes is not None else layout.fields["shape"]
    return tuple(prod(_flat(size)) for size in (sizes if isinstance(sizes, list | tuple) else [sizes]))


def _flat(size: Any) -> Iterator[int]:
    """Yields the numbers of a layout, which may be nested one level deep."""
    for each in size if isinstance(size, list | tuple) else [size]:
        yield from lengths_of(each if isinstance(each, list | tuple) else [each])


def _everywhere(region: Region, axes: Sequence[_Axis]) -> Iterator[Region]:
    """Yields the parts of a region that ranks have, each once, and none without elements: along an axis that does not
    cut, all ranks have the same part.
    """
    if not region.numel:
        return
    if not axes:
        yield region
        return
    for index in range(axes[0].size if _name(axes[0].placement) in {_SHARD, _STRIDED} else 1):
        part = _cut(region, axes[0], index)
        if not part.numel:
            return  # the parts that follow have none either
        yield from _everywhere(part, axes[1:])


def _cut(region: Region, axis: _Axis, index: int) -> Region:
    """Returns the part of a region that the rank with this index along an axis has."""
    name = _name(axis.placement)
    if name == _WHOLE:
        return region
    if name not in {_SHARD, _STRIDED}:
        raise PickleError(f"a tensor is placed as {name or axis.placement!r:.80}, so that no rank has a part")
    offsets, lengths = list(region.offsets), list(region.lengths)
    dim = axis.placement.fields["dim"]
    if type(dim) is not int or not 0 <= dim < len(lengths):
        raise PickleError(f"a tensor of {len(lengths)} dimensions is cut along dimension {dim!r:.20}")
    part = -(-lengths[dim] // axis.size)
    start = min(index * part, lengths[dim])
    offsets[dim] += start
    lengths[dim] = min(part, lengths[dim] - start)
    return Region(tuple(offsets), tuple(lengths))
