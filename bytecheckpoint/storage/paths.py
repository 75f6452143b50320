"""Names of objects in a store: joined, and refused if they could lead out of it. Knows no backend."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from bytecheckpoint.errors import CheckpointMismatchError, StorageError, UnsafeCheckpointError
from bytecheckpoint.manifest.validation import UNSAFE_NAME

TEMPORARY_PREFIX = ".tmp-"
"""Start of the last part of a name that is still being written; no listing shows it."""
_MAX_SUFFIX_BYTES = 200
"""Bytes of an object's name that its temporary name repeats; file systems end names at 255 bytes."""


def temporary_name(last: str) -> str:
    """Returns a random temporary name in place of `last`, the last part of an object's name."""
    suffix = last.encode("utf-8", "ignore")[:_MAX_SUFFIX_BYTES].decode("utf-8", "ignore")
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{suffix}"


def path_text(path: object) -> str:
    """Returns a path or a URL as text. Raises CheckpointMismatchError (conflict), which is a ValueError, for what is
    neither, and for bytes.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        what = f"path takes a str or an os.PathLike, not a value of type {type(path).__name__}; nothing was done"
        is_state = isinstance(path, Mapping)
        advice = "the path is the first argument, the state the second" if is_state else "pass a folder or a URL"
        raise CheckpointMismatchError(f"{what}: {advice}", kind="conflict")
    return text


def empty_path() -> StorageError:
    """Makes the error for an empty path."""
    return StorageError("the path is empty; give a folder or a URL", kind="unsupported", path="")


def utf8_path(path: str) -> str:
    """Returns the path unchanged. Raises StorageError (unsupported) for an empty path, and for one that, made absolute,
    is not UTF-8: ranks exchange it as text.
    """
    if not path:
        raise empty_path()
    whole = path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - text
    if not is_utf8(whole):
        raise StorageError(
            f"the path {escaped(whole)} has bytes that are not UTF-8, and such paths are not saved to or loaded from; "
            "nothing was read or written: rename the folder, or give the absolute path of a symbolic link to it",
            kind="unsupported",
            path=escaped(whole),
        )
    return path


def is_utf8(text: str) -> bool:
    """Returns False for a path or name with bytes that are not UTF-8, for each of which Python has a surrogate."""
    return text.isascii() or escaped(text) == text


def escaped(text: str) -> str:
    """Returns the text with escapes in place of surrogates, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def join_name(*parts: str) -> str:
    """Joins the parts that are not empty with slashes, without a second one after a part that ends in one.
    Slashes in parts stay.
    """
    joined = ""
    for part in parts:
        separator = "" if not joined or not part or joined.endswith("/") else "/"
        joined += separator + part
    return joined


def check_name(name: str) -> str:
    """Returns the name if it is relative and, as spelt, stays below the root.

    Raises UnsafeCheckpointError (path_escape).
    """
    if UNSAFE_NAME.search(name):
        raise path_escape(name, "names are relative, with forward slashes, without empty parts, '.', '..', ':', NUL")
    return name


def check_file_name(path: str, name: str) -> None:
    """Raises UnsafeCheckpointError (path_escape) for a file name that is not UTF-8, which no manifest holds, or that
    `check_name` refuses, such as one with ':' or a backslash. `path` is that of the file, for the message.
    """
    if UNSAFE_NAME.search(name) or not is_utf8(name):
        raise unreadable_name(path)


def unreadable_name(path: str) -> UnsafeCheckpointError:
    """Makes the error for a file of another program whose name no store or manifest takes."""
    shown = escaped(path)
    return UnsafeCheckpointError(
        f"{shown}: files with ':' or a backslash in their name, or bytes that are not UTF-8, are neither read nor "
        "written; nothing was touched: rename the file, or give the path of a symbolic link to it with another name",
        kind="path_escape",
        path=shown,
    )


def path_escape(name: str, why: str) -> UnsafeCheckpointError:
    """Makes the error for a name that could reach outside the root."""
    return UnsafeCheckpointError(
        f"the name {name!r:.300} was refused: {why}; nothing was read or written: do not trust what asked for it",
        kind="path_escape",
        path=name[:300],
    )
