"""The saves of one role of a verl job, such as `global_step_100/actor`: one after the other, the tracker file once the
step is whole, and the deletion of old ones.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bytecheckpoint import api
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.integrations.shared.agreed_folders import on_rank_0, record_together
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.numbered_folders import FolderRecord, NumberedFolder, NumberedFolders
from bytecheckpoint.integrations.shared.text_file import write_text
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.threads import shared_threads
from bytecheckpoint.saving.handle import SaveHandle, has_failed
from bytecheckpoint.storage.layout import MANIFEST_NAME

logger = logging.getLogger("bytecheckpoint")

TRACKER = "latest_checkpointed_iteration.txt"
_PREFIX = "global_step_"
_STEP = re.compile(rf"{_PREFIX}[0-9]+")
_LOADER = "data.pt"
"""State of the driver's loader, which verl writes after the roles."""
_QUEUE = "transfer_queue"
"""Folder beside the roles, where drivers that train while they generate keep what is under way."""
_FOLDERS_OF_VERL = ("huggingface", "model", "optimizer", "extra")
_FILES_OF_VERL = ("fsdp_config.json", "lora_train_meta.json", "transformer_config.json", "ckpt_contents.json")
_LOOK_S, _LONGEST_LOOK_S = 0.1, 5.0
_COARSE_S = 2.0
"""Precision of the times that file systems keep."""


class RoleSaves:
    """The saves of one manager of verl. All ranks make the same calls in the same order."""

    def __init__(self, options: SaveOptions, load_options: LoadOptions) -> None:
        self._options = options
        self._load_options = load_options
        self._handle: SaveHandle | None = None
        self._root = ""
        """Folder of the steps, once a path is known."""
        self._folders: NumberedFolders | None = None
        """On rank 0, once a path is known."""
        self._path = ""
        """Path of the newest save."""
        self._to_track: Path | None = None
        """Step whose name the tracker file is to get, on rank 0."""
        self._tracking = threading.Lock()
        """Guards `_to_track`: no name is written twice, or after a newer one."""
        self._began = time.time()

    def save(
        self,
        local_path: str,
        state: Mapping[str, Any],
        *,
        global_step: int,
        num_kept: int | None,
        async_save: bool,
        metadata: Mapping[str, Any],
    ) -> None:
        """Waits for the save before, then saves the state in place of any checkpoint that is there.

        With `async_save` and a path `global_step_<n>/<role>`, returns when the state may change and be moved, and
        writes in the background; the tracker file is written once all roles of the step and the driver's loader are
        saved. Otherwise returns when the checkpoint is committed, and leaves the tracker file to verl.
        Raises the errors of `bytecheckpoint.save`, also that of the save before.
        """
        self.settle()
        place = Path(local_path)
        is_role = _STEP.fullmatch(place.parent.name) is not None
        folders = self._find_folders(place)
        step = place.parent if is_role else place
        number, record = 0, FolderRecord(sequence=0)
        if _STEP.fullmatch(step.name) is not None:
            number = int(step.name.removeprefix(_PREFIX))
            # A step is whole when all folders in it are committed, so the folder of this role has to exist before then.
            make = partial(place.mkdir, parents=True, exist_ok=True) if is_role else None
            record = record_together(self._decisions(step.parent), folders, number, then=make)
        self._path = str(place)
        handle = api.save(
            place,
            state,
            async_save=async_save and is_role,
            metadata=marked("verl", {**record.as_metadata(), "global_step": global_step, **metadata}),
            options=replace(self._options, overwrite=True),
        )
        if folders is not None:
            folders.retire_after(handle, number, partial(_beyond, folders, num_kept) if num_kept else None)
            if async_save and is_role:
                with self._tracking:
                    self._to_track = step
                shared_threads().begin("bcp-tracker", partial(self._track, weakref.ref(self), handle, place))
        handle.staged()
        self._handle = handle

    def wait(self) -> None:
        """Does what `settle` does, and returns when old checkpoints are deleted."""
        self.settle()
        if self._folders is not None:
            self._folders.wait(self._options.timeout_s)

    def settle(self) -> None:
        """Waits until the save in flight is committed, and raises its error if it failed. Then, on rank 0 and after an
        `async_save`, writes the tracker file if the step is whole. Does not wait for deletions: only rank 0 deletes,
        and the other ranks would wait for it.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()
        step = self._to_track
        if step is not None and is_whole(step, since=self._began):
            self._write_tracker(step)

    def load(self, local_path: str, state: Mapping[str, Any]) -> None:
        """Waits for the save in flight, then loads into the state, if that is not empty. A checkpoint in verl's folders
        counts as the one that training goes on from, also for an empty state. Raises the error of the save, and the
        errors of `bytecheckpoint.load`.
        """
        self.settle()
        if state:
            api.load(local_path, state, step=None, options=self._load_options)
        self._find_folders(Path(local_path), is_resumed=True)

    def _find_folders(self, place: Path, *, is_resumed: bool = False) -> NumberedFolders | None:
        """Returns the folders of the role, on rank 0 if the path is in one of verl's layouts; None on other ranks, and
        for other paths. Reads their records at the first call for a root, and again with `is_resumed`, which says that
        the path is that of the loaded checkpoint. Raises on all ranks what rank 0 raises.
        """
        is_role = _STEP.fullmatch(place.parent.name) is not None
        if not (is_role or _STEP.fullmatch(place.name)):
            return None
        root, below = (place.parent.parent, place.name) if is_role else (place.parent, "")
        if self._root != str(root) or is_resumed:
            begun = partial(self._begun, root, below, place if is_resumed else None)
            self._folders = on_rank_0(self._decisions(root), begun)
            self._root = str(root)
        return self._folders

    def _decisions(self, root: Path) -> Decisions:
        return Decisions(None, str(root), timeout_s=self._options.timeout_s)

    def _begun(self, root: Path, below: str, resumed: Path | None) -> NumberedFolders:
        folders = self._folders
        if folders is None or folders.root != str(root):
            beside = _remove_files_of_verl
            folders = NumberedFolders(root, _PREFIX, below=below, storage_options=None, remove_beside=beside)
        folders.begin(resumed="" if resumed is None else str(resumed))
        return folders

    @staticmethod
    def _track(owner: weakref.ref[RoleSaves], handle: SaveHandle, place: Path) -> None:
        """Writes the tracker file once all roles of a step are saved, unless this role has begun another step by then,
        or its manager is gone. Gives up after `timeout_s` of the save options, with a warning.
        """
        if has_failed(handle):
            return
        began, pause_s = time.monotonic(), _LOOK_S
        while (saves := owner()) is not None and saves._path == str(place):
            if is_whole(place.parent, since=saves._began):
                saves._write_tracker(place.parent)
                return
            if time.monotonic() - began > saves._options.timeout_s:
                text = "%s does not name %s, so a restart takes the step before: %s or a role was not there after %g s"
                logger.warning(text, TRACKER, place.parent.name, _LOADER, saves._options.timeout_s)
                return
            del saves  # else the manager would never be gone
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _write_tracker(self, step: Path) -> None:
        """Writes this step into the tracker file, then has old checkpoints deleted in the background. Does nothing if
        another step, or none, is to be tracked by now. An error is only logged.
        """
        with self._tracking:
            if self._to_track != step:
                return
            try:
                write_text(step.parent / TRACKER, str(int(step.name.removeprefix(_PREFIX))))
            except OSError as error:
                logger.warning("%s could not be written, so a restart takes the step before: %s", TRACKER, error)
                return
            logger.info("%s names %s", step.parent / TRACKER, step.name)
            self._to_track = None
        if self._folders is not None:
            self._folders.retire_again()


def _beyond(folders: NumberedFolders, num_kept: int) -> list[NumberedFolder]:
    """Returns the checkpoints of a role that may be deleted: all except the newest `num_kept`, which must be at least
    1, and except the one that the tracker file names.
    """
    tracked = tracked_step(Path(folders.root, TRACKER))
    return [folder for folder in folders.committed()[:-num_kept] if folder.number != tracked]


def is_whole(step: Path, *, since: float) -> bool:
    """Returns True if all roles of a step are committed, and the driver has written the state of its loader, all of it
    after `since`, in seconds since 1970: older files are of an earlier run, whose steps this run replaces. Returns
    False, too, while the step cannot be looked at: an error would be that of rank 0 alone.
    """
    try:
        roles = [path for path in step.iterdir() if path.is_dir() and path.name != _QUEUE] if step.is_dir() else []
        written = [path.stat().st_mtime for path in (step / _LOADER, *(role / MANIFEST_NAME for role in roles))]
    except OSError:
        return False
    return min(written) >= since - _COARSE_S


def tracked_step(tracker: Path) -> int | None:
    """Returns the step that the tracker file names; None if there is no such file, or no number in it."""
    try:
        return int(tracker.read_text())
    except (FileNotFoundError, ValueError):
        return None


def metadata_of(local_path: str) -> Mapping[str, Any]:
    with api.open(local_path, step=None) as checkpoint:
        return checkpoint.metadata


def check_committed(local_path: str) -> None:
    """Raises CheckpointNotFoundError (not_committed, not_found) if there is no committed checkpoint, so that verl does
    not train from scratch, and CheckpointMismatchError (conflict) for a checkpoint of verl itself.
    """
    place = Path(local_path)
    if (place / MANIFEST_NAME).exists():
        return
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if "ckpt_contents.json" in names or any(name.endswith(".pt") for name in names if name != _LOADER):
        raise CheckpointMismatchError(
            f"{local_path} is a checkpoint of verl itself, in pickles, which this library does not read; nothing was "
            "loaded: give a manager with verl's own load_checkpoint to the first run, see docs/integrations/verl.md",
            kind="conflict",
            path=local_path,
        )
    found = sorted(place.parent.parent.glob(f"{_PREFIX}*/{place.name}/{MANIFEST_NAME}"))
    raise CheckpointNotFoundError(
        f"{local_path} holds no committed checkpoint; nothing was loaded. Committed are "
        f"{[path.parent.parent.name for path in found] or 'none'}: write the number of one of these into {TRACKER}, or "
        "give its path as trainer.resume_from_path",
        kind="not_committed" if names else "not_found",
        path=local_path,
    )


def _remove_files_of_verl(path: str) -> None:
    """Removes what verl has put into the folder of a checkpoint that is gone. If that was the last role of its step,
    also removes the state of the loader and what the driver had in progress.
    """
    place = Path(path)
    for name in _FOLDERS_OF_VERL:
        shutil.rmtree(place / name, ignore_errors=True)
    for name in _FILES_OF_VERL:
        (place / name).unlink(missing_ok=True)
    step = place if _STEP.fullmatch(place.name) else place.parent
    with suppress(FileNotFoundError):
        rest = [each for each in step.iterdir() if each not in {place, step / _QUEUE}]
        if all(each.name.startswith("data") and each.suffix == ".pt" for each in rest):
            shutil.rmtree(step / _QUEUE, ignore_errors=True)
            for each in rest:
                each.unlink()
