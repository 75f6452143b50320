"""Errors of stores: error numbers become this library's errors here, except those of locks and memory roots. Knows no
store; `path` is the path that a message shows, `reason` the backend's message.
"""

from __future__ import annotations

import errno

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    UnsafeCheckpointError,
)

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_REFUSED = (401, 403)
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


def describe(error: BaseException) -> str:
    """Returns the error's message, of an OSError without number and file name; its class if it has no message."""
    words = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else str(error)
    return words or type(error).__name__


def write_error(
    error: BaseException, path: str, *, reason: str, needed_bytes: int, free_bytes: int | None, may_be_done: bool
) -> CheckpointError:
    """Makes the error for a failed write: CheckpointSaveError (no_space, storage) or StorageError.

    `free_bytes` is the free space before the write, or None if unknown. `may_be_done` says that the object may have
    been published all the same.
    """
    number = error.errno if isinstance(error, OSError) else None
    published = "it may have been published all the same" if may_be_done else "nothing was published under this name"
    if number in _NO_SPACE:
        had = "" if free_bytes is None else f", and {free_bytes} bytes were free when the write began"
        return CheckpointSaveError(
            f"cannot write {path}: {reason}; {needed_bytes} bytes are needed{had}; {published}: free space or raise "
            "the quota, or save elsewhere",
            kind="no_space",
            path=path,
        )
    refused = _refused(error, path, doing="write", reason=reason)
    return refused or CheckpointSaveError(
        f"cannot write {path}: {reason}; {published}: check the storage, then save again",
        kind="storage",
        path=path,
    )


def read_error(error: BaseException, path: str, *, reason: str, doing: str = "read") -> CheckpointError:
    """Makes the error for a failed read, or for another call, which `doing` names, such as "list" or "delete":
    CheckpointNotFoundError (missing_file) or StorageError.
    """
    if isinstance(error, FileNotFoundError):
        return missing_file(path)
    refused = _refused(error, path, doing=doing, reason=reason)
    return refused or StorageError(
        f"cannot {doing} {path}: {reason}; {_what_changed(doing)}: check the storage, then try again",
        kind="unavailable",
        path=path,
    )


def _refused(error: BaseException, path: str, *, doing: str, reason: str) -> StorageError | None:
    """Returns the error for no permission, no file descriptor or an unsupported call; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or number in _NO_PERMISSION or _is_refused_by_server(error):
        return StorageError(
            f"not allowed to {doing} {path}: {reason}; nothing stored was changed: check the owner and mode of the "
            "folder, whether it is mounted read-only, and the credentials of a remote store",
            kind="permission",
            path=path,
        )
    if number in _NO_DESCRIPTOR:
        return StorageError(
            f"cannot {doing} {path}: {reason}; {_what_changed(doing)}: raise the limit of open files "
            "(`ulimit -n`) or use fewer reader and writer threads",
            kind="unavailable",
            path=path,
        )
    if isinstance(error, NotImplementedError) or number == errno.ENOSYS:
        return StorageError(
            f"this storage cannot {doing} {path}: {reason}; nothing stored was changed: use another storage",
            kind="unsupported",
            path=path,
        )
    return None


def _what_changed(doing: str) -> str:
    # A remote store may have lost its answer; a folder is synced after its files are gone.
    return "what was to be deleted may be gone" if doing == "delete" else "nothing stored was changed"


def _is_refused_by_server(error: BaseException) -> bool:
    """Returns True if the error, or what its client raised it from, is an answer 401 or 403, as clients of fsspec's
    backends raise it: azure.core with `status_code`, aiohttp with `status`, gcsfs with `code`, or as an OSError without
    a number. An error that was only being handled meanwhile is no cause: it may be one of the caller's own program.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        if _status(each) in _REFUSED:
            return True
        seen.append(each)
        each = each.__cause__
    return isinstance(error, OSError) and not error.errno and str(error).startswith("Forbidden: ")


def _status(error: BaseException) -> object:
    # The first that there is: aiohttp, which has `status`, warns of its old `code`.
    names = (name for name in ("status_code", "status", "code") if hasattr(error, name))
    return getattr(error, next(names, ""), None)


def missing_file(path: str) -> CheckpointNotFoundError:
    """Makes the error for a missing object."""
    return CheckpointNotFoundError(
        f"there is no file {path}; nothing else was touched: restore the file or take another step",
        kind="missing_file",
        path=path,
    )


def already_exists(path: str) -> CheckpointExistsError:
    """Makes the error for a name that is taken."""
    return CheckpointExistsError(
        f"{path} exists already and was left as it is: choose another path or step, or ask for it to be replaced",
        kind="exists",
        path=path,
    )


def no_links(path: str) -> StorageError:
    """Makes the error for a file system that has no hard links, or refuses this link."""
    return StorageError(
        f"the file system of {path} makes no hard link to an earlier file; nothing was changed: write the file instead",
        kind="unsupported",
        path=path,
    )


def replaced_meanwhile(path: str) -> CheckpointExistsError:
    """Makes the error for a name that another writer has replaced or deleted meanwhile."""
    return CheckpointExistsError(
        f"another writer has replaced or deleted {path} meanwhile, and that was left as it is: let only one at a time "
        "write to a path, then try again",
        kind="exists",
        path=path,
    )


def is_a_file(path: str) -> CheckpointNotFoundError:
    """Makes the error for listing a file as a folder."""
    return CheckpointNotFoundError(
        f"{path} is a file, not a folder, so no checkpoint can be in it; it was not touched: give the folder of a "
        "checkpoint, or one that holds step_ folders",
        kind="not_found",
        path=path,
    )


def truncated(path: str, *, wanted_end: int, found_end: int) -> CheckpointCorruptError:
    """Makes the error for an object that ends at byte `found_end` when bytes up to `wanted_end` are read."""
    return CheckpointCorruptError(
        f"{path} ends at byte {found_end}, but bytes up to {wanted_end} are to be read; it was cut short or replaced: "
        "restore the file or take another step",
        kind="truncated",
        path=path,
    )


def too_long(path: str, num_bytes: int, max_bytes: int) -> UnsafeCheckpointError:
    """Makes the error for an object that is longer than its kind may be."""
    return UnsafeCheckpointError(
        f"{path} has {num_bytes} bytes; it may have {max_bytes}: it was not read",
        kind="limits_exceeded",
        path=path,
    )
