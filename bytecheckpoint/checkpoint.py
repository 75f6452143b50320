"""A committed checkpoint read without a model: what is in it, and any part of any tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from bytecheckpoint.adapters.plain_data import TensorRef, decode_plain, leaves, with_leaves
from bytecheckpoint.adapters.tensors import LocalShard, dtype_name, torch_dtype
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.reading import Source
from bytecheckpoint.region import Region, whole


class Checkpoint:
    """What `bcp.open` gives. Only the manifest has been read; data is read when it is asked for."""

    def __init__(self, source: Source, path: str) -> None:
        self._source = source
        self._path = path

    def __repr__(self) -> str:
        return f"<Checkpoint {self._path}: {len(self)} tensors>"

    @property
    def manifest(self) -> Manifest:
        """Everything that the checkpoint says about itself."""
        return self._source.manifest

    @cached_property
    def info(self) -> CheckpointInfo:
        """Step, size, number of tensors, world size, when, metadata, save id."""
        return describe_checkpoint(self.manifest, path=self._path, seconds={})

    @cached_property
    def objects(self) -> dict[str, Any]:
        """Plain data by FQN, as it was saved; `rank_values` has what differs between ranks."""
        return {
            fqn: value
            for tree_fqn, data in self.manifest.objects.items()
            for fqn, value in leaves(decode_plain(data), tree_fqn).items()
            if not isinstance(value, TensorRef)
        }

    def rank_values(self, fqn: str) -> dict[int, Any]:
        """What each rank saved under this FQN, by rank: RankLocal values, and extra_state that differed.

        Tensors in them are read, whole, to the host; ranks that saved the same large tensor share it. Raises
        CheckpointNotFoundError (not_found), which is no KeyError, for an FQN without such values, and what a load
        raises.
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
        shards = {name: self[name]._shard(None) for name in needed}
        _read(self._source, list(shards.values()))
        tensors = {rank: {leaf: shards[name].tensor for leaf, name in refs[rank].items()} for rank in trees}
        return {rank: with_leaves(tree, fqn, tensors[rank]) for rank, tree in trees.items()}

    def _refuse_missing(self, fqn: str, names: Iterable[str]) -> None:
        """Raises CheckpointCorruptError (bad_manifest) where the value of an FQN needs tensors that are not there."""
        missing = sorted(name for name in names if name not in self)
        if missing:
            raise CheckpointCorruptError(
                f"the manifest of {self._path} is damaged: {fqn!r:.200} is made of {len(missing)} tensors that it does "
                f"not list, the first {missing[0]!r:.200}; nothing was read: take another step, or another copy",
                kind="bad_manifest",
                path=self._path,
            )

    def keys(self) -> list[str]:
        """The FQNs of all tensors, tied ones under each of their names.

        Large tensors of extra_state and RankLocal have the FQN that they are stored under, `<fqn>@<digest>`, and also
        their own where all ranks saved the same.
        """
        return [*self.manifest.tensors, *self._other_names]

    @cached_property
    def _other_names(self) -> dict[str, str]:
        """Of tied tensors, and of tensors that are stored under a name made of their content."""
        trees = {fqn: decode_plain(data) for fqn, data in self.manifest.objects.items()}
        refs = {leaf: name for fqn, tree in trees.items() for leaf, name in _refs(tree, fqn).items()}
        return {**{leaf: name for leaf, name in refs.items() if leaf != name}, **self.manifest.aliases}

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self._other_names)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.manifest.tensors or fqn in self._other_names

    def __getitem__(self, fqn: str) -> StoredTensorView:
        """The tensor of this FQN, not yet read. Raises KeyError where there is none."""
        stored_fqn = self._other_names.get(fqn, fqn)
        if stored_fqn not in self.manifest.tensors:
            raise KeyError(f"{fqn!r} is no tensor of {self._path}")
        return StoredTensorView(self._source, stored_fqn)

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """All tensors whose FQN starts with `prefix`, whole, on the host, under their FQN without it.

        `module.load_state_dict(bcp.open(path).state_dict("model."))` is what it is for. Raises what a load raises.
        """
        names = [fqn for fqn in self.keys() if fqn.startswith(prefix)]
        stored = {fqn: self._other_names.get(fqn, fqn) for fqn in names}
        shards = {fqn: self[fqn]._shard(None) for fqn in dict.fromkeys(stored.values())}
        _read(self._source, list(shards.values()))
        return {fqn[len(prefix) :]: shards[stored[fqn]].tensor for fqn in names}


class StoredTensorView:
    """One tensor of a checkpoint. Indexing reads just the bytes that it needs."""

    def __init__(self, source: Source, fqn: str) -> None:
        self._source = source
        self._fqn = fqn
        record = source.manifest.tensors[fqn]
        self.dtype = torch_dtype(record.dtype)
        self.shape = torch.Size(record.shape)
        """The global shape."""

    def __repr__(self) -> str:
        return f"<tensor {self._fqn} {self.dtype} {list(self.shape)}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Like indexing a tensor with integers, slices and `...`; the result is on the host, with its own memory.

        Raises IndexError for an index that the shape does not have, and what a load raises.
        """
        region, rest = _covering_region(tuple(self.shape), index)
        shard = self._shard(region)
        _read(self._source, [shard])
        return shard.tensor[rest]

    def _shard(self, region: Region | None) -> LocalShard:
        shape = tuple(self.shape)
        region = whole(shape) if region is None else region
        tensor = torch.empty(region.lengths, dtype=self.dtype, device="cpu")
        return LocalShard(self._fqn, dtype_name(self.dtype), shape, region, tensor)


def _refs(tree: Any, fqn: str) -> dict[str, str]:
    """The leaves of a tree that are tensors in data files, and the FQNs of those tensors."""
    return {leaf: value.fqn for leaf, value in leaves(tree, fqn).items() if isinstance(value, TensorRef)}


def _read(source: Source, shards: list[LocalShard]) -> None:
    fqns = [shard.fqn for shard in shards]
    source.read(source.plan(shards, fqns), shards, fqns)


def _covering_region(shape: tuple[int, ...], index: Any) -> tuple[Region, tuple[Any, ...]]:
    """The smallest region that an index touches, and the index that picks from it what was asked for."""
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for a tensor of {len(shape)} dimensions")
    items += [slice(None)] * (len(shape) - len(items))
    offsets, lengths, rest = [], [], []
    for item, length in zip(items, shape, strict=True):
        offset, count, left = _covering_range(item, length)
        offsets.append(offset)
        lengths.append(count)
        rest.append(left)
    return Region(tuple(offsets), tuple(lengths)), tuple(rest)


def _covering_range(item: Any, length: int) -> tuple[int, int, Any]:
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        if step < 1:
            raise IndexError("a slice of a stored tensor has a step of 1 or more")
        return start, max(stop - start, 0), slice(None, None, step)
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise IndexError(f"a stored tensor is indexed with integers, slices and ..., not {type(item).__name__}")
    position = item.__index__()
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for a dimension of length {length}")
    return position % length, 1, 0
