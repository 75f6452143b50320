"""Opens the store of a path or URL. URLs stay strings throughout: pathlib would collapse their double slash."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from bytecheckpoint.errors import CheckpointMismatchError, StorageError
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.paths import empty_path, join_name, path_text
from bytecheckpoint.storage.store import Store, full_location

_SCHEME = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")
"""Capitals in it mean the same, as in all URLs."""
_LOCAL_URL = re.compile(r"\A(?i:file|local)://")
_S3_URL = re.compile(r"\As3a?://[^/?#@:]+(?:/[^?]*)?\Z")
"""URLs without features of s3fs alone: names of access points, versions, chains of URLs."""
_S3_QUERY = re.compile(r"\As3a?://[^?]*\?")
_COLLAPSED_URL = re.compile(r"\A([a-z][a-z0-9+.-]+):/(?!/)")


def open_store(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None,
    writer_threads: int,
    timeout_s: float | None = None,
) -> Store:
    """Returns the store at a folder, a file:// URL or any URL that fsspec knows. Nothing is read, written or made yet.

    `timeout_s` is the timeout of the save or load, by default that of LoadOptions. A store in S3 gives up a request
    earlier; other stores ignore it.

    Raises CheckpointMismatchError (conflict) for storage options with a local path, and UnsafeCheckpointError
    (path_escape) for a local path with a NUL. Raises StorageError (unsupported) for an empty path, a URL that lost a
    slash, a URL of S3 with a query, and a URL that no installed backend serves; (unavailable) for storage options that
    the backend does not accept.
    """
    location = _SCHEME.sub(lambda scheme: scheme[0].lower(), expand_home(path_text(path)))
    if not location:
        raise empty_path()
    local = _LOCAL_URL.sub("", location)
    if local == location and ("://" in location or "::" in location):
        return _open_url(location, storage_options, writer_threads=writer_threads, timeout_s=timeout_s)
    if _is_collapsed_url(local):
        shown = showable_url(local)
        raise StorageError(
            f"{shown!r} looks like a URL that lost a slash, as pathlib makes them; nothing was read or written: pass "
            "URLs as strings",
            kind="unsupported",
            path=shown,
        )
    if storage_options:
        raise CheckpointMismatchError(
            f"storage_options ({', '.join(sorted(storage_options))}) were given for the local path {local}, which "
            "takes none; nothing was read or written: leave them out, or give a URL",
            kind="conflict",
            path=local,
        )
    return LocalStore(local, writer_threads=writer_threads)


def expand_home(path: str) -> str:
    """Returns the path with a leading `~` or `~user` expanded; a URL stays unchanged."""
    return os.path.expanduser(path) if path.startswith("~") and is_plain_path(path) else path  # noqa: PTH111 - text


def absolute_path(path: str) -> str:
    """Returns the absolute path for a local path or a local URL, with `~` expanded, and any other URL unchanged."""
    return os.path.abspath(_LOCAL_URL.sub("", expand_home(path))) if is_local(path) else path  # noqa: PTH100 - text


def is_local(path: str) -> bool:
    """Returns True for a path that is not empty, and a file:// or local:// URL: these take no storage options."""
    return bool(_LOCAL_URL.match(path)) or is_plain_path(path)


def is_plain_path(path: str) -> bool:
    """Returns True for a path; False for an empty text and for a URL, also one that lost a slash: a URL may hold
    credentials, which must not be taken for parts of a path.
    """
    return bool(path) and "://" not in path and "::" not in path and not _is_collapsed_url(path)


def _is_collapsed_url(path: str) -> bool:
    collapsed = _COLLAPSED_URL.match(path)
    if collapsed is None:
        return False
    from bytecheckpoint.storage.backends.fsspec_store import is_known_protocol  # noqa: PLC0415 - as in _open_url

    return is_known_protocol(collapsed.group(1))


def _open_url(
    url: str, storage_options: Mapping[str, object] | None, *, writer_threads: int, timeout_s: float | None
) -> Store:
    if _S3_QUERY.match(url):
        raise StorageError(
            f"the URL {showable_url(url)} goes on with a query ('?...'), which would become a part of every object's "
            "name; nothing was read or written: give credentials and other options as storage_options",
            kind="unsupported",
            path=showable_url(url),
        )
    # Local folders wait for neither fsspec nor botocore.
    from bytecheckpoint.storage.backends.fsspec_store import FsspecStore  # noqa: PLC0415

    # A session of aiobotocore, which is an option of s3fs, only works with s3fs.
    if not _S3_URL.match(url) or "session" in (storage_options or {}):
        return FsspecStore(url, storage_options)
    from bytecheckpoint.storage.backends.s3_store import S3Store  # noqa: PLC0415

    timeout_s = LoadOptions().timeout_s if timeout_s is None else timeout_s
    return S3Store(url, storage_options, writer_threads=writer_threads, timeout_s=timeout_s)


def is_remote(store: Store) -> bool:
    """Returns True unless the store is a LocalStore. Reads from a remote store are assumed to be slower than receiving
    the bytes from another rank.
    """
    return not isinstance(store, LocalStore)


def real_location(store: Store, folder: str) -> str:
    """Does what `full_location` does; for a local folder, the text is the same through every symbolic link."""
    return full_location(store, folder) if is_remote(store) else os.path.realpath(join_name(str(store), folder))
