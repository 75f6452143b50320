"""Paths of checkpoints as Lightning's callbacks hold them: the checkpoint that a path stands for, and the paths in a
callback's state that can still be opened. Functions that look at the storage are called on rank 0, and their results
sent to the other ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from bytecheckpoint import api
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_plain_path, open_store
from bytecheckpoint.storage.paths import temporary_name
from bytecheckpoint.storage.store import one_block

logger = logging.getLogger("bytecheckpoint")

_CHOSEN_BY_LIGHTNING = (None, "last", "hpc")
GLOBAL_STEP = "global_step"
"""Name of the step in the metadata of a checkpoint."""


class ChosenCheckpoint(NamedTuple):
    """The checkpoint to load."""

    path: str
    is_own: bool
    """False for a file or folder that Lightning itself has written."""
    names: list[str]
    """Top-level names of its state; empty if it is Lightning's, as is `metadata`."""
    metadata: dict[str, Any]


def find_checkpoint(path: str, storage_options: Mapping[str, Any] | None, *, is_chosen: bool) -> ChosenCheckpoint:
    """Returns the checkpoint at a path. Where Lightning has chosen the path and nothing was committed there, the
    committed one beside it with the highest global step is taken, with a warning; a damaged one is passed over.

    Raises CheckpointNotFoundError if nothing is committed there, or beside it, and what `bytecheckpoint.open` raises
    for a damaged checkpoint at the path itself.
    """
    if is_committed(path, storage_options):
        return _opened(path, storage_options)
    if _is_lightnings(path):
        return ChosenCheckpoint(path, False, [], {})
    newest = _newest_beside(path, storage_options) if is_chosen else None
    if newest is None:
        return _opened(path, storage_options)  # raises, and says what is missing
    logger.warning(
        "%s was never committed: %s is the newest checkpoint beside it, and is loaded instead",
        showable_url(path),
        showable_url(newest),
    )
    return _opened(newest, storage_options)


def _opened(path: str, storage_options: Mapping[str, Any] | None) -> ChosenCheckpoint:
    found = api.open(path, step=None, storage_options=storage_options)
    fqns = (*found, *found.manifest.objects, *found.manifest.rank_objects)
    return ChosenCheckpoint(path, True, sorted({fqn.partition(".")[0] for fqn in fqns}), dict(found.metadata))


def refuse_weights_only(found: ChosenCheckpoint) -> None:
    """Raises CheckpointMismatchError (missing_key) for a checkpoint of weights alone."""
    if found.metadata.get("weights_only"):
        raise CheckpointMismatchError(
            f"{found.path} holds the model alone (save_weights_only), and training cannot go on from it; nothing was "
            'changed: load it with bcp.load(path, {"model": model}), and call fit without ckpt_path',
            kind="missing_key",
            path=found.path,
        )


def is_committed(path: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Returns True if a checkpoint of this library is committed at the path."""
    if is_plain_path(path) and os.path.isfile(path):  # noqa: PTH113 - one of Lightning's own
        return False
    store = open_store(path, storage_options=storage_options, writer_threads=1)
    return layout.has_manifest(store.list(""))


def _is_lightnings(path: str) -> bool:
    """Returns True for a local file, taken for one of torch.save, or a local folder of torch.distributed.checkpoint."""
    if not is_plain_path(path):
        return False
    folder_marks = (os.path.join(path, name) for name in (".metadata", "meta.pt"))  # noqa: PTH118
    return os.path.isfile(path) or any(map(os.path.isfile, folder_marks))  # noqa: PTH113


def _newest_beside(path: str, storage_options: Mapping[str, Any] | None) -> str | None:
    folder, separator, _ = path.rstrip("/").rpartition("/")
    store = open_store(folder, storage_options=storage_options, writer_threads=1)
    committed: list[tuple[int, str]] = []
    for name, num_bytes in store.list("").items():
        if num_bytes is not None or not layout.has_manifest(store.list(name)):
            continue
        try:
            metadata = layout.read_manifest(store, name).metadata
        except (CheckpointCorruptError, UnsafeCheckpointError) as error:
            logger.warning("%s is passed over: %s", showable_url(folder + separator + name), error.message)
            continue
        committed.append((int(metadata.get(GLOBAL_STEP, -1)), name))
    return folder + separator + max(committed)[1] if committed else None


def chosen_by_lightning(trainer: Trainer) -> bool:
    """Returns True if the user gave no path of a checkpoint, but `ckpt_path="last"` or `"hpc"`, or none at all.

    The Trainer does not keep its `ckpt_path` argument, and strategies only get the path that it made of it: so this
    reads the argument from the call stack. If the call is in another process, this returns False, and the load of a
    path that was never committed raises.
    """
    if trainer._checkpoint_connector._user_managed:  # by `trainer.ckpt_path = ...`
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        values = frame.f_locals
        if values.get("self") is trainer and frame.f_code.co_name in {"fit", "validate", "test", "predict"}:
            return values.get("ckpt_path") in _CHOSEN_BY_LIGHTNING
        frame = frame.f_back
    return False


def lasting_paths(
    trainer: Trainer, callbacks: Mapping[str, Any], path: str, storage_options: Mapping[str, Any] | None
) -> list[str]:
    """Returns the paths in the states of callbacks and the path that was loaded, sorted, without those at which there
    is no checkpoint. Called on rank 0. A path whose storage does not answer is among them, with a warning.
    """
    held = {path}
    for callback in _model_checkpoints(trainer):
        state = callbacks.get(callback.state_key, {})
        named = [state.get(name) for name in ("best_model_path", "kth_best_model_path", "last_model_path")]
        held.update(map(str, filter(None, [*named, *state.get("best_k_models", {})])))
    return [each for each in sorted(held) if _may_open(each, storage_options)]


def _may_open(path: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Returns True if there is a checkpoint, or if the storage does not answer."""
    try:
        return is_committed(path, storage_options) or _is_lightnings(path)
    except StorageError as error:  # it may be there: dropped, it would be neither the best nor ever removed
        logger.warning("the callbacks keep %s, which may be gone: %s", showable_url(path), error.message)
        return True
    except CheckpointError:
        return False


def drop_gone_paths(trainer: Trainer, callbacks: dict[str, Any], loaded: str, lasting: list[str]) -> None:
    """Removes paths that are not in `lasting` from the states of callbacks, in place. If `loaded` has the name of a
    callback's last checkpoint, sets `last_model_path` of the state to it: the state may be that of another path, of
    which `loaded` is a copy.
    """
    for callback in _model_checkpoints(trainer):
        state = callbacks.get(callback.state_key)
        if not isinstance(state, dict) or "best_k_models" not in state:
            continue
        scores = {path: score for path, score in state["best_k_models"].items() if path in lasting}
        if scores != state["best_k_models"]:
            _rank_again(callback, state, scores)
        for name in ("best_model_path", "last_model_path"):
            if state.get(name) and state[name] not in lasting:
                state[name] = ""
        folder, _, last = loaded.rpartition("/")
        is_last = last.startswith(callback.CHECKPOINT_NAME_LAST) and last.endswith(callback.FILE_EXTENSION)
        if is_last and callback.save_last and folder == str(state.get("dirpath")):
            state["last_model_path"] = loaded


def _rank_again(callback: ModelCheckpoint, state: dict[str, Any], scores: dict[str, Any]) -> None:
    """Puts `scores`, those of the checkpoints that still exist, into a state, with the best and the worst of them."""
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    state["best_k_models"] = scores
    if state.get("best_model_path") not in scores:
        state["best_model_path"] = best(scores, key=scores.__getitem__) if scores else ""
        state["best_model_score"] = scores.get(state["best_model_path"])
    is_full = bool(scores) and len(scores) == callback.save_top_k
    state["kth_best_model_path"] = worst(scores, key=scores.__getitem__) if is_full else ""
    unbounded = torch.tensor(float("inf" if callback.mode == "min" else "-inf"))
    state["kth_value"] = scores[state["kth_best_model_path"]] if is_full else unbounded


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def take_place(trainer: Trainer, path: str, storage_options: Mapping[str, Any] | None) -> tuple[str, str]:
    """Creates the folder of a save, or a placeholder object below a URL, before the save begins: a callback links to
    the path, and another callback takes the same path while nothing is there. Removes a link at the path, unless a copy
    is to take its place.

    Returns the path of a checkpoint to copy there in place of a save, and the name of the placeholder, to remove after
    the commit; each is an empty text if there is none.
    """
    source = _saved_just_before(trainer, path)
    if not is_plain_path(path):
        return source, _placeholder(trainer, path, storage_options)
    if not source and os.path.islink(path):  # noqa: PTH114
        os.unlink(path)  # noqa: PTH108 - else the save would replace what it points to
    with suppress(OSError):  # the save raises it
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    return source, ""


def _placeholder(trainer: Trainer, url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Creates an object below the URL, because object stores have no empty folders, and returns its name; an empty
    text, with a warning, if it cannot be created. `bcp gc` finds it if a killed job leaves it.
    """
    name = temporary_name("placeholder")
    for callback in _model_checkpoints(trainer):
        callback._fs.invalidate_cache()  # listings from before, in which the callback looks for the path
    try:
        open_store(url, storage_options=storage_options, writer_threads=1).write(name, one_block(b"\n"), replace=False)
    except CheckpointError as error:  # a save that comes through nevertheless is not to fail for it
        logger.warning("another callback may take the path %s as well: %s", showable_url(url), error.message)
        return ""
    return name


def _saved_just_before(trainer: Trainer, path: str) -> str:
    """Returns the path at which a ModelCheckpoint has saved this very state, if `path` is that of its last checkpoint;
    else an empty text. Between the two saves no other code runs.
    """
    for callback in _model_checkpoints(trainer):
        is_same = callback._last_global_step_saved == trainer.global_step
        if callback.last_model_path == path and is_same and callback._last_checkpoint_saved != path:
            return str(callback._last_checkpoint_saved)
    return ""
