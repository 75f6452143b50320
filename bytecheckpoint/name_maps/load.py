"""Name maps for one checkpoint: read by name or path, given its plain data and configuration, and applied to its
manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.folder import read_config
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.manifest import Manifest, MapNotes
from bytecheckpoint.manifest.plain_wire import join_fqn
from bytecheckpoint.name_maps.apply import MapInput, Mapped, MapRequest, apply_map, in_a_state
from bytecheckpoint.name_maps.objects import mapped_objects
from bytecheckpoint.name_maps.parameters import PlainValues
from bytecheckpoint.name_maps.rewrite_manifest import relink
from bytecheckpoint.name_maps.schema import MAX_CHARACTERS, MapFile, parse_map
from bytecheckpoint.options import NameMap
from bytecheckpoint.storage.store import Store

_FOLDER = Path(__file__).parent / "maps"
_CONFIG_NAME = "config"


class CheckpointFolder(NamedTuple):
    """The folder of a checkpoint, which may have a `config.json` as well."""

    store: Store
    path: str


class DirectedMap(NamedTuple):
    """A map and its direction."""

    name_map: MapFile
    source_side: int | None
    """0 or 1; None if the names of the checkpoint are to show it."""


def shipped_maps() -> list[str]:
    """Returns the names of the maps that come with the library, both directions of each."""
    return sorted(name for path in _FOLDER.glob("*.toml") for name in _directions(path))


def _directions(path: Path) -> tuple[str, str]:
    first, _, second = path.stem.partition("-to-")
    return path.stem, f"{second}-to-{first}"


def choose(name: str) -> DirectedMap:
    """Reads the map of this name, or at this path. Raises CheckpointMismatchError (conflict) if there is none, or if it
    has an error.
    """
    for path in _FOLDER.glob("*.toml"):
        if name in _directions(path):
            return DirectedMap(parse_map(path.read_text("utf-8"), name), _directions(path).index(name))
    return DirectedMap(parse_map(_text_of(Path(name)), name), None)


def _text_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise CheckpointMismatchError(
            f"there is no name map {str(path)!r:.300}, by that name or at that path: {reason}; nothing was loaded or "
            f"written: the library has {', '.join(shipped_maps())}, and takes the path of a map of your own",
            kind="conflict",
        ) from error


def map_checkpoint(manifest: Manifest, folder: CheckpointFolder, wanted: NameMap) -> Mapped:
    """Returns the tensors of a checkpoint as the other framework has them, and the stored regions of each. Reads the
    map and the `config.json` of the folder, and no tensors.

    Raises CheckpointMismatchError (conflict, missing_key, unexpected_key, shape), UnsafeCheckpointError
    (limits_exceeded) and CheckpointCorruptError (bad_manifest), and the errors of `read_config`.
    """
    name_map, side = choose(str(wanted.name))
    request = MapRequest(side, dict(wanted.options), keep_unmapped=wanted.keep_unmapped)
    plain = _plain_values(manifest, read_config(*folder))
    return apply_map(name_map, MapInput(manifest.describe_all(), manifest.aliases, plain), request)


def mapped_manifest(manifest: Manifest, folder: CheckpointFolder, wanted: NameMap) -> Manifest:
    """Returns the checkpoint as the other framework has it: other names and shapes, of the same bytes in the same
    files.

    Raises the errors of `map_checkpoint` and of `relink`.
    """
    mapped = map_checkpoint(manifest, folder, wanted)
    objects, left_out = mapped_objects(manifest, mapped)
    result = as_mapped(manifest, as_state(mapped, objects), objects)
    return replace(result, map_notes=result.map_notes._replace(left_out=left_out))


def as_state(mapped: Mapped, objects: Mapping[str, bytes]) -> Mapped:
    """Returns `in_a_state(mapped)` if the checkpoint has more than the tensors of the model, else `mapped`."""
    has_more = bool(objects) or len(mapped.in_model) < len(mapped.tensors) + len(mapped.aliases)
    return in_a_state(mapped) if has_more else mapped


def as_mapped(manifest: Manifest, mapped: Mapped, objects: Mapping[str, bytes]) -> Manifest:
    """Returns the manifest with these tensors and plain data in place of its own. Raises the errors of `relink`."""
    relinked = relink(manifest, mapped.tensors)
    return replace(
        manifest,
        # The parts of a parameter that was split share the bytes of values such as `step`: only foreign formats may.
        foreign_format=manifest.foreign_format or OWN_FORMAT,
        files=[*manifest.files, relinked.zeros] if relinked.zeros else manifest.files,
        tensors=relinked.records,
        map_notes=MapNotes(zeros_file=len(manifest.files) if relinked.zeros else None),
        aliases=mapped.aliases,
        objects=objects,
    )


def _plain_values(manifest: Manifest, config: Mapping[str, Any]) -> PlainValues:
    values = {name: value for fqn, data in manifest.objects.items() for name, value in _values(decode_plain(data), fqn)}
    return PlainValues(values | {join_fqn(_CONFIG_NAME, key): value for key, value in config.items()})


def _values(tree: Any, fqn: str) -> Iterator[tuple[str, object]]:
    """Yields the values in dicts and lists, by FQN."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        yield fqn, tree
        return
    for key, item in items:
        yield from _values(item, join_fqn(fqn, key))
