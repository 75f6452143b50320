"""The checkpoint that a load or a look is about: found, and its manifest read, by one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec

from bytecheckpoint.distributed.ranks import Ranks, check_same
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, Opening, find_checkpoint, manifest_bytes, open_above
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.loading.links import Files, files_of, opening_at
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest import Manifest, MapNotes, encode_manifest
from bytecheckpoint.name_maps.load import CheckpointFolder, mapped_manifest
from bytecheckpoint.options import LoadOptions, NameMap
from bytecheckpoint.storage.layout import check_step, parse_manifest, parse_step, step_folder
from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.store import full_location

P = ParamSpec("P")
T = TypeVar("T")

_ATTEMPTS = 10
"""Attempts to read a checkpoint that others replace meanwhile; the same on every rank."""


class LoadTarget(NamedTuple):
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


def reading_again(call: Callable[P, T]) -> Callable[P, T]:
    """The same call, made again where the checkpoint was replaced or deleted while it was read. As this is the error of
    every rank, every rank makes it again.
    """

    @wraps(call)
    def persistent(*arguments: P.args, **options: P.kwargs) -> T:
        replaced: CheckpointError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return call(*arguments, **options)
            except CheckpointError as error:
                if error.kind != "replaced":
                    raise _with_attempt(error, replaced) from error.__cause__
                replaced = error
        raise replaced or TypeError("there is at least one attempt")

    return persistent


def _with_attempt(error: CheckpointError, before: CheckpointError | None) -> CheckpointError:
    """The error with that of the attempt before it, if there was one, which may have changed the state."""
    if before is None:
        return error
    message = f"{error.message}. This was another attempt; the one before ended so: {before.message}"
    return type(error)(message, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks)


def open_together(ranks: Ranks, asked: LoadTarget, options: LoadOptions) -> Source:
    """The checkpoint that all ranks load. Raises what `find_checkpoint` and `manifest_bytes` raise."""
    opening = Opening(asked.storage_options, options.timeout_s)
    at_root = opening_at(asked.root, opening, follow_links=options.follow_links)

    def find(payloads: Sequence[bytes]) -> Sequence[bytes]:
        wishes = [msgspec.msgpack.decode(payload, type=tuple[str, bool]) for payload in payloads]
        check_same("load from", [target for target, _ in wishes], ranks.global_ranks)
        found, content, notes = _find(asked, at_root, options)
        # One rank decides for all, whose options may differ.
        wanted = options.exchange == "on" or (options.exchange == "auto" and is_remote(found.store))
        is_exchanged = wanted and ranks.num_ranks > 1
        # What is passed on is verified by who reads it, for those who want that.
        is_verified = is_exchanged and any(verify for _, verify in wishes)
        place = found.levels, found.folder, found.path, found.manifest_path
        told = _Told(*place, content, notes, is_exchanged, is_verified)
        return [msgspec.msgpack.encode(told)] * ranks.num_ranks

    store = open_above(asked.root, 0, at_root)
    through = f" through {options.name_map}" if options.name_map else ""
    payload = msgspec.msgpack.encode((f"{full_location(store, '')} (step={asked.step}){through}", options.verify))
    told = msgspec.msgpack.decode(ranks.reduce_scatter(payload, find), type=_Told)
    manifest = _parsed(told.manifest, told.map_notes, told.manifest_path)
    _refuse_other_step(told.folder, manifest, path=told.path)
    here = Files(open_above(asked.root, told.levels, at_root) if told.levels else store, told.folder)
    return Source(
        *files_of(here, manifest, opening, follow_links=options.follow_links, path=told.path),
        manifest,
        replace(options, verify=options.verify or told.is_verified),
        is_exchanged=told.is_exchanged,
        path=told.path,
    )


def open_alone(asked: LoadTarget, options: LoadOptions) -> Source:
    """The checkpoint that one process looks into. Raises the same."""
    opening = Opening(asked.storage_options, options.timeout_s)
    at_root = opening_at(asked.root, opening, follow_links=options.follow_links)
    found, content, notes = _find(asked, at_root, options)
    manifest = _parsed(content, notes, found.manifest_path)
    _refuse_other_step(found.folder, manifest, path=found.path)
    here = Files(found.store, found.folder)
    files = files_of(here, manifest, opening, follow_links=options.follow_links, path=found.path)
    return Source(*files, manifest, options, is_exchanged=False, path=found.path)


def _find(asked: LoadTarget, opening: Opening, options: LoadOptions) -> tuple[FoundCheckpoint, bytes, MapNotes]:
    """The checkpoint, and its manifest as it is at one moment."""
    for number in range(_ATTEMPTS):
        found = find_checkpoint(asked.root, asked.step, opening)
        try:
            return found, *_manifest_bytes(found, options)
        except CheckpointNotFoundError as error:
            # It was deleted after it was found: there may be another one.
            if error.kind != "not_committed" or number == _ATTEMPTS - 1:
                raise
    raise ValueError("there is at least one attempt")


def _refuse_other_step(folder: str, manifest: Manifest, *, path: str) -> None:
    """Raises CheckpointMismatchError (conflict) where the folder has the name of another step than the manifest."""
    named = parse_step(folder)
    is_own = manifest.foreign_format in {"", OWN_FORMAT}  # the latter through a name map
    if named is None or not is_own or manifest.step in {None, named}:
        return
    raise CheckpointMismatchError(
        f"{path} holds the checkpoint of step {manifest.step} under the name of step {named}: the folder was copied or "
        f"renamed. Nothing was loaded: rename it to {step_folder(manifest.step or 0)}, or load it by its own path, "
        "without a step",
        kind="conflict",
        path=path,
    )


def _parsed(content: bytes, map_notes: MapNotes, path: str) -> Manifest:
    return replace(parse_manifest(content, path=path, whole=False), map_notes=map_notes)


def _manifest_bytes(found: FoundCheckpoint, options: LoadOptions) -> tuple[bytes, MapNotes]:
    """The encoded manifest, under the names that the options ask for, and what their map says besides."""
    content = manifest_bytes(found)
    if not isinstance(options.name_map, NameMap):  # None: a name or path has become one
        return content, MapNotes()
    manifest = parse_manifest(content, path=found.manifest_path, whole=False)
    mapped = mapped_manifest(manifest, CheckpointFolder(found.store, found.folder), options.name_map)
    return encode_manifest(mapped), mapped.map_notes
