"""Requests to S3, tried again where that may help: with jitter, up to a deadline, and together with everybody else who
was asked to slow down. It knows objects and parts of uploads by their keys only.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import IncompleteReadError

from bytecheckpoint.errors import TransferProgress
from bytecheckpoint.storage.backends.s3_client import BROKEN_OFF, S3Client
from bytecheckpoint.storage.backends.s3_errors import (
    S3_ERRORS,
    FailedRequestError,
    Service,
    is_missing,
    is_no_answer,
    is_past_the_end,
    is_throttled,
    is_transient,
)
from bytecheckpoint.storage.backends.s3_throttle import Brake
from bytecheckpoint.storage.credentials import showable_url

_FIRST_CONTACT_S = 5.0
"""How long a connection is tried to a service that has never answered: most likely there is none."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
_READ_BYTES = 256 << 10
"""At a time, from the connection to where it belongs. The client has these bytes once or twice in memory of its own."""

_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"\Abytes (?P<first>\d+)-(?P<last>\d+)/(?P<size>\d+|\*)\Z")

Answer = TypeVar("Answer")


class EndOfObjectError(Exception):
    """An object ends before the bytes that were asked for. `found_end` is its length."""

    def __init__(self, found_end: int) -> None:
        super().__init__(f"the object ends at byte {found_end}")
        self.found_end = found_end


class TooLongError(Exception):
    """An object has more bytes than were to be read."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the object has {num_bytes} bytes")
        self.num_bytes = num_bytes


class RangeIgnoredError(Exception):
    """A service gave something else than the bytes that were asked for."""


class RetryPolicy(NamedTuple):
    """How long a request is tried."""

    timeout_s: float
    """From its first attempt; an attempt that gets on is not interrupted."""
    stop: threading.Event
    """Set when nobody wants the answer any more."""


class S3Requests:
    """Requests about the objects of one bucket. Methods may be called from any thread.

    Raises FailedRequestError where a request was given up.
    """

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client.client
        self._more = client.more
        self.service = Service(showable_url(str(client.client.meta.endpoint_url)), bucket)
        self.has_checksums = client.client.meta.config.request_checksum_calculation != "when_required"
        self.refuses: set[str] = set()
        """The conditions of a write (`IfMatch`, `IfNoneMatch`) that the service is known not to take."""
        self._has_answered = client.has_answered
        self._has_given_up = False
        """Whether the last that is known is that a request was tried in vain for all of its time."""
        self._brake = Brake(f"{self.service.endpoint}/{bucket}")

    def send(self, operation: str, **parameters: Any) -> Mapping[str, Any]:
        """One attempt. `operation` is one of botocore's methods; raises S3_ERRORS."""
        model = self._client.meta.service_model.operation_model(self._client.meta.method_to_api_mapping[operation])
        more = {name: value for name, value in self._more.items() if name in model.input_shape.members}
        request = getattr(self._client, operation)
        answer: Mapping[str, Any] = request(**{**more, **parameters}, Bucket=self.service.bucket)
        return answer

    def call(self, operation: str, patience: RetryPolicy, **parameters: Any) -> Mapping[str, Any]:
        """A request that may be carried out more than once without harm."""
        return self.persist(lambda _: self.send(operation, **parameters), patience)

    def persist(self, attempt: Callable[[int], Answer], patience: RetryPolicy) -> Answer:
        """What `attempt` returns, which is called with 0, 1, ... until it does not raise one of S3_ERRORS."""
        started, number = time.monotonic(), 0
        while True:
            self._brake.hold(patience.stop, at_most_s=patience.timeout_s - (time.monotonic() - started))
            try:
                answer = attempt(number)
            except S3_ERRORS as error:
                number += 1
                pause_s = self._pause_after(error, number)
                left_s = self._limit_s(error, patience) - (time.monotonic() - started)
                if pause_s is None or pause_s > left_s or patience.stop.wait(pause_s):
                    seconds = time.monotonic() - started
                    self._has_given_up = pause_s is not None
                    raise FailedRequestError(error, num_attempts=number, seconds=seconds) from error
            else:
                self._has_answered.set()
                self._has_given_up = False
                return answer

    def _pause_after(self, error: Exception, number: int) -> float | None:
        """In seconds; None where another attempt is in vain."""
        if not is_no_answer(error):
            self._has_answered.set()
        if not is_transient(error):
            return None
        if is_throttled(error):
            self._brake.slow_down()
        longest_s = min(_FIRST_PAUSE_S * 2**number, _MAX_PAUSE_S)
        return random.uniform(_FIRST_PAUSE_S / 2, longest_s)  # noqa: S311 - spreads requests, keeps no secret

    def _limit_s(self, error: Exception, patience: RetryPolicy) -> float:
        is_nobody_there = is_no_answer(error) and not self._has_answered.is_set()
        # After an outage that ends a save there is still to be cleaned up, while others wait for this rank.
        is_hopeless = is_nobody_there or self._has_given_up
        return min(patience.timeout_s, _FIRST_CONTACT_S) if is_hopeless else patience.timeout_s

    def head(self, key: str, patience: RetryPolicy) -> Mapping[str, Any] | None:
        """What the service tells of an object; None where there is none."""
        try:
            return self.call("head_object", patience, Key=key)
        except FailedRequestError as failed:
            if is_missing(failed.error):
                return None
            raise

    def read_range(self, key: str, byte_offset: int, buffer: memoryview, patience: RetryPolicy) -> None:
        """Fills a flat buffer of at least one byte. What has arrived when a connection breaks is not asked for again.

        Raises EndOfObjectError and RangeIgnoredError, too.
        """
        progress = [0]
        try:
            self.persist(lambda _: self._read_on(key, byte_offset, buffer, progress), patience)
        except FailedRequestError as failed:
            if not is_past_the_end(failed.error):
                failed.moved = TransferProgress(progress[0], buffer.nbytes, failed.seconds)
                raise
            found = self.head(key, patience) or {}
            raise EndOfObjectError(int(found.get("ContentLength", 0))) from failed

    def read_object(self, key: str, patience: RetryPolicy, *, max_bytes: int) -> bytes:
        """All bytes of an object. After a broken connection the rest is read, if the object is still the same one.

        Raises TooLongError, too.
        """
        arrived = _Arrived()
        self.persist(lambda _: self._read_rest(key, arrived, max_bytes), patience)
        return bytes(arrived.content)

    def _read_rest(self, key: str, arrived: _Arrived, max_bytes: int) -> None:
        has_some = 0 < len(arrived.content) < arrived.num_bytes
        wanted = {"Range": f"bytes={len(arrived.content)}-"} if has_some and arrived.tag else {}
        answer = self.send("get_object", Key=key, **wanted)
        is_rest = bool(wanted) and answer["ResponseMetadata"]["HTTPStatusCode"] == _PARTIAL
        is_same = answer.get("ETag") == arrived.tag
        with closing(answer["Body"]) as body:
            if is_rest and not is_same:
                arrived.begin("", 0)
                raise ConnectionError(BROKEN_OFF)
            if not is_rest:
                arrived.begin(str(answer.get("ETag") or ""), int(answer.get("ContentLength") or 0))
            if arrived.num_bytes > max_bytes:
                raise TooLongError(arrived.num_bytes)
            while part := body.read(_READ_BYTES):
                arrived.content += part
                if len(arrived.content) > max_bytes:  # an answer in chunks gives no length
                    raise TooLongError(len(arrived.content))
        if arrived.num_bytes and len(arrived.content) != arrived.num_bytes:
            raise IncompleteReadError(actual_bytes=len(arrived.content), expected_bytes=arrived.num_bytes)

    def _read_on(self, key: str, byte_offset: int, buffer: memoryview, progress: list[int]) -> None:
        first, last = byte_offset + progress[0], byte_offset + buffer.nbytes - 1
        answer = self.send("get_object", Key=key, Range=f"bytes={first}-{last}")
        with closing(answer["Body"]) as body:
            _check_range(answer, first, last)
            while progress[0] < buffer.nbytes:
                num_bytes = body.readinto(buffer[progress[0] : progress[0] + _READ_BYTES])
                if num_bytes == 0:
                    raise IncompleteReadError(actual_bytes=progress[0], expected_bytes=buffer.nbytes)
                progress[0] += num_bytes


class _Arrived:
    """The bytes of one object that have arrived so far."""

    def __init__(self) -> None:
        self.begin("", 0)

    def begin(self, tag: str, num_bytes: int) -> None:
        """Starts again with another object: its ETag, and its length or 0 where that is unknown."""
        self.tag = tag
        self.num_bytes = num_bytes
        self.content = bytearray()


def _check_range(answer: Mapping[str, Any], first: int, last: int) -> None:
    num_bytes = answer.get("ContentLength")  # not of an answer in chunks
    if answer["ResponseMetadata"]["HTTPStatusCode"] != _PARTIAL:
        if first == 0 and num_bytes == last + 1:
            return  # the whole object was wanted, and some services say so
        raise RangeIgnoredError(f"bytes {first} to {last + 1} were asked for; the answer has the object's first bytes")
    found = _CONTENT_RANGE.match(str(answer.get("ContentRange", "")))
    if found is None or num_bytes not in {None, int(found["last"]) + 1 - int(found["first"])}:
        raise ConnectionError(BROKEN_OFF)
    if int(found["first"]) != first:
        raise RangeIgnoredError(f"bytes {first} to {last + 1} were asked for; the answer says {found[0]!r}")
    if int(found["last"]) < last:
        raise EndOfObjectError(int(found["size"]) if found["size"] != "*" else int(found["last"]) + 1)
