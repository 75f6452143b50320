"""Reads a committed checkpoint without a model: its contents, and any part of any tensor."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from html import escape
from typing import Any, Self

import numpy as np
import torch

from bytecheckpoint.adapters.optimizers.stored_optimizer import is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.loading.plain_trees import PlainData, TensorStub
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import SelectionRequest, select
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.region import Region, whole
from bytecheckpoint.runtime.notebook_html import rows_html

_NUM_NEAR = 3
_NUM_COMPARED = 1000
"""Names that are compared with one that is not found: 100,000 would take 20 seconds."""
_IN_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}


class Checkpoint(Mapping[str, "StoredTensorView"]):
    """The tensors of a checkpoint by FQN, not yet read, tied ones under each of their names: what `bcp.open` returns.

    Only the manifest has been read; data is read when it is asked for. Large tensors of extra_state and RankLocal have
    the FQN that they are stored under, `<fqn>@<digest>`, and also their own where all ranks saved the same.
    """

    def __init__(self, source: Source) -> None:
        self._opened: Source | None = source
        self._path = source.path

    def __repr__(self) -> str:
        return f"<Checkpoint {self._path}: {'closed' if self._opened is None else f'{len(self)} tensors'}>"

    def _repr_html_(self) -> str:
        """Returns the first tensors as a table, for notebooks."""
        if self._opened is None:
            return f"<p>{escape(repr(self))}</p>"
        rows = ((name, str(view.dtype), str(list(view.shape))) for name, view in self.items())
        return rows_html(repr(self), ("tensor", "dtype", "shape"), rows, len(self))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the manifest. Reading from a closed checkpoint, or through its views, raises ValueError."""
        self._opened = None
        for name in ("info", "objects", "_other_names"):
            self.__dict__.pop(name, None)

    # Two opened checkpoints are not compared by their views, and one is a key as any other object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def _source(self) -> Source:
        if self._opened is None:
            raise ValueError(f"the checkpoint {self._path} was closed: open it again")
        return self._opened

    @property
    def manifest(self) -> Manifest:
        """Everything that the checkpoint says about itself."""
        return self._source.manifest

    @cached_property
    def info(self) -> CheckpointInfo:
        """Step, size, number of tensors, world size, time, metadata and save id."""
        return describe_checkpoint(self.manifest, path=self._path)

    @property
    def step(self) -> int | None:
        """The step that it was saved with."""
        return self.manifest.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that was given to `save`, with what a manager (`metrics`), an integration (`bcp_integration`) or
        the reader of a foreign format added.
        """
        return self.manifest.metadata

    @cached_property
    def objects(self) -> dict[Any, Any]:
        """Plain data as it was saved, nested. Tensors that lie in data files are left out of its dicts: look them up in
        the checkpoint by FQN. A list or tuple has a view in the place of each tensor. An optimizer has its
        `param_groups`. Values that differ between ranks are not here, but in `rank_values`.
        """
        request = SelectionRequest(to="torch", is_in_memory=True)
        selection = select(self.manifest, request, None)
        views = [self[tensor.pieces[0].fqn or ""] for tensor in selection.wanted]
        return plain_part(PlainData(self.manifest, selection, request).shared(), views) or {}

    def rank_values(self, fqn: str) -> dict[int, Any]:
        """Returns the values that ranks saved under this FQN, by rank: RankLocal values, and extra_state that differed.

        Tensors in them are read, whole, to the host; ranks that saved the same large tensor share it. Raises
        CheckpointNotFoundError (not_found), which is not a KeyError, for an FQN without such values, and the errors of
        a load.
        """
        by_rank = self.manifest.rank_objects.get(fqn)
        if by_rank is None:
            names = sorted(self.manifest.rank_objects) or "none"
            raise CheckpointNotFoundError(
                f"{self._path} holds no value of single ranks named {fqn!r}; it holds {names}", kind="not_found"
            )
        trees = {rank: decode_plain(data) for rank, data in sorted(by_rank.items())}
        refs = {rank: _refs(tree, fqn) for rank, tree in trees.items()}
        needed = {name for of_rank in refs.values() for name in of_rank.values()}
        self._refuse_missing(fqn, needed)
        tensor_by_stored_fqn = read_whole(self._source, [self[name].fqn for name in needed])
        tensor_by_name = {name: tensor_by_stored_fqn[self[name].fqn] for name in needed}
        tensors = {rank: {leaf: tensor_by_name[name] for leaf, name in refs[rank].items()} for rank in trees}
        return {rank: with_leaves(tree, fqn, tensors[rank]) for rank, tree in trees.items()}

    def _refuse_missing(self, fqn: str, names: Iterable[str]) -> None:
        """Raises CheckpointCorruptError (bad_manifest) if the value of an FQN needs tensors that are not listed."""
        missing = sorted(name for name in names if name not in self)
        if missing:
            raise CheckpointCorruptError(
                f"the manifest of {self._path} is damaged: {fqn!r:.200} is made of {len(missing)} tensors that it does "
                f"not list, the first {missing[0]!r:.200}; nothing was read: take another step, or another copy",
                kind="bad_manifest",
                path=self._path,
            )

    @cached_property
    def _other_names(self) -> dict[str, str]:
        """Stored FQN by name, of tied tensors and of tensors stored under a name made of their content."""
        trees = {fqn: decode_plain(data) for fqn, data in self.manifest.objects.items()}
        refs = {leaf: name for fqn, tree in trees.items() for leaf, name in _refs(tree, fqn).items()}
        return {**{leaf: name for leaf, name in refs.items() if leaf != name}, **self.manifest.aliases}

    def __iter__(self) -> Iterator[str]:
        yield from self.manifest.tensors
        yield from self._other_names

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self._other_names)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.manifest.tensors or fqn in self._other_names

    def get(self, fqn: str, default: Any = None) -> Any:
        """Returns the tensor of this FQN, not yet read, or `default` where there is none."""
        if fqn not in self:  # and not by a KeyError, whose near names take a while to find
            return default
        return self[fqn]

    def __getitem__(self, fqn: str) -> StoredTensorView:
        """Returns the tensor of this FQN, not yet read. Raises KeyError, with near names, where there is none."""
        stored_fqn = self._other_names.get(fqn, fqn)
        if stored_fqn not in self.manifest.tensors:
            raise KeyError(f"{fqn!r} is not a tensor of {self._path}{self._hint(fqn)}")
        return StoredTensorView(self, stored_fqn)

    def _hint(self, fqn: object) -> str:
        """Returns similar names, or what the name is instead of a tensor."""
        name = str(fqn)
        no_tensor = "; plain data is in `objects`, and what differs between ranks in `rank_values`"
        if self._is_plain(name):
            return no_tensor
        below = next((key for key in self if key.startswith(f"{name}.")), None)
        if below is not None:
            return f"; there are tensors below it, as {below!r}"
        near = [key for key in self if name in key][:_NUM_NEAR]
        near = near or get_close_matches(name, {**self._neighbors(name), **self._neighbors(name, step=-1)}, _NUM_NEAR)
        if near:
            return f"; near are {', '.join(map(repr, near))}"
        return no_tensor if any(name.startswith(f"{tree}.") for tree in self.manifest.objects) else ""

    def _neighbors(self, name: str, *, step: int = 1) -> dict[str, None]:
        """Returns the names that sort nearest to this one: most begin like it. With the step -1, names are read
        backwards, and most end like it.
        """
        names = sorted(each[::step] for each in self)
        first = max(bisect(names, name[::step]) - _NUM_COMPARED // 4, 0)
        return dict.fromkeys(each[::step] for each in names[first : first + _NUM_COMPARED // 2])

    def _is_plain(self, name: str) -> bool:
        """Returns True if this is the name of a value of single ranks, of a value of plain data, of something in
        either, or of a container of plain data.
        """
        if any(name == fqn or name.startswith(f"{fqn}.") for fqn in self.manifest.rank_objects):
            return True
        for fqn, data in self.manifest.objects.items():
            if name != fqn and not name.startswith(f"{fqn}."):
                continue
            tree = decode_plain(data)
            if is_optimizer_tree(tree):  # an empty state is no value: its tensors lie elsewhere
                tree = {"param_groups": None, **({"state": tree["state"]} if tree["state"] else {})}
            found = leaves(tree, fqn, may_repeat=True)
            plain = [leaf for leaf, value in found.items() if not isinstance(value, TensorRef)]
            if any(name == leaf or name.startswith(f"{leaf}.") or leaf.startswith(f"{name}.") for leaf in plain):
                return True
        return False

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Reads all tensors whose FQN starts with `prefix` into host memory, whole. The keys are the FQNs without
        `prefix`.

        `module.load_state_dict(bcp.open(path).state_dict("model."))` is what it is for. Raises the errors of a load.
        """
        stored = {fqn: self._other_names.get(fqn, fqn) for fqn in self if fqn.startswith(prefix)}
        tensors = read_whole(self._source, list(dict.fromkeys(stored.values())))
        return {fqn[len(prefix) :]: tensors[stored_fqn] for fqn, stored_fqn in stored.items()}


class StoredTensorView:
    """One tensor of a checkpoint. Indexing gives a `torch.Tensor` on the host, and reads just the bytes that it needs;
    `numpy()`, `np.array(view)` and `torch.as_tensor(view)` read all of it, each time.
    """

    def __init__(self, checkpoint: Checkpoint, fqn: str) -> None:
        self._checkpoint = checkpoint
        self.fqn = fqn
        """The name that it is stored under."""
        dtype, shape = checkpoint.manifest.describe(fqn)
        self.dtype = torch_dtype(dtype)
        self.shape = torch.Size(shape)
        """The global shape."""

    def __repr__(self) -> str:
        return f"<tensor {self.fqn} {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of its elements, in bytes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads the part that integers, slices and `...` select, as in a tensor, into new memory on the host.

        Raises IndexError for an index that is out of range or of another kind, and for a slice whose step is below 1;
        and the errors of a load.
        """
        region, inner_index = _covering_region(tuple(self.shape), index)
        return _read_regions(self._checkpoint._source, {self.fqn: region})[self.fqn][inner_index]

    def numpy(self) -> np.ndarray:
        """Returns all of it, read now, as an array with its own memory.

        Raises TypeError for a dtype that numpy lacks, such as bfloat16, and the errors of a load.
        """
        if self.dtype in _IN_NUMPY:
            return self[...].numpy()
        raise TypeError(
            f"numpy has no dtype for {self.dtype}, of which {self.fqn} is: take view[...].float().numpy() for the "
            "values, or view[...].view(dtype).numpy() with an integer dtype for the bits"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # noqa: FBT001 - numpy's signature
        """Implements `np.array(view)` and `np.asarray(view)` by `numpy`. Raises ValueError for `copy=False`."""
        if copy is False:
            raise ValueError(f"{self.fqn} lies in a file, and can only be had as a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **arguments: Any) -> Any:
        """Implements `torch.from_dlpack(view)` and the like; reads the whole tensor."""
        return self[...].__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return torch.empty(0, device="cpu").__dlpack_device__()


def read_whole(
    source: Source, fqns: Sequence[str], device: torch.device | str | int = "cpu"
) -> dict[str, torch.Tensor]:
    """Returns whole tensors by stored FQN, read to the device. Raises the errors of a load."""
    return _read_regions(source, dict.fromkeys(fqns), device)


def plain_part(value: Any, views: Sequence[Any]) -> Any:
    """Returns a nested state without the tensors in its dicts, and without dicts that held only tensors; None if
    nothing is left. Lists and tuples keep their length: the view of a tensor takes its place, None that of a dict which
    held only tensors. `views` are by `TensorStub.number`, those of tensors in dicts included; tied weights share one.
    """
    if isinstance(value, TensorStub):
        return views[value.number]
    if isinstance(value, dict) and value:
        items = {key: plain_part(item, views) for key, item in value.items() if not isinstance(item, TensorStub)}
        kept_items = {key: item for key, item in items.items() if item is not None or value[key] is None}
        return kept_items or None
    if type(value) in (list, tuple):
        return type(value)(plain_part(item, views) for item in value)
    return value


def _refs(tree: Any, fqn: str) -> dict[str, str]:
    """Maps the FQN of each leaf that is a tensor in data files to the FQN of that tensor."""
    found = leaves(tree, fqn, may_repeat=True)  # others' plain data may have the keys 1 and "1"
    return {leaf: value.fqn for leaf, value in found.items() if isinstance(value, TensorRef)}


def _read_regions(
    source: Source, wanted: Mapping[str, Region | None], device: torch.device | str | int = "cpu"
) -> dict[str, torch.Tensor]:
    """Reads a region of each tensor, by stored FQN; None is the whole tensor. Returns them by that FQN."""
    shards = []
    for fqn, region in wanted.items():
        dtype, shape = source.manifest.describe(fqn)
        part = whole(shape) if region is None else region
        memory = torch.empty(part.lengths, dtype=torch_dtype(dtype), device=device)
        shards.append(LocalShard(fqn, dtype, shape, part, memory))
    fqns = [shard.fqn for shard in shards]
    source.read(source.plan(shards, fqns), shards, fqns)
    return {shard.fqn: shard.tensor for shard in shards}


def _covering_region(shape: tuple[int, ...], index: Any) -> tuple[Region, tuple[Any, ...]]:
    """Returns a region that holds all elements of an index, and the index to apply to that region. The region of a
    slice reaches from its start to its stop, whatever its step.

    Raises IndexError for an index that is out of range or of another kind than integers, slices and "...", and for a
    slice whose step is below 1.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]  # arrays compare each element
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    for position in ellipses:
        items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for a tensor of {len(shape)} dimensions")
    items += [slice(None)] * (len(shape) - len(items))
    offsets, lengths, inner_index = [], [], []
    for item, length in zip(items, shape, strict=True):
        offset, count, inner_item = _covering_range(item, length)
        offsets.append(offset)
        lengths.append(count)
        inner_index.append(inner_item)
    return Region(tuple(offsets), tuple(lengths)), tuple(inner_index)


def _covering_range(item: Any, length: int) -> tuple[int, int, Any]:
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        if step < 1:
            raise IndexError("a slice of a stored tensor has a step of 1 or more")
        return start, max(stop - start, 0), slice(None, None, step)
    # One element of a mask or a list of positions has __index__ too, but torch would not take it for an integer.
    is_odd = bool(getattr(item, "shape", ())) or getattr(item, "dtype", None) in {torch.bool, np.dtype(bool)}
    if isinstance(item, bool) or is_odd or not hasattr(item, "__index__"):
        raise IndexError(f"a stored tensor is indexed with integers, slices and ..., not {type(item).__name__}")
    position = item.__index__()
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for a dimension of length {length}")
    return position % length, 1, 0
