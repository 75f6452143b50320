"""Requests to S3, retried if that may help: with jitter, up to a deadline, and after a pause of all threads once the
service has asked for fewer requests. Knows objects and parts of uploads by their keys only.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from botocore.exceptions import IncompleteReadError

from bytecheckpoint.errors import TransferProgress
from bytecheckpoint.storage.backends.s3_client import BROKEN_OFF, S3Client, reader_of
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
from bytecheckpoint.storage.credentials import showable_url

_FIRST_CONTACT_S = 5.0
"""Limit for connecting to a service that has never answered: most likely there is none."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 2.0
_FORGET_BACKOFF_S = 60.0
"""After this long without SlowDown the next backoff is a short one again."""
_READ_BYTES = 256 << 10
"""Length of one read from the connection. If the connection breaks, at most as much is received again. If bytes
cannot be received in place, the client holds one or two more copies of this length."""

_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"\Abytes (?P<first>\d+)-(?P<last>\d+)/(?P<size>\d+|\*)\Z")

Answer = TypeVar("Answer")


class EndOfObjectError(Exception):
    """An object ends before the range that was requested. `found_end` is its length."""

    def __init__(self, found_end: int) -> None:
        super().__init__(f"the object ends at byte {found_end}")
        self.found_end = found_end


class TooLongError(Exception):
    """An object has more bytes than were to be read."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the object has {num_bytes} bytes")
        self.num_bytes = num_bytes


class RangeIgnoredError(Exception):
    """A service gave something else than the range that was requested."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of the attempts at a request."""

    timeout_s: float
    """Time for retries, from the first attempt; an attempt that makes progress is not interrupted."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the answer is no longer needed."""


class ServiceBackoff:
    """A pause of all requests of a store after a SlowDown answer. Methods may be called from any thread.

    Measured with 8 processes of 8 threads, 1200 reads and a server that takes 60 a second: 24 s and 334 SlowDown
    answers with these pauses; 25 s and 1605 without any; 75 to 87 s and about 200 with pauses of up to 20 s, whether
    each process made its own or all shared one through a file of the host.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._go_on_s = 0.0
        """End of the pause, on the monotonic clock."""
        self._pause_s = 0.0

    def slow_down(self) -> None:
        """Begins a pause unless one is on already: of 0.5 s at first, then twice as long each time, up to 2 s."""
        now = time.monotonic()
        with self._lock:
            if now >= self._go_on_s:
                is_first = not self._pause_s or now > self._go_on_s + _FORGET_BACKOFF_S
                self._pause_s = _FIRST_BACKOFF_S if is_first else min(2 * self._pause_s, _MAX_BACKOFF_S)
                self._go_on_s = now + self._pause_s

    def hold(self, stop: threading.Event, *, at_most_s: float) -> None:
        """Waits until a random time after the end of the pause, for `at_most_s` at most. Returns at once if there is no
        pause, or when `stop` is set.
        """
        left_s = self._go_on_s - time.monotonic()
        if left_s > 0:
            late_s = random.uniform(0, self._pause_s / 2)  # noqa: S311 - spreads requests, keeps no secret
            stop.wait(max(0.0, min(left_s + late_s, at_most_s)))


class S3Requests:
    """Requests about the objects of one bucket. Methods may be called from any thread.

    Raises FailedRequestError if a request was given up.
    """

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client.client
        self._extra = client.extra_parameters
        self.service = Service(showable_url(str(client.client.meta.endpoint_url)), bucket)
        self.has_checksums = client.client.meta.config.request_checksum_calculation != "when_required"
        self.refuses: set[str] = set()
        """Operations and conditions of a write (`IfMatch`, `IfNoneMatch`) that the service is known not to support."""
        self._has_answered = client.has_answered
        self._has_given_up = False
        """True if the last request to end was given up although a retry might have helped."""
        self._backoff = ServiceBackoff()

    def send(self, operation: str, **parameters: Any) -> Mapping[str, Any]:
        """Makes one attempt. `operation` is one of botocore's methods; raises S3_ERRORS."""
        model = self._client.meta.service_model.operation_model(self._client.meta.method_to_api_mapping[operation])
        extra = {name: value for name, value in self._extra.items() if name in model.input_shape.members}
        request = getattr(self._client, operation)
        answer: Mapping[str, Any] = request(**{**extra, **parameters}, Bucket=self.service.bucket)
        return answer

    def call(self, operation: str, policy: RetryPolicy, **parameters: Any) -> Mapping[str, Any]:
        """Sends a request that may be carried out more than once without harm."""
        return self.persist(lambda _: self.send(operation, **parameters), policy)

    def persist(self, attempt: Callable[[int], Answer], policy: RetryPolicy) -> Answer:
        """Calls `attempt` with 0, 1, ... until it raises none of S3_ERRORS, and returns its result.

        Raises FailedRequestError if another attempt would be in vain, the time is over, or `policy.stop` is set.
        """
        started, number = time.monotonic(), 0
        while True:
            self._backoff.hold(policy.stop, at_most_s=policy.timeout_s - (time.monotonic() - started))
            try:
                answer = attempt(number)
            except S3_ERRORS as error:
                number += 1
                pause_s = self._pause_after(error, number)
                left_s = self._limit_s(error, policy) - (time.monotonic() - started)
                if pause_s is None or pause_s > left_s or policy.stop.wait(pause_s):
                    seconds = time.monotonic() - started
                    self._has_given_up = pause_s is not None
                    raise FailedRequestError(error, num_attempts=number, seconds=seconds) from error
            else:
                self._has_answered.set()
                self._has_given_up = False
                return answer

    def _pause_after(self, error: Exception, number: int) -> float | None:
        """Returns the pause before the next attempt, in seconds; None if another attempt would be in vain. Notes that
        the service has answered, and slows all requests down if it asks for that.
        """
        if not is_no_answer(error):
            self._has_answered.set()
        if not is_transient(error):
            return None
        if is_throttled(error):
            self._backoff.slow_down()
        longest_s = min(_FIRST_PAUSE_S * 2 ** min(number, 100), _MAX_PAUSE_S)  # no float holds 2**1024
        return random.uniform(_FIRST_PAUSE_S / 2, longest_s)  # noqa: S311 - spreads requests, keeps no secret

    def _limit_s(self, error: Exception, policy: RetryPolicy) -> float:
        """Returns how long a request may be retried, in seconds from its first attempt: `timeout_s`, or
        _FIRST_CONTACT_S if that is less and one of these holds.

        - The service has never answered this process, and cannot be reached: most likely there is none.
        - The last request to end was given up although a retry might have helped. A save that an outage has ended
          still cleans up, while other ranks wait for this one.
        """
        is_hopeless = self._has_given_up or (is_no_answer(error) and not self._has_answered.is_set())
        return min(policy.timeout_s, _FIRST_CONTACT_S) if is_hopeless else policy.timeout_s

    def head(self, key: str, policy: RetryPolicy) -> Mapping[str, Any] | None:
        """Returns the headers of an object; None if it does not exist."""
        try:
            return self.call("head_object", policy, Key=key)
        except FailedRequestError as failed:
            if is_missing(failed.error):
                return None
            raise

    def read_range(self, key: str, byte_offset: int, buffer: memoryview, policy: RetryPolicy) -> None:
        """Fills a flat buffer of at least one byte. Of the bytes received before a connection broke, at most
        _READ_BYTES are requested again.

        Also raises EndOfObjectError and RangeIgnoredError.
        """
        filled_bytes = 0

        def attempt(_number: int) -> None:
            nonlocal filled_bytes
            first, last = byte_offset + filled_bytes, byte_offset + buffer.nbytes - 1
            answer = self.send("get_object", Key=key, Range=f"bytes={first}-{last}")
            with closing(answer["Body"]) as body:
                _check_range(answer, first, last)
                readinto = reader_of(body)
                while filled_bytes < buffer.nbytes:
                    num_bytes = readinto(buffer[filled_bytes : filled_bytes + _READ_BYTES])
                    if num_bytes == 0:
                        raise IncompleteReadError(actual_bytes=filled_bytes, expected_bytes=buffer.nbytes)
                    filled_bytes += num_bytes

        try:
            self.persist(attempt, policy)
        except FailedRequestError as failed:
            if not is_past_the_end(failed.error):
                failed.progress = TransferProgress(filled_bytes, buffer.nbytes, failed.seconds)
                raise
            found = self.head(key, policy) or {}
            raise EndOfObjectError(int(found.get("ContentLength", 0))) from failed

    def read_object(self, key: str, policy: RetryPolicy, *, max_bytes: int) -> bytes:
        """Returns all bytes of an object. After a broken connection the rest is read, if it is still the same object.

        Also raises TooLongError.
        """
        partial = _PartialObject()
        self.persist(lambda _: self._read_rest(key, partial, max_bytes), policy)
        return bytes(partial.content)

    def _read_rest(self, key: str, partial: _PartialObject, max_bytes: int) -> None:
        """Makes one attempt to read what `partial` lacks, or all of the object if the service sends all. If it sends
        the rest of another object, empties `partial` and raises ConnectionError.
        """
        has_some = 0 < len(partial.content) < partial.num_bytes
        range_header = {"Range": f"bytes={len(partial.content)}-"} if has_some and partial.tag else {}
        answer = self.send("get_object", Key=key, **range_header)
        is_rest = bool(range_header) and answer["ResponseMetadata"]["HTTPStatusCode"] == _PARTIAL
        with closing(answer["Body"]) as body:
            if is_rest and answer.get("ETag") != partial.tag:
                partial.restart("", 0)
                raise ConnectionError(BROKEN_OFF)
            if not is_rest:
                partial.restart(str(answer.get("ETag") or ""), int(answer.get("ContentLength") or 0))
            if partial.num_bytes > max_bytes:
                raise TooLongError(partial.num_bytes)
            while part := body.read(_READ_BYTES):
                partial.content += part
                if len(partial.content) > max_bytes:  # a chunked answer gives no length
                    raise TooLongError(len(partial.content))
        if partial.num_bytes and len(partial.content) != partial.num_bytes:
            raise IncompleteReadError(actual_bytes=len(partial.content), expected_bytes=partial.num_bytes)


class _PartialObject:
    """The bytes of one object that have been received so far."""

    def __init__(self) -> None:
        self.restart("", 0)

    def restart(self, tag: str, num_bytes: int) -> None:
        """Begins again with another object: its ETag, and its length or 0 if that is unknown."""
        self.tag = tag
        self.num_bytes = num_bytes
        self.content = bytearray()


def _check_range(answer: Mapping[str, Any], first: int, last: int) -> None:
    """Raises EndOfObjectError, RangeIgnoredError or ConnectionError for an answer that does not begin with byte `first`
    of an object that has bytes up to `last`. It may have fewer bytes, as RFC 9110 allows: the rest is asked for again.
    """
    num_bytes = answer.get("ContentLength")  # missing from a chunked answer
    if answer["ResponseMetadata"]["HTTPStatusCode"] != _PARTIAL:
        if first == 0 and num_bytes == last + 1:
            return  # some services answer so if the range is the whole object
        raise RangeIgnoredError(f"bytes {first} to {last + 1} were asked for; the answer has the object's first bytes")
    found = _CONTENT_RANGE.match(str(answer.get("ContentRange", "")))
    if found is None or num_bytes not in {None, int(found["last"]) + 1 - int(found["first"])}:
        raise ConnectionError(BROKEN_OFF)
    if int(found["first"]) != first:
        raise RangeIgnoredError(f"bytes {first} to {last + 1} were asked for; the answer says {found[0]!r}")
    if found["size"] != "*" and int(found["size"]) <= last:
        raise EndOfObjectError(int(found["size"]))
