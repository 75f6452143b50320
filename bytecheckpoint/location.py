"""Where a checkpoint is, from what the user passes: a path or URL, a step, a role."""

from __future__ import annotations

import os
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.names import join_name


class Location(NamedTuple):
    """A place for one checkpoint, or for one a step."""

    root: str
    """Path or URL of what a store opens."""
    folder: str
    """Of the checkpoint inside it; "" where it is the root."""


def root_of(path: str | os.PathLike[str], role: str | None) -> str:
    """The path, or the folder of the role under it.

    Raises CheckpointMismatchError (conflict), which is a ValueError, for a role that is no folder name.
    """
    root = os.fspath(path)
    if role is None:
        return root
    if not role or role in {".", ".."} or set(role) & set("/\\:\0"):
        what = f"a role is the name of a folder, without slashes or colons, not {role!r}; nothing was changed"
        raise CheckpointMismatchError(what, kind="conflict")
    return join_name(root, role)


def save_location(path: str | os.PathLike[str], *, step: object, role: str | None) -> Location:
    """Where a save goes. Raises CheckpointMismatchError (conflict), a ValueError, for a step that is none."""
    if step is None:
        return Location(root_of(path, role), "")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        what = f"a step is an integer from 0 on, or None, not {step!r}; nothing was changed"
        raise CheckpointMismatchError(what, kind="conflict")
    return Location(root_of(path, role), step_folder(step))
