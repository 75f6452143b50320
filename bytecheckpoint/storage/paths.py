"""Names of objects in a store: joined, and refused if they could lead out of it. Knows no backend."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from bytecheckpoint.errors import CheckpointMismatchError, UnsafeCheckpointError
from bytecheckpoint.manifest.validation import UNSAFE_NAME

TEMPORARY_PREFIX = ".tmp-"
"""Start of the last part of a name that is still being written; no listing shows it."""
_MAX_SUFFIX_BYTES = 200
"""Bytes of an object's name that its temporary name repeats; file systems end names at 255 bytes."""


def temporary_name(last: str) -> str:
    """Returns a new temporary name for an object; `last` is the last part of the object's name."""
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


def join_name(*parts: str) -> str:
    """Joins the parts with a slash after each, unless it ends with one; empty parts vanish. Slashes in parts stay."""
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


def path_escape(name: str, why: str) -> UnsafeCheckpointError:
    """Makes the error for a name that could reach outside the root."""
    return UnsafeCheckpointError(
        f"the name {name!r:.300} was refused: {why}; nothing was read or written: do not trust what asked for it",
        kind="path_escape",
        path=name[:300],
    )
