"""Files of torch.save, one of each rank, with torch's sharded tensors. Together they are the checkpoint."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bytecheckpoint.formats.file_reader import conflicting, damaged, missing_file, not_readable
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, leaves_of, two_of
from bytecheckpoint.formats.torch_save.duplicates import Comparer
from bytecheckpoint.formats.torch_save.file import SavedFile, moved, translated
from bytecheckpoint.formats.torch_save.sharded_tensors import (
    ShardedReader,
    ShardedTensor,
    find_sharded_value,
    is_sharded,
    refuse_others,
)
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.region import Region

_NAME = re.compile(r"\A(.*?)rank[_-]?(\d{1,6})(|[^\d/].*)\.(?:pt|pth|bin|ckpt)\Z")
_WORLD_SIZE = re.compile(r"world_size_(\d{1,6})")
_OTHER_NAMES = {"optim": "optimizer"}
_WRITER = "torch.save"


class _Group(NamedTuple):
    """The files of all ranks with names of one form."""

    name: str
    """Name of their content, if there are several groups."""
    files: list[str]
    """Files in the order of ranks."""


def is_folder(source: SourceFolder) -> bool:
    """Returns True if any file is named after a rank: then the folder may be a checkpoint of one file per rank."""
    return any(map(_NAME.match, source.files))


def read_folder(source: SourceFolder) -> None:
    """Adds the files of all ranks to the builder. Raises as `detect.read_manifest` does."""
    builder = source.builder
    root: dict[Any, Any] = {}
    is_any_sharded = False
    groups = _groups(source.files, source.path)
    for group in groups:
        opened = source.open_all(group.files, find_sharded_value)
        below = group.name if len(groups) > 1 else ""
        state, is_group_sharded = translated(opened[0].path, _WRITER, _read_group, opened, below, builder)
        is_any_sharded |= is_group_sharded
        if below in root:
            raise two_of(source.path, below)
        root |= {below: state} if below else state
    if not is_any_sharded:
        what = "none of the files of its ranks says which part of a tensor it has"
        raise not_readable(source.path, what, "give the path of one of them, or save with torch.distributed.checkpoint")
    builder.take_apart(root)


def _groups(names: set[str], path: str) -> list[_Group]:
    """Groups files whose names differ in the rank alone. Refuses a group that lacks a rank, or has one twice."""
    by_kind: dict[tuple[str, str], dict[int, str]] = {}
    for name in sorted(names):
        match = _NAME.match(name)
        if match:
            files = by_kind.setdefault((match[1], match[3]), {})
            other = files.setdefault(int(match[2]), name)
            if other != name:
                what = " and ".join(f"{each!r:.200}" for each in sorted((other, name)))
                advice = "remove the one that is older, with those of its save"
                raise conflicting(path, f"has {what}, which are of one rank", advice)
    groups = []
    for (head, tail), files in sorted(by_kind.items()):
        said = _WORLD_SIZE.search(head + tail)
        num_ranks = max(int(said[1]) if said else 0, 1 + max(files))
        missing = next((rank for rank in range(num_ranks) if rank not in files), None)
        if missing is not None:
            raise missing_file(path, f"has no file of rank {missing} like {files[max(files)]!r:.200}")
        name = _WORLD_SIZE.sub("", head + tail).strip("_-.").replace("__", "_") or "state"
        groups.append(_Group(_OTHER_NAMES.get(name, name), [files[rank] for rank in sorted(files)]))
    return groups


def _read_group(opened: list[SavedFile], below: str, builder: ManifestBuilder) -> tuple[dict[Any, Any], bool]:
    """Adds the tensors of the files to the builder. Returns the content of the first file, and True, if any tensor is
    sharded: values that other files do not share are in the builder then. Else returns the content of each file, as
    `rank_<number>`, and False.
    """
    reader = ShardedReader(builder.path)
    leaves = [_leaves(saved, below, reader) for saved in opened]
    sharded = [
        *dict.fromkeys(fqn for found in leaves for fqn, leaf in found.items() if isinstance(leaf, ShardedTensor))
    ]
    if not sharded:
        by_rank = {f"rank_{rank}": saved for rank, saved in enumerate(opened)}
        return {name: saved.plain(saved.value, join_fqn(below, name)) for name, saved in by_rank.items()}, False
    for saved, found in zip(opened, leaves, strict=True):
        if found.keys() != leaves[0].keys():
            name = min(found.keys() ^ leaves[0].keys())
            what = f"{name!r:.200} is in the file of one rank, and not in that of another"
            raise not_readable(saved.path, what, "save it with torch.distributed.checkpoint")
    comparer = Comparer()
    for fqn in sharded:
        _add_sharded(fqn, leaves, opened, builder, comparer=comparer)
    first, *others = zip(opened, leaves, strict=True)
    for rank, other in enumerate(others, 1):
        _add_differences(rank, other, first, comparer)
    state = opened[0].plain(_with_refs(opened[0].value, below, leaves[0]), below)
    return state if isinstance(state, dict) else {"value": state}, True


def _leaves(saved: SavedFile, below: str, reader: ShardedReader) -> dict[str, Any]:
    leaves = leaves_of(saved.value, below, path=saved.path, items_of=_items_of)
    for leaf in leaves.values():
        refuse_others(leaf)
    return {fqn: reader.read(leaf) if is_sharded(leaf) else leaf for fqn, leaf in leaves.items()}


def _items_of(_fqn: str, value: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        for key in value:
            refuse_others(key)
        return value.items()
    return enumerate(value) if type(value) in {list, tuple} else None


def _add_sharded(
    fqn: str, leaves: list[dict[str, Any]], opened: list[SavedFile], builder: ManifestBuilder, *, comparer: Comparer
) -> None:
    """Adds a sharded tensor, made of its regions in the files of all ranks."""
    first = next(found[fqn] for found in leaves if isinstance(found[fqn], ShardedTensor))
    chunks: dict[Region, list[Chunk]] = {}
    copies: dict[Region, tuple[SavedFile, StoredView]] = {}
    for saved, found in zip(opened, leaves, strict=True):
        leaf = found.get(fqn)
        if not isinstance(leaf, ShardedTensor) or (leaf.dtype, leaf.shape) != (first.dtype, first.shape):
            raise damaged(saved.path, f"{fqn!r:.200} is not the sharded tensor that it is in the file of another rank")
        if any(view.dtype != first.dtype for _, view in leaf.parts):
            raise damaged(saved.path, f"{fqn!r:.200} is not of {first.dtype}, as its description says")
        for region, view in leaf.parts:
            if not region.numel:
                continue
            if region not in chunks:
                chunks[region] = moved(saved.chunks(view, fqn), region.offsets)
                copies[region] = saved, view
            elif comparer.same(copies[region], (saved, view), fqn) is False:
                what = f"has other elements in its part of {fqn!r:.200} than {copies[region][0].path} in the same part"
                advice = "restore the files of one save, or save with torch.distributed.checkpoint"
                raise conflicting(saved.path, f"{what}, and which one counts is not known", advice)
    missing = next((region for region in first.all_regions() if region not in chunks), None)
    if missing is not None:
        where = f"which has the shape {list(missing.lengths)} and begins at {list(missing.offsets)}"
        raise missing_file(builder.path, f"has no file with a part of {fqn!r:.200} {where}, in {len(opened)} files")
    found_chunks = [chunk for of_region in chunks.values() for chunk in of_region]
    builder.add_tensor(fqn, first.dtype, first.shape, found_chunks, num_parts=len(chunks))


def _add_differences(
    rank: int, one: tuple[SavedFile, dict[str, Any]], first: tuple[SavedFile, dict[str, Any]], comparer: Comparer
) -> None:
    """Adds to the builder, as `rank_<number>`, the values of `one` that differ from those of the first rank, and the
    tensors that are too large to compare.
    """
    saved, found = one

    def is_own(fqn: str, leaf: Any) -> bool:
        others = first[1][fqn]
        if isinstance(leaf, ShardedTensor) or isinstance(others, ShardedTensor):
            return not isinstance(leaf, ShardedTensor)
        return not comparer.same_value((saved, leaf), (first[0], others), fqn)

    own = {fqn: leaf for fqn, leaf in found.items() if is_own(fqn, leaf)}
    if own:
        name, trees = f"rank_{rank}", saved.builder.trees
        trees[name] = trees.get(name, {}) | saved.plain(own, name)  # other groups of files may have added some


def _with_refs(value: Any, fqn: str, leaves: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        items = [(key, _with_refs(item, join_fqn(fqn, key), leaves)) for key, item in value.items()]
        return OrderedDict(items) if type(value) is OrderedDict else dict(items)
    if type(value) in {list, tuple}:
        return type(value)(_with_refs(item, join_fqn(fqn, index), leaves) for index, item in enumerate(value))
    return TensorRef(fqn) if isinstance(leaves.get(fqn), ShardedTensor) else value
