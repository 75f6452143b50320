"""The choice of the checkpoint that a run of torchtitan begins with, made by rank 0 from what lies in its folder, and
the deletion of one that training has left by going back to an earlier step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bytecheckpoint.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolder, NumberedFolders
from bytecheckpoint.manager.retention import delete_one
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import open_store

logger = logging.getLogger("bytecheckpoint")

_METADATA_OF_DCP = ".metadata"


class LoadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to load."""

    path: str = ""
    """Empty for a fresh start."""
    is_initial: bool = False
    model_only: bool = False
    replaceable: list[int] = []
    """Steps that are there and that training reaches again."""


def choose(folders: NumberedFolders, step: int, config: Any, *, assets: str | None) -> LoadChoice:
    """Returns the checkpoint of a step; for -1 the one that was committed last, or in an empty folder the initial one,
    with an empty path if there is none. For -1, skips checkpoints that are damaged or hold weights alone if there is
    another.

    If it returns a checkpoint of `folders`, and unless `config.load_only`, it also calls `folders.begin`, which decides
    what is deleted first, and finishes deletions that were begun.

    `config` has torchtitan's options, `assets` is the folder with the weights of Hugging Face.
    Raises CheckpointNotFoundError for a step that is not there, and CheckpointMismatchError (conflict) where training
    cannot go on from the checkpoints there: it never starts from scratch in a folder with committed checkpoints, nor
    with those of torchtitan's own manager. Also raises the errors of `bytecheckpoint.open` for a damaged checkpoint, if
    its step was given or there is no other, and ValueError for `initial_load_in_hf` without a folder to load from.
    """
    if step != -1:
        named, found = folders.read(step), folders.committed()
        if named is None:
            raise _not_there(folders, step, found)
        return _resume(folders, named, found, read_only=config.load_only)
    found = folders.committed(to_load=True)
    full = [folder for folder in found if not folder.record.model_only]
    if full:
        if full[-1] is not found[-1]:
            logger.warning("%s holds weights alone: training goes on from %s", found[-1].path, full[-1].path)
        return _resume(folders, full[-1], found, read_only=config.load_only)
    seeds = [folder for folder in found if folder.number == 0]
    if seeds:
        return _resume(folders, seeds[0], found, read_only=config.load_only)
    _refuse_others(folders, found)
    return _initial(config, assets, root=folders.root)


def delete_left(folders: NumberedFolders, step: int, *, storage_options: Mapping[str, Any] | None) -> None:
    """Deletes the checkpoint of a step, if there is one. Of a damaged one only the manifest goes, also if it is pinned:
    its other files are garbage. Rank 0 calls it. Raises CheckpointExistsError (exists) for another one that is pinned
    or leased.
    """
    path, folder = folders.path_of(step), folders.find(step)
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    if step in folders.damaged:
        store.delete(layout.MANIFEST_NAME)
    elif folder is not None:
        why = delete_one(store, "", save_id=folder.save_id, now=clock_of(store) or time.time(), force=False)
        if why:
            what = f"{store} cannot be replaced by the weights of this run, which are in {store}.weights: {why}"
            raise CheckpointExistsError(what, kind="exists", path=str(store), step=step)


def _resume(
    folders: NumberedFolders, folder: NumberedFolder, found: Sequence[NumberedFolder], *, read_only: bool
) -> LoadChoice:
    """Returns the choice of a committed checkpoint, from which `folders` begin unless `read_only`. Raises
    CheckpointMismatchError (conflict) if it holds weights alone and is not that of step 0.
    """
    is_seed = folder.number == 0
    if folder.record.model_only and not is_seed:
        raise CheckpointMismatchError(
            f"{folder.path} holds weights alone, so training cannot go on from it; nothing was loaded: give its path "
            "as checkpoint.initial_load_path to a run with another folder",
            kind="conflict",
            path=folder.path,
        )
    if not read_only:
        folders.begin(resumed=folder.path)
    there = (*(each.number for each in found), *folders.damaged)
    steps = sorted(number for number in there if number > folder.number)
    return LoadChoice(path=folder.path, model_only=is_seed, replaceable=steps)


def _refuse_others(folders: NumberedFolders, found: Sequence[NumberedFolder]) -> None:
    """Raises CheckpointMismatchError (conflict) if checkpoints were `found`, none of which a run can go on from, or
    if the folder has some of torchtitan's own manager.
    """
    if found:
        raise CheckpointMismatchError(
            f"{folders.root} has checkpoints with weights alone, the newest {found[-1].path}; nothing was loaded: to "
            "train from these weights, give this path as checkpoint.initial_load_path and take another folder",
            kind="conflict",
            path=folders.root,
        )
    of_dcp = [path for path in map(folders.path_of, folders.numbers()) if _METADATA_OF_DCP in folders.names_in(path)]
    if of_dcp:
        raise CheckpointMismatchError(
            f"{folders.root} has checkpoints of torchtitan's own manager, the newest {of_dcp[-1]}, and none of this "
            "library; nothing was loaded: give that path as checkpoint.initial_load_path and take another folder",
            kind="conflict",
            path=folders.root,
        )


def _initial(config: Any, assets: str | None, *, root: str) -> LoadChoice:
    path = config.initial_load_path
    if path is None and config.initial_load_in_hf:
        path = assets
        if not path:
            raise ValueError("checkpoint.initial_load_in_hf needs initial_load_path, or hf_assets_path")
    if path is None:
        logger.info("no checkpoint in %s, and no initial_load_path: a fresh start", root)
        return LoadChoice()
    return LoadChoice(path=path, is_initial=True, model_only=config.initial_load_model_only)


def _not_there(folders: NumberedFolders, step: int, found: Sequence[NumberedFolder]) -> CheckpointNotFoundError:
    steps = [folder.number for folder in found] or "none"
    return CheckpointNotFoundError(
        f"checkpoint.load_step={step}: no committed checkpoint of this library is in {folders.path_of(step)}; nothing "
        f"was loaded. Committed are {steps}: give one of these, or -1 for the newest",
        kind="not_found",
        path=folders.root,
        step=step,
    )
