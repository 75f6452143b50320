"""Names inside a checkpoint, and which checkpoints there are. A manifest makes a checkpoint exist: folder names, time
stamps and data files say nothing. It knows no backend.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Literal

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
    and_more,
)
from bytecheckpoint.manifest import Manifest, decode_manifest, open_manifest
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import BlindStore, Block, LooksByName, Store, read_whole

MANIFEST_NAME = "manifest.bcp"
DATA_FOLDER = "data"
TELEMETRY_FOLDER = "telemetry"
MAX_MANIFEST_BYTES = 1 << 30

_STEP_FOLDER = re.compile(r"\Astep_([0-9]{8,})\Z")
_MAX_NAMED = 10
_LOOKS_IN_FLIGHT = 16


def step_folder(step: int) -> str:
    """`step_00001000` for 1000; steps are 0 and above."""
    if step < 0:
        raise ValueError(f"a step is a number from 0 on, not {step}")
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a folder that `step_folder` named, else None."""
    match = _STEP_FOLDER.match(name)
    step = int(match.group(1)) if match and len(name) < 64 else None
    return step if step is not None and step_folder(step) == name else None


def data_file_name(save_id: str, rank: int, index: int) -> str:
    """The name, inside its checkpoint, of the file number `index` that a rank writes in a save."""
    return f"{DATA_FOLDER}/{save_id}-{rank:05d}-{index}.safetensors"


def telemetry_name(save_id: str, rank: int) -> str:
    """The name, inside its checkpoint, of what a rank tells about how a save went."""
    return f"{telemetry_prefix(save_id)}{rank:05d}.json"


def telemetry_prefix(save_id: str) -> str:
    """What the names of all that the ranks of a save tell about it begin with, inside their checkpoint."""
    return f"{TELEMETRY_FOLDER}/{save_id}-"


def recovery_name(save_id: str) -> str:
    """The name, inside its checkpoint, of what says that a save that looks dead is being finished."""
    return f"{DATA_FOLDER}/{save_id}-recovering"


def committed_steps(store: Store, folder: str = "") -> list[int]:
    """The steps whose folders hold a manifest, rising."""
    return _committed(store, folder, store.list(folder))


def _committed(store: Store, folder: str, listing: Mapping[str, int | None]) -> list[int]:
    steps = _step_folders(listing)
    with ThreadPoolExecutor(_LOOKS_IN_FLIGHT) as pool:
        committed = list(pool.map(lambda step: _is_step(store, join_name(folder, step_folder(step))), steps))
    return [step for step, is_committed in zip(steps, committed, strict=True) if is_committed]


def latest_step(store: Store) -> int | None:
    """The highest committed step: one listing, and one for each newer folder that turns out not to be committed.

    Raises CheckpointMismatchError (conflict) where a checkpoint stands beside steps.
    """
    listing = store.list("")
    newest = newest_below(store, "", listing)
    if newest is not None and has_manifest(listing):
        raise _mixed_root(newest, location=str(store))
    return newest


def steps_of_root(store: Store) -> list[int]:
    """The committed steps, rising. Raises what `latest_step` raises."""
    listing = store.list("")
    steps = _committed(store, "", listing)
    if steps and has_manifest(listing):
        raise _mixed_root(steps[-1], location=str(store))
    return steps


def newest_below(store: Store, folder: str, listing: Mapping[str, int | None]) -> int | None:
    """The highest committed step in the folder with this listing."""
    steps = reversed(_step_folders(listing))
    return next((step for step in steps if _is_step(store, join_name(folder, step_folder(step)))), None)


def _mixed_root(newest: int, *, location: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{location} is a checkpoint, and has committed steps below it, the newest {newest}: earlier versions of this "
        "library let both be saved there, and which of them is meant cannot be known; nothing was read or changed. "
        f"Say which one: step=None for the checkpoint at the path, step={newest} for that step (on the command line "
        f"--step none, --step {newest}). Then move one of the two to a path of its own",
        kind="conflict",
        path=location,
    )


def _step_folders(listing: Mapping[str, int | None]) -> list[int]:
    steps = (parse_step(name) for name, num_bytes in listing.items() if num_bytes is None)
    return sorted(step for step in steps if step is not None)


def _is_step(store: Store, folder: str) -> bool:
    """Tells whether the folder of a step is a committed checkpoint. A link that leads out of the root is left out, with
    a warning: it must not hide the other steps.
    """
    try:
        return _is_committed(store, folder)
    except UnsafeCheckpointError as error:
        path = join_name(str(store), folder)
        warnings.warn(
            f"{path} is left out of the steps: {error.message}. To load it, give the path that the link leads to",
            stacklevel=2,
        )
        return False


def _is_committed(store: Store, folder: str) -> bool:
    if isinstance(store, LooksByName):
        return store.byte_length(join_name(folder, MANIFEST_NAME)) is not None
    return has_manifest(store.list(folder))


def has_manifest(listing: Mapping[str, int | None]) -> bool:
    """Whether the folder with this listing is a committed checkpoint."""
    return listing.get(MANIFEST_NAME) is not None


def find_checkpoint(store: Store, step: int | Literal["latest"] | None, *, location: str) -> str:
    """The folder, inside the store, of the checkpoint that is asked for: "" is the store's root.

    None means the root itself, "latest" the root if it is a checkpoint, else its newest committed step. `location` is
    the root as messages show it. Raises CheckpointNotFoundError (not_found, not_committed), and for "latest" where a
    checkpoint stands beside steps CheckpointMismatchError (conflict).
    """
    if isinstance(step, int):
        return _find_step(store, step, location=location)
    listing = store.list("")
    newest = newest_below(store, "", listing) if step == "latest" else None
    if has_manifest(listing):
        if newest is not None:
            raise _mixed_root(newest, location=location)
        return ""
    if newest is not None:
        return step_folder(newest)
    raise _nothing_at_root(store, listing, location=location)


def _find_step(store: Store, step: int, *, location: str) -> str:
    folder = step_folder(step)
    if _is_committed(store, folder):
        return folder
    listing = store.list(folder)
    others = _name_steps(committed_steps(store))
    if listing:
        raise CheckpointNotFoundError(
            f"step {step} in {location} is not committed: it holds data but no {MANIFEST_NAME}, so its save did not "
            f"finish; {others}",
            kind="not_committed",
            path=location,
            step=step,
        )
    raise CheckpointNotFoundError(
        f"there is no step {step} in {location}; {others}", kind="not_found", path=location, step=step
    )


def _nothing_at_root(store: Store, listing: Mapping[str, int | None], *, location: str) -> CheckpointNotFoundError:
    if not listing:
        return CheckpointNotFoundError(
            f"there is nothing at {location}: it does not exist, or is empty; check the path",
            kind="not_found",
            path=location,
        )
    steps = committed_steps(store)
    if DATA_FOLDER in listing or (_step_folders(listing) and not steps):
        return CheckpointNotFoundError(
            f"{location} is not committed: it holds data but no {MANIFEST_NAME}, so its save did not finish; "
            f"{_name_steps(steps)}",
            kind="not_committed",
            path=location,
        )
    return CheckpointNotFoundError(
        f"{location} is no checkpoint: it has no {MANIFEST_NAME} (it holds {and_more(sorted(listing), _MAX_NAMED)}); "
        f"{_name_steps(steps)}",
        kind="not_found",
        path=location,
    )


def _name_steps(steps: list[int]) -> str:
    if not steps:
        return "no step there is committed: load from another path, or save again"
    shown = and_more([str(step) for step in reversed(steps)], _MAX_NAMED)
    return f"committed, and safe to load with step=..., are, newest first: {shown}"


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of the checkpoint in a folder of the store.

    Raises CheckpointNotFoundError (not_committed) and what `decode_manifest` raises, with the path.
    """
    path = join_name(str(store), folder, MANIFEST_NAME)
    return parse_manifest(read_manifest_bytes(store, folder), path=path, whole=True)


def read_manifest_bytes(store: Store, folder: str) -> bytes:
    """The manifest file, not yet decoded: one rank reads it for all."""
    name = join_name(folder, MANIFEST_NAME)
    path = join_name(str(store), name)
    try:
        return read_whole(store, name, max_bytes=MAX_MANIFEST_BYTES)
    except CheckpointNotFoundError as error:
        if error.kind != "missing_file":
            raise
        raise CheckpointNotFoundError(
            f"there is no {path}, so no checkpoint is committed there", kind="not_committed", path=path
        ) from error


def parse_manifest(content: bytes, *, path: str, whole: bool) -> Manifest:
    """`decode_manifest`, or `open_manifest` where not the whole is to be checked, with the path in its errors."""
    try:
        return decode_manifest(content) if whole else open_manifest(content)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error.message}", kind=error.kind, path=path) from error


def check_files(store: Store, folder: str, manifest: Manifest, wanted_file_indices: Iterable[int]) -> None:
    """Makes sure that the wanted data files are there with their sizes, before anything is read from one.

    Raises CheckpointNotFoundError (missing_file) or CheckpointCorruptError (truncated), which name all that are wrong.
    """
    wanted = [manifest.files[index] for index in sorted(set(wanted_file_indices))]
    missing, wrong = [], []
    for file, found_bytes in zip(wanted, _lengths(store, folder, [file.name for file in wanted]), strict=True):
        if found_bytes is None:
            missing.append(file.name)
        elif found_bytes != file.byte_length:
            wrong.append(f"{file.name} ({found_bytes} bytes, {file.byte_length} expected)")
    path = join_name(str(store), folder)
    if missing:
        also = f"; of the wrong size: {and_more(wrong, _MAX_NAMED)}" if wrong else ""
        raise CheckpointNotFoundError(
            f"{path} misses {len(missing)} of {len(wanted)} data files: {and_more(missing, _MAX_NAMED)}{also}; nothing "
            "was loaded: restore them or take another step",
            kind="missing_file",
            path=path,
        )
    if wrong:
        raise CheckpointCorruptError(
            f"{path} has {len(wrong)} of {len(wanted)} data files of the wrong size: {and_more(wrong, _MAX_NAMED)}; "
            "nothing was loaded: restore them or take another step",
            kind="truncated",
            path=path,
        )


def _lengths(store: Store, folder: str, names: Sequence[str]) -> list[int | None]:
    """The lengths of objects in a folder. Files are looked at by name: a listing would cost a look at all that is
    there, and on a network file system may be old.
    """
    if isinstance(store, LooksByName):
        paths = [join_name(folder, name) for name in names]
        if len(paths) <= _LOOKS_IN_FLIGHT:
            return [store.byte_length(path) for path in paths]
        with ThreadPoolExecutor(_LOOKS_IN_FLIGHT) as pool:
            return list(pool.map(store.byte_length, paths))
    parents = {name.rpartition("/")[0] for name in names}
    listings = {parent: store.list(join_name(folder, parent)) for parent in parents}
    return [listings[parent].get(last) for parent, _, last in (name.rpartition("/") for name in names)]


def commit(store: Store, folder: str, manifest: bytes, *, replace: bool) -> None:
    """Creates the (encoded) manifest: from here on the checkpoint exists.

    With `replace`, a store that replaces without a condition is read back: when this returns, the manifest that stands
    there is this one, and what it replaced may be deleted.

    Raises CheckpointExistsError (exists) where another one stands, with `replace` only where it came meanwhile;
    CheckpointSaveError (storage) where the store reports success and something else stands; and what `Store.write`
    raises.
    """
    content = memoryview(manifest)
    block = Block(0, content.nbytes, lambda: nullcontext(content))
    try:
        store.write(join_name(folder, MANIFEST_NAME), [block], replace=replace)
    except CheckpointExistsError as error:
        # A request is tried again when its answer is lost, and may then find what it has written itself. Whoever hears
        # of another's checkpoint removes the data of his own, so a look that fails must not pass for that.
        if not _stands(store, folder, manifest):
            if replace:
                raise
            raise exists_error(join_name(str(store), folder)) from error
    if replace and isinstance(store, BlindStore) and not _stands(store, folder, manifest):
        path = join_name(str(store), folder, MANIFEST_NAME)
        raise CheckpointSaveError(
            f"the storage reported that {path} was replaced, but another manifest stands there: either it does not "
            "replace, or another save was faster. Nothing was deleted: let only one save at a time write to a path, "
            "then save again",
            kind="storage",
            path=path,
        )


def _stands(store: Store, folder: str, manifest: bytes) -> bool:
    try:
        return read_manifest_bytes(store, folder) == manifest
    except (CheckpointNotFoundError, CheckpointCorruptError, UnsafeCheckpointError):
        return False


def exists_error(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"a committed checkpoint stands at {path} and was left as it is: save to another path or step, or replace it "
        "with SaveOptions(overwrite=True)",
        kind="exists",
        path=path,
    )


def data_files_of(store: Store, folder: str, save_id: str) -> list[str]:
    """The names, inside a checkpoint's folder, of the data files that one save has written so far."""
    return _files_of(store, folder, DATA_FOLDER, save_id)


def telemetry_of(store: Store, folder: str, save_id: str) -> list[str]:
    """The names, inside a checkpoint's folder, of what the ranks of one save have told so far."""
    return _files_of(store, folder, TELEMETRY_FOLDER, save_id)


def _files_of(store: Store, folder: str, parent: str, save_id: str) -> list[str]:
    names = store.list(join_name(folder, parent))
    return [f"{parent}/{name}" for name in names if name.startswith(f"{save_id}-")]


def committed_save_id(store: Store, folder: str) -> str:
    """Of the checkpoint in a folder; empty where none is committed. Raises what `read_manifest` raises else,
    as far as the outside of the manifest shows it.
    """
    path = join_name(str(store), folder, MANIFEST_NAME)
    try:
        return parse_manifest(read_manifest_bytes(store, folder), path=path, whole=False).save_id
    except CheckpointNotFoundError:
        return ""
