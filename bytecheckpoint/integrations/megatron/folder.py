"""The folders of Megatron-LM: names of checkpoints, the tracker file, which checkpoint a load takes, and which one is
deleted after a save. Knows nothing of models.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from typing import Any

import msgspec

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolder, NumberedFolders
from bytecheckpoint.integrations.shared.tracked_folder import TrackedFolder
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.paths import join_name

logger = logging.getLogger("bytecheckpoint")

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
METADATA = "megatron"
"""Key of what is saved with a checkpoint besides the state: the fields of `FoundIteration` from `iteration` on."""
VERSION = 3.0
"""Version of Megatron's checkpoints whose conventions about weights hold."""
_NON_PERSISTENT = "non_persistent"
_PREFIX, _WIDTH = "iter_", 7


class FoundIteration(msgspec.Struct):
    """Message of rank 0 about the checkpoint that is to be loaded."""

    path: str = ""
    """Empty if there is none."""
    name: str = ""
    is_of_megatron: bool = False
    """True if Megatron itself wrote it."""
    is_pretrained: bool = False
    """True for the checkpoint of `--pretrained-checkpoint`, from which a new run begins."""
    has_rng: bool = False
    has_rerun: bool = False
    iteration: int = 0
    num_floating_point_operations_so_far: float = 0
    checkpoint_version: float = VERSION
    args: dict[str, Any] = {}
    """Arguments of the run that saved it, or the state of Megatron-Bridge's training; empty if neither saved it."""


def find(args: Namespace, root: str | os.PathLike[str] | None, reach: TrackedFolder) -> FoundIteration:
    """Chooses the checkpoint to load, on rank 0. `reach` has the options for the storage; its root is not used. Without
    any checkpoint, returns an empty path with a warning, or raises CheckpointNotFoundError, as Megatron's arguments
    say.

    Opens the one that it chooses: raises CheckpointNotFoundError too if that is not committed, or if a tracker file
    names no iteration, and the errors of `bytecheckpoint.open` for a damaged one.
    """
    root = None if root is None else os.fspath(root)
    wanted = getattr(args, "ckpt_step", None)
    if wanted and root is not None:
        return _described(reach._replace(root=root), name_of(wanted))
    found = [(folder, text) for folder in _folders(args, root, reach) if (text := _tracked_in(folder)) is not None]
    given: str | os.PathLike[str] | None = getattr(args, "pretrained_checkpoint", None)
    pretrained = None if given is None else os.fspath(given)
    is_pretrained = not found and pretrained is not None
    if not found and pretrained is not None:
        folder = reach._replace(root=pretrained)
        found = [(folder, text) for text in [_tracked_in(folder)] if text is not None]
    if found:
        # The newest, and of two equally new ones the one that is not persistent, as in Megatron.
        folder, text = max(found, key=lambda each: _iteration_in(each[1]))
        name = RELEASE if text == RELEASE else name_of(_iteration_in(text))
        described = _described(folder, name)
        described.is_pretrained = is_pretrained
        return described
    places = [reach._replace(root=each).shown() for each in (root, pretrained) if each is not None]
    message = f"there is no {TRACKER} in {' or '.join(places) or 'any folder, because none was given'}"
    if getattr(args, "exit_on_missing_checkpoint", False) or pretrained is not None:
        raise CheckpointNotFoundError(
            f"{message}; nothing was loaded", kind="not_found", path=places[0] if places else ""
        )
    committed = reach._replace(root=root).shown_committed() if root is not None else "none"
    logger.warning(
        "%s, so no checkpoint was loaded and training begins anew. Committed checkpoints beside it: %s. To load one of "
        "them, pass --ckpt-step",
        message,
        committed,
    )
    return FoundIteration()


def _tracked_in(folder: TrackedFolder) -> str | None:
    return folder.read(content=f"the iteration, as 100 for {name_of(100)},")


def _folders(args: Namespace, root: str | None, reach: TrackedFolder) -> list[TrackedFolder]:
    """Returns the folders whose tracker files may name the newest checkpoint, opened as `reach` says. The one that is
    not persistent comes first: the first of two equally new checkpoints is taken.
    """
    roots = [] if root is None else [root]
    if args.non_persistent_ckpt_type == "global" and (root is not None or args.non_persistent_global_ckpt_dir):
        roots.insert(0, non_persistent_root(args, root or ""))
    return [reach._replace(root=each) for each in roots]


def _described(folder: TrackedFolder, name: str) -> FoundIteration:
    """Returns what a checkpoint holds; one that this library did not save counts as Megatron's own. Raises
    CheckpointNotFoundError if none is committed under this name, and the error of a damaged one of this library.
    """
    path = folder.path_of(name)
    try:
        checkpoint = folder.open(name, about=folder.shown(name), advice=". Choose one of them with --ckpt-step")
    except CheckpointNotFoundError:
        raise
    except CheckpointError:  # a folder of Megatron's that is not read here, which Megatron may read
        if name in folder.committed():
            raise
        return FoundIteration(path=path, name=name, is_of_megatron=True)
    with checkpoint:
        if checkpoint.info.format != OWN_FORMAT:
            return FoundIteration(path=path, name=name, is_of_megatron=True)
        entries = checkpoint.manifest.rank_objects.keys()
        fields = checkpoint.metadata.get(METADATA, {})
        return FoundIteration(path=path, name=name, has_rng="rng" in entries, has_rerun="rerun" in entries, **fields)


def check_has_positions(found: FoundIteration, advice: str) -> None:
    """Raises CheckpointMismatchError (conflict) for a checkpoint that says nothing of where training was, because no
    integration of Megatron has saved it; with `advice` on what to do.
    """
    if not found.args:
        raise CheckpointMismatchError(
            f"{showable_url(found.path)} has no iteration and no counts of samples, as no integration of Megatron has "
            f"saved it, so training would begin anew from its weights; nothing was loaded: {advice}",
            kind="conflict",
            path=showable_url(found.path),
        )


class ReplacedCheckpoints:
    """The checkpoints of one folder that are to be deleted once another one is the newest. Only rank 0 has this object,
    for the whole run.
    """

    def __init__(self, folder: TrackedFolder) -> None:
        self.folders = numbered_folders(folder)
        self._replaced: set[int] = set()

    def note(self, text: str | None) -> None:
        """Notes the iteration that the tracker file named before a save. Ignores None, and a release."""
        if text and text.isdecimal():
            self._replaced.add(int(text))

    def going(self, iteration: int, interval: int) -> list[NumberedFolder]:
        """Returns the checkpoints that are noted as replaced, except those of `iteration`, of 0 and of multiples of
        `interval`; an `interval` of 0 excepts no multiple. Forgets multiples, and checkpoints that are gone or damaged.
        """
        going = []
        for number in sorted(self._replaced - {0, iteration}):
            folder = self.folders.find(number) if not interval or number % interval else None
            if folder is None:
                self._replaced.discard(number)
            else:  # stays noted until it is gone: a deletion may fail
                going.append(folder)
        return going

    def close(self, _: SaveHandle, *, timeout_s: float) -> None:
        """Waits for the deletions and ends their thread. Serves as a callback for the end of a save."""
        self.folders.close(timeout_s)


def numbered_folders(folder: TrackedFolder) -> NumberedFolders:
    """Returns the checkpoints of a folder by number, for their deletion. Finishes, in the background, deletions that
    killed processes have begun.
    """
    folders = NumberedFolders(folder.root, _PREFIX, width=_WIDTH, storage_options=folder.storage_options)
    folders.finish_begun()
    return folders


def name_of(iteration: int) -> str:
    return f"{_PREFIX}{iteration:0{_WIDTH}}"


def _iteration_in(text: str) -> int:
    """Returns the iteration in the text of a tracker file; 0 for a release. Raises CheckpointNotFoundError for any
    other text.
    """
    if text == RELEASE:
        return 0
    if not text.isdecimal():
        raise CheckpointNotFoundError(
            f"{TRACKER} holds {text!r:.100}, and not an iteration; nothing was loaded: write one into it, or pass "
            "--ckpt-step",
            kind="not_found",
        )
    return int(text)


def non_persistent_root(args: Namespace, root: str | os.PathLike[str]) -> str:
    """Returns the folder of checkpoints of which only the newest is kept."""
    given: str | os.PathLike[str] | None = args.non_persistent_global_ckpt_dir
    return os.fspath(given) if given else join_name(os.fspath(root), _NON_PERSISTENT)
