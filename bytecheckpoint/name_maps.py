"""Name maps at work: found by name or path, given what a checkpoint says of itself, and applied to its manifest. What a
map means is decided in planner/name_map_plan.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.adapters.plain_data import TensorRef, decode_plain, encode_plain, join_fqn, keep_in_tree
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.options import NameMap
from bytecheckpoint.planner.map_file import MAX_TEXT_BYTES, parse_map
from bytecheckpoint.planner.map_options import Facts
from bytecheckpoint.planner.map_records import MapFile
from bytecheckpoint.planner.name_map_plan import Asked, Contents, Mapped, apply_map
from bytecheckpoint.planner.relinking import relink
from bytecheckpoint.storage.finding import Found
from bytecheckpoint.storage.foreign.file_bytes import FileBytes, damaged, too_much
from bytecheckpoint.storage.names import join_name

_FOLDER = Path(__file__).parent / "maps"
_CONFIG, _CONFIG_NAME = "config.json", "config"
_MAX_CONFIG_BYTES = 1 << 20
_GONE = object()


class Chosen(NamedTuple):
    """A map, and in which direction it goes."""

    name_map: MapFile
    source_side: int | None
    """0 or 1; None where the names of the checkpoint say so."""


def shipped_maps() -> list[str]:
    """The names of the maps that come with the library, both directions of each."""
    return sorted(name for path in _FOLDER.glob("*.toml") for name in _directions(path))


def _directions(path: Path) -> tuple[str, str]:
    first, _, second = path.stem.partition("-to-")
    return path.stem, f"{second}-to-{first}"


def choose(name: str) -> Chosen:
    """The map of this name, or at this path. Raises CheckpointMismatchError (conflict)."""
    for path in _FOLDER.glob("*.toml"):
        if name in _directions(path):
            return Chosen(parse_map(path.read_text("utf-8"), name), _directions(path).index(name))
    return Chosen(parse_map(_text_of(Path(name)), name), None)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise CheckpointMismatchError(
            f"there is no name map {str(path)!r:.300}, by that name or at that path: {reason}; nothing was loaded or "
            f"written: the library has {', '.join(shipped_maps())}, and takes the path of a map of your own",
            kind="conflict",
        ) from error


def map_checkpoint(manifest: Manifest, found: Found, wanted: NameMap) -> Mapped:
    """What the tensors of a checkpoint become, and from where each comes.

    Raises CheckpointMismatchError (conflict, missing_key, unexpected_key, shape), UnsafeCheckpointError
    (limits_exceeded) and CheckpointCorruptError (bad_manifest).
    """
    name_map, side = choose(str(wanted.name))
    asked = Asked(side, dict(wanted.options), keep_unmapped=wanted.keep_unmapped)
    return apply_map(name_map, Contents(manifest.describe_all(), manifest.aliases, _facts(manifest, found)), asked)


def mapped_manifest(manifest: Manifest, found: Found, wanted: NameMap) -> Manifest:
    """The checkpoint as the other framework has it: other names and shapes, of the same bytes in the same files.

    Raises the same, and what `relink` raises.
    """
    mapped = map_checkpoint(manifest, found, wanted)
    objects, _ = mapped_objects(manifest, mapped)
    return replace(manifest, tensors=relink(manifest, mapped.tensors), aliases=mapped.aliases, objects=objects)


def mapped_objects(manifest: Manifest, mapped: Mapped) -> tuple[dict[str, bytes], list[str]]:
    """The plain data without references to tensors that have other names now, and without what the map leaves out; and
    the FQNs of the latter.
    """
    gone = mapped.sources.union(mapped.dropped)
    objects: dict[str, bytes] = {}
    dropped: list[str] = []
    for fqn, data in manifest.objects.items():
        tree = decode_plain(data)
        left = _without(tree, fqn, gone, mapped.drop, dropped)
        if left is tree:
            objects[fqn] = data
        elif left is not _GONE:
            objects[fqn] = encode_plain(left, fqn, keep_in_tree)
    return objects, dropped


def _without(tree: Any, fqn: str, gone: frozenset[str], drop: tuple[str, ...], dropped: list[str]) -> Any:
    """The tree without these tensors, and without what is called so; the same object where nothing is missing."""
    if isinstance(tree, TensorRef):
        return _GONE if tree.fqn in gone else tree
    if any(fnmatchcase(fqn, glob) for glob in drop):
        dropped.append(fqn)
        return _GONE
    if not isinstance(tree, dict):
        return tree
    items = {key: _without(item, join_fqn(fqn, key), gone, drop, dropped) for key, item in tree.items()}
    if all(items[key] is item for key, item in tree.items()):
        return tree
    left = {key: item for key, item in items.items() if item is not _GONE}
    return type(tree)(left) if left else _GONE


def _facts(manifest: Manifest, found: Found) -> Facts:
    """What the checkpoint says of itself: its plain data, and a `config.json` beside it."""
    values = {name: value for fqn, data in manifest.objects.items() for name, value in _values(decode_plain(data), fqn)}
    return Facts(values | dict(_values(_config(found), _CONFIG_NAME)))


def _values(tree: Any, fqn: str) -> Iterator[tuple[str, object]]:
    """The values in dicts and lists, by FQN."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        yield fqn, tree
        return
    for key, item in items:
        yield from _values(item, join_fqn(fqn, key))


def _config(found: Found) -> Any:
    """What stands in the `config.json` of Hugging Face beside the checkpoint; {} where there is none."""
    num_bytes = found.store.list(found.folder).get(_CONFIG)
    if num_bytes is None:
        return {}
    path = join_name(str(found.store), found.folder, _CONFIG)
    if num_bytes > _MAX_CONFIG_BYTES:
        raise too_much(path, f"it has {num_bytes} bytes, at most {_MAX_CONFIG_BYTES} are read")
    content = FileBytes(found.store, join_name(found.folder, _CONFIG), num_bytes).read(0, num_bytes)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no JSON: {error}") from error
