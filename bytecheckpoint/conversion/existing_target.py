"""Finds what exists at a target: nothing is written over unless that was asked for, and nothing of another format ever
is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

from bytecheckpoint.conversion.dcp import METADATA_NAME, SUFFIX
from bytecheckpoint.conversion.huggingface import INDEX_NAME, SOLE_NAME
from bytecheckpoint.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.formats.detect import find_folder, find_step
from bytecheckpoint.formats.find_checkpoint import Opening, from_root, split_path
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.safetensors_files import files_of_index
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import TargetFormat
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import real_location
from bytecheckpoint.storage.paths import check_file_name, join_name
from bytecheckpoint.storage.store import Store, UnconditionalStore

_FORMATS = {"bcp": OWN_FORMAT, "hf": "safetensors", "dcp": "torch.distributed.checkpoint", "torch": "torch.save"}
_HF_SHARD = re.compile(r"\Amodel-(?:[0-9a-f]{8}-)?[0-9]{5}-of-[0-9]{5}\.safetensors\Z")


class TargetPlace(NamedTuple):
    """The place that a conversion writes to."""

    store: Store
    name: str
    """Name of the file, for a target that is one; else ""."""
    above: Store | None = None
    """The folder that contains the target, if the target has the name of a step's folder."""

    @property
    def path(self) -> str:
        return join_name(str(self.store), self.name)


class ExistingTarget(NamedTuple):
    """The files at a target, as far as a conversion minds them."""

    is_there: bool
    """True if there is a checkpoint of the target's format, or parts that may be one."""
    is_in_the_way: bool
    """True if there are files with names that the target would give to its own files."""
    stale: Sequence[str]
    """Files to remove once the target exists, in this order."""


def open_target(path: str, to: TargetFormat, opening: Opening) -> TargetPlace:
    """Returns the place of a target. Raises the errors of `open_store`, CheckpointMismatchError (conflict) if the path
    cannot be the name of a file, and UnsafeCheckpointError (path_escape) for a file name that no store writes.
    """
    parent, name = split_path(from_root(path))
    if to != "torch":
        return TargetPlace(opening.store(path), "", None if layout.parse_step(name) is None else opening.store(parent))
    if not name or path.endswith("/"):
        raise CheckpointMismatchError(
            f"{opening.store(path)} names no file, and this target is one; nothing was written: give it a name, such "
            "as model.pt",
            kind="conflict",
        )
    place = TargetPlace(opening.store(parent), name)
    check_file_name(place.path, name)
    return place


def find_existing(place: TargetPlace, to: TargetFormat, *, overwrite: bool, beside: bool) -> ExistingTarget:
    """Returns what is at a target. Raises CheckpointExistsError (exists) for a checkpoint of the target's format
    without `overwrite`, for one of another format without `beside`, and for a place where the target would hide others
    or be hidden; StorageError (unsupported) if the store cannot replace what is there.
    """
    try:
        listing = place.store.list("")
    except CheckpointNotFoundError as error:
        raise _exists(
            place, f"{place.store} is a file, and a folder is to be written there", "give another path"
        ) from error
    if to == "torch":
        return _replaceable(place.store, _file(place, listing, overwrite=overwrite))
    _refuse_root_of_steps(place, listing)
    if place.above is not None and layout.has_manifest(place.above.list("")):
        what = f"{place.above} is a checkpoint, and {place.path} would be a step below it, which would hide it"
        raise _exists(place, what, "give another path")
    foreign = None if layout.has_manifest(listing) else find_folder(place.store, "", listing)
    other = OWN_FORMAT if layout.has_manifest(listing) else foreign and foreign.format
    if other is not None and other != _FORMATS[to] and not beside:
        what = f"{place.path} holds a checkpoint of another format ({other})"
        raise _exists(place, what, "give another path: that one is never replaced")
    if to == "bcp":  # its files have new names in each save
        existing = ExistingTarget(layout.has_manifest(listing), is_in_the_way=False, stale=())
    else:
        existing = _huggingface(place.store, listing) if to == "hf" else _dcp(listing)
    if existing.is_there and not overwrite:
        what = f"{place.path} holds a checkpoint, or what a conversion that did not finish has left there"
        raise _exists(place, what, "give another path, or --overwrite to replace it")
    return _replaceable(place.store, existing)


def _replaceable(store: Store, existing: ExistingTarget) -> ExistingTarget:
    """Returns `existing`. Raises StorageError (unsupported) if the store cannot replace it in one step."""
    if existing.is_there and isinstance(store, UnconditionalStore):
        store.check_replaceable()
    return existing


def _refuse_root_of_steps(place: TargetPlace, listing: Mapping[str, int | None]) -> None:
    """Raises CheckpointExistsError (exists) if the folder holds steps: a checkpoint beside them would hide them, or
    never be found.
    """
    steps = sorted(name for name, size in listing.items() if size is None and layout.parse_step(name) is not None)
    if not steps and not layout.has_manifest(listing) and not find_folder(place.store, "", listing):
        newest = find_step(place.store, None, listing)
        steps = [] if newest is None else [newest.folder]
    if steps:
        what = f"{place.path} holds steps, as {steps[-1]}, and a checkpoint beside them would hide them, or be hidden"
        raise _exists(place, what, f"give another path, or the folder of a step, as {join_name(place.path, steps[-1])}")


def refuse_own_files(place: TargetPlace, existing: ExistingTarget, names: Iterable[str], source: Source) -> None:
    """Raises CheckpointExistsError (exists) if a file that would be replaced belongs to the source."""
    source_names = sorted(files_of_source(place, {*existing.stale, *names}, source))
    if existing.is_there and source_names:
        what = f"{join_name(str(place.store), source_names[0])} is a file of the source, and would be replaced"
        raise _exists(place, what, "give another path: a source is never written over")


def files_of_source(place: TargetPlace, names: Iterable[str], source: Source) -> set[str]:
    """Returns those of `names`, of files in the target's folder, that are files of the source, even by another path."""
    used = {real_location(source.store, join_name(source.folder, file.name)) for file in source.manifest.files}
    return {name for name in names if real_location(place.store, name) in used}


def stale_after_link(place: TargetPlace, replaced: Sequence[str], source: Source) -> list[str]:
    """Returns the files of a replaced checkpoint that a link to the source does not need."""
    # Hazard: one folder may have two paths or endpoints that are not seen to be the same, as where it is mounted twice.
    # The names of data files have the id of their save, so that a name of the source's may be a file of the source.
    of_source = {file.name.rpartition("/")[2] for file in source.manifest.files}
    others = [name for name in replaced if name.rpartition("/")[2] not in of_source]
    kept = files_of_source(place, others, source)
    return [name for name in others if name not in kept]


def _file(place: TargetPlace, listing: Mapping[str, int | None], *, overwrite: bool) -> ExistingTarget:
    if isinstance(place.store, LocalStore) and _is_special(place.path):
        # Hazard: a write would put a file in the place of a device, as /dev/null.
        what = f"{place.path} is there already, and neither a file nor a folder"
        raise _exists(place, what, "give the name of a file")
    if place.name in listing and listing[place.name] is None:
        raise _exists(place, f"{place.path} is a folder, and a file is to be written there", "give the name of a file")
    if place.name in listing and not overwrite:
        raise _exists(place, f"{place.path} is there already", "give another path, or --overwrite to replace it")
    return ExistingTarget(place.name in listing, is_in_the_way=False, stale=())


def _is_special(path: str) -> bool:
    """Returns True for a device, a pipe or a socket."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:  # there is nothing, or the write will tell why not
        return False
    return not (S_ISREG(mode) or S_ISDIR(mode))


def _huggingface(store: Store, listing: Mapping[str, int | None]) -> ExistingTarget:
    # The files that list the others go first, or a reader might take what is left for the whole.
    first = [name for name in (SOLE_NAME, INDEX_NAME) if listing.get(name) is not None]
    indexed = files_of_index(SourceFolder(store, "", listing), INDEX_NAME)
    # Others that begin with "model" belong to the user: other weights, adapters.
    names = sorted(
        name for name, size in listing.items() if size is not None and (name in indexed or _HF_SHARD.match(name))
    )
    stale = [*first, *(name for name in names if name not in first)]
    return ExistingTarget(bool(stale), bool(stale), stale)


def _dcp(listing: Mapping[str, int | None]) -> ExistingTarget:
    names = sorted(name for name in listing if name.endswith(SUFFIX))
    is_there = listing.get(METADATA_NAME) is not None
    # Without metadata there is no checkpoint, but perhaps a save that is under way.
    return ExistingTarget(is_there, bool(names), names if is_there else ())


def _exists(place: TargetPlace, what: str, advice: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{what}; nothing was written: {advice}", kind="exists", path=place.path)
