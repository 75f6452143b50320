"""Name maps at work: found by name or path, given what a checkpoint says of itself, and applied to its manifest. What a
map means is decided in apply.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.file_reader import FileReader, damaged, too_much
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.manifest import Manifest, MapNotes
from bytecheckpoint.manifest.plain_wire import join_fqn
from bytecheckpoint.name_maps.apply import Asked, Contents, Mapped, apply_map, in_a_state
from bytecheckpoint.name_maps.objects import mapped_objects
from bytecheckpoint.name_maps.parameters import Facts
from bytecheckpoint.name_maps.records import MapFile
from bytecheckpoint.name_maps.rewrite_manifest import relink
from bytecheckpoint.name_maps.schema import MAX_TEXT_BYTES, parse_map
from bytecheckpoint.options import NameMap
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_FOLDER = Path(__file__).parent / "maps"
_CONFIG, _CONFIG_NAME = "config.json", "config"
_MAX_CONFIG_BYTES = 1 << 20


class Beside(NamedTuple):
    """Where a checkpoint lies, and what describes it besides."""

    store: Store
    folder: str


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


def map_checkpoint(manifest: Manifest, beside: Beside, wanted: NameMap) -> Mapped:
    """What the tensors of a checkpoint become, and from where each comes.

    Raises CheckpointMismatchError (conflict, missing_key, unexpected_key, shape), UnsafeCheckpointError
    (limits_exceeded) and CheckpointCorruptError (bad_manifest).
    """
    name_map, side = choose(str(wanted.name))
    asked = Asked(side, dict(wanted.options), keep_unmapped=wanted.keep_unmapped)
    return apply_map(name_map, Contents(manifest.describe_all(), manifest.aliases, _facts(manifest, beside)), asked)


def mapped_manifest(manifest: Manifest, beside: Beside, wanted: NameMap) -> Manifest:
    """The checkpoint as the other framework has it: other names and shapes, of the same bytes in the same files.

    Raises the same, and what `relink` raises.
    """
    mapped = map_checkpoint(manifest, beside, wanted)
    objects, left_out = mapped_objects(manifest, mapped)
    seen = as_mapped(manifest, as_state(mapped, objects), objects)
    return replace(seen, map_notes=seen.map_notes._replace(left_out=left_out))


def as_state(mapped: Mapped, objects: Mapping[str, bytes]) -> Mapped:
    """With the names that a state of this library has: where there is more than the model, that has a name."""
    is_more = bool(objects) or len(mapped.in_model) < len(mapped.tensors) + len(mapped.aliases)
    return in_a_state(mapped) if is_more else mapped


def as_mapped(manifest: Manifest, mapped: Mapped, objects: Mapping[str, bytes]) -> Manifest:
    """The manifest with what a map has made of its tensors and plain data. Raises what `relink` raises."""
    relinked = relink(manifest, mapped.tensors)
    return replace(
        manifest,
        # A number that a parameter has once is the same bytes for each of its parts, which only foreign files allow.
        foreign_format=manifest.foreign_format or OWN_FORMAT,
        files=[*manifest.files, relinked.zeros] if relinked.zeros else manifest.files,
        tensors=relinked.records,
        map_notes=MapNotes(zeros_file=len(manifest.files) if relinked.zeros else None),
        aliases=mapped.aliases,
        objects=objects,
    )


def _facts(manifest: Manifest, beside: Beside) -> Facts:
    """What the checkpoint says of itself: its plain data, and a `config.json` beside it."""
    values = {name: value for fqn, data in manifest.objects.items() for name, value in _values(decode_plain(data), fqn)}
    config = read_config(beside)
    return Facts(values | {join_fqn(_CONFIG_NAME, key): value for key, value in config.items()})


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


def read_config(beside: Beside) -> Mapping[str, Any]:
    """The `config.json` of Hugging Face beside a checkpoint; {} where there is none, or it holds no object.

    Raises CheckpointCorruptError and UnsafeCheckpointError (limits_exceeded).
    """
    num_bytes = beside.store.list(beside.folder).get(_CONFIG)
    if num_bytes is None:
        return {}
    path = join_name(str(beside.store), beside.folder, _CONFIG)
    if num_bytes > _MAX_CONFIG_BYTES:
        raise too_much(path, f"it has {num_bytes} bytes, at most {_MAX_CONFIG_BYTES} are read")
    content = FileReader(beside.store, join_name(beside.folder, _CONFIG), num_bytes).read(0, num_bytes)
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no JSON: {error}") from error
    return config if isinstance(config, dict) else {}
