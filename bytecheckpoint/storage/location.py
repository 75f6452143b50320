"""Where a checkpoint is, from what the user passes: a path or URL, a step, a role."""

from __future__ import annotations

import os
from typing import NamedTuple, SupportsIndex

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.paths import join_name


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


def check_step(step: object) -> int | None:
    """The step as a plain int; numpy's integers are taken too.

    Raises CheckpointMismatchError (conflict), which is a ValueError, for what is no integer from 0 to 2^63 - 1.
    """
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, SupportsIndex) or not 0 <= step.__index__() < 1 << 63:
        what = f"a step is an integer from 0 to 2^63 - 1, or None, not {step!r}; nothing was changed"
        raise CheckpointMismatchError(what, kind="conflict")
    return step.__index__()


def save_location(path: str | os.PathLike[str], *, step: int | None, role: str | None) -> Location:
    """Where a save goes."""
    return Location(root_of(path, role), "" if step is None else step_folder(step))
