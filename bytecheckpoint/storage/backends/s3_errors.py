"""Classification of botocore's errors, and their translation into this library's. The one place that knows S3's codes;
it makes no request.
"""

from __future__ import annotations

import http.client
from typing import NamedTuple

import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointSaveError,
    StorageError,
    TransferProgress,
    describe_progress,
)
from bytecheckpoint.storage.backends.posix_errors import missing_file

S3_ERRORS = (BotoCoreError, ClientError, ResponseParserError, urllib3.exceptions.HTTPError, OSError)
"""Everything that a request raises."""

_THROTTLED = frozenset({"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException"})
_THROTTLED |= {"RequestThrottled", "RequestLimitExceeded", "TooManyRequests", "TooManyRequestsException"}
_TRANSIENT = frozenset({"RequestTimeout", "InternalError", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"})
_TRANSIENT |= {"ConditionalRequestConflict", "OperationAborted", "XAmzContentChecksumMismatch"}
_UNSUPPORTED = frozenset({"NotImplemented", "501"})
_TAKEN = frozenset({"PreconditionFailed", "412"})
_NO_BUCKET = "NoSuchBucket"
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_NO_SPACE = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientCapacity"})
_REFUSED = frozenset({"403", "AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidAccessKeyId"})
_REFUSED |= {"SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "NotSignedUp", "401"}
_REFUSED |= {"RequestTimeTooSkewed", "InvalidPayer", "Forbidden", "MethodNotAllowed", "405", "InvalidSecurity"}
_UNREACHABLE = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_BROKEN_CONNECTION = (OSError, urllib3.exceptions.HTTPError, http.client.HTTPException)


class FailedRequestError(Exception):
    """A request that was given up. `error` is what the last attempt raised."""

    def __init__(self, error: Exception, *, num_attempts: int, seconds: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.num_attempts = num_attempts
        self.seconds = seconds
        self.may_arrive = False
        """True if an earlier attempt may still be carried out, though the last one was refused."""
        self.progress: TransferProgress | None = None
        """Progress of the transfer that the request was a part of, if known."""


class Service(NamedTuple):
    """The service, for messages."""

    endpoint: str
    bucket: str


def code_of(error: BaseException) -> str:
    """Returns S3's code, or the status if the answer had no body; "" without an answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _status_of(error: BaseException) -> int:
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_throttled(error: BaseException) -> bool:
    """Returns True if the service asks for fewer requests."""
    return code_of(error) in _THROTTLED or _status_of(error) in {429, 503}


def is_unreachable(error: BaseException) -> bool:
    """Returns True if no connection could be made."""
    return isinstance(error, _UNREACHABLE)


def is_no_answer(error: BaseException) -> bool:
    """Returns True if no server could be reached, or TLS with it failed, for example because of its certificate."""
    return is_unreachable(error) or isinstance(error, SSLError)


def is_transient(error: BaseException) -> bool:
    """Returns True if the same request may succeed later. It may also have been carried out already."""
    if isinstance(error, ClientError):
        is_trouble = _status_of(error) >= 500 and not (is_unsupported(error) or is_full(error))
        return is_throttled(error) or is_trouble or code_of(error) in _TRANSIENT
    if type(error) is HTTPClientError:  # botocore wraps whatever is raised while it sends
        return isinstance(getattr(error, "kwargs", {}).get("error"), _BROKEN_CONNECTION)
    lost = (BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError)
    return isinstance(error, lost + _BROKEN_CONNECTION)


def may_arrive(error: BaseException) -> bool:
    """Returns True if the request may still be carried out: it may have been sent, and no answer says that it was
    refused.
    """
    is_over = is_unreachable(error) or is_throttled(error) or code_of(error) in _REFUSED
    return is_transient(error) and not is_over


def is_taken(error: BaseException) -> bool:
    """Returns True if a condition of the request did not hold. With `IfNoneMatch`, the name to be created exists."""
    return code_of(error) in _TAKEN


def is_missing(error: BaseException) -> bool:
    """Returns True if there is no such object; for an answer without a body also no such bucket."""
    return code_of(error) in _MISSING


def is_no_upload(error: BaseException) -> bool:
    """Returns True if there is no such upload: it was completed or aborted."""
    return code_of(error) == "NoSuchUpload"


def is_unsupported(error: BaseException) -> bool:
    """Returns True if the service does not support the request."""
    return code_of(error) in _UNSUPPORTED


def is_full(error: BaseException) -> bool:
    """Returns True if there is no space left."""
    return code_of(error) in _NO_SPACE or _status_of(error) == 507


def is_past_the_end(error: BaseException) -> bool:
    """Returns True if a range starts behind the end of the object."""
    return code_of(error) in {"InvalidRange", "416"}


def describe_s3(error: BaseException) -> str:
    """Returns the service's message with its code, or the client's message without an answer."""
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message", ""))
        return f"{code_of(error)}: {message}" if message and message != code_of(error) else code_of(error)
    return str(error) or type(error).__name__


def to_store_error(
    failed: FailedRequestError, shown: str, *, doing: str, reason: str, service: Service
) -> CheckpointError:
    """Makes a CheckpointNotFoundError (missing_file), a StorageError, or, only if `doing` is "write", a
    CheckpointSaveError (no_space, storage).

    `shown` is the object's URL, `reason` the part of `describe_s3` that may be shown.
    """
    error, is_write = failed.error, doing == "write"
    times = f"{failed.num_attempts} attempt{'s' if failed.num_attempts > 1 else ''}"
    pace = describe_progress(failed.progress) if failed.progress is not None and is_transient(error) else ""
    what = f"{doing} {shown}: {reason} (after {times} in {failed.seconds:.1f} s{'; ' if pace else ''}{pace})"
    if is_write and failed.may_arrive:
        advice = "find out why the last one was refused, and what is stored there now, before you try again"
        what = f"cannot {what}; an earlier attempt got no answer and may still be carried out: {advice}"
        return StorageError(what, kind="unavailable", path=shown)
    if is_missing(error):
        return missing_file(shown)
    if is_full(error) and is_write:
        return _save_error(what, shown, "free space or raise the quota, or save elsewhere", kind="no_space")
    if code_of(error) in _REFUSED or isinstance(error, _NO_CREDENTIALS):
        advice = "check the credentials, that they have not expired, the bucket's policy and this host's clock"
        return _storage_error(f"not allowed to {what}", shown, advice, kind="permission")
    if code_of(error) == _NO_BUCKET:
        what = f"cannot {doing} {shown}: there is no bucket {service.bucket!r} at {service.endpoint}"
        return _storage_error(what, shown, "check the URL, the region and endpoint_url", kind="unavailable")
    if is_unsupported(error):
        return _storage_error(f"this service cannot {what}", shown, "use another one", kind="unsupported")
    if is_transient(error):
        advice = f"{_how_to_reach(error, service)}, then try again"
        if doing in {"write", "delete"}:  # it may have been carried out
            return StorageError(f"cannot {what}: {advice}", kind="unavailable", path=shown)
        return _storage_error(f"cannot {what}", shown, advice, kind="unavailable")
    if is_write:
        return _save_error(what, shown, "check the storage, then save again", kind="storage")
    return _storage_error(f"cannot {what}", shown, "check the storage, then try again", kind="unavailable")


def _how_to_reach(error: BaseException, service: Service) -> str:
    if isinstance(error, SSLError):
        return (
            f"check that {service.endpoint} speaks TLS (else endpoint_url must begin with http://), and name the file "
            'of the CA certificate with client_kwargs={"verify": CA_FILE}'
        )
    return f"check that {service.endpoint} is the right endpoint_url and can be reached from this host"


def _storage_error(what: str, shown: str, advice: str, *, kind: str) -> StorageError:
    return StorageError(f"{what}; nothing that is committed was changed: {advice}", kind=kind, path=shown)


def _save_error(what: str, shown: str, advice: str, *, kind: str) -> CheckpointSaveError:
    return CheckpointSaveError(f"cannot {what}; nothing was published under this name: {advice}", kind=kind, path=shown)
