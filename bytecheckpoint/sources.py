"""The checkpoint that a load or a look is about: found, and its manifest read, by one rank for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from bytecheckpoint.agreement import check_same
from bytecheckpoint.links import Files, files_of, opening_at
from bytecheckpoint.location import check_step
from bytecheckpoint.manifest import Manifest, MapNotes, encode_manifest
from bytecheckpoint.name_maps import Beside, mapped_manifest
from bytecheckpoint.options import LoadOptions, NameMap
from bytecheckpoint.ranks import Ranks
from bytecheckpoint.reading import Source
from bytecheckpoint.storage.finding import Found, Opening, find_checkpoint, manifest_bytes, open_above
from bytecheckpoint.storage.layout import parse_manifest
from bytecheckpoint.storage.opening import is_remote
from bytecheckpoint.storage.store import place_of


class Asked(NamedTuple):
    """What the caller asks for."""

    root: str
    """The path or URL, with the role."""
    step: int | Literal["latest"] | None
    storage_options: Mapping[str, Any] | None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What the rank that looked tells all."""

    levels: int
    """As in `finding.Found`."""
    folder: str
    path: str
    manifest_path: str
    manifest: bytes
    map_notes: MapNotes
    is_exchanged: bool
    is_verified: bool


def wanted_step(step: object) -> int | Literal["latest"] | None:
    """Raises CheckpointMismatchError (conflict) for what is none."""
    return "latest" if isinstance(step, str) and step == "latest" else check_step(step)


def open_together(ranks: Ranks, asked: Asked, options: LoadOptions) -> Source:
    """The checkpoint that all ranks load. Raises what `find_checkpoint` and `manifest_bytes` raise."""
    opening = Opening(asked.storage_options, options.timeout_s)
    at_root = opening_at(asked.root, opening, follow_links=options.follow_links)

    def find(payloads: Sequence[bytes]) -> Sequence[bytes]:
        wishes = [msgspec.msgpack.decode(payload, type=tuple[str, bool]) for payload in payloads]
        check_same("load from", [target for target, _ in wishes], ranks.names)
        found = find_checkpoint(asked.root, asked.step, at_root)
        # One rank decides for all, whose options may differ.
        wanted = options.exchange == "on" or (options.exchange == "auto" and is_remote(found.store))
        is_exchanged = wanted and ranks.num_ranks > 1
        # What is passed on is verified by who reads it, for those who want that.
        is_verified = is_exchanged and any(verify for _, verify in wishes)
        place = found.levels, found.folder, found.path, found.manifest_path
        told = _Told(*place, *_manifest_bytes(found, options), is_exchanged, is_verified)
        return [msgspec.msgpack.encode(told)] * ranks.num_ranks

    store = open_above(asked.root, 0, at_root)
    through = f" through {options.name_map}" if options.name_map else ""
    payload = msgspec.msgpack.encode((f"{place_of(store, '')} (step={asked.step}){through}", options.verify))
    told = msgspec.msgpack.decode(ranks.consult(payload, find), type=_Told)
    manifest = _parsed(told.manifest, told.map_notes, told.manifest_path)
    here = Files(open_above(asked.root, told.levels, at_root) if told.levels else store, told.folder)
    return Source(
        *files_of(here, manifest, opening, follow_links=options.follow_links, path=told.path),
        manifest,
        replace(options, verify=options.verify or told.is_verified),
        is_exchanged=told.is_exchanged,
        path=told.path,
    )


def open_alone(asked: Asked, options: LoadOptions) -> Source:
    """The checkpoint that one process looks into. Raises the same."""
    opening = Opening(asked.storage_options, options.timeout_s)
    found = find_checkpoint(asked.root, asked.step, opening_at(asked.root, opening, follow_links=options.follow_links))
    manifest = _parsed(*_manifest_bytes(found, options), found.manifest_path)
    here = Files(found.store, found.folder)
    files = files_of(here, manifest, opening, follow_links=options.follow_links, path=found.path)
    return Source(*files, manifest, options, is_exchanged=False, path=found.path)


def _parsed(content: bytes, map_notes: MapNotes, path: str) -> Manifest:
    return replace(parse_manifest(content, path=path, whole=False), map_notes=map_notes)


def _manifest_bytes(found: Found, options: LoadOptions) -> tuple[bytes, MapNotes]:
    """The encoded manifest, under the names that the options ask for, and what their map says besides."""
    content = manifest_bytes(found)
    if not isinstance(options.name_map, NameMap):  # None: a name or path has become one
        return content, MapNotes()
    manifest = parse_manifest(content, path=found.manifest_path, whole=False)
    mapped = mapped_manifest(manifest, Beside(found.store, found.folder), options.name_map)
    return encode_manifest(mapped), mapped.map_notes
