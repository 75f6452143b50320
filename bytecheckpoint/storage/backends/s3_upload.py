"""Upload of one object to S3: in one request, or in parts, several in flight, straight out of the memory of its
blocks. The object appears as a whole or not at all; parts of a failed upload are aborted if the service allows it.
Translates no errors.
"""

from __future__ import annotations

import base64
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bytecheckpoint.errors import TransferProgress
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends.s3_client import BROKEN_OFF
from bytecheckpoint.storage.backends.s3_errors import (
    S3_ERRORS,
    FailedRequestError,
    is_missing,
    is_no_upload,
    is_taken,
    is_transient,
    is_unreachable,
    is_unsupported,
    may_arrive,
)
from bytecheckpoint.storage.backends.s3_requests import RetryPolicy, S3Requests
from bytecheckpoint.storage.object_io import open_block, take_blocks

_MIN_PART_BYTES = 5 << 20
"""Least length of a part that S3 takes, except for the last part."""
_PART_BYTES = 16 << 20
_MAX_PARTS = 9000
"""S3 takes 10,000."""
_WRITER = "bytecheckpoint-write"
"""Metadata key for the id of the write that made an object: it tells a write whose answer was lost from another's."""
_CLEAN_UP_S = 10.0
_NUM_OWNER_CHECKS = 2
"""Attempts to read which write made an object before it counts as another's: a response may break off in its
headers."""


class TakenError(Exception):
    """Another writer has created the object, or has replaced or deleted the one that was to be replaced."""


class S3Target(NamedTuple):
    """An object to be written."""

    key: str
    is_new: bool
    """The name must be free."""
    writer: str
    """Unique id of this write."""


def new_target(key: str, *, replace: bool) -> S3Target:
    """Returns the target of one write, with a new random id."""
    return S3Target(key, is_new=not replace, writer=secrets.token_hex(16))


def send(
    requests: S3Requests, target: S3Target, blocks: Sequence[Block], num_bytes: int, *, in_flight: int, timeout_s: float
) -> None:
    """Publishes the object after all of its blocks have been sent as parts; an object of 16 MiB or less is copied into
    memory and sent in one request.

    `timeout_s` is the time for retries of each request, not of the whole upload.

    Up to `in_flight` blocks are entered at a time. Blocks that are too small or too many to be parts are copied into
    parts: this takes the memory of `in_flight` parts, each of 16 MiB or, if that is more, a 9,000th of the object, plus
    less than one block.

    Raises TakenError, FailedRequestError, and what a block's `content` raises.
    """
    policy = RetryPolicy(timeout_s)
    if num_bytes > _PART_BYTES:
        _MultipartUpload(requests, target, policy).send(_as_parts(blocks, num_bytes), in_flight=in_flight)
        return
    content = _copied(blocks, num_bytes)
    put = partial(
        requests.send,
        "put_object",
        Key=target.key,
        Body=content if content.nbytes else b"",
        Metadata={_WRITER: target.writer},
        **_checksum(requests, content),
    )
    _Publication(requests, target, policy, put).run()


_RETRY, _SEND_UNCONDITIONALLY, _CHECK_OWNER = "retry", "send unconditionally", "check owner"
_VERDICTS = {
    # kind of error: (after the first attempt, after a later one)
    "unsupported": (_SEND_UNCONDITIONALLY, _SEND_UNCONDITIONALLY),
    "misjudged": (_SEND_UNCONDITIONALLY, _SEND_UNCONDITIONALLY),
    "refused": (_CHECK_OWNER, _CHECK_OWNER),
    "transient": (_RETRY, _RETRY),
    "other": (_RETRY, _CHECK_OWNER),
}
"""Verdict on an error of the publishing request, by `_Publication._kind_of_error`.

- retry: `persist` tries a transient error again and gives up on any other.
- check owner: a success if the object there is this write's own. An earlier attempt, one of botocore's too, may have
  been carried out though its answer was lost.
"""


class _CurrentObject(NamedTuple):
    """The object that a name has now; both fields are empty if there is none."""

    etag: str
    writer: str


class _Publication:
    """The request that makes an object visible. It counts as a success if it was carried out, even without an answer.

    Where the service supports conditions, the name must be as it was before the first attempt: a request which arrives
    late, from a save that was given up long ago, then changes nothing.
    """

    def __init__(
        self, requests: S3Requests, target: S3Target, policy: RetryPolicy, request: Callable[..., object]
    ) -> None:
        self._requests = requests
        self._target = target
        self._policy = policy
        self._request = request
        self._replaced_etag = ""
        """ETag of the object that is to be replaced; empty if none was there."""
        self._unanswered: list[Exception] = []
        """Errors of attempts that may still be carried out."""

    def run(self) -> None:
        """Sends the request until the object is visible. Raises TakenError and FailedRequestError."""
        requests, target = self._requests, self._target
        if not target.is_new:
            self._replaced_etag = requests.persist(lambda _: self._current(), self._policy).etag
        try:
            requests.persist(self._attempt, self._policy)
        except FailedRequestError as failed:
            if self._is_refusal(failed.error):
                raise TakenError from failed
            failed.may_arrive = bool(self._unanswered)
            with suppress(FailedRequestError):
                if is_transient(failed.error) and self._is_own():
                    return
            raise
        if target.is_new and "IfNoneMatch" in requests.refuses and not self._is_own():
            raise TakenError

    def _attempt(self, number: int) -> None:
        """Makes one attempt, of which the first has the number 0. Raises TakenError and S3_ERRORS."""
        # Hazard: the object of an unanswered attempt may have been replaced since, and the data that it needs deleted.
        if number and not self._target.is_new:
            current = self._current()
            if current.writer == self._target.writer:
                return
            if current.etag != self._replaced_etag:
                # Hazard: an unanswered attempt without a condition replaces the current object when it arrives.
                raise self._unanswered[-1] if self._unanswered and not self._condition() else TakenError
        condition = self._condition()
        try:
            self._send(condition)
        except S3_ERRORS as error:
            verdict = _VERDICTS[self._kind_of_error(error, condition)][min(number, 1)]
            if verdict == _SEND_UNCONDITIONALLY:
                self._requests.refuses |= condition.keys()
                self._send({})
            elif verdict == _RETRY or not self._is_own():
                raise

    def _send(self, condition: Mapping[str, str]) -> None:
        """Sends the request once. Raises S3_ERRORS, and notes those after which it may still be carried out."""
        try:
            self._request(**condition)
        except S3_ERRORS as error:
            if may_arrive(error):
                self._unanswered.append(error)
            raise

    def _condition(self) -> dict[str, str]:
        condition = {"IfMatch": self._replaced_etag} if self._replaced_etag else {"IfNoneMatch": "*"}
        return {name: value for name, value in condition.items() if name not in self._requests.refuses}

    def _kind_of_error(self, error: Exception, condition: Mapping[str, str]) -> str:
        """Returns the key in _VERDICTS for an error. To see whether the refusal of a replacement is a mistake, looks up
        the object that is there now, which may raise S3_ERRORS.
        """
        if condition and is_unsupported(error):
            return "unsupported"
        if self._is_refusal(error):
            # A service that compares ETags otherwise refuses although the object is the one to be replaced.
            may_misjudge = "IfMatch" in condition and is_taken(error)
            return "misjudged" if may_misjudge and self._current().etag == self._replaced_etag else "refused"
        return "transient" if is_transient(error) else "other"

    def _is_refusal(self, error: Exception) -> bool:
        """Returns True if the condition did not hold: the name is taken, or the object to be replaced has changed."""
        return is_taken(error) or (bool(self._replaced_etag) and is_missing(error))

    def _current(self) -> _CurrentObject:
        """Returns the object that the name has now. Makes one attempt; raises S3_ERRORS."""
        try:
            found = self._requests.send("head_object", Key=self._target.key)
        except S3_ERRORS as error:
            if is_missing(error):
                return _CurrentObject("", "")
            raise
        if "ETag" not in found:
            raise ConnectionError(BROKEN_OFF)
        return _CurrentObject(str(found["ETag"]), str(found.get("Metadata", {}).get(_WRITER, "")))

    def _is_own(self) -> bool:
        """Returns True if this write has made the object that is there now. Raises FailedRequestError if that cannot be
        found out: a save that takes its own manifest for another's would delete the data of its checkpoint.
        """
        policy = replace(self._policy, timeout_s=min(self._policy.timeout_s, _CLEAN_UP_S))
        for _ in range(_NUM_OWNER_CHECKS):
            current = self._requests.persist(lambda _: self._current(), policy)
            if not current.etag or current.writer == self._target.writer:
                return bool(current.etag)
        return False


class _MultipartUpload:
    """An object that is sent in parts."""

    def __init__(self, requests: S3Requests, target: S3Target, policy: RetryPolicy) -> None:
        self._requests = requests
        self._target = target
        self._policy = policy
        self._upload_id = ""
        self._may_have_others = False
        """The service may have begun an upload whose answer was lost."""
        self._failures: list[FailedRequestError] = []
        """Failures of parts, in the order of time."""

    def send(self, parts: Sequence[Block], *, in_flight: int) -> None:
        """Uploads the parts, then publishes the object. If either fails, aborts the upload."""
        started = time.monotonic()
        numbers = {part.byte_offset: number for number, part in enumerate(parts, 1)}
        sent: dict[int, dict[str, object]] = {}

        def take(content: memoryview, byte_offset: int) -> None:
            number = numbers[byte_offset]
            sent[number] = self._send_part(number, content)

        def note_lost() -> None:
            self._may_have_others = True

        try:
            key, metadata = self._target.key, {_WRITER: self._target.writer}
            self._upload_id = begin_upload(self._requests, key, self._policy, on_lost=note_lost, Metadata=metadata)
            take_blocks(parts, take, num_threads=in_flight)
            listed = {"Parts": [sent[number] for number in sorted(sent)]}
            complete = partial(self._complete, MultipartUpload=listed)
            _Publication(self._requests, self._target, self._policy, complete).run()
        except FailedRequestError as failed:
            first = self._failures[0] if self._failures else failed
            done_bytes = sum(part.byte_length for part in parts if numbers[part.byte_offset] in sent)
            num_bytes = sum(part.byte_length for part in parts)
            first.progress = TransferProgress(done_bytes, num_bytes, time.monotonic() - started)
            self._abort(first)
            raise first from first.error
        except BaseException as error:
            self._abort(error)
            raise
        if self._may_have_others:
            abort_uploads_of(self._requests, self._target.key)

    def _send_part(self, number: int, content: memoryview) -> dict[str, object]:
        """Sends a part, and returns its entry in the request that completes the upload. Raises FailedRequestError, and
        then lets no part of this upload be tried again.
        """
        checksum = _checksum(self._requests, content)

        def attempt(_number: int) -> dict[str, object]:
            answer = self._send("upload_part", PartNumber=number, Body=content, **checksum)
            if "ETag" not in answer:
                raise ConnectionError(BROKEN_OFF)
            checksums = {name: value for name, value in answer.items() if name in checksum}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        try:
            return self._requests.persist(attempt, self._policy)
        except FailedRequestError as failed:
            self._failures.append(failed)
            self._policy.stop.set()  # ends the pauses of other parts before their next attempts
            raise

    def _complete(self, **parameters: Any) -> None:
        # Hazard: S3 answers 200 before it puts the parts together, and may break off after that. If they were, the
        # next attempt finds the object.
        if "ETag" not in self._send("complete_multipart_upload", **parameters):
            raise ConnectionError("the answer to the end of the upload names no object")

    def _send(self, operation: str, **parameters: Any) -> Any:
        return self._requests.send(operation, Key=self._target.key, UploadId=self._upload_id, **parameters)

    def _abort(self, error: BaseException) -> None:
        """Aborts the upload. If that fails, only adds a note to the error."""
        try:
            if self._upload_id:
                self._requests.persist(lambda _: self._send("abort_multipart_upload"), RetryPolicy(_CLEAN_UP_S))
        except FailedRequestError as failed:
            if not is_no_upload(failed.error):
                error.add_note("parts that were uploaded may be left, which `bcp gc` removes")
        if self._may_have_others:
            abort_uploads_of(self._requests, self._target.key)


def begin_upload(
    requests: S3Requests, key: str, policy: RetryPolicy, *, on_lost: Callable[[], None], **parameters: Any
) -> str:
    """Returns the id of a new upload. `on_lost` is called if the service may have begun one whose id did not arrive."""

    def attempt(_number: int) -> str:
        try:
            answer = requests.send("create_multipart_upload", Key=key, **parameters)
            if "UploadId" not in answer:
                raise ConnectionError(BROKEN_OFF)
            return str(answer["UploadId"])
        except S3_ERRORS as error:
            if is_transient(error) and not is_unreachable(error):
                on_lost()
            raise

    return requests.persist(attempt, policy)


def abort_uploads_of(requests: S3Requests, key: str) -> None:
    """Aborts the uploads of an object, as far as the service allows. Hazard: all of them, so no other writer may use
    its name.
    """
    policy = RetryPolicy(_CLEAN_UP_S)
    found: Mapping[str, Any] = {}
    with suppress(FailedRequestError):
        found = requests.call("list_multipart_uploads", policy, Prefix=key)
    for upload_id in [other["UploadId"] for other in found.get("Uploads", ()) if other["Key"] == key]:
        with suppress(FailedRequestError):  # it is gone already if the answer to the first attempt was lost
            requests.call("abort_multipart_upload", policy, Key=key, UploadId=upload_id)


def _checksum(requests: S3Requests, content: memoryview) -> dict[str, str]:
    """Returns the parameter with which the service compares the bytes it received; none if the client sends none."""
    if not requests.has_checksums:
        return {}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()}


def _as_parts(blocks: Sequence[Block], num_bytes: int) -> Sequence[Block]:
    """Returns the blocks themselves if they can be parts, so that nothing is copied; else neighbours joined."""
    if len(blocks) <= _MAX_PARTS and all(block.byte_length >= _MIN_PART_BYTES for block in blocks[:-1]):
        return blocks
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
    groups: list[list[Block]] = []
    for block in blocks:
        if not groups or block.byte_offset - groups[-1][0].byte_offset >= part_bytes:
            groups.append([])
        groups[-1].append(block)
    return [_join(group) for group in groups]


def _join(group: Sequence[Block]) -> Block:
    num_bytes = sum(block.byte_length for block in group)
    return Block(group[0].byte_offset, num_bytes, lambda: nullcontext(_copied(group, num_bytes)))


def _copied(blocks: Sequence[Block], num_bytes: int) -> memoryview:
    """Returns the bytes of the blocks, opened one at a time: memory that blocks share may not suffice for all."""
    memory = memoryview(bytearray(num_bytes))
    start = blocks[0].byte_offset if blocks else 0
    for block in blocks:
        with open_block(block) as content:
            memory[block.byte_offset - start :][: block.byte_length] = content
    return memory
