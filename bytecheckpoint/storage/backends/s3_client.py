"""Clients of botocore, made from the options that s3fs takes, so that one dict of storage options serves both; and
the reading of response bodies. Clients are cached in the process, because making one costs more than many requests.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody
from fsspec.config import apply_config

BROKEN_OFF = "the answer broke off within its headers"

_SEND_BYTES = 256 << 10
_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 30
_MAX_CONNECTIONS = 64
_MAX_CACHED_CLIENTS = 16

_FILE_OPTIONS = frozenset(
    {
        *("default_block_size", "default_fill_cache", "default_cache_type", "version_aware", "fixed_upload_size"),
        *("local_expiry_check", "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
        *("cache_regions", "asynchronous", "loop", "batch_size"),
    }
)
"""Options of s3fs for open files, caches and its event loop, which have no meaning here."""


class S3Client(NamedTuple):
    """A client and its settings."""

    client: Any
    extra_parameters: Mapping[str, Any]
    """Parameters added to every request that takes them."""
    num_connections: int | None
    """`max_concurrency` of the options; None if they have none."""
    secrets: frozenset[str]
    """Texts of the credentials, wherever they come from."""
    has_answered: threading.Event
    """Set once the service has answered any request of this client."""


class _S3:
    """Stand-in for a file system class: fsspec finds its configuration by the protocol."""

    protocol = ("s3", "s3a")


@dataclass(frozen=True)
class _ClientKey:
    process: int
    """Process id: connections do not outlive a fork."""
    text: str
    """The options as text, by which keys are compared."""
    options: Mapping[str, Any] = field(compare=False)


def client_for(options: Mapping[str, Any]) -> S3Client:
    """Returns the process' client for these options and fsspec's configuration.

    Raises ValueError, BotoCoreError or TypeError for options that make no client.
    """
    options = {str(name): value for name, value in apply_config(_S3, dict(options)).items()}
    return _make_client(_ClientKey(os.getpid(), json.dumps(options, sort_keys=True, default=repr), options))


@lru_cache(maxsize=_MAX_CACHED_CLIENTS)
def _make_client(key: _ClientKey) -> S3Client:
    """Makes a client. Only a search for credentials, if the options give none, makes requests."""
    options = {name: value for name, value in key.options.items() if name not in _FILE_OPTIONS}
    num_connections = options.pop("max_concurrency", None)
    extra = dict(options.pop("s3_additional_kwargs", None) or {})
    if options.pop("requester_pays", False):
        extra["RequestPayer"] = "requester"
    session, session_lock = _session(key.process, options.pop("profile", None))
    arguments, settings = _client_arguments(options)
    with session_lock:
        client = _create(session, arguments, settings)
    client.meta.events.register("before-send.s3", _send_in_parts)
    client.meta.events.register("before-parse.s3", _refuse_truncated_answer)
    secrets = {arguments.get("aws_secret_access_key"), arguments.get("aws_session_token")}
    # Only if none are given: looking for them may query a metadata service that the host does not have.
    if secrets == {None} and settings.get("signature_version") is not UNSIGNED and (keys := session.get_credentials()):
        secrets = {keys.secret_key, keys.token}
    return S3Client(client, extra, num_connections, frozenset(filter(None, secrets)), threading.Event())


@lru_cache(maxsize=_MAX_CACHED_CLIENTS)
def _session(_process: int, profile: str | None) -> tuple[Any, threading.Lock]:
    """Returns a session, which makes clients for one thread at a time, and the lock for that. Cached, because a session
    caches the description of S3 that its clients need.
    """
    return botocore.session.Session(profile=profile), threading.Lock()


def _create(session: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Makes a client whose request bodies are verified once, not twice: over TLS by a checksum, else by a signature."""
    s3 = {"payload_signing_enabled": False, **(settings.get("s3") or {})}
    client = session.create_client("s3", config=Config(**{**settings, "s3": s3}), **arguments)
    if str(client.meta.endpoint_url).startswith("https:"):
        return client
    settings = {"request_checksum_calculation": "when_required", **settings}
    return session.create_client("s3", config=Config(**settings), **arguments)


def _client_arguments(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `create_client` and of its Config, and empties `options`. Raises ValueError for an
    unknown option, or one that is given under both of its names.
    """
    is_anonymous = options.pop("anon", False)
    settings = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "max_pool_connections": _MAX_CONNECTIONS,
        "retries": {"total_max_attempts": 1},  # S3Requests retries: it knows which requests may be repeated
        "response_checksum_validation": "when_required",  # every extent has a checksum of its own
        "parameter_validation": False,  # it would refuse a memoryview
        **(options.pop("config_kwargs", None) or {}),
    }
    arguments = {
        "aws_access_key_id": _one_of(options, "key", "username"),
        "aws_secret_access_key": _one_of(options, "secret", "password"),
        "aws_session_token": options.pop("token", None),
        "endpoint_url": options.pop("endpoint_url", None),
        "use_ssl": options.pop("use_ssl", True),
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    arguments = {**given, **(options.pop("client_kwargs", None) or {})}
    if options:
        raise ValueError(f"S3 takes no options named {', '.join(sorted(options))}")
    if is_anonymous:
        settings["signature_version"] = UNSIGNED
        arguments = {name: value for name, value in arguments.items() if not name.startswith("aws_")}
    return arguments, settings


def _one_of(options: dict[str, Any], name: str, other: str) -> Any:
    """Removes an option that has two names, and returns its value; None if neither is given. Raises ValueError if both
    are given.
    """
    values = [value for value in (options.pop(name, None), options.pop(other, None)) if value]
    if len(values) > 1:
        raise ValueError(f"give {name} or {other}, not both")
    return values[0] if values else None


def _send_in_parts(request: Any, **_event_fields: object) -> None:
    if isinstance(request.body, memoryview):
        request.body = _BodyParts(request.body)


def _refuse_truncated_answer(response_dict: Mapping[str, Any], operation_model: Any, **_event_fields: object) -> None:
    """Raises ConnectionError for an answer that broke off within its headers.

    Hazard: to http.client the end of a connection is the end of the headers, so that such an answer passes for a whole
    one without a body: a listing of nothing.
    """
    headers = response_dict["headers"]
    # A header may be cut within this word.
    is_chunked = str(headers.get("transfer-encoding", "")).lower().endswith("chunked")
    says_length = is_chunked or str(headers.get("content-length", "")).isdigit()
    method = operation_model.http["method"]
    # The body of a listing is never empty, even if nothing is listed.
    is_empty = method == "GET" and response_dict["body"] == b""
    if method in {"GET", "HEAD", "POST"} and (is_empty or not says_length):
        raise ConnectionError(BROKEN_OFF)


class _BodyParts:
    """A body that was signed as a whole and is sent in parts, so that the socket's timeout applies to each part."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def __len__(self) -> int:
        return self._content.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        starts = range(0, self._content.nbytes, _SEND_BYTES)
        return (self._content[start : start + _SEND_BYTES] for start in starts)

    def seek(self, _position: int) -> None:
        """Does nothing: botocore calls it before it sends again, and each iteration has all parts."""


def reader_of(body: Any) -> Callable[[memoryview], int]:
    """Returns a function that fills memory with the next bytes of a body and returns their number, 0 at the end. The
    function raises the errors of botocore's `readinto`, but may return 0 for a body that was cut short.

    It reads from the connection, because botocore and urllib3 copy every byte once more, which costs as much as
    receiving it. Where the connection is not found in the body, or the body is encoded, the function returned is
    botocore's `readinto`.
    """
    raw: Any = getattr(body, "_raw_stream", None)
    answer = getattr(raw, "_fp", None)
    is_known = type(body) is StreamingBody and hasattr(raw, "release_conn")
    if not is_known or not isinstance(answer, HTTPResponse) or answer.getheader("Content-Encoding"):
        own: Callable[[memoryview], int] = body.readinto
        return own

    def readinto(memory: memoryview) -> int:
        try:
            num_bytes = answer.readinto(memory)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=None, error=error) from error
        except (OSError, HTTPException) as error:
            raise ResponseStreamingError(error=error) from error
        if num_bytes and answer.isclosed():  # all was read, and the connection can serve another request
            raw.release_conn()
        return num_bytes

    return readinto
