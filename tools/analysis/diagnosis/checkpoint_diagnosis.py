"""Examines a path of unknown origin: what it is, what of it loads into what, and the code that does it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, Opening, find_checkpoint, from_root, manifest_of
from bytecheckpoint.info import LEFT_OUT, OWN_FORMAT, describe_checkpoint
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_plain_path
from bytecheckpoint.storage.paths import join_name

from ..checkpoint_list import list_checkpoints
from .entries import Part
from .integrations import resume_code, step_in_name
from .load_code import LoadCall, LoadCode, load_codes
from .origin import Origin, find_origin, looks_like, step_of, world_size_of
from .parts import find_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another checkpoint: at or below the path, or a step beside the step that was examined."""

    path: str
    format: str
    step: int | None
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDiagnosis:
    """Findings about one path."""

    path: str
    format: str | None = None
    """None if no checkpoint was found at the path."""
    origin: Origin | None = None
    """None if no manifest could be read."""
    step: int | None = None
    world_size: int | None = None
    num_bytes: int = 0
    num_files: int = 0
    parts: Sequence[Part] = ()
    code: Sequence[LoadCode] = ()
    convert: str | None = None
    """The command that writes it in another format."""
    left_out: str | None = None
    """Names of what the reader has left out, with the reasons."""
    neighbours: Sequence[Neighbour] = ()
    looks_like: str | None = None
    """What a folder that is no checkpoint may be, by the names in it."""
    error: CheckpointError | None = None
    """The reason why nothing of it loads."""


def diagnose(path: str, storage_options: Mapping[str, Any]) -> CheckpointDiagnosis:
    """Returns what the path is; if nothing of it loads, the reason is the `error` of the result. Raises StorageError,
    and CheckpointNotFoundError if there is nothing at all.
    """
    opening = Opening(storage_options)
    try:
        found = find_checkpoint(path, "latest", opening)
    except StorageError:
        raise
    except CheckpointError as error:
        return _no_checkpoint(path, opening, error)
    try:
        manifest = manifest_of(found)
        return _checkpoint(path, found, manifest, storage_options)
    except StorageError:
        raise
    except CheckpointError as error:
        kind = found.foreign.format if found.foreign else OWN_FORMAT
        return CheckpointDiagnosis(path=found.path, format=kind, error=error)


def _no_checkpoint(path: str, opening: Opening, error: CheckpointError) -> CheckpointDiagnosis:
    store = opening.store(from_root(path))
    try:
        listing = store.list("")
    except CheckpointNotFoundError:  # a file: the error says what it is not
        return CheckpointDiagnosis(path=str(store), error=error)
    if not listing:
        raise error
    below = [
        Neighbour(path=item.path, format=item.format, step=item.step, committed=item.committed)
        for item in list_checkpoints(store).checkpoints
    ]
    return CheckpointDiagnosis(path=str(store), neighbours=below, looks_like=looks_like(listing), error=error)


def _checkpoint(
    path: str, found: FoundCheckpoint, manifest: Manifest, storage_options: Mapping[str, Any]
) -> CheckpointDiagnosis:
    info = describe_checkpoint(manifest, path=found.path)
    shown = path if is_plain_path(path) else showable_url(path)  # output is pasted into issues
    parts = find_parts(manifest)
    values = _top_values(manifest)
    step = step_of(manifest, values)
    step = step_in_name(manifest, shown) if step is None else step
    needs = ["storage_options"] if storage_options else []
    arguments = [f"{name}={name}" for name in needs]
    arguments += ["options=bcp.LoadOptions(follow_links=True)"] if manifest.linked_to else []
    return CheckpointDiagnosis(
        path=found.path,
        format=info.format,
        origin=find_origin(found, manifest, found.store.list(found.folder)),
        step=step,
        world_size=world_size_of(manifest, values),
        num_bytes=info.num_bytes,
        num_files=len(manifest.files),
        parts=parts,
        code=[*resume_code(manifest, shown, step), *load_codes(parts, LoadCall(shown, arguments, needs))],
        convert=_convert(shown, manifest),
        left_out=manifest.metadata.get(LEFT_OUT) if manifest.foreign_format else None,
        neighbours=_other_steps(found),
    )


def _top_values(manifest: Manifest) -> dict[str, Any]:
    """Returns the plain values at the top level, among which may be the step and the number of ranks."""
    from bytecheckpoint.adapters.plain.plain_data import decode_plain  # noqa: PLC0415 - it needs torch

    return {fqn: decode_plain(data) for fqn, data in manifest.objects.items() if "." not in fqn}


def _convert(path: str, manifest: Manifest) -> str:
    target = "dcp" if not manifest.foreign_format else "bcp"
    return shlex.join(["bcp", "convert", path, f"{path.rstrip('/')}-{target}", "--to", target])


def _other_steps(found: FoundCheckpoint) -> list[Neighbour]:
    """Returns the other steps of the root, the newest first, those that did not finish included; none for a checkpoint
    of another format, or one that was not found as a step below the path.
    """
    if found.foreign or layout.parse_step(found.folder) is None:
        return []
    committed = set(layout.committed_steps(found.store))
    steps = {step: name for name in found.store.list("") if (step := layout.parse_step(name)) is not None}
    return [
        Neighbour(path=join_name(str(found.store), name), format=OWN_FORMAT, step=step, committed=step in committed)
        for step, name in sorted(steps.items(), reverse=True)
        if name != found.folder
    ]
