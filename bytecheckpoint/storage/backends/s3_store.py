"""A store in a bucket of S3 or of a compatible service. Objects appear whole, by one request or by completing an
upload; nothing is cached, and no more is read than was requested.
"""

from __future__ import annotations

import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError

from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.threads import map_jobs, run_jobs
from bytecheckpoint.storage.backends.posix_errors import (
    already_exists,
    is_a_file,
    missing_file,
    replaced_meanwhile,
    too_long,
    truncated,
)
from bytecheckpoint.storage.backends.s3_client import client_for
from bytecheckpoint.storage.backends.s3_copy import S3CopySource, copy
from bytecheckpoint.storage.backends.s3_errors import (
    FailedRequestError,
    describe_s3,
    is_missing,
    is_no_upload,
    is_transient,
    to_store_error,
)
from bytecheckpoint.storage.backends.s3_requests import (
    EndOfObjectError,
    RangeIgnoredError,
    RetryPolicy,
    S3Requests,
    TooLongError,
)
from bytecheckpoint.storage.backends.s3_scan import ReadPage, find_keys, list_folders
from bytecheckpoint.storage.backends.s3_upload import TakenError, abort_uploads_of, begin_upload, new_target, send
from bytecheckpoint.storage.credentials import contains_secret, describe_safely, find_secrets, showable_url
from bytecheckpoint.storage.inventory import PendingUpload, StoredObject
from bytecheckpoint.storage.object_io import count_bytes
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, check_name, join_name
from bytecheckpoint.storage.store import Access, FillHook

Found = TypeVar("Found")

_URL = re.compile(r"\As3a?://([^/?#@:]+)(?:/(.*))?\Z", re.DOTALL)
_AMAZON = re.compile(r"\.(?:amazonaws\.com(?:\.cn)?|api\.aws)(?::\d+)?\Z")
_ACCESS = Access(latency_s=20e-3, bytes_per_s=100e6)
"""Figures of a bucket in the same region, through one connection."""
_CREDENTIALS = (
    *("key", "username", "secret", "password", "token"),
    *("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
)
_DELETE_MANY = "delete_objects"
_MAX_DELETIONS = 1000
"""Number of objects that one such request may name."""
_MIN_SCANNED = 4
"""Fewer keys are looked up one by one."""
_SCANNED_AT_ONCE = 2000
"""Number of keys that one thread scans for."""
_MIN_IN_FLIGHT = 8
"""Least number of requests in flight: one connection to S3 carries some 80 MB/s."""


class S3Store:
    """Objects below `s3://bucket/prefix`. `str()` gives the URL, for messages."""

    def __init__(
        self, url: str, storage_options: Mapping[str, object] | None, *, writer_threads: int, timeout_s: float
    ) -> None:
        """`storage_options` are s3fs's. A request is retried for half of `timeout_s`, so that other ranks, which wait
        for this one until `timeout_s` is over, get its error.

        Raises ValueError for a URL that is none of S3, and StorageError (unavailable) for options that cannot be used.
        """
        options = dict(storage_options or {})
        found = _URL.match(url)
        if found is None:
            raise ValueError(f"{showable_url(url)} is no URL of S3")
        bucket, self._prefix = found[1], (found[2] or "").strip("/")
        self._shown = showable_url(url)
        self._secrets = find_secrets(url, options)
        self._timeout_s = timeout_s / 2
        try:
            _check_credentials(options)
            client = client_for(options)
        except (BotoCoreError, ValueError, TypeError) as error:
            raise self._open_error(error) from None if contains_secret(error, self._secrets) else error
        self._secrets |= client.secrets
        self._requests = S3Requests(client, bucket)
        self._in_flight = client.num_connections or max(writer_threads, _MIN_IN_FLIGHT)

    def __str__(self) -> str:
        return self._shown

    @property
    def endpoint(self) -> str:
        """The host and port of the service; empty for Amazon, whose endpoints all lead to the same buckets."""
        host = self._requests.service.endpoint.partition("://")[2].rstrip("/").lower()
        return "" if _AMAZON.search(host) else host

    @property
    def access(self) -> Access:
        return _ACCESS

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Implements `Store`. If a service ignores `If-None-Match`, two concurrent writers may both succeed."""
        key, shown = self._key(name), self._show(name)
        num_bytes = count_bytes(blocks)
        with self._translated(shown, doing="write"):
            # A service without conditional writes would silently replace the object.
            if not replace and self._requests.head(key, self._policy()) is not None:
                raise already_exists(shown)
            target = new_target(key, replace=replace)
            try:
                send(self._requests, target, blocks, num_bytes, in_flight=self._in_flight, timeout_s=self._timeout_s)
            except TakenError as error:
                raise (replaced_meanwhile(shown) if replace else already_exists(shown)) from error

    def duplicate(self, source: str, name: str, *, num_bytes: int) -> None:
        """Implements `SupportsDuplicate` by a copy that the service makes. It replaces an object that another writer
        creates under the name meanwhile.
        """
        key, shown, policy = self._key(name), self._show(name), self._policy()
        with self._translated(shown, doing="write"):
            if self._requests.head(key, policy) is not None:
                raise already_exists(shown)
            found = self._requests.head(self._key(source), policy)
            if found is None or found.get("ContentLength") != num_bytes:
                raise missing_file(self._show(source))
            etag, bucket = str(found.get("ETag", "")), self._requests.service.bucket
            copy(
                self._requests,
                S3CopySource(bucket, self._key(source), etag, num_bytes),
                key,
                policy,
                in_flight=self._in_flight,
            )

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        key, shown = self._key(name), self._show(name)
        if not buffer.nbytes:
            return
        with self._translated(shown, doing="read"):
            try:
                self._requests.read_range(key, byte_offset, buffer.cast("B"), self._policy())
            except EndOfObjectError as error:
                wanted_end = byte_offset + buffer.nbytes
                raise truncated(shown, wanted_end=wanted_end, found_end=error.found_end) from error
        if on_filled is not None:  # not before: a retry writes over the same bytes
            on_filled(buffer.nbytes)

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """Implements `SupportsReadWhole`: one request, whose answer has the length."""
        key, shown = self._key(name), self._show(name)
        with self._translated(shown, doing="read"):
            try:
                return self._requests.read_object(key, self._policy(), max_bytes=max_bytes)
            except TooLongError as error:
                raise too_long(shown, error.num_bytes, max_bytes) from error

    def list(self, folder: str) -> Mapping[str, int | None]:
        prefix, shown = self._prefix_of(folder), self._show(folder)
        sizes: dict[str, int | None] = {}
        with self._translated(shown, doing="list"):
            for page in self._pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
                for entry in page.get("CommonPrefixes", ()):  # an object of that name may be on the page before
                    sizes.setdefault(str(entry["Prefix"])[len(prefix) :].removesuffix("/"), None)
                for entry in page.get("Contents", ()):
                    sizes[str(entry["Key"])[len(prefix) :]] = int(entry["Size"])
            if not sizes and prefix and self._requests.head(prefix.removesuffix("/"), self._policy()) is not None:
                raise is_a_file(shown)
        return _shown_names(sizes)

    def in_folders(self, folders: Sequence[str], name: str) -> Sequence[bool | None]:
        """Implements `SupportsInFolders`: one page of keys gives the answer for all folders that it covers."""
        keys = [self._key(join_name(folder, name)) for folder in folders]
        found = self._scan(find_keys, keys)
        return [found.get(key) for key in keys]

    def list_many(self, folders: Sequence[str]) -> Sequence[Mapping[str, int | None] | None]:
        """Implements `SupportsListMany` with pages of keys, as `in_folders` does."""
        prefixes = list(map(self._prefix_of, folders))
        found = self._scan(list_folders, prefixes)
        return [
            _shown_names(found.get(prefix, {})) or None for prefix in prefixes
        ]  # an empty listing may be an object's

    def _scan(
        self, scan: Callable[[Sequence[str], ReadPage], Mapping[str, Found]], keys: Sequence[str]
    ) -> Mapping[str, Found]:
        """Returns what the scan finds for the keys, many at a time; nothing for fewer than 4 keys, which are better
        looked up one by one.
        """
        if len(keys) < _MIN_SCANNED:
            return {}
        wanted = sorted(keys)
        parts = [wanted[start : start + _SCANNED_AT_ONCE] for start in range(0, len(wanted), _SCANNED_AT_ONCE)]

        def read_page(after: str) -> Mapping[str, Any]:
            return self._requests.call("list_objects_v2", self._policy(), Prefix=self._prefix_of(""), StartAfter=after)

        with self._translated(self._shown, doing="list"):
            scans = map_jobs(lambda part: scan(part, read_page), parts, num_threads=_MIN_IN_FLIGHT)
        return {key: found for part in scans for key, found in part.items()}

    def delete(self, name: str) -> None:
        with self._translated(self._show(name), doing="delete"):
            try:
                self._requests.call("delete_object", self._policy(), Key=self._key(name))
            except FailedRequestError as failed:
                if not is_missing(failed.error):  # some services refuse to delete an object that is gone
                    raise

    def delete_many(self, names: Sequence[str]) -> None:
        """Implements `SupportsDeleteMany` with up to 1,000 objects in a request. Objects that the answer does not name
        as deleted are deleted one by one, which raises the reason.
        """
        names_by_key = {self._key(name): name for name in names}
        keys = list(names_by_key)
        for start in range(0, len(keys), _MAX_DELETIONS):
            batch = keys[start : start + _MAX_DELETIONS]
            may_be_left = [names_by_key[key] for key in sorted(set(batch) - self._delete_at_once(batch))]
            run_jobs(self.delete, may_be_left, num_threads=_MIN_IN_FLIGHT)
            if len(may_be_left) == len(batch) > 1:
                self._requests.refuses.add(_DELETE_MANY)  # the service deletes objects, but not with that request

    def _delete_at_once(self, keys: Sequence[str]) -> set[str]:
        """Returns the keys that the service says it has deleted; none if it refuses the request or did so before, and
        none for a single key, which is not worth it.
        """
        if len(keys) == 1 or _DELETE_MANY in self._requests.refuses:
            return set()
        with self._translated(self._shown, doing="delete"):
            try:
                objects = [{"Key": key} for key in keys]
                answer = self._requests.call(_DELETE_MANY, self._policy(), Delete={"Objects": objects})
            except FailedRequestError as failed:
                if is_transient(failed.error):
                    raise
                return set()
        return {str(entry["Key"]) for entry in answer.get("Deleted", ())}

    def check_writable(self) -> None:
        """Implements `RemoteStore`: begins an upload and aborts it. Only warns if aborting is refused; raises nothing
        for a service that has no uploads in parts.
        """
        key = join_name(self._prefix, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-writable")
        lost: list[bool] = []
        try:
            with self._translated(self._shown, doing="write"):
                upload_id = begin_upload(self._requests, key, self._policy(), on_lost=lambda: lost.append(True))
            self._check_abort(key, upload_id)
        except StorageError as error:
            if error.kind != "unsupported":  # such a service may still take objects in one request
                raise
        finally:
            if lost:
                abort_uploads_of(self._requests, key)

    def _check_abort(self, key: str, upload_id: str) -> None:
        try:
            self._requests.call("abort_multipart_upload", self._policy(), Key=key, UploadId=upload_id)
        except FailedRequestError as failed:
            if is_no_upload(failed.error):  # it was aborted, and the answer was lost
                return
            reason = describe_safely(_described_error(failed), self._secrets)
            warnings.warn(
                f"{self._shown}: an upload that fails cannot be cleaned up ({reason}), and what was sent of it stays "
                "and is paid for: allow s3:AbortMultipartUpload, or let a lifecycle rule remove incomplete uploads",
                stacklevel=2,
            )

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        """Implements `HasInventory`."""
        with self._translated(join_name(self._shown, folder), doing="list"):
            for page in self._pages("list_objects_v2", Prefix=self._prefix_of(folder)):
                for entry in page.get("Contents", ()):
                    modified_s = entry["LastModified"].timestamp()
                    yield StoredObject(self._name(entry["Key"]), int(entry["Size"]), modified_s)

    def pending_uploads(self, folder: str) -> Sequence[PendingUpload]:
        """Implements `HasPendingUploads`."""
        with self._translated(join_name(self._shown, folder), doing="list"):
            return [
                PendingUpload(self._name(entry["Key"]), str(entry["UploadId"]), entry["Initiated"].timestamp())
                for page in self._pages("list_multipart_uploads", Prefix=self._prefix_of(folder))
                for entry in page.get("Uploads", ())
            ]

    def abort_upload(self, upload: PendingUpload) -> None:
        """Implements `HasPendingUploads`."""
        with self._translated(self._show(upload.name), doing="delete"):
            try:
                key, upload_id = self._key(upload.name), upload.upload_id
                self._requests.call("abort_multipart_upload", self._policy(), Key=key, UploadId=upload_id)
            except FailedRequestError as failed:
                if not is_no_upload(failed.error):
                    raise

    def _pages(self, operation: str, **parameters: Any) -> Iterator[Mapping[str, Any]]:
        markers = {"NextContinuationToken": "ContinuationToken", "NextKeyMarker": "KeyMarker"}
        markers["NextUploadIdMarker"] = "UploadIdMarker"
        while True:
            page = self._requests.call(operation, self._policy(), **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            parameters |= {markers[name]: value for name, value in page.items() if name in markers}

    def _policy(self) -> RetryPolicy:
        return RetryPolicy(self._timeout_s)

    def _key(self, name: str) -> str:
        return join_name(self._prefix, check_name(name))

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def _prefix_of(self, folder: str) -> str:
        """Returns the start of the keys of all objects in a folder ("" is the root)."""
        key = self._key(folder) if folder else self._prefix
        return f"{key}/" if key else ""

    def _show(self, name: str) -> str:
        return join_name(self._shown, name)

    @contextmanager
    def _translated(self, shown: str, *, doing: str) -> Iterator[None]:
        try:
            yield
        except FailedRequestError as failed:
            reason = describe_safely(_described_error(failed), self._secrets)
            error = to_store_error(failed, shown, doing=doing, reason=reason, service=self._requests.service)
            # A traceback prints the whole chain of errors, so a chain that repeats a credential is cut off.
            raise error from None if contains_secret(failed.error, self._secrets) else failed.error
        except RangeIgnoredError as error:
            raise StorageError(
                f"this service cannot read parts of {shown}: {error}; nothing was changed: use another one",
                kind="unsupported",
                path=shown,
            ) from error

    def _open_error(self, error: Exception) -> StorageError:
        return StorageError(
            f"cannot open {self._shown}: {describe_safely(error, self._secrets)}; nothing was read or written: check "
            "the URL and storage_options",
            kind="unavailable",
            path=self._shown,
        )


def _shown_names(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    # An object with the folder's own name is a marker that consoles make.
    return {name: size for name, size in sizes.items() if name and not name.startswith(TEMPORARY_PREFIX)}


def _check_credentials(options: Mapping[str, object]) -> None:
    """Raises TypeError for credentials that are not text: signing a request would fail with an unclear error."""
    client_arguments = options.get("client_kwargs")
    given = {**(client_arguments if isinstance(client_arguments, Mapping) else {}), **options}
    for name in _CREDENTIALS:
        if not isinstance(given.get(name), str | None):
            raise TypeError(f"storage_options[{name!r}] is of type {type(given[name]).__name__}, and has to be a str")


def _described_error(failed: FailedRequestError) -> Exception:
    """Returns an exception for a message: it has the service's text and the notes of the error."""
    return Exception("; ".join([describe_s3(failed.error), *getattr(failed, "__notes__", ())]))
