"""A store at any URL that fsspec knows. It uses whole objects and exact ranges only, without caches and read-ahead, and
checks that answers are complete. It uses no transaction of fsspec: that would affect other users of the instance.
"""

from __future__ import annotations

import errno
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import fsspec.core
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations, registry
from fsspec.spec import AbstractFileSystem

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.backends.fsspec_upload import FsspecUpload, reason_against_replacing, send, takes
from bytecheckpoint.storage.backends.posix_errors import (
    already_exists,
    is_a_file,
    read_error,
    too_long,
    truncated,
    write_error,
)
from bytecheckpoint.storage.credentials import contains_secret, describe_safely, find_secrets, showable_url
from bytecheckpoint.storage.inventory import StoredObject, time_of
from bytecheckpoint.storage.object_io import count_bytes
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, check_name, join_name
from bytecheckpoint.storage.store import Access, FillHook, one_block

_READ_BYTES = 64 << 20
"""Length of one request of a read into a buffer: the backend's copy of it costs memory."""
_LOOKS_IN_FLIGHT = 16
_MAX_READS = 10
"""Attempts to read an object that others replace meanwhile."""
_ACCESS = Access(latency_s=20e-3, bytes_per_s=100e6)
"""Figures of an object store in the same region."""

_LOCAL_PATH = re.compile(r"(?!.*://).*[^a-z]")
"""A part of a chained URL without a protocol: fsspec takes words of small letters alone for one."""
_NO_OBJECT = re.compile("[?#:]")
"""In a web server's listing, which has no sizes: links to itself in another order, to parts of the page, to people."""

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'bytecheckpoint[s3fs]'"),
    **dict.fromkeys(("gs", "gcs"), "'bytecheckpoint[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "'bytecheckpoint[azure]'"),
    **dict.fromkeys(("webdav", "dav"), "'bytecheckpoint[webdav]'"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), "pyarrow"),
    **dict.fromkeys(("http", "https"), "aiohttp requests"),
    "oss": "ossfs",
    "oci": "ocifs",
    "smb": "smbprotocol",
    "webhdfs": "requests",
    "hf": "huggingface_hub",
}
"""Packages to install for a protocol: extras of this package for protocols that its tests cover."""

_ENDPOINT_OPTIONS = ("endpoint_url", "endpoint", "base_url", "account_name", "account_host", "host", "port")


class _ToError(Protocol):
    """Makes this library's error out of a backend's; `shown` is the object's URL, `reason` the backend's message."""

    def __call__(self, error: BaseException, shown: str, /, *, reason: str) -> CheckpointError: ...


def is_known_protocol(protocol: str) -> bool:
    """Returns True if fsspec knows the protocol; the package that serves it may still be missing."""
    return protocol in known_implementations or protocol in registry


class FsspecStore:
    """Objects below a URL. `str()` gives the URL without credentials, for messages."""

    def __init__(self, url: str, storage_options: Mapping[str, object] | None) -> None:
        options = dict(storage_options or {})
        self._shown = showable_url(url)
        self._secrets = find_secrets(url, options)
        self._protocols = [part.partition("://")[0] for part in self._shown.split("::") if not _LOCAL_PATH.match(part)]
        for protocol in self._protocols:
            if not is_known_protocol(protocol):
                raise self._unsupported(f"no backend is known for the protocol {protocol!r}")
        with self._translated(self._shown, self._open_error):
            self._fs, root = fsspec.core.url_to_fs(url, **options)
            self._root = str(root).rstrip("/")
            self._endpoint = _endpoint_of(self._fs, options)

    def __str__(self) -> str:
        return self._shown

    @property
    def endpoint(self) -> str:
        """Service and account from the options or the environment; empty if neither has them."""
        return self._endpoint

    @property
    def access(self) -> Access:
        return _ACCESS

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Implements `Store`. If the backend has no create-only write, two concurrent writers may both succeed."""
        path, shown = self._path(name), self._show(name)
        upload = FsspecUpload(path, count_bytes(blocks), replace=replace)
        cannot_replace = bool(reason_against_replacing(self._fs))
        with self._translated(shown, read_error):
            is_taken = (cannot_replace or not replace) and self._has_object(path)
        if is_taken and not replace:
            raise already_exists(shown)
        if is_taken:
            self.check_replaceable()

        def to_error(error: BaseException, path: str, *, reason: str, may_be_done: bool) -> CheckpointError:
            # The name was free before, so an object there now that is not the one sent is another writer's.
            if isinstance(error, FileExistsError) or (not replace and self._has_sent(upload) is False):
                return already_exists(path)
            needed = upload.num_bytes
            return write_error(
                error, path, reason=reason, needed_bytes=needed, free_bytes=None, may_be_done=may_be_done
            )

        def is_done() -> bool:
            return any(self._has_sent(upload) for _ in range(2))  # the answer to a look may be lost too

        def backend(*, may_be_done: bool = False) -> AbstractContextManager[None]:
            failed = partial(to_error, may_be_done=may_be_done)
            return self._translated(shown, failed, is_done=is_done if may_be_done else None)

        send(self._fs, upload, blocks, backend)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        flat = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        for start in range(0, flat.nbytes, _READ_BYTES):
            part = flat[start : start + _READ_BYTES]
            part[:] = self.read_bytes(name, byte_offset + start, part.nbytes)
            if on_filled is not None:
                on_filled(start + part.nbytes)

    def read_bytes(self, name: str, byte_offset: int, byte_length: int) -> bytes:
        """Implements `SupportsReadBytes`."""
        if not byte_length:
            return b""
        path, shown, end = self._path(name), self._show(name), byte_offset + byte_length
        with self._translated(shown, self._range_error(path, end)):
            data: bytes = self._fs.cat_file(path, start=byte_offset, end=end, **self._no_read_ahead())
        if len(data) > byte_length:
            raise read_error(NotImplementedError(), shown, reason=f"it sent {len(data)} bytes, not {byte_length}")
        if len(data) != byte_length:
            with self._translated(shown, read_error):
                self._info(path)  # it may have been deleted meanwhile
            raise truncated(shown, wanted_end=end, found_end=byte_offset + len(data))
        return data

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """Implements `SupportsReadWhole`. A backend that reads through an open file takes the length from an earlier
        request, so the object is looked up again afterwards, and read again if it has changed.

        Raises StorageError (unavailable) if it changes each time.
        """
        path, shown, options = self._path(name), self._show(name), self._no_read_ahead()
        for _ in range(_MAX_READS):
            with self._translated(shown, read_error):
                before = self._info(path, needs_size=True)
                if int(before["size"]) > max_bytes:
                    raise too_long(shown, int(before["size"]), max_bytes)
                content: bytes = self._fs.cat_file(path, **options)
                if not options or (len(content) == before["size"] and self._info(path) == before):
                    return content
        raise StorageError(
            f"cannot read {shown}: it was replaced {_MAX_READS} times while it was read; nothing stored was changed: "
            "try again",
            kind="unavailable",
            path=shown,
        )

    def list(self, folder: str) -> Mapping[str, int | None]:
        path, shown = (self._path(folder), self._show(folder)) if folder else (self._root, self._shown)
        try:
            with self._translated(shown, _list_error):
                entries = self._entries(path)
        except CheckpointNotFoundError as error:
            if error.kind == "missing_file":
                return {}
            raise
        sizes: dict[str, int | None] = {}
        unsized: list[str] = []
        for entry in entries:
            entry_path = str(entry["name"]).strip("/")
            is_folder = entry["type"] == "directory"
            if entry_path == path.strip("/"):
                if is_folder or (str(entry["name"]).endswith("/") and "pathSuffix" not in entry):
                    continue  # an object that marks a folder: consoles make them
                raise is_a_file(shown)
            last = entry_path.rpartition("/")[2]
            if last.startswith(TEMPORARY_PREFIX):
                continue
            if is_folder:
                sizes.setdefault(last, None)
            elif (size := entry.get("size")) is not None:
                sizes[last] = int(size)
            elif not _NO_OBJECT.search(last):
                unsized.append(last)
        lengths = map_jobs(lambda last: self._length(join_name(folder, last)), unsized, num_threads=_LOOKS_IN_FLIGHT)
        return sizes | dict(zip(unsized, lengths, strict=True))

    def _length(self, name: str) -> int:
        with self._translated(self._show(name), read_error):
            return int(self._info(self._path(name), needs_size=True)["size"])

    def list_many(self, folders: Sequence[str]) -> Sequence[Mapping[str, int | None] | None]:
        """Implements `SupportsListMany` by one pass through a `memory://` store. None for each folder elsewhere."""
        if not isinstance(self._fs, MemoryFileSystem):
            return [None] * len(folders)
        listings: dict[str, dict[str, int | None]] = {folder: {} for folder in folders}
        for stored in self.inventory(""):
            parts = stored.name.split("/")
            for depth in range(1, len(parts)):
                listing = listings.get("/".join(parts[:depth]))
                if listing is not None and not parts[depth].startswith(TEMPORARY_PREFIX):
                    listing[parts[depth]] = stored.num_bytes if depth == len(parts) - 1 else listing.get(parts[depth])
        return [listings[folder] or None for folder in folders]  # an empty listing may be an object's

    def in_folders(self, folders: Sequence[str], name: str) -> Sequence[bool | None]:
        """Implements `SupportsInFolders`: reads one byte of each object; a listing would go through a whole `memory://`
        store. Returns None for each folder if the backend reads through an open file, which takes several requests.
        """
        if self._no_read_ahead():
            return [None] * len(folders)
        return map_jobs(lambda folder: self._is_there(join_name(folder, name)), folders, num_threads=_LOOKS_IN_FLIGHT)

    def _is_there(self, name: str) -> bool | None:
        """Returns True for an object, False for a free name, None if reading a byte does not tell."""
        path = self._path(name)
        try:
            with self._translated(self._show(name), read_error):
                return bool(self._fs.cat_file(path, start=0, end=1)) or None  # an empty object, or the mark of a folder
        except CheckpointNotFoundError:
            return False
        except CheckpointError:
            return None

    def delete(self, name: str) -> None:
        with suppress(CheckpointNotFoundError), self._translated(self._show(name), partial(read_error, doing="delete")):
            self._fs.rm_file(self._path(name))

    def check_replaceable(self) -> None:
        """Implements `UnconditionalStore`."""
        reason = reason_against_replacing(self._fs)
        if reason:
            raise StorageError(
                f"{self._shown} cannot replace a checkpoint in one step ({reason}), so a failure would leave no "
                "checkpoint at all; nothing was written, and the existing checkpoint is unchanged: save to another "
                "path or step, or delete the checkpoint first with bcp.delete",
                kind="unsupported",
                path=self._shown,
            )

    def check_writable(self) -> None:
        """Implements `RemoteStore`: writes an empty object under a name that no listing shows, and deletes it. Only
        warns if deleting is not allowed.
        """
        name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-writable"
        self.write(name, one_block(b""), replace=True)
        try:
            self.delete(name)
        except StorageError as error:
            if error.kind != "permission":
                raise
            warnings.warn(
                f"{self._show(name)}, an empty object that showed that checkpoints can be written, stays, because "
                "deleting is not allowed. Checkpoints can be saved; old ones stay too until the credentials may delete",
                stacklevel=2,
            )

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        """Implements `HasInventory` by fsspec's `find`: one listing of everything, if the backend can do that."""
        root = self._root.strip("/")
        try:
            with self._translated(self._shown, read_error):
                self._fs.invalidate_cache()
                found = self._fs.find(self._path(folder) if folder else self._root, detail=True)
        except CheckpointNotFoundError:
            return
        for path, entry in found.items():
            name = str(path).strip("/").removeprefix(root).strip("/")
            if name:
                yield StoredObject(name, int(entry.get("size") or 0), time_of(entry))

    def _path(self, name: str) -> str:
        path = f"{self._root}/{check_name(name)}"
        return path.lstrip("/") if isinstance(self._fs, AbstractArchiveFileSystem) else path

    def _show(self, name: str) -> str:
        return join_name(self._shown, name)

    def _entries(self, path: str) -> Sequence[Mapping[str, Any]]:
        # Invalidating alone races with a listing of another thread.
        fresh = {"refresh": True} if takes(self._fs, "ls", "refresh") else {}
        for _ in range(_MAX_READS):
            self._fs.invalidate_cache(path)
            with suppress(KeyError):  # fsspec's memory: an object that was deleted while it listed
                entries: Sequence[Mapping[str, Any]] = self._fs.ls(path, detail=True, **fresh)
                return entries
        raise OSError(errno.EAGAIN, "objects are deleted faster than they can be listed", path)

    def _no_read_ahead(self) -> dict[str, str]:
        """Returns options that keep a backend that reads through an open file from reading ahead; none for others."""
        is_through_file = getattr(self._fs.cat_file, "__func__", None) is AbstractFileSystem.cat_file
        return {"cache_type": "none"} if is_through_file else {}

    def _info(self, path: str, *, needs_size: bool = False) -> Mapping[str, Any]:
        """Returns the backend's entry for an object, past its cache. Raises FileNotFoundError for a folder."""
        self._fs.invalidate_cache(path)
        info: Mapping[str, Any] = self._fs.info(path)
        if info["type"] == "directory":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", path)
        if needs_size and info.get("size") is None:
            raise NotImplementedError("it does not tell the length of this object")
        return info

    def _has_object(self, path: str) -> bool:
        try:
            return bool(self._info(path))
        except FileNotFoundError:
            return False

    def _has_sent(self, upload: FsspecUpload) -> bool | None:
        """Returns True if the object is there as it was sent, False if another one is, None if none or on an error."""
        with suppress(CheckpointError), self._translated(self._shown, read_error):
            return bool(self._info(upload.path)) and upload.is_at(self._fs)
        return None

    def _range_error(self, path: str, wanted_end: int) -> _ToError:
        def to_error(error: BaseException, shown: str, *, reason: str) -> CheckpointError:
            # A range that starts behind the end is an error of the backend's own, not a short answer.
            with suppress(CheckpointError), self._translated(shown, read_error):
                size = int(self._info(path, needs_size=True)["size"])
                if size < wanted_end:
                    return truncated(shown, wanted_end=wanted_end, found_end=size)
            return read_error(error, shown, reason=reason)

        return to_error

    def _open_error(self, error: BaseException, path: str, *, reason: str) -> CheckpointError:
        if isinstance(error, ImportError):
            return self._unsupported(reason)
        return StorageError(
            f"cannot open {path}: {reason}; nothing was read or written: check the URL and storage_options",
            kind="unavailable",
            path=path,
        )

    def _unsupported(self, reason: str) -> StorageError:
        packages = [_PACKAGES[protocol] for protocol in self._protocols if protocol in _PACKAGES]
        return StorageError(
            f"cannot open {self._shown}: {reason}; nothing was read or written: check the URL, or install its backend "
            f"(`pip install {' '.join(packages) or 'PACKAGE'}`; fsspec's documentation lists which package serves "
            "which protocol)",
            kind="unsupported",
            path=self._shown,
        )

    @contextmanager
    def _translated(
        self, shown: str, to_error: _ToError, *, is_done: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Translates what the backend raises into this library's errors. Raises nothing if `is_done` returns True."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - client libraries raise classes of their own, unknown here
            if is_done is not None and is_done():
                return
            translated = to_error(error, shown, reason=describe_safely(error, self._secrets))
            # A traceback prints the whole chain of errors, so a chain that repeats a credential is cut off.
            raise translated from None if contains_secret(error, self._secrets) else error


def _endpoint_of(fs: AbstractFileSystem, options: Mapping[str, object]) -> str:
    client_options = options.get("client_kwargs")
    given = {**(client_options if isinstance(client_options, Mapping) else {}), **options}
    # adlfs finds the account in connection strings and in the environment.
    given = {"account_name": getattr(fs, "account_name", None), **given}
    return ", ".join(showable_url(str(given[name])).rstrip("/") for name in _ENDPOINT_OPTIONS if given.get(name))


def _list_error(error: BaseException, shown: str, /, *, reason: str) -> CheckpointError:
    return is_a_file(shown) if isinstance(error, NotADirectoryError) else read_error(error, shown, reason=reason)
