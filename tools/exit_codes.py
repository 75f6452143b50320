"""Exit codes of the program, for scripts. docs/cli.md lists them."""

from __future__ import annotations

from collections.abc import Iterable

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    UnsafeCheckpointError,
)

FINE = 0
CORRUPT = 1
"""A checkpoint is corrupt or refused, two differ, or a storage breaks a promise; also for errors without a code of
their own."""
USAGE = 2
NOT_FOUND = 3
STORAGE = 4
UNVERIFIED = 5
"""All is there, but nothing says what its bytes were: the format has no checksums."""
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of the output closed it."""


class UnfollowedLinkError(UnsafeCheckpointError):
    """A link was given to a command that needs its files, without the option to follow it."""


def code_of(error: CheckpointError) -> int:
    """Returns the exit code of a command that ends with this error; CORRUPT for one that has no code of its own."""
    match error:
        case CheckpointNotFoundError():
            return NOT_FOUND
        case CheckpointSaveError(kind="unsupported_value"):  # names in a checkpoint that no save would have given
            return CORRUPT
        case StorageError() | CheckpointSaveError():
            return STORAGE
        case CheckpointMismatchError(kind="conflict") | CheckpointExistsError() | UnfollowedLinkError():
            return USAGE
    return CORRUPT


def code_of_findings(kinds: Iterable[str]) -> int:
    """Returns the exit code of a command that found faults of these kinds: FINE for none, STORAGE if the store alone is
    at fault, else CORRUPT.
    """
    found = set(kinds)
    return FINE if not found else STORAGE if found <= {"permission", "unavailable", "unsupported"} else CORRUPT
