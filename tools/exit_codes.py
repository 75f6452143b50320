"""What the program's exit codes mean, for scripts. docs/cli.md lists them."""

from __future__ import annotations

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.errors import StorageError as StoreRefusedError

FINE = 0
CORRUPT = 1
"""Corrupt, or different."""
USAGE = 2
NOT_FOUND = 3
STORAGE = 4
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output closed it."""


class UnfollowedLinkError(UnsafeCheckpointError):
    """A link was given to a command that needs its files, without the option to follow it."""


def code_of(error: CheckpointError) -> int:
    """The exit code of a command that ends with this error."""
    match error:
        case CheckpointNotFoundError():
            return NOT_FOUND
        case CheckpointSaveError(kind="unsupported_value"):  # names in a checkpoint that no save would have given
            return CORRUPT
        case StoreRefusedError() | CheckpointSaveError():
            return STORAGE
        case CheckpointMismatchError(kind="conflict") | CheckpointExistsError() | UnfollowedLinkError():
            return USAGE
    return CORRUPT
