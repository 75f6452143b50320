"""Finds the checkpoint to read, and reads its manifest, on one rank for all."""

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
from bytecheckpoint.storage.layout import checked_step, parse_manifest, parse_step, step_folder
from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.store import Store, full_location

P = ParamSpec("P")
T = TypeVar("T")

_ATTEMPTS = 10
"""Number of attempts to read a checkpoint that others replace meanwhile; all ranks need the same number."""


class LoadTarget(NamedTuple):
    """The checkpoint that a load asks for."""

    root: str
    """The path or URL; with `role`, the folder of that name in it."""
    step: int | Literal["latest"] | None
    storage_options: Mapping[str, Any] | None


class _OpenedMessage(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint that one rank found, for all."""

    levels: int
    """As in FoundCheckpoint."""
    folder: str
    path: str
    manifest_path: str
    manifest: bytes
    map_notes: MapNotes
    is_exchanged: bool = False
    """True if ranks pass on to others what they read."""
    is_verified: bool = False
    """True if what is passed on has to be verified, because any rank wants that."""


def wanted_step(step: object) -> int | Literal["latest"] | None:
    """Returns "latest", None, or a number as an int. Raises CheckpointMismatchError (conflict) for any other value."""
    return "latest" if isinstance(step, str) and step == "latest" else checked_step(step)


def retry_replaced(call: Callable[P, T]) -> Callable[P, T]:
    """Returns a function that repeats `call`, up to 10 times in all, if the checkpoint was replaced or deleted while it
    was read. As every rank has this error, every rank calls again.
    """

    @wraps(call)
    def retried(*arguments: P.args, **options: P.kwargs) -> T:
        replaced: CheckpointError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return call(*arguments, **options)
            except CheckpointError as error:
                if error.kind != "replaced":
                    raise _with_previous(error, replaced) from error.__cause__
                replaced = error
        raise replaced or TypeError("there is at least one attempt")

    return retried


def _with_previous(error: CheckpointError, previous: CheckpointError | None) -> CheckpointError:
    """Returns the error, with that of the previous attempt, if any, added: that attempt may have changed the state."""
    if previous is None:
        return error
    message = f"{error.message}. This was another attempt; the one before ended so: {previous.message}"
    return type(error)(message, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks)


def open_together(ranks: Ranks, target: LoadTarget, options: LoadOptions) -> Source:
    """Opens the checkpoint on all ranks, which must all call this; the coordinator finds it and reads its manifest.
    Raises as `find_checkpoint`, `manifest_bytes` and `files_of`; and CheckpointMismatchError (conflict) if ranks ask
    for different checkpoints, or a step's folder was renamed.
    """
    opening = Opening(target.storage_options, options.timeout_s)
    at_root = opening_at(target.root, opening, follow_links=options.follow_links)

    def find(payloads: Sequence[bytes]) -> Sequence[bytes]:
        requests = [msgspec.msgpack.decode(payload, type=tuple[str, bool]) for payload in payloads]
        check_same("load from", [name for name, _ in requests], ranks.global_ranks)
        store, message = _find(target, at_root, options)
        # One rank decides for all, whose options may differ.
        is_exchanged = options.exchange == "on" or (options.exchange == "auto" and is_remote(store))
        is_exchanged = is_exchanged and ranks.num_ranks > 1
        # The reader rank verifies what it passes on, if any rank wants that.
        is_verified = is_exchanged and any(verify for _, verify in requests)
        message = msgspec.structs.replace(message, is_exchanged=is_exchanged, is_verified=is_verified)
        return [msgspec.msgpack.encode(message)] * ranks.num_ranks

    store = open_above(target.root, 0, at_root)
    through = f" through {options.name_map}" if options.name_map else ""
    request = f"{full_location(store, '')} (step={target.step}){through}", options.verify
    message = msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(request), find), type=_OpenedMessage)
    if message.levels:
        store = open_above(target.root, message.levels, at_root)
    return _source(store, message, opening, replace(options, verify=options.verify or message.is_verified))


def open_alone(target: LoadTarget, options: LoadOptions) -> Source:
    """Opens the checkpoint that one process reads. Raises the errors of `open_together`."""
    opening = Opening(target.storage_options, options.timeout_s)
    found = _find(target, opening_at(target.root, opening, follow_links=options.follow_links), options)
    return _source(*found, opening, options)


def _find(target: LoadTarget, opening: Opening, options: LoadOptions) -> tuple[Store, _OpenedMessage]:
    """Finds the checkpoint and reads its manifest; looks again if it was deleted in between. Returns the store and the
    message about it.
    """
    for number in range(_ATTEMPTS):
        found = find_checkpoint(target.root, target.step, opening)
        try:
            content = _manifest_bytes(found, options)
        except CheckpointNotFoundError as error:
            # It was deleted after it was found: there may be another one.
            if error.kind != "not_committed" or number == _ATTEMPTS - 1:
                raise
        else:
            return found.store, _OpenedMessage(found.levels, found.folder, found.path, found.manifest_path, *content)
    raise ValueError("there is at least one attempt")


def _manifest_bytes(found: FoundCheckpoint, options: LoadOptions) -> tuple[bytes, MapNotes]:
    """Returns the encoded manifest, under the names that the options ask for, and the notes of their name map."""
    content = manifest_bytes(found)
    if not isinstance(options.name_map, NameMap):  # None: LoadOptions turns names and paths into one
        return content, MapNotes()
    manifest = parse_manifest(content, path=found.manifest_path, check_all=False)
    mapped = mapped_manifest(manifest, CheckpointFolder(found.store, found.folder), options.name_map)
    return encode_manifest(mapped), mapped.map_notes


def _source(store: Store, message: _OpenedMessage, opening: Opening, options: LoadOptions) -> Source:
    manifest = parse_manifest(message.manifest, path=message.manifest_path, check_all=False)
    manifest, path = replace(manifest, map_notes=message.map_notes), message.path
    _refuse_other_step(message.folder, manifest, path=path)
    own = Files(store, message.folder)
    files = files_of(own, manifest, opening, follow_links=options.follow_links, path=path)
    return Source(*files, manifest, options, is_exchanged=message.is_exchanged, path=path)


def _refuse_other_step(folder: str, manifest: Manifest, *, path: str) -> None:
    """Raises CheckpointMismatchError (conflict) if the folder has the name of another step than the manifest."""
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
