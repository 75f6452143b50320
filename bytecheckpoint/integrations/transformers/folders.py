"""The `checkpoint-N` folders of Hugging Face's Trainer, as rank 0 sees them: the record of the mixin in each, and which
one a run goes on from. A folder is committed once it has a manifest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bytecheckpoint import api
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointNotFoundError, and_more
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolders
from bytecheckpoint.integrations.shared.text_file import write_text
from bytecheckpoint.manager.retention import JOURNAL_FOLDER
from bytecheckpoint.storage.garbage import is_temporary
from bytecheckpoint.storage.layout import DATA_FOLDER, MANIFEST_NAME

logger = logging.getLogger("bytecheckpoint")

TRAINER_STATE = "trainer_state.json"
CONFIG = "config.json"
_RECORD = "trainer"
"""Key of the record in the metadata of a checkpoint."""
_PREFIX = "checkpoint-"
_MAX_NAMED = 10


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a save that the Trainer mixin has made, in the metadata of the checkpoint."""

    sequence: int
    """Rises with each save into the same output folder, also where training goes back to an earlier step."""
    entries: list[str]
    """Top-level names of the state."""
    trainer_state: str
    """Content of `trainer_state.json`."""
    adapters_only: bool
    position: tuple[int, int] | None = None
    """Passes over the train loader that had ended, and batches taken of the next one. None if the loader has a length,
    of which the Trainer calculates both.
    """

    def as_metadata(self) -> dict[str, Any]:
        return {_RECORD: msgspec.to_builtins(self)}

    def without_state(self) -> TrainerRecord:
        """Returns the record without the state of the Trainer, whose history grows with each step."""
        return msgspec.structs.replace(self, trainer_state="")

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of `state` that the checkpoint has too; warns of others, except `data` and `order`."""
        # Without a position of the loader its batches are skipped, and without an order they come as in a new run.
        absent = [name for name in state if name not in self.entries and name not in {"data", "order"}]
        if absent:
            logger.warning("the checkpoint has no %s, as with save_only_model=True: they begin anew", ", ".join(absent))
        return {name: value for name, value in state.items() if name in self.entries}


class Resume(msgspec.Struct, frozen=True):
    """The checkpoint that a run goes on from, or the reason why it cannot."""

    path: str = ""
    record: TrainerRecord | None = None
    """None if the Trainer itself wrote the checkpoint, or if there is none."""
    refusal: str = ""
    others: bool = False
    """With a refusal: True if there are folders that can be resumed from only if their path is given."""


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Returns True if the folder holds a committed checkpoint of this library."""
    return Path(path, MANIFEST_NAME).is_file()


def find_record(path: str | os.PathLike[str]) -> Resume:
    """Returns a Resume of the path. Its record is that of the checkpoint there, without the Trainer's state; None if
    none is committed. Raises the errors of `read_record`.
    """
    record = read_record(path).without_state() if is_committed(path) else None
    return Resume(os.fspath(path), record)


def read_record(path: str | os.PathLike[str]) -> TrainerRecord:
    """Reads the record of a committed checkpoint.

    Raises CheckpointMismatchError (conflict) for one that the mixin did not save, and what `bytecheckpoint.open`
    raises.
    """
    checkpoint = api.open(path, step=None)
    try:
        return msgspec.convert(checkpoint.metadata.get(_RECORD), TrainerRecord)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"{os.fspath(path)} is a checkpoint that no BcpTrainerMixin saved, so the state of the Trainer is not in "
            "it; nothing was loaded: take its weights with bytecheckpoint.load, and begin to train without "
            "resume_from_checkpoint",
            kind="conflict",
            path=os.fspath(path),
        ) from error


def folders_of(run_dir: str | os.PathLike[str]) -> NumberedFolders:
    """Returns the checkpoints of a run; those that the mixin did not save are left out."""
    return NumberedFolders(Path(run_dir), _PREFIX, own_key=_RECORD, storage_options=None, remove_beside=_remove_beside)


def _is_of_trainer(path: str) -> bool:
    """Returns True if the Trainer itself wrote the folder: no save of this library has begun in it."""
    return Path(path, TRAINER_STATE).is_file() and not Path(path, DATA_FOLDER).is_dir()


def find_newest(run_dir: str) -> Resume:
    """Returns the checkpoint of the mixin in a run that was committed last, whatever its number; a Resume with a
    `refusal` if there is none. Skips damaged ones with a warning; raises the error of one if all are damaged.
    """
    folders = folders_of(run_dir)
    committed = folders.committed(to_load=True)
    if committed:
        return find_given(committed[-1].path)
    others = [path for path in map(folders.path_of, folders.numbers()) if not is_committed(path)]
    foreign = [path for path in others if _is_of_trainer(path)]
    unfinished = [path for path in others if not _is_of_trainer(path)]
    reasons = [f"No valid checkpoint found in output directory ({run_dir})"]
    if unfinished:
        reasons.append(f"incomplete, because their saves did not finish, are: {and_more(unfinished, _MAX_NAMED)}")
    if foreign:
        reasons.append(f"the Trainer itself wrote {and_more(foreign, _MAX_NAMED)}: to go on from one, give its path")
    return Resume(refusal="; ".join(reasons), others=bool(others))


def find_given(path: str) -> Resume:
    """Returns the checkpoint at a path, without a record if no save of this library has begun in the folder.

    Raises CheckpointNotFoundError if the folder is not there (not_found), or has a save of this library that did not
    finish (not_committed), and the errors of `read_record`. Tries no other path.
    """
    if is_committed(path):
        return Resume(path, read_record(path))
    if not Path(path).is_dir():
        message = f"there is no folder {path}; nothing was loaded: check the path"
        raise CheckpointNotFoundError(message, kind="not_found", path=path)
    if not (Path(path, DATA_FOLDER).is_dir() or Path(path, JOURNAL_FOLDER).is_dir()):
        return Resume(path)
    beside = folders_of(Path(path).absolute().parent).committed()
    committed = [folder.path for folder in reversed(beside)]
    safe = f"committed, newest first, are {and_more(committed, _MAX_NAMED)}" if committed else "none beside it is"
    raise CheckpointNotFoundError(
        f"{path} is not committed: it holds data but no {MANIFEST_NAME}, so its save did not finish; nothing was "
        f"loaded ({safe}): give another path, or resume_from_checkpoint=True for the newest",
        kind="not_committed",
        path=path,
    )


def put_trainer_state(path: str, record: TrainerRecord) -> None:
    """Writes `trainer_state.json` of the record into a committed folder, unless a file there is equal or was changed
    after the commit.
    """
    target, manifest = Path(path, TRAINER_STATE), Path(path, MANIFEST_NAME)
    with suppress(FileNotFoundError):
        if target.read_text() == record.trainer_state or target.stat().st_mtime_ns > manifest.stat().st_mtime_ns:
            return
    write_text(target, record.trainer_state)


def _remove_beside(path: str) -> None:
    """Removes the files of the mixin, and temporary files of killed processes, from a deleted checkpoint's folder."""
    with suppress(FileNotFoundError):  # the store removes the folder with the last object
        for each in list(Path(path).iterdir()):
            if each.name in {TRAINER_STATE, CONFIG} or (is_temporary(each.name) and not each.is_dir()):
                each.unlink(missing_ok=True)
