"""Files of torch.save, one of each rank, that hold torch's sharded tensors: what `torch.save` makes of FSDP1's sharded
state_dict, or of one with DTensors. All of them together are the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.file_reader import damaged, not_readable, too_much
from bytecheckpoint.formats.manifest_builder import MAX_VALUES, ManifestBuilder, two_of
from bytecheckpoint.formats.plain_values import encode_value
from bytecheckpoint.formats.torch_save.duplicates import Comparer
from bytecheckpoint.formats.torch_save.files import Saved, missing_file, open_saved, translated
from bytecheckpoint.formats.torch_save.sharded_tensors import (
    Sharded,
    ShardedReader,
    find_sharded_value,
    is_sharded,
    refuse_others,
)
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, TensorRef, join_fqn
from bytecheckpoint.region import Region, shifted
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_NAME = re.compile(r"\A(.*?)rank[_-]?(\d{1,6})(|[^\d/].*)\.(?:pt|pth|bin|ckpt)\Z")
_WORLD_SIZE = re.compile(r"world_size_(\d{1,6})")
_OTHER_NAMES = {"optim": "optimizer"}
_WRITER = "torch.save"


class _Group(NamedTuple):
    """The files of all ranks that are named alike."""

    name: str
    """Of what is in them, where there are several groups."""
    files: list[str]
    """In the order of ranks."""


def is_folder(names: set[str]) -> bool:
    """Whether a folder with these files may be such a checkpoint."""
    return any(map(_NAME.match, names))


def read_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    """Raises CheckpointNotFoundError (missing_file), CheckpointCorruptError or UnsafeCheckpointError."""
    parts = ManifestBuilder(join_name(str(store), folder))
    root: dict[Any, Any] = {}
    is_any_sharded = False
    groups = _groups({name for name, num_bytes in listing.items() if num_bytes is not None}, parts.path)
    for group in groups:
        opened = [
            open_saved(store, folder, name, listing[name] or 0, parts=parts, find_global=find_sharded_value)
            for name in group.files
        ]
        below = group.name if len(groups) > 1 else ""
        state, is_group_sharded = translated(opened[0].path, _WRITER, _read_group, opened, below, parts)
        is_any_sharded |= is_group_sharded
        if below in root:
            raise two_of(parts.path, below)
        root |= {below: state} if below else state
    if not is_any_sharded:
        what = "none of the files of its ranks says which part of a tensor it has"
        raise not_readable(parts.path, what, "give the path of one of them, or save with torch.distributed.checkpoint")
    parts.take_apart(root, on_tensor=lambda fqn, _view: _refuse_tensor(parts.path, fqn))
    return parts


def _refuse_tensor(path: str, fqn: str) -> None:
    raise damaged(path, f"{fqn!r:.200} is a tensor in the wrong place")


def _groups(names: set[str], path: str) -> list[_Group]:
    by_kind: dict[tuple[str, str], dict[int, str]] = {}
    for name in sorted(names):
        match = _NAME.match(name)
        if match:
            files = by_kind.setdefault((match[1], match[3]), {})
            other = files.setdefault(int(match[2]), name)
            if other != name:
                raise _two_of_rank(path, sorted((other, name)))
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


def _two_of_rank(path: str, names: list[str]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{path} has {names[0]!r:.200} and {names[1]!r:.200}, which are of one rank; nothing was loaded: remove the "
        "one that is older, with those of its save",
        kind="conflict",
        path=path,
    )


def _read_group(opened: list[Saved], below: str, parts: ManifestBuilder) -> tuple[dict[Any, Any], bool]:
    """What the files hold, each tensor of which was added to the parts; and whether any of them is sharded."""
    reader = ShardedReader(parts.path)
    leaves = [_leaves(saved, below, reader) for saved in opened]
    sharded = [fqn for fqn, leaf in leaves[0].items() if isinstance(leaf, Sharded)]
    if not sharded:
        names = [f"rank_{rank}" for rank in range(len(opened))]
        plain = {
            name: saved.plain(parts, saved.value, join_fqn(below, name))
            for name, saved in zip(names, opened, strict=True)
        }
        return plain, False
    for saved, found in zip(opened, leaves, strict=True):
        if found.keys() != leaves[0].keys():
            name = min(found.keys() ^ leaves[0].keys())
            what = f"{name!r:.200} is in the file of one rank, and not in that of another"
            raise not_readable(saved.path, what, "save it with torch.distributed.checkpoint")
    comparer = Comparer()
    for fqn in sharded:
        _add_sharded(fqn, leaves, opened, parts, comparer=comparer)
    for rank, (saved, found) in enumerate(zip(opened, leaves, strict=True)):
        _add_differences(rank, saved, found, (opened[0], leaves[0]), parts, comparer=comparer)
    state = opened[0].plain(parts, _with_refs(opened[0].value, below, leaves[0]), below)
    return state if isinstance(state, dict) else {"value": state}, True


def _leaves(saved: Saved, below: str, reader: ShardedReader) -> dict[str, Any]:
    """Everything in a file that holds nothing else, by name; sharded tensors as such."""
    found: dict[str, Any] = {}
    num_values = 0

    def walk(value: Any, fqn: str, depth: int) -> None:
        nonlocal num_values
        num_values += 1  # empty containers as well, of which a small pickle can have billions
        if depth == 0 or num_values > MAX_VALUES:
            raise too_much(saved.path, f"its data is nested more than {MAX_DEPTH} deep, or of {MAX_VALUES} values")
        if isinstance(value, dict) or type(value) in {list, tuple}:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                refuse_others(key)
                walk(item, join_fqn(fqn, key), depth - 1)
            return
        if fqn in found:
            raise two_of(saved.path, fqn)
        refuse_others(value)
        found[fqn] = reader.read(value) if is_sharded(value) else value

    walk(saved.value, below, MAX_DEPTH)
    return found


def _add_sharded(
    fqn: str, leaves: list[dict[str, Any]], opened: list[Saved], parts: ManifestBuilder, *, comparer: Comparer
) -> None:
    first: Sharded = leaves[0][fqn]
    chunks: dict[Region, list[Chunk]] = {}
    copies: dict[Region, tuple[Saved, StoredView]] = {}
    for saved, found in zip(opened, leaves, strict=True):
        leaf = found.get(fqn)
        if not isinstance(leaf, Sharded) or (leaf.dtype, leaf.shape) != (first.dtype, first.shape):
            raise damaged(saved.path, f"{fqn!r:.200} is not the tensor that it is in {opened[0].path}")
        if any(view.dtype != first.dtype for _, view in leaf.parts):
            raise damaged(saved.path, f"{fqn!r:.200} is not of {first.dtype}, as its description says")
        for region, view in leaf.parts:
            if not region.numel:
                continue
            if region not in chunks:
                chunks[region] = _moved(saved.chunks(view, fqn), region)
                copies[region] = saved, view
            elif comparer.same(copies[region], (saved, view), fqn) is False:
                raise _two_contents(fqn, copies[region][0], saved)
    missing = next((region for region in first.all_regions() if region not in chunks), None)
    if missing is not None:
        where = f"which has the shape {list(missing.lengths)} and begins at {list(missing.offsets)}"
        raise missing_file(parts.path, f"has no file with a part of {fqn!r:.200} {where}, in {len(opened)} files")
    found_chunks = [chunk for of_region in chunks.values() for chunk in of_region]
    parts.add_tensor(fqn, first.dtype, first.shape, found_chunks, num_parts=len(chunks))


def _two_contents(fqn: str, first: Saved, other: Saved) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{other.path} has other elements in its part of {fqn!r:.200} than {first.path} in the same part, and which "
        "one counts is not known; nothing was loaded: restore the files of one save, or save with "
        "torch.distributed.checkpoint",
        kind="conflict",
        path=other.path,
    )


def _moved(chunks: list[Chunk], region: Region) -> list[Chunk]:
    """Chunks of a part, as chunks of the whole tensor."""
    return [chunk._replace(region=shifted(chunk.region, region.offsets)) for chunk in chunks]


def _add_differences(
    rank: int,
    saved: Saved,
    found: Mapping[str, Any],
    first: tuple[Saved, Mapping[str, Any]],
    parts: ManifestBuilder,
    *,
    comparer: Comparer,
) -> None:
    """What a rank has of its own stands below its name; so does a tensor of which that takes too much to tell."""
    if saved is first[0]:
        return
    own = {
        fqn: leaf
        for fqn, leaf in found.items()
        if not isinstance(leaf, Sharded) and not _same((saved, leaf), (first[0], first[1][fqn]), fqn, comparer)
    }
    if own:
        tree = saved.plain(parts, own, f"rank_{rank}")
        parts.trees[f"rank_{rank}"] = parts.trees.get(f"rank_{rank}", {}) | tree  # of other groups of files


def _same(one: tuple[Saved, Any], other: tuple[Saved, Any], fqn: str, comparer: Comparer) -> bool:
    if isinstance(one[1], StoredView) and isinstance(other[1], StoredView):
        return bool(comparer.same(one, other, fqn))
    if isinstance(one[1], StoredView | Sharded) or isinstance(other[1], StoredView | Sharded):
        return False
    here, there = (
        encode_value(saved.plain(ManifestBuilder(saved.path), leaf, fqn), path=saved.path)
        for saved, leaf in (one, other)
    )
    return here == there


def _with_refs(value: Any, fqn: str, leaves: Mapping[str, Any]) -> Any:
    """The value with the names of its sharded tensors in their place."""
    if isinstance(value, dict):
        items = [(key, _with_refs(item, join_fqn(fqn, key), leaves)) for key, item in value.items()]
        return type(value)(items) if type(value) is dict else dict(items)
    if type(value) in {list, tuple}:
        return type(value)(_with_refs(item, join_fqn(fqn, index), leaves) for index, item in enumerate(value))
    return TensorRef(fqn) if isinstance(leaves.get(fqn), Sharded) else value
