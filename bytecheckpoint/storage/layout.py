"""Layout of checkpoints in a store: names, commits, manifests. A manifest alone makes a checkpoint exist."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
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
from bytecheckpoint.runtime.integers import integer_of
from bytecheckpoint.runtime.threads import map_jobs, map_looks
from bytecheckpoint.storage.paths import join_name, path_text, utf8_path
from bytecheckpoint.storage.store import (
    Store,
    SupportsByteLength,
    SupportsInFolders,
    UnconditionalStore,
    listed_lengths,
    one_block,
    read_whole,
)

MANIFEST_NAME = "manifest.bcp"
DATA_FOLDER = "data"
TELEMETRY_FOLDER = "telemetry"
MAX_MANIFEST_BYTES = 1 << 30

_STEP_FOLDER = re.compile(r"\Astep_([0-9]{8,})\Z")
_UNFINISHED = f"is not committed: it holds data but no {MANIFEST_NAME}, so its save did not finish"
_MAX_NAMED = 10
_LOOKS_IN_FLIGHT = 16
_MAX_LOOKS = 1024


def step_folder(step: int) -> str:
    """Returns `step_00001000` for 1000. Raises ValueError below 0."""
    if step < 0:
        raise ValueError(f"a step is a number from 0 on, not {step}")
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step of a folder that `step_folder` named, else None."""
    match = _STEP_FOLDER.match(name)
    step = int(match.group(1)) if match and len(name) < 64 else None
    return step if step is not None and step_folder(step) == name else None


def root_of(path: str | os.PathLike[str], role: object) -> str:
    """Returns the path, or the folder of the role under it. Raises CheckpointMismatchError (conflict), which is a
    ValueError, for a role that is not a folder name, and StorageError as `utf8_path` does.
    """
    root = utf8_path(path_text(path))
    if role is None:
        return root
    if not isinstance(role, str) or not role or role in {".", ".."} or set(role) & set("/\\:\0"):
        what = f"a role is the name of a folder, without slashes or colons, not {role!r:.100}; nothing was changed"
        raise CheckpointMismatchError(what, kind="conflict")
    return utf8_path(join_name(root, role))


def checked_step(step: object) -> int | None:
    """Returns the step as a plain int, and None for None; it may be an integer of numpy or a tensor of one.

    Raises CheckpointMismatchError (conflict), a ValueError, for anything else than an integer from 0 to 2^63 - 1.
    """
    if step is None:
        return None
    number = integer_of(step)
    if number is None or not 0 <= number < 1 << 63:
        what = f"a step is an integer from 0 to 2^63 - 1, or None, not {step!r:.100}; nothing was changed"
        raise CheckpointMismatchError(what, kind="conflict")
    return number


def data_file_name(save_id: str, rank: int, index: int) -> str:
    """Returns the name, inside its checkpoint, of data file number `index` of a rank."""
    return f"{DATA_FOLDER}/{save_id}-{rank:05d}-{index}.safetensors"


def telemetry_name(save_id: str, first_rank: int) -> str:
    """Returns the name, inside its checkpoint, of the telemetry of a block of ranks."""
    return f"{telemetry_prefix(save_id)}{first_rank:05d}.json"


def telemetry_prefix(save_id: str) -> str:
    """Returns the start of the names of a save's telemetry, inside its checkpoint."""
    return f"{TELEMETRY_FOLDER}/{save_id}-"


def recovery_name(save_id: str) -> str:
    """Returns the name, inside its checkpoint, of the marker that an abandoned save is being recovered."""
    return f"{DATA_FOLDER}/{save_id}-recovering"


def committed_steps(store: Store) -> list[int]:
    """Returns the committed steps in ascending order, also where the root is a checkpoint as well."""
    return _committed(store, store.list(""))


def _committed(store: Store, listing: Mapping[str, int | None]) -> list[int]:
    steps = _step_folders(listing)
    return list(compress(steps, _are_steps(store, list(map(step_folder, steps)))))


def _are_steps(store: Store, folders: Sequence[str]) -> list[bool]:
    found = store.in_folders(folders, MANIFEST_NAME) if isinstance(store, SupportsInFolders) else [None] * len(folders)
    unknown = [folder for folder, is_there in zip(folders, found, strict=True) if is_there is None]
    checked = iter(map_jobs(lambda folder: _is_step(store, folder), unknown, num_threads=_LOOKS_IN_FLIGHT))
    return [next(checked) if is_there is None else is_there for is_there in found]


def newest_steps(store: Store) -> Iterator[int]:
    """Yields the committed steps, newest first. Costs one listing, and at most one for each step's folder it looks at.

    Raises CheckpointMismatchError (conflict) if there are any, and the root is a checkpoint as well.
    """
    listing = store.list("")
    for step in steps_below(store, "", listing):
        if has_manifest(listing):
            raise _mixed_root(step, location=str(store))
        yield step


def steps_of_root(store: Store) -> list[int]:
    """Returns the committed steps in ascending order. Raises the errors of `newest_steps`."""
    listing = store.list("")
    steps = _committed(store, listing)
    if steps and has_manifest(listing):
        raise _mixed_root(steps[-1], location=str(store))
    return steps


def steps_below(store: Store, folder: str, listing: Mapping[str, int | None]) -> Iterator[int]:
    """Yields the committed steps in the folder with this listing, newest first. Asks the store about one step at a
    time or, if it can look into many folders at once, about 1, 2, 4, ... up to 1,024 steps at a time.
    """
    steps, num_looks, growth = _step_folders(listing)[::-1], 1, 2 if isinstance(store, SupportsInFolders) else 1
    while steps:
        looked, steps = steps[:num_looks], steps[num_looks:]
        yield from compress(looked, _are_steps(store, [join_name(folder, step_folder(step)) for step in looked]))
        num_looks = min(growth * num_looks, _MAX_LOOKS)


def _mixed_root(newest: int, *, location: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{location} is a checkpoint, and has committed steps below it, the newest {newest}: earlier versions of this "
        "library let both be saved there, and it is not known which of them is meant; nothing was read or changed. "
        f"Say which one: step=None for the checkpoint at the path, step={newest} for that step (on the command line "
        f"--step none, --step {newest}). Then move one of the two to a path of its own",
        kind="conflict",
        path=location,
    )


def _step_folders(listing: Mapping[str, int | None]) -> list[int]:
    steps = (parse_step(name) for name, num_bytes in listing.items() if num_bytes is None)
    return sorted(step for step in steps if step is not None)


def _is_step(store: Store, folder: str) -> bool:
    """Returns True if the folder of a step is a committed checkpoint. For a link that leads out of the root, warns and
    returns False: it must not hide the other steps.
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
    if isinstance(store, SupportsByteLength):
        return store.byte_length(join_name(folder, MANIFEST_NAME)) is not None
    return has_manifest(store.list(folder))


def has_manifest(listing: Mapping[str, int | None]) -> bool:
    """Returns True if the folder with this listing is a committed checkpoint."""
    return listing.get(MANIFEST_NAME) is not None


def find_checkpoint(store: Store, step: int | Literal["latest"] | None, *, location: str) -> str:
    """Returns the folder, inside the store, of a checkpoint: "" is the store's root.

    None means the root itself, "latest" the root if it is a checkpoint, else its newest committed step. `location` is
    the root as messages show it. Raises CheckpointNotFoundError (not_found, not_committed), and for "latest"
    CheckpointMismatchError (conflict) if the root is a checkpoint and has steps.
    """
    if isinstance(step, int):
        folder = step_folder(step)
        if _is_committed(store, folder):
            return folder
        raise _no_step(store, step, location=location)
    listing = store.list("")
    newest = next(steps_below(store, "", listing), None) if step == "latest" else None
    if has_manifest(listing):
        if newest is not None:
            raise _mixed_root(newest, location=location)
        return ""
    if newest is not None:
        return step_folder(newest)
    if MANIFEST_NAME in listing:  # it may be a link to where this process may not look: that is not "no checkpoint"
        read_manifest_bytes(store, "")
    raise _nothing_at_root(store, listing, location=location)


def _no_step(store: Store, step: int, *, location: str) -> CheckpointNotFoundError:
    what, kind = f"there is no step {step} in {location}", "not_found"
    if store.list(step_folder(step)):
        what, kind = f"step {step} in {location} {_UNFINISHED}", "not_committed"
    others = _name_steps(store, store.list(""))
    return CheckpointNotFoundError(f"{what}; {others}", kind=kind, path=location, step=step)


def _nothing_at_root(store: Store, listing: Mapping[str, int | None], *, location: str) -> CheckpointNotFoundError:
    if not listing:
        what = f"there is nothing at {location}: it does not exist, is empty, or has only dead links; check the path"
        if (step := location.rpartition("/")[2]).isdecimal():
            what += f". The folder of step {int(step)} is {step_folder(int(step))}"
        return CheckpointNotFoundError(what, kind="not_found", path=location)
    has_steps = next(steps_below(store, "", listing), None) is not None
    if DATA_FOLDER in listing or (_step_folders(listing) and not has_steps):
        what, kind = f"{location} {_UNFINISHED}", "not_committed"
    else:
        held = and_more(sorted(listing), _MAX_NAMED)
        what, kind = f"{location} is not a checkpoint: it has no {MANIFEST_NAME} (it holds {held})", "not_found"
    return CheckpointNotFoundError(f"{what}; {_name_steps(store, listing)}", kind=kind, path=location)


def _name_steps(store: Store, listing: Mapping[str, int | None]) -> str:
    """Returns a text with the newest committed steps of a root, which may have thousands."""
    newest = list(islice(steps_below(store, "", listing), _MAX_NAMED))
    if not newest:
        return "no step below it is committed: load another path or step, or save again"
    num_older = sum(step < newest[-1] for step in _step_folders(listing)) if len(newest) == _MAX_NAMED else 0
    older = f", and up to {num_older:,} older ones, which `bcp ls` lists" if num_older else ""
    return f"committed, and safe to load with step=..., are, newest first: {', '.join(map(str, newest))}{older}"


def read_manifest(store: Store, folder: str) -> Manifest:
    """Reads the manifest of the checkpoint in a folder of the store.

    Raises the errors of `read_manifest_bytes`, and those of `decode_manifest`, with the path.
    """
    path = join_name(str(store), folder, MANIFEST_NAME)
    return parse_manifest(read_manifest_bytes(store, folder), path=path, check_all=True)


def read_manifest_bytes(store: Store, folder: str) -> bytes:
    """Reads the manifest. Raises CheckpointNotFoundError (not_committed), UnsafeCheckpointError (limits_exceeded)."""
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


def parse_manifest(content: bytes, *, path: str, check_all: bool) -> Manifest:
    """Returns the manifest by `decode_manifest`, or by `open_manifest` unless `check_all`; errors name the path."""
    try:
        return decode_manifest(content) if check_all else open_manifest(content)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error.message}", kind=error.kind, path=path) from error


def check_files(store: Store, folder: str, manifest: Manifest, wanted_file_indices: Iterable[int]) -> None:
    """Checks that the wanted data files exist with their sizes, before anything is read from one.

    Raises CheckpointNotFoundError (missing_file) if any is missing, else CheckpointCorruptError (truncated) if any has
    another size. The message counts both kinds, and names at most ten of each.
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
    """Returns the lengths of objects in a folder, None for a missing one. If the store can, opens each file by name: a
    listing would look at all files, and may be out of date on a network file system. Else lists the folders.
    """
    if isinstance(store, SupportsByteLength):
        paths = [join_name(folder, name) for name in names]
        return map_looks(store.byte_length, paths, num_threads=_LOOKS_IN_FLIGHT)
    return listed_lengths(names, lambda parent: store.list(join_name(folder, parent)))


def commit(store: Store, folder: str, manifest: bytes, *, replace: bool) -> None:
    """Writes the encoded manifest, with `replace` in place of an older one: from then on the checkpoint exists.

    If the store replaces without a condition, the manifest is read back after it was replaced. So when this returns,
    the committed manifest is this one, and the data of the replaced checkpoint may be deleted.

    Raises CheckpointExistsError (exists) if another manifest exists, with `replace` only if it was created meanwhile;
    CheckpointSaveError (storage) if the store reports success and has another manifest; and the errors of
    `Store.write`.
    """
    try:
        store.write(join_name(folder, MANIFEST_NAME), one_block(manifest), replace=replace)
    except CheckpointExistsError as error:
        # A request is retried when its answer is lost, and may then find its own object. A save that finds another's
        # checkpoint removes its own data, so a failed read must not count as that.
        if not _is_manifest(store, folder, manifest):
            if replace:
                raise
            raise exists_error(join_name(str(store), folder)) from error
    if replace and isinstance(store, UnconditionalStore) and not _is_manifest(store, folder, manifest):
        path = join_name(str(store), folder, MANIFEST_NAME)
        raise CheckpointSaveError(
            f"the storage reported that {path} was replaced, but another manifest stands there: either it does not "
            "replace, or another save replaced it meanwhile. Nothing was deleted: let only one save at a time "
            "write to a path, then save again",
            kind="storage",
            path=path,
        )


def _is_manifest(store: Store, folder: str, manifest: bytes) -> bool:
    try:
        return read_manifest_bytes(store, folder) == manifest
    except (CheckpointNotFoundError, CheckpointCorruptError, UnsafeCheckpointError):
        return False


def exists_error(path: str) -> CheckpointExistsError:
    """Makes the error for a path whose checkpoint is not to be replaced."""
    return CheckpointExistsError(
        f"a committed checkpoint stands at {path} and was left as it is: save to another path or step, or replace it "
        "with SaveOptions(overwrite=True)",
        kind="exists",
        path=path,
    )


def data_files_of(store: Store, folder: str, save_id: str) -> list[str]:
    """Returns the names, inside a checkpoint's folder, of a save's data files, and its `recovery_name` if it exists."""
    return _files_of(store, folder, DATA_FOLDER, save_id)


def telemetry_of(store: Store, folder: str, save_id: str) -> list[str]:
    """Returns the names, inside a checkpoint's folder, of the telemetry that a save has written so far."""
    return _files_of(store, folder, TELEMETRY_FOLDER, save_id)


def _files_of(store: Store, folder: str, parent: str, save_id: str) -> list[str]:
    names = store.list(join_name(folder, parent))
    return [f"{parent}/{name}" for name in names if name.startswith(f"{save_id}-")]


def committed_save_id(store: Store, folder: str) -> str:
    """Returns the save id of the checkpoint in a folder; empty if none is committed. Raises the other errors of
    `read_manifest_bytes`, and those of `parse_manifest` without `check_all`.
    """
    try:
        content = read_manifest_bytes(store, folder)
    except CheckpointNotFoundError:
        return ""
    return parse_manifest(content, path=join_name(str(store), folder, MANIFEST_NAME), check_all=False).save_id
