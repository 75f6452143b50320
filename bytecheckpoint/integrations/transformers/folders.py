"""The `checkpoint-N` folders of Hugging Face's Trainer, on the rank that looks after them: which are committed and in
which order, which one a run goes on from, their deletion. A manifest makes one committed, as everywhere.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bytecheckpoint import api
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, and_more
from bytecheckpoint.manager.retention import JOURNAL_FOLDER, delete_one, finish_deletions
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER
from bytecheckpoint.storage.layout import DATA_FOLDER, MANIFEST_NAME, TELEMETRY_FOLDER
from bytecheckpoint.storage.open_store import open_store

logger = logging.getLogger("bytecheckpoint")

TRAINER_STATE = "trainer_state.json"
CONFIG = "config.json"
_RECORD = "trainer"
"""Key of the record in the metadata of a checkpoint."""
_FOLDER = re.compile(r"checkpoint-([0-9]+)")
_OWN_FOLDERS = (
    *(DATA_FOLDER, TELEMETRY_FOLDER, METRICS_FOLDER, LEASES_FOLDER),
    *(JOURNAL_FOLDER, JOURNAL_FOLDER.partition("/")[0], "."),
)
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

    def as_metadata(self) -> dict[str, Any]:
        """Returns the metadata of a checkpoint."""
        return {_RECORD: msgspec.to_builtins(self)}

    def without_state(self) -> TrainerRecord:
        """Returns the same without the state of the Trainer, whose history grows with each step."""
        return msgspec.structs.replace(self, trainer_state="")


class CommittedFolder(msgspec.Struct, frozen=True):
    """A folder with a committed checkpoint of the mixin."""

    path: str
    save_id: str
    record: TrainerRecord


class Resume(msgspec.Struct, frozen=True):
    """The checkpoint that a run goes on from, or the reason why it cannot."""

    path: str = ""
    record: TrainerRecord | None = None
    """None if the Trainer itself wrote the checkpoint."""
    refusal: str = ""


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Returns True if the folder holds a committed checkpoint of this library."""
    return Path(path, MANIFEST_NAME).is_file()


def read_folder(path: str | os.PathLike[str]) -> CommittedFolder:
    """Reads the record of a committed checkpoint.

    Raises CheckpointMismatchError (conflict) for one that the mixin did not save, and what `bytecheckpoint.open`
    raises.
    """
    checkpoint = api.open(path, step=None)
    try:
        record = msgspec.convert(checkpoint.metadata.get(_RECORD), TrainerRecord)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"{os.fspath(path)} is a checkpoint that no BcpTrainerMixin saved, so the state of the Trainer is not in "
            "it; nothing was loaded: take its weights with bytecheckpoint.load, and begin to train without "
            "resume_from_checkpoint",
            kind="conflict",
            path=os.fspath(path),
        ) from error
    return CommittedFolder(os.fspath(path), checkpoint.info.save_id, record)


def committed_folders(run_dir: str | os.PathLike[str], *, passes_damaged: bool) -> list[CommittedFolder]:
    """Returns the checkpoints of a run, in the order of their commits and without the Trainer's states. Those that the
    mixin did not save are left out.

    Raises what `bytecheckpoint.open` raises for a damaged one, which could be the newest, unless `passes_damaged`: then
    a warning names it.
    """
    found = []
    for path in filter(is_committed, _folders(run_dir)):
        try:
            folder = read_folder(path)
        except CheckpointMismatchError:
            continue
        except CheckpointError as error:
            if not passes_damaged:
                raise
            logger.warning("%s is left alone: %s", path, error.message)
        else:
            found.append(msgspec.structs.replace(folder, record=folder.record.without_state()))
    return sorted(found, key=lambda folder: folder.record.sequence)


def _folders(run_dir: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the paths of the folders with the names of checkpoints, by number."""
    with suppress(FileNotFoundError):
        paths = [path for path in Path(run_dir).iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
        yield from map(str, sorted(paths, key=lambda path: int(path.name.rpartition("-")[2])))


def _is_of_trainer(path: str) -> bool:
    """Returns True if the Trainer itself wrote the folder: no save of this library has begun in it."""
    return Path(path, TRAINER_STATE).is_file() and not Path(path, DATA_FOLDER).is_dir()


def find_newest(run_dir: str) -> Resume:
    """Returns the checkpoint of a run that was committed last, whatever the numbers of its folders."""
    committed = committed_folders(run_dir, passes_damaged=False)
    if committed:
        return find_given(committed[-1].path)
    foreign = [path for path in _folders(run_dir) if not is_committed(path) and _is_of_trainer(path)]
    unfinished = [path for path in _folders(run_dir) if not is_committed(path) and not _is_of_trainer(path)]
    told = [f"No valid checkpoint found in output directory ({run_dir})"]
    if unfinished:
        told.append(f"incomplete, because their saves did not finish, are: {and_more(unfinished, _MAX_NAMED)}")
    if foreign:
        told.append(f"the Trainer itself wrote {and_more(foreign, _MAX_NAMED)}: to go on from one, give its path")
    return Resume(refusal="; ".join(told))


def find_given(path: str) -> Resume:
    """Returns the checkpoint at a path.

    Raises CheckpointNotFoundError (not_committed, not_found) if none is complete there; another one is never taken.
    """
    if is_committed(path):
        return Resume(path, read_folder(path).record)
    if not Path(path).is_dir():
        message = f"there is no folder {path}; nothing was loaded: check the path"
        raise CheckpointNotFoundError(message, kind="not_found", path=path)
    if not (Path(path, DATA_FOLDER).is_dir() or Path(path, JOURNAL_FOLDER).is_dir()):
        return Resume(path)
    beside = committed_folders(Path(path).absolute().parent, passes_damaged=True)
    committed = [folder.path for folder in reversed(beside)]
    safe = f"committed, newest first, are {and_more(committed, _MAX_NAMED)}" if committed else "none beside it is"
    raise CheckpointNotFoundError(
        f"{path} is not committed: it holds data but no {MANIFEST_NAME}, so its save did not finish; nothing was "
        f"loaded ({safe}): give another path, or resume_from_checkpoint=True for the newest",
        kind="not_committed",
        path=path,
    )


def put_trainer_state(path: str, record: TrainerRecord) -> None:
    """Makes sure that a committed folder has the `trainer_state.json` of its save. One that was changed after the
    commit stays as it is.
    """
    target, manifest = Path(path, TRAINER_STATE), Path(path, MANIFEST_NAME)
    with suppress(FileNotFoundError):
        if target.read_text() == record.trainer_state or target.stat().st_mtime_ns > manifest.stat().st_mtime_ns:
            return
    write_text(target, record.trainer_state)


def write_text(target: Path, content: str) -> None:
    """Writes a file in one step."""
    unfinished = target.with_name(f".{target.name}.tmp")
    unfinished.write_text(content)
    unfinished.replace(target)


def delete_folder(folder: CommittedFolder) -> str:
    """Deletes a checkpoint, its manifest first, and its folder unless others have put files there. Returns the reason
    if it stays: it is pinned or leased, or was saved again meanwhile.

    Raises what the store raises.
    """
    store = open_store(folder.path, storage_options=None, writer_threads=1)
    why = delete_one(store, "", save_id=folder.save_id, now=time.time(), force=False)
    if not why:
        _remove_rest(folder.path)
    return why


def finish_folders(run_dir: str) -> None:
    """Finishes the deletions that killed processes have begun."""
    for path in _folders(run_dir):
        if not is_committed(path) and Path(path, JOURNAL_FOLDER).is_dir():
            with suppress(CheckpointError, OSError):  # what is left is not committed, and the next run tries again
                finish_deletions(open_store(path, storage_options=None, writer_threads=1), now=time.time())
                _remove_rest(path)


def _remove_rest(path: str) -> None:
    """Removes what the mixin has put beside a checkpoint that is gone, and the folders that are empty then."""
    for name in (TRAINER_STATE, CONFIG):
        with suppress(FileNotFoundError):
            Path(path, name).unlink()
    for name in _OWN_FOLDERS:
        with suppress(OSError):  # files of others are in it, or it is gone
            Path(path, name).rmdir()
